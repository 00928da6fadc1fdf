"""Jobs, flavors and engines in the service's JSON format. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import Algorithm, JobRequest, Model, now_ms, task_of
from cloudjob.emulator.settings import Flavor, PresetEngine, Settings


def job(row: JobRow, settings: Settings) -> dict[str, Any]:
    """Return a job as ``create``, ``show`` and ``list`` show it."""
    body = row.body
    return {
        "kind": row.kind,
        "metadata": {
            **body.metadata.model_dump(exclude_none=True),
            "id": row.id,
            "name": row.name,
            "create_time": row.create_ms,
            "user_name": row.user_name,
        },
        "status": _status(row),
        "algorithm": _algorithm(body.algorithm),
        "spec": _spec(body, settings),
        "endpoints": body.endpoints or {},
    }


def tasks(row: JobRow) -> list[str]:
    """Return the names of a job's tasks, one per node."""
    return list(map(task_of, range(row.nodes)))


def duration_ms(row: JobRow) -> int:
    """Return the duration of a job, until now or until its end."""
    if not row.start_ms:
        return 0
    return max(0, (row.end_ms or now_ms()) - row.start_ms)


def flavor(item: Flavor) -> dict[str, Any]:
    """Return a flavor as the list of flavors has it."""
    return {
        "flavor_id": item.id,
        "flavor_name": _flavor_name(item),
        "max_num": item.max_nodes,
        **_flavor_detail(item),
        "attributes": {},
    }


def engine(item: PresetEngine) -> dict[str, Any]:
    """Return an engine as the list of engines has it."""
    return {
        "engine_id": item.id,
        "engine_name": item.name,
        "engine_version": item.version,
        "v1_compatible": False,
        "run_user": "1000",
        "image_info": {
            "cpu_image_url": item.image,
            "gpu_image_url": item.image,
            "image_version": item.version,
        },
        "tags": [],
    }


def _status(row: JobRow) -> dict[str, Any]:
    run = row.run
    return {
        "phase": row.phase,
        "secondary_phase": row.secondary,
        "duration": duration_ms(row),
        "start_time": row.start_ms,
        "node_count_metrics": [[row.start_ms, row.nodes]] if row.start_ms else None,
        "tasks": tasks(row),
        "task_statuses": _dumped(run.task_statuses),
        "running_records": _dumped(run.running_records),
        "task_ips": _dumped(run.task_ips),
    }


def _dumped(items: Sequence[Model]) -> list[dict[str, Any]] | None:
    return [item.model_dump(exclude_none=True) for item in items] or None


def _algorithm(algorithm: Algorithm) -> dict[str, Any]:
    return {
        key: value
        for key, value in algorithm.model_dump(exclude_none=True).items()
        if value != "" or key in ("id", "name")
    }


def _spec(body: JobRequest, settings: Settings) -> dict[str, Any]:
    item = body.flavor(settings)
    resource = {
        "policy": "regular",
        **body.spec.resource.model_dump(exclude_none=True),
        "flavor_name": _flavor_name(item),
        "flavor_detail": _flavor_detail(item, disk_size="50"),
    }
    return {**body.spec.model_dump(exclude_none=True), "resource": resource}


def _flavor_name(item: Flavor) -> str:
    return f"Computing {item.kind} instance ({item.id})"


def _flavor_detail(item: Flavor, disk_size: int | str = 50) -> dict[str, Any]:
    info: dict[str, Any] = {
        "max_num": item.max_nodes,
        "cpu": {"arch": "x86", "core_num": item.cpu_cores},
        "memory": {"size": item.memory_gb, "unit": "GB"},
        # A job shows this size as text.
        "disk": {"size": disk_size, "unit": "GB"},
    }
    if item.cards:
        kind = "npu" if item.kind == "Ascend" else "gpu"
        info[kind] = {"unit_num": item.cards, "product_name": item.card, "memory": "16GB"}
    return {
        "flavor_type": item.kind,
        "billing": {"code": item.id, "unit_num": max(1, item.cards)},
        "flavor_info": info,
    }
