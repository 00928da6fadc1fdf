"""Rules of the code base: imports, Python versions, and documentation."""

from __future__ import annotations

import ast
import os
import re
import resource
import runpy
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from cloudjob import cli
from jobentry.contract import names
from jobentry.contract.launchers import LAUNCHERS

ROOT = Path(__file__).resolve().parent.parent.parent
LAPTOP = sorted((ROOT / "cloudjob").rglob("*.py"))
CONTAINER = sorted((ROOT / "entrypoints").rglob("*.py"))
SCRIPTS = Path(sys.executable).parent
OURS = ("cloudjob", "jobentry")

# Files that may call print: the command line, the entry and the script runner.
PRINTERS = {
    *(str(path.relative_to(ROOT)) for path in (ROOT / "cloudjob" / "cli").rglob("*.py")),
    "entrypoints/jobentry/main.py",
    # It prints a message that is passed to sys.exit, as Python does.
    "entrypoints/jobentry/rank/script_runner.py",
}
# Packages of pure functions: they do no I/O, so their tests need no environment.
PURE = ["contract", "launchers"]
IMPURE = {"subprocess", "socket", "shutil", "pathlib", "tempfile", "signal", "threading", "time"}
# How many functions of ours a detached submit may call; ADR 81 says what is counted.
MOST_FUNCTIONS = 865
# How many imports of our own modules stand inside functions, as most commands do not need what they
# load; by folder, without ``cli``. These numbers may only become smaller.
MOST_LATE_IMPORTS = {
    "__init__": 2,
    "api": 4,
    "backends": 20,
    "emulator": 2,
    "machine": 1,
    "model": 3,
    "notify": 2,
    "store": 1,
    "submission": 1,
    "tracking": 26,
}
# Names that say how a value came, and not what it is.
VAGUE = {"found", "given", "shown", "own", "made", "known"}
# Modules that take too long to import for `cloudjob --help`.
HEAVY = {
    "pydantic",
    "yaml",
    "sqlite3",
    "boto3",
    "tarfile",
    "platformdirs",
    "jobentry.main",
    "requests",
    "rich",
    "tenacity",
}


def run(*argv: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the project's folder."""
    return subprocess.run(
        [str(argument) for argument in argv],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def built(target: Path) -> bytes:
    """Return a freshly built zipapp."""
    done = run(sys.executable, ROOT / "scripts" / "build_zipapp.py", target)
    assert done.returncode == 0, done.stderr
    return target.read_bytes()


@pytest.fixture(scope="session")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zipapp, built from the current sources."""
    target = tmp_path_factory.mktemp("zipapp") / "jobentry.pyz"
    built(target)
    return target


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a source imports, except under ``TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        else:
            yield from imported(node)


def relative_name(path: Path) -> str:
    """Return the path of a file, relative to the project's folder."""
    return path.relative_to(ROOT).as_posix()


# -- import rules -------------------------------------------------------------------------------


def test_the_import_rules_know_every_module_of_the_node_half():
    """The laptop half could import a module that the rules do not list."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    forbidden = {
        module
        for contract in settings["contracts"]
        if contract.get("source_modules") == ["cloudjob"]
        for module in contract["forbidden_modules"]
    }
    top = ROOT / "entrypoints" / "jobentry"
    modules = {
        ".".join(path.relative_to(top.parent).with_suffix("").parts)
        for path in (*top.iterdir(), *(top / "system").iterdir())
        if (path.suffix == ".py" or path.is_dir()) and not path.name.startswith("__")
    }

    allowed = {"jobentry.contract", "jobentry.system"}
    allowed |= {f"jobentry.system.{name}" for name in ("linux", "requests", "trees")}
    assert modules - forbidden == allowed


def module_of(path: Path, root: Path) -> str:
    """Return the dotted name of the module in a file below ``root``."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_by_module(texts: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also in functions and for type checkers."""
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        named: list[str] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                named += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                named += [name if name in texts else node.module or "" for name in inner]
        graph[module] = set(named) & texts.keys() - {module}
    return graph


def circle_in(texts: dict[str, str]) -> str:
    """Return modules that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter(imports_by_module(texts)).prepare()
    except CycleError as error:
        return " is imported by ".join(error.args[1])
    return ""


@pytest.mark.parametrize(("paths", "root"), [(LAPTOP, ROOT), (CONTAINER, ROOT / "entrypoints")])
def test_no_modules_import_each_other_in_a_circle(paths: list[Path], root: Path):
    texts = {module_of(path, root): path.read_text() for path in paths}

    assert len(texts) > 50
    assert circle_in(texts) == ""


@pytest.mark.parametrize(
    "back",
    ["import a", "from a import x", "def f():\n    import a", "if TYPE_CHECKING:\n    import a"],
)
def test_a_circle_of_modules_is_named(back: str):
    texts = {"a": "from a.b import c", "a.b": "from a.b import d", "a.b.d": back, "e": "import a"}

    assert sorted(circle_in(texts).split(" is imported by ")[1:]) == ["a", "a.b", "a.b.d"]


def test_the_node_half_needs_only_the_standard_library():
    """Its emulated part also has the module that scripts import on ModelArts."""
    foreign = {
        relative_name(path): packages
        for path in CONTAINER
        if (packages := _packages_of(path) - sys.stdlib_module_names - {"jobentry"})
        if packages != {"moxing"} or "emulated" not in path.parts
    }

    assert foreign == {}


def _packages_of(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(ast.parse(path.read_text()))}


def test_every_module_of_the_node_half_can_be_imported_alone(zipapp: Path):
    code = (
        "import importlib, sys\n"
        "sys.path[:0] = [sys.argv[1], sys.argv[1] + '/emulated']\n"
        "for module in sys.argv[2:]:\n"
        "    assert sys.argv[1] in importlib.import_module(module).__file__\n"
    )
    modules = (
        path.relative_to(ROOT / "entrypoints").with_suffix("").as_posix().replace("/", ".")
        for path in CONTAINER
        if path.name != "__main__.py"
    )
    names = (module.removesuffix(".__init__").removeprefix("emulated.") for module in modules)
    args = (sys.executable, "-I", "-S", "-W", "error", "-c", code, zipapp, *names)
    done = run(*args, MOX_SILENT_MODE="1")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PURE)
def test_modules_that_decide_do_no_io(name: str):
    """The launchers and the contract are pure functions."""
    for source in sorted((ROOT / "entrypoints" / "jobentry" / name).rglob("*.py")):
        if source.name == "zip_layer.py":
            # It reads from an open file that it receives.
            continue
        text = source.read_text()

        assert set(imported(ast.parse(text))) & IMPURE == set(), relative_name(source)
        # os.fsencode and os.fsdecode do no I/O.
        assert not re.search(r"\bopen\(|\bprint\(|\bos\.(?!fsencode|fsdecode)", text), (
            relative_name(source)
        )


@pytest.mark.parametrize("name", ["supervision", "attempts"])
def test_the_rules_for_nodes_and_attempts_do_no_io(name: str):
    """They are pure, and the standard library is enough: a controller must start quickly."""
    text = (ROOT / "cloudjob" / "backends" / f"{name}.py").read_text()
    modules = {module.partition(".")[0] for module in imported(ast.parse(text))}

    assert modules & (IMPURE | {"os"}) == set()
    assert modules <= sys.stdlib_module_names | {"jobentry"}
    assert not re.search(r"\bopen\(|\bprint\(", text)


# -- the node half: Python version, size, start-up time ------------------------------------


def test_annotations_are_never_evaluated():
    """Annotations may contain ``list[str]`` and ``X | None``, as they are not evaluated."""
    evaluated = [
        relative_name(path)
        for path in CONTAINER
        if "\nfrom __future__ import annotations\n" not in path.read_text()
        if any(
            isinstance(node, ast.AnnAssign) or getattr(node, "returns", None) is not None
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]

    assert evaluated == []


def test_the_zipapp_is_small(zipapp: Path):
    """It goes to every node of every job."""
    assert zipapp.stat().st_size <= 400 * 1024


def test_the_zipapp_is_reproducible(tmp_path: Path, zipapp: Path):
    """The same sources give the same bytes, and the archive contains nothing else."""
    sources = [path.relative_to(ROOT / "entrypoints").as_posix() for path in CONTAINER]

    assert built(tmp_path / "again.pyz") == zipapp.read_bytes()
    assert zipfile.ZipFile(zipapp).namelist() == sources
    assert zipapp.stat().st_mode & 0o777 == 0o755


def test_the_zipapp_starts_quickly(zipapp: Path):
    """Every node and every rank starts it; CPU time is measured, as the machine may be busy."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(sys.executable, "-I", "-S", zipapp, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert min(spent) < 0.5


# -- the laptop half ----------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["submit", "--help"]], ids=" ".join)
def test_help_is_quick(args: list[str]):
    code = (
        "import sys\n"
        "from cloudjob.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('MODULES', *sys.modules)\n"
    )
    done = run(sys.executable, "-c", code, *args)
    modules = set(done.stdout.splitlines()[-1].split())

    assert done.returncode == 0, done.stderr
    assert modules & HEAVY == set()


def test_the_list_of_commands_is_printed_without_what_argparse_may_import():
    """Together they take as long as the rest of ``cloudjob --help``."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from cloudjob.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    print('MODULES', *set(sys.modules) - before)\n"
    )
    done = run(sys.executable, "-c", code, COLUMNS="80")

    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "argparse" in modules
    assert modules & {"shutil", "textwrap", "typing"} == set()


def test_a_detached_submit_imports_nothing_that_follows_jobs(tmp_path: Path):
    """Imports are most of its CPU time."""
    (tmp_path / "train.py").write_text("")
    home = str(tmp_path / "home")
    code = (
        "import os, sys\n"
        "called = set()\n"
        "ours = tuple(os.path.join(os.getcwd(), each, '') for each in "
        "('cloudjob', 'entrypoints'))\n"
        "def note(frame, event, _):\n"
        "    code = frame.f_code\n"
        "    if event == 'call' and code.co_filename.startswith(ours):\n"
        "        called.add(code)\n"
        "sys.setprofile(note)\n"
        "from cloudjob.cli import main\n"
        "code = main(['submit', '--detach', '--launcher', 'python', *sys.argv[1:]])\n"
        "sys.setprofile(None)\n"
        "print(*sys.modules)\n"
        "print(len(called))\n"
        "sys.exit(code)\n"
    )
    done = run(sys.executable, "-c", code, "--source", tmp_path, "train.py", CLOUDJOB_HOME=home)

    assert done.returncode == 0, done.stderr
    handle, modules, functions = done.stdout.splitlines()
    follow = (sys.executable, "-X", "importtime", "-m", "cloudjob", "logs", "--follow", handle)
    followed = run(*follow, CLOUDJOB_HOME=home)
    assert followed.returncode == 0, followed.stderr
    following = ("tracking.log", "tracking.status_reader", "model.status", "backends.native")
    slow = {"concurrent.futures", "dataclasses", "logging", "socket"}
    assert {*slow, *(f"cloudjob.{name}" for name in following)} & set(modules.split()) == set()
    assert (
        slow & {line.rpartition("|")[2].strip() for line in followed.stderr.splitlines()} == set()
    )
    # With the bodies of modules and classes, comprehensions and lambdas.
    assert 0 < int(functions) <= MOST_FUNCTIONS


def test_few_of_our_own_modules_are_imported_late():
    """Without those under ``TYPE_CHECKING``."""
    late: Counter[str] = Counter()
    for path in LAPTOP:
        folder = path.relative_to(ROOT / "cloudjob").parts[0].removesuffix(".py")
        functions = map(imported, outermost_functions(ast.parse(path.read_bytes())))
        ours = [name for name in chain.from_iterable(functions) if name.startswith(OURS)]
        late[folder] += len(ours)
    del late["cli"]

    assert late["tracking"]
    assert {name: n for name, n in late.items() if n > MOST_LATE_IMPORTS.get(name, 0)} == {}


def test_no_two_public_classes_of_the_laptop_half_have_the_same_name():
    classes = Counter(
        node.name
        for path in LAPTOP
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert [name for name, number in classes.items() if number > 1] == []


def test_only_the_emulator_needs_pydantic():
    backends = sorted((ROOT / "cloudjob" / "backends").glob("*/backend.py"))
    modules = [f"cloudjob.backends.{path.parent.name}.backend" for path in backends]
    code = f"import sys, cloudjob.api, {', '.join(modules)}; print('pydantic' in sys.modules)"

    assert modules
    assert run(sys.executable, "-c", code).stdout == "False\n"


def test_only_the_wrappers_print():
    """All other modules return messages or raise them as errors."""
    printed = [
        f"{relative_name(path)}:{node.lineno}"
        for path in LAPTOP + CONTAINER
        if relative_name(path) not in PRINTERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]

    assert printed == []


# -- documentation ------------------------------------------------------------------------------


def pages() -> str:
    """Return the text of README.md and of all pages of docs/."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(path.read_text() for path in files if path.exists())


def variables() -> list[str]:
    """Return the variables that the two halves share."""
    return sorted(
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name == value
    )


def outermost_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions of a module that are not within other functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
        else:
            yield from outermost_functions(node)


def test_locals_say_what_a_value_is():
    """Imports, such as Hypothesis' ``given``, have the names of others."""
    others = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    vague = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*LAPTOP, *CONTAINER, *others]
        for function in outermost_functions(ast.parse(path.read_bytes()))
        for node in ast.walk(function)
        if (isinstance(node, ast.arg) and node.arg in VAGUE)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE)
    }
    assert vague == set()


def test_a_docstring_describes_only_arguments_that_a_function_has():
    others = {
        f"{relative_name(path)}:{function.lineno}: {name}"
        for path in [*LAPTOP, *CONTAINER]
        for function in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in described_arguments(ast.get_docstring(function) or "")
        if name not in {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    }
    assert others == set()


def described_arguments(docstring: str) -> list[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+):", section, re.MULTILINE)


def test_every_variable_is_documented():
    """Users must also know which variables are passed to the ranks because of their prefix."""
    text = (ROOT / "docs" / "reference" / "environment.md").read_text()

    # On the page, a prefix is followed by the rest of a name.
    missing = [
        variable
        for variable in (*variables(), *names.CARRIED_PREFIXES)
        if not re.search(f"`{variable}{'' if variable.endswith('_') else '(?![A-Z0-9_])'}", text)
    ]

    assert missing == []


Help = Callable[[tuple[str, ...]], str]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """Return a function that returns the ``--help`` text of a command."""
    monkeypatch.setenv("COLUMNS", "200")

    def help_of(command: tuple[str, ...]) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([*command, "--help"])
        return capsys.readouterr().out

    return help_of


def commands(help_of: Help) -> Iterator[tuple[str, ...]]:
    """Yield every command of ``cloudjob`` that its ``--help`` lists."""

    def subcommands(command: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        listed = re.search(r"^ +COMMAND\n((?:    +\S.*\n)+)", help_of(command), re.MULTILINE)
        for line in listed.group(1).splitlines() if listed else ():
            yield (*command, line.split()[0])

    for command in subcommands(()):
        yield command
        yield from subcommands(command)


def test_every_command_and_every_option_is_documented(help_of: Help):
    """Everything in ``--help`` is also in README.md or docs/."""
    text = pages()
    all_commands = list(commands(help_of))
    missing = [
        " ".join(command) for command in all_commands if "cloudjob " + " ".join(command) not in text
    ]
    for command in all_commands:
        page = help_of(command)
        assert page.startswith("usage: cloudjob")
        options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page.split("\n\n", 1)[1]))
        missing += [f"{' '.join(command)} {option}" for option in options if option not in text]

    assert len(all_commands) >= 8
    assert sorted(missing) == []


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield the tables of a page: rows of cells, without the line below the headings."""
    rows: list[list[str]] = []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


LAUNCHER_TABLES = list(tables(ROOT / "docs" / "reference" / "launchers.md"))


def test_every_launcher_has_a_row_with_its_tests():
    rows = LAUNCHER_TABLES[0][1:]

    assert sorted(row[0].strip("`") for row in rows) == sorted(LAUNCHERS)
    test_cells = [row[-1] for row in rows]
    assert [text for text in test_cells if "`tests/" not in text and text != "the same"] == []


@pytest.mark.parametrize(
    "heading", ["", "mode", "what each promises", "in containers, with the backend docker"]
)
def test_every_method_on_every_device_has_a_test_or_a_mark(heading: str):
    (table,) = (table for table in LAUNCHER_TABLES[1:] if table[0][0] == heading)
    marks = ("needs hardware: not run", "refused: ", "not run: ", "the same")
    cells = [cell for row in table[1:] for cell in row[1:]]

    assert len(cells) >= 4
    assert [cell for cell in cells if "`tests/" not in cell and not cell.startswith(marks)] == []


PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_every_link_of_a_page_leads_to_a_file():
    """`zensical build --strict` checks the links between pages, and their anchors."""
    missing = [
        f"{relative_name(page)}: {target}"
        for page in files()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if ":" not in target and not (page.parent / target).exists()
    ]

    assert missing == []


def test_every_code_block_has_a_first_line_that_the_site_understands():
    """If anything but a title follows the language, the site shows the block as plain text."""
    fence = re.compile(r' *```(\w+( title="[^"]+")?)?')
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for line in page.read_text().splitlines()
        if line.lstrip().startswith("```") and not fence.fullmatch(line)
    ]

    assert wrong == []


def test_every_nested_list_is_indented_so_that_the_site_shows_it_nested():
    """On the site, an item indented by fewer than four spaces belongs to the outer list."""
    wrong = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        outside = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        items = re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", outside, re.MULTILINE)
        wrong += [f"{page.relative_to(ROOT)}: {item}" for item in items]

    assert wrong == []


def test_every_test_that_a_page_names_exists():
    missing = [
        f"{relative_name(page)}: {path}{name}"
        for page in PAGES
        for path, name in re.findall(r"`(tests/[\w/.]+)((?:::\w+)?)`", page.read_text())
        if not (ROOT / path).exists()
        or (name and f"\ndef {name[2:]}(" not in (ROOT / path).read_text())
    ]

    assert missing == []


@pytest.mark.parametrize("page", ["COMMANDS_PAGE", "JOB_FILE_PAGE", "OPTIONS"])
def test_what_is_generated_from_the_keys_is_up_to_date(page: str):
    script = runpy.run_path(str(ROOT / "scripts" / "reference.py"))

    assert script[page].read_text() == script[page.lower()]()


def test_every_page_of_the_manual_is_a_topic():
    """A topic is a file name, so no two pages may have the same file name."""
    topics = run(sys.executable, "-m", "cloudjob.cli", "docs").stdout.splitlines()
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "adr"]

    assert len(topics) == len(pages)


def test_the_benchmarks_need_an_installed_cloudjob():
    missing = "/nowhere/cloudjob"
    done = run(sys.executable, ROOT / "benchmarks" / "run", "--cloudjob", missing)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: running the benchmarks: {missing} does not exist\n"
        "hint: run scripts/demo first, or use --cloudjob PATH\n"
    )


def test_every_page_that_a_hint_names_can_be_shown():
    """Hints name pages that the installed tool contains, not files of the repository."""
    topics = run(sys.executable, "-m", "cloudjob.cli", "docs").stdout.splitlines()
    listed = {line.split()[0] for line in topics}
    sources = [*LAPTOP, *CONTAINER, ROOT / "entrypoints" / "boot.sh"]
    named_topics = {
        topic
        for path in sources
        for topic in re.findall(r"cloudjob docs ([a-z][a-z-]+)", path.read_text())
    }
    files_in_hints = [
        f"{relative_name(path)}: {name}"
        for path in sources
        for name in re.findall(
            r'"[^"\n]*(?:docs/[a-z-]+\.md|images/README)[^"\n]*"', path.read_text()
        )
    ]

    assert named_topics
    assert named_topics <= listed
    assert files_in_hints == []


# -- the repository -----------------------------------------------------------------------------


def files() -> list[Path]:
    """Return the files that git does not ignore; skip the test outside a git repository."""
    done = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if done.returncode:
        pytest.skip("there is no git here")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    """The project runs from any folder, on any machine."""
    places = [re.escape("/" + "work") + r"\b", r"/root/\.", "/tmp/(?:bash_jobs|pytest-)"]
    if ROOT.parent != Path(ROOT.anchor):
        places.append(re.escape(str(ROOT)))
    pattern = re.compile(r"(?<![\w./$}-])(?:" + "|".join(places) + ")")
    matches = [
        f"{relative_name(path)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if path != Path(__file__) and pattern.search(line)
    ]

    assert matches == []
