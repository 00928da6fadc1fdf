"""Whatever a client sends is taken or refused; it is never an internal error."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.emulators import new_name, running

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 1.5, "", "x", "\0", [], [1], ["a"], [{}], [[]], {}, {"a": 1}),
    [{"name": 1}],
    {"a": {"b": []}},
)
JOB = {
    "kind": "job",
    "metadata": {"name": "", "description": "d", "annotations": {"a": "b"}},
    "algorithm": {
        "engine": {"image_url": "i:1"},
        "command": "true",
        "parameters": [{"name": "a", "value": "1", "constraint": {"sensitive": True}}],
        "inputs": [],
        "outputs": [],
        "environments": {"A": "1"},
    },
    "spec": {
        "resource": {"flavor_id": "modelarts.vm.cpu.2u", "node_count": 1},
        "schedule_policy": {"priority": 1},
        "auto_stop": {"time_unit": "HOURS", "duration": 1},
        "volumes": [],
        "log_export_path": {},
    },
    "tags": [{"key": "a", "value": "b"}],
    "endpoints": {"ssh": {"key_pair_names": ["a"]}},
}
SEARCH = {
    "offset": 0,
    "limit": 1,
    "sort_by": "name",
    "order": "asc",
    "workspace_id": "0",
    "filters": [{"key": "name", "operator": "in", "value": ["a"]}],
    "tags": [{"key": "a", "values": ["b"]}],
}
PASSWORD = {"user": {"name": "a", "password": "b", "domain": {"name": "c"}}}
OTHERS = [
    ("PUT", "{p}/training-jobs/JOB", {"description": "x", "spec": {"schedule_policy": {}}}),
    ("POST", "{p}/training-jobs/JOB/actions", {"action_type": "x"}),
    ("POST", "{p}/training-jobs/batch-delete", {"jobs": [{"metadata": {"id": "x"}}]}),
    ("POST", "{p}/training-job-searches", SEARCH),
    (
        "POST",
        "{p}/algorithms",
        {
            "metadata": {"name": "a", "description": "d"},
            "job_config": {"engine": {"engine_id": "x"}, "parameters": [{"name": "a"}]},
        },
    ),
    ("POST", "{p}/modelarts-training-job/JOB/tags/create", {"tags": [{"key": "a", "value": "b"}]}),
    (
        "POST",
        "{p}/modelarts-training-job/resource-instances/filter",
        {"tags": [{"key": "a", "values": ["b"]}], "matches": [{"key": "resource_name"}]},
    ),
    (
        "POST",
        "/v3/auth/tokens",
        {
            "auth": {
                "identity": {"methods": ["password"], "password": PASSWORD},
                "scope": {"project": {"name": "x"}},
            }
        },
    ),
    ("POST", "/v3.0/OS-CREDENTIAL/securitytokens", {"auth": {"identity": {"token": {"id": "x"}}}}),
    ("POST", "{p}/training-experiments", {"metadata": {"name": "a"}}),
]


def ways(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value in a body."""
    found = [way] if way else []
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += ways(inner, (*way, key))
    return found


def test_a_value_of_another_kind_at_any_place():
    """In the body of each request that has one."""
    chance = random.Random(20261121)
    with running("engine: process\n") as api:
        api.fault("hang-pending")
        job = api.create("true")
        for method, path, body in [("POST", "{p}/training-jobs", JOB), *OTHERS]:
            for way in ways(body):
                for value in chance.sample(VALUES, 4):
                    made: Any = copy.deepcopy(body)
                    if body is JOB:
                        made["metadata"]["name"] = new_name()
                    at = made
                    for key in way[:-1]:
                        at = at[key]
                    at[way[-1]] = value
                    status, answer, _ = api.ask(method, path.replace("JOB", job), made)

                    assert status < 500, (method, path, way, value, answer)


def test_bodies_that_are_no_objects():
    """No JSON, and JSON of another kind."""
    with running("engine: process\n") as api:
        for body in ([], "text", 3, None):
            status, answer, _ = api.ask("POST", "{p}/training-jobs", body)
            assert (status, answer["error_code"]) in (
                (400, "ModelArts.2787"),
                (400, "ModelArts.2788"),
            )
