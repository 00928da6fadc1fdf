"""cloudjob takes a training script to the cloud.

The names below are the public Python API; ``docs/reference/python.md`` describes them. Everything
else in this package may change in any version.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.api import attach, job_spec, jobs, preview, remove_orphans, submit
    from cloudjob.backends.base import Event, Metric
    from cloudjob.errors import (
        BackendError,
        CloudJobError,
        JobFailed,
        JobNotFound,
        NotAuthorised,
        NotReady,
        PackageError,
        RecordsError,
        SpecError,
        StoreError,
        Unanswered,
        Unreachable,
        UsageError,
        WaitTimeout,
    )
    from cloudjob.model.job import JobSpec
    from cloudjob.model.progress import Progress
    from cloudjob.model.status import Failure, JobState, JobStatus, Phase
    from cloudjob.submission.pipeline import Preview
    from cloudjob.tracking.job import Job, LogLine
    from cloudjob.tracking.journals import Journals, RankPoint
    from cloudjob.tracking.log_filter import LogFilter
    from cloudjob.tracking.metrics import MetricPoint
    from cloudjob.tracking.outputs import Output, Outputs

# Module -> public names. A name is imported when it is used first, so `import cloudjob` is cheap.
_PUBLIC = {
    "cloudjob.api": ("attach", "job_spec", "jobs", "preview", "remove_orphans", "submit"),
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
    "cloudjob.tracking.job": ("Job", "LogLine"),
    "cloudjob.tracking.journals": ("Journals", "RankPoint"),
    "cloudjob.tracking.log_filter": ("LogFilter",),
    "cloudjob.tracking.metrics": ("MetricPoint",),
    "cloudjob.tracking.outputs": ("Output", "Outputs"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "BackendError",
    "CloudJobError",
    "Event",
    "Failure",
    "Job",
    "JobFailed",
    "JobNotFound",
    "JobSpec",
    "JobState",
    "JobStatus",
    "Journals",
    "LogFilter",
    "LogLine",
    "Metric",
    "MetricPoint",
    "NotAuthorised",
    "NotReady",
    "Output",
    "Outputs",
    "PackageError",
    "Phase",
    "Preview",
    "Progress",
    "RankPoint",
    "RecordsError",
    "SpecError",
    "StoreError",
    "Unanswered",
    "Unreachable",
    "UsageError",
    "WaitTimeout",
    "attach",
    "job_spec",
    "jobs",
    "preview",
    "remove_orphans",
    "submit",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'cloudjob' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
