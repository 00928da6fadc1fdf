"""The slurm backend: one sbatch script per job, which runs our entry once on each node.

Everything about a job is in its folder, which the nodes share, and the handle contains its path:
``slurm://HOST/FOLDER/JOB``, without a host if Slurm's commands are on this machine. So any shell
finds the job again, even if Slurm has forgotten it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from cloudjob.backends import delivery as deliveries
from cloudjob.backends import handles
from cloudjob.backends.base import Backend, Check, Devices
from cloudjob.backends.follow import PIECE_BYTES, poll
from cloudjob.backends.native import NativeStatus, Unknown, Waiting
from cloudjob.backends.slurm import checks, errors, local_store, script, state
from cloudjob.backends.slurm import cluster as clusters
from cloudjob.backends.slurm import request as requests
from cloudjob.backends.slurm.cluster import SlurmCluster, SlurmHost, quoted
from cloudjob.backends.slurm.request import SlurmRequest
from cloudjob.backends.slurm.state import is_settled
from cloudjob.errors import BackendError, JobNotFound, Unanswered
from cloudjob.model.submission import Submission
from jobentry.contract import paths, variables

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SCHEME = "slurm"
# The folder is read often and Slurm's controller seldom, as it serves a whole cluster.
_POLL_S, _FAR_POLL_S = 0.1, 1.0
_QUERY_S = 2.0
# After the job's end, only Slurm's final state is missing.
_QUERY_LAST_S = 0.25
# Seconds that a controller may be silent while a command waits for a job.
_RETRY_S = 900.0
# The shortest and the longest wait between two reads of a log.
_LOG_POLL_S = (0.02, 0.1)
_END_POLL_S = 0.25
# Seconds that Slurm may take to end a job that is being removed.
_END_S = 120.0
# Minutes that a submit may take from its first file to the last.
_SUBMIT_MIN = 3
# Seconds that Slurm has to start a step which asks the head, and the size of the longest answer.
_STEP_S, _ANSWER_BYTES = 20, 64 << 20
# Files in the job's folder: it was cancelled, and without its grace period.
_CANCELLED, _NOW = "cancelled", "now"
_NO_JOB = ("Invalid job id", "invalid job id")
_HAS_ENDED = ("already completing or completed", *_NO_JOB)


class _Handle(NamedTuple):
    host: SlurmHost
    folder: str
    job: str


class _Snapshot(NamedTuple):
    """What Slurm and the job's folder reported at one moment."""

    marks: state.Marks
    id: str
    is_cancelled: bool


class _Answer(NamedTuple):
    facts: state.Facts
    queried_at: float
    answered_at: float


class SlurmBackend(Backend[SlurmRequest]):
    """Runs jobs on Slurm; see ``Backend`` for what it promises."""

    def __init__(self, home: Path, options: dict[str, Any]) -> None:
        self._home = home
        self._options = options
        self._found: SlurmCluster | None = None
        # Slurm's last answer about a job, when it was asked and when it last answered.
        self._facts: dict[str, _Answer] = {}
        # The contents of a job's folder on another machine, and when they were read.
        self._snapshots: dict[str, tuple[float, _Snapshot]] = {}
        # The ended jobs whose outputs have been copied back.
        self._copied_back: set[str] = set()

    @property
    def poll_s(self) -> float:
        return _FAR_POLL_S if self._options.get("host") else _POLL_S

    def checks(self, spec: JobSpec | None, store: str) -> list[Check]:
        return checks.run(self._cluster, spec)

    # -- forward ------------------------------------------------------------------------------

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices:
        return requests.devices(spec)

    def build(self, submission: Submission) -> SlurmRequest:
        return requests.build(submission, self._cluster)

    def show(self, request: SlurmRequest) -> dict[str, Any]:
        return requests.show(request)

    def environments(self, request: SlurmRequest) -> Iterable[Mapping[str, str]]:
        return request.environments

    def send(self, request: SlurmRequest) -> str:
        host = self._cluster.host
        folder = host.put(request.folder, self._files(request))
        try:
            self._submit(request, host, folder)
        except Unanswered:
            # Keep the folder: a job that Slurm has accepted is found by it.
            raise
        except BackendError:
            host.run("", f"rm -rf {quoted(folder)}")
            raise
        return self.handle(request)

    def handle(self, request: SlurmRequest) -> str:
        return _written_handle(self._cluster.host, request.folder)

    def own_handle(self, handle: str, job: str) -> str:
        theirs, ours = _parse_handle(handle), self._cluster
        doing = f"looking for {job} on Slurm"
        if theirs.host != ours.host:
            hint = "set slurm.host in your configuration"
            raise handles.not_ours(
                doing,
                f"the login node {theirs.host.name or '(none)'}",
                ours.host.name,
                hint,
            )
        folder = f"{ours.folder}/{job}"
        if theirs.folder != folder:
            parent = theirs.folder.rpartition("/")[0]
            hint = "set slurm.folder in your configuration"
            raise handles.not_ours(doing, f"the folder {parent}", ours.folder, hint)
        return _written_handle(ours.host, folder)

    def _files(self, request: SlurmRequest) -> dict[str, bytes]:
        files = {
            script.JOB_SCRIPT: os.fsencode(request.job_script),
            **{name: os.fsencode(text) for name, text in request.node_scripts.items()},
            Path(request.entry).name: deliveries.entry(),
            paths.DELIVERED_ENV: variables.dump(request.env),
        }
        if not self._cluster.entry_python:
            files["boot.sh"] = deliveries.files()[deliveries.BOOT]
        if request.local:
            files.update(local_store.package(request.local, request.job, request.layers))
        return files

    def _submit(self, request: SlurmRequest, host: SlurmHost, folder: str) -> None:
        if request.folder != folder:
            # Paths below the folder are known now.
            env = variables.dump(requests.located(request, folder))
            done = host.run(folder, f"cat >{paths.DELIVERED_ENV}", env)
            if done.code:
                raise BackendError(f"writing the variables of {request.job}: {done.message}")
        sbatch = clusters.with_clean_environment(
            f"sbatch --parsable --export=ALL {script.JOB_SCRIPT}", request.inherited
        )
        # In the shell, so that the number is stored even if this process is killed.
        try:
            done = host.run(folder, f"{sbatch} >{script.ID}.new && mv {script.ID}.new {script.ID}")
        except BackendError as error:
            raise Unanswered(error.message, hint=error.hint) from error
        if done.code and errors.may_be_done(done.message):
            message = f"submitting job {request.job} to Slurm: {done.message}"
            raise Unanswered(message, hint="squeue --me shows whether it was submitted")
        if done.code:
            raise errors.command_error(f"submitting job {request.job} to Slurm", done.message)
        if request.local:
            local_store.remember(self._home, request.job, request.local)
        # A job that was just sent needs no query yet.
        now = time.monotonic()
        self._facts[request.job] = _Answer(state.Facts(state="PENDING"), now, now)

    # -- back ---------------------------------------------------------------------------------

    def status(self, handle: str) -> NativeStatus:
        where = _parse_handle(handle)
        snapshot = self._snapshot(where)
        if is_settled(snapshot.marks):
            facts = state.Facts()
        else:
            facts = self._query(where, snapshot)
            if facts.state:
                # The folder may have changed while Slurm was asked.
                snapshot = self._snapshot(where)
        if not (facts.state or snapshot.id or snapshot.marks.id) and self._is_new(where):
            return Waiting("being submitted")
        marks = snapshot.marks
        if state.may_lack_prolog(marks, facts, is_cancelled=snapshot.is_cancelled):
            marks = state.with_prolog(marks, facts, self._log_of_slurm(where))
        status = state.status_of(marks, facts, is_cancelled=snapshot.is_cancelled)
        if status.state.is_final:
            self._copy_back(where)
        return status

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the status of many jobs of one host from one squeue and one read of all folders.

        A job that squeue does not list has ended, and is left to ``status``.
        """
        parsed = dict(_parsed(handles))
        if not parsed:
            return {}
        host = next(iter(parsed.values())).host
        snapshots = dict(_read_many(host, parsed))
        status_of: dict[str, NativeStatus | None] = {
            h: None for h, snapshot in snapshots.items() if not snapshot
        }
        unsettled = {
            h: snapshot
            for h, snapshot in snapshots.items()
            if snapshot and not is_settled(snapshot.marks)
        }
        if unsettled:
            try:
                queue = state.read_jobs(
                    _output_of(host, f"{_QUEUE} --me", "listing your jobs on Slurm")
                )
            except BackendError as error:
                unknown = Unknown(error.message)
                return status_of | dict.fromkeys(unsettled, unknown)
            status_of |= _queued(queue, unsettled)
        return status_of

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        where = _parse_handle(handle)
        self._snapshot(where)
        offsets: dict[int, int] = {}

        def read_new() -> Iterator[tuple[int, bytes]]:
            for index, data in sorted(where.host.tails(where.folder, offsets).items()):
                offsets[index] = offsets.get(index, 0) + len(data)
                yield index, data

        def has_ended() -> bool:
            return self.status(handle).state.is_final

        pause_s = (_FAR_POLL_S, _FAR_POLL_S) if where.host.name else _LOG_POLL_S
        for index, data in poll(read_new, has_ended, follow=follow, pause_s=pause_s):
            if node in (None, index) or not data:
                yield index, data

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        where = _parse_handle(handle)
        self._snapshot(where)
        heads = where.host.tails(where.folder, {})
        for index, head in sorted(heads.items()):
            yield index, head[: head.rfind(b"\n") + 1]
        if not any(len(head) == PIECE_BYTES for head in heads.values()):
            return
        ends = where.host.ends(where.folder)
        for index, tail in sorted(where.host.tails(where.folder, ends).items()):
            yield index, tail[tail.find(b"\n") + 1 : tail.rfind(b"\n") + 1]

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        """Cancel the job; its ranks get their grace period unless it is suspended."""
        where = _parse_handle(handle)
        snapshot = self._snapshot(where)
        facts = self._query(where, snapshot, is_fresh=True)
        if (
            not facts.id
            or state.status_of(snapshot.marks, facts, is_cancelled=False).state.is_final
        ):
            return
        where.host.run(where.folder, f": >{_CANCELLED}")
        if state.is_waiting(facts):
            self._scancel(where, f"--state=PENDING {facts.id}")
            # The job may have started in the meantime.
            facts = self._query(where, snapshot, is_fresh=True)
            if state.is_over(facts):
                return
        # The script passes the signal on to the head: a signal to all that Slurm has started would
        # end mpirun before the ranks. A job whose processes are stopped cannot receive it.
        if is_urgent:
            where.host.run(where.folder, f": >{_NOW}")
        is_running = state.is_running(facts)
        self._scancel(where, f"--batch --signal=USR2 {facts.id}" if is_running else facts.id)

    def refresh(self, handle: str, keys: Mapping[str, str]) -> None:
        """Write fresh keys of the store into the job's folder."""
        where = _parse_handle(handle)
        name = paths.DELIVERED_KEYS
        text = f"umask 077; cat >{name}.new && mv {name}.new {name}"
        done = where.host.run(where.folder, text, variables.dump(keys))
        if done.code:
            raise BackendError(f"refreshing the keys of {handle}: {done.message}")

    def command_on(
        self, handle: str, node: int, arguments: Sequence[str], *, is_terminal: bool
    ) -> list[str]:
        """Return a step of the job on the node, as a command of the machine with Slurm."""
        where = _parse_handle(handle)
        job = self._slurm_id(where, f"entering node {node} of {handle}")
        text = _step(job, node, ("--pty",) if is_terminal else ("--quiet",), arguments)
        return where.host.command(where.folder, text, is_terminal=is_terminal)

    def _slurm_id(self, where: _Handle, doing: str) -> str:
        job = self._query(where, self._snapshot(where)).id
        if not job:
            raise BackendError(f"{doing}: Slurm does not know the job")
        return job

    def ask(self, handle: str, request: bytes) -> bytes:
        """Ask the head from a step of the job on its node."""
        where = _parse_handle(handle)
        doing = f"asking the nodes of {handle}"
        arguments = ("--ask", request.decode("ascii"))
        text = _step(self._slurm_id(where, doing), 0, ("--input=none", "--quiet"), arguments)
        done = where.host.run(where.folder, text, limit_bytes=_ANSWER_BYTES)
        if done.code:
            raise errors.command_error(doing, done.message)
        # A prolog of the site may print something before.
        return done.out.rstrip(b"\n").rpartition(b"\n")[2]

    def _scancel(self, where: _Handle, arguments: str) -> None:
        done = where.host.run(where.folder, clusters.with_clean_environment(f"scancel {arguments}"))
        if done.code and not any(text in done.message for text in _HAS_ENDED):
            raise errors.command_error(f"cancelling {where.job}", done.message)

    def remove(self, handle: str) -> None:
        """Remove everything of the job; a running job is ended first."""
        where = _parse_handle(handle)
        try:
            self._end(where)
        except JobNotFound:
            return
        # Only the folder of a job, whatever the configuration says.
        text = f"[ -f {script.JOB_SCRIPT} ] && [ ! -L {script.JOB_SCRIPT} ]"
        if where.host.run(where.folder, text).code:
            raise BackendError(
                f"removing {where.folder}: it is not the folder of a job: it has no "
                f"{script.JOB_SCRIPT}",
                hint="remove it yourself, if nobody needs it",
            )
        done = where.host.run("", f"rm -rf {quoted(where.folder)}")
        if done.code:
            raise BackendError(f"removing {where.folder}: {done.message}")
        local_store.forget(self._home, where.job)

    # -- the cluster --------------------------------------------------------------------------

    @property
    def _cluster(self) -> SlurmCluster:
        if self._found is None:
            self._found = clusters.find(self._options, self._home)
        return self._found

    def _snapshot(self, where: _Handle) -> _Snapshot:
        """Read the files in the job's folder.

        Raises:
            JobNotFound: There is no such folder.
        """
        read_at, snapshot = self._snapshots.get(where.job) or (0.0, None)
        if snapshot is None or not where.host.name or time.monotonic() - read_at > _FAR_POLL_S / 2:
            snapshot = _snapshots_of(where.host, [where.folder])[0]
            if snapshot is None:
                on = f" on {where.host.name}" if where.host.name else ""
                raise JobNotFound(f"looking for {where.folder}{on}: there is no such folder")
            self._snapshots[where.job] = (time.monotonic(), snapshot)
        return snapshot

    def _query(self, where: _Handle, snapshot: _Snapshot, *, is_fresh: bool = False) -> state.Facts:
        """Ask Slurm about the job, unless it was asked just now."""
        now = time.monotonic()
        last = self._facts.get(where.job)
        wait_s = _QUERY_LAST_S if snapshot.marks.code is not None else _QUERY_S
        if last and not is_fresh and now - last.queried_at < wait_s:
            return last.facts
        try:
            facts, answered_at = self._query_slurm(where, snapshot), now
        except BackendError:
            # A restart of the controller ends neither a job nor a wait for one.
            if last is None or is_fresh or now - last.answered_at > _RETRY_S:
                raise
            facts, answered_at = last.facts, last.answered_at
        self._facts[where.job] = _Answer(facts, time.monotonic(), answered_at)
        return facts

    def _query_slurm(self, where: _Handle, snapshot: _Snapshot) -> state.Facts:
        number = snapshot.id or snapshot.marks.id
        doing = f"asking Slurm for {where.job}"
        which = f"-j {number}" if number else f"--me --name={script.JOB_NAME}{where.job}"
        queue = _output_of(where.host, f"{_QUEUE} {which}", doing)
        facts_of = state.read_jobs(queue)
        if number and queue and where.job not in facts_of:
            folder = _output_of(where.host, f"{_FOLDER_OF} -j {number}", doing).strip()
            if Path(folder).name == where.job:
                facts_of = state.read_jobs(queue, renamed=where.job)
        if number and where.job not in facts_of:
            # The controller has forgotten the job; the site may have no accounting.
            facts_of = state.read_jobs(
                _output_of(where.host, f"{_ACCOUNTING} -j {number} 2>/dev/null || :", doing)
            )
        facts = facts_of.get(where.job, state.Facts())
        if facts.id and not number:
            # Its submitter was killed before it could store the number.
            where.host.run(where.folder, f"echo {facts.id} >{script.ID}")
        if state.lacks_exit_code(snapshot.marks, facts):
            details = _output_of(where.host, f"{_SCONTROL_SHOW} job {facts.id}", doing)
            facts = replace(
                facts, exit_code=state.read_exit_code(details.partition("ExitCode=")[2])
            )
        return facts

    def _log_of_slurm(self, where: _Handle) -> str:
        done = where.host.run(where.folder, f"head -c 4096 {script.SLURM_LOG}", is_reading=True)
        return done.out.decode("utf-8", "replace")

    def _is_new(self, where: _Handle) -> bool:
        """Whether the job's submit may still be running."""
        text = f"find {script.JOB_SCRIPT} -mmin -{_SUBMIT_MIN}"
        return bool(where.host.run(where.folder, text).out)

    def _copy_back(self, where: _Handle) -> None:
        """Copy back the job's results, and delete its secrets."""
        if where.job in self._copied_back:
            return
        if local_store.bring_home(where.host, where.folder, self._home, where.job):
            local_store.forget(self._home, where.job)
        key = paths.DELIVERED_SSH_KEY
        secret_files = (paths.DELIVERED_ENV, paths.DELIVERED_KEYS, key, f"{key}.pub")
        where.host.remove(where.folder, secret_files)
        self._copied_back.add(where.job)

    def _end(self, where: _Handle) -> None:
        snapshot = self._snapshot(where)
        facts = self._query(where, snapshot, is_fresh=True)
        deadline = time.monotonic() + _END_S
        has_cancelled = False
        while facts.id and not state.is_over(facts):
            if not has_cancelled:
                where.host.run(where.folder, clusters.with_clean_environment(f"scancel {facts.id}"))
                has_cancelled = True
            if time.monotonic() > deadline:
                raise BackendError(
                    f"removing {where.job}: Slurm's job {facts.id} does not end ({facts.state})",
                    hint="try again in a few minutes, or ask the administrator of the cluster",
                )
            time.sleep(_END_POLL_S)
            facts = self._query(where, snapshot, is_fresh=True)


_QUEUE = clusters.with_clean_environment(
    f"SLURM_TIME_FORMAT=%s squeue -a -h -t all -o '{state.QUEUE_COLUMNS}'"
)
_FOLDER_OF = clusters.with_clean_environment("squeue -a -h -t all -o %Z")
_ACCOUNTING = clusters.with_clean_environment(
    f"SLURM_TIME_FORMAT=%s sacct -n -P -X -o {state.ACCOUNTING_COLUMNS}"
)
_SCONTROL_SHOW = clusters.with_clean_environment("scontrol show")
# A folder's file ``state`` has a few lines for each attempt.
_STATE_BYTES = 1 << 20
# Prints for each folder on its input: an empty line if it is missing; else the size of its file
# ``state``, whether the job was cancelled and its number on Slurm, then that file.
_READ_FOLDERS = f"""while IFS= read -r folder; do
    case $folder in "~/"*) folder=$HOME/${{folder#"~/"}} ;; esac
    cd "$folder" 2>/dev/null || {{ echo; continue; }}
    cancelled=0 number= size=0
    [ ! -e cancelled ] || cancelled=1
    [ ! -f id ] || number=$(head -c 4096 id 2>/dev/null | tr '\\n' ' ')
    [ ! -f state ] || size=$({{ wc -c <state; }} 2>/dev/null || echo 0)
    size=$((size))
    [ "$size" -le {_STATE_BYTES} ] || size={_STATE_BYTES}
    echo $size $cancelled "$number"
    [ $size = 0 ] || head -c $size state
done"""


def _queued(
    queue: Mapping[str, state.Facts], snapshots: Mapping[str, _Snapshot]
) -> Iterator[tuple[str, NativeStatus]]:
    """Yield handle and status of the jobs in the queue that have not ended."""
    for handle, snapshot in snapshots.items():
        facts = queue.get(_parse_handle(handle).job)
        if facts is not None:
            status = state.status_of(snapshot.marks, facts, is_cancelled=snapshot.is_cancelled)
            if not status.state.is_final:
                yield handle, status


def _parsed(handles: Sequence[str]) -> Iterator[tuple[str, _Handle]]:
    """Yield the handles that can be read with others; ``status`` reads any other one alone."""
    for handle in handles:
        with suppress(JobNotFound):
            where = _parse_handle(handle)
            # A newline would look like two folders.
            if "\n" not in where.folder:
                yield handle, where


def _read_many(
    host: SlurmHost, parsed: Mapping[str, _Handle]
) -> Iterator[tuple[str, _Snapshot | None]]:
    """Yield the contents of each job's folder, without those that cannot be read."""
    if host.name:
        folders = [where.folder for where in parsed.values()]
        yield from zip(parsed, _snapshots_of(host, folders), strict=True)
        return
    for handle, where in parsed.items():
        with suppress(BackendError):
            yield handle, _local_snapshot(Path(where.folder))


def _snapshots_of(host: SlurmHost, folders: Sequence[str]) -> list[_Snapshot | None]:
    """Return the contents of job folders; None for a missing folder."""
    if not host.name:
        return [_local_snapshot(Path(folder)) for folder in folders]
    text = "".join(f"{folder}\n" for folder in folders)
    done = host.run("", _READ_FOLDERS, os.fsencode(text), is_reading=True)
    snapshots: list[_Snapshot | None] = []
    rest = done.out
    with suppress(ValueError):
        while rest:
            snapshot, rest = _next_snapshot(rest)
            snapshots.append(snapshot)
    if done.code or len(snapshots) != len(folders):
        raise BackendError(f"reading the folders of jobs on {host.name}: {done.message}")
    return snapshots


def _next_snapshot(data: bytes) -> tuple[_Snapshot | None, bytes]:
    """Return the first snapshot of the output of that program, and the rest of the output.

    Raises:
        ValueError: The output is damaged.
    """
    line, _, rest = data.partition(b"\n")
    if not line:
        return None, rest
    size, cancelled, number = line.decode("ascii", "replace").split(" ", 2)
    marks, rest = rest[: int(size)], rest[int(size) :]
    text = marks.decode("utf-8", "replace")
    return _Snapshot(state.read_marks(text), state.read_number(number), cancelled == "1"), rest


def _local_snapshot(folder: Path) -> _Snapshot | None:
    if not folder.is_dir():
        return None
    return _Snapshot(
        state.read_marks(_read(folder / script.STATE)),
        state.read_number(_read(folder / script.ID)),
        (folder / _CANCELLED).exists(),
    )


def _read(path: Path) -> str:
    """Return the beginning of a file; empty if it is missing or no regular file."""
    try:
        # Opening a FIFO waits for its writer.
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_STATE_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BackendError(f"reading {path}: {error.strerror}") from error


def _step(job: str, node: int, options: Sequence[str], arguments: Sequence[str]) -> str:
    """Return a program of sh for the job's folder: it starts the node half on a node.

    Args:
        job: The job's id in Slurm.
        arguments: Those of the node half.
    """
    srun = clusters.with_clean_environment(
        f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mpi=none"
        f' --immediate={_STEP_S} --nodelist="$node" {" ".join(options)}'
        f" sh {script.ENTER_SCRIPT} {shlex.join(arguments)}",
        more=("TERM",),
    )
    # As job.sh numbers the nodes: the one that Slurm has started the job on, then the others.
    nodes = f'{{ echo "$1"; {_SCONTROL_SHOW} hostnames "$2" | grep -vxF -e "$1"; }}'
    hosts = clusters.with_clean_environment(f"squeue -h -j {job} -o '%B %N'")
    return f"set -f; set -- $({hosts}) && node=$({nodes} | sed -n {node + 1}p) && {srun}"


def _output_of(host: SlurmHost, text: str, doing: str) -> str:
    """Return the output of one of Slurm's commands; empty for a job that it does not know."""
    done = host.run("", text, is_reading=True)
    if done.code and not any(part in done.message for part in _NO_JOB):
        raise errors.command_error(doing, done.message)
    return done.out.decode("utf-8", "replace")


def _written_handle(host: SlurmHost, folder: str) -> str:
    path = folder if folder.startswith("/") else "/" + folder
    return handles.write(_SCHEME, host.name, quote(path, safe="/~")[1:])


def _parse_handle(handle: str) -> _Handle:
    host, *names = handles.read(handle, _SCHEME)
    folder = unquote("/".join(names))
    return _Handle(
        SlurmHost(host), folder if folder.startswith("~/") else "/" + folder, unquote(names[-1])
    )
