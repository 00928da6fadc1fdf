"""What the owner of the emulator orders: faults, and what it is doing. Not part of the service."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.app import Answer, Request, Routes
from cloudjob.emulator.faults import KINDS
from cloudjob.emulator.service import Service
from cloudjob.emulator.state import CONTROL_PREFIX


class Control:
    """Answers the owner."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, routes: Routes) -> None:
        """Add what is answered here."""
        routes.add("GET", CONTROL_PREFIX + "status", self.status)
        routes.add("GET", CONTROL_PREFIX + "faults", self.faults)
        routes.add("POST", CONTROL_PREFIX + "faults", self.add_fault)
        routes.add("DELETE", CONTROL_PREFIX + "faults", self.clear_faults)

    def status(self, request: Request) -> Answer:
        """Say what goes on."""
        phases = Counter(item[1] for item in self._service.database.unfinished())
        total, _ = self._service.database.find_jobs("1", (), order="id", limit=0, skip=0)
        shown = {"jobs": total, "unfinished": dict(phases), "faults": self._faults()}
        return Answer(200, shown)

    def faults(self, request: Request) -> Answer:
        """Return the faults that hold."""
        return Answer(200, {"faults": self._faults()})

    def _faults(self) -> list[dict[str, Any]]:
        return [asdict(fault) for fault in self._service.database.faults()]

    def add_fault(self, request: Request) -> Answer:
        """Let something go wrong."""
        asked = request.json()
        kind = str(asked.get("kind"))
        if kind not in KINDS:
            raise ApiError("ModelArts.2788", f"kind: {kind}")
        service = self._service
        numbers = {name: _number(asked, name) for name in ("seconds", "count", "node", "amount")}
        seconds, node = numbers["seconds"], int(numbers["node"])
        job = str(asked.get("job") or "")
        if job:
            job = service.job_of(job).id
        if kind == "expire-tokens":
            service.database.expire_all(time.time())
        elif kind == "lose-node":
            service.runner.lose_node(service.job_of(job), node)
        fault = service.database.add_fault(
            kind=kind,
            count=int(numbers["count"]),
            until_s=time.time() + seconds if seconds else 0.0,
            job=job,
            node=node,
            amount=numbers["amount"],
            path=str(asked.get("path") or ""),
        )
        return Answer(201, asdict(fault))

    def clear_faults(self, request: Request) -> Answer:
        """Let nothing go wrong any more."""
        count = self._service.database.clear_faults()
        self._service.runner.wake()
        return Answer(200, {"cleared": count})


def _number(asked: dict[str, Any], name: str) -> float:
    try:
        found = float(asked.get(name) or 0)
    except (OverflowError, TypeError, ValueError) as error:
        raise ApiError("ModelArts.2788", f"{name}: a number is needed") from error
    if not math.isfinite(found):
        raise ApiError("ModelArts.2788", f"{name}: a finite number is needed")
    return found
