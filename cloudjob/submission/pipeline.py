"""The forward path on one screen: spec -> package -> store -> submission -> request -> job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudjob
from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend, Check
from cloudjob.errors import (
    CloudJobError,
    NotReady,
    RecordsError,
    SpecError,
    StoreError,
    Unanswered,
)
from cloudjob.home import locks, make_home, records_path, store_uri, submits_folder
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.model import sizes, validation
from cloudjob.model import submission as submissions
from cloudjob.model.job import masked
from cloudjob.model.progress import OnProgress, log_warnings, meter
from cloudjob.model.submission import Code, Submission, prepare
from cloudjob.model.text import hidden_texts, hide, secrets_masked
from cloudjob.package import CodePackage, Memory, Options, cache, claims, pack
from cloudjob.package.claims import Claim, Kept, Missing
from cloudjob.store import job_store, open_store
from cloudjob.store.base import Expiring, ObjectStore, Signer
from cloudjob.store.parallel import call_with_timeout, in_parallel
from cloudjob.submission import (
    launcher_choice,
    messages,
    nested_launchers,
    ranks,
    script_check,
    store_keys,
)
from cloudjob.submission.launcher_choice import Choice
from cloudjob.times import rfc3339
from cloudjob.tracking import Job, descriptions, notifications
from cloudjob.tracking.leftovers import sweep
from jobentry.contract import names
from jobentry.contract.launchers import AUTO
from jobentry.contract.packages import Layer, damage_key
from jobentry.contract.paths import ENTRY, JobPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The nodes of a job with signed addresses that store their journals.
_SIGNED_JOURNALS = 16
_MB = 1_000_000
# How many objects are put at once.
_AT_ONCE = 8
# For how long a submit that failed or was cancelled deletes what it has stored.
_UNDO_S = 3.0
# No vowels and no look-alikes, because people type ids and read them aloud.
_ID_LETTERS = "23456789bcdfghjkmnpqrstvwxz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a job of a sweep has before it is submitted: a ready job, and the package of all jobs.

    Args:
        values: The values of the sweep that this job has.
    """

    job: str
    sweep: str
    values: Mapping[str, str]
    package: CodePackage


def submit(
    spec: JobSpec,
    home: Path,
    *,
    member: Member | None = None,
    on_progress: OnProgress = log_warnings,
) -> Job:
    """Send ``spec`` to its backend and return the running job.

    Args:
        home: The folder of cloudjob's state on this machine.
        member: For a job of a sweep, whose ``spec`` is from ``make_ready``.
        on_progress: Called with each report, from any thread.

    Raises:
        CloudJobError: Nothing was started, and nothing is left except layers, which the next submit
            uses and ``cloudjob store gc`` removes.
    """
    if member is None:
        script_check.check(spec)
    job = member.job if member else new_id(spec.name)
    paths = JobPaths(job)
    sending = partial(meter, "sending", on_progress=on_progress)
    backend = _open_backend(spec, home)
    uri, store = _open_store(spec, backend, home)
    make_home(home)
    sweep(home)
    with (
        notifications.promised(spec, home, job),
        locks.scratch(submits_folder(home), job) as scratch,
        Records(records_path(home)) as db,
    ):
        if member is None:
            spec, package = _ready(spec, backend, uri, home, scratch, on_progress)
        else:
            package = member.package
        # Building a request reports what the platform cannot do before anything is sent.
        backend.build(_prepare(spec, paths, store, package, package.layers))
        checks = (
            backend.checks(spec, uri),
            () if member else _script_checks(spec),
            _key_checks(spec, backend, store),
        )
        _check(chain.from_iterable(checks), on_progress)
        with _undo_on_failure(store, db, job) as undo, Claim(store, job, sending) as claim:
            package, kept = _keep(spec, home, uri, scratch, claim, package)
            _check_same(member, package)
            submission = _prepare(spec, paths, store, package, kept.layers)
            request = backend.build(submission)
            # With its handle, before anything starts: if this process is killed from here on,
            # every command finds the job.
            text = _text(submission, member)
            record = _record(submission, package, uri, backend.handle(request), text)
            db.add(record)
            store.put_bytes(descriptions.dump(record, home), descriptions.key(job))
            claim.check()
            store.put_bytes(text, paths.submission)
            store.put_bytes(claims.descriptor(package, kept.layers), paths.code)
            _put_companions(store, paths, kept, backend.companions(request))
            on_progress(messages.sent(package, kept))
            undo.on_platform = lambda: backend.remove(record.handle)
            record = record._replace(handle=backend.send(request), state="PENDING")
            undo.is_over = True
        # The job runs, and its record and its description are good enough to find it.
        with suppress(RecordsError):
            db.update(job, handle=record.handle, state=record.state)
        if record.handle != backend.handle(request):
            with suppress(StoreError):
                store.put_bytes(descriptions.dump(record, home), descriptions.key(job))
    return Job(record, backend, home, store)


def _check_same(member: Member | None, package: CodePackage) -> None:
    """Check that a package that had to be made again is that of the other jobs of the sweep."""
    if member and package.digest != member.package.digest:
        raise StoreError(
            f"storing the package of {member.job}: it is gone, and the source has changed since",
            hint="restore the source, or start a new sweep",
        )


def make_ready(
    spec: JobSpec, home: Path, scratch: Path, on_progress: OnProgress
) -> tuple[JobSpec, CodePackage]:
    """Return the job with all that is chosen for it, and its package, a file in ``scratch``."""
    script_check.check(spec)
    _check(_script_checks(spec), on_progress)
    backend = _open_backend(spec, home)
    uri, _ = _open_store(spec, backend, home)
    return _ready(spec, backend, uri, home, scratch, on_progress)


def _ready(
    spec: JobSpec,
    backend: Backend[Any],
    uri: str,
    home: Path,
    scratch: Path,
    on_progress: OnProgress,
) -> tuple[JobSpec, CodePackage]:
    package = _pack(spec, home, scratch, uri, _remembered(spec, home, uri))
    spec, choice = _with_launcher(spec)
    spec, chosen = ranks.choose(spec, backend, may_ask=True)
    reports = (messages.launcher(choice), messages.ranks(chosen), messages.left_out(package))
    for report in chain.from_iterable(reports):
        on_progress(report)
    return spec, package


@dataclass(frozen=True, slots=True)
class Preview:
    """What ``submit`` would send, and what each node would do.

    Args:
        choice: The launcher that was chosen, when the job names none.
        ranks: How many ranks a node has and why, empty if that is obvious.
        plans: One object a node, as ``jobentry --dry-run --json`` prints it.
        text: The request in the format of the platform's own tool; empty if there is no such tool.
    """

    package: CodePackage
    choice: Choice | None
    ranks: str
    submission: dict[str, Any]
    request: dict[str, Any]
    plans: tuple[dict[str, Any], ...]
    text: str = ""


def preview(spec: JobSpec, home: Path, *, planned_nodes: int | None = None) -> Preview:
    """Return what ``submit`` would do, and do nothing.

    Args:
        planned_nodes: How many nodes to plan, from the head on; None for all.
    """
    script_check.check(spec)
    backend = _open_backend(spec, home)
    uri, store = _open_store(spec, backend, home)
    with TemporaryDirectory(prefix="cloudjob-pack-") as scratch:
        package = _pack(spec, home, Path(scratch), uri, _remembered(spec, home, uri))
    spec, choice = _with_launcher(spec)
    spec, chosen = ranks.choose(spec, backend, may_ask=False)
    submission = _prepare(spec, JobPaths(new_id(spec.name)), store, package, package.layers)
    request = backend.build(submission)
    hidden = submissions.hidden_values(submission)
    return Preview(
        package=package,
        choice=choice,
        ranks=chosen,
        submission=submissions.show(submission),
        request=hide(backend.show(request), hidden),
        plans=tuple(
            hide(_plan(environment, (spec.script, *spec.args)), hidden)
            for environment in backend.environments(request)[:planned_nodes]
        ),
        text=hide(backend.text(request), hidden),
    )


def _plan(environment: Mapping[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    """Ask the entry itself what it would do on a node."""
    entry = str(Path(cloudjob.__file__).with_name(ENTRY))
    done = subprocess.run(
        [sys.executable, "-I", "-S", entry, "--dry-run", "--json", *words],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().removeprefix("jobentry: ")
        raise SpecError([f"planning a node: {said}"])
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def new_id(name: str) -> str:
    """Return a job id: the name, shortened to fit into a host name, and a random tail."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    tail = "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in os.urandom(8))
    # Host names are made of it, and a part of a host name has at most 63 letters.
    return f"{letters.strip('-')[:30].strip('-') or 'job'}-{tail}"


def _pack(spec: JobSpec, home: Path, scratch: Path, uri: str, memory: Memory) -> CodePackage:
    return pack(
        Path(spec.source),
        scratch / "layer",
        script=None if spec.takes_command else spec.script,
        limit_bytes=int(spec.source_limit_mb * _MB),
        options=Options(
            # Copying to a folder is faster than compressing; over a network it is not.
            is_compressed=not uri.startswith("file:"),
            follow_links=spec.links == "follow",
            home=home,
        ),
        memory=memory,
    )


def _with_launcher(spec: JobSpec) -> tuple[JobSpec, Choice | None]:
    """Return the job with a launcher, and the reason for it if the job names none."""
    choice = None
    if spec.launcher == AUTO:
        choice = launcher_choice.choose(spec)
        spec = spec.model_copy(update={"launcher": choice.launcher})
        # Some values are valid with some launchers only, and until now the job had none.
        validation.check(spec)
    nested_launchers.check(spec)
    return spec, choice


def _open_backend(spec: JobSpec, home: Path) -> Backend[Any]:
    return open_backend(spec.backend, home, dict(spec.section(spec.backend)))


def _open_store(spec: JobSpec, backend: Backend[Any], home: Path) -> tuple[str, ObjectStore]:
    """Return the store that the job names, or its platform's, or a folder of this machine."""
    default, keys = backend.store()
    uri = job_store(spec.store, default or store_uri(home), spec.sections)
    return uri, open_store(uri, {**keys, **os.environ})


def _keep(
    spec: JobSpec, home: Path, uri: str, scratch: Path, claim: Claim, package: CodePackage
) -> tuple[CodePackage, Kept]:
    """Send what is new, and remember it; send everything when a layer is gone or damaged."""
    try:
        kept = claim.keep(package)
    except Missing:
        package = _pack(spec, home, scratch, uri, Memory())
        kept = claim.keep(package)
    if not package.is_remembered:
        path = cache.path_of(home, Path(spec.source), uri)
        cache.save(path, cache.with_layers(package.memory, kept.layers))
    return package, kept


def _remembered(spec: JobSpec, home: Path, uri: str) -> Memory:
    return cache.load(cache.path_of(home, Path(spec.source), uri))


def _prepare(
    spec: JobSpec,
    paths: JobPaths,
    store: ObjectStore,
    package: CodePackage,
    code_layers: tuple[Layer, ...],
) -> Submission:
    submission = prepare(
        spec,
        paths.job,
        code=Code(
            uri=store.uri(paths.code),
            digest=package.digest,
            layers=tuple(store.uri(layer.key) for layer in code_layers),
        ),
        record_uri=store.uri(paths.record),
        outputs_uri=store.uri(paths.outputs),
    )
    sizes.check(submission)
    return replace(submission, access=_access(spec, paths, store, code_layers))


def _access(
    spec: JobSpec, paths: JobPaths, store: ObjectStore, code_layers: tuple[Layer, ...]
) -> dict[str, str]:
    """Return keys of the store, or addresses of all that the job reads and writes in it."""
    hours = spec.section(spec.backend).get("presigned_h")
    if not (isinstance(hours, (int, float)) and hours and isinstance(store, Signer)):
        return store.access()
    limit_s = round(hours * 3600)
    wanted = [("GET", paths.code), ("PUT", paths.record)]
    # Each address takes half a kilobyte of a variable: of more nodes, the log has the journals.
    wanted += [("PUT", paths.journal(node)) for node in range(min(spec.nodes, _SIGNED_JOURNALS))]
    wanted += [("GET", layer.key) for layer in code_layers]
    wanted += [("PUT", damage_key(layer.key)) for layer in code_layers]
    signed = {store.uri(key): store.sign(method, key, limit_s) for method, key in wanted}
    return {names.CLOUDJOB_SIGNED_URIS: json.dumps(signed)}


def _check(checks: Iterable[Check], on_progress: OnProgress) -> None:
    """Check that a job can be sent.

    Raises:
        NotReady: With every failed check that the job needs.
    """
    wrong = [check for check in checks if not check.is_ok]
    needed = [check for check in wrong if check.is_needed]
    if needed:
        raise NotReady([(f"{check.name}: {check.found}", check.hint) for check in needed])
    for check in wrong:
        on_progress(messages.warning(check))


def _script_checks(spec: JobSpec) -> Iterator[Check]:
    fault = script_check.find(spec)
    if fault:
        yield Check("script", False, fault.what, fault.hint, is_needed=False)
    found = nested_launchers.dropped(spec)
    if found:
        hint = "with --strict, the job fails with that exit code"
        yield Check("script", False, f"{found}; {hint}", is_needed=False)
    yield from _secret_checks(spec)


def _secret_checks(spec: JobSpec) -> Iterator[Check]:
    shown = (*spec.args, *spec.env.values())
    for name, value in spec.secrets.items():
        hidden = hidden_texts([value])
        if any(text in each for text in hidden for each in shown):
            found = f"the value of {name} is in arguments or variables, which the platform shows"
            hint = f"read it in the script from the variable {name}"
            yield Check("secrets", False, found, hint, is_needed=False)
    for name, value in secrets_masked(spec.env).items():
        if spec.env[name] != value:
            found = f"{name} is an ordinary variable, which the platform shows"
            hint = f"export it, and pass it with --secret {name} or under `secrets:`"
            yield Check("secrets", False, found, hint, is_needed=False)


def _key_checks(spec: JobSpec, backend: Backend[Any], store: ObjectStore) -> Iterator[Check]:
    if not backend.copies_files and isinstance(store, Expiring):
        yield from store_keys.checks(spec, store.keys_end_at())


def _put_companions(
    store: ObjectStore, paths: JobPaths, kept: Kept, companions: Mapping[str, bytes]
) -> None:
    """Put the package and its companions into the folder that the platform copies to the nodes.

    Layers are copied within the store, so that none is sent again; objects are written in
    parallel, as each costs a round trip.
    """
    if not companions:
        return
    acts: list[Callable[[], object]] = [
        partial(store.put_bytes, data, f"{paths.node}/{name}") for name, data in companions.items()
    ]
    copies = [(paths.code, paths.delivered_code)]
    copies += [(layer.key, f"{paths.node}/{layer.key}") for layer in kept.layers]
    acts += [partial(store.copy, key, target) for key, target in copies]
    in_parallel(lambda act: act(), acts, at_once=_AT_ONCE, abort=store.abort)


@dataclass(slots=True)
class _Undo:
    """What to undo if a submit fails.

    Args:
        on_platform: Removes the job from its platform; set when sending begins.
        is_over: Whether the job was sent, so that nothing is undone any more.
    """

    on_platform: Callable[[], None] | None = None
    is_over: bool = False


@contextmanager
def _undo_on_failure(store: ObjectStore, db: Records, job: str) -> Iterator[_Undo]:
    """Undo what was done if the rest fails, so that a submit leaves a job or nothing."""
    undo = _Undo()
    try:
        yield undo
    except BaseException as error:
        if undo.is_over or not _is_unsent(undo, error):
            raise
        with suppress(CloudJobError, TimeoutError):
            call_with_timeout(_UNDO_S, lambda: _delete_all(store, job))
        with suppress(CloudJobError):
            db.remove(job)
        raise


def _is_unsent(undo: _Undo, error: BaseException) -> bool:
    """Whether its platform has nothing of the job; if that is uncertain, remove the job."""
    is_refused = isinstance(error, CloudJobError) and not isinstance(error, Unanswered)
    if undo.on_platform is None or is_refused:
        return True
    try:
        undo.on_platform()
    except CloudJobError:
        # It may be running: its record stays, so that `cancel` and `rm` find it.
        return False
    return True


def _delete_all(store: ObjectStore, job: str) -> None:
    for key in [*store.list(f"{job}/"), JobPaths(job).code, descriptions.key(job)]:
        store.delete(key)


def _record(
    submission: Submission, package: CodePackage, store: str, handle: str, text: bytes
) -> JobRecord:
    spec = submission.spec
    return JobRecord(
        job=submission.job,
        name=spec.name,
        backend=spec.backend,
        handle=handle,
        state=SUBMITTING,
        nodes=spec.nodes,
        procs_per_node=spec.procs_per_node,
        created_at=rfc3339(time.time()),
        code_uri=submission.code.uri,
        code_digest=package.digest,
        code_size_bytes=package.size_bytes,
        code_files=package.files,
        store=store,
        submitted_by=descriptions.submitter(),
        spec_json=text.decode("ascii"),
    )


def _text(submission: Submission, member: Member | None) -> bytes:
    hidden = submissions.hidden_values(submission)
    # With the job as the user described it, from which `cloudjob cp` makes another one.
    shown = {**submissions.show(submission), "spec": masked(submission.spec, hidden)}
    if member:
        shown["sweep"] = {"id": member.sweep, "values": hide(member.values, hidden)}
    return json.dumps(shown, indent=1, sort_keys=True).encode("ascii")
