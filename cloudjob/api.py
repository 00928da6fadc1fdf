"""The public Python API: functions that submit jobs and find submitted ones, and their values.

``import X as X`` exports a name; ``cloudjob`` lists them all in ``__all__``.
"""

from __future__ import annotations

import copyreg
import os
from importlib import import_module
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob import config, tracking
from cloudjob.backends import open_backend
from cloudjob.errors import (
    BackendError as BackendError,
    CloudJobError as CloudJobError,
    JobNotFound as JobNotFound,
    NotAuthorised as NotAuthorised,
    NotReady as NotReady,
    PackageError as PackageError,
    RecordsError as RecordsError,
    RunsElsewhere as RunsElsewhere,
    SpecError as SpecError,
    StoreError as StoreError,
    Unanswered as Unanswered,
    Unreachable as Unreachable,
    UsageError as UsageError,
    WaitTimeout as WaitTimeout,
)
from cloudjob.home import home, store_uri
from cloudjob.model.job import JobSpec as JobSpec
from cloudjob.model.progress import OnProgress, Progress as Progress, log_warnings
from cloudjob.model.rules import BACKENDS
from cloudjob.store import full_uri, job_store
from cloudjob.tracking.job import Job as Job
from jobentry.contract.stores import STORE_SCHEMES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cloudjob.backends.native import Event as Event, Metric as Metric
    from cloudjob.model import attached
    from cloudjob.model.options import Options
    from cloudjob.model.status import (
        Absence as Absence,
        Attempt as Attempt,
        Cause as Cause,
        CutLog as CutLog,
        Failure as Failure,
        Hang as Hang,
        JobFailed as JobFailed,
        JobState as JobState,
        JobStatus as JobStatus,
        Phase as Phase,
        SlowRanks as SlowRanks,
        Outlook as Outlook,
        Wait as Wait,
        WaitPhase as WaitPhase,
    )
    from cloudjob.package.collection import Collected
    from cloudjob.submission.preview import Preview as Preview
    from cloudjob.tracking.journals import Journals as Journals, RankPoint as RankPoint
    from cloudjob.tracking.log import LogLine as LogLine
    from cloudjob.tracking.log_filter import LogFilter as LogFilter
    from cloudjob.tracking.metrics import (
        Column as Column,
        MetricPoint as MetricPoint,
        Metrics as Metrics,
    )
    from cloudjob.tracking.outputs import Output as Output, Outputs as Outputs
    from cloudjob.tracking.profile import JobProfile as JobProfile
    from cloudjob.tracking.stacks import JobStacks as JobStacks, StackGroup as StackGroup
    from cloudjob.tracking.sweep import OnStatus, Ranked as Ranked, Sweep as Sweep

# Values that not every submit needs, with their modules, which are imported on first use.
_MODULES = {
    name: f"cloudjob.{module}"
    for module, names in {
        "backends.native": "Event Metric",
        "model.status": "Absence Attempt Cause CutLog Failure Hang JobFailed JobState JobStatus"
        " Phase Outlook SlowRanks Wait WaitPhase",
        "submission.preview": "Preview",
        "tracking.journals": "Journals RankPoint",
        "tracking.log": "LogLine",
        "tracking.log_filter": "LogFilter",
        "tracking.metrics": "Column MetricPoint Metrics",
        "tracking.outputs": "Output Outputs",
        "tracking.profile": "JobProfile",
        "tracking.stacks": "JobStacks StackGroup",
        "tracking.sweep": "Ranked Sweep",
    }.items()
    for name in names.split()
}


def _pickled(job: Job) -> tuple[Callable[[str], Job], tuple[str]]:
    return attach, (job.handle or job.id,)


# Another process, such as a worker of a pool, attaches to the job: it has locks and open stores.
copyreg.pickle(Job, _pickled)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def job_spec(
    script: str | os.PathLike[str] | None = None,
    args: Sequence[str | float] | None = None,
    *,
    job_file: str | os.PathLike[str] | None = None,
    copy_of: Job | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[Options],
) -> JobSpec:
    """Return the job that the arguments, the job file and the configuration files describe.

    The arguments take precedence over files, as options do on the command line.

    Args:
        script: The program to run, relative to the source folder, which is the current folder by
            default.
        args: The script's own arguments, each a text or a number.
        copy_of: A job that provides the values that are not given, instead of configuration files.
        on_progress: Called with a note if a source folder was chosen for the script, or if a copy
            takes only some values of a job that others submitted.

    Raises:
        UsageError: A file cannot be read.
        SpecError: With every error in the description.
        TypeError: ``args`` is one text instead of a list.
    """
    values: dict[str, Any] = {**options}
    if script is not None:
        values["script"] = os.fspath(script)
    if isinstance(args, str):
        raise TypeError(f"args is a list of arguments, not one text: {args!r}")
    if args is not None:
        values["args"] = tuple(args)
    if "source" in values:
        values["source"] = os.fspath(values["source"])
    if isinstance(values.get("secrets"), (list, tuple)):
        values["secrets"] = dict.fromkeys(values["secrets"], "")
    copied = None if copy_of is None else _copied(copy_of, on_progress or log_warnings)
    loaded = config.load(
        values,
        job_file=None if job_file is None else os.fspath(job_file),
        cwd=Path.cwd(),
        environ=os.environ,
        copied=copied,
    )
    if loaded.chosen_source and on_progress:
        on_progress(Progress("note", loaded.chosen_source))
    return loaded.spec


def _copied(job: Job, on_progress: OnProgress) -> config.Copied:
    """Return what a copy takes of a job, and report what it leaves out."""
    described = job.copied_spec()
    if described.left_out:
        on_progress(_left_out(job, described))
    return config.Copied(f"job {job.id}", described.taken, job.is_ours)


def _left_out(job: Job, copied: attached.Described) -> Progress:
    """Return a note on what a copy takes from the description of a job of others."""
    return Progress(
        "note",
        f"{job.id} was submitted by {job.submitted_by}: the copy takes "
        f"{', '.join(sorted(copied.chosen)) or 'nothing'} from its description, and leaves out "
        f"{', '.join(sorted(copied.left_out))}",
        hint=f"`cloudjob cp --dry-run {job.id}` shows what is left out; options set it",
    )


def submit(
    script: str | os.PathLike[str] | JobSpec,
    args: Sequence[str | float] | None = None,
    *,
    job_file: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[Options],
) -> Job:
    """Send a job to its backend and return it as soon as the platform has accepted it.

    Args:
        script: The program to run, or a job that ``job_spec`` returned.
        on_progress: Called with each ``Progress`` report, from any thread, one at a time; by
            default warnings are logged as ``cloudjob``.

    Raises:
        SpecError: With every error in the description.
        CloudJobError: Anything else that prevents the job; then nothing was started.
    """
    from cloudjob.submission import pipeline

    spec = _check_single(_spec_of(script, args, job_file, options, on_progress))
    return pipeline.submit(spec, home(), on_progress=on_progress or log_warnings)


def preview(
    script: str | os.PathLike[str] | JobSpec,
    args: Sequence[str | float] | None = None,
    *,
    job_file: str | os.PathLike[str] | None = None,
    planned_nodes: int | None = None,
    **options: Unpack[Options],
) -> Preview:
    """Return what ``submit`` would send and what each node would do; nothing is sent.

    Args:
        planned_nodes: The number of nodes to plan, by default all.

    Raises:
        SpecError: With every error in the description.
    """
    from cloudjob.submission import preview as previews

    spec = _check_single(_spec_of(script, args, job_file, options))
    return previews.preview(spec, home(), planned_nodes=planned_nodes)


def _spec_of(
    script: str | os.PathLike[str] | JobSpec,
    args: Sequence[str | float] | None,
    job_file: str | os.PathLike[str] | None,
    options: Options,
    on_progress: OnProgress | None = None,
) -> JobSpec:
    if not isinstance(script, JobSpec):
        return job_spec(script, args, job_file=job_file, on_progress=on_progress, **options)
    if args is not None or job_file is not None or options:
        raise TypeError("script is a complete JobSpec: pass the other values to job_spec")
    return script


def _check_single(spec: JobSpec) -> JobSpec:
    if spec.sweep:
        raise UsageError("submitting a job: its description is a sweep", hint="cloudjob.sweep(…)")
    return spec


def sweep(  # noqa: PLR0913 (each is a key of a call, as of submit)
    script: str | os.PathLike[str] | JobSpec,
    args: Sequence[str | float] | None = None,
    *,
    job_file: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    on_status: OnStatus | None = None,
    on_start: Callable[[Sweep], object] | None = None,
    **options: Unpack[Options],
) -> Sweep:
    """Submit one job for each combination of the values in ``sweep={"lr": [0.1, 0.01]}``.

    Returns when the last job was submitted: at once if all jobs may run at the same time, else when
    there is room for the last one. Ctrl-C leaves the submitted jobs running.

    Args:
        resume: Submit the jobs that an interrupted call with the same arguments did not.
        on_status: Called with a job's status and values whenever its state has changed.
        on_start: Called before the first job is submitted.

    Raises:
        SpecError: With every error in the description.
        CloudJobError: A job could not be submitted; those before it continue.
    """
    spec = _spec_of(script, args, job_file, options, on_progress)
    if not spec.sweep:
        raise SpecError(["sweep: has no values (allowed names with their values)"])
    from cloudjob.submission import sweep as sweeps

    return sweeps.submit(
        spec, home(), resume=resume, on_progress=on_progress or log_warnings,
        on_status=on_status, on_start=on_start,
    )  # fmt: skip


def attach_sweep(sweep: str) -> Sweep:
    """Return a sweep that was submitted earlier, by its id or by the name of its newest job.

    Raises:
        JobNotFound: No sweep in the records of this machine matches.
    """
    from cloudjob.tracking.sweep import attach as find_sweep

    return find_sweep(home(), sweep)


def attach(job: str, *, store: str = "") -> Job:
    """Return a job that was submitted earlier, from this or another process or machine.

    A job that was submitted elsewhere is found in its store and added to the records here.

    Args:
        job: Its id, its name (the newest job of that name), the start of its id, its handle, or
            its URI in its store: the store's URI and the id.
        store: The store in which to look for a job that is not in the records; for a handle, by
            default the store that a job submitted here would use.

    Raises:
        JobNotFound: No job matches.
        StoreError: The store cannot be read.
    """
    return tracking.find(home(), job, lambda: _stores(job, store), backend_settings)


def backend_settings() -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of the configuration that a submit from this folder would use.

    Jobs that others have submitted are looked for only where these sections lead.

    Raises:
        UsageError: A file cannot be read.
        SpecError: With every error in the configuration.
    """
    return _configuration().sections


def _configuration() -> JobSpec:
    loaded = config.load({}, job_file=None, cwd=Path.cwd(), environ=os.environ, needs_script=False)
    return loaded.spec


def _stores(job: str, store: str) -> list[str]:
    """Return the stores to search for a job that is not in the records."""
    scheme, is_full, rest = job.partition("://")
    if store or not is_full:
        return [store] if store else []
    if scheme in STORE_SCHEMES:
        path, question, options = rest.partition("?")
        return [f"{scheme}://{path.rstrip('/').rpartition('/')[0]}{question}{options}"]
    backend = scheme.partition("+")[0]
    if backend not in BACKENDS:
        return []
    spec = _configuration()
    # The store that a submit would use.
    default = open_backend(backend, home(), dict(spec.section(backend))).store()[0]
    return [job_store(spec.store, default or store_uri(home()), spec.sections)]


def jobs(  # noqa: PLR0913 (each is a filter)
    *,
    backend: str | Sequence[str] = (),
    name: str | Sequence[str] = (),
    state: str | Sequence[str] = (),
    since: str = "",
    limit: int | None = None,
    store: str = "",
    sweep: str = "",
    on_progress: OnProgress | None = None,
) -> list[Job]:
    """Return the jobs in the records that match every filter, newest first.

    ``Job.last_status`` of each is set; a job is UNKNOWN if its platform does not answer in time.

    Args:
        name: Shell patterns for the job's name or id.
        since: ``2h``, ``3d``, a date, or a date and a time.
        store: The URI of a store whose jobs are returned instead, from any submitter.
        sweep: The id of a sweep.
        on_progress: Called with a warning for each description in ``store`` that cannot be read;
            by default it is logged as ``cloudjob``.

    Raises:
        StoreError: The store cannot be read.
        UsageError: A filter is not understood.
    """
    which = tracking.filter_of(
        backend=_as_tuple(backend),
        name=_as_tuple(name),
        state=_as_tuple(state),
        since=since,
        sweep=sweep,
    )
    return tracking.find_all(
        home(), which, limit=limit, store=store, sections=backend_settings,
        on_progress=on_progress or log_warnings,
    )  # fmt: skip


def _as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def running_hangs(rows: Sequence[tuple[JobStatus, Job | None]]) -> dict[str, str]:
    """Return how running jobs hang, by id, for a list of jobs."""
    return tracking.running_hangs(rows)


def remove_orphans() -> list[str]:
    """Remove leftovers of killed submits in the engine and on clusters; return the jobs' ids."""
    return tracking.remove_orphans(home())


def collect_packages(spec: JobSpec, *, keep_days: float, dry_run: bool) -> Collected:
    """Delete the packages that no job needs from the store that a job would use.

    Args:
        keep_days: Days after the end of a job for which its package is kept.
    """
    return tracking.collect(home(), store_of(spec), keep_days=keep_days, dry_run=dry_run)


def store_of(spec: JobSpec) -> str:
    """Return the URI of the store that a job names, or of the default store."""
    return full_uri(spec.store or store_uri(home()), spec.sections)
