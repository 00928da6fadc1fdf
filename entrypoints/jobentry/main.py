"""The entry of a node: reads its environment, makes a plan, runs it and writes a record.

jobentry [--dry-run] [--json] SCRIPT [ARGS]...
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, NoReturn, Sequence

from jobentry.contract import env, exits, messages, names, paths, preflight_levels, variables
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Outcome
from jobentry.contract.lists import some
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.launchers import plan
from jobentry.launchers.common import ArgsError, Launch
from jobentry.log import log_message, write_journal
from jobentry.node import early_ends, files, limits, prepare, record, second_run, unsubmitted
from jobentry.node.journal import Journal
from jobentry.node.log_store import LogStore
from jobentry.node.tools import (
    check_module,
    facts_of,
    find_tools,
    launcher_of,
    start_module,
    start_version,
)
from jobentry.node.working_folder import WorkingFolder
from jobentry.secrets import masking, private_environ
from jobentry.staging.stage import stage
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.control.loop import NodeSetup
    from jobentry.control.worker import ControlSocket
    from jobentry.node.local_ranks import RankFailure
    from jobentry.node.network import NodeNetwork
    from jobentry.preflight.node import NodePreflight

USAGE = """usage: jobentry [--dry-run] [--json] SCRIPT [ARGS]...

Runs SCRIPT on all ranks of the job that the environment describes (MA_*, VC_*, OPENMPI_*).
A program on PATH may come before it: jobentry python train.py
  --dry-run   print what this node would do, and do nothing
  --json      print it as one JSON object
  --help      print this help
"""
# Seconds that a head that cannot start the job waits for its workers, to report why.
CALL_OFF_S = 30.0
_SHOWN_NAMES = 10
# The same if it cannot stage its code or inputs: usually no worker can either, and none comes up.
_STAGING_CALL_OFF_S = 10.0
_FOLDERS = (names.CLOUDJOB_NODE_DIR, names.MA_LOG_DIR, names.MA_MOUNT_PATH, "TMPDIR", "HOME")


class _Setup(NamedTuple):
    """The environment and helper processes of a node.

    Args:
        address: The address of this node that the others see, empty if not known.
        version: The running ``mpirun --version``.
        module: The script's interpreter, which looks up the launcher's module.
        control_socket: The listening socket of a worker; None on the head.
        written: Finds what the script writes to a working folder that is removed at the end.
        here: The rest, which head and worker pass on.
    """

    environment: Mapping[str, str]
    address: str
    version: subprocess.Popen[bytes] | None
    module: subprocess.Popen[bytes] | None
    control_socket: ControlSocket | None
    written: WorkingFolder | None
    here: NodeSetup


class _End(NamedTuple):
    """How this node has ended; ``is_over`` is true if the job itself is complete."""

    code: int
    is_over: bool


class Options(NamedTuple):
    """The parsed command line."""

    script_argv: tuple[str, ...]
    is_dry_run: bool = False
    is_json: bool = False


def import_usual() -> None:
    """Import what nearly every node needs, in a process that forks nodes."""
    from jobentry.control import head, preflight, worker  # noqa: F401
    from jobentry.launchers import mpirun  # noqa: F401
    from jobentry.node import accelerators  # noqa: F401
    from jobentry.objects import directory  # noqa: F401
    from jobentry.staging import code_package  # noqa: F401


def run(argv: Sequence[str]) -> NoReturn:
    """Run the entry, and end this process with its exit code."""
    code = main(argv)
    # For example, nothing can be done if the disk of the log is full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Exit at once. An interpreter that shuts down has no signal handlers left, so a SIGTERM would
    # change the exit code of a node that has ended successfully with its head.
    os._exit(code)


def main(argv: Sequence[str]) -> int:
    """Run the entry and return its exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    options = _options(argv)
    if options is None:
        sys.stderr.write(USAGE)
        return exits.ENTRY_FAILED
    _leave_out_odd_names()
    _read_delivered_variables()
    masking.mask_secrets_of(os.environ)
    try:
        node = env.read(os.environ)
    except env.EnvError as error:
        for problem in error.problems:
            log_message(f"reading the environment: {problem}")
        log_message(messages.hint(error.hint))
        # Only the head writes a record. An unreadable index counts as the head.
        if not os.environ.get(names.VC_TASK_INDEX, "").strip("0").isdecimal():
            job, uri = map(os.environ.get, (names.CLOUDJOB_JOB, names.CLOUDJOB_RECORD_URI))
            failure = exits.Failure(exit_code=exits.ENTRY_FAILED, message=str(error))
            record.write_failure(job or "", failure, Cause.ENTRY, uri or "")
        return exits.ENTRY_FAILED
    os.environ.pop(names.CLOUDJOB_DELIVERED, None)
    private_environ.hide((*node.secret_names, *names.STORE_ACCESS))
    # A container that was restarted in place starts with the old keys.
    private_environ.take_keys()
    node, script_argv = unsubmitted.complete(node, options.script_argv, os.environ)
    options = options._replace(script_argv=script_argv)
    if options.is_dry_run:
        return _show(node, options)
    is_allowed = second_run.may_run(node)
    end = _run(node, options) if is_allowed else _End(second_run.refuse(node), is_over=False)
    # Keep the files if the node was stopped or lost another: it may be restarted in place and needs
    # them.
    if node.delivered_dir and end.is_over:
        prepare.empty(node.delivered_dir, keep=second_run.MARK)
    return end.code


def _leave_out_odd_names() -> None:
    """Drop variables whose names no job may set: some shells drop them as well, and some do not."""
    left_out = os.environ.pop(names.CLOUDJOB_LEFT_OUT, "").split()
    # bash passes functions on in such variables.
    odd = [name for name in os.environ if not env.is_name(name) and not name.endswith("%%")]
    for name in odd:
        del os.environ[name]
    names_left_out = sorted({*left_out, *odd})
    if names_left_out:
        listed = some(names_left_out, _SHOWN_NAMES)
        text = f"left out variables of the image: {listed[:500]}"
        log_message(f"{text}: a name may have only letters, digits and _")


def _read_delivered_variables() -> None:
    """Add the variables in the platform's delivery folder and in the delivered file."""
    if names.CLOUDJOB_DELIVERY in os.environ:
        from jobentry.staging import delivered

        folder = os.environ[names.CLOUDJOB_DELIVERY]
        private_environ.expect_keys(os.path.join(folder, paths.DELIVERED_KEYS))
        try:
            delivered.take(os.environ)
        except OSError as error:
            log_message(f"reading the delivered files: {folder}: {error.strerror}")
    path = os.environ.pop(names.CLOUDJOB_ENV_FILE, "")
    if path:
        folder = os.path.dirname(path)
        private_environ.expect_keys(os.path.join(folder, paths.DELIVERED_KEYS))
        try:
            with open(path, "rb") as file:
                os.environ.update(variables.load(file.read()))
        except OSError as error:
            log_message(f"reading the delivered variables: {path}: {error.strerror}")


def _options(argv: Sequence[str]) -> Options | None:
    """Parse the entry's options, which come before the script; None if they are invalid."""
    rest = list(argv)
    flags = set()
    while rest and rest[0] in ("--dry-run", "--json"):
        flags.add(rest.pop(0))
    if not rest or rest[0].startswith("-"):
        return None
    return Options(tuple(rest), "--dry-run" in flags, "--json" in flags)


def _show(node: NodeEnv, options: Options) -> int:
    node_paths = paths.node_paths(os.environ, node)
    folder = prepare.code_folder(node, node_paths, options.script_argv[0])
    environment = prepare.node_environment(node, node_paths, folder)
    try:
        with _translated():
            launch_plan = _shown_plan(node, environment, node_paths, folder, options)
    except EntryError as error:
        _log_error(error)
        return error.code
    values = plan.masked(launch_plan, node)
    if options.is_json:
        print(json.dumps(values))
        return 0
    print("role: {}\ncwd: {}\nargv:".format(values["role"], values["cwd"]))
    print("".join(f"  {argument}\n" for argument in values["argv"]), end="")
    for file in values["files"]:
        print("file {path} ({mode}):".format(**file))
        print("".join(f"  {line}\n" for line in file["text"].splitlines()), end="")
    for note in launch_plan.notes:
        print(f"note: {note}")
    return 0


def _shown_plan(
    node: NodeEnv,
    environment: Mapping[str, str],
    node_paths: NodePaths,
    folder: str,
    options: Options,
) -> Launch:
    """Return the plan of this node without changing anything."""
    needs_mpi = launcher_of(node).needs_mpi
    if unsubmitted.is_unsubmitted(os.environ):
        unsubmitted.check(node, folder, options.script_argv)
    version = start_version(environment.get("PATH", os.defpath)) if needs_mpi else None
    site = find_tools(node, environment, node_paths, version, needs_mpi=needs_mpi, is_dry_run=True)
    launch_plan = plan.make(site, options.script_argv)
    return prepare.with_existing_host_file(launch_plan, node)


def _run(node: NodeEnv, options: Options) -> _End:
    """Run this node's part of the job; the head writes a record in every case."""
    started_at = time.time()
    linux.save_address_space()
    journal = Journal(write_journal if node.record_uri else None)
    # A signed URL is valid for one known object only; in a folder that is copied, any may be new.
    has_keys = names.CLOUDJOB_SIGNED_URIS not in private_environ.environ()
    if node.record_uri and (has_keys or node.record_uri.startswith("file:")):
        journal.log_store = LogStore(record.folder(node), node.node)
        journal.log_store.start()
    try:
        _handle_cancel_signals(lambda number, _: _stop(node, number))
        with _translated():
            return _prepare_and_run(node, options, journal, started_at)
    except (EntryError, _Signalled) as raised:
        error = raised.error if isinstance(raised, _Signalled) else raised
        # Ignore signals, which could only interrupt writing the record.
        _handle_cancel_signals(signal.SIG_IGN)
        is_cancelled = error.cause is Cause.CANCELLED
        _log_error(error)
        prepare.remove_node_dir(paths.node_paths(os.environ, node))
        record.close_journal(node, journal, is_cancelled=is_cancelled)
        if node.is_head:
            ended = record.from_error(node, error, journal, started_at)
            record.write(ended, node.record_uri, is_cancelled=is_cancelled)
        return _End(error.code, is_over=False)


class _Signalled(BaseException):
    """A signal has ended this node's part of the job, at any place of the code.

    It is no ``Exception``, as others handle those for errors of their own: ``Thread.start`` would
    count a thread that runs as not started.
    """

    def __init__(self, error: EntryError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn other errors that can end a node's part of the job into an ``EntryError``."""
    try:
        yield
    except ArgsError as error:
        raise EntryError(str(error), hint=error.hint) from error
    except OSError as error:
        where = ": " + os.fsdecode(error.filename) if error.filename else ""
        reason = error.strerror or str(error)
        message = f"running this node's part of the job{where}: {reason}"
        raise EntryError(message, hint=limits.hint(error, _folders())) from error
    except MemoryError as error:
        raise EntryError("running this node's part of the job: not enough memory") from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        message = "running this node's part of the job: it can't start new threads"
        hint = "raise the limit on processes: `ulimit -u`, or that of the container (pids)"
        raise EntryError(message, hint=hint) from error


def _folders() -> list[str]:
    """Return the folders in which a job writes on this node, each existing one once."""
    folders = [os.environ.get(name, "") for name in _FOLDERS]
    return [folder for folder in dict.fromkeys([*folders, "/tmp", "/dev/shm"]) if folder]


def _handle_cancel_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> None:
    for number in record.CANCEL_SIGNALS:
        signal.signal(number, handler)


def _log_error(error: EntryError) -> None:
    """Log the error and its hint, if it has one."""
    log_message(str(error))
    if error.hint:
        log_message(messages.hint(error.hint))


def _stop(node: NodeEnv, number: int) -> None:
    """Handle a signal before there are ranks: staging can take a long time."""
    sys.unraisablehook = partial(_send_again, number)
    # A handler is needed: a signal without one does not end the first process of a container.
    for index in range(1, node.nodes if node.is_head else 0):
        failure = early_ends.reported(node, index)
        if failure is not None:
            raise _Signalled(EntryError.from_outcome(early_ends.outcome(failure)))
    name = signal.Signals(number).name
    # A worker cannot know why the job ends; it may be the loss of another node.
    message = f"cancelled: the job was sent {name}" if node.is_head else f"ended by {name}"
    error = EntryError(message, exits.code_of_signal(number), cause=Cause.CANCELLED)
    raise _Signalled(error)


def _send_again(number: int, ignored: sys.UnraisableHookArgs) -> None:
    """Repeat a signal whose error Python has ignored, as in callbacks of imports and finalizers."""
    if not isinstance(ignored.exc_value, _Signalled):
        sys.__unraisablehook__(ignored)
        return
    # Not from here, where the next error would be ignored, too; without a thread, it is lost.
    with contextlib.suppress(RuntimeError):
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


def _prepare_and_run(node: NodeEnv, options: Options, journal: Journal, started_at: float) -> _End:
    """Prepare this node, run its part of the job, and return how it ended."""
    journal.begin("stage", started_at)
    launcher = launcher_of(node)
    limits.allow_open_files(node, needs_mpi=launcher.needs_mpi)
    node = prepare.keep_existing_tune_file(node)
    node_paths = paths.node_paths(os.environ, node)
    journal.start(node_paths.node_dir)
    version = start_version(os.environ.get("PATH", "")) if launcher.needs_mpi else None
    with _reporting_to_workers(node, node_paths):
        folder, outputs = stage(node, node_paths, journal, options.script_argv[0])
        if not launcher.takes_command:
            prepare.check_script(folder, options.script_argv[0])
    if unsubmitted.is_unsubmitted(os.environ):
        unsubmitted.warn_of_nested_launcher(node, folder, options.script_argv[0])
    prepare.make_node_dir(node_paths)
    control_socket = None
    if not node.is_head:
        from jobentry.control import worker

        # First, as the head waits for each node.
        control_socket = worker.listen(node, node_paths)
    server = prepare.start_sshd(node, node_paths, journal)
    try:
        environment, network = _prepare_environment(node, node_paths, folder)
        offered = _start_preflight(node, node_paths, network, environment)
        module = start_module(node, environment, options.script_argv[0])
        # Now, while those start.
        from jobentry.control import loop

        children = tuple(process.pid for process in (version, module, server) if process)
        setup = _Setup(
            environment,
            network.route.address,
            version,
            module,
            control_socket,
            WorkingFolder(folder) if node.code_uri else None,
            loop.NodeSetup(node, node_paths, journal, outputs, children, offered),
        )
        if outputs is not None:
            outputs.start()
        journal.end("stage")
        if node.is_head:
            return _run_head(setup, options, started_at)
        return _run_worker(setup, options)
    finally:
        if control_socket is not None:
            control_socket.server.close()
        if server is not None:
            prepare.check_sshd(server, node_paths)
            server.terminate()
            server.wait()
        prepare.remove_node_dir(node_paths)


def _prepare_environment(
    node: NodeEnv, node_paths: NodePaths, folder: str
) -> tuple[dict[str, str], NodeNetwork]:
    """Return the environment of this node's ranks, and its network."""
    environment = prepare.node_environment(node, node_paths, folder)
    prepare.import_package(node, environment, folder)
    network = prepare.choose_network(node, node_paths, environment)
    prepare.write_environment(node_paths, environment)
    return environment, network


def _start_preflight(
    node: NodeEnv, node_paths: NodePaths, network: NodeNetwork, environment: Mapping[str, str]
) -> NodePreflight | None:
    """Offer the check of the nodes to the others, unless the job has none."""
    if node.preflight == preflight_levels.OFF:
        return None
    from jobentry.control.preflight import offer

    return offer(node, node_paths, network, environment)


@contextlib.contextmanager
def _reporting_to_workers(node: NodeEnv, node_paths: NodePaths) -> Iterator[None]:
    """Report to the workers if the head cannot stage its code or inputs; else they would wait."""
    try:
        yield
    except (EntryError, OSError) as error:
        is_own = not isinstance(error, EntryError) or error.cause is Cause.ENTRY
        if node.is_head and node.nodes > 1 and is_own:
            with contextlib.suppress(EntryError, OSError):
                prepare.make_node_dir(node_paths)
                _call_job_off(node, node_paths, str(error), _STAGING_CALL_OFF_S)
        raise


def _call_job_off(
    node: NodeEnv,
    node_paths: NodePaths,
    reason: str,
    patience_s: float,
    our_processes: tuple[int, ...] = (),
) -> None:
    from jobentry.control.head import Head
    from jobentry.control.loop import NodeSetup

    setup = NodeSetup(node, node_paths, Journal(), child_ids=our_processes)
    key, port = prepare.read_key(node), prepare.control_port(node, node_paths)
    nothing = Launch((), 0, is_everywhere=False, cwd=node_paths.code)
    Head(setup, nothing, {}, key, port).call_off(reason, patience_s)


def _run_worker(setup: _Setup, options: Options) -> _End:
    """Run a worker, whose sshd stays up until the worker has left; return how it ended."""
    from jobentry.control.worker import Worker

    assert setup.control_socket is not None
    node, node_paths = setup.here.node, setup.here.paths
    # Without mpirun's version, which only the head checks, from the worker's facts.
    site = find_tools(node, setup.environment, node_paths, None, needs_mpi=False)
    site = site._replace(address=setup.address)
    launch_plan = plan.make(site, options.script_argv)
    written = prepare.write_files(launch_plan.files)
    worker = Worker(
        setup.here,
        launch_plan,
        lambda: {
            **facts_of(node, site, setup.version, setup.module),
            **_offered(setup.here.preflight),
        },
        setup.control_socket,
    )
    code = worker.run()
    for path in written:
        files.remove(path)
    rank_failure = worker.rank_failure if code else None
    problem = worker.run_in_thread(lambda: _upload(setup, worker.stopped_at, rank_failure))
    record.close_journal(node, setup.here.journal, is_cancelled=worker.stopped_at is not None)
    return _End(worker.leave(problem), worker.is_over)


def _run_head(setup: _Setup, options: Options, started_at: float) -> _End:
    """Run the job and write its record; return how this node ended."""
    from jobentry.control.head import Head

    node, node_paths = setup.here.node, setup.here.paths
    key, port = prepare.read_key(node), prepare.control_port(node, node_paths)
    try:
        launch_plan, facts, written = _head_plan(setup, options)
    except (EntryError, ArgsError, OSError, _Signalled) as error:
        # Every node refuses invalid variables by itself, so a short wait is enough.
        patience_s = 5.0 if isinstance(error, ArgsError) else CALL_OFF_S
        _call_job_off(node, node_paths, str(error), patience_s, setup.here.child_ids)
        raise
    head = Head(setup.here, launch_plan, facts, key, port)
    outcome = head.run()
    for path in written:
        files.remove(path)
    rank_failure = head.rank_failure if outcome.exit_code else None
    problem = head.run_in_thread(lambda: _upload(setup, head.stopped_at, rank_failure))
    outcome = head.end(_with_outputs(outcome, node, problem))
    if node.nodes > 1 and setup.here.outputs is not None:
        outcome = _with_outputs(outcome, node, setup.here.outputs.clashes())
    head.dismiss(outcome.exit_code)
    is_cancelled = head.stopped_at is not None
    record.close_journal(node, setup.here.journal, is_cancelled=is_cancelled)
    ended = exits.ExitRecord(
        job=node.job,
        outcome=outcome,
        started_at=record.rfc3339(started_at),
        ended_at=record.rfc3339(time.time()),
        phases=record.phases(setup.here.journal, head.worker_phases),
        hang=head.hang if outcome.exit_code else None,
        cut_logs=head.cut_logs,
    )
    record.write(ended, node.record_uri, is_cancelled=is_cancelled)
    return _End(outcome.exit_code, outcome.is_over)


def _head_plan(setup: _Setup, options: Options) -> tuple[Launch, dict[str, Any], list[str]]:
    """Return the head's plan and facts, and the paths of the files that it wrote."""
    node, node_paths = setup.here.node, setup.here.paths
    needs_mpi = launcher_of(node).needs_mpi
    site = find_tools(node, setup.environment, node_paths, setup.version, needs_mpi=needs_mpi)
    site = site._replace(address=setup.address)
    launch_plan = plan.make(site, options.script_argv)
    launch_plan = prepare.with_existing_host_file(launch_plan, node)
    for note in launch_plan.notes:
        log_message(note)
    facts = facts_of(node, site, setup.version, setup.module)
    check_module(facts, node.launcher, site.interpreter)
    return launch_plan, facts, prepare.write_files(launch_plan.files)


def _offered(here: NodePreflight | None) -> dict[str, Any]:
    """Return where the other nodes reach this one, for the head."""
    return {} if here is None else {"probe": here.endpoints}


def _with_outputs(outcome: Outcome, node: NodeEnv, problem: str) -> Outcome:
    """Return ``outcome``, turned into a failure if its outputs could not be stored."""
    if not problem or outcome.exit_code:
        return outcome
    failure = exits.Failure(0, node.host, exit_code=exits.ENTRY_FAILED, message=problem)
    return Outcome(exits.ENTRY_FAILED, Cause.ENTRY, failure)


def _upload(setup: _Setup, stopped_at: float | None, rank_failure: RankFailure | None) -> str:
    """Upload the outputs of this node; return an error message or ``""``."""
    if setup.written is not None:
        setup.written.name_lost_files()
    node, outputs = setup.here.node, setup.here.outputs
    if outputs is None:
        return ""
    if stopped_at is None:
        return outputs.finish(node.output_limit_s, rank_failure)
    from jobentry.control.loop import STOPPED_LIMIT_S

    # The platform will soon kill a stopped job: use what is left of the grace period.
    left_s = node.grace_s - (time.monotonic() - stopped_at)
    return outputs.finish(max(STOPPED_LIMIT_S, left_s), rank_failure)
