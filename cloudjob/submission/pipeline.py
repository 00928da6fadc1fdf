"""Submits a job, step by step: spec -> decision -> prepared -> store -> job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cloudjob.errors import CloudJobError, RecordsError, StoreError, Unanswered
from cloudjob.home import make_home, records_path, scratch_folders, submits_folder
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.model import submission as submissions
from cloudjob.model.job import masked
from cloudjob.model.progress import OnProgress, Progress, log_warnings, meter
from cloudjob.model.text import counted, hide, size_text
from cloudjob.model.times import rfc3339
from cloudjob.notify.start import start_after
from cloudjob.package import CodePackage, SourceCache, cache, claims
from cloudjob.package.claims import Claim, LayerMissing, StoredLayers
from cloudjob.package.revision import of_source
from cloudjob.store.base import Expiring, ObjectStore
from cloudjob.store.parallel import call_with_timeout, in_parallel
from cloudjob.submission import checks, preparation
from cloudjob.submission.checks import Script
from cloudjob.submission.preparation import DecidedJob, Prepared, SweepMember, Target
from cloudjob.tracking import Job, descriptions, leftovers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The number of parallel uploads.
_AT_ONCE = 8
# The time limit in which a failed or cancelled submit deletes the objects it has stored.
_UNDO_S = 3.0


def submit(spec: JobSpec, home: Path, *, on_progress: OnProgress = log_warnings) -> Job:
    """Send ``spec`` to its backend and return the running job.

    Args:
        home: The folder of cloudjob's state on this machine.
        on_progress: Called with each report, from any thread.

    Raises:
        CloudJobError: Nothing was started; the submit left nothing but layers, which the next
            submit uses and ``cloudjob store gc`` removes.
    """
    script = checks.check_script(spec)
    checks.require(checks.script_checks(spec, script), on_progress)
    job = preparation.new_id(spec.name)
    target = Target.open(spec, home)
    with target.backend.starting(job), _scratch(spec, home, job) as scratch:
        decision = decide(spec, script, target, scratch, on_progress)
        return _send(preparation.prepare(job, decision, target, scratch), on_progress)


def submit_member(
    job: str, decision: DecidedJob, member: SweepMember, home: Path, on_progress: OnProgress
) -> Job:
    """Send a job of a sweep to its backend; otherwise as ``submit``."""
    # The store is opened for each job, because keys may have changed since the previous one.
    target = Target.open(decision.spec, home)
    with _scratch(decision.spec, home, job) as scratch:
        return _send(preparation.prepare(job, decision, target, scratch, member), on_progress)


def decide(
    spec: JobSpec, script: Script, target: Target, scratch: Path, on_progress: OnProgress
) -> DecidedJob:
    """Decide what the job leaves open, and report it."""
    decision = preparation.decide(spec, script, target, scratch, may_query=True)
    for note in preparation.choices(decision.choice, decision.ranks):
        on_progress(Progress("note", note))
    for progress in preparation.left_out(decision.package):
        on_progress(progress)
    return decision


@contextmanager
def _scratch(spec: JobSpec, home: Path, job: str) -> Iterator[Path]:
    """Yield a folder for the package; the job's notifier starts when the submit has succeeded."""
    make_home(home)
    leftovers.remove(home)
    with (
        start_after(spec, home, job),
        scratch_folders.new(submits_folder(home), job) as scratch,
    ):
        yield scratch


def _send(prepared: Prepared, on_progress: OnProgress) -> Job:
    backend, uri, store, home = prepared.target
    job = prepared.paths.job
    wrong = [*backend.checks(prepared.spec, uri)]
    if not backend.copies_files and isinstance(store, Expiring):
        wrong += checks.key_checks(prepared.spec, store.keys_end_at())
    checks.require(wrong, on_progress)
    sending = partial(meter, "sending", on_progress=on_progress)
    with (
        Records(records_path(home)) as db,
        undo_on_failure(store, db, job) as undo,
        Claim(store, job, sending) as claim,
    ):
        prepared, kept = _store_package(prepared, claim)
        # The record has the handle before anything starts: if this process is killed from here on,
        # every command finds the job.
        text = _text(prepared)
        record = _record(prepared, text)
        db.add(record)
        store.put_bytes(descriptions.dump(record, home), descriptions.key(job))
        claim.check()
        store.put_bytes(text, prepared.paths.submission)
        store.put_bytes(claims.descriptor(prepared.package, kept.layers), prepared.paths.code)
        _put_companions(prepared)
        on_progress(_sent(prepared.package, kept))
        undo.on_platform = lambda: backend.remove(record.handle)
        handle = backend.send(prepared.request)
        undo.is_over = True
        # The job runs, and its present record and description are enough to find it.
        with suppress(RecordsError):
            db.update(job, handle=handle, state="PENDING")
    started = record._replace(handle=handle, state="PENDING")
    if handle != record.handle:
        with suppress(StoreError):
            store.put_bytes(descriptions.dump(started, home), descriptions.key(job))
    return Job(started, backend, home, store)


def _store_package(prepared: Prepared, claim: Claim) -> tuple[Prepared, StoredLayers]:
    """Store the new layers and remember them; store all if a layer is missing or damaged.

    Returns:
        The job with the layers that the store has, and with the keys that are valid now.
    """
    package, target = prepared.package, prepared.target
    try:
        kept = claim.keep(package)
    except LayerMissing:
        package = preparation.pack_source(prepared.spec, target, prepared.scratch, SourceCache())
        if prepared.member and package.digest != prepared.package.digest:
            raise StoreError(
                f"storing the package of {prepared.paths.job}: it is no "
                "longer in the store, and the source has changed",
                hint="restore the source, or start a new sweep",
            ) from None
        kept = claim.keep(package)
    if not package.is_cached:
        path = cache.path_of(target.home, Path(prepared.spec.source), target.uri)
        cache.save(path, cache.with_layers(package.source_cache, kept.layers))
    # The store may hold other layers than planned, and have got new keys while they were sent.
    is_planned = (package.digest, kept.layers) == (prepared.package.digest, prepared.layers)
    if not is_planned or (kept.sent_bytes and isinstance(target.store, Expiring)):
        prepared = prepared.with_package(package, kept.layers)
    return prepared, kept


def _put_companions(prepared: Prepared) -> None:
    """Put the package and its companions into the folder that the platform copies to the nodes.

    Layers are copied within the store instead of sent again; objects are written in parallel,
    because each costs a round trip.
    """
    store, paths = prepared.target.store, prepared.paths
    companions = prepared.target.backend.companions(prepared.request)
    if not companions:
        return
    transfers: list[Callable[[], object]] = [
        partial(store.put_bytes, data, f"{paths.node}/{name}") for name, data in companions.items()
    ]
    copies = [(paths.code, paths.delivered_code)]
    copies += [(layer.key, f"{paths.node}/{layer.key}") for layer in prepared.layers]
    transfers += [partial(store.copy, key, target) for key, target in copies]
    in_parallel(lambda transfer: transfer(), transfers, at_once=_AT_ONCE, abort=store.abort)


def _record(prepared: Prepared, text: bytes) -> JobRecord:
    spec, package = prepared.spec, prepared.package
    return JobRecord(
        job=prepared.paths.job,
        name=spec.name,
        backend=spec.backend,
        handle=prepared.target.backend.handle(prepared.request),
        state=SUBMITTING,
        nodes=spec.nodes,
        procs_per_node=spec.procs_per_node,
        created_at=rfc3339(time.time()),
        code_uri=prepared.submission.code.uri,
        code_digest=package.digest,
        code_size_bytes=package.size_bytes,
        code_files=package.files,
        store=prepared.target.uri,
        submitted_by=descriptions.submitter(),
        spec_json=text.decode("ascii"),
    )


def _text(prepared: Prepared) -> bytes:
    masked_texts = submissions.masked_texts(prepared.submission)
    # `cloudjob cp` makes a new job from the user's description, so it is stored, too.
    described = masked(prepared.spec, masked_texts)
    values_sent = {**submissions.show(prepared.submission, masked_texts), "spec": described}
    if revision := of_source(Path(prepared.spec.source)):
        values_sent["git"] = revision._asdict()
    if prepared.member:
        values = hide(prepared.member.values, masked_texts)
        values_sent["sweep"] = {"id": prepared.member.sweep, "values": values}
    return json.dumps(values_sent, indent=1, sort_keys=True).encode("ascii")


def _sent(package: CodePackage, kept: StoredLayers) -> Progress:
    """Report how much of the package was sent."""
    total = size_text(sum(layer.size_bytes for layer in kept.layers))
    layers = "1 layer new" if kept.sent_layers else "nothing new"
    message = (
        f"sent {size_text(kept.sent_bytes)} of {total}, {layers}: {counted(package.files, 'file')}"
    )
    return Progress("sent", message)


# -- a submit that fails leaves either a job or nothing -------------------------------------------


class Undo:
    """The steps to undo if a submit fails.

    Args:
        on_platform: Removes the job from its platform; set when sending begins.
        is_over: Whether the job was sent, after which nothing is undone.
    """

    def __init__(self) -> None:
        self.on_platform: Callable[[], None] | None = None
        self.is_over = False


@contextmanager
def undo_on_failure(store: ObjectStore, db: Records, job: str) -> Iterator[Undo]:
    """Undo what the body did if it fails."""
    undo = Undo()
    try:
        yield undo
    except BaseException as error:
        if undo.is_over or not _is_unsent(undo, error):
            raise
        with suppress(CloudJobError, TimeoutError):
            call_with_timeout(_UNDO_S, lambda: descriptions.delete_objects(store, job))
        with suppress(CloudJobError):
            db.remove(job)
        raise


def _is_unsent(undo: Undo, error: BaseException) -> bool:
    """Whether the platform does not have the job; if that is uncertain, try to remove the job."""
    is_refused = isinstance(error, CloudJobError) and not isinstance(error, Unanswered)
    if undo.on_platform is None or is_refused:
        return True
    try:
        undo.on_platform()
    except CloudJobError:
        # The job may be running: its record stays, so that `cancel` and `rm` find it.
        return False
    return True
