"""cloudjob takes a training script to the cloud.

The names below are the public Python API; ``docs/reference/python.md`` describes them. Everything
else in this package may change in any version; to read it, start with
``docs/explanation/architecture.md``.
"""

from __future__ import annotations

__version__: str

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.api import *

__all__ = [
    "Absence",
    "Attempt",
    "BackendError",
    "Cause",
    "CloudJobError",
    "CutLog",
    "Event",
    "Failure",
    "Hang",
    "Job",
    "JobFailed",
    "JobNotFound",
    "JobProfile",
    "JobSpec",
    "JobStacks",
    "JobState",
    "JobStatus",
    "Journals",
    "LogFilter",
    "LogLine",
    "Metric",
    "MetricPoint",
    "Metrics",
    "NotAuthorised",
    "NotReady",
    "Outlook",
    "Output",
    "Outputs",
    "PackageError",
    "Phase",
    "Preview",
    "Progress",
    "RankPoint",
    "Ranked",
    "RecordsError",
    "RunsElsewhere",
    "SlowRanks",
    "SpecError",
    "StackGroup",
    "StoreError",
    "Sweep",
    "Unanswered",
    "Unreachable",
    "UsageError",
    "Wait",
    "WaitPhase",
    "WaitTimeout",
    "attach",
    "attach_sweep",
    "job_spec",
    "jobs",
    "preview",
    "remove_orphans",
    "submit",
    "sweep",
]


def __getattr__(name: str) -> object:
    # Everything is imported on first use, so that `import cloudjob` is cheap.
    if name == "__version__":
        from cloudjob import installation

        return installation.VERSION
    if name not in __all__:
        raise AttributeError(f"module 'cloudjob' has no attribute {name!r}")
    from cloudjob import api

    globals()[name] = getattr(api, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
