"""Tests of volumes, of what pods need to exist, and of ordinary wishes; no cluster is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudjob.backends.kubernetes import checks, request, volumes
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.backends.kubernetes.volumes import ACCOUNT, Doubt, Use
from cloudjob.errors import SpecError
from cloudjob.model import validation
from tests.support import kube_schemas, operators
from tests.support.fake_kube_api import NAMESPACE, FakeApi
from tests.unit.cloudjob.backends.test_kubernetes_backend import JobFixture
from tests.unit.cloudjob.backends.test_kubernetes_build import ROOT, build, check, submission

CORE = f"/api/v1/namespaces/{NAMESPACE}"
ALONE, TOGETHER = Use(False, is_together=False), Use(False, is_together=True)
READER = Use(True, is_together=False)
NAMED: dict[str, Any] = {
    "inputs": {
        "DATA": "pvc://datasets/image%20net",
        "MORE": "pvc://datasets",
        "HUB": "secret://hub/token",
        "RULES": "configmap://rules/",
        "WEB": "https://files.example.com/x",
    },
    "outputs": {"MODEL": "pvc://results/resnet"},
}


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()


def with_volumes(engine: str = "job", options: Any = None, **values: Any):
    """Return the request of a job whose inputs and outputs are volumes."""
    base = submission(engine, options, **{**NAMED, **values})
    outputs = tuple((name, uri or "s3://bucket/x") for name, uri in base.spec.outputs.items())
    return request.build(base._replace(outputs=outputs), ENGINES[engine], NAMESPACE)


def examples() -> dict[str, Any]:
    """Return the sections ``kubernetes`` of the examples in the guide, as one."""
    text = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    parts = [part for part in text.split("```") if part.startswith("yaml\nkubernetes:")]
    sections = [yaml.safe_load(part.removeprefix("yaml\n"))["kubernetes"] for part in parts]
    return {key: value for section in sections for key, value in section.items()}


# -- volumes by name ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_and_outputs_that_name_volumes_are_mounted(engine: str):
    """An input is a path in a read-only volume, an output a folder that the entry writes to."""
    job_request = with_volumes(engine)

    for pod in operators.made_of(dict(job_request.body)).pods:
        (container,) = pod["spec"]["containers"]
        variables = {item["name"]: item.get("value") for item in container["env"]}
        mounts = {
            item["mountPath"]: (item["name"], item["readOnly"])
            for item in container["volumeMounts"]
            if item["mountPath"].startswith("/mnt/cloudjob")
        }
        named = {item["name"]: item for item in pod["spec"]["volumes"]}
        assert variables["DATA"] == "/mnt/cloudjob/DATA/image net"
        assert variables["MORE"] == "/mnt/cloudjob/MORE"
        assert variables["HUB"] == "/mnt/cloudjob/HUB/token"
        assert variables["RULES"] == "/mnt/cloudjob/RULES"
        assert "file:///mnt/cloudjob/MODEL/resnet" in variables["CLOUDJOB_OUTPUTS"]
        assert "pvc://" not in variables["CLOUDJOB_INPUTS"]
        assert "https://files.example.com/x" in variables["CLOUDJOB_INPUTS"]
        data, is_read_only = mounts["/mnt/cloudjob/DATA"]
        assert mounts["/mnt/cloudjob/MORE"] == (data, is_read_only) == (data, True)
        assert named[data]["persistentVolumeClaim"] == {
            "claimName": "datasets",
            "readOnly": True,
        }
        key = {"secretName": "hub", "items": [{"key": "token", "path": "token"}]}
        assert named[mounts["/mnt/cloudjob/HUB"][0]]["secret"] == key
        assert named[mounts["/mnt/cloudjob/RULES"][0]]["configMap"] == {"name": "rules"}
        assert mounts["/mnt/cloudjob/MODEL"][1] is False
        assert kube_schemas.problems(pod, kube_schemas.VERSIONS[0]) == []
        assert kube_schemas.restricted_problems(pod["spec"]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inputs": {"DATA": "pvc:///x"}}, "inputs.DATA: names no place in a volume"),
        ({"inputs": {"DATA": "pvc://a?x=1"}}, "inputs.DATA: names no place in a volume"),
        ({"outputs": {"MODEL": "pvc://a/../b"}}, "outputs.MODEL: names no place in a volume"),
        ({"input_nodes": {"DATA": "0"}}, "input_nodes.DATA: every pod mounts a volume"),
    ],
)
def test_a_wrong_name_of_a_volume_is_refused(values: Any, message: str):
    with pytest.raises(SpecError) as caught:
        with_volumes(**values)

    assert any(message in problem for problem in caught.value.problems)


@pytest.mark.parametrize("backend", ["process", "docker", "modelarts", "slurm"])
def test_volumes_are_only_for_kubernetes(backend: str):
    spec = submission("job", **NAMED).spec.with_values(backend=backend)

    problem_of = dict(validation.conflicts(spec))
    assert problem_of["inputs.DATA"] == f"is a volume of Kubernetes (given pvc:// with {backend})"
    assert {"inputs.HUB", "inputs.RULES", "outputs.MODEL"} <= set(problem_of)
    assert "inputs.WEB" not in problem_of


@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_in_a_volume_of_the_job_file_is_the_same_volume(engine: str):
    claim = {"persistentVolumeClaim": {"claimName": "datasets"}}
    options = {"volumes": [{"name": "data", **claim, "mountPath": "/data"}]}
    for pod in operators.made_of(dict(with_volumes(engine, options).body)).pods:
        claims = [item for item in pod["spec"]["volumes"] if "persistentVolumeClaim" in item]
        assert {"name": "data", **claim} in claims
        names = [item["persistentVolumeClaim"]["claimName"] for item in claims]
        assert sorted(names) == ["datasets", "results"]
        mounts = pod["spec"]["containers"][0]["volumeMounts"]
        read_only = {item["mountPath"]: item.get("readOnly") for item in mounts}
        assert (read_only["/data"], read_only["/mnt/cloudjob/DATA"]) == (None, True)


def test_one_volume_can_be_mounted_at_several_paths():
    """Some clusters never start a pod that mounts one claim as two volumes (kubernetes#28502)."""
    claim = {"name": "team", "persistentVolumeClaim": {"claimName": "team"}}
    both = [{**claim, "mountPath": "/a"}, {**claim, "mountPath": "/b", "subPath": "b"}]
    (pod, *_) = operators.made_of(dict(build("job", {"volumes": both}).body)).pods

    assert [item for item in pod["spec"]["volumes"] if item["name"] == "team"] == [claim]
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [item["mountPath"] for item in mounts if item["name"] == "team"] == ["/a", "/b"]


# -- what must exist ------------------------------------------------------------------------------


def claim(*modes: str, phase: str = "Bound", **metadata: Any) -> dict[str, Any]:
    """Return a claim as the API server has it."""
    spec = {"accessModes": list(modes), "storageClassName": "fast"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


RWO, RWX, ROX = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"


@pytest.mark.parametrize(
    ("stated", "use", "nodes", "binds_late", "expected"),
    [
        (claim(RWO), ALONE, 1, False, Doubt.NONE),
        (claim(RWX), ALONE, 3, False, Doubt.NONE),
        (claim(RWO, RWX), ALONE, 3, False, Doubt.NONE),
        (claim(RWO), ALONE, 2, False, Doubt.ONE_MACHINE),
        (claim(RWO), TOGETHER, 2, False, Doubt.NONE),
        (claim(RWO, ROX), READER, 2, False, Doubt.NONE),
        (claim(RWO, ROX), ALONE, 2, False, Doubt.ONE_MACHINE),
        (claim(ROX), ALONE, 1, False, Doubt.READ_ONLY),
        (claim(ROX), READER, 3, False, Doubt.NONE),
        (claim("ReadWriteOncePod"), TOGETHER, 2, False, Doubt.ONE_POD),
        (claim("ReadWriteOncePod"), ALONE, 1, False, Doubt.NONE),
        (claim(RWX, phase="Pending"), ALONE, 2, False, Doubt.UNBOUND),
        (claim(RWX, phase="Lost"), ALONE, 2, False, Doubt.UNBOUND),
        (claim(RWX, phase="Pending"), ALONE, 2, True, Doubt.NONE),
        (claim(RWX, deletionTimestamp="x"), ALONE, 1, False, Doubt.DELETED),
    ],
)
def test_a_claim_fits_the_pods_or_says_why_not(
    stated: dict[str, Any], use: Use, nodes: int, binds_late: bool, expected: Doubt
):
    assert volumes.doubt_of(stated, use, nodes, binds_late=binds_late) is expected


@pytest.mark.parametrize("kind", ["required", "preferred"])
def test_everything_that_pods_refer_to_is_needed(kind: str):
    """Volumes, variables, pull secrets and accounts; what is optional is not needed."""
    source = {"secretKeyRef": {"name": "keys", "key": "a"}}
    projected = [{"configMap": {"name": "part", "items": [{"key": "k", "path": "p"}]}}]
    rule, is_together = f"{kind}DuringSchedulingIgnoredDuringExecution", kind == "required"
    patch = {
        "affinity": {"podAffinity": {rule: [{"topologyKey": "kubernetes.io/hostname"}]}},
        "volumes": [
            {"name": "all", "projected": {"sources": projected}},
            {"name": "maybe", "secret": {"secretName": "maybe", "optional": True}},
            {"name": "host", "hostPath": {"path": "/disk"}},
        ],
        "containers": [
            {
                "name": "cloudjob",
                "env": [{"name": "A", "valueFrom": source}],
                "envFrom": [{"configMapRef": {"name": "many"}}],
            }
        ],
    }
    options = {
        "pod": {"spec": patch},
        "service_account": "trainer",
        "image_pull_secrets": ["registry"],
    }
    needs = volumes.needs_of(with_volumes("mpi-operator", options).body)

    job_name = "train-2345678b"
    assert needs.claims == {
        "datasets": Use(True, is_together),
        "results": Use(False, is_together),
    }
    assert needs.host_paths == {"/disk"}
    assert needs.objects == {
        (CONFIG_MAP, f"{job_name}-entry"): set(),
        (SECRET, f"{job_name}-delivery"): set(),
        (SECRET, "hub"): {"token"},
        (CONFIG_MAP, "rules"): set(),
        (SECRET, "keys"): {"a"},
        (CONFIG_MAP, "part"): {"k"},
        (CONFIG_MAP, "many"): set(),
        (ACCOUNT, "trainer"): set(),
        (SECRET, "registry"): set(),
    }


def test_missing_objects_are_found_before_the_submit(api: FakeApi, tmp_path: Path):
    """Each with its reason; what the user may not read is left out."""
    job = JobFixture(api, tmp_path, "job")
    options = {
        "service_account": "trainer",
        "volumes": [{"name": "x", "hostPath": {"path": "/x"}, "mountPath": "/x"}],
        "pod": {
            "spec": {
                "volumes": [{"name": "c", "secret": {"secretName": "c", "items": [{"key": "k"}]}}]
            }
        },
    }
    job_request = with_volumes(options=options, nodes=2)
    client = job.backend._client(job.backend._cluster)

    def checks_now() -> dict[str, tuple[bool, bool, str]]:
        each = checks._needs(client, job_request)
        return {item.name: (item.is_ok, item.is_needed, item.found) for item in each}

    missing = (False, True, "there is none in lab")
    wanted = ("PersistentVolumeClaim datasets", "PersistentVolumeClaim results", "Secret hub")
    assert checks_now() == {
        "hostPath /x": (
            False,
            False,
            "it is another folder on each machine, and many clusters forbid it",
        ),
        **dict.fromkeys(
            (*wanted, "Secret c", "ConfigMap rules", "ServiceAccount trainer"), missing
        ),
    }

    claims = f"{CORE}/persistentvolumeclaims"
    api.objects[f"{claims}/datasets"] = claim(RWO, ROX)
    api.objects[f"{claims}/results"] = claim(RWX, phase="Pending")
    api.objects[f"{CORE}/secrets/c"] = {"data": {"other": ""}}
    api.objects[f"{CORE}/secrets/hub"] = {"data": {"token": ""}}
    api.objects["/apis/storage.k8s.io/v1/storageclasses/fast"] = {"volumeBindingMode": "Immediate"}
    api.forbidden = {("GET", "/serviceaccounts/"), ("GET", "/configmaps/")}
    now = checks_now()
    del now["hostPath /x"]
    assert now == {
        "PersistentVolumeClaim datasets": (True, True, "usable (ReadWriteOnce, ReadOnlyMany)"),
        "PersistentVolumeClaim results": (False, True, "it has no volume (ReadWriteMany)"),
        "Secret c": (False, True, "it has no k"),
        "Secret hub": (True, True, "exists"),
    }

    api.objects["/apis/storage.k8s.io/v1/storageclasses/fast"] = {
        "volumeBindingMode": "WaitForFirstConsumer"
    }
    assert checks_now()["PersistentVolumeClaim results"] == (True, True, "usable (ReadWriteMany)")


# -- ordinary wishes ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_each_version_of_kubernetes_accepts_the_examples_of_the_guide(engine: str):
    options = examples()
    assert set(options) == {"volumes", "pod"}
    job_request = build(engine, options, nodes=2)
    (*_, pod) = operators.made_of(dict(job_request.body)).pods

    problems_found = [
        problem
        for version in kube_schemas.VERSIONS
        for problem in kube_schemas.problems(pod, version)
    ]
    # MindSpore's operator is older than sidecars.
    of_crd = [
        problem
        for problem in check(dict(job_request.body), engine)
        if engine != "ms-operator" or "restartPolicy" not in problem
    ]
    assert problems_found == of_crd == []
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"rdma/hca": "1", "ephemeral-storage": "100Gi"}
    assert pod["spec"]["initContainers"][1]["restartPolicy"] == "Always"
    assert pod["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nodes", [1, 3])
def test_pods_pass_the_restricted_standard_of_pod_security(engine: str, nodes: int):
    pods = operators.made_of(dict(build(engine, nodes=nodes).body)).pods

    assert [
        problem for pod in pods for problem in kube_schemas.restricted_problems(pod["spec"])
    ] == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"user": "0"}, "cloudjob.runAsUser"),
        ({"user": ""}, "cloudjob.runAsNonRoot"),
        ({"pod": {"spec": {"hostIPC": True}}}, "hostIPC"),
        (
            {"volumes": [{"name": "x", "hostPath": {"path": "/x"}, "mountPath": "/x"}]},
            "volumes.x",
        ),
    ],
)
def test_the_check_of_pod_security_finds_what_is_forbidden(options: Any, expected: str):
    (pod, *_) = operators.made_of(dict(build("job", options).body)).pods

    assert expected in kube_schemas.restricted_problems(pod["spec"])


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ms-operator"])
def test_pods_ask_for_no_proxy_of_a_service_mesh_unless_the_user_wants_one(engine: str):
    """A proxy would keep a pod from ending; MindSpore's operator drops labels of pods."""
    wish = {"labels": {"sidecar.istio.io/inject": "true"}}

    for pod in operators.made_of(dict(build(engine).body)).pods:
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
        assert pod["metadata"]["annotations"]["linkerd.io/inject"] == "disabled"
    for pod in operators.made_of(dict(build(engine, wish).body)).pods:
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "true"
