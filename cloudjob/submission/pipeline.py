"""Submits a job, step by step: spec -> package -> store -> submission -> request -> job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cloudjob.backends.base import Check
from cloudjob.errors import RecordsError, StoreError
from cloudjob.home import make_home, records_path, scratch_folders, submits_folder
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.model import submission as submissions
from cloudjob.model.job import masked
from cloudjob.model.progress import OnProgress, log_warnings, meter
from cloudjob.model.submission import Submission
from cloudjob.model.text import hide
from cloudjob.model.times import rfc3339
from cloudjob.notify.start import start_after
from cloudjob.package import CodePackage, SourceCache, cache, claims
from cloudjob.package.claims import Claim, LayerMissing, StoredLayers
from cloudjob.package.revision import of_source
from cloudjob.store.base import Expiring, ObjectStore
from cloudjob.store.parallel import in_parallel
from cloudjob.submission import checks, messages, preparation, script_check
from cloudjob.submission.preparation import PreparedJob, prepare_job
from cloudjob.submission.undo import undo_on_failure
from cloudjob.tracking import Job, descriptions, leftovers
from jobentry.contract.paths import JobPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The number of parallel uploads.
_AT_ONCE = 8


class Member(NamedTuple):
    """A job of a sweep, with everything that is chosen before it is submitted.

    Args:
        values: The values of the sweep for this job.
    """

    job: str
    sweep: str
    values: Mapping[str, str]
    prepared: PreparedJob


def submit(spec: JobSpec, home: Path, *, on_progress: OnProgress = log_warnings) -> Job:
    """Send ``spec`` to its backend and return the running job.

    Args:
        home: The folder of cloudjob's state on this machine.
        on_progress: Called with each report, from any thread.

    Raises:
        CloudJobError: Nothing was started; the submit left nothing but layers, which the next
            submit uses and ``cloudjob store gc`` removes.
    """
    script = script_check.check(spec)
    job = preparation.new_id(spec.name)
    with _place(spec, home, job) as place:
        prepared = prepare_job(spec, script, home, place.scratch, on_progress)
        return _send(job, prepared, None, place, on_progress)


def submit_member(member: Member, home: Path, *, on_progress: OnProgress) -> Job:
    """Send a job of a sweep to its backend; otherwise as ``submit``."""
    with _place(member.prepared.spec, home, member.job) as place:
        return _send(member.job, member.prepared, member, place, on_progress)


class Place(NamedTuple):
    """The places that a submit writes to: the state folder, its scratch folder and the records."""

    home: Path
    scratch: Path
    db: Records


@contextmanager
def _place(spec: JobSpec, home: Path, job: str) -> Iterator[Place]:
    """Yield the places of a submit; the job's notifier starts when it has succeeded."""
    make_home(home)
    leftovers.remove(home)
    with (
        start_after(spec, home, job),
        scratch_folders.new(submits_folder(home), job) as scratch,
        Records(records_path(home)) as db,
    ):
        yield Place(home, scratch, db)


def _send(
    job: str, prepared: PreparedJob, member: Member | None, place: Place, on_progress: OnProgress
) -> Job:
    spec, planned, (backend, uri, store) = prepared
    paths, db = JobPaths(job), place.db
    # Built before anything is sent, to report what the platform cannot do.
    submission = preparation.prepare_for(prepared, paths, planned, planned.layers)
    request = backend.build(submission)
    checks.require([*backend.checks(spec, uri), *_key_checks(prepared)], on_progress)
    sending = partial(meter, "sending", on_progress=on_progress)
    with undo_on_failure(store, db, job) as undo, Claim(store, job, sending) as claim:
        package, kept = _store_package(prepared, member, place, claim)
        # The store may hold other layers than planned, and have got new keys while they were sent.
        is_planned = (package.digest, kept.layers) == (planned.digest, planned.layers)
        if not is_planned or (kept.sent_bytes and isinstance(store, Expiring)):
            submission = preparation.prepare_for(prepared, paths, package, kept.layers)
            request = backend.build(submission)
        # The record has the handle before anything starts: if this process is killed from here on,
        # every command finds the job.
        text = _text(submission, member)
        record = _record(submission, package, uri, backend.handle(request), text)
        db.add(record)
        store.put_bytes(descriptions.dump(record, place.home), descriptions.key(job))
        claim.check()
        store.put_bytes(text, paths.submission)
        store.put_bytes(claims.descriptor(package, kept.layers), paths.code)
        _put_companions(store, paths, kept, backend.companions(request))
        on_progress(messages.sent(package, kept))
        undo.on_platform = lambda: backend.remove(record.handle)
        record = record._replace(handle=backend.send(request), state="PENDING")
        undo.is_over = True
    # The job runs, and its present record and description are enough to find it.
    with suppress(RecordsError):
        db.update(job, handle=record.handle, state=record.state)
    if record.handle != backend.handle(request):
        with suppress(StoreError):
            store.put_bytes(descriptions.dump(record, place.home), descriptions.key(job))
    return Job(record, backend, place.home, store)


def _key_checks(prepared: PreparedJob) -> Iterator[Check]:
    spec, _, (backend, _, store) = prepared
    if not backend.copies_files and isinstance(store, Expiring):
        yield from checks.key_checks(spec, store.keys_end_at())


def _store_package(
    prepared: PreparedJob, member: Member | None, place: Place, claim: Claim
) -> tuple[CodePackage, StoredLayers]:
    """Store the new layers and remember them; store all if a layer is missing or damaged."""
    spec, package, target = prepared
    try:
        kept = claim.keep(package)
    except LayerMissing:
        package = preparation.pack_source(
            spec, place.home, place.scratch, target.uri, SourceCache()
        )
        if member and package.digest != prepared.package.digest:
            raise StoreError(
                f"storing the package of {member.job}: it is no "
                "longer in the store, and the source has changed",
                hint="restore the source, or start a new sweep",
            ) from None
        kept = claim.keep(package)
    if not package.is_cached:
        path = cache.path_of(place.home, Path(spec.source), target.uri)
        cache.save(path, cache.with_layers(package.source_cache, kept.layers))
    return package, kept


def _put_companions(
    store: ObjectStore, paths: JobPaths, kept: StoredLayers, companions: Mapping[str, bytes]
) -> None:
    """Put the package and its companions into the folder that the platform copies to the nodes.

    Layers are copied within the store instead of sent again; objects are written in parallel,
    because each costs a round trip.
    """
    if not companions:
        return
    transfers: list[Callable[[], object]] = [
        partial(store.put_bytes, data, f"{paths.node}/{name}") for name, data in companions.items()
    ]
    copies = [(paths.code, paths.delivered_code)]
    copies += [(layer.key, f"{paths.node}/{layer.key}") for layer in kept.layers]
    transfers += [partial(store.copy, key, target) for key, target in copies]
    in_parallel(lambda transfer: transfer(), transfers, at_once=_AT_ONCE, abort=store.abort)


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
    masked_texts = submissions.masked_texts(submission)
    # `cloudjob cp` makes a new job from the user's description, so it is stored, too.
    shown = {**submissions.show(submission), "spec": masked(submission.spec, masked_texts)}
    revision = of_source(Path(submission.spec.source))
    if revision:
        shown["git"] = revision._asdict()
    if member:
        shown["sweep"] = {"id": member.sweep, "values": hide(member.values, masked_texts)}
    return json.dumps(shown, indent=1, sort_keys=True).encode("ascii")
