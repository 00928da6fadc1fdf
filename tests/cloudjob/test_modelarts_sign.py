"""Our signature is the one that Huawei's own SDK makes of the same call, and botocore of S3's."""

from __future__ import annotations

import calendar
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends.modelarts.client import Client
from cloudjob.backends.modelarts.sign import (
    Asked,
    canonical_query,
    signed,
    signed_for_bucket,
)
from cloudjob.backends.modelarts.site import Site
from jobentry.contract.sigv4 import Keys
from tests.support.fake_modelarts import KEYS, PROJECT, FakeModelArts, Reply, Seen, serve

NOW = 1_780_000_000.0

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from huaweicloudsdkcore.auth.credentials import BasicCredentials
    from huaweicloudsdkcore.sdk_request import SdkRequest
    from huaweicloudsdkcore.signer.signer import Signer


def sdk_headers(asked: Asked, keys: Keys, now: float) -> dict[str, str]:
    """Return what the SDK's signer makes of a request."""
    parts = urlsplit(asked.url)
    headers = dict(asked.headers)
    headers["X-Sdk-Date"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    if keys.token:
        headers["X-Security-Token"] = keys.token
    request = SdkRequest(
        method=asked.method,
        schema=parts.scheme,
        host=parts.netloc,
        resource_path=parts.path,
        query_params=list(asked.query),
        header_params=headers,
        body=asked.body,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Signer(BasicCredentials(keys.access_key, keys.secret_key)).sign(request)
    return dict(request.header_params)


words = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
names = st.text("abcdefghijklmnop_-", min_size=1, max_size=8)
calls = st.builds(
    Asked,
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    url=st.lists(st.text("abc019-_.~%20", min_size=1, max_size=6), min_size=1, max_size=4).map(
        lambda parts: "http://host.example:8080/" + "/".join(parts)
    ),
    query=st.lists(st.tuples(names, words), max_size=4, unique_by=lambda pair: pair[0]).map(tuple),
    headers=st.dictionaries(
        st.sampled_from(["X-Language", "X-Project-Id", "X-Odd"]),
        st.text("abc ABC-12", min_size=1, max_size=9),
        max_size=3,
    ).map(lambda found: tuple({"Content-Type": "application/json", **found}.items())),
    body=st.binary(max_size=40),
)


@given(calls, st.sampled_from(["", "a-token"]))
def test_the_signature_is_that_of_the_sdk(asked: Asked, token: str):
    """For any method, path, query, headers and body, with and without temporary keys."""
    keys = Keys("AK", "SK/+=", token)

    assert (
        signed(asked, keys, NOW)["Authorization"]
        == (sdk_headers(asked, keys, NOW)["Authorization"])
    )


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_what_is_no_json_is_not_hashed(body: bytes):
    """The log's URL is asked for with the type that is wanted; the SDK says so in a header."""
    asked = Asked(
        "GET",
        "https://h/v2/p/x",
        headers=(("Content-Type", "application/octet-stream"),),
        body=body,
    )
    found = signed(asked, KEYS, NOW)
    wanted = sdk_headers(asked, KEYS, NOW)

    assert found["X-Sdk-Content-Sha256"] == wanted["X-Sdk-Content-Sha256"] == "UNSIGNED-PAYLOAD"
    assert found["Authorization"] == wanted["Authorization"]


def test_a_header_with_an_underscore_is_sent_and_not_signed():
    """As the SDK does: a gateway may take it for another one."""
    asked = Asked("GET", "https://h/v2/p/x", headers=(("X_Odd", "1"),))

    assert signed(asked, KEYS, NOW)["X_Odd"] == "1"
    assert "x_odd" not in signed(asked, KEYS, NOW)["Authorization"]
    assert (
        signed(asked, KEYS, NOW)["Authorization"]
        == (sdk_headers(asked, KEYS, NOW)["Authorization"])
    )


@given(st.dictionaries(names, words, max_size=5))
def test_the_query_that_is_sent_is_the_one_that_was_signed(pairs: dict[str, str]):
    """Whatever it holds: a server reads back what was meant."""
    assert dict(parse_qsl(canonical_query(pairs), keep_blank_values=True)) == pairs


@pytest.mark.parametrize("token", ["", "a-token"])
@pytest.mark.parametrize("query", [(), (("location", ""),), (("encryption", ""),)])
def test_questions_to_a_bucket_are_signed_as_botocore_signs_them(
    query: tuple[tuple[str, str], ...], token: str
):
    """Signature 4 without the hash of a body, as OBS wants it."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    asked = Asked("GET", "https://bucket.obs.example.com/", query)
    found = signed_for_bucket(asked, Keys("AK", "SK", token), "cn-north-4", NOW)
    request = AWSRequest("GET", asked.target, headers={"x-amz-content-sha256": "UNSIGNED-PAYLOAD"})
    request.context["timestamp"] = found["x-amz-date"]
    auth = S3SigV4Auth(Credentials("AK", "SK", token or None), "s3", "cn-north-4")
    auth.payload = lambda _: "UNSIGNED-PAYLOAD"
    if token:
        request.headers["x-amz-security-token"] = token
    canonical = auth.canonical_request(request_with_date(request, found["x-amz-date"]))
    signature = auth.signature(auth.string_to_sign(request, canonical), request)

    assert found["authorization"].endswith(f"Signature={signature}")


def request_with_date(request: Any, moment: str) -> Any:
    """Return the request as botocore has it when it signs."""
    request.headers["X-Amz-Date"] = moment
    return request


# -- whole calls ----------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[FakeModelArts]:
    """A small ModelArts."""
    yield from serve(FakeModelArts(faults=[lambda _: Reply(200, {})]))


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
def test_each_call_is_the_one_that_the_sdk_makes(name: str, service: FakeModelArts):
    """Method, path, query and body are the same, and each signs the other's request as it does."""
    ours, theirs = CALLS[name]
    ours(Client(Site(service.endpoint, service.endpoint, "cn-north-4", PROJECT, KEYS)))
    mine = service.seen[-1]
    sdk_call(service.endpoint, theirs)
    other = service.seen[-1]

    assert (mine.method, urlsplit(mine.path).path) == (other.method, urlsplit(other.path).path)
    assert parse_qsl(urlsplit(mine.path).query) == parse_qsl(urlsplit(other.path).query)
    assert mine.json == other.json
    assert resigned(other, signed) == other.headers["authorization"]
    assert resigned(mine, sdk_headers) == mine.headers["authorization"]


def resigned(seen: Seen, sign: Callable[[Asked, Keys, float], dict[str, str]]) -> str:
    """Return the proof that ``sign`` gives to a request that was seen."""
    parts = urlsplit(seen.path)
    listed = seen.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0]
    given = [name for name in listed.split(";") if name not in ("host", "x-sdk-date")]
    asked = Asked(
        seen.method,
        f"http://{seen.headers['host']}{parts.path}",
        tuple(parse_qsl(parts.query, keep_blank_values=True)),
        tuple((name.title(), seen.headers[name]) for name in given),
        seen.body,
    )
    now = calendar.timegm(time.strptime(seen.headers["x-sdk-date"], "%Y%m%dT%H%M%SZ"))
    return sign(asked, KEYS, float(now))["Authorization"]
