"""Control requests of the emulator's owner: faults and status. They are not part of the service."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from cloudjob.emulator.app import Answer, Endpoint
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.fault_injection import KINDS
from cloudjob.emulator.models import Model
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import EmulatedService
from cloudjob.emulator.state import CONTROL_PREFIX

_FAULTS = CONTROL_PREFIX + "faults"
# The most jobs on a page of the console.
_MAX_JOBS = 1000
# Three years, so that shifted times are still valid dates.
_MAX_S = 1e8


def status(service: EmulatedService, request: Request) -> Any:
    projects = service.projects.values()
    phases = Counter(item[1] for each in projects for item in each.database.unfinished())
    total = sum(each.database.count_jobs() for each in projects)
    return {"jobs": total, "unfinished": dict(phases), **faults(service, request)}


def jobs(service: EmulatedService, request: Request) -> Any:
    total = 0
    rows: list[JobRow] = []
    for each in service.projects.values():
        count, rows_of_state = each.database.find_jobs(
            [], order="create_ms DESC", limit=_MAX_JOBS, skip=0
        )
        total += count
        rows += rows_of_state
    rows.sort(key=lambda row: row.create_ms, reverse=True)
    names = ("id", "name", "phase", "nodes", "user_name", "create_ms", "start_ms", "end_ms")
    listed = [{n: getattr(row, n) for n in names} for row in rows[:_MAX_JOBS]]
    return {"total": total, "jobs": listed}


def faults(service: EmulatedService, request: Request) -> Any:
    return {"faults": [asdict(fault) for fault in service.faults.active()]}


class _Fault(Model):
    kind: Literal[tuple(KINDS)]  # type: ignore[valid-type]
    seconds: Annotated[float, Field(ge=0, le=_MAX_S)] = 0.0
    count: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    amount: Annotated[float, Field(ge=-_MAX_S, le=_MAX_S)] = 0.0
    job: str = ""
    node: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    path: str = ""


def add_fault(service: EmulatedService, request: Request) -> Any:
    requested = request.body(_Fault)
    having = (each for each in service.projects.values() if each.database.job(requested.job))
    of_job = next(having, service)
    if requested.job:
        of_job.job_of(requested.job)
    if requested.kind == "expire-tokens":
        service.database.expire_all(time.time())
    elif requested.kind == "lose-node":
        of_job.scheduler.lose_node(of_job.job_of(requested.job), requested.node)
    fault = service.faults.add(
        until_s=time.time() + requested.seconds if requested.seconds else 0.0,
        **requested.model_dump(include={"kind", "count", "job", "node", "amount", "path"}),
    )
    return Answer(201, asdict(fault))


def clear_faults(service: EmulatedService, request: Request) -> Any:
    count = service.faults.clear()
    for each in service.projects.values():
        each.scheduler.wake()
    return {"cleared": count}


ENDPOINTS = (
    Endpoint("GET", CONTROL_PREFIX + "status", status),
    Endpoint("GET", CONTROL_PREFIX + "jobs", jobs),
    Endpoint("GET", _FAULTS, faults),
    Endpoint("POST", _FAULTS, add_fault),
    Endpoint("DELETE", _FAULTS, clear_faults),
)
