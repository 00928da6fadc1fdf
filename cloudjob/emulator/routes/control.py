"""Requests of the emulator's owner: faults, and what the emulator does. Not part of the service."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Any, Literal

from pydantic import FiniteFloat

from cloudjob.emulator.app import Answer, Endpoint, Request
from cloudjob.emulator.fault_injection import KINDS
from cloudjob.emulator.models import Model
from cloudjob.emulator.service import Service
from cloudjob.emulator.state import CONTROL_PREFIX

_FAULTS = CONTROL_PREFIX + "faults"
# A page of the console shows no more.
_MOST_JOBS = 1000


def status(service: Service, request: Request) -> Any:
    phases = Counter(item[1] for item in service.database.unfinished())
    total, _ = service.database.find_jobs([], order="id", limit=0, skip=0)
    return {"jobs": total, "unfinished": dict(phases), **faults(service, request)}


def jobs(service: Service, request: Request) -> Any:
    order = "create_ms DESC"
    total, rows = service.database.find_jobs([], order=order, limit=_MOST_JOBS, skip=0)
    names = ("id", "name", "phase", "nodes", "user_name", "create_ms", "start_ms", "end_ms")
    return {"total": total, "jobs": [{n: getattr(row, n) for n in names} for row in rows]}


def faults(service: Service, request: Request) -> Any:
    return {"faults": [asdict(fault) for fault in service.database.faults()]}


class _Fault(Model):
    kind: Literal[tuple(KINDS)]  # type: ignore[valid-type]
    seconds: FiniteFloat = 0.0
    count: int = 0
    amount: FiniteFloat = 0.0
    job: str = ""
    node: int = 0
    path: str = ""


def add_fault(service: Service, request: Request) -> Any:
    asked = request.body(_Fault)
    if asked.job:
        service.job_of(asked.job)
    if asked.kind == "expire-tokens":
        service.database.expire_all(time.time())
    elif asked.kind == "lose-node":
        service.scheduler.lose_node(service.job_of(asked.job), asked.node)
    fault = service.database.add_fault(
        until_s=time.time() + asked.seconds if asked.seconds else 0.0,
        **asked.model_dump(include={"kind", "count", "job", "node", "amount", "path"}),
    )
    return Answer(201, asdict(fault))


def clear_faults(service: Service, request: Request) -> Any:
    count = service.database.clear_faults()
    service.scheduler.wake()
    return {"cleared": count}


ENDPOINTS = (
    Endpoint("GET", CONTROL_PREFIX + "status", status),
    Endpoint("GET", CONTROL_PREFIX + "jobs", jobs),
    Endpoint("GET", _FAULTS, faults),
    Endpoint("POST", _FAULTS, add_fault),
    Endpoint("DELETE", _FAULTS, clear_faults),
)
