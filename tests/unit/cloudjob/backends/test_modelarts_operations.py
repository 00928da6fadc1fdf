"""Each operation of the client sends the same request as the vendor's SDK."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.site import Site
from tests.support.modelarts import KEYS, PROJECT, ModelArts, Reply

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from huaweicloudsdkcore.auth.credentials import BasicCredentials


JOB = "11111111-2222-3333-4444-555555555555"
BODY: Any = {
    "kind": "job",
    "metadata": {"name": "träning"},
    "algorithm": {
        "engine": {"image_url": "a/b:c"},
        "command": 'printf "%s" ä',
        "environments": {"NCCL_DEBUG": "INFO"},
    },
    "spec": {"resource": {"flavor_id": "cpu", "node_count": 2}},
}


def sdk_call(endpoint: str, call: Callable[[Any, Any], Any]) -> None:
    """Make a call through the vendor's SDK."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import huaweicloudsdkmodelarts.v1 as sdk

        credentials = BasicCredentials(KEYS.access_key, KEYS.secret_key, PROJECT)
        client = (
            sdk.ModelArtsClient.new_builder()
            .with_credentials(credentials)
            .with_endpoints([endpoint])
            .build()
        )
        call(client, sdk)


def create(client: Any, sdk: Any) -> None:
    """Create the job of ``BODY``."""
    algorithm, resource = BODY["algorithm"], BODY["spec"]["resource"]
    body = sdk.Job(
        kind="job",
        metadata=sdk.JobMetadata(**BODY["metadata"]),
        algorithm=sdk.JobAlgorithm(**{**algorithm, "engine": sdk.JobEngine(**algorithm["engine"])}),
        spec=sdk.Spec(resource=sdk.SpecResource(**resource)),
    )
    client.create_training_job(sdk.CreateTrainingJobRequest(body=body))


CALLS = {
    "create": (lambda client: client.create(BODY), create),
    "show": (
        lambda client: client.show(JOB),
        lambda client, sdk: client.show_training_job_details(
            sdk.ShowTrainingJobDetailsRequest(training_job_id=JOB)
        ),
    ),
    "stop": (
        lambda client: client.terminate(JOB),
        lambda client, sdk: client.stop_training_job(
            sdk.StopTrainingJobRequest(
                training_job_id=JOB, body=sdk.JobActionType(action_type="terminate")
            )
        ),
    ),
    "delete": (
        lambda client: client.delete(JOB),
        lambda client, sdk: client.delete_training_job(
            sdk.DeleteTrainingJobRequest(training_job_id=JOB)
        ),
    ),
    "preview": (
        lambda client: client.log_preview(JOB, "worker-0"),
        lambda client, sdk: client.show_training_job_logs_preview(
            sdk.ShowTrainingJobLogsPreviewRequest(training_job_id=JOB, task_id="worker-0")
        ),
    ),
    "metrics": (
        lambda client: client.metrics(JOB, "worker-0"),
        lambda client, sdk: client.show_training_job_metrics(
            sdk.ShowTrainingJobMetricsRequest(training_job_id=JOB, task_id="worker-0")
        ),
    ),
    "events": (
        lambda client: list(client.events(JOB)),
        lambda client, sdk: client.list_training_job_events(
            sdk.ListTrainingJobEventsRequest(training_job_id=JOB, limit=100, offset=0, order="asc")
        ),
    ),
    "search": (
        lambda client: list(client.search([{"key": "name", "operator": "like", "value": ["a"]}])),
        lambda client, sdk: client.list_training_jobs(
            sdk.ListTrainingJobsRequest(
                body=sdk.JobSearches(
                    offset=0,
                    limit=50,
                    sort_by="create_time",
                    order="desc",
                    filters=[sdk.Filter(key="name", operator="like", value=["a"])],
                )
            )
        ),
    ),
    "flavors": (
        lambda client: client.flavors(),
        lambda client, sdk: client.show_training_job_flavors(sdk.ShowTrainingJobFlavorsRequest()),
    ),
    "engines": (
        lambda client: client.engines(),
        lambda client, sdk: client.show_training_job_engines(sdk.ShowTrainingJobEnginesRequest()),
    ),
    "quotas": (
        lambda client: client.quotas(),
        lambda client, sdk: client.show_training_quotas(sdk.ShowTrainingQuotasRequest()),
    ),
    "tags": (
        lambda client: client.tag(JOB, {"team": "a"}),
        lambda client, sdk: client.create_train_job_tags(
            sdk.CreateTrainJobTagsRequest(
                training_job_id=JOB,
                body=sdk.CreateTmsTagsRequest(tags=[sdk.TmsTag(key="team", value="a")]),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_the_one_that_the_sdk_makes(name: str, service: ModelArts):
    """Method, path, query and body are the same, and both are signed."""
    service.faults.append(lambda _: Reply(200, {}))
    client_call, vendor_call = CALLS[name]
    client_call(
        ModelArtsClient(Site(service.endpoint, service.endpoint, "cn-north-4", PROJECT, KEYS))
    )
    client_request = service.seen[-1]
    sdk_call(service.endpoint, vendor_call)
    vendor_request = service.seen[-1]

    assert (client_request.method, urlsplit(client_request.path).path) == (
        vendor_request.method,
        urlsplit(vendor_request.path).path,
    )
    assert parse_qsl(urlsplit(client_request.path).query) == parse_qsl(
        urlsplit(vendor_request.path).query
    )
    assert client_request.json == vendor_request.json
    for request in (client_request, vendor_request):
        assert service.accepts_signature_of(request)
