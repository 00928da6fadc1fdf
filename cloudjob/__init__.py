"""cloudjob takes a training script to the cloud.

The names below are the public Python API; ``docs/reference/python.md`` describes them. Everything
else in this package may change in any version.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    # `as` exports a name to type checkers, which cannot evaluate `__all__` below.
    from cloudjob.api import (
        attach as attach,
        attach_sweep as attach_sweep,
        job_spec as job_spec,
        jobs as jobs,
        preview as preview,
        remove_orphans as remove_orphans,
        submit as submit,
        sweep as sweep,
    )
    from cloudjob.backends.base import (
        Event as Event,
        Metric as Metric,
    )
    from cloudjob.errors import (
        BackendError as BackendError,
        CloudJobError as CloudJobError,
        JobFailed as JobFailed,
        JobNotFound as JobNotFound,
        NotAuthorised as NotAuthorised,
        NotReady as NotReady,
        PackageError as PackageError,
        RecordsError as RecordsError,
        SpecError as SpecError,
        StoreError as StoreError,
        Unanswered as Unanswered,
        Unreachable as Unreachable,
        UsageError as UsageError,
        WaitTimeout as WaitTimeout,
    )
    from cloudjob.model.job import JobSpec as JobSpec
    from cloudjob.model.progress import Progress as Progress
    from cloudjob.model.status import (
        Failure as Failure,
        JobState as JobState,
        JobStatus as JobStatus,
        Phase as Phase,
    )
    from cloudjob.submission.pipeline import Preview as Preview
    from cloudjob.submission.sweep import (
        Ranked as Ranked,
        Sweep as Sweep,
    )
    from cloudjob.tracking.job import (
        Job as Job,
        LogLine as LogLine,
    )
    from cloudjob.tracking.journals import (
        Journals as Journals,
        RankPoint as RankPoint,
    )
    from cloudjob.tracking.log_filter import LogFilter as LogFilter
    from cloudjob.tracking.metrics import MetricPoint as MetricPoint
    from cloudjob.tracking.outputs import (
        Output as Output,
        Outputs as Outputs,
    )

# Module -> public names. A name is imported when it is used first, so `import cloudjob` is cheap.
_PUBLIC = {
    "cloudjob.api": (
        "attach",
        "attach_sweep",
        "job_spec",
        "jobs",
        "preview",
        "remove_orphans",
        "submit",
        "sweep",
    ),
    "cloudjob.backends.base": ("Event", "Metric"),
    "cloudjob.errors": (
        "BackendError",
        "CloudJobError",
        "JobFailed",
        "JobNotFound",
        "NotAuthorised",
        "NotReady",
        "PackageError",
        "RecordsError",
        "SpecError",
        "StoreError",
        "Unanswered",
        "Unreachable",
        "UsageError",
        "WaitTimeout",
    ),
    "cloudjob.model.job": ("JobSpec",),
    "cloudjob.model.progress": ("Progress",),
    "cloudjob.model.status": ("Failure", "JobState", "JobStatus", "Phase"),
    "cloudjob.submission.pipeline": ("Preview",),
    "cloudjob.submission.sweep": ("Ranked", "Sweep"),
    "cloudjob.tracking.job": ("Job", "LogLine"),
    "cloudjob.tracking.journals": ("Journals", "RankPoint"),
    "cloudjob.tracking.log_filter": ("LogFilter",),
    "cloudjob.tracking.metrics": ("MetricPoint",),
    "cloudjob.tracking.outputs": ("Output", "Outputs"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'cloudjob' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
