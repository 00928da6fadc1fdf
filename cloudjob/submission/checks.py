"""Checks before a job is sent: the script, its secrets, and when the keys of its store expire.

A script must not be a web page, and it must parse. The Python and the bash that run it decide.
Those of other machines may be newer than this machine's, so what only a newer one may accept causes
no more than a warning there. If nodes use this machine's Python, it is asked whether it has what
the script imports: cloudjob may be installed with pipx or uv, in an environment of its own, while
the script's packages are in that of the ``python`` on PATH.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cloudjob.backends import interpreters
from cloudjob.backends.base import Check
from cloudjob.errors import BackendError, NotReady, SpecError
from cloudjob.model.job import JobSpec
from cloudjob.model.progress import OnProgress, Progress
from cloudjob.model.rules import BACKENDS, Telling
from cloudjob.model.text import one_line, secret_texts, secrets_masked
from cloudjob.model.times import local, rfc3339
from cloudjob.submission import launcher_choice
from cloudjob.submission.launcher_choice import Nested
from cloudjob.submission.scripts import CERTAIN, ScriptFile, ScriptFiles
from jobentry.contract import retry_kinds

_WEB_PAGE = rb"(?i)(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b"
_SHELL = rb"#!.*\b(bash|dash|sh)\b"
_SHOWN = 60
# The bash of macOS is older and lacks what version 4 added: ``|&``, ``&>>``, ``;&``, ``coproc``.
_BASH = 4
_PARSE_S = 10.0
# The launcher that passes its rank to a script as ModelArts' PyTorch presets do, and the options.
_PRESET_LAUNCHER = "pytorch-modelarts"
_PRESET_OPTIONS = ("--rank", "--world_size")
_ADDRESS_OPTION = "--init_method"
# A script that reads this variable does not depend on the options.
_SIZE_VARIABLE = b"WORLD_SIZE"
# The limit for an interpreter that is asked.
_ANSWER_S = 20.0
# Modules that only the nodes have.
_OF_NODES = frozenset(("moxing",))
_PARSE = "import sys; compile(sys.stdin.buffer.read(), 'script', 'exec')"
_LOOK = (
    "import importlib.util, json, sys;"
    "print(json.dumps([n for n in sys.argv[1:] if not importlib.util.find_spec(n)]))"
)
# If a job has no time limit, keys that are valid for longer than this pass the check.
_LONG_S = 24 * 3600.0
_HINT = "without valid keys, nodes store neither outputs nor the record: {}"
_REFRESHED = "log in again while the job runs, then `cloudjob refresh JOB`"
_LONGER = "use keys that last longer, or set a shorter timeout_min"


class Script(NamedTuple):
    """What a submit knows of a job's script; it is read once and passed on.

    Args:
        files: The script and the files of its source that were read.
        problem: Why it cannot run, needed if on no node; None if nothing is wrong with it.
        nested: The launcher that it starts itself, if any.
    """

    files: ScriptFiles
    problem: Check | None = None
    nested: Nested | None = None


def check_script(spec: JobSpec) -> Script:
    """Read a script, and refuse one that no node can run.

    Raises:
        SpecError: It is a web page, or it does not parse.
    """
    script = read_script(spec)
    if script.problem and script.problem.is_needed:
        raise SpecError([f"script: {script.problem.found}"], hint=script.problem.hint)
    return script


def read_script(spec: JobSpec) -> Script:
    """Read a script, and what it imports and starts as far as its source shows that."""
    files = ScriptFiles()
    if spec.takes_command:
        return Script(files)
    source = Path(spec.source)
    nested = launcher_choice.find_nested(files, source, spec.script)
    return Script(files, _problem(spec, files[source / spec.script]), nested)


def require(checks: Iterable[Check], on_progress: OnProgress) -> None:
    """Check that a job can be sent.

    Raises:
        NotReady: With every failed check that the job needs.
    """
    wrong = [check for check in checks if not check.is_ok]
    needed = [check for check in wrong if check.is_needed]
    if needed:
        raise NotReady([(f"{check.name}: {check.found}", check.hint) for check in needed])
    for check in wrong:
        on_progress(Progress("warning", f"{check.name}: {check.found}", check.hint))


def script_checks(spec: JobSpec, script: Script) -> Iterator[Check]:
    """Yield the problems of a script and of the way the job passes its secrets."""
    if script.problem:
        yield script.problem
    ignored = launcher_choice.ignored_exit_code(spec, script.nested)
    if ignored:
        hint = "with --strict, the job fails with that exit code"
        yield Check("script", False, f"{ignored}; {hint}", is_needed=False)
    repeated = launcher_choice.what_is_repeated(spec, script.nested)
    if repeated and spec.script.endswith(".py"):
        repeated = f"{repeated}, and cloudjob runs it once for each rank"
        hint = "with --launcher python, the script runs once on each node"
        yield Check("script", False, f"{repeated}; {hint}", is_needed=False)
    if hint := preset_hint(spec, script.files):
        what = f"nothing passes the options --rank and --world_size of {one_line(spec.script)}"
        yield Check("script", False, what, hint, is_needed=False)
    yield from python_checks(spec, script.files)
    yield from retry_checks(spec)
    yield from secret_checks(spec)


def retry_checks(spec: JobSpec) -> Iterator[Check]:
    """Yield a check that fails if the platform repeats failures after which no repeat is wanted."""
    if not spec.retries:
        return
    repeated = _repeated(spec)
    wrong = [each for each in retry_kinds.WORDS if each not in spec.retry.on and each in repeated]
    if wrong:
        more = f"{spec.backend} cannot tell {', '.join(wrong)} from other failures, and tries again"
        hint = ""
        if BACKENDS[spec.backend].telling is Telling.PLATFORM:
            hint = "`retries: {on: [platform, hang]}` starts only after the platform's own faults"
        yield Check("retries", False, f"{more} after these, too", hint, is_needed=False)


def _repeated(spec: JobSpec) -> Container[str]:
    """Return the kinds of failures that a backend repeats although they are not named."""
    telling = BACKENDS[spec.backend].telling
    if telling is Telling.RECORD:
        return ()
    if telling is Telling.EXIT_CODE:
        return [kind for kind in retry_kinds.WORDS if kind not in ("user", "hang")]
    if telling is Telling.PLATFORM and retry_kinds.OF_PLATFORM.issuperset(spec.retry.on):
        return ("platform", "preempted")
    return retry_kinds.WORDS


def secret_checks(spec: JobSpec) -> Iterator[Check]:
    """Yield a check for each secret that is visible in arguments or ordinary variables."""
    texts_sent = (*spec.args, *spec.env.values())
    for name, value in spec.secrets.items():
        texts = secret_texts([value])
        if any(text in each for text in texts for each in texts_sent):
            problem = f"the value of {name} is in arguments or variables, which the platform shows"
            hint = f"read it in the script from the variable {name}"
            yield Check("secrets", False, problem, hint, is_needed=False)
    for name, value in secrets_masked(spec.env).items():
        if spec.env[name] != value:
            problem = f"{name} is an ordinary variable, which the platform shows"
            hint = f"export it, and pass it with --secret {name} or under `secrets:`"
            yield Check("secrets", False, problem, hint, is_needed=False)


def key_checks(spec: JobSpec, end_at: float, now: float | None = None) -> Iterator[Check]:
    """Yield a check that fails if the keys may expire before the job ends.

    Args:
        end_at: When the keys expire, in seconds since 1970; 0 for never or unknown.
    """
    left_s = end_at - (time.time() if now is None else now)
    if not end_at:
        return
    from cloudjob.model.summary import span

    when = local(rfc3339(end_at))
    if left_s <= 0:
        yield Check("keys", False, f"the store's keys expired at {when}", hint="log in again")
        return
    # Elsewhere the limit is that of each attempt.
    is_total = BACKENDS[spec.backend].telling is Telling.RECORD
    limit_s = 60.0 * spec.timeout_min * (1 if is_total else spec.retries + 1)
    if limit_s and limit_s > left_s:
        may = f"the job may run for {span(int(limit_s))}"
    elif not limit_s and left_s < _LONG_S:
        may = "the job has no timeout_min"
    else:
        return
    problem = f"the store's keys expire in {span(int(left_s))} (at {when}), and {may}"
    can_refresh = BACKENDS[spec.backend].refreshes_keys
    hint = _HINT.format(_REFRESHED if can_refresh else _LONGER)
    yield Check("keys", False, problem, hint=hint, is_needed=False)


# -- whether the script can run --------------------------------------------------------------------


def _problem(spec: JobSpec, file: ScriptFile) -> Check | None:
    if not file.data:
        # Path.exists raises for a name that is too long, which is reported when it is packed.
        return None if os.path.exists(file.path) else _program(spec)  # noqa: PTH110
    name = one_line(spec.script)
    if re.match(_WEB_PAGE, file.data):
        hint = "on GitHub, download the raw file instead of saving its page"
        return Check("script", False, f"{name} is a web page (HTML), not a program", hint)
    if file.path.suffix == ".py":
        return _python(spec, name, file)
    shebang = re.match(_SHELL, file.data)
    shell = "bash" if file.path.suffix == ".sh" else shebang and shebang.group(1).decode()
    return _shell(file, shell) if shell and b"\0" not in file.data else None


def _program(spec: JobSpec) -> Check | None:
    """Return why a program of the nodes cannot be the script; None if it is none."""
    argv = (spec.script, *spec.args)
    nested = launcher_choice.in_command(argv)
    if nested is None and ("/" in spec.script or shutil.which(spec.script) is None):
        return None
    command = f"cloudjob submit --launcher command {one_line(shlex.join(argv))}"
    hint = f"{command} runs it once on each node"
    replacement = launcher_choice.replacement_of(nested[0], argv) if nested else ""
    if replacement:
        hint = f"cloudjob submit {replacement} starts the ranks itself; {hint}"
    return Check(
        "script", False, f"{one_line(spec.script)} is a program, not a file of the source", hint
    )


def _python(spec: JobSpec, name: str, file: ScriptFile) -> Check | None:
    try:
        with warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            compile(file.data, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _syntax_error(spec, name, file.data, error)
    except ValueError as error:
        return Check(
            "script", False, f"{name} is not valid Python: {error}", "save it as text in UTF-8"
        )
    except (RecursionError, MemoryError):
        pass
    return None


def _syntax_error(spec: JobSpec, name: str, data: bytes, error: SyntaxError) -> Check | None:
    number = error.lineno or 0
    lines = data.decode("utf-8", "replace").splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    where = f"{name} line {number}" if number else name
    version = "{}.{}".format(*sys.version_info)
    what = f"{where} is not valid in Python {version}: {error.msg}"
    if line:
        what += f": {one_line(line[:_SHOWN])}"
    if "Missing parentheses" in error.msg:
        return Check("script", False, what, "the script is for Python 2, and nodes run Python 3")
    if BACKENDS[spec.backend].shares_files:
        hint = f"{_named(spec, 'PATH')} names another Python for the script"
        return None if _accepts(spec, data) else Check("script", False, what, hint)
    # No version of Python has changed the rules of indentation.
    is_certain = isinstance(error, IndentationError)
    hint = "correct the line" if is_certain else f"only a Python newer than {version} may accept it"
    return Check("script", False, what, hint, is_certain)


def _shell(file: ScriptFile, shell: str) -> Check | None:
    path = file.path
    message = _first_error(path, shell)
    if not message:
        return None
    hint = f"`{shell} -n {one_line(path.name)}` prints all of its messages"
    if b"\r\n" in file.data:
        convert = f"`sed -i 's/\\r$//' {one_line(path.name)}`"
        hint = f"it has Windows line endings; {convert} converts them"
    is_old = shell == "bash" and _bash_version() < _BASH
    if is_old:
        hint = f"bash is older than version {_BASH} here; the nodes' may accept the line"
    return Check("script", False, one_line(f"{path.name} {message}"), hint, is_needed=not is_old)


def _first_error(path: Path, shell: str) -> str:
    """Return the first error of a shell that parses a script without running it."""
    # A script may switch on extglob, but bash applies that only when it runs the script.
    options = ("-O", "extglob") if shell == "bash" else ()
    unset = ("BASH_ENV", "ENV")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    try:
        done = subprocess.run(
            [shell, *options, "-n", f"./{path.name}"],
            cwd=path.parent,
            env={**environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PARSE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    stderr = os.fsdecode(done.stderr).strip()
    message = stderr.partition("\n")[0].removeprefix(f"./{path.name}: ") if done.returncode else ""
    # dash prints only the line's number.
    return f"line {message}" if message[:1].isdigit() else message


def _bash_version() -> int:
    done = subprocess.run(
        ["bash", "-c", 'echo "${BASH_VERSINFO:-0}"'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return int(done.stdout) if done.stdout.strip().isdigit() else 0


# -- options of the script -------------------------------------------------------------------------


def is_mentioned(spec: JobSpec, option: str) -> bool:
    """Return whether the option's name is a word of the script or of a file that it uses.

    True if none of them is readable.
    """
    name = re.escape(option.lstrip("-")).replace(r"\-", "[-_]")
    # A single letter occurs as a word in many texts, so a short option is searched with its dash.
    dash = "" if option.startswith("--") else "-"
    pattern = re.compile(rf"(?<!\w){dash}{name}(?!\w)".encode())
    files = ScriptFiles()
    paths = chain.from_iterable(files.levels(Path(spec.source), spec.script))
    return any(pattern.search(files[path].data) for path in paths) or not any(
        file.data for file in files.values()
    )


def preset_hint(spec: JobSpec, files: ScriptFiles) -> str:
    """Return how to pass the rank and the number of ranks; empty if the script gets or has them.

    Without them such a script waits for as many ranks as its default says, often eight.
    """
    if spec.takes_command or spec.launcher == _PRESET_LAUNCHER or not spec.script.endswith(".py"):
        return ""
    file = files[Path(spec.source, spec.script)]
    if _SIZE_VARIABLE in file.data or b"--rank" not in file.data:
        return ""
    if {word.partition("=")[0] for word in spec.args}.issuperset(_PRESET_OPTIONS):
        return ""
    options, takes_any = _options(file)
    if not options.issuperset(_PRESET_OPTIONS):
        return ""
    if _ADDRESS_OPTION in options or takes_any:
        what = "passes them on each node, as ModelArts' PyTorch presets do"
        return f"--launcher {_PRESET_LAUNCHER} {what}"
    return "pass them after the script"


def _options(file: ScriptFile) -> tuple[set[str], bool]:
    """Return the options that a script declares, and whether it accepts others."""
    names: set[str] = set()
    takes_any = False
    for node, _ in file.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=words):
                names |= {str(word.value) for word in words if isinstance(word, ast.Constant)}
            case ast.Call(func=ast.Attribute(attr="parse_known_args")):
                takes_any = True
    return names, takes_any


# -- the interpreter of the script -----------------------------------------------------------------


def _accepts(spec: JobSpec, source: bytes) -> bool:
    """Whether the job's Python is missing, or not the one that runs us and parses a script."""
    chosen = _interpreter(spec)
    if chosen is None or chosen.path == sys.executable:
        return chosen is None
    return _answer(chosen.path, _PARSE, source=source) is not None


def python_checks(spec: JobSpec, files: ScriptFiles) -> Iterator[Check]:
    """Yield a check that fails if another interpreter has modules that the script's lacks."""
    chosen = _interpreter(spec)
    if chosen is None:
        return
    if chosen.stale:
        yield Check("python", False, f"{chosen.stale}; {chosen.shown}", is_needed=False)
    program = shutil.which("python") or shutil.which("python3")
    other = program and os.path.abspath(program)  # noqa: PTH100
    if not other or other == chosen.path:
        return
    missing = _missing(chosen.path, _imports(spec, files))
    only_there = sorted(set(missing) - set(_missing(other, missing)))
    if only_there:
        yield Check(
            "python",
            False,
            f"{chosen.shown}; it has no {', '.join(only_there)}, but {other} has",
            hint=f"{_named(spec, other)}, or activate its environment",
            is_needed=False,
        )


def python_described(spec: JobSpec, files: ScriptFiles) -> tuple[str, ...]:
    """Return the interpreter of the script, then what is wrong with it, for people."""
    chosen = _interpreter(spec)
    if chosen is None:
        return ()
    return f"{chosen.path} ({chosen.why})", *(check.found for check in python_checks(spec, files))


def _named(spec: JobSpec, python: str) -> str:
    """Return how a job file names an interpreter: ``process: {python: PATH} in a job file``."""
    section, _, key = BACKENDS[spec.backend].python_key.partition(".")
    return f"{section}: {{{key}: {python}}} in a job file"


def _interpreter(spec: JobSpec) -> interpreters.Interpreter | None:
    """Return the interpreter of the script; None if it does not exist, or only the nodes know."""
    kind = BACKENDS[spec.backend]
    if not kind.shares_files:
        return None
    section, _, name = kind.python_key.partition(".")
    try:
        return interpreters.choose(getattr(getattr(spec, section), name), kind.python_key)
    except BackendError:
        # Building the request reports it.
        return None


def _imports(spec: JobSpec, files: ScriptFiles) -> list[str]:
    """Return the modules that the script always imports and that neither Python nor it brings."""
    script = Path(spec.source, spec.script)
    if spec.takes_command or script.suffix != ".py":
        return []
    imports = files[script].imports
    tops = {name.partition(".")[0] for name, how in imports.items() if how == CERTAIN} - {""}
    tops -= sys.stdlib_module_names | _OF_NODES
    return sorted(
        one_line(name)
        for name in tops
        if not ((script.parent / name).exists() or (script.parent / f"{name}.py").exists())
    )


def _missing(python: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that an interpreter does not find; none if it cannot be asked."""
    try:
        answer = json.loads(_answer(python, _LOOK, *modules) or "[]") if modules else []
    except ValueError:
        return []
    return [name for name in modules if isinstance(answer, list) and name in answer]


def _answer(python: str, program: str, *words: str, source: bytes = b"") -> bytes | None:
    """Run a program with an interpreter and return its output; None if it has failed."""
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", program, *words],
            input=source,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
