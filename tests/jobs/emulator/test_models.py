"""The rules of a create request, and their error codes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.emulator import models, settings
from cloudjob.emulator.errors import ServiceRefusal

SETTINGS = settings.defaults()
PRESET = {"engine_id": "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"}


def body(**changes: Any) -> dict[str, Any]:
    """Return the smallest valid body, changed at paths whose keys are joined by ``__``."""
    full_body: dict[str, Any] = {
        "kind": "job",
        "metadata": {"name": "j"},
        "algorithm": {"engine": {"image_url": "ns/img:1"}, "command": "python t.py"},
        "spec": {"resource": {"flavor_id": "modelarts.vm.cpu.2u", "node_count": 1}},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = full_body
        for name in parents:
            at = at.setdefault(name, {})
        at[last] = value
    return full_body


def obs(url: str, name: str = "data_url", **more: Any) -> dict[str, Any]:
    """Return an input or output."""
    return {"name": name, "remote": {"obs": {"obs_url": url}}, **more}


def completed(**changes: Any) -> Any:
    """Return the body with all defaults, after its validation."""
    return models.job(body(**changes), SETTINGS).model_dump()


@pytest.mark.parametrize(
    ("url", "bucket", "key"),
    [
        ("obs://bkt/a/b/", "bkt", "a/b/"),
        ("s3://bkt/a", "bkt", "a"),
        ("/bkt/a/b.py", "bkt", "a/b.py"),
        ("/bkt/", "bkt", ""),
        ("obs://bkt", "bkt", ""),
    ],
)
def test_an_obs_url_has_three_spellings(url: str, bucket: str, key: str):
    assert models.place(url) == (bucket, key)


@pytest.mark.parametrize("url", ["", "bkt/a", "http://bkt/a", "/B/a", "/bkt//a", None, "file:///x"])
def test_an_invalid_obs_url_is_refused(url: Any):
    with pytest.raises(ServiceRefusal) as caught:
        models.place(url)
    assert caught.value.code == "ModelArts.2791"


def test_a_body_gets_all_defaults():
    full_body = completed(
        algorithm__engine=PRESET,
        algorithm__code_dir="obs://bkt/code/",
        algorithm__boot_file="/bkt/code/a/t.py",
        algorithm__inputs=[obs("/bkt/in/")],
        algorithm__outputs=[obs("/bkt/out", "train_url", access_method="env")],
        algorithm__parameters=[{"name": "n", "value": 3}],
    )["algorithm"]

    assert full_body["inputs"][0]["local_dir"] == "/home/ma-user/modelarts/inputs/data_url_0"
    assert full_body["inputs"][0]["access_method"] == "parameter"
    assert full_body["outputs"][0]["local_dir"] == "/home/ma-user/modelarts/outputs/train_url_0"
    assert full_body["outputs"][0]["access_method"] == "env"
    assert full_body["parameters"] == [{"name": "n", "value": "3"}]
    assert full_body["engine"]["engine_name"] == "PyTorch"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"metadata__name": ""}, "2788"),
        ({"metadata__name": "a b"}, "2788"),
        ({"metadata__name": "x" * 65}, "2788"),
        ({"metadata__description": "x" * 257}, "2788"),
        ({"metadata__workspace_id": "7"}, "0102"),
        ({"metadata__annotations": {models.RETRY_NUM: "4"}}, "2788"),
        ({"metadata__annotations": {models.RETRY_NUM: 1}}, "2788"),
        ({"kind": "edge_job"}, "2788"),
        ({"algorithm__engine": {}}, "2780"),
        ({"algorithm__engine": {"engine_id": "nothing"}}, "2780"),
        ({"algorithm__engine": {"engine_name": "PyTorch", "engine_version": "9"}}, "2780"),
        ({"algorithm__command": ""}, "2788"),
        ({"algorithm__code_dir": "code/"}, "2791"),
        *(
            ({"algorithm__local_code_dir": path}, "2788")
            for path in (
                "/opt/x",
                "/home",
                "/home/ma-user",
                "/home/ma-user/",
                "/home/ma-user/modelarts/x",
                "/home//ma-user/./modelarts",
                "/home/ma-user/modelarts-dev",
                "/home/ma-user/infer",
                "/home/../etc",
                "/home/x/../../etc",
                "//home/x",
                "home/x",
                "/home/x\n",
                "/home/\0",
                ["/home/x"],
            )
        ),
        *(
            ({f"algorithm__{key}": [obs("/bkt/a", local_dir=path)]}, "2788")
            for key in ("inputs", "outputs")
            for path in ("/", "//", "/a/../../etc", "../x", "x", "/x/..", "/a\0b", 7, {"a": 1})
        ),
        ({"algorithm__working_dir": "/home/.."}, "2788"),
        ({"algorithm__working_dir": ["/x"]}, "2788"),
        ({"algorithm__code_dir": "/bkt/.."}, "2791"),
        ({"algorithm__code_dir": "/bkt/a\0b/"}, "2791"),
        ({"algorithm__code_dir": "/bkt/a/../../b/"}, "2791"),
        ({"algorithm__engine": PRESET}, "2757"),
        ({"algorithm__engine": PRESET, "algorithm__code_dir": "/bkt/c/"}, "2758"),
        (
            {
                "algorithm__engine": PRESET,
                "algorithm__code_dir": "/bkt/c/",
                "algorithm__boot_file": "/bkt/d/t.py",
            },
            "2758",
        ),
        ({"algorithm__parameters": [{"name": ""}]}, "2788"),
        ({"algorithm__parameters": [{"name": "a"}, {"name": "a"}]}, "2767"),
        ({"algorithm__parameters": {"a": 1}}, "2788"),
        ({"algorithm__inputs": [obs("/bkt/a"), obs("/bkt/b")]}, "2753"),
        ({"algorithm__inputs": [obs("/bkt/a", "a-b")]}, "2753"),
        ({"algorithm__inputs": [obs("nowhere")]}, "2791"),
        ({"algorithm__inputs": [obs("/bkt/a", access_method="file")]}, "2753"),
        ({"algorithm__inputs": [{"name": "d", "remote": {"dataset": {"id": "1"}}}]}, "2788"),
        ({"algorithm__environments": {"MA_X": "1"}}, "2788"),
        ({"algorithm__environments": {"1X": "1"}}, "2788"),
        ({"algorithm__environments": {"X": "$HOME"}}, "2788"),
        ({"algorithm__environments": {"X": "x" * 4097}}, "2788"),
        ({"algorithm__environments": {f"X{i}": "" for i in range(101)}}, "2788"),
        ({"algorithm__environments": {"X": 1}}, "2788"),
        ({"spec__resource": {}}, "2763"),
        ({"spec__resource__flavor_id": "nothing"}, "2781"),
        ({"spec__resource__node_count": 17}, "2793"),
        ({"spec__resource__node_count": 0}, "2788"),
        ({"spec__resource__node_count": "2"}, "2788"),
        ({"spec__resource__pool_id": "nowhere"}, "2788"),
        ({"spec__resource__pool_id": "pool-emulator"}, "2763"),
        ({"spec__resource__flavor_id": "modelarts.pool.visual.xlarge"}, "2763"),
        ({"spec__auto_stop": {"time_unit": "HOURS", "duration": 0}}, "2788"),
        ({"spec__auto_stop": {"time_unit": "MINUTES", "duration": 1}}, "2788"),
        ({"spec__schedule_policy": {"priority": 4}}, "2788"),
        ({"spec__log_export_path": {"obs_url": "x"}}, "2791"),
        ({"spec__volumes": {"nfs": {}}}, "2788"),
    ],
    ids=str,
)
def test_a_broken_rule_has_its_documented_code(changes: dict[str, Any], code: str):
    with pytest.raises(ServiceRefusal) as caught:
        completed(**changes)
    assert (caught.value.code, caught.value.status) == (f"ModelArts.{code}", 400)


def test_values_at_the_limits_are_accepted():
    full_body = completed(
        metadata__name="x" * 64,
        metadata__description="x" * 256,
        algorithm__environments={f"X{i}": "v" * 4096 for i in range(100)},
        spec__resource__node_count=16,
    )

    assert len(full_body["algorithm"]["environments"]) == 100


def test_a_dedicated_pool_has_its_own_flavors():
    for resource in (
        {"pool_id": "pool-emulator", "flavor_id": "modelarts.pool.visual.2xlarge"},
        {"pool_id": "pool-emulator"},
    ):
        parsed = models.job(body(spec__resource=resource), SETTINGS)
        assert parsed.spec.resource.node_count == 1
    resource = {"pool_id": "pool-emulator", "flavor_id": "modelarts.pool.visual.4xlarge"}
    job = models.job(body(spec__resource=resource), SETTINGS)
    assert job.flavor(SETTINGS).cards == 4


def test_an_algorithm_supplies_what_the_job_omits():
    config = models.AlgorithmConfig.model_validate(
        {
            "code_dir": "/bkt/code/",
            "boot_file": "/bkt/code/t.py",
            "engine": PRESET,
            "parameters": [{"name": "a", "value": "1"}, {"name": "b", "value": "2"}],
            "inputs": [{"name": "data_url"}],
            "outputs": [],
        }
    )
    of_user = {"id": "1", "parameters": [{"name": "b", "value": "9"}]}
    request = body(algorithm=models.with_algorithm(of_user, "algo", config))
    algorithm = models.job(request, SETTINGS).algorithm

    assert algorithm.boot_file == "/bkt/code/t.py"
    assert algorithm.name == "algo"
    assert {item.name: item.value for item in algorithm.parameters} == {"a": "1", "b": "9"}


FULL = body(
    algorithm__engine=PRESET,
    algorithm__code_dir="obs://bkt/code/",
    algorithm__boot_file="/bkt/code/a/t.py",
    algorithm__inputs=[obs("/bkt/in/")],
    algorithm__outputs=[obs("/bkt/out", "train_url")],
    algorithm__parameters=[{"name": "n", "value": "3"}],
    algorithm__environments={"A": "1"},
    metadata__annotations={models.RETRY_NUM: "1"},
    spec__auto_stop={"time_unit": "HOURS", "duration": 1},
    spec__schedule_policy={"priority": 1},
    spec__log_export_path={"obs_url": "/bkt/log/"},
    spec__volumes=[{"nfs": {}}],
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a body, as tuples of keys."""
    paths = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        paths += paths_of(inner, (*path, key))
    return paths


@given(path=st.sampled_from(paths_of(FULL)), value=VALUES)
def test_any_value_at_any_key_is_accepted_or_refused(path: tuple[Any, ...], value: Any):
    changed = copy.deepcopy(FULL)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with contextlib.suppress(ServiceRefusal):
        job = models.job(changed, SETTINGS)
        job.output_urls()
        job.flavor(SETTINGS)
        assert job.metadata.retries in range(4)
        assert models.JobRequest.model_validate_json(job.model_dump_json()) == job
