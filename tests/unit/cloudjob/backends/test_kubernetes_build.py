"""Tests of a job's manifests and of how a cluster's objects are read; no cluster is needed."""

from __future__ import annotations

import base64
import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends.kubernetes import kubeflow, pod, request, state
from cloudjob.backends.kubernetes.backend import KubernetesBackend
from cloudjob.backends.kubernetes.engine import Engine
from cloudjob.backends.kubernetes.kubeconfig import Cluster, find
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.backends.kubernetes.strategic_merge import merged
from cloudjob.backends.native import Ended, Stop
from cloudjob.errors import SpecError, UsageError
from cloudjob.model.job import JobSpec
from cloudjob.model.sections import Kubernetes
from cloudjob.model.status import JobState
from cloudjob.model.submission import StoredCode, Submission
from jobentry.contract import env, names, variables
from tests.support import kube_cluster, kube_definitions, kube_schemas, kubelet, operators

ROOT = Path(__file__).parents[4]
VOLCANO, MS_OPERATOR = ENGINES["volcano"], ENGINES["ms-operator"]
INDEXED, JOBSET = ENGINES["job"], ENGINES["jobset"]
GOLDEN = ROOT / "tests" / "golden"
CRDS = {
    "volcano": "batch.volcano.sh_jobs",
    "mpi-operator": "kubeflow.org_mpijobs",
    "ms-operator": "mindspore.gitee.com_msjobs",
}
EVERYTHING: dict[str, Any] = {
    "queue": "research",
    "cpus": 1.5,
    "memory_gib": 4.0,
    "gpus": 8,
    "gpu_resource": "huawei.com/Ascend910",
    "shm_gib": 2.0,
    "node_selector": {"zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "digits"}, "mountPath": "/data"}
    ],
    "service_account": "trainer",
    "image_pull_secrets": ("registry",),
    "image_pull_policy": "Always",
    "priority_class": "high",
    "user": "7:8",
    "home": "image",
    "launcher_creation": "WaitForWorkersReady",
    "keep_min": 60.0,
    "pending_min": 90.0,
    "labels": {"team": "vision"},
    "annotations": {"note": "nightly"},
    "pod": {"spec": {"hostIPC": True, "containers": [{"name": "cloudjob", "tty": True}]}},
    "job": {"metadata": {"labels": {"cost": "7"}}},
}
# Keys that change no object of a job.
NOT_SENT = {"engine", "context", "kubeconfig", "namespace", "presigned_h", "source_limit_mb"}


def submission(engine: str = "volcano", options: Any = None, **values: Any) -> Submission:
    """Return a job of three nodes."""
    spec = {
        "script": "train.py",
        "args": ("--lr", "0.1", "$(HOME) $$"),
        "image": "registry.example.com/base:1",
        "nodes": 3,
        "procs_per_node": 8,
        "backend": "kubernetes",
        "launcher": "dynamic-cluster" if engine == "ms-operator" else "mpirun",
        "env": {"SEED": "7", "PRICE": "5$ or $(A)"},
        "secrets": {"TOKEN": "s3cr3t"},
        "timeout_min": 30.0,
        "kubernetes": {"engine": engine, **(options or {})},
        **values,
    }
    plain = Submission(
        spec=JobSpec(**spec),
        job="train-2345678b",
        code=StoredCode(
            uri="s3://bucket/x/train-2345678b/code.json",
            digest="sha256:" + "0" * 64,
            layers=("s3://bucket/x/layers/" + "1" * 64,),
        ),
        record_uri="s3://bucket/x/train-2345678b/record/exit.json",
        outputs=(("OUT", "s3://bucket/x/train-2345678b/outputs/OUT"),),
    )
    return plain._replace(access={names.CLOUDJOB_S3_SECRET_KEY: "very secret"})


def build(engine: str = "volcano", options: Any = None, **values: Any):
    """Return the request of a job of three nodes."""
    return request.build(submission(engine, options, **values), ENGINES[engine], "lab")


def strict(schema: Any) -> Any:
    """Return a schema that rejects unknown fields, which an API server would prune."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    is_open = closed.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in closed
    # The API server prunes every field of an object without declared properties.
    is_object = isinstance(closed.get("properties"), dict) or closed.get("type") == "object"
    if is_object and not is_open:
        closed["additionalProperties"] = False
    if closed.pop("x-kubernetes-int-or-string", False):
        closed["type"] = ["integer", "string"]
    return closed


def check(manifest: dict[str, Any], engine: str) -> list[str]:
    """Return the errors that the schema of its CRD, or of Kubernetes, finds in a manifest."""
    if engine == "job":
        return kube_schemas.problems(manifest, kube_schemas.VERSIONS[-1])
    definition = kube_definitions.jobset() if engine == "jobset" else kube_cluster.crd(CRDS[engine])
    schema = copy.deepcopy(kube_cluster.schema(definition))
    # A CRD declares metadata only as an object.
    schema["properties"]["metadata"] = {"type": "object", "additionalProperties": {}}
    errors = jsonschema.Draft202012Validator(strict(schema)).iter_errors(manifest)
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in errors]


# -- manifests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_manifests_match_the_golden_files(engine: str):
    """All manifests of a job that uses every option, without the bytes of the entry."""
    documents = request.shown(build(engine, EVERYTHING))
    documents[0]["binaryData"] = dict.fromkeys(documents[0]["binaryData"], "...")
    path = GOLDEN / f"kubernetes-{engine}.yaml"
    text = yaml.safe_dump_all(documents, sort_keys=False)

    assert text == path.read_text(), f"when this is right, write it to {path.name}:\n{text}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_operator_knows_every_field(engine: str, options: dict[str, Any], nodes: int):
    """The API server would drop a field that the CRD does not have."""
    job_request = build(engine, options, nodes=nodes)

    assert check(dict(job_request.body), engine) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_check_of_schemas_finds_a_nested_typo(engine: str):
    """The typos are a misspelt field and a number instead of a string."""
    misspelt = {"spec": {"containers": [{"name": "cloudjob", "volumeMount": []}]}}
    mistyped = {"spec": {"hostname": 7}}

    errors = [
        "\n".join(check(dict(build(engine, {"pod": patch}).body), engine))
        for patch in (misspelt, mistyped)
    ]

    assert "volumeMount" in errors[0]
    assert "7 is not of type" in errors[1]
    assert "'string'" in errors[1]


@pytest.mark.parametrize("version", kube_schemas.VERSIONS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"user": ""}], ids=["plain", "everything", "image's user"]
)
def test_each_version_of_kubernetes_knows_every_field(
    version: str, engine: str, options: dict[str, Any]
):
    """Checks the core objects and pods of every engine, and the Job of ``job`` and ``jobset``.

    Kubernetes 1.29 has no ``successPolicy``, and drops it.
    """
    assert {*Kubernetes.KEYS} == {*EVERYTHING, *NOT_SENT}
    job_request = build(
        engine, options, retries=int(bool(options and not ENGINES[engine].no_retries))
    )
    *our_objects, body = request.objects(job_request, b"key" * job_request.has_key)
    items = [*our_objects, *operators.made_of(dict(job_request.body)).pods]
    if engine in ("job", "jobset"):
        spec = body["spec"]
        if engine == "jobset":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        optional = INDEXED.optional if version == "1.29" else ()
        spec = {key: value for key, value in spec.items() if key not in optional}
        items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec})

    assert [problem for item in items for problem in kube_schemas.problems(item, version)] == []


@pytest.mark.parametrize("engine", [INDEXED, JOBSET], ids=["job", "jobset"])
@pytest.mark.parametrize("job", ["a" * 30 + "-2345678b", "7" * 30 + "-2345678b"])
def test_the_host_names_of_the_longest_job_fit(job: str, engine: Engine):
    """A part of a host name has at most 63 characters; ``new_id`` shortens names to 30."""
    hosts = engine.hosts(pod.Names(job, "lab").name, 10_000)

    assert hosts[-1].partition(".")[0].endswith("-9999")
    assert max(len(part) for part in hosts[-1].split(".")) <= 63


def test_a_job_whose_host_names_are_too_long_is_refused():
    """The API server refuses an Indexed Job whose last pod has no valid host name."""
    long = submission("job", nodes=3)._replace(job="a" * 62)
    with pytest.raises(SpecError) as caught:
        request.build(long, INDEXED, "lab")

    (problem,) = caught.value.problems
    assert problem.startswith("name: node 2 would have a host name of 64 characters (allowed 63")


def test_the_queue_of_an_indexed_job_is_one_of_kueue():
    labels = build("job", {"queue": "research"}).body["metadata"]["labels"]

    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in build("job").body["metadata"]["labels"]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_service_of_an_indexed_job_names_all_of_its_pods(nodes: int):
    job_request = build("job", nodes=nodes)
    (service,) = job_request.services
    pods = operators.made_of(dict(job_request.body)).pods

    hosts = request.environments(job_request).__next__()["VC_WORKER_HOSTS"].split(",")
    assert [f"{item['spec']['hostname']}.{item['spec']['subdomain']}" for item in pods] == hosts
    assert {item["spec"]["subdomain"] for item in pods} == {service["metadata"]["name"]}
    selector = service["spec"]["selector"].items()
    assert all(selector <= item["metadata"]["labels"].items() for item in pods)
    assert [INDEXED.node_of("train-2345678b", item) for item in pods] == [*range(nodes)]
    assert INDEXED.node_of("train-2345678b", {"metadata": {"name": "train-2345678b-0-x"}}) is None


@pytest.mark.parametrize("failures", [0, 2])
def test_the_nodes_of_an_indexed_job_with_retries_know_their_attempt(failures: int):
    job_request = build("job", nodes=2, retries=2, env={"JOB_INDEX_FAILURES": "mine"})
    pods = operators.indexed_job(dict(job_request.body), failures={0: failures, 1: failures}).pods
    objects = kubelet.Objects(request.objects(job_request, b"a key"))

    for item in pods:
        started = kubelet.container(item, objects, ip="10.0.0.1")
        container_env = kubelet.shell_environment(started)
        assert container_env[names.CLOUDJOB_ATTEMPT] == str(failures + 1)
        assert env.read(container_env).ends_together
        assert container_env["JOB_INDEX_FAILURES"] == "mine"
    assert job_request.body["spec"]["backoffLimitPerIndex"] == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_entry_of_each_pod_can_read_its_variables(engine: str, nodes: int):
    job_request = build(engine, nodes=nodes)
    environments = list(request.environments(job_request))
    from_operator = operators.made_of(dict(job_request.body))
    objects = kubelet.Objects(
        [*request.objects(job_request, b"a key" * job_request.has_key), *from_operator.objects]
    )

    for index, item in enumerate(from_operator.pods):
        started = kubelet.container(item, objects, ip=f"10.0.0.{index}")
        container_env = kubelet.shell_environment(started)
        files = started.files
        node = env.read({**container_env, **variables.load(files["/run/cloudjob/env"].data)})
        expected = env.read(environments[index])

        assert node.node == index
        assert node.hosts == expected.hosts
        assert node.hosts[index].partition(".")[0] == started.host
        assert node._replace(ssh_key="") == expected._replace(ssh_key="")
        assert started.args == ("train.py", "--lr", "0.1", "$(HOME) $$")
        assert container_env["PRICE"] == "5$ or $(A)"
        assert container_env["MA_CURRENT_IP"] == f"10.0.0.{index}"
        assert container_env["MA_CURRENT_INSTANCE_NAME"] == item["metadata"]["name"]
        assert "/opt/cloudjob/jobentry.pyz" in files
        assert ("/run/cloudjob/ssh-key" in files) == (engine != "mpi-operator" and nodes > 1)
        # The operators' own variables would break Open MPI 5.0, or start one rank per node.
        assert not {"OMPI_MCA_plm_rsh_args", "MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM"} & {
            *container_env
        }


def test_volcano_uses_the_names_that_modelarts_uses():
    """Host names follow ModelArts' rule, and Volcano itself provides the list of hosts."""
    job_request = build("volcano")
    from_operator = operators.made_of(dict(job_request.body))
    objects = kubelet.Objects([*request.objects(job_request, b""), *from_operator.objects])
    container_env = kubelet.container(from_operator.pods[2], objects, ip="10.0.0.2").env
    rule = "{MA_VJ_NAME}-{MA_TASK_NAME}-{VC_TASK_INDEX}.{MA_VJ_NAME}".format(**container_env)

    assert container_env["VC_WORKER_HOSTS"].split(",")[2] == rule
    assert container_env["VC_WORKER_NUM"] == container_env["MA_NUM_HOSTS"] == "3"
    assert container_env["VK_TASK_INDEX"] == container_env["VC_TASK_INDEX"] == "2"


def test_each_node_of_the_mindspore_operator_has_its_own_service():
    """Its pods have no host names.

    The operator itself creates the service of the head, on MindSpore's port.
    """
    job_request = build("ms-operator", env={"MS_SCHED_PORT": "7001"})
    from_operator = operators.made_of(dict(job_request.body))
    services = [
        item
        for item in [*request.objects(job_request, b""), *from_operator.objects]
        if item["kind"] == "Service"
    ]
    pods = [item["metadata"] for item in from_operator.pods]
    reached = {
        service["metadata"]["name"]: [
            pod["name"]
            for pod in pods
            if service["spec"]["selector"].items() <= pod["labels"].items()
        ]
        for service in services
    }

    hosts = request.environments(job_request).__next__()["VC_WORKER_HOSTS"].split(",")
    assert reached == {host: [host] for host in hosts}
    assert [pod["name"] for pod in pods] == hosts
    ports = {service["metadata"]["name"]: service["spec"]["ports"] for service in services}
    assert ports[hosts[0]] == [{"name": "msjob-port", "port": 7001}]
    assert ports[hosts[1]] == [{"name": "ssh", "port": 38888, "protocol": "TCP"}]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_pods_of_the_mindspore_operator_are_nodes_in_their_order(nodes: int):
    """A job of one node has no scheduler, and its worker is the head."""
    job_request = build("ms-operator", nodes=nodes)
    pods = operators.made_of(dict(job_request.body)).pods

    assert [MS_OPERATOR.node_of("train-2345678b", pod) for pod in pods] == [*range(nodes)]
    assert MS_OPERATOR.node_of("train-2345678b", {"metadata": {"name": "train-2345678b-x"}}) is None


def test_secrets_are_only_in_the_kubernetes_secret():
    job_request = build("volcano")
    key = request.objects(job_request, b"the key of ssh")[1]

    assert "s3cr3t" not in json.dumps(dict(job_request.body)) + request.text(job_request)
    assert "very secret" not in json.dumps(dict(job_request.body)) + request.text(job_request)
    assert variables.load(base64.b64decode(key["data"]["env"]))["TOKEN"] == "s3cr3t"
    assert base64.b64decode(key["data"]["ssh-key"]) == b"the key of ssh"


def test_bytes_that_are_not_utf8_are_sent_in_the_secret():
    """A manifest is JSON, which cannot represent arbitrary bytes."""
    job_request = build("volcano", env={"RAW": "caf\udce9"}, secrets={})
    data = request.objects(job_request, b"")[1]["data"]

    assert variables.load(base64.b64decode(data["env"]))["RAW"] == "caf\udce9"
    assert b"RAW=caf\xe9\0" in base64.b64decode(data["env"])


def test_a_job_of_one_node_without_secrets_has_no_secret():
    """A Secret that nothing would read is not created."""
    plain = submission("volcano", nodes=1, secrets={})._replace(access={})
    job_request = request.build(plain, VOLCANO, "lab")

    assert job_request.secret is None
    assert [item["kind"] for item in request.objects(job_request, b"")] == ["ConfigMap", "Job"]
    assert names.CLOUDJOB_DELIVERY not in json.dumps(dict(job_request.body))


def test_the_text_of_a_dry_run_is_what_is_applied():
    """The documents are the same, except for secrets."""
    job_request = build("mpi-operator", EVERYTHING)
    documents = list(yaml.safe_load_all(request.text(job_request)))

    assert [item["kind"] for item in documents] == ["ConfigMap", "Secret", "MPIJob"]
    assert documents[0] == request.objects(job_request, b"")[0]
    assert documents[2] == dict(job_request.body)
    assert documents[1]["stringData"]["env"].count("***") == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_of_1000_nodes_is_quickly_made_and_small_enough(engine: str):
    started_s = time.process_time()
    job_request = build(engine, nodes=1000)
    text = request.text(job_request)
    spent_s = time.process_time() - started_s
    sizes = [len(json.dumps(item)) for item in request.objects(job_request, b"k" * 500)]

    assert spent_s < 5.0
    # By default, etcd accepts objects of up to 1.5 MiB.
    assert max(sizes) < 1_572_864
    assert "train-2345678b" in text


@pytest.mark.parametrize("job", ["7-segments-2345678b", "train-2345678b"])
def test_a_service_can_have_the_name_of_the_job(job: str):
    """A Service name must begin with a letter (RFC 1035); a job id need not."""
    assert pod.Names(job, "lab").name[0].isalpha()
    assert pod.Names(job, "lab").name.endswith(job)


@pytest.mark.parametrize("policy", ["AtStartup", "WaitForWorkersReady"])
def test_launcher_creation_is_passed_to_the_mpi_operator(policy: str):
    job_request = build("mpi-operator", {"launcher_creation": policy})

    assert job_request.body["spec"]["launcherCreationPolicy"] == policy


# -- retries and policies -------------------------------------------------------------------------


def test_volcano_aborts_a_job_that_has_lost_a_pod_and_leaves_a_failure_to_the_entry():
    """Otherwise the operator would create a new pod, which would wait for the nodes that exited."""
    spec = build("volcano").body["spec"]

    assert spec["policies"] == [{"event": "PodEvicted", "action": "AbortJob"}]
    assert spec["minAvailable"] == 3


def test_volcano_restarts_a_job_as_often_as_requested():
    """Volcano's ``maxRetry`` includes the first start."""
    spec = build("volcano", retries=2).body["spec"]

    assert spec["maxRetry"] == 3
    assert {item["event"]: item["action"] for item in spec["policies"]} == {
        "PodEvicted": "RestartJob",
        "PodFailed": "RestartJob",
    }


# -- merging --------------------------------------------------------------------------------------


def test_a_patch_reaches_one_container_and_one_variable():
    patch = {
        "spec": {
            "containers": [
                {
                    "name": "cloudjob",
                    "env": [{"name": "SEED", "value": "8"}, {"name": "NEW", "value": "1"}],
                    "resources": None,
                },
                {"name": "sidecar", "image": "other"},
            ],
            "volumes": [{"name": "cache", "$patch": "delete"}],
            "securityContext": {"$patch": "replace", "runAsUser": 7},
        }
    }
    template = build("volcano", {**EVERYTHING, "pod": patch}).body["spec"]["tasks"][0]["template"]
    containers = template["spec"]["containers"]
    container_env = {item["name"]: item.get("value") for item in containers[0]["env"]}

    assert [item["name"] for item in containers] == ["cloudjob", "sidecar"]
    assert container_env["SEED"] == "8"
    assert container_env["NEW"] == "1"
    assert container_env["MA_VJ_NAME"] == "train-2345678b"
    assert "resources" not in containers[0]
    assert "cache" not in [item["name"] for item in template["spec"]["volumes"]]
    assert template["spec"]["securityContext"] == {"runAsUser": 7}


_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "env", "containers", "name"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(_trees, _trees)
def test_merging_the_same_twice_changes_nothing_more(manifest: Any, patch: Any):
    before = copy.deepcopy(manifest)
    once = merged(manifest, patch)

    if isinstance(patch, dict) and not _has_nameless_items(patch):
        assert merged(once, patch) == once
    assert manifest == before


def _has_nameless_items(value: Any) -> bool:
    """Whether a list that is merged by name has unnamed items, which every merge adds again."""
    if isinstance(value, dict):
        return any(
            (key in ("env", "containers") and isinstance(item, list)) or _has_nameless_items(item)
            for key, item in value.items()
        )
    return isinstance(value, list) and any(map(_has_nameless_items, value))


# -- refused jobs ---------------------------------------------------------------------------------


def patched(key: str, patch: Any, message: str) -> tuple[str, Any, str]:
    """Return a test case of a job with a patch."""
    return "volcano", {"options": {key: patch}}, message


def mounted(*paths: str, name: str = "") -> dict[str, Any]:
    """Return options with a volume for each path."""
    volumes = [
        {"name": name or f"v{index}", "hostPath": {"path": "/x"}, "mountPath": path}
        for index, path in enumerate(paths)
    ]
    return {"volumes": volumes}


@pytest.mark.parametrize(
    ("engine", "values", "message"),
    [
        ("volcano", {"image": ""}, "image: is missing"),
        ("mpi-operator", {"retries": 1}, "retries: the MPI operator restarts only its launcher"),
        (
            "ms-operator",
            {"retries": 1},
            "retries: the MindSpore operator cannot restart a whole job (given 1; allowed 0; "
            "volcano, job, jobset can)",
        ),
        (
            "ms-operator",
            {"options": {"pod": {"metadata": {"labels": {"a": "b"}}}}},
            "kubernetes.pod.metadata: the MindSpore operator drops labels",
        ),
        (
            "ms-operator",
            {"launcher": "torchrun"},
            "launcher: kubernetes.engine ms-operator starts MindSpore's cluster and nothing else "
            "(given torchrun; allowed dynamic-cluster, msrun; or another engine)",
        ),
        ("volcano", {"args": ("a\udce9",)}, "args[0]: contains bytes that are not UTF-8"),
        ("volcano", {"inputs": {"D": "file:///data/x"}}, "inputs.D: pods cannot read the folder"),
        ("volcano", {"options": {"user": "me"}}, "kubernetes.user: is not UID:GID"),
        ("volcano", {"options": {"volumes": [{"name": "x"}]}}, "volumes[0]: has no mountPath"),
        (
            "volcano",
            {"options": {"presigned_h": 24.0}, "inputs": {"D": "s3://bucket/d"}},
            "kubernetes.presigned_h: a signed URL is for one object, but outputs.OUT, inputs.D may",
        ),
        ("volcano", {"nodes": 9000}, "nodes: the names of 9000 nodes have"),
        (
            "mpi-operator",
            {"env": {f"V{index}": "x" * 100_000 for index in range(6)} | {"BIG": "x" * 120_000}},
            "arguments and variables: too long for a Kubernetes MPIJob (given 14",
        ),
        (
            "volcano",
            {"args": ("--long", *("x" * 120_000,) * 11, "x" * 120_001)},
            "of which 120001 in args[12]; allowed 1300000)",
        ),
        patched(
            "job", {"metadata": {"name": "x"}}, "kubernetes.job.metadata.name: cloudjob identifies"
        ),
        patched("job", {"kind": "Pod"}, "kubernetes.job.kind: cloudjob identifies the job by it"),
        patched(
            "pod",
            {"metadata": {"labels": {"cloudjob.job": "x"}}},
            "kubernetes.pod.metadata.labels.cloudjob.job: is cloudjob's own",
        ),
        patched(
            "pod",
            {"spec": {"$setElementOrder/containers": [{"name": "a"}]}},
            "kubernetes.pod.spec.$setElementOrder/containers: is not a known directive",
        ),
        patched(
            "pod", {"spec": {"$patch": "remove"}}, "kubernetes.pod.spec.$patch: is not a known"
        ),
        patched(
            "pod",
            {"metadata": {"labels": {"a": "b c"}}},
            "kubernetes.pod.metadata.labels.a: is not a valid label value (given 'b c'",
        ),
        (
            "volcano",
            {"options": {"labels": {"a b": "c"}}},
            "kubernetes.labels: 'a b' is not a valid key",
        ),
        (
            "volcano",
            {"options": {"labels": {"a": "b c"}}},
            "kubernetes.labels.a: is not a valid label",
        ),
        (
            "volcano",
            {"options": {"labels": {"A/b": "c"}}},
            "kubernetes.labels: 'A/b' is not a valid key",
        ),
        (
            "volcano",
            {"options": {"node_selector": {"a": "-"}}},
            "kubernetes.node_selector.a: is no",
        ),
        (
            "volcano",
            {"options": {"annotations": {"a/": "c"}}},
            "kubernetes.annotations: 'a/' is not a valid key",
        ),
        ("volcano", {"options": mounted("/data", "/data/")}, "volumes[1]: something is mounted at"),
        ("volcano", {"options": mounted("/cache")}, "volumes[0]: something is mounted at /cache"),
        ("volcano", {"options": mounted("/x", name="home")}, "volumes[0]: the name home is taken"),
    ],
)
def test_an_impossible_job_is_refused_before_anything_is_sent(
    engine: str, values: Any, message: str
):
    """Each error names the key at fault."""
    options = values.pop("options", None)
    with pytest.raises(SpecError) as caught:
        build(engine, options, **values)

    assert any(message in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("name", ["Lab", "a_b", "x" * 64, "", "a.b"])
def test_an_invalid_namespace_is_refused(name: str):
    with pytest.raises(SpecError, match=r"kubernetes\.namespace: is not the name of a namespace"):
        request.build(submission(), ENGINES["volcano"], name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_patch_cannot_remove_the_labels_that_identify_the_job(engine: str):
    patch = {"metadata": {"$patch": "replace", "labels": {"a": "b"}}}
    options = {"job": patch, "pod": {} if engine == "ms-operator" else patch}
    body = build(engine, options).body

    labels = {"cloudjob.job": "train-2345678b", "app.kubernetes.io/managed-by": "cloudjob"}
    assert body["metadata"] == {
        "name": "train-2345678b",
        "namespace": "lab",
        "labels": {"a": "b", **labels},
    }
    for item in operators.made_of(dict(body)).pods:
        if engine != "ms-operator":
            assert labels.items() <= item["metadata"]["labels"].items()


def test_only_retained_keys_stay():
    patch = {"volumes": [{"name": "a", "$retainKeys": ["name", "nfs"], "nfs": {"x": 1}}]}
    manifest = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]}

    assert merged(manifest, patch) == {
        "volumes": [{"name": "a", "nfs": {"x": 1}}, {"name": "b", "emptyDir": {}}]
    }
    assert merged({}, {"a": {"$retainKeys": ["b"], "b": 1}}) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("user", "pod_context", "container_context"),
    [
        ("", {}, {"allowPrivilegeEscalation": False}),
        ("0", {"runAsUser": 0, "runAsNonRoot": False}, None),
        (
            "7:8",
            {
                "runAsUser": 7,
                "runAsGroup": 8,
                "fsGroup": 8,
                "fsGroupChangePolicy": "OnRootMismatch",
                "runAsNonRoot": True,
            },
            {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        ),
    ],
)
def test_pods_run_with_minimal_permissions_for_their_user(
    user: str, pod_context: Any, container_context: Any
):
    (item, *_) = operators.made_of(dict(build("volcano", {"user": user}).body)).pods

    context = item["spec"]["securityContext"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_context.items() <= context.items()
    assert item["spec"]["containers"][0].get("securityContext") == container_context


def test_a_local_folder_is_accepted_if_a_volume_mounts_it():
    """A network file system may have the same path locally and in the pods."""
    volume = {"name": "nfs", "nfs": {"server": "s", "path": "/x"}, "mountPath": "/data"}

    assert build("volcano", {"volumes": [volume]}, inputs={"D": "file:///data/digits"})


# -- kubeconfig -----------------------------------------------------------------------------------


def test_the_namespace_is_that_of_the_context(tmp_path: Path):
    """The job file takes precedence over the context, and the context over Kubernetes' default."""
    contexts = [
        {"name": "one", "context": {"cluster": "c", "namespace": "lab"}},
        {"name": "two", "context": {"cluster": "c"}},
    ]
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({"contexts": contexts, "current-context": "one"}))
    environ = {"KUBECONFIG": f"{tmp_path / 'none'}:{path}"}

    assert find({}, environ, tmp_path).namespace == "lab"
    assert find({"context": "two"}, environ, tmp_path).namespace == "default"
    assert find({"namespace": "mine"}, environ, tmp_path).namespace == "mine"
    with pytest.raises(UsageError, match="there is none, did you mean 'one'"):
        find({"context": "ones"}, environ, tmp_path)


def test_a_dry_run_with_a_named_engine_needs_no_cluster(tmp_path: Path):
    """There is no kubeconfig, and no request is sent."""
    backend = KubernetesBackend(tmp_path, {"engine": "volcano"}, environ={}, user_home=tmp_path)

    assert backend.build(submission()).job_names.namespace == "default"


# -- status of jobs and pods ----------------------------------------------------------------------


def volcano_job(phase: str, **status: Any) -> dict[str, Any]:
    """Return a Volcano job in this phase."""
    state = {"phase": phase, "lastTransitionTime": "2026-11-21T10:00:09Z"}
    return {"metadata": {"name": "j", "uid": "u"}, "status": {"state": state, **status}}


def mpi_job(*true_types: str, reason: str = "", message: str = "") -> dict[str, Any]:
    """Return an MPIJob with these conditions."""
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": message}
        for kind in true_types
    ]
    return {"metadata": {"name": "j", "uid": "u"}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("phase", "is_cancelled", "expected"),
    [
        ("", False, JobState.PENDING),
        ("Pending", False, JobState.PENDING),
        ("Running", False, JobState.RUNNING),
        ("Restarting", False, JobState.RUNNING),
        ("Aborting", True, JobState.RUNNING),
        ("Completed", False, JobState.SUCCEEDED),
        ("Failed", False, JobState.FAILED),
        ("Aborted", True, JobState.CANCELLED),
        ("Aborted", False, JobState.FAILED),
        ("Terminated", False, JobState.FAILED),
        ("Hibernating", False, JobState.UNKNOWN),
    ],
)
def test_the_phases_of_volcano_map_to_states(phase: str, is_cancelled: bool, expected: JobState):
    """Covers each phase of Volcano's API, and an unknown one."""
    assert VOLCANO.stage(volcano_job(phase), is_cancelled).state is expected


@pytest.mark.parametrize(
    ("conditions", "is_cancelled", "expected"),
    [
        ((), False, JobState.PENDING),
        (("Created",), False, JobState.PENDING),
        (("Created", "Running"), False, JobState.RUNNING),
        (("Created", "Succeeded"), False, JobState.SUCCEEDED),
        (("Created", "Failed"), False, JobState.FAILED),
        (("Created", "Suspended"), True, JobState.CANCELLED),
        (("Created", "Suspended"), False, JobState.PENDING),
        (("Levitating",), False, JobState.UNKNOWN),
    ],
)
def test_the_conditions_of_the_mpi_operator_map_to_states(
    conditions: tuple[str, ...], is_cancelled: bool, expected: JobState
):
    """The most significant of the conditions that are true counts."""
    assert kubeflow.stage_of_conditions(mpi_job(*conditions), is_cancelled).state is expected


def indexed_job(*true_types: str, **status: Any) -> dict[str, Any]:
    """Return an Indexed Job with these conditions."""
    at = "2026-11-21T10:00:09Z"
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": at} for kind in true_types]
    return {
        "metadata": {"name": "j", "uid": "u"},
        "status": {"conditions": conditions, **status},
    }


@pytest.mark.parametrize(
    ("job", "is_cancelled", "native", "expected"),
    [
        ({"metadata": {}}, False, "new", JobState.PENDING),
        (indexed_job(active=2), False, "Pending", JobState.PENDING),
        (indexed_job(active=2, ready=1), False, "Running", JobState.RUNNING),
        (indexed_job(active=1, failed=1), False, "Running", JobState.RUNNING),
        (indexed_job("SuccessCriteriaMet"), False, "SuccessCriteriaMet", JobState.RUNNING),
        (indexed_job("FailureTarget"), False, "FailureTarget", JobState.RUNNING),
        (indexed_job("SuccessCriteriaMet", "Complete"), False, "Complete", JobState.SUCCEEDED),
        (indexed_job("FailureTarget", "Failed"), False, "Failed", JobState.FAILED),
        (indexed_job("Failed"), True, "Failed", JobState.CANCELLED),
        # The head alone decides, also before Kubernetes 1.31, which has no success policy.
        (
            indexed_job(active=1, completedIndexes="0"),
            False,
            "Running, but its head has succeeded",
            JobState.SUCCEEDED,
        ),
        (
            indexed_job("Failed", completedIndexes="0,2-5", failedIndexes="1"),
            False,
            "Failed",
            JobState.SUCCEEDED,
        ),
        (
            indexed_job(active=1, failedIndexes="0-3"),
            False,
            "Running, but its head has failed",
            JobState.FAILED,
        ),
        (
            indexed_job(active=1, failedIndexes="0"),
            True,
            "Running, but its head has failed",
            JobState.CANCELLED,
        ),
        (indexed_job(active=1, failedIndexes="1,10"), False, "Pending", JobState.PENDING),
        (indexed_job("Suspended"), False, "Suspended", JobState.PENDING),
        (indexed_job("Suspended"), True, "Suspended", JobState.CANCELLED),
        (indexed_job("Suspended", terminating=1), True, "Suspended", JobState.RUNNING),
        (indexed_job("Levitating", active=1, ready=1), False, "Running", JobState.RUNNING),
    ],
)
def test_the_status_of_an_indexed_job_maps_to_states(
    job: dict[str, Any], is_cancelled: bool, native: str, expected: JobState
):
    stage = INDEXED.stage(job, is_cancelled)

    assert (stage.native, stage.state) == (native, expected)


def job_set(*true_types: str, **status: Any) -> dict[str, Any]:
    """Return a JobSet with these conditions."""
    return indexed_job(*true_types, **status)


@pytest.mark.parametrize(
    ("job", "is_cancelled", "native", "expected"),
    [
        ({"metadata": {}}, False, "new", JobState.PENDING),
        (job_set(restarts=1), False, "Pending", JobState.PENDING),
        (job_set("Completed"), False, "Completed", JobState.SUCCEEDED),
        (job_set("Complete"), False, "Complete", JobState.SUCCEEDED),
        (job_set("Failed"), False, "Failed", JobState.FAILED),
        (job_set("Failed"), True, "Failed", JobState.CANCELLED),
        (job_set("Suspended"), False, "Suspended", JobState.PENDING),
        (job_set("Suspended"), True, "Suspended", JobState.CANCELLED),
        (
            job_set("Suspended", replicatedJobsStatus=[{"name": "node", "active": 1}]),
            True,
            "Suspended",
            JobState.RUNNING,
        ),
        (job_set("StartupPolicyInProgress"), False, "Pending", JobState.PENDING),
    ],
)
def test_the_status_of_a_jobset_maps_to_states(
    job: dict[str, Any], is_cancelled: bool, native: str, expected: JobState
):
    stage = JOBSET.stage(job, is_cancelled)

    assert (stage.native, stage.state) == (native, expected)


def test_the_pods_of_a_jobset_tell_its_state_and_its_last_attempt():
    running = indexed_pod(0, {"phase": "Running", "containerStatuses": [RUNS]})
    end = {"exitCode": 3, "startedAt": "2026-11-21T10:00:01Z"}
    status = {"phase": "Failed", "containerStatuses": [{**RUNS, "state": {"terminated": end}}]}
    ended = replace(indexed_pod(0, status), created_at="2026-11-21T10:00:00Z")

    now = state.status_of(JOBSET, job_set(restarts=1), [running], is_cancelled=False)
    last = state.status_of(JOBSET, job_set("Failed", restarts=1), [ended], is_cancelled=False)
    first = state.status_of(JOBSET, job_set("Failed"), [ended], is_cancelled=False)

    assert now.state is JobState.RUNNING
    assert isinstance(last, Ended)
    assert isinstance(first, Ended)
    assert (last.exit_code, last.attempt_at, first.attempt_at) == (3, ended.created_at, "")


def test_a_jobset_restarts_whole_and_for_free_after_a_disruption():
    policy = build("jobset", retries=2).body["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (2, "BlockingRecreate")
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    single = build("jobset").body["spec"]
    assert single["failurePolicy"] == {"maxRestarts": 0, "restartStrategy": "BlockingRecreate"}
    assert "podFailurePolicy" not in single["replicatedJobs"][0]["template"]["spec"]


def test_a_resumed_job_has_the_start_of_its_last_attempt():
    """A queue has suspended it and admitted it again, so an earlier record does not count."""
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T11:00:00Z"}
    job = {"metadata": {}, "status": {"active": 1, "ready": 1, "conditions": [resumed]}}

    assert INDEXED.stage(job, False).attempt_at == "2026-11-21T11:00:00Z"
    assert INDEXED.stage(indexed_job(ready=1), False).attempt_at == ""


@pytest.mark.parametrize(
    ("conditions", "is_cancelled", "started_at", "expected"),
    [
        (("Created",), False, "", JobState.PENDING),
        (("Created", "Running"), True, "2026-11-21T10:00:00Z", JobState.RUNNING),
        (("Created", "Failed"), True, "2026-11-21T10:00:00Z", JobState.CANCELLED),
        (("Created",), True, "", JobState.CANCELLED),
    ],
)
def test_a_pending_job_of_the_mindspore_operator_is_cancelled_at_once(
    conditions: tuple[str, ...], is_cancelled: bool, started_at: str, expected: JobState
):
    """The operator checks the time limit only once the job has started."""
    job = mpi_job(*conditions)
    job["status"]["startTime"] = started_at

    assert MS_OPERATOR.stage(job, is_cancelled).state is expected


@pytest.mark.parametrize(
    ("message", "head", "expected"),
    [
        ("Succeeded", {"state": {"running": {"startedAt": "x"}}}, JobState.RUNNING),
        ("Failed", {"state": {"running": {"startedAt": "x"}}}, JobState.RUNNING),
        ("Succeeded", {"state": {"terminated": {"exitCode": 0}}}, JobState.SUCCEEDED),
        ("Succeeded", {"state": {"terminated": {"exitCode": 125}}}, JobState.FAILED),
        ("Failed", {"state": {"terminated": {"exitCode": 3}}}, JobState.FAILED),
        ("Failed", {"state": {"waiting": {"reason": "ErrImagePull"}}}, JobState.FAILED),
        ("Failed", None, JobState.FAILED),
    ],
)
def test_a_job_of_the_mindspore_operator_ends_with_its_head(
    message: str, head: Any, expected: JobState
):
    """The operator watches only the workers; the head still saves outputs and writes its record."""
    pods = []
    if head is not None:
        codes = head["state"].get("terminated", {}).values()
        phase = "Failed" if any(codes) else "Succeeded" if codes else "Running"
        item = {
            "metadata": {"name": "j-scheduler-0", "uid": "u"},
            "spec": HEAD,
            "status": {"phase": phase, "containerStatuses": [{"name": "cloudjob", **head}]},
        }
        pods = [state.pod_of(item, lambda item: MS_OPERATOR.node_of("j", item))]
    status = state.status_of(MS_OPERATOR, mpi_job(message), pods, is_cancelled=False)

    assert status.state is expected


def test_a_head_that_was_deleted_is_not_waited_for():
    """If its host is gone, the pod never terminates."""
    item = {
        "metadata": {
            "name": "j-scheduler-0",
            "uid": "u",
            "deletionTimestamp": "2026-11-21T10:00:00Z",
        },
        "spec": HEAD,
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "cloudjob", "state": {"running": {"x": 1}}}],
        },
    }
    pods = [state.pod_of(item, lambda item: MS_OPERATOR.node_of("j", item))]
    status = state.status_of(MS_OPERATOR, mpi_job("Failed"), pods, is_cancelled=False)

    assert status.state is JobState.FAILED


HEAD = {"containers": [{"env": [{"name": "VC_TASK_INDEX", "value": "0"}]}]}


def pod_in(node: int, phase: str, **status: Any) -> state.Pod:
    """Return a Volcano pod as read from the API."""
    limits = {"name": "cloudjob", "resources": {"limits": {"memory": "4Gi"}}}
    item = {
        "metadata": {"name": f"j-worker-{node}", "uid": f"u{node}", "creationTimestamp": ""},
        "spec": {"containers": [limits]},
        "status": {"phase": phase, **status},
    }
    return state.pod_of(item, lambda item: VOLCANO.node_of("j", item))


def ended(node: int, code: int, reason: str = "Error", at: str = "2026-11-21T10:00:05Z"):
    """Return a pod whose container has ended."""
    terminated = {"exitCode": code, "reason": reason, "finishedAt": at, "startedAt": at}
    phase = "Failed" if code else "Succeeded"
    return pod_in(
        node, phase, containerStatuses=[{"name": "cloudjob", "state": {"terminated": terminated}}]
    )


def volcano_status(job: dict[str, Any], *pods: state.Pod, is_cancelled: bool = False):
    """Return the status of a Volcano job."""
    return state.status_of(VOLCANO, job, list(pods), is_cancelled=is_cancelled)


def test_a_node_that_ran_out_of_memory_is_named():
    """The entry only knows that a rank was killed."""
    status = volcano_status(volcano_job("Failed"), ended(0, 1), ended(1, 137, "OOMKilled"))

    assert status.state is JobState.FAILED
    assert str(status.reason) == (
        "out of memory: node 1 (j-worker-1), limited to 4Gi; raise kubernetes.memory_gib, to which "
        "/dev/shm counts"
    )
    assert status.failure.node == 1


def test_an_evicted_pod_is_blamed_rather_than_pods_ended_because_of_it():
    evicted = pod_in(2, "Failed", reason="Evicted", message="The node was low on resource: memory.")
    status = volcano_status(volcano_job("Aborted"), ended(0, 143), evicted)

    assert status.failure.message == (
        "node 2 (j-worker-2): Evicted: The node was low on resource: memory; its machine ran short "
        "of memory or disk; request what the job uses (kubernetes.memory_gib)"
    )
    assert status.failure.node == 2
    assert status.stop is Stop.PLATFORM


def test_an_own_reason_is_more_specific_than_a_disruption():
    """The kubelet writes both for a pod that it evicts; running out of memory is no disruption."""
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    evicted = pod_in(1, "Failed", reason="Evicted", conditions=conditions)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    containers = [{"name": "cloudjob", "state": killed}]
    full = pod_in(1, "Failed", containerStatuses=containers, conditions=conditions)

    assert (evicted.reason, full.reason) == ("Evicted", "OOMKilled")


def test_a_pod_that_ended_well_before_its_machine_was_drained_has_no_reason():
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]

    assert pod_in(1, "Succeeded", conditions=conditions).reason == ""


def indexed_pod(node: int, status: dict[str, Any], *, is_leaving: bool = False) -> state.Pod:
    """Return a pod of an Indexed Job as read from the API."""
    annotations = {"batch.kubernetes.io/job-completion-index": str(node)}
    deletion = {"deletionTimestamp": "2026-11-21T10:00:00Z"} if is_leaving else {}
    metadata = {"name": f"j-{node}-abcde", "uid": f"u{node}", "annotations": annotations}
    item = {
        "metadata": {**metadata, **deletion},
        "spec": {"nodeName": f"machine-{node}"},
        "status": status,
    }
    return state.pod_of(item, lambda item: INDEXED.node_of("j", item))


RUNS = {"name": "cloudjob", "state": {"running": {"startedAt": "2026-11-21T10:00:01Z"}}}
CUT_OFF = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]


@pytest.mark.parametrize(
    ("node", "is_leaving", "is_cancelled", "expected"),
    [
        (0, True, False, JobState.FAILED),
        # The machine may come back.
        (0, False, False, JobState.RUNNING),
        # The head notices it, and ends the job.
        (1, True, False, JobState.RUNNING),
        # `cancel --now` does not wait for the pod.
        (0, True, True, JobState.RUNNING),
    ],
)
def test_a_lost_head_ends_an_indexed_job(
    node: int, is_leaving: bool, is_cancelled: bool, expected: JobState
):
    """The controller waits for ever for a pod whose machine cannot end it."""
    lost = {"phase": "Running", "containerStatuses": [RUNS], "conditions": CUT_OFF}
    pods = [
        indexed_pod(node, lost, is_leaving=is_leaving),
        indexed_pod(1 - node, {"phase": "Running", "containerStatuses": [RUNS]}),
    ]
    pods.sort(key=lambda pod: pod.node or 0)
    status = state.status_of(
        INDEXED, indexed_job(active=2, ready=1), pods, is_cancelled=is_cancelled
    )

    assert status.state is expected
    assert "its machine machine-" in status.native or expected is JobState.FAILED
    if expected is JobState.FAILED:
        assert status.native == "Running, but its head is lost"
        assert status.failure.node == 0
        assert status.failure.message == (
            "node 0 (j-0-abcde): NodeLost; its machine no longer reports to the cluster; submit "
            "the job again"
        )


def test_an_indexed_job_runs_as_soon_as_a_pod_does():
    """The controller counts only ready pods, and a pod on a lost machine is not ready."""
    lost = {"phase": "Running", "containerStatuses": [RUNS], "conditions": CUT_OFF}
    status = state.status_of(
        INDEXED, indexed_job(active=1, ready=0), [indexed_pod(0, lost)], is_cancelled=False
    )

    assert status.state is JobState.RUNNING
    assert status.native.startswith("Running (node 0: its machine machine-0 no longer reports")


def test_a_cancelled_job_blames_no_node():
    """Its nodes were told to terminate."""
    status = volcano_status(volcano_job("Aborted"), ended(0, 143), is_cancelled=True)

    assert status.state is JobState.CANCELLED
    assert status.failure.message == ""
    assert status.failure.node is None


def test_start_and_end_times_are_those_of_the_containers():
    """Times are in RFC 3339 format, with milliseconds."""
    status = volcano_status(volcano_job("Completed"), ended(0, 0, "Completed"))

    assert status.started_at == status.ended_at == "2026-11-21T10:00:05.000Z"
    assert status.exit_code == 0


def test_a_cluster_is_hashable():
    """It is a key of the cache of clients."""
    assert {Cluster("a", "b", "c"): 1}[Cluster("a", "b", "c")] == 1
