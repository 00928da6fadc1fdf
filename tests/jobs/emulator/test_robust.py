"""Every request is accepted or refused; none causes an internal error."""

from __future__ import annotations

import copy
import random
import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.emulator import daemon
from cloudjob.emulator.database import Database
from cloudjob.emulator.models import StoredResource
from cloudjob.emulator.server import ENDPOINTS
from cloudjob.emulator.state import CONTROL_PREFIX
from cloudjob.errors import UsageError
from tests.support.emulator import Api, new_name, running

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 1.5, "", "x", "\0", [], [1], ["a"], [{}], [[]], {}, {"a": 1}),
    [{"name": 1}],
    {"a": {"b": []}},
)
JOB = {
    "kind": "job",
    "metadata": {
        "name": "",
        "description": "d",
        "annotations": {"a": "b"},
        "training_experiment_reference": {"name": "group", "description": "d"},
    },
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
    "host_ips": ["127.0.0.1"],
    "train_type": "job",
}
PASSWORD = {"user": {"name": "USER", "password": "PASSWORD", "domain": {"name": "DOMAIN"}}}
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
                "scope": {"project": {"name": "REGION", "id": ""}},
            }
        },
    ),
    (
        "POST",
        "/v3/auth/tokens",
        {
            "auth": {
                "identity": {
                    "methods": ["hw_ak_sk"],
                    "hw_ak_sk": {"access": {"key": "ACCESS"}, "secret": {"key": "SECRET"}},
                },
                "scope": {"domain": {"name": "DOMAIN", "id": ""}},
            }
        },
    ),
    ("POST", "/v3.0/OS-CREDENTIAL/securitytokens", {"auth": {"identity": {"token": {"id": "x"}}}}),
    ("POST", "{p}/training-experiments", {"metadata": {"name": "a"}}),
    ("PUT", "{p}/training-experiments/EXPERIMENT", {"metadata": {"name": "a"}, "name": "b"}),
    (
        "PUT",
        "{p}/algorithms/ALGORITHM",
        {"metadata": {"name": "a"}, "job_config": {"engine": {"image_url": "i:1"}, "inputs": []}},
    ),
    ("DELETE", "{p}/modelarts-training-job/JOB/tags/delete", {"tags": [{"key": "a"}]}),
    ("POST", "{p}/modelarts-training-job/resource-instances/count", {"matches": [{"key": "a"}]}),
    ("POST", "{p}/authorizations", {"user_id": "", "type": "agency", "content": "a"}),
    ("POST", "{p}/agency", {"agency_name_suffix": "a"}),
    ("POST", "{v1}/images", {"swr_path": "a/b:1"}),
    ("POST", "{v1}/images/IMAGE/sync", {"a": 1}),
    ("POST", "{p}/training-jobs/JOB/tasks/worker-0/save-image-job", {"name": "a", "tag": "1"}),
    ("POST", "{p}/training-jobs/JOB/tasks/worker-0/reports/x", {"type": "a"}),
    ("POST", "{v1}/workspaces/0/auth", {"requests": [{"action": "a", "resource": "b"}]}),
    ("PUT", "{v1}/workspaces/0", {"name": "a"}),
    ("PUT", "{v1}/workspaces/0/quotas", {"quotas": [{"resource": "a"}]}),
]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a body, as tuples of keys."""
    paths = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        paths += paths_of(inner, (*path, key))
    return paths


@pytest.fixture(scope="module")
def queued() -> Iterator[tuple[Api, str]]:
    """An emulator whose jobs stay in the queue, and the id of one job."""
    with running("engine: process\n") as api:
        api.fault("hang-pending")
        yield api, api.create("true")


def assert_answered(queued: tuple[Api, str], method: str, path: str, body: Any) -> None:
    """Check that a request is accepted or refused."""
    api, _ = queued
    status, answer, _ = api.ask(method, filled(path, queued), filled(body, queued))

    assert status < 500, (method, path, body, answer)


def filled(value: Any, queued: tuple[Api, str]) -> Any:
    """Return a path or a body with values of the emulator in place of their names."""
    api, job = queued
    address = api.address
    names = {
        **{"USER": address.user, "PASSWORD": address.password, "DOMAIN": address.domain},
        **{"ACCESS": address.access_key, "SECRET": address.secret_key, "REGION": address.region},
        "{v1}": f"/v1/{address.project_id}",
    }
    if isinstance(value, dict):
        return {key: filled(inner, queued) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, queued) for inner in value]
    if not isinstance(value, str):
        return value
    value = names.get(value, value).replace("{v1}", names["{v1}"]).replace("JOB", job)
    for kind, path in (("EXPERIMENT", "training-experiments"), ("ALGORITHM", "algorithms")):
        if kind in value:
            existing = api.ok("GET", f"{{p}}/{path}")["items"]
            item = existing[0] if existing else api.ok("POST", f"{{p}}/{path}", NAMED)
            value = value.replace(kind, item["metadata"]["id"])
    return value


NAMED = {"metadata": {"name": "known"}, "job_config": {"engine": {"image_url": "i:1"}}}


def with_value(body: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a body with another value at one path; a job gets an unused name."""
    changed: Any = copy.deepcopy(body)
    if body is JOB:
        changed["metadata"]["name"] = new_name()
    at = changed
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return changed


REQUESTS = [("POST", "{p}/training-jobs", JOB), *OTHERS]
VALUE_PATHS = [(*request, keys) for request in REQUESTS for keys in paths_of(request[2])]


def test_a_value_of_another_type_at_any_key_causes_no_internal_error(queued: tuple[Api, str]):
    rng = random.Random(20261121)
    for method, path, body, keys in VALUE_PATHS:
        for value in rng.sample(VALUES, 4):
            assert_answered(queued, method, path, with_value(body, keys, value))


def test_every_body_that_the_api_reads_is_tried():
    tried = {
        (
            method,
            re.sub(r"\b(JOB|EXPERIMENT|ALGORITHM|IMAGE)\b|worker-0|(?<=/)[x0](?=/|$)", "*", path),
        )
        for method, path, _ in REQUESTS
    }
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("/v2/{project_id}", "{p}").replace("/v1/{project_id}", "{v1}")
        is_other = "{rest" in path or path.startswith(CONTROL_PREFIX) or path.endswith("/sync")
        for method in endpoint.method.split():
            path = re.sub(r"(?<=/)\{\w+\}", "*", path)
            if method not in ("GET", "DELETE") and not is_other:
                assert (method, path) in tried


def test_a_token_is_for_the_project_or_the_domain_that_its_scope_names(queued: tuple[Api, str]):
    api, _ = queued
    address = api.address
    identity = {"methods": ["password"], "password": PASSWORD}
    for scope, kind in (
        ({"domain": {"name": address.domain}}, "domain"),
        ({"domain": {"name": "x", "id": "DOMAIN"}}, "domain"),
        ({"project": {"name": address.region}}, "project"),
        ({"project": {"id": address.project_id}}, "project"),
        (None, "project"),
    ):
        body = filled({"auth": {"identity": identity, "scope": scope}}, queued)
        status, answer, _ = api.ask("POST", "/v3/auth/tokens", body, headers={"Authorization": "-"})
        assert (status, kind in answer["token"]) == (201, True), (scope, answer)
    for scope in ({}, {"domain": {}}, {"domain": {"name": "x"}}, {"project": {"name": ""}}):
        body = filled({"auth": {"identity": identity, "scope": scope}}, queued)
        assert api.ask("POST", "/v3/auth/tokens", body)[0] == 401, scope


LISTS = {
    "{p}/algorithms": ("sort_by", "order", "limit", "offset"),
    "{p}/training-experiments": ("sort_by", "order", "limit", "offset"),
    "{p}/training-jobs/JOB/events": ("order", "limit", "offset", "level", "start_time"),
    "{p}/training-jobs/JOB/tasks": ("schedule_count",),
    "{p}/training-job-flavors": ("flavor_type",),
    "{p}/authorizations": ("sort_by", "order", "limit", "offset"),
    "{p}/pools/pool-emulator/workloads": ("sort", "ascend", "limit", "offset", "type"),
    "{v1}/workspaces": ("sort_by", "order", "limit", "offset", "filter_accessible"),
    "{v1}/images": ("sort_key", "sort_dir", "limit", "offset", "type"),
    "/v2/manage/namespaces/a/repos/b/tags": ("limit", "offset"),
}
UNSORTABLE = ("sort_by", "order", "sort", "ascend")


@pytest.mark.parametrize("path", LISTS)
def test_a_list_refuses_wrong_parameters_with_their_code(queued: tuple[Api, str], path: str):
    api, _ = queued
    target = filled(path, queued)
    values = ("evil", "-1", "1e9", "9" * 400, "%00", "a;b", "%27%20OR%201=1", "1.5")
    for name in LISTS[path]:
        for value in values:
            if name == "sort_key" and value in ("evil", "-1", "1e9"):
                continue  # any key is one
            status, answer, _ = api.ask("GET", f"{target}?{name}={value}")
            code = "ModelArts.2790" if name in UNSORTABLE else "ModelArts.2764"
            assert (status, answer["error_code"]) == (400, code), (path, name, value)
    assert api.ask("GET", f"{target}?limit=&offset=&sort_by=&unknown=1")[0] in (200, 204)


def test_a_search_refuses_wrong_parameters_with_their_code(queued: tuple[Api, str]):
    api, _ = queued
    for body, code in (
        ({"sort_by": "evil"}, "2790"),
        ({"sort_by": "name; DROP TABLE jobs"}, "2790"),
        ({"order": "up"}, "2790"),
        ({"limit": 51}, "2764"),
        ({"limit": 0}, "2764"),
        ({"offset": -1}, "2764"),
        ({"filters": [{"key": "evil", "value": ["a"]}]}, "2789"),
        ({"filters": [{"key": "name", "operator": "~", "value": ["a"]}]}, "2789"),
        ({"train_type": "x"}, "2788"),
        ({"host_ips": ["evil"]}, "2788"),
    ):
        status, answer, _ = api.ask("POST", "{p}/training-job-searches", body)
        assert (status, answer["error_code"]) == (400, f"ModelArts.{code}"), body


ANY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=-(10**400), max_value=10**400),
        st.floats(allow_nan=True, allow_infinity=True),
        st.text(st.characters(), max_size=300),
        st.sampled_from(("..", "/", "/bkt/../x", "%", "$", "NaN", "\ud800", "a" * 70_000)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(("name", "key", "value", "id", "")), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.sampled_from(VALUE_PATHS), ANY)
def test_hostile_values_at_any_key_cause_no_internal_error(
    queued: tuple[Api, str], value_path: Any, value: Any
):
    method, path, body, keys = value_path
    assert_answered(queued, method, path, with_value(body, keys, value))


def test_invalid_json_has_its_documented_code(queued: tuple[Api, str]):
    api, _ = queued
    deep = b"[" * 200_000 + b"]" * 200_000
    levels = b"[" * 120 + b"]" * 120
    for value in (
        *(levels, b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"\\ud800"', deep, b"9" * 5000),
        *(b"\xff", b"\x00", b"{", b"'a'"),
    ):
        for method, path, _ in REQUESTS:
            if path.startswith("{v1}/workspaces/0") or path.endswith(("/sync", "/save-image-job")):
                continue  # refused whatever the body
            body = b'{"description": ' + value + b"}"
            status, answer, _ = api.ask(method, filled(path, queued), body)
            assert (status, answer["error_code"]) == (400, "ModelArts.2787"), (path, value[:20])
    page = api.ok("POST", "{p}/training-job-searches", {})
    assert page["items"]


def test_searches_with_more_conditions_than_sqlite_takes_are_refused(queued: tuple[Api, str]):
    api, _ = queued
    name = {"key": "name", "operator": "in", "value": ["a"]}
    for body, code in (
        ({"filters": [name] * 3000}, "2789"),
        ({"filters": [{**name, "value": ["a"] * 300_000}]}, "2789"),
        ({"filters": [{**name, "operator": "like", "value": ["a" * 60_000]}]}, "2789"),
        ({"tags": [{"key": f"k{number}"} for number in range(3000)]}, "2788"),
        ({"tags": [{"key": "k", "values": [str(number) for number in range(300_000)]}]}, "2788"),
    ):
        status, answer, _ = api.ask("POST", "{p}/training-job-searches", body)
        assert (status, answer["error_code"]) == (400, f"ModelArts.{code}")
    filters = {"tags": [{"key": f"k{number}"} for number in range(3000)]}
    path = "{p}/modelarts-training-job/resource-instances/filter"
    assert api.ask("POST", path, filters)[0] == 400


def test_a_million_faults_in_one_body_do_not_fill_the_memory(queued: tuple[Api, str]):
    api, job = queued
    before = peak_mib(api)
    for path, body in (
        ("{p}/modelarts-training-job/JOB/tags/create", {"tags": [1] * 1_000_000}),
        ("{p}/training-jobs", {**JOB, "algorithm": {"parameters": [{}] * 1_000_000}}),
        ("{p}/training-jobs", {**JOB, "algorithm": {"environments": dict.fromkeys(KEYS, 1)}}),
    ):
        assert api.ask("POST", path.replace("JOB", job), body)[0] == 400
    assert peak_mib(api) - before < 400


KEYS = [str(number) for number in range(500_000)]


def peak_mib(api: Api) -> int:
    text = Path(f"/proc/{api.address.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def test_an_algorithm_with_nameless_parameters_is_refused(queued: tuple[Api, str]):
    api, _ = queued
    for parameters in ([{}], [{"name": ""}], [{"name": 7}], [{"name": None}]):
        config = {"parameters": parameters, "engine": {"image_url": "i:1"}, "command": "true"}
        body = {"metadata": {"name": new_name()}, "job_config": config}
        assert api.ask("POST", "{p}/algorithms", body)[0] == 400
    body["job_config"]["parameters"] = [{"name": "a", "value": "1"}]
    algorithm = api.ok("POST", "{p}/algorithms", body)["metadata"]["id"]
    for parameters in ([{}], ["a"], 7, [{"name": ["a"]}]):
        job = api.body("true", algorithm={"id": algorithm, "parameters": parameters})
        assert api.ask("POST", "{p}/training-jobs", job)[0] in (201, 400)


@pytest.mark.parametrize("path", ["training-jobs", "algorithms", "training-experiments"])
def test_only_one_of_several_simultaneous_creates_gets_the_name(queued: tuple[Api, str], path: str):
    api, _ = queued
    source = {"name": "data", "remote": {"obs": {"obs_url": "obs://cloudjob/in/"}}}
    body = api.body("true", algorithm={"inputs": [source]})
    body["job_config"] = {"engine": {"image_url": "i:1"}}
    # The slow check of the bucket lets all requests arrive before the first one is answered.
    api.fault("slow-obs", count=12, amount=1, path="cloudjob")
    with ThreadPoolExecutor(12) as pool:
        responses = [pool.submit(api.ask, "POST", f"{{p}}/{path}", body) for _ in range(12)]
        statuses = sorted(item.result()[0] for item in responses)

    assert statuses[0] in (200, 201)
    assert statuses[1:] == [400] * 11


def test_a_fault_accepts_finite_numbers_only(queued: tuple[Api, str]):
    api, _ = queued
    for values in (
        *({"amount": "nan"}, {"seconds": "inf"}, {"count": "x"}, {"node": [1]}),
        *({"amount": 1e308}, {"seconds": -1}, {"count": 1 << 80}, {"node": -1}),
    ):
        with pytest.raises(UsageError, match=r"amount|seconds|count|node"):
            daemon.add_fault(api.home, kind="slow-obs", **values)


def test_a_task_of_many_digits_is_refused(queued: tuple[Api, str]):
    api, job = queued
    for index in ("9" * 5000, "%D9%A0", "00", "-0", "+0"):
        path = f"{{p}}/training-jobs/{job}/tasks/worker-{index}/logs/preview"
        status, answer, _ = api.ask("GET", path)
        assert (status, answer["error_code"]) == (400, "ModelArts.2788")


class Note(StoredResource):
    """Something to store."""

    kind = "note"
    text: str = ""


def test_a_transaction_that_cannot_be_committed_leaves_nothing_open(tmp_path: Path):
    """Later changes would belong to the open transaction and be lost when the process ends."""
    path = tmp_path / "state.db"
    database = Database(path)
    sql = "CREATE TABLE t (k TEXT REFERENCES jobs (id) DEFERRABLE INITIALLY DEFERRED)"
    database._connection.executescript(f"PRAGMA foreign_keys = ON; {sql}")
    with pytest.raises(sqlite3.IntegrityError), database.transaction():
        database._execute("INSERT INTO t VALUES ('x')")
    with database.transaction():
        database.put_resource("1", "1", Note(text="x"))

    assert Database(path).resource(Note, "1") == Note(text="x")


def test_a_full_disk_loses_nothing_that_was_stored_and_ends_with_the_space(tmp_path: Path):
    database = Database(tmp_path / "state.db")
    database.put_resource("1", "1", Note())
    pages = database._rows("PRAGMA page_count")[0][0]
    database._execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"), database.transaction():
        database.put_resource("2", "2", Note(text="x" * 100_000))
    database._execute("PRAGMA max_page_count = 100000")
    database.put_resource("3", "3", Note())

    assert len(Database(tmp_path / "state.db").resources(Note)) == 2


def test_a_locked_database_is_an_error_that_ends_with_the_lock(queued: tuple[Api, str]):
    api, job = queued
    other = sqlite3.connect(Path(api.home, "emulator", "state.db"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    status, answer, _ = api.ask("PUT", f"{{p}}/training-jobs/{job}", {"description": "x"})
    assert (status, answer["error_code"]) == (500, "ModelArts.0010")
    other.execute("ROLLBACK")
    other.close()
    api.ok("PUT", f"{{p}}/training-jobs/{job}", {"description": "y"})


def test_a_body_that_is_not_an_object_is_refused(queued: tuple[Api, str]):
    api, _ = queued
    for body in ([], "text", 3, None):
        status, answer, _ = api.ask("POST", "{p}/training-jobs", body)
        assert (status, answer["error_code"]) in (
            (400, "ModelArts.2787"),
            (400, "ModelArts.2788"),
        )
