"""The report of a job's check of its nodes, which the head stores beside the record."""

from __future__ import annotations

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.model.text import one_line
from cloudjob.tracking.access import JobAccess
from jobentry.contract import paths, preflight
from jobentry.contract.paths import JobPaths
from jobentry.contract.preflight import Report

_REASON_CHARS = 200


def read(access: JobAccess) -> Report | None:
    """Return the report of a full check; None if the job has stored none.

    Raises:
        StoreError: The store cannot be read, or what is there is no report.
    """
    key = JobPaths(access.record.job).records + paths.PREFLIGHT
    try:
        return preflight.load(access.store.get_bytes(key, limit_bytes=preflight.MAX_REPORT_BYTES))
    except ObjectMissing:
        return None
    except preflight.PreflightError as error:
        reason = one_line(str(error))[:_REASON_CHARS]
        raise StoreError(f"reading the check of the nodes: {key}: {reason}") from error
