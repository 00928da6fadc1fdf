"""Tests of the ModelArts backend with the emulator's API, and of the checks before a submit."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.base import Check, Devices
from cloudjob.backends.modelarts import bucket, state
from cloudjob.backends.modelarts.backend import ModelArtsBackend
from cloudjob.backends.modelarts.site import Site
from cloudjob.errors import BackendError, JobNotFound, Unanswered
from cloudjob.model.job import JobSpec
from cloudjob.model.status import Failure, JobState
from cloudjob.model.submission import StoredCode, Submission
from tests.support.modelarts import KEYS, PROJECT, SETTINGS, ModelArts, Reply, once


def environ_of(service: ModelArts) -> dict[str, str]:
    """Return the environment variables of a user of the service."""
    return {
        "HUAWEICLOUD_SDK_AK": KEYS.access_key,
        "HUAWEICLOUD_SDK_SK": KEYS.secret_key,
        "HUAWEICLOUD_SDK_PROJECT_ID": PROJECT,
        "CLOUDJOB_MODELARTS_ENDPOINT": service.endpoint,
        "CLOUDJOB_SWR_ENDPOINT": service.endpoint,
        "HW_REGION_NAME": "cn-north-4",
    }


@pytest.fixture
def backend(service: ModelArts, tmp_path: Path) -> ModelArtsBackend:
    """A backend whose pauses return at once."""
    service.obs.objects["jobs/train-2345678b/node/boot.sh"] = b""
    return ModelArtsBackend(
        tmp_path,
        {"bucket": "bucket/jobs"},
        environ=environ_of(service),
        user_home=tmp_path,
        pause=lambda _: None,
    )


def submission(**values: Any) -> Submission:
    """Return a job of two nodes."""
    spec = {"script": "t.py", "nodes": 2, "image": "a/b", "flavor": "cpu", "backend": "modelarts"}
    return Submission(
        spec=JobSpec(**{**spec, **values}),
        job="train-2345678b",
        code=StoredCode("obs://bucket/jobs/train-2345678b/code.json", "sha256:0"),
        record_uri="obs://bucket/jobs/train-2345678b/record/exit.json",
        outputs=(),
    )


def sent(backend: ModelArtsBackend, **values: Any) -> str:
    """Send a job and return its handle."""
    return backend.send(backend.build(submission(**values)))


def test_the_platform_copies_code_outputs_and_record(backend: ModelArtsBackend):
    """Outputs therefore have no manifests, and secrets beside the code are deleted at the end."""
    assert backend.copies_files


def test_a_handle_finds_the_job_again_from_another_process(
    service: ModelArts, backend: ModelArtsBackend, tmp_path: Path
):
    """The handle contains the endpoint; only the credentials come from the environment."""
    handle = sent(backend)
    (job,) = service.jobs()
    environ = {**environ_of(service), "CLOUDJOB_MODELARTS_ENDPOINT": "http://127.0.0.1:1"}
    other = ModelArtsBackend(tmp_path, {}, environ=environ, user_home=tmp_path)

    host = service.endpoint.partition("://")[2]
    assert handle == f"modelarts+http://{host}/{PROJECT}/{job.id}/train-2345678b"
    assert other.status(handle).state is JobState.RUNNING


@pytest.mark.parametrize(("deleted_count", "searches"), [(2, 1), (20, 2)])
def test_many_jobs_that_run_are_one_search(
    deleted_count: int, searches: int, service: ModelArts, backend: ModelArtsBackend
):
    """If many handles are left, a second search finds out which jobs are gone."""
    handle = sent(backend)
    prefix = handle.rpartition("/")[0].rpartition("/")[0]
    running = [f"{prefix}/{service.add(f'train-{n}')}/train-{n}" for n in range(20)]
    ended = f"{prefix}/{service.add('ended', 'Completed')}/ended"
    deleted = [f"{prefix}/deleted-{n}/deleted-{n}" for n in range(deleted_count)]
    not_known = backend.handle(backend.build(submission()))
    service.seen.clear()

    status_of = backend.statuses([*running, ended, *deleted, not_known])

    states = {handle: status and status.state for handle, status in status_of.items()}
    expected = dict.fromkeys([*running, not_known], JobState.RUNNING)
    assert states == expected | dict.fromkeys(deleted if searches > 1 else ())
    assert len(service.seen) == len(service.requests_with("training-job-searches")) == searches


def test_a_job_is_found_by_the_handle_that_was_kept_before_it_was_created(
    service: ModelArts, backend: ModelArtsBackend, tmp_path: Path
):
    """The submit may be killed before it receives the job's id."""
    handle = backend.handle(backend.build(submission()))
    with pytest.raises(JobNotFound):
        backend.status(handle)
    backend.remove(handle)

    sent(backend)
    other = ModelArtsBackend(tmp_path, {}, environ=environ_of(service), user_home=tmp_path)

    assert other.status(handle).state is JobState.RUNNING
    other.cancel(handle)
    other.remove(handle)
    assert service.jobs() == []


def test_a_job_whose_tags_are_refused_may_be_there(service: ModelArts, backend: ModelArtsBackend):
    """The pipeline then removes the job, or keeps its record."""
    service.faults.append(once("/tags", Reply(403, {"error_msg": "no", "error_code": "M.1"})))

    with pytest.raises(Unanswered):
        sent(backend, modelarts={"tags": {"team": "vision"}})


@pytest.mark.parametrize("handle", ["docker://local/x", "modelarts://a/b", "", "modelarts://"])
def test_a_handle_of_another_backend_is_not_found(backend: ModelArtsBackend, handle: str):
    with pytest.raises(JobNotFound):
        backend.status(handle)


def test_tags_are_put_on_the_job(service: ModelArts, backend: ModelArtsBackend):
    """The create request does not accept tags, so a second request adds them."""
    sent(backend, modelarts={"tags": {"team": "vision"}})

    (job,) = service.jobs()
    assert service.database.tags(job.id) == [("team", "vision")]


@pytest.mark.parametrize(
    ("phase", "second", "expected"),
    [
        ("Creating", "Creating", JobState.PENDING),
        ("Pending", "Queuing", JobState.PENDING),
        ("Running", "Running", JobState.RUNNING),
        ("Terminating", "Terminating", JobState.RUNNING),
        ("Completed", "Completed", JobState.SUCCEEDED),
        ("Failed", "Failed", JobState.FAILED),
        ("Terminated", "Terminated", JobState.CANCELLED),
        ("Abnormal", "CreateFailed", JobState.FAILED),
        ("Abnormal", "Lost", JobState.UNKNOWN),
        ("Abnormal", "Unknown", JobState.UNKNOWN),
        ("Hibernating", "", JobState.UNKNOWN),
        ("", "", JobState.UNKNOWN),
    ],
)
def test_each_phase_maps_to_a_state(phase: str, second: str, expected: JobState):
    status = state.status_of({"status": {"phase": phase, "secondary_phase": second}})

    assert status.state is expected
    assert status.native.startswith(phase)


def test_a_failure_is_attributed_to_the_task_that_failed_first():
    """A task that was terminated because another one failed is not to blame."""
    job = {
        "status": {
            "phase": "Failed",
            "start_time": 1_700_000_000_000,
            "duration": 61_500,
            "task_statuses": [
                {"task": "worker-0", "exit_code": 143, "message": ""},
                {"task": "worker-1", "exit_code": 137, "message": "OOMKilled"},
            ],
            "running_records": [
                {"start_at": 1_700_000_000, "end_at": 1_700_000_030},
                {"start_at": 1_700_000_040, "end_at": 1_700_000_061},
            ],
        }
    }
    status = state.status_of(job)

    assert status.failure == Failure(1, exit_code=137, message="OOMKilled")
    assert "out of memory" in status.reason
    assert status.started_at == "2023-11-14T22:13:20.000Z"
    assert status.ended_at == "2023-11-14T22:14:21.500Z"
    assert status.attempt_at == "2023-11-14T22:14:00.000Z"


def test_a_job_without_any_details_has_a_status():
    """The service omits the details that it does not have."""
    assert state.status_of({}).state is JobState.UNKNOWN
    assert (
        state.status_of({"status": {"phase": "Failed"}}).failure.message
        == "ModelArts reports Failed"
    )
    assert state.tasks({"status": {"tasks": ["worker-10", "worker-9"]}}) == [
        "worker-9",
        "worker-10",
    ]


def test_cancel_ends_a_job_and_leaves_one_that_has_ended(
    service: ModelArts, backend: ModelArtsBackend
):
    """The service refuses to terminate such a job, which the backend does not treat as an error."""
    handle = sent(backend)
    backend.cancel(handle)
    backend.cancel(handle)

    assert backend.status(handle).state is JobState.CANCELLED
    assert len(service.requests_with("/actions")) == 2


def test_cancelling_a_deleted_job_reports_that_it_is_not_found(
    service: ModelArts, backend: ModelArtsBackend
):
    handle = sent(backend)
    service.database.remove_job(service.jobs()[0].id)
    with pytest.raises(JobNotFound):
        backend.cancel(handle)


def test_a_refused_cancel_is_reported(service: ModelArts, backend: ModelArtsBackend):
    """The job continues."""
    handle = sent(backend)
    service.faults.append(once("/actions", Reply(400, {"error_msg": "no", "error_code": "M.1"})))
    with pytest.raises(BackendError):
        backend.cancel(handle)


def test_remove_leaves_nothing_whatever_the_state(service: ModelArts, backend: ModelArtsBackend):
    """The job is removed while it runs; removing it again sends no request."""
    running = sent(backend)
    backend.remove(running)
    backend.remove(running)

    assert service.jobs() == []
    assert len(service.requests_with("DELETE")) == 1


def test_events_and_metrics_are_those_of_the_service(service: ModelArts, backend: ModelArtsBackend):
    """A minute without a measurement has the value None."""
    handle = sent(backend)
    (job,) = service.jobs()
    service.database.add_event(job.id, "no room", "Warning", "Scheduler")
    for node, percent in ((0, 12.5), (0, -1), (0, 50), (1, 1)):
        service.database.add_metric(job.id, f"worker-{node}", percent, -1)

    events = backend.events(handle)
    assert [event[1:] for event in events] == [
        ("Info", "Job", "Training job created."),
        ("Warning", "Scheduler", "no room"),
    ]
    assert all(event.at for event in events)
    metrics = [tuple(metric) for metric in backend.metrics(handle)]
    assert [metric for metric in metrics if metric[1] == "cpuUsage"] == [
        (0, "cpuUsage", (12.5, None, 50.0)),
        (1, "cpuUsage", (1.0,)),
    ]


def test_the_store_is_the_bucket_that_the_section_names(backend: ModelArtsBackend):
    uri, environ = backend.store()

    assert uri == "obs://bucket/jobs?region=cn-north-4"
    assert environ["HUAWEICLOUD_SDK_AK"] == KEYS.access_key


# -- checks ---------------------------------------------------------------------------------------


def run_checks(
    service: ModelArts, backend: ModelArtsBackend, store: str = "", **values: Any
) -> dict[str, Check]:
    """Return the results of the checks before a submit, by name."""
    service.images.setdefault("a/b", ["latest"])
    spec = submission(**values).spec
    uri = store or f"obs://bucket/jobs?endpoint={service.endpoint}&region=cn-north-4"
    return {check.name: check for check in backend.checks(spec, uri)}


def test_every_check_passes_for_a_valid_job(service: ModelArts, backend: ModelArtsBackend):
    check_of = run_checks(service, backend)

    assert all(check.is_ok for check in check_of.values())
    assert set(check_of) == {
        "credentials",
        "endpoint",
        "clock",
        "flavor",
        "image",
        "quota",
        "bucket",
        "encryption",
    }


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("flavor", {"flavor": "cpus"}, "there is no flavor cpus, did you mean 'cpu'?"),
        ("flavor", {"nodes": 5}, "cpu: at most 4 nodes, but the job has 5"),
        (
            "accelerators",
            {"flavor": "gpu", "procs_per_node": 2},
            "a node has 8, but the job runs 2",
        ),
        (
            "engine",
            {"image": "", "modelarts": {"engine": "torch-2"}},
            "no engine torch-2",
        ),
        *(
            (
                "engine",
                {"image": "", "modelarts": {"engine": engine.id}},
                f"{engine.id} ({engine.name}) starts mpirun itself",
            )
            for engine in SETTINGS.engines[1:]
        ),
        ("image", {"image": "a/b:v2"}, "a/b:v2: there is no tag v2"),
        ("image", {"image": "a/c"}, "the registry lists no a/c"),
        ("bucket", {"store": "obs://bucket-b"}, "there is no bucket bucket-b"),
        (
            "outputs",
            {"outputs": {"O": "obs://bucket/taken"}},
            "is an output of the running job other",
        ),
    ],
)
def test_each_check_reports_what_would_fail(
    name: str,
    values: dict[str, Any],
    message: str,
    service: ModelArts,
    backend: ModelArtsBackend,
):
    outputs = [{"name": "O", "remote": {"obs": {"obs_url": "obs://bucket/taken/"}}}]
    service.add("other", outputs=outputs)
    store = values.pop("store", "")
    store = store and f"{store}?endpoint={service.endpoint}&region=cn-north-4"
    check = run_checks(service, backend, store, **values)[name]

    assert not check.is_ok
    assert message in check.found
    assert check.hint


def test_a_flavor_determines_the_number_of_devices_of_a_node(backend: ModelArtsBackend):
    """The number is unknown for a dedicated pool and for a flavor that is not listed."""
    job = JobSpec(script="train.py", backend="modelarts", flavor="gpu")
    pool = JobSpec(script="train.py", backend="modelarts", modelarts={"pool_id": "p"})

    assert backend.devices(job, may_query=True) == Devices(8, "the flavor is gpu")
    assert backend.devices(job.with_values(flavor="cpu"), may_query=True).per_node == 0
    assert backend.devices(job.with_values(flavor="x"), may_query=True) is None
    assert backend.devices(pool, may_query=True) is None
    assert backend.devices(job, may_query=False) is None


@pytest.mark.parametrize(
    ("key", "is_there"),
    [
        ("", True),
        ("data", True),
        ("data/", True),
        ("data/a%20b", True),
        ("empty/", True),
        ("nope/", False),
        ("nope", False),
        ("dat", False),
        ("data/a", False),
        ("data/a%20b/", False),
    ],
)
def test_a_missing_input_is_found_before_the_submit(
    key: str, is_there: bool, service: ModelArts, backend: ModelArtsBackend
):
    service.obs.objects = dict.fromkeys(("data-2/x", "data/a b", "empty/"), b"")
    check = run_checks(service, backend, inputs={"DATA": f"obs://bucket/{key}"})["inputs"]

    assert check.is_ok == is_there
    assert check.is_needed
    assert check.found == f"DATA: {'' if is_there else 'there is nothing at '}obs://bucket/{key}"


def test_a_bucket_in_another_region_or_encrypted_is_reported(
    service: ModelArts, backend: ModelArtsBackend
):
    """The service reports such a bucket only after the job has failed."""
    service.obs.location, service.obs.is_encrypted = "eu-west-101", True
    check_of = run_checks(service, backend)

    assert check_of["bucket"].found == "bucket is in eu-west-101, but jobs run in cn-north-4"
    assert not check_of["encryption"].is_ok


def test_a_bucket_that_refuses_the_local_clock_is_reported(
    service: ModelArts, backend: ModelArtsBackend
):
    refusal = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    service.faults.append(once("GET /bucket", Reply(403, refusal), times=9))
    check = run_checks(service, backend)["bucket"]

    assert check.found == "asking for obs://bucket/jobs: OBS refuses: RequestTimeTooSkewed"
    assert "clock" in check.hint


@pytest.mark.parametrize("endpoint", ["http://[::1", "not a url", "http://127.0.0.1:1"])
def test_an_endpoint_of_the_store_that_cannot_be_used_is_reported(
    endpoint: str,
    service: ModelArts,
    backend: ModelArtsBackend,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(bucket, "_TRIES", 1)
    check = run_checks(service, backend, f"obs://bucket?endpoint={endpoint}&region=r")["bucket"]

    assert not check.is_ok
    assert check.found.startswith("asking for obs://bucket: ")


def test_a_full_quota_is_reported(service: ModelArts, backend: ModelArtsBackend):
    service.configure(max_jobs=3)
    for number in range(3):
        service.add(f"job-{number}")

    assert not run_checks(service, backend)["quota"].is_ok


def test_a_pool_is_checked_instead_of_a_flavor(service: ModelArts, backend: ModelArtsBackend):
    """The pool determines the size of its nodes."""
    options = {"modelarts": {"pool_id": "pool-a"}}
    check_of = run_checks(service, backend, flavor="", **options)

    assert check_of["pool"].is_ok
    assert "flavor" not in check_of
    missing = run_checks(service, backend, modelarts={"pool_id": "pool-b"})
    assert not missing["pool"].is_ok
    assert missing["pool"].is_needed


@pytest.mark.parametrize(
    "image", ["a/b/c:v101", "swr.cn-north-4.myhuaweicloud.com/a/b/c:v101", "a/b/c:v3"]
)
def test_an_image_is_searched_in_the_registry(
    image: str, service: ModelArts, backend: ModelArtsBackend
):
    """All pages of its tags are read; a folder in the name is escaped as the registry requires."""
    service.images["a/b/c"] = [f"v{number}" for number in range(120)]

    assert run_checks(service, backend, image=image)["image"].is_ok


def test_an_image_that_is_not_listed_may_be_shared(service: ModelArts, backend: ModelArtsBackend):
    assert not run_checks(service, backend, image="other/name:v1")["image"].is_needed


def test_an_image_of_another_registry_is_not_checked(service: ModelArts, backend: ModelArtsBackend):
    assert "image" not in run_checks(service, backend, image="registry.example:5000/a/b:v1")


def test_wrong_keys_are_reported_once_and_not_by_every_check(service: ModelArts, tmp_path: Path):
    environ = {**environ_of(service), "HUAWEICLOUD_SDK_SK": "another"}
    check_of = run_checks(
        service, ModelArtsBackend(tmp_path, {}, environ=environ, user_home=tmp_path)
    )

    assert not check_of["credentials"].is_ok
    assert [check.name for check in check_of.values() if not check.is_ok and check.is_needed] == [
        "credentials"
    ]


def test_a_user_without_permission_to_list_quotas_may_submit(
    service: ModelArts, backend: ModelArtsBackend
):
    """A user may have permission to train, but not to list quotas."""
    refused = {"error_msg": "denied", "error_code": "ModelArts.0103"}
    service.faults.append(once("training-quotas", Reply(403, refused), times=9))
    check_of = run_checks(service, backend)

    assert [check for check in check_of.values() if check.is_needed and not check.is_ok] == []
    assert "denied" in check_of["asking for quotas"].found


def test_the_checks_run_in_parallel(service: ModelArts, backend: ModelArtsBackend):
    """None of the first five requests is answered before all five have arrived."""
    arrivals: list[bool] = []
    numbers = itertools.count(1)
    all_arrived = threading.Event()

    def wait(_seen: Any) -> None:
        if next(numbers) == 5:
            all_arrived.set()
        arrivals.append(all_arrived.wait(180))

    service.faults.append(wait)
    run_checks(service, backend, outputs={"O": "obs://bucket/mine"})

    assert arrivals == [True] * 6


def test_without_a_job_doctor_lists_what_the_service_offers(
    service: ModelArts, backend: ModelArtsBackend
):
    """`cloudjob doctor --backend modelarts` shows these checks."""
    check_of = {check.name: check for check in backend.checks(None, "")}

    assert check_of["flavor"].found == "2 flavors: cpu, gpu"
    assert check_of["engine"].found == "4 engines: hvd-1, ms-1, ms-2, torch-1"


def test_a_site_is_immutable():
    site = Site("https://h", "https://h", "r", PROJECT, KEYS)
    with pytest.raises(AttributeError):
        site.endpoint = "x"  # type: ignore[misc]
    assert replace(site, region="q").region == "q"
