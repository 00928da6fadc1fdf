"""The forward path on one screen: spec -> package -> store -> submission -> request -> job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cloudjob import submission as submissions
from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend
from cloudjob.errors import CloudJobError, SpecError
from cloudjob.home import records_path, store_uri
from cloudjob.job import Job
from cloudjob.package import CodePackage, pack
from cloudjob.records import JobRecord, Records
from cloudjob.spec import JobSpec
from cloudjob.store import open_store
from cloudjob.store.base import ObjectStore
from cloudjob.submission import Submission, prepare
from jobentry.contract.paths import JobPaths

_MB = 1_000_000
# No vowels and nothing that looks like something else: an id is read aloud and typed.
_ID_LETTERS = "23456789bcdfghjkmnpqrstvwxz"


def submit(
    spec: JobSpec, home: Path, *, tell: Callable[[CodePackage], None] = lambda _: None
) -> Job:
    """Send ``spec`` to its backend and return the running job.

    Args:
        home: The folder of cloudjob's state on this machine.
        tell: Called with the package before it is sent.

    Raises:
        CloudJobError: Whatever stands in the way; then nothing was started and nothing is left.
    """
    job = new_id(spec.name)
    paths = JobPaths(job)
    store = open_store(spec.store or store_uri(home))
    backend = open_backend(spec.backend, home, dict(spec.sections.get(spec.backend, {})))
    with TemporaryDirectory(prefix="cloudjob-pack-") as scratch, Records(records_path(home)) as db:
        package = _pack(spec, Path(scratch))
        tell(package)
        submission = _prepare(spec, job, paths, store, package)
        request = backend.build(submission)
        with _undone(store, db, job):
            store.put(package.path, paths.code)
            store.put_bytes(_text(submission), paths.submission)
            db.add(_record(submission, package, spec.store or store_uri(home)))
            handle = backend.send(request)
            db.update(job, handle=handle)
            record = db.get(job)
    return Job(record, backend, store, home)


@dataclass(frozen=True, slots=True)
class Preview:
    """What ``submit`` would send, and what each node would do.

    Args:
        plans: One object a node, as ``jobentry --dry-run --json`` prints it.
    """

    package: CodePackage
    submission: dict[str, Any]
    request: dict[str, Any]
    plans: tuple[dict[str, Any], ...]


def preview(spec: JobSpec, home: Path) -> Preview:
    """Return what ``submit`` would do, and do nothing."""
    job = new_id(spec.name)
    store = open_store(spec.store or store_uri(home))
    backend: Backend[Any] = open_backend(
        spec.backend, home, dict(spec.sections.get(spec.backend, {}))
    )
    with TemporaryDirectory(prefix="cloudjob-pack-") as scratch:
        package = _pack(spec, Path(scratch))
    submission = _prepare(spec, job, JobPaths(job), store, package)
    request = backend.build(submission)
    return Preview(
        package=package,
        submission=submissions.show(submission),
        request=backend.show(request),
        plans=tuple(
            _plan(environment, (spec.script, *spec.args))
            for environment in backend.environments(request)
        ),
    )


def _plan(environment: Mapping[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    """Ask the entry itself what it would do on a node."""
    entry = str(Path(__file__).with_name("jobentry.pyz"))
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
    """Return a job id: the name, as far as a host name can hold it, and what makes it unique."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    tail = "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in os.urandom(8))
    # Host names are made of it, and a part of a host name has at most 63 letters.
    return f"{letters.strip('-')[:30].strip('-') or 'job'}-{tail}"


def _pack(spec: JobSpec, scratch: Path) -> CodePackage:
    return pack(
        Path(spec.source),
        scratch / "code.tar",
        script=spec.script,
        limit_bytes=int(spec.source_limit_mb * _MB),
    )


def _prepare(
    spec: JobSpec, job: str, paths: JobPaths, store: ObjectStore, package: CodePackage
) -> Submission:
    submission = prepare(
        spec,
        job,
        code_uri=store.uri(paths.code),
        code_digest=package.digest,
        record_uri=store.uri(paths.record),
        outputs_uri=store.uri(paths.outputs),
    )
    return replace(submission, access=store.access())


@contextmanager
def _undone(store: ObjectStore, db: Records, job: str) -> Iterator[None]:
    """Take back what was made when the rest fails: a submit leaves a job or nothing."""
    try:
        yield
    except BaseException:
        with suppress(CloudJobError):
            for key in [*store.list(f"{job}/"), JobPaths(job).code]:
                store.delete(key)
        with suppress(CloudJobError):
            db.remove(job)
        raise


def _record(submission: Submission, package: CodePackage, store: str) -> JobRecord:
    spec = submission.spec
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return JobRecord(
        job=submission.job,
        name=spec.name,
        backend=spec.backend,
        handle="",
        state="PENDING",
        nodes=spec.nodes,
        procs_per_node=spec.procs_per_node,
        created_at=now.replace("+00:00", "Z"),
        code_uri=submission.code_uri,
        code_digest=package.digest,
        code_size_bytes=package.size_bytes,
        code_files=package.files,
        store=store,
        spec_json=_text(submission).decode("ascii"),
    )


def _text(submission: Submission) -> bytes:
    return json.dumps(submissions.show(submission), indent=1, sort_keys=True).encode("ascii")
