"""Dedicated resource pools: their nodes and workloads, and the quotas of resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cloudjob.emulator import views
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import UNSORTABLE, PageQuery
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, EmulatedService

_V1 = "/v1/{project_id}"
_POOLS = PROJECT + "/pools"
_POOL = _POOLS + "/{pool}"
_MOST = 1000


def pools(service: EmulatedService, request: Request) -> Any:
    return _listed("Pool", [_pool(service, name) for name in service.settings.pools])


def pool(service: EmulatedService, request: Request) -> Any:
    return _pool(service, _name(service, request))


def nodes(service: EmulatedService, request: Request) -> Any:
    return _listed("Node", _nodes(service, request))


def node(service: EmulatedService, request: Request) -> Any:
    name = request.path_params["node"]
    for item in _nodes(service, request):
        if item["metadata"]["name"] == name:
            return item
    raise ServiceRefusal("ModelArts.2788", f"node: {name}")


class _Workloads(PageQuery):
    """The parameters of the list of workloads; here ``offset`` is the number of an item."""

    codes: ClassVar[Mapping[str, str]] = {"sort": UNSORTABLE, "ascend": UNSORTABLE}
    limit: Annotated[int, Field(ge=0, le=500)] = 500
    type: Literal["train", "infer", "notebook", "x-infer"] | None = None
    status: str = ""
    sort: Literal["create_time"] = "create_time"
    ascend: bool = False


def workloads(service: EmulatedService, request: Request) -> Any:
    """Return the jobs of a pool that have not ended."""
    query = request.parsed_query(_Workloads)
    rows = [
        row
        for row in _workloads(service, _name(service, request))
        if query.type in (None, "train") and query.status in ("", row.phase)
    ]
    rows = rows if query.ascend else rows[::-1]
    listed: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Workload",
            "type": "train",
            "namespace": "default",
            "name": row.name,
            "jobName": row.name,
            "uid": row.id,
            "jobUUID": row.id,
            "flavor": row.body.spec.resource.flavor_id or "",
            "status": row.phase,
            "userName": row.user_name,
            "priority": str(row.priority),
            "createTime": row.create_ms,
            "runningDuration": views.duration_ms(row) // 1000,
            "nodes": [],
        }
        for row in rows[query.offset : query.offset + query.limit]
    ]
    return _listed("Workload", listed)


def workload_statistics(service: EmulatedService, request: Request) -> Any:
    phases = Counter(row.phase for row in _workloads(service, _name(service, request)))
    status = {"running": phases["Running"], "pending": phases["Pending"] + phases["Creating"]}
    item = {"type": "train", "total": phases.total(), "status": status}
    return {"statistics": {"total": phases.total(), "items": [item]}}


def statistics(service: EmulatedService, request: Request) -> Any:
    status = {"creating": 0, "created": len(service.settings.pools), "failed": 0, "pending": 0}
    return {"statistics": {"status": status}}


def quotas(service: EmulatedService, request: Request) -> Any:
    count = len(service.settings.pools)
    counts = (("pool", count), ("network", 0))
    return {"quotas": {"resources": [{"type": t, "quota": n, "used": n} for t, n in counts]}}


def configuration(service: EmulatedService, request: Request) -> Any:
    return {"networkCidrs": [], "networkQuota": 0, "poolQuota": len(service.settings.pools)}


def flavors(service: EmulatedService, request: Request) -> Any:
    listed = [
        {
            "apiVersion": "v1",
            "kind": "ResourceFlavor",
            "metadata": {"name": item.id, "labels": {}},
            "spec": {
                "type": "Dedicate" if item.pool else "Public",
                "cpuArch": "x86",
                "cpu": str(item.cpu_cores),
                "memory": f"{item.memory_gb}Gi",
                "jobFlavors": [],
            },
            "status": {"phase": {}},
        }
        for item in service.settings.flavors
    ]
    return _listed("ResourceFlavor", listed)


def no_network(service: EmulatedService, request: Request) -> Any:
    raise ServiceRefusal("ModelArts.2788", f"network: {request.path_params['network']}")


def _empty(body: Mapping[str, Any]) -> Any:
    def answer(service: EmulatedService, request: Request) -> Any:
        if "pool" in request.path_params:
            _name(service, request)
        return body

    return answer


def _name(service: EmulatedService, request: Request) -> str:
    name = request.path_params["pool"]
    if name not in service.settings.pools:
        raise ServiceRefusal("ModelArts.50015001", name)
    return name


def _pool(service: EmulatedService, name: str) -> dict[str, Any]:
    count = service.settings.pools[name]
    return {
        "apiVersion": "v2",
        "kind": "Pool",
        "metadata": {"name": name, "labels": {}, "annotations": {}},
        "spec": {"type": "Dedicate", "scope": ["Train"], "resources": [{"count": count}]},
        "status": {"phase": "Running", "scope": [{"scopeType": "Train", "state": "Enabled"}]},
    }


def _nodes(service: EmulatedService, request: Request) -> list[dict[str, Any]]:
    name = _name(service, request)
    return [
        {
            "apiVersion": "v2",
            "kind": "Node",
            "metadata": {"name": f"{name}-{index}", "labels": {}, "annotations": {}},
            "spec": {"flavor": ""},
            "status": {"phase": "Available", "az": "", "privateIp": f"127.0.0.{index + 1}"},
        }
        for index in range(service.settings.pools[name])
    ]


def _workloads(service: EmulatedService, name: str) -> list[JobRow]:
    of_pool = ("pool = ? AND phase IN ('Creating', 'Pending', 'Running', 'Terminating')", [name])
    return service.database.find_jobs([of_pool], order="create_ms", limit=_MOST, skip=0)[1]


def _listed(kind: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v2", "kind": f"{kind}List", "metadata": {}, "items": items}


ENDPOINTS = (
    Endpoint("GET", _POOLS, pools),
    Endpoint("GET", _POOL, pool),
    Endpoint("GET", _POOL + "/nodes", nodes),
    Endpoint("GET", _POOL + "/nodes/{node}", node),
    Endpoint("GET", _POOL + "/workloads", workloads),
    Endpoint("GET", _POOL + "/nodepools", _empty(_listed("NodePool", []))),
    Endpoint("GET", _POOL + "/plugins", _empty(_listed("Plugin", []))),
    Endpoint("GET", _POOL + "/monitor", _empty({"metrics": []})),
    Endpoint("GET", PROJECT + "/statistics/pools", statistics),
    Endpoint("GET", PROJECT + "/statistics/pools/{pool}/workloads", workload_statistics),
    Endpoint("GET", PROJECT + "/metrics/runtime/pools", _empty(_listed("PoolMetrics", []))),
    Endpoint("GET", PROJECT + "/plugintemplates", _empty(_listed("PluginTemplate", []))),
    Endpoint("GET", PROJECT + "/jobs", _empty({"count": 0, "items": []})),
    Endpoint("GET", _V1 + "/pools/tags", _empty({"tags": []})),
    Endpoint("GET", _V1 + "/pools/{pool}/tags", _empty({"tags": []})),
    Endpoint("GET", _V1 + "/networks", _empty(_listed("Network", []))),
    Endpoint("GET", _V1 + "/networks/{network}", no_network),
    Endpoint("GET", _V1 + "/quotas", quotas),
    Endpoint("GET", _V1 + "/os-user-config", configuration),
    Endpoint("GET", _V1 + "/resourceflavors", flavors),
    Endpoint("GET", _V1 + "/events", _empty(_listed("Event", []))),
    Endpoint("GET", _V1 + "/scheduled-events", _empty({"events": [], "count": 0})),
)
