"""Tests of the ModelArts client with the emulator's API and injected failures."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cloudjob import retries
from cloudjob.backends.modelarts import errors, site
from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.site import Site, UserLogin
from cloudjob.backends.modelarts.transport import LIMITS
from cloudjob.errors import BackendError, JobNotFound, NotAuthorised, Unanswered, UsageError
from cloudjob.retries import RequestLimits
from jobentry.contract.sigv4 import Keys
from tests.support.modelarts import (
    KEYS,
    PASSWORD,
    PROJECT,
    REGION,
    SETTINGS,
    ModelArts,
    Reply,
    Seen,
    body,
    once,
)

BODY = body("train-2345678b")


class Pauses(list[float]):
    """A replacement for ``time.sleep`` that only records the pauses, in seconds."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def pauses() -> Pauses:
    """The pauses of the client."""
    return Pauses()


@pytest.fixture
def client(service: ModelArts, pauses: Pauses) -> ModelArtsClient:
    """A client that does not really wait."""
    return ModelArtsClient(site_of(service), pause=pauses)


LOGIN = UserLogin(SETTINGS.user, SETTINGS.domain, PASSWORD)


def site_of(service: ModelArts, **values: Any) -> Site:
    """Return the site of the service, with some values replaced."""
    base = Site(service.endpoint, service.endpoint, REGION, PROJECT, KEYS)
    return replace(base, **values)


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_temporary_failure_is_retried(status: int, service: ModelArts, client: ModelArtsClient):
    job = service.add("train")
    service.faults.append(once("GET", Reply(status, {}), times=3))

    assert client.show(job)["metadata"]["id"] == job
    assert len(service.requests_with("GET")) == 4


@pytest.mark.parametrize(
    ("headers", "least_s", "most_s"),
    [({}, 0.0, 0.5), ({"Retry-After": "7"}, 7.0, 7.0), ({"Retry-After": "soon"}, 0.0, 0.5)],
)
def test_the_pause_is_the_one_that_the_service_requests(
    headers: dict[str, str],
    least_s: float,
    most_s: float,
    service: ModelArts,
    client: ModelArtsClient,
    pauses: Pauses,
):
    job = service.add("train")
    service.faults.append(once("GET", Reply(429, {}, headers)))
    client.show(job)

    assert least_s <= pauses[0] <= most_s


def test_the_service_may_request_a_pause_until_a_date(
    service: ModelArts, client: ModelArtsClient, pauses: Pauses
):
    job = service.add("train")
    moment = formatdate(time.time() + 60, usegmt=True)
    service.faults.append(once("GET", Reply(503, {}, {"Retry-After": moment})))
    client.show(job)

    assert 10 < pauses[0] <= 60


def test_no_pause_is_longer_than_the_time_limit(
    service: ModelArts, client: ModelArtsClient, pauses: Pauses
):
    job = service.add("train")
    service.faults.append(once("GET", Reply(429, {}, {"Retry-After": "3600"}), times=99))
    with pytest.raises(errors.ServiceError) as caught:
        client.show(job)

    assert caught.value.status == 429
    assert "too many requests" in caught.value.hint
    assert pauses == []


@pytest.mark.parametrize("reply", [Reply(cut=True), Reply(200, {"a": 1}, cut_after=3)])
def test_a_request_is_repeated_when_its_connection_breaks(
    reply: Reply, service: ModelArts, client: ModelArtsClient
):
    job = service.add("train")
    service.after.append(once("GET", reply, times=2))

    assert client.show(job)["metadata"]["id"] == job


def test_an_endpoint_without_a_listener_is_reported_quickly(service: ModelArts, pauses: Pauses):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(BackendError) as caught:
        ModelArtsClient(site_of(service, endpoint=f"http://{nowhere}"), pause=pauses).show("x")

    assert caught.value.message == f"asking for job x: {nowhere}: nothing is listening there"
    assert len(pauses) == 3


def test_a_proxy_that_does_not_connect_is_named(
    service: ModelArts, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    remote_site = site_of(service, endpoint="http://modelarts.example")
    with pytest.raises(BackendError) as caught:
        ModelArtsClient(remote_site, pause=pauses).show("x")

    expected = "asking for job x: modelarts.example: the proxy does not connect to it"
    assert caught.value.message == expected
    assert "HTTPS_PROXY" in caught.value.hint
    assert len(pauses) == 3


_WITHOUT_PYSOCKS = """
import sys
sys.modules["socks"] = None
from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.site import Site
from jobentry.contract.sigv4 import Keys
address = "http://modelarts.example"
try:
    ModelArtsClient(Site(address, address, "region", "project", Keys("access", "secret"))).show("x")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_socks_proxy_is_named(variable: str):
    """With the package PySocks, which cloudjob does not require, requests would use the proxy."""
    names = ("http_proxy", "all_proxy", "no_proxy", "NO_PROXY", "HTTP_PROXY", "ALL_PROXY")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ[variable] = "socks5h://user:password@127.0.0.1:9"
    argv = [sys.executable, "-c", _WITHOUT_PYSOCKS]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)

    assert done.stdout.startswith("asking for job x: modelarts.example: HTTPS_PROXY or ALL_PROXY")
    assert "password" not in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_service_that_never_answers_is_reported_and_given_up(
    service: ModelArts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "FIRST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        limits = RequestLimits(total_s=1.0, answer_s=0.2, pause_s=0.01)
        with pytest.raises(BackendError) as caught:
            ModelArtsClient(site_of(service, endpoint=f"http://{host}"), limits=limits).show("x")

    assert caught.value.message == f"asking for job x: {host}: no answer in time"
    # A log reader left over from an earlier test may still report that its server is gone.
    reported = [message for message in caplog.messages if host in message]
    assert reported == [f"{caught.value.message}; trying again"]


# -- one job for one submit -----------------------------------------------------------------------

CREATE = f"POST /v2/{PROJECT}/training-jobs"


def creates(service: ModelArts) -> list[Seen]:
    """Return the create requests."""
    return [seen for seen in service.requests_with(CREATE) if seen.path.endswith("/training-jobs")]


def test_a_create_whose_answer_was_lost_is_not_sent_twice(
    service: ModelArts, client: ModelArtsClient
):
    service.after.append(once(CREATE, Reply(cut=True)))
    created = client.create(BODY)

    (job,) = service.jobs()
    assert (created["metadata"]["id"], "train-2345678b") == (job.id, job.name)
    assert len(creates(service)) == 1


@pytest.mark.parametrize(
    "reply", [Reply(cut=True), Reply(500, {}), Reply(503, {}, {"Retry-After": "0"})]
)
def test_a_create_that_may_have_been_lost_is_sent_again_after_a_search(
    reply: Reply, service: ModelArts, client: ModelArtsClient
):
    service.faults.append(once(CREATE, reply))
    client.create(BODY)

    assert len(service.jobs()) == 1
    assert [seen.path.rpartition("/")[2] for seen in service.seen] == [
        "training-jobs",
        "training-job-searches",
        "training-jobs",
    ]


def test_a_search_that_does_not_list_the_job_yet_creates_no_second_one(
    service: ModelArts, client: ModelArtsClient
):
    """The service refuses a second job with the same name."""
    service.after.append(once(CREATE, Reply(cut=True)))
    service.faults.append(once("training-job-searches", Reply(200, {"total": 0, "items": []})))
    created = client.create(BODY)

    assert [job.id for job in service.jobs()] == [created["metadata"]["id"]]


def test_a_refused_create_is_not_sent_again(service: ModelArts, client: ModelArtsClient):
    refusal = {"error_msg": "bad flavor.", "error_code": "ModelArts.2763", "error_solution": "x"}
    service.faults.append(once("training-jobs", Reply(400, refusal), times=9))
    with pytest.raises(errors.ServiceError) as caught:
        client.create(BODY)

    assert caught.value.message.startswith(
        "creating the job train-2345678b: bad flavor (ModelArts.2763, request "
    )
    assert "doctor" in caught.value.hint
    assert len(service.requests_with("POST")) == 1


def test_a_create_that_the_gateway_refuses_is_sent_again_at_once(
    service: ModelArts, client: ModelArtsClient
):
    """With 429 the gateway has not forwarded the request, so there is no job to search for."""
    service.faults.append(once(CREATE, Reply(429, {}), times=3))
    client.create(BODY)

    assert len(service.jobs()) == 1
    assert service.requests_with("training-job-searches") == []


@pytest.mark.parametrize("search", [None, Reply(400, {"error_msg": "no"}), Reply(cut=True)])
def test_a_create_whose_outcome_stays_unknown_is_reported_as_such(
    search: Reply | None, service: ModelArts
):
    """Otherwise the submit would lose track of a running job."""
    service.after.append(once(CREATE, Reply(cut=True), times=99))
    empty = Reply(200, {"total": 0, "items": []})
    service.faults.append(once("searches", search or empty, times=99))
    service.faults.append(once(CREATE, Reply(504, {}), times=99))
    limits = RequestLimits(total_s=0.3, pause_s=0.05)
    with pytest.raises(Unanswered):
        ModelArtsClient(site_of(service), limits=limits).create(BODY)


def test_many_creates_during_faults_make_one_job_each(service: ModelArts):
    """Eight run at once; the service drops every third response and fails every fifth request."""
    count = itertools.count(1)

    def every(number: int, reply: Reply) -> Any:
        return lambda _: reply if next(count) % number == 0 else None

    service.faults.append(every(5, Reply(503, {})))
    service.after.append(every(3, Reply(cut=True)))
    client = ModelArtsClient(site_of(service), limits=LIMITS._replace(pause_s=0.01))
    names = [f"job-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client.create, map(body, names)))

    assert sorted(job.name for job in service.jobs()) == names


# -- pages ----------------------------------------------------------------------------------------


def test_a_search_requests_pages_by_number(service: ModelArts, client: ModelArtsClient):
    """The service's offset counts pages, not jobs."""
    expected = [service.add(f"job-{number}") for number in range(120)]
    ids = [job["metadata"]["id"] for job in client.search([])]

    assert sorted(ids) == sorted(expected)
    assert [seen.json["offset"] for seen in service.requests_with("searches")] == [0, 1, 2]


def test_events_of_several_pages_come_in_order(service: ModelArts, client: ModelArtsClient):
    """A page has 100 events."""
    job = service.add("train")
    for number in range(250):
        service.database.add_event(job, str(number))

    messages = [event["message"] for event in client.events(job)]
    assert messages == ["Training job created.", *(str(number) for number in range(250))]


# -- error responses ------------------------------------------------------------------------------


def test_an_unknown_job_is_reported_as_not_found(client: ModelArtsClient):
    with pytest.raises(JobNotFound) as caught:
        client.show("0000")

    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    "body",
    [
        {"error_msg": "no", "error_code": "M.1"},
        {"errorMsg": "no", "errorCode": "M.1"},
        {"message": "no", "code": "M.1"},
        {"error": {"message": "no", "code": "M.1"}},
    ],
)
def test_an_error_of_the_service_its_gateway_and_iam_is_read(
    body: dict[str, Any], service: ModelArts, client: ModelArtsClient
):
    service.faults.append(once("GET", Reply(400, body)))
    with pytest.raises(errors.ServiceError) as caught:
        client.show("0")

    assert caught.value.message.startswith("asking for job 0: no (M.1, request ")


@pytest.mark.parametrize("body", [b"", b"<html>no</html>", b"[1]", b"null", b"\xff", b"oo\nps"])
def test_an_error_of_another_form_is_reported_in_one_line(
    body: bytes, service: ModelArts, client: ModelArtsClient
):
    service.faults.append(once("GET", Reply(400, body)))
    with pytest.raises(errors.ServiceError) as caught:
        client.show("0")

    assert caught.value.message.startswith("asking for job 0: ")
    assert "\n" not in caught.value.message


def test_an_answer_that_is_not_json_is_reported(service: ModelArts, client: ModelArtsClient):
    service.faults.append(once("GET", Reply(200, b"<html>hello</html>")))
    with pytest.raises(BackendError) as caught:
        client.show("0")

    assert caught.value.message == "asking for job 0: the answer is not JSON"


def test_a_query_with_special_characters_arrives_as_it_was_signed(
    service: ModelArts,
):
    service.images["a/b"] = ["ä +&=/%$~", "x"]
    client = ModelArtsClient(site_of(service, registry=service.endpoint))

    assert client.image_tags("a", "b", "ä +&=/%$~") == ["ä +&=/%$~"]


# -- authentication -------------------------------------------------------------------------------


def test_wrong_keys_are_reported_as_an_authentication_error(service: ModelArts):
    client = ModelArtsClient(site_of(service, keys=Keys("AK", "wrong")))
    with pytest.raises(NotAuthorised) as caught:
        client.show("0")

    assert "APIGW.0301" in caught.value.message
    assert len(service.seen) == 1


def test_the_project_is_requested_once_from_iam_if_none_is_set(service: ModelArts):
    job = service.add("train")
    client = ModelArtsClient(site_of(service, project_id=""))
    client.show(job)
    client.show(job)

    assert client.project_id() == PROJECT
    assert len(service.requests_with("/v3/projects?name=cn-north-4")) == 1


def test_a_region_without_a_project_is_reported(service: ModelArts):
    """The account has no project of that name."""
    with pytest.raises(NotAuthorised) as caught:
        ModelArtsClient(site_of(service, project_id="", region="mars-1")).show("0")

    assert caught.value.message.startswith("asking for the project of mars-1: ")


def test_a_password_is_exchanged_for_a_token_once(service: ModelArts):
    job = service.add("train")
    client = ModelArtsClient(site_of(service, keys=None, login=LOGIN, project_id=""))
    client.show(job)
    client.show(job)

    token_requests = service.requests_with("/v3/auth/tokens")
    assert len(token_requests) == 1
    assert client.project_id() == PROJECT


def test_an_expired_token_is_renewed(service: ModelArts):
    """The service refuses such a token with 401."""
    job = service.add("train")
    client = ModelArtsClient(site_of(service, keys=None, login=LOGIN))
    client.show(job)
    service.database.expire_all(time.time())

    assert client.show(job)["metadata"]["id"] == job
    assert len(service.requests_with("/v3/auth/tokens")) == 2


def test_keys_may_be_exchanged_for_a_token(service: ModelArts):
    """Requests are then not signed, and an expired token is renewed."""
    job = service.add("train")
    client = ModelArtsClient(site_of(service, wants_token=True, project_id=""))
    client.show(job)
    service.database.expire_all(time.time())
    client.show(job)

    assert client.project_id() == PROJECT
    assert len(service.requests_with("/v3/auth/tokens")) == 2
    assert not [seen for seen in service.seen if "authorization" in seen.headers]


def test_a_wrong_password_is_reported(service: ModelArts):
    login = replace(LOGIN, password="wrong")
    client = ModelArtsClient(site_of(service, keys=None, login=login))
    with pytest.raises(NotAuthorised) as caught:
        client.show("0")

    assert (
        caught.value.message
        == "asking IAM for a token: The username or password is wrong (401, request "
        + (caught.value.message.rpartition(" ")[2])
    )
    assert "wrong" not in repr(login)


def test_expired_temporary_keys_are_read_again_from_the_file(service: ModelArts, tmp_path: Path):
    job = service.add("train")
    file = tmp_path / "credentials"
    write_keys(file, service.access.agency_keys(service.access.account.owner.name))
    found_site = site.find(
        {"region": "cn-north-4", "endpoint": service.endpoint},
        {
            "HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file),
            "HUAWEICLOUD_SDK_PROJECT_ID": PROJECT,
        },
        tmp_path,
        tmp_path,
    )
    client = ModelArtsClient(found_site)
    client.show(job)
    service.database.expire_all(time.time())
    write_keys(file, service.access.agency_keys(service.access.account.owner.name))

    assert client.show(job)["metadata"]["id"] == job


def write_keys(file: Path, keys: Keys) -> None:
    """Write a credentials file in the format of Huawei's SDKs."""
    file.touch(0o600)
    file.write_text(
        f"[basic]\nak = {keys.access_key}\nsk = {keys.secret_key}\nsecurity_token = {keys.token}\n"
    )


def test_a_wrong_clock_is_noticed_and_corrected(service: ModelArts):
    """The service refuses a time that is 15 minutes off; its response contains its own time."""
    job = service.add("train")
    service.ahead_s = 3600
    client = ModelArtsClient(site_of(service))

    assert client.show(job)["metadata"]["id"] == job
    assert -3700 < client.clock_ahead_s < -3500
    assert len(service.requests_with("GET")) == 2


def test_a_clock_that_is_set_while_a_job_is_followed_is_noticed(service: ModelArts):
    """The next request is signed with the old difference, and its answer shows that it is gone."""
    job = service.add("train")
    service.ahead_s = 3600
    client = ModelArtsClient(site_of(service))
    client.show(job)
    service.ahead_s = 0

    assert client.show(job)["metadata"]["id"] == job
    assert client.clock_ahead_s == 0


# -- endpoints and credentials --------------------------------------------------------------------

ENVIRON = {"HUAWEICLOUD_SDK_AK": "AK", "HUAWEICLOUD_SDK_SK": "SK", "HW_REGION_NAME": "cn-north-4"}


def test_the_endpoints_follow_from_the_region(tmp_path: Path):
    """These are the public endpoints of the region."""
    site_now = site.find({"bucket": "mine/jobs"}, ENVIRON, tmp_path, tmp_path)

    assert site_now.endpoint == "https://modelarts.cn-north-4.myhuaweicloud.com"
    assert site_now.iam_endpoint == "https://iam.cn-north-4.myhuaweicloud.com"
    assert site_now.store_uri == "obs://mine/jobs?region=cn-north-4"
    assert site_now.keys == Keys("AK", "SK")


def test_the_section_takes_precedence_over_the_environment(tmp_path: Path):
    options = {"region": "eu-west-101", "project_id": "p"}
    site_now = site.find(
        options, {**ENVIRON, "HUAWEICLOUD_SDK_PROJECT_ID": "q"}, tmp_path, tmp_path
    )

    assert site_now.endpoint == "https://modelarts.eu-west-101.myhuaweicloud.eu"
    assert site_now.project_id == "p"


def test_the_region_follows_from_the_endpoint(tmp_path: Path):
    environ = {
        "HUAWEICLOUD_SDK_AK": "AK",
        "HUAWEICLOUD_SDK_SK": "SK",
        "CLOUDJOB_MODELARTS_ENDPOINT": "modelarts.ap-southeast-1.myhuaweicloud.com",
    }
    site_now = site.find({}, environ, tmp_path, tmp_path)

    assert site_now.region == "ap-southeast-1"


def test_a_file_that_others_may_read_is_refused(tmp_path: Path):
    """Only its owner may have access to the vendor's credentials file."""
    file = tmp_path / ".huaweicloud" / "credentials"
    file.parent.mkdir()
    write_keys(file, KEYS)
    environ = {"HW_REGION_NAME": "cn-north-4"}

    assert site.find({}, environ, tmp_path, tmp_path).keys == KEYS
    file.chmod(0o640)
    with pytest.raises(UsageError) as caught:
        site.find({}, environ, tmp_path, tmp_path)
    assert caught.value.hint == f"chmod 600 {file}"


@pytest.mark.parametrize("text", ["", "[basic]\n", "[other]\nak=1\n", "not ini", "\x00"])
def test_a_credentials_file_without_keys_is_refused_with_a_hint(text: str, tmp_path: Path):
    """The user gets an error message instead of a traceback."""
    file = tmp_path / "credentials"
    file.touch(0o600)
    file.write_text(text)
    environ = {"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file), "HW_REGION_NAME": "cn-north-4"}
    with pytest.raises((UsageError, NotAuthorised)) as caught:
        site.find({}, environ, tmp_path, tmp_path)

    assert caught.value.hint


def test_without_credentials_the_hint_names_the_emulator(tmp_path: Path):
    with pytest.raises(NotAuthorised) as caught:
        site.find({}, {}, tmp_path, tmp_path)

    assert "cloudjob emulator up" in caught.value.hint


EMULATOR = {
    "endpoint": "http://127.0.0.1:7000",
    "iam_endpoint": "http://127.0.0.1:7001",
    "s3_endpoint": "http://127.0.0.1:7002",
    "access_key": "EMU",
    "secret_key": "emulated",
    "project_id": "p",
    "region": "emulator-1",
}


@pytest.fixture
def emulator(tmp_path: Path) -> Path:
    """A state folder with the address file of an emulator."""
    file = tmp_path / site.EMULATOR_FILE
    file.parent.mkdir()
    file.write_text(json.dumps(EMULATOR))
    return tmp_path


def test_an_emulator_is_used_if_nothing_else_is_configured(emulator: Path):
    site_now = site.find({}, {}, emulator, emulator)

    assert site_now.endpoint == "http://127.0.0.1:7000"
    assert site_now.is_local
    assert site_now.keys == Keys("EMU", "emulated")
    assert site_now.store_uri.startswith("obs://cloudjob?endpoint=http://127.0.0.1:7002")
    assert site_now.default_flavor


def test_credentials_take_precedence_over_the_emulator_unless_it_is_named(emulator: Path):
    assert not site.find({}, ENVIRON, emulator, emulator).is_local
    site_now = site.find({"endpoint": "emulator"}, {"HW_REGION_NAME": "x"}, emulator, emulator)
    assert site_now.is_local


def test_a_damaged_address_file_of_the_emulator_is_ignored(emulator: Path):
    (emulator / site.EMULATOR_FILE).write_text("{}")
    with pytest.raises(NotAuthorised):
        site.find({}, {}, emulator, emulator)


def test_temporary_keys_are_not_exchanged_for_a_token(tmp_path: Path):
    """IAM issues tokens for permanent keys only."""
    environ = {**ENVIRON, "HUAWEICLOUD_SDK_SECURITY_TOKEN": "t"}
    assert site.find({"auth": "token"}, ENVIRON, tmp_path, tmp_path).wants_token
    assert not site.find({}, ENVIRON, tmp_path, tmp_path).wants_token
    with pytest.raises(UsageError) as caught:
        site.find({"auth": "token"}, environ, tmp_path, tmp_path)

    assert caught.value.message == "modelarts.auth: token: IAM issues none for temporary keys"
