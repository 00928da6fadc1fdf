"""A script under the script runner behaves as under Python: real processes, from the zipapp."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Callable, NamedTuple

import pytest


class Result(NamedTuple):
    """The exit code and the output of a process."""

    code: int
    out: bytes
    err: bytes


class Note(NamedTuple):
    """A report of the script runner about the end of the script."""

    code: int
    message: str


@pytest.fixture
def run_script(
    zipapp: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Result, list[Note]]]:
    """A function that runs a script under the script runner."""

    def run(*args: str, cwd: Path) -> tuple[Result, list[Note]]:
        note, end = os.pipe()
        node_dir = tmp_path_factory.mktemp("node")
        done = subprocess.run(
            [sys.executable, zipapp, "--script", *args],
            cwd=cwd,
            env={
                **os.environ,
                "CLOUDJOB_END_FD": str(end),
                "CLOUDJOB_NODE_DIR": str(node_dir),
                "OMPI_COMM_WORLD_RANK": "0",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[end],
            timeout=180,
            check=False,
        )
        os.close(end)
        os.set_blocking(note, False)
        text = os.read(note, 65536).decode()
        os.close(note)
        notes = []
        if text:
            code, at_s, message = text.split(" ", 2)
            assert abs(time.time() - float(at_s)) < 60
            notes.append(Note(int(code), message))
        return Result(done.returncode, done.stdout, done.stderr), notes

    return run


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import os\nos.system('python -c \"raise SystemExit(3)\"')", 3),
        ("import os, sys\nos.system('mpirun() { exit 4; }; mpirun')\nsys.exit(0)", 4),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'exit(5)'])", 5),
        ("import os\nos.system('python -c \"import os; os.kill(os.getpid(), 9)\"')", 137),
        ("import os\nos.system('false')\nos.system('python -c 1')", 0),
        ("import os, sys\nos.system('python -c \"exit(3)\"')\nsys.exit(7)", 7),
    ],
)
@pytest.mark.parametrize("strict", ["", "1"])
def test_an_ignored_exit_code_of_a_nested_launcher_is_the_scripts_with_strict(
    run_script: RunScript,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    code: int,
    strict: str,
):
    if strict:
        monkeypatch.setenv("CLOUDJOB_STRICT", strict)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "t.py").write_text(script)

    result, notes = run_script("t.py", cwd=tmp_path)

    expected = code if strict or code == 7 else 0
    assert (result.code, [note.code for note in notes]) == (
        expected,
        [expected] if expected else [],
    )


def plain(*args: str, cwd: Path) -> Result:
    """Run a script under plain Python."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        timeout=180,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("end", ["", "import sys\nsys.exit(3)\n"], ids=["success", "failure"])
def test_modules_beside_the_script_do_not_replace_those_of_the_standard_library_for_us(
    run_script: RunScript, tmp_path: Path, end: str
):
    """A project may have a ``signal.py`` of its own."""
    for name in ("contextlib", "re", "signal", "subprocess"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the project')\n")
    (tmp_path / "t.py").write_text(f"print('trained')\n{end}")

    result, _ = run_script("t.py", cwd=tmp_path)

    assert result == plain("t.py", cwd=tmp_path) == Result(3 if end else 0, b"trained\n", b"")


RunScript = Callable[..., tuple[Result, list[Note]]]

SAME = {
    "main": """
        import sys
        print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__, __doc__)
        print(sys.modules["__main__"].__file__, __builtins__ is __import__("builtins"))
        print(sorted(name for name in globals() if name != "__annotations__"))
        print([name for name in sys.modules if "jobentry" in name])
        print([type(each).__name__ for each in sys.meta_path])
        """,
    "no module of ours": """
        try:
            import jobentry.rank.wrapper
        except ImportError as error:
            print(error)
        """,
    "annotations": """
        x: int = 1
        print(__annotations__)
        """,
    "future": """
        '''A docstring.'''
        from __future__ import annotations
        def f(x: not_defined) -> None: ...
        print(f.__annotations__, __doc__)
        """,
    "no future": """
        def f(x: int) -> None: ...
        print(f.__annotations__)
        """,
    "pickle": """
        import pickle
        class A:
            pass
        print(pickle.dumps(A))
        print(type(pickle.loads(pickle.dumps(A()))) is A)
        """,
    "import beside": """
        import beside
        print(beside.__file__)
        """,
    "source": """
        import inspect
        def f():
            return 1
        print(inspect.getsource(f), inspect.getfile(f))
        """,
    **{
        method: f"""
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(pool.map(double, [1, 2]))
        """
        for method in ("spawn", "forkserver", "fork")
    },
    "fork exit": """
        import os, sys
        child = os.fork()
        if not child:
            sys.exit(5)
        print(os.waitpid(child, 0)[1] >> 8)
        """,
    "fork error": """
        import os, sys
        child = os.fork()
        if not child:
            raise ValueError("child")
        print(os.waitpid(child, 0)[1] >> 8)
        """,
    "atexit": """
        import atexit
        atexit.register(print, "last")
        print("first")
        """,
    "thread": """
        import threading, time
        def work():
            time.sleep(0.2)
            print("thread")
        threading.Thread(target=work).start()
        print("main")
        """,
    "exit": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit false": "import sys; sys.exit(False)",
    "no end of line": "print(1)",
    "nothing": "",
}

FAILURES = {
    "exit 3": ("import sys; print('x'); sys.exit(3)", "sys.exit(3)"),
    "wrong argument": (
        "import argparse; argparse.ArgumentParser(prog='x').parse_args(['--foo'])",
        "sys.exit(2): error: unrecognized arguments: --foo",
    ),
    "exit while handling an error": (
        """
        import sys
        try:
            int("one\\ntwo")
        except ValueError as error:
            print(error)
            sys.exit(4)
        """,
        "sys.exit(4) while handling ValueError: invalid literal for int()",
    ),
    "exit while handling an error that cannot be shown": (
        """
        class Unprintable(Exception):
            def __str__(self): return 1 / 0
        try:
            raise Unprintable
        finally:
            raise SystemExit(5)
        """,
        "sys.exit(5) while handling Unprintable",
    ),
    "exit of nothing": (
        """
        try:
            1 / 0
        except ZeroDivisionError:
            raise SystemExit(6) from None
        """,
        "sys.exit(6)",
    ),
    "exit text": ("import sys; sys.exit('text')", "sys.exit('text')"),
    "exit 259": ("import sys; sys.exit(256 + 3)", "sys.exit(259)"),
    "exit -1": ("import sys; sys.exit(-1)", "sys.exit(-1)"),
    "exit true": ("import sys; sys.exit(True)", "sys.exit(True)"),
    "exit list": ("import sys; sys.exit([1])", "sys.exit([1])"),
    "raise exit": ("raise SystemExit(4)", "sys.exit(4)"),
    "error": (
        """
        def f():
            raise ValueError("one\\ntwo")
        f()
        """,
        "ValueError: one",
    ),
    "error without text": ("raise KeyError", "KeyError"),
    "error chained": (
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("no") from error
        """,
        "RuntimeError: no",
    ),
    "error in an import": ("import broken", "ZeroDivisionError: division by zero"),
    "error of no module": (
        "import nowhere_to_be_found",
        f"ModuleNotFoundError: No module named 'nowhere_to_be_found' (Python: {sys.executable})",
    ),
    "generator exit": ("raise GeneratorExit('x')", "GeneratorExit: x"),
    "exit in a function": (
        """
        import atexit, sys
        class Closing:
            def __del__(self):
                print("closed")
        def f():
            closing = Closing()
            sys.exit(3)
        atexit.register(print, "at exit")
        f()
        """,
        "sys.exit(3)",
    ),
    "own hook": (
        """
        import sys
        def hook(kind, error, traceback):
            print("hook", kind.__name__, error, traceback.tb_lineno, file=sys.stderr)
        sys.excepthook = hook
        raise ValueError("x")
        """,
        "ValueError: x",
    ),
    "not utf-8": ("import sys; raise ValueError('\\udcff')", "ValueError: \\udcff"),
}
# Other Pythons have other words for a bad hook, and here no click.
OF_CPYTHON = {
    "failing hook": (
        """
        import atexit, sys
        def hook(kind, error, traceback):
            print(sys.exc_info(), error.__context__, file=sys.stderr)
            raise KeyError("in the hook")
        sys.excepthook = hook
        atexit.register(lambda: print(sys.exc_info(), repr(sys.last_value)))
        raise ValueError("x")
        """,
        "ValueError: x",
    ),
    "no hook": ("import sys; del sys.excepthook; raise ValueError('x')", "ValueError: x"),
    "wrong argument of click": (
        """
        import click
        @click.command(name="x")
        @click.option("--rate", type=float)
        def main(rate): pass
        main(["--rate", "fast"], prog_name="x")
        """,
        "sys.exit(2): error: Invalid value for '--rate'",
    ),
}
if sys.implementation.name == "cpython":
    FAILURES.update(OF_CPYTHON)


def write_script(folder: Path, text: str, name: str = "x.py") -> str:
    """Write a script, without its indentation here, and the modules that it may import."""
    import textwrap

    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "beside.py").touch()
    (folder / "code" / "broken.py").write_text("1 / 0\n")
    (folder / "code" / name).write_text(textwrap.dedent(text).lstrip("\n"))
    return "code/" + name


def interpreters() -> list[str]:
    """Return one CPython of each version from 3.8 on that is on PATH or that pyenv has."""
    paths = {}
    if sys.implementation.name == "cpython":
        paths[sys.version_info[1]] = sys.executable
    for minor in range(8, 30):
        # A shim of pyenv on PATH may be there without being chosen.
        installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))
        path = str(installed[-1]) if installed else shutil.which(f"python3.{minor}")
        if path:
            paths.setdefault(minor, path)
    return [paths[minor] for minor in sorted(paths)]


GLOBALS = """
import sys
names = list(globals())
for name in names:
    print(name, repr(globals()[name]) if name not in ("__annotate__", "__loader__") else "")
print(vars(__loader__), type(__loader__))
x: int = 1
if x:
    y: "str" = "a"
names = [name for name in globals() if name != "name"]
print(names)
import builtins, dataclasses, inspect, linecache, multiprocessing, os, pickle, typing, warnings
main = sys.modules["__main__"]
print(main, vars(main) is globals(), typing.get_type_hints(main))
print(getattr(main, "__annotations__", "none"))

@dataclasses.dataclass
class Point:
    a: int = 1
    b: "Point" = None

class Pair(typing.NamedTuple):
    first: int

print(typing.get_type_hints(Point), typing.get_type_hints(Pair), inspect.signature(Point))
print(pickle.dumps(Point()), pickle.loads(pickle.dumps(Point())), inspect.getsource(Point))
print(inspect.getsourcefile(Point), inspect.getfile(main), linecache.getline(__file__, 2))
print(sys.argv, sys.path, getattr(sys, "orig_argv", [])[1:], sys.flags, sys.warnoptions)
print(sys.meta_path, sys.path_hooks, [path for path in sys.path_importer_cache if "entry" in path])
warnings.warn("a warning")
os.chdir("/")
print(__loader__.get_source("__main__") if sys.version_info >= (3, 9) else "")
if __name__ == "__main__":
    with multiprocessing.Pool(1) as pool:
        print(multiprocessing.get_start_method(), pool.map(repr, [Point()]))
1 / 0
"""


@pytest.mark.parametrize("interpreter", interpreters(), ids=lambda path: path)
@pytest.mark.parametrize("script", ["x.py", "code/x.py", "linked.py"])
def test_the_globals_of_a_script_are_those_of_each_python(
    tmp_path: Path, zipapp: str, interpreter: str, script: str
):
    write_script(tmp_path, GLOBALS)
    (tmp_path / "x.py").write_text(GLOBALS)
    (tmp_path / "linked.py").symlink_to("code/x.py")
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    with zipfile.ZipFile(zipapp) as archive:
        archive.extractall(node_dir / "entry")
    # Python adds the real folder of a program to its path.
    (tmp_path / "link").symlink_to("node")
    unpacked = str(tmp_path / "link/entry/__main__.py")
    results = []
    for args in ([script], [zipapp, "--script", script], [unpacked, "--script", script]):
        done = subprocess.run(
            [interpreter, *args, "-x", "a b"],
            cwd=tmp_path,
            env={**os.environ, "CLOUDJOB_NODE_DIR": str(node_dir), "OMPI_COMM_WORLD_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=180,
            check=False,
        )
        out = re.sub(rb"0x[0-9a-f]+", b"0x", done.stdout)
        results.append((done.returncode, out.decode().splitlines()))

    assert results[1] == results[0]
    assert results[2] == results[0]
    assert results[0][0] == 1


@pytest.mark.parametrize("name", SAME)
def test_a_script_runs_as_under_plain_python(tmp_path: Path, run_script: RunScript, name: str):
    script = write_script(tmp_path, SAME[name])

    result, notes = run_script(script, "-x", "a b", cwd=tmp_path)

    assert result == plain(script, "-x", "a b", cwd=tmp_path)
    assert (result.code, notes) == (0, [])


@pytest.mark.parametrize("name", FAILURES)
def test_a_script_fails_as_under_plain_python(tmp_path: Path, run_script: RunScript, name: str):
    text, message = FAILURES[name]
    script = write_script(tmp_path, text)

    result, notes = run_script(script, cwd=tmp_path)
    expected = plain(script, cwd=tmp_path)

    assert result == expected
    assert notes == [Note(expected.code, notes[0].message)]
    assert notes[0].message.startswith(message)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfprint('\xc3\xa4')\n",
        b"# -*- coding: latin-1 -*-\nprint('\xe4')\n",
        b"#!/usr/bin/python\n# coding: latin-1\nprint('\xe4')\r\n",
        b"print('a')\r\nprint('b')\r\n",
        b"print('a')\rprint('b')\r",
    ],
    ids=["bom", "cookie", "cookie on line 2", "crlf", "cr"],
)
def test_source_encodings_and_line_ends_are_read_as_by_python(
    tmp_path: Path, run_script: RunScript, data: bytes
):
    (tmp_path / "x.py").write_bytes(data)

    result, _ = run_script("x.py", cwd=tmp_path)

    assert result == plain("x.py", cwd=tmp_path)
    assert result.code == 0


@pytest.mark.parametrize(
    "data", [b"print(\n", b"x = = 1\n", b"def f():\nx\n", b"'\xff'\n", b"# coding: nowhere\n"]
)
def test_a_syntax_error_is_reported_as_by_python(
    tmp_path: Path, run_script: RunScript, data: bytes
):
    """The traceback has no frame of cloudjob; the message differs only for undecodable bytes."""
    (tmp_path / "x.py").write_bytes(data)

    result, notes = run_script("x.py", cwd=tmp_path)
    expected = plain("x.py", cwd=tmp_path)

    assert result.code == expected.code == 1
    if b"\xff" in data or b"nowhere" in data:
        assert result.err.splitlines()[-1].startswith(b"SyntaxError: ")
    else:
        assert result.err == expected.err
    assert b"jobentry" not in result.err
    assert notes[0].message.startswith(("SyntaxError: ", "IndentationError: "))


def test_a_missing_script_is_reported(tmp_path: Path, run_script: RunScript):
    result, notes = run_script("no.py", cwd=tmp_path)

    assert result.code != 0
    assert b"no.py" in result.err
    assert b"jobentry.pyz" not in result.err
    assert len(notes) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_a_script_is_ended_by_signals_as_with_python(
    tmp_path: Path, zipapp: str, number: int, until: Callable[..., None]
):
    # The line that creates the folder `up` also sleeps, by calls without a Python frame: wherever
    # SIGINT arrives after that, the tracebacks differ only in what they underline. It sleeps
    # repeatedly, as SIGINT just before a sleep does not interrupt it.
    loop = "while not time.sleep(0.1): os.access('up', os.F_OK) or os.mkdir('up')"
    script = write_script(tmp_path, f"import os, time\n{loop}")
    errors = []
    for args in ([zipapp, "--script", script], [script]):
        with subprocess.Popen(
            [sys.executable, *args], cwd=tmp_path, stderr=subprocess.PIPE
        ) as process:
            until((tmp_path / "up").exists)
            process.send_signal(number)
            assert process.wait(180) == -number
            (tmp_path / "up").rmdir()
            assert process.stderr is not None
            errors.append(re.sub(rb"\n *\^+", b"", process.stderr.read()))

    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "text",
    [
        "atexit.register(time.sleep, 600); sys.exit(3)",
        "atexit.register(time.sleep, 600); raise ValueError",
        "signal.signal(signal.SIGALRM, print); atexit.register(time.sleep, 600); sys.exit(3)",
        "threading.Thread(target=time.sleep, args=(600,)).start(); sys.exit(3)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]);"
        "atexit.register(time.sleep, 600); sys.exit(3)",
    ],
)
def test_a_failed_script_that_hangs_is_killed(tmp_path: Path, run_script: RunScript, text: str):
    script = write_script(tmp_path, "import atexit, signal, sys, threading, time\n" + text)

    result, notes = run_script(script, cwd=tmp_path)

    # A script that is not killed runs for 10 minutes, and `run_script` fails after 3 minutes.
    assert (len(notes), notes[0].code) == (1, 3 if "sys.exit" in text else 1)
    assert result.code in (-signal.SIGALRM, notes[0].code)


def test_a_successful_script_may_take_long_to_exit(tmp_path: Path, run_script: RunScript):
    script = write_script(
        tmp_path, "import atexit, sys, time\natexit.register(time.sleep, 1)\nsys.exit(0)"
    )

    assert run_script(script, cwd=tmp_path) == (Result(0, b"", b""), [])


def test_a_failed_script_runs_its_exit_handlers(tmp_path: Path, run_script: RunScript):
    script = write_script(
        tmp_path,
        "import atexit, sys\natexit.register(print, 'saved')\nprint('x', end='')\nsys.exit(3)",
    )

    assert run_script(script, cwd=tmp_path)[0] == Result(3, b"xsaved\n", b"")


def test_the_descriptor_for_reports_is_not_inherited(tmp_path: Path, run_script: RunScript):
    script = write_script(
        tmp_path,
        """
        import os, subprocess, sys
        print([name for name in os.environ if name.startswith("CLOUDJOB_END")])
        sys.stdout.flush()
        subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False)
        """,
    )
    result, _ = run_script(script, cwd=tmp_path)

    assert result.out.startswith(b"[]\n")
    # Standard output and standard error; a third pipe would be the one for reports.
    assert result.out.count(b"pipe:") == 2


def test_a_script_runs_without_a_wrapper(tmp_path: Path, zipapp: str):
    script = write_script(tmp_path, "raise SystemExit(3)")
    environ = {name: value for name, value in os.environ.items() if name != "CLOUDJOB_END_FD"}

    assert (
        subprocess.call([sys.executable, zipapp, "--script", script], cwd=tmp_path, env=environ)
        == 3
    )


def test_a_long_message_is_truncated(tmp_path: Path, run_script: RunScript):
    script = write_script(tmp_path, "raise ValueError('ä' * 100000)")

    _, notes = run_script(script, cwd=tmp_path)

    assert notes[0].message.startswith("ValueError: äää")
    assert len(notes[0].message) < 2000


def test_endless_recursion_fails_as_under_plain_python(tmp_path: Path, run_script: RunScript):
    script = write_script(tmp_path, "def f(): f()\nf()")

    result, notes = run_script(script, cwd=tmp_path)

    traceback = re.sub(rb"repeated \d+", b"repeated", result.err)
    assert traceback == re.sub(rb"repeated \d+", b"repeated", plain(script, cwd=tmp_path).err)
    assert [note.code for note in notes] == [1]


THREAD_SCRIPT = """\
import sys, threading, torch.distributed
sys.setswitchinterval(10)
is_waiting = threading.Event()
def print_from_thread():
    is_waiting.wait()
    print("given back", flush=True)
threading.Thread(target=print_from_thread, daemon=True).start()
is_waiting.set()
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_threads_of_torch_get_the_interpreter_lock_before_shutdown(
    run_script: RunScript, tmp_path: Path, end: str
):
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "distributed.py"):
        (tmp_path / "torch" / name).write_text("")
    (tmp_path / "s.py").write_text(THREAD_SCRIPT.format(end=end))

    result, _ = run_script("s.py", cwd=tmp_path)

    assert result == Result(0, b"given back\n", b"")


def test_a_script_finds_moxing_whatever_pythonpath_the_user_has_set(zipapp: str, tmp_path: Path):
    (tmp_path / "script.py").write_text("import moxing, os; print(os.environ['PYTHONPATH'])")
    done = subprocess.run(
        [sys.executable, zipapp, "--script", "script.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "CLOUDJOB_EMULATED": "1",
            "PYTHONPATH": "/my own",
            "MOX_SILENT_MODE": "1",
        },
        capture_output=True,
        timeout=180,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"/my own\n", b"")


CLOSING_SCRIPT = """\
import os, sys, torch.distributed
os.closerange(3, 512)
files = [open("data-%d" % number, "wb") for number in range(480)]
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError", "sys.exit(0)", ""])
def test_the_end_of_a_script_is_not_written_to_its_own_files(
    run_script: RunScript, tmp_path: Path, end: str
):
    """A script that becomes a daemon closes every descriptor, and numbers are used again."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "distributed.py"):
        (tmp_path / "torch" / name).write_text("")
    (tmp_path / "s.py").write_text(CLOSING_SCRIPT.format(end=end))

    result, notes = run_script("s.py", cwd=tmp_path)

    assert result.err == plain("s.py", cwd=tmp_path).err
    assert notes == []
    assert {path.read_bytes() for path in tmp_path.glob("data-*")} == {b""}
