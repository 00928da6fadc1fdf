"""The vendor's SDK calls every operation that it has for training jobs."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.emulator import Api, await_true, keys, new_name

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer Pythons warn about its dependencies
    import huaweicloudsdkmodelarts.v1 as sdk
    import huaweicloudsdkswr.v2 as swr
    from huaweicloudsdkcore.auth.credentials import BasicCredentials
    from huaweicloudsdkcore.exceptions.exceptions import (
        ClientRequestException,
        ServiceResponseException,
    )

pytestmark = pytest.mark.filterwarnings("default")
PYTORCH = "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"
# Operations on training jobs that the emulator does not support.
UNSUPPORTED = {
    "create_save_image_job",
    "list_ft_artifacts",
    "modify_training_quotas",
    "publish_ft_artifacts",
    "show_auto_search_param_analysis_result_path",
    "show_auto_search_params_analysis",
    "show_auto_search_per_trial",
    "show_auto_search_trial_early_stop",
    "show_auto_search_trials",
    "show_auto_search_yaml_template_content",
    "show_ft_detail",
    "show_ft_metrics",
    "show_save_image_job",
}
# Supported operations other than those on jobs, algorithms and experiments.
OTHER_SUPPORTED = {
    "create_model_arts_agency",
    "delete_authorizations",
    "get_authorizations",
    "list_events",
    "list_image",
    "list_jobs",
    "list_networks",
    "list_node_pools",
    "list_plugin_templates",
    "list_pool_nodes",
    "list_pool_plugins",
    "list_pool_tags",
    "list_pools",
    "list_resource_flavors",
    "list_scheduled_events",
    "list_users",
    "list_workloads",
    "list_workspace",
    "register_image",
    "show_authmode_detail",
    "show_os_config",
    "show_os_quota",
    "show_pool",
    "show_pool_monitor",
    "show_pool_node",
    "show_pool_runtime_metrics",
    "show_pool_statistics",
    "show_pool_tags",
    "show_workload_statistics",
    "show_workspace",
    "show_workspace_quotas",
    "validate_authorization",
}
OPERATIONS = sorted(
    name[1 : -len("_http_info")]
    for name, _ in inspect.getmembers(sdk.ModelArtsClient)
    if name.startswith("_") and name.endswith("_http_info")
)


@pytest.fixture(scope="module")
def client(session_api: Api) -> Any:
    """The vendor's client, with the account's key."""
    address = session_api.address
    credentials = BasicCredentials(address.access_key, address.secret_key, address.project_id)
    return (
        sdk.ModelArtsClient.new_builder()
        .with_credentials(credentials)
        .with_endpoints([address.endpoint])
        .build()
    )


@pytest.fixture(scope="module")
def job(session_api: Api) -> str:
    """A completed job with a log and metrics."""
    job_id = session_api.create("sleep 1; echo hello")
    session_api.await_phase(job_id)
    return job_id


@pytest.fixture(scope="module")
def answers(client: Any, session_api: Api, job: str) -> dict[str, tuple[int, str]]:
    """The HTTP status and error code of each operation of the SDK."""
    values = {
        "training_job_id": session_api.create("true"),
        "task_id": "worker-0",
        "workspace_id": "0",
        "pool_name": "pool-a",
        "node_name": "pool-a-0",
        "experiment_name": "x",
        "flavor_id": "modelarts.vm.cpu.2u",
        "body": {"swr_path": "a/b:1"},
    }

    def answer(name: str) -> tuple[int, str]:
        try:
            return getattr(client, name)(_request(name, values)).status_code or 200, ""
        except ServiceResponseException as error:
            return error.status_code, str(error.error_code)

    last = ("delete_training_job", "delete_authorizations")
    names = [name for name in OPERATIONS if name not in last]
    with ThreadPoolExecutor(16) as pool:
        answer_of = dict(zip(names, pool.map(answer, names), strict=True))
    answer_of.update((name, answer(name)) for name in last)
    client.create_authorization(sdk.CreateAuthorizationRequest())
    return answer_of


def _request(operation: str, values: dict[str, Any]) -> Any:
    """Return a request with all path parameters, and the other parameters in ``values``."""
    text = inspect.getsource(getattr(sdk.ModelArtsClient, operation))
    kind = getattr(sdk, re.findall(r"v1\.(\w+Request)`", text)[0])
    text = inspect.getsource(getattr(sdk.ModelArtsClient, f"_{operation}_http_info"))
    in_path = re.findall(r"\{(\w+)\}", re.findall(r'"resource_path": "(.+)"', text)[0])
    names = {name for name, sent in kind.attribute_map.items() if sent in in_path}
    values_of = dict.fromkeys(names, "x") | values
    return kind(**{name: values_of[name] for name in kind.attribute_map if name in values_of})


def test_every_operation_of_the_sdk_gets_an_answer_that_it_can_parse(
    answers: dict[str, tuple[int, str]],
):
    unexpected = {
        name: answer
        for name, answer in answers.items()
        if answer[0] >= 500 or (answer[0] >= 400 and not answer[1].startswith("ModelArts."))
    }
    assert len(answers) == len(OPERATIONS) >= 297
    assert unexpected == {}


def test_unsupported_operations_are_refused_with_their_documented_code(
    answers: dict[str, tuple[int, str]],
):
    refused = {name for name, answer in answers.items() if answer == (400, "ModelArts.2858")}
    not_enabled = {name for name, answer in answers.items() if answer == (400, "ModelArts.3518")}

    assert refused == UNSUPPORTED
    assert {name: answers[name] for name in OTHER_SUPPORTED if answers[name][0] >= 300} == {}
    assert {"list_notebooks", "create_network", "list_workflows"} < not_enabled


def test_the_sdk_of_the_registry_lists_the_tags_of_an_image(session_api: Api):
    address = session_api.address
    credentials = BasicCredentials(address.access_key, address.secret_key, address.project_id)
    builder = swr.SwrClient.new_builder().with_credentials(credentials)
    client = builder.with_endpoints([address.endpoint]).build()
    request = swr.ListRepositoryTagsRequest(
        namespace="cloudjob", repository="base", limit="10", offset="0", tag="v2"
    )
    answer = client.list_repository_tags(request)

    assert [(tag.tag, tag.path) for tag in answer.body] == [("v2", "cloudjob/base:v2")]
    assert answer.content_range == "0-0/1"


def full_body(s3: Any, name: str) -> Any:
    """Return a create request with nearly every field."""
    s3.put_object(Bucket="data", Key=f"{name}/code/t.py", Body=b"import sys; print(sys.argv)")
    s3.put_object(Bucket="data", Key=f"{name}/in/f", Body=b"x")
    url = f"obs://data/{name}"
    algorithm = sdk.JobAlgorithm(
        code_dir=f"{url}/code/",
        boot_file=f"{url}/code/t.py",
        engine=sdk.JobEngine(engine_name="PyTorch", engine_version=PYTORCH),
        parameters=[
            sdk.Parameters(
                name="n",
                value="1",
                description="d",
                constraint=sdk.ParametersConstraint(
                    type="Integer", editable=True, required=False, sensitive=False
                ),
            )
        ],
        inputs=[
            sdk.Input(
                name="data_url",
                description="d",
                access_method="parameter",
                remote=sdk.InputDataInfo(obs=sdk.InputDataInfoObs(obs_url=f"{url}/in/")),
            )
        ],
        outputs=[
            sdk.Output(
                name="train_url",
                access_method="env",
                remote=sdk.Remote(obs=sdk.RemoteObs(obs_url=f"{url}/out/")),
            )
        ],
        environments={"A": "1", "B": "2"},
    )
    spec = sdk.Spec(
        resource=sdk.SpecResource(flavor_id="modelarts.vm.cpu.2u", node_count=2),
        log_export_path=sdk.LogExportPath(obs_url=f"{url}/log/"),
        schedule_policy=sdk.SchedulePolicy(priority=2, preemptible=False),
        auto_stop=sdk.AutoStop(time_unit="HOURS", duration=20),
    )
    metadata = sdk.JobMetadata(
        name=name,
        description="a job",
        workspace_id="0",
        annotations={"fault-tolerance/job-retry-num": "1"},
    )
    endpoints = sdk.JobEndpointsReq(ssh=sdk.SSHReq(key_pair_names=["k"]))
    return sdk.CreateTrainingJobRequest(
        body=sdk.Job(
            kind="job", metadata=metadata, algorithm=algorithm, spec=spec, endpoints=endpoints
        )
    )


def test_a_full_job_goes_through_the_sdk(client: Any, s3: Any):
    name = new_name()
    created = client.create_training_job(full_body(s3, name))
    job = created.metadata.id
    show = sdk.ShowTrainingJobDetailsRequest(training_job_id=job)
    details = await_true(lambda: _ended(client.show_training_job_details(show)))
    log = client.show_training_job_logs_preview(
        sdk.ShowTrainingJobLogsPreviewRequest(training_job_id=job, task_id="worker-1")
    )
    events = client.list_training_job_events(
        sdk.ListTrainingJobEventsRequest(training_job_id=job, order="asc", limit=100)
    )
    page = client.list_training_jobs(
        sdk.ListTrainingJobsRequest(
            body=sdk.JobSearches(
                limit=1, filters=[sdk.Filter(key="name", operator="in", value=[name])]
            )
        )
    )
    client.change_training_job_description(
        sdk.ChangeTrainingJobDescriptionRequest(
            training_job_id=job, body=sdk.JobUpdateRequestBody(description="other")
        )
    )

    assert details.status.phase == "Completed", log.content
    assert details.status.task_statuses[0].exit_code == 0
    assert details.spec.resource.flavor_detail.flavor_info.cpu.core_num == 2
    assert details.algorithm.inputs[0].local_dir == "/home/ma-user/modelarts/inputs/data_url_0"
    assert details.endpoints.ssh.key_pair_names == ["k"]
    assert "--n=1" in log.content
    assert log.current_size == log.full_size
    assert events.events[0].message == "Training job created."
    assert (page.total, page.items[0].metadata.id) == (1, job)
    assert client.show_training_job_details(show).metadata.description == "other"
    assert len(keys(s3, f"{name}/log/")) == 2
    assert (
        client.list_training_job_tasks(sdk.ListTrainingJobTasksRequest(training_job_id=job))
        .body[1]
        .task
        == "worker-1"
    )
    stages = client.list_training_job_stages(sdk.ListTrainingJobStagesRequest(training_job_id=job))
    assert stages.running_records[0].stages[0].name == "Queuing"
    client.delete_training_job(sdk.DeleteTrainingJobRequest(training_job_id=job))
    with pytest.raises(ClientRequestException) as caught:
        client.show_training_job_details(show)
    assert caught.value.error_code == "ModelArts.2775"


def _ended(details: Any) -> Any:
    return details if details.status.phase in ("Completed", "Failed", "Abnormal") else None


def test_the_sdk_stops_a_job_once(client: Any, session_api: Api):
    job = session_api.create("sleep 60")
    request = sdk.StopTrainingJobRequest(
        training_job_id=job, body=sdk.JobActionType(action_type="terminate")
    )

    assert client.stop_training_job(request).status.phase == "Terminating"
    session_api.await_phase(job)
    with pytest.raises(ClientRequestException) as caught:
        client.stop_training_job(request)
    assert (caught.value.status_code, caught.value.error_code) == (409, "ModelArts.2796")


def test_an_error_is_an_exception_of_the_sdk(client: Any):
    with pytest.raises(ClientRequestException) as caught:
        client.create_training_job(sdk.CreateTrainingJobRequest(body=sdk.Job(kind="job")))
    error = caught.value

    assert (error.status_code, error.error_code) == (400, "ModelArts.2788")
    assert "name" in error.error_msg
    assert len(error.request_id) == 32


def test_a_wrong_key_is_an_exception_of_the_sdk(session_api: Api):
    address = session_api.address
    client = (
        sdk.ModelArtsClient.new_builder()
        .with_credentials(BasicCredentials("NOBODY", "x", address.project_id))
        .with_endpoints([address.endpoint])
        .build()
    )
    with pytest.raises(ClientRequestException) as caught:
        client.show_training_job_engines(sdk.ShowTrainingJobEnginesRequest())

    assert (caught.value.status_code, caught.value.error_code) == (401, "APIGW.0301")


def test_the_sdk_lists_flavors_engines_and_quotas(client: Any):
    flavors = client.show_training_job_flavors(sdk.ShowTrainingJobFlavorsRequest(flavor_type="GPU"))
    engines = client.show_training_job_engines(sdk.ShowTrainingJobEnginesRequest())
    quotas = client.show_training_quotas(sdk.ShowTrainingQuotasRequest())
    maximum = client.show_training_flavor_max_available_resource(
        sdk.ShowTrainingFlavorMaxAvailableResourceRequest(flavor_id="modelarts.vm.cpu.8u")
    )

    assert flavors.total_count == len(flavors.flavors) == 2
    assert flavors.flavors[0].flavor_info.gpu.unit_num == 1
    assert PYTORCH in [item.engine_id for item in engines.items]
    assert quotas.quotas[0].quota > 0
    assert (maximum.cpu_core_num, maximum.mem_size) == (8, 32)


def test_tags_are_added_found_counted_and_removed(client: Any, session_api: Api, job: str):
    key = new_name()
    tags = sdk.CreateTmsTagsRequest(tags=[sdk.TmsTag(key=key, value="v")])
    client.create_train_job_tags(sdk.CreateTrainJobTagsRequest(training_job_id=job, body=tags))
    answer = client.show_train_job_tags(sdk.ShowTrainJobTagsRequest(training_job_id=job))
    project = client.list_training_job_tags(sdk.ListTrainingJobTagsRequest())
    page = client.list_training_jobs(
        sdk.ListTrainingJobsRequest(
            body=sdk.JobSearches(tags=[sdk.ListTagFilter(key=key, values=["v"])])
        )
    )
    count = {"tags": [{"key": key, "values": ["v"]}]}
    path = "{p}/modelarts-training-job/resource-instances/"

    assert (key, "v") in [(tag.key, tag.value) for tag in answer.tags]
    assert key in [tag.key for tag in project.tags]
    assert [item.metadata.id for item in page.items] == [job]
    assert session_api.ok("POST", path + "count", count) == {"total_count": 1}
    assert session_api.ok("POST", path + "filter", count)["resources"][0]["resource_id"] == job
    session_api.ok(
        "DELETE", f"{{p}}/modelarts-training-job/{job}/tags/delete", {"tags": [{"key": key}]}
    )
    assert session_api.ok("POST", path + "count", count) == {"total_count": 0}


def test_an_algorithm_is_created_used_changed_and_deleted(client: Any, session_api: Api, s3: Any):
    name = new_name()
    s3.put_object(Bucket="data", Key=f"{name}/t.py", Body=b"import sys; print(sys.argv[1:])")
    config = sdk.AlgorithmJobConfig(
        code_dir=f"/data/{name}/",
        boot_file=f"/data/{name}/t.py",
        engine=sdk.AlgorithmCreateEngine(engine_id=PYTORCH),
        parameters=[sdk.Parameters(name="a", value="1"), sdk.Parameters(name="b", value="2")],
    )
    created = client.create_algorithm(
        sdk.CreateAlgorithmRequest(
            body=sdk.Algorithm(metadata=sdk.AlgorithmMetadata(name=name), job_config=config)
        )
    )
    number = created.metadata.id
    listed = client.list_algorithms(sdk.ListAlgorithmsRequest(searches=f"name:{name}"))
    body = session_api.body("")
    body["algorithm"] = {"id": number, "parameters": [{"name": "b", "value": "9"}]}
    job = session_api.ok("POST", "{p}/training-jobs", body)["metadata"]["id"]
    details = session_api.await_phase(job)

    assert [item.metadata.id for item in listed.items] == [number]
    assert details["status"]["phase"] == "Completed"
    assert details["algorithm"]["name"] == name
    assert "['--b=9', '--a=1']" in session_api.log(job)
    client.delete_algorithm(sdk.DeleteAlgorithmRequest(algorithm_id=number))
    with pytest.raises(ClientRequestException) as caught:
        client.show_algorithm_by_uuid(sdk.ShowAlgorithmByUuidRequest(algorithm_id=number))
    assert caught.value.error_code == "ModelArts.2755"


def refusal(action: Callable[..., Any], request: Any) -> tuple[int, str]:
    """Return the HTTP status and error code of a refused request."""
    with pytest.raises(ClientRequestException) as caught:
        action(request)
    return caught.value.status_code, caught.value.error_code


def test_an_experiment_is_created_found_changed_counted_and_deleted(client: Any, session_api: Api):
    name, other = new_name(), new_name()

    def request(name: str) -> Any:
        metadata = sdk.TrainingExperimentRequestMetadata(name=name)
        body = sdk.CreateTrainingExperimentRequestBody(metadata=metadata)
        return sdk.CreateTrainingExperimentRequest(body=body)

    created = client.create_training_experiment(request(name))
    number = created.metadata.id
    client.create_training_experiment(request(other))
    check = sdk.CheckTrainingExperimentRequest(experiment_name=name)
    show = sdk.ShowTrainingExperimentDetailsRequest(experiment_id=number)

    def change(**values: str) -> Any:
        body = sdk.ChangeTrainingExperimentRequestBody(**values)
        return sdk.ChangeTrainingExperimentRequest(experiment_id=number, body=body)

    assert client.check_training_experiment(check).is_duplicate is True
    assert refusal(client.create_training_experiment, request(name)) == (400, "ModelArts.2788")
    assert refusal(client.change_training_experiment, change(name=other))[0] == 400
    changed = client.change_training_experiment(change(description="d"))
    assert (changed.name, changed.description) == (name, "d")
    for reference in ({"id": number}, {"name": name}):
        body = session_api.body("true")
        body["metadata"]["training_experiment_reference"] = reference
        job = session_api.ok("POST", "{p}/training-jobs", body)
    details = client.show_training_experiment_details(show)
    assert details.statistic.job_count == 2
    assert details.metadata.description == "d"
    assert job["metadata"]["training_experiment_reference"] == {
        "id": number,
        "name": name,
        "serial_number": 2,
    }
    client.delete_training_experiment(sdk.DeleteTrainingExperimentRequest(experiment_id=number))
    assert client.check_training_experiment(check).is_duplicate is False
    assert refusal(client.show_training_experiment_details, show) == (400, "ModelArts.2788")


def test_a_job_creates_the_experiment_that_it_names_but_an_id_must_exist(
    client: Any, session_api: Api
):
    name = new_name()
    body = session_api.body("true")
    body["metadata"]["training_experiment_reference"] = {"id": "nobody"}
    status, answer, _ = session_api.ask("POST", "{p}/training-jobs", body)
    assert (status, answer["error_code"]) == (400, "ModelArts.2788")
    body["metadata"]["training_experiment_reference"] = {"name": name}
    session_api.ok("POST", "{p}/training-jobs", body)
    listed = client.list_training_experiments(
        sdk.ListTrainingExperimentsRequest(limit=100, sort_by="name", order="asc")
    ).items

    assert [item.statistic.job_count for item in listed if item.metadata.name == name] == [1]
    assert [item.metadata.name for item in listed] == sorted(item.metadata.name for item in listed)


def test_the_sdk_lists_the_categories_of_events(client: Any):
    categories = client.list_event_categories(sdk.ListEventCategoriesRequest()).event_categories

    assert "JobFailed" in [item.id for item in categories]


def test_jobs_of_31_days_are_found_by_host_type_and_tag(client: Any, session_api: Api, job: str):
    key = new_name()
    tags = sdk.CreateTmsTagsRequest(tags=[sdk.TmsTag(key=key, value="v")])
    client.create_train_job_tags(sdk.CreateTrainJobTagsRequest(training_job_id=job, body=tags))
    by_tag = [sdk.ListTagFilter(key=key, values=[""])]

    def request(**values: Any) -> Any:
        return sdk.ListTrainingJobsRequest(body=sdk.JobSearches(tags=by_tag, **values))

    def search(**values: Any) -> list[str]:
        return [item.metadata.id for item in client.list_training_jobs(request(**values)).items]

    def refused(**values: Any) -> bool:
        return refusal(client.list_training_jobs, request(**values))[0] == 400

    assert search() == search(train_type="job") == search(host_ips=["127.0.0.1", "::1"]) == [job]
    assert search(train_type="ftjob") == search(host_ips=["192.0.2.7"]) == []
    assert refused(train_type="other")
    assert refused(host_ips=["here"])
    assert refused(host_ips=["127.0.0.1"] * 11)
    year = sdk.Filter(key="create_time", operator="between", value=["0", str(365 * 86_400_000)])
    assert refused(filters=[year])
    old = sdk.Filter(key="create_time", operator="between", value=["0", "86400000"])
    assert search(filters=[old]) == []


@pytest.mark.parametrize(
    ("key", "value", "is_allowed"),
    [
        ("k" * 128, "v" * 255, True),
        ("größe 1_.:=+-@", "a/b", True),
        ("k" * 129, "", False),
        ("k", "v" * 256, False),
        ("", "v", False),
        (" k", "v", False),
        ("_sys_k", "v", False),
        ("a/b", "v", False),
        ("k", "a,b", False),
    ],
)
def test_tags_are_validated_when_added_and_at_creation(
    session_api: Api, job: str, key: str, value: str, is_allowed: bool
):
    tags = [{"key": key, "value": value}]
    body = {**session_api.body("true"), "tags": tags}
    path = f"{{p}}/modelarts-training-job/{job}/tags"

    assert session_api.ask("POST", "{p}/training-jobs", body)[0] == (201 if is_allowed else 400)
    status, _, _ = session_api.ask("POST", f"{path}/create", {"tags": tags})
    assert status == (204 if is_allowed else 400)
    if is_allowed:
        session_api.ok("DELETE", f"{path}/delete", {"tags": [{"key": key}]})


def test_a_batch_deletes_all_jobs_or_none(client: Any, session_api: Api):
    jobs = [session_api.create("true") for _ in range(3)]
    name = session_api.show(jobs[0])["metadata"]["name"]
    check = sdk.ValidateTrainingJobNameRequest(job_name=name)
    assert client.validate_training_job_name(check).is_duplicate is True

    def batch(*ids: str) -> Any:
        items = [
            sdk.BatchDeleteJobItem(kind="job", metadata=sdk.BatchDeleteJobMetadata(id=item))
            for item in ids
        ]
        return client.batch_delete_training_job(
            sdk.BatchDeleteTrainingJobRequest(body=sdk.BatchDeleteJobsReq(jobs=items))
        )

    with pytest.raises(ClientRequestException) as caught:
        batch(*jobs, "nobody")
    assert caught.value.error_code == "ModelArts.2775"
    assert session_api.show(jobs[0])
    batch(*jobs)
    await_true(lambda: client.validate_training_job_name(check).is_duplicate is False)


def test_an_image_is_registered_listed_and_shown(client: Any):
    image = client.register_image(
        sdk.RegisterImageRequest(body=sdk.ImageRegRequest(swr_path="registry/ns/img:1"))
    )
    details = client.show_image(sdk.ShowImageRequest(id=image.id))

    assert (details.name, details.tag, details.status) == ("img", "1", "ACTIVE")
    client.delete_image(sdk.DeleteImageRequest(id=image.id))
    with pytest.raises(ClientRequestException):
        client.show_image(sdk.ShowImageRequest(id=image.id))
