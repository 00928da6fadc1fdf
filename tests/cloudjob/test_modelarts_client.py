"""The client against a real HTTP server that does what services do to clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.modelarts import refusals, site
from cloudjob.backends.modelarts.client import Client, Unanswered
from cloudjob.backends.modelarts.site import Login, Site
from cloudjob.backends.modelarts.tries import Patience
from cloudjob.errors import BackendError, JobNotFound, NotAuthorised, UsageError
from jobentry.contract.sigv4 import Keys
from tests.support.fake_modelarts import KEYS, PROJECT, FakeModelArts, Reply, Seen, once, serve

BODY = {
    "kind": "job",
    "metadata": {"name": "train-2345678b"},
    "algorithm": {},
    "spec": {"resource": {"node_count": 1}},
}


class Pauses(list[float]):
    """Takes the place of sleeping, and remembers for how long."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def service() -> Iterator[FakeModelArts]:
    """A small ModelArts."""
    yield from serve(FakeModelArts())


@pytest.fixture
def pauses() -> Pauses:
    """What the client has waited."""
    return Pauses()


@pytest.fixture
def client(service: FakeModelArts, pauses: Pauses) -> Client:
    """A client that does not really wait."""
    return Client(site_of(service), pause=pauses)


def site_of(service: FakeModelArts, **values: Any) -> Site:
    """Return where the service is."""
    found = Site(service.endpoint, service.endpoint, "cn-north-4", PROJECT, KEYS)
    return replace(found, **values)


# -- what may pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int, service: FakeModelArts, client: Client):
    """Too many requests, and faults of the service."""
    job = service.add("train")
    service.faults.append(once("GET", Reply(status, {}), times=3))

    assert client.show(job)["metadata"]["id"] == job
    assert len(service.asked("GET")) == 4


def test_the_pause_is_the_one_that_the_service_asks_for(
    service: FakeModelArts, client: Client, pauses: Pauses
):
    """In seconds, or as a date."""
    job = service.add("train")
    service.faults.append(once("GET", Reply(429, {}, {"Retry-After": "7"})))
    client.show(job)
    from email.utils import formatdate

    moment = formatdate(time.time() + 30, usegmt=True)
    service.faults.append(once("GET", Reply(503, {}, {"Retry-After": moment})))
    client.show(job)

    assert pauses[0] == 7.0
    assert 20 < pauses[1] <= 30


def test_pauses_grow_and_are_never_the_same(service: FakeModelArts, client: Client, pauses: Pauses):
    """Those that were refused together should not come back together."""
    job = service.add("train")
    service.faults.append(once("GET", Reply(500, {}), times=6))
    client.show(job)

    assert [0.5 * 2**n / 2 <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses[:5])]
    assert all(0.5 * 2**n / 2 <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses[:5]))
    assert all(pause <= 10 for pause in pauses)
    assert len(set(pauses)) == 6


def test_a_wait_longer_than_our_patience_is_not_begun(
    service: FakeModelArts, client: Client, pauses: Pauses
):
    """The refusal is told at once."""
    job = service.add("train")
    service.faults.append(once("GET", Reply(429, {}, {"Retry-After": "3600"}), times=99))
    with pytest.raises(refusals.ServiceError) as caught:
        client.show(job)

    assert caught.value.refusal.status == 429
    assert "too many requests" in caught.value.hint
    assert pauses == []


def test_a_connection_that_breaks_is_made_again(service: FakeModelArts, client: Client):
    """In mid-answer, or before one."""
    job = service.add("train")
    service.after.append(once("GET", Reply(cut=True), times=2))

    assert client.show(job)["metadata"]["id"] == job


def test_an_endpoint_where_nobody_listens_is_told_soon(service: FakeModelArts, pauses: Pauses):
    """Not after minutes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{found.getsockname()[1]}"
    with pytest.raises(BackendError) as caught:
        Client(site_of(service, endpoint=nowhere), pause=pauses).show("x")

    assert "nobody is there" in caught.value.message
    assert sum(pauses) < 10


def test_a_server_that_accepts_and_says_nothing_does_not_hold_us_for_ever(
    service: FakeModelArts,
):
    """An answer may take so long, and no longer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        patience = Patience(total_s=0.5, first_s=0.1, answer_s=0.2)
        with pytest.raises(BackendError) as caught:
            Client(site_of(service, endpoint=endpoint), patience=patience).show("x")

    assert "no answer in time" in caught.value.message


# -- one create for one submit --------------------------------------------------------------------


def test_a_create_whose_answer_got_lost_is_not_sent_twice(service: FakeModelArts, client: Client):
    """The job is there; it is found by its name."""
    service.after.append(once("POST /v2/" + PROJECT + "/training-jobs", Reply(cut=True)))
    made = client.create(BODY)

    assert [job["metadata"]["name"] for job in service.jobs.values()] == ["train-2345678b"]
    assert made["metadata"]["id"] in service.jobs
    assert len(service.asked(f"{PROJECT}/training-jobs")) == 1


@pytest.mark.parametrize("reply", [Reply(cut=True), Reply(500, {}), Reply(504, {})])
def test_a_create_that_never_arrived_is_sent_again(
    reply: Reply, service: FakeModelArts, client: Client
):
    """When no job of its name is there."""
    service.faults.append(once(f"{PROJECT}/training-jobs", reply))
    client.create(BODY)

    assert len(service.jobs) == 1
    assert len(service.asked("POST /v2/" + PROJECT + "/training-jobs")) == 2
    assert len(service.asked("training-job-searches")) == 1


def test_a_lookup_that_comes_too_early_does_no_harm(service: FakeModelArts, client: Client):
    """The list may not have the job yet; the service takes no second one of its name."""
    service.after.append(once(f"{PROJECT}/training-jobs", Reply(cut=True)))
    service.faults.append(once("training-job-searches", Reply(200, {"total": 0, "items": []})))
    made = client.create(BODY)

    assert len(service.jobs) == 1
    assert made["metadata"]["id"] in service.jobs


def test_a_refused_create_is_refused(service: FakeModelArts, client: Client):
    """And not sent again; what the service advises is passed on."""
    said = {"error_msg": "bad flavor.", "error_code": "ModelArts.2763", "error_solution": "x"}
    service.faults.append(once("training-jobs", Reply(400, said), times=9))
    with pytest.raises(refusals.ServiceError) as caught:
        client.create(BODY)

    assert caught.value.message.startswith(
        "creating the job train-2345678b: bad flavor (ModelArts.2763, request "
    )
    assert "doctor" in caught.value.hint
    assert len(service.asked("POST")) == 1


def test_a_create_under_429_is_sent_until_it_is_let_in(service: FakeModelArts, client: Client):
    """The gateway has not let it through, so nobody has to look for it."""
    service.faults.append(once(f"{PROJECT}/training-jobs", Reply(429, {}), times=3))
    client.create(BODY)

    assert len(service.jobs) == 1
    assert service.asked("training-job-searches") == []


def test_a_create_that_stays_unanswered_says_so(service: FakeModelArts, pauses: Pauses):
    """Nobody knows then whether the job is there."""
    service.faults.append(once(f"{PROJECT}/training-jobs", Reply(cut=True), times=99))
    patience = Patience(total_s=0.3, first_s=0.05)
    with pytest.raises(Unanswered):
        Client(site_of(service), patience=patience).create(BODY)


def test_many_creates_under_faults_make_one_job_each(service: FakeModelArts):
    """Eight at once, on a service that drops every third answer and refuses every fifth request."""
    count = [0]
    lock = threading.Lock()

    def every(number: int, reply: Reply) -> Any:
        def fault(_seen: Seen) -> Reply | None:
            with lock:
                count[0] += 1
                return reply if count[0] % number == 0 else None

        return fault

    service.faults.append(every(5, Reply(503, {})))
    service.after.append(every(3, Reply(cut=True)))
    client = Client(site_of(service), patience=Patience(first_s=0.01))

    def create(number: int) -> None:
        client.create({**BODY, "metadata": {"name": f"job-{number}"}})

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(job["metadata"]["name"] for job in service.jobs.values()) == [
        f"job-{number}" for number in range(8)
    ]


# -- pages ----------------------------------------------------------------------------------------


def test_pages_are_turned_by_their_number(service: FakeModelArts, client: Client):
    """What the service calls the offset is no number of jobs."""
    wanted = [service.add(f"job-{number}") for number in range(120)]
    found = [job["metadata"]["id"] for job in client.search([])]

    assert sorted(found) == sorted(wanted)
    assert [seen.json["offset"] for seen in service.asked("searches")] == [0, 1, 2]


def test_events_of_several_pages_come_in_order(service: FakeModelArts, client: Client):
    """A hundred at a time."""
    service.events = [{"message": str(number)} for number in range(250)]

    assert [event["message"] for event in client.events("0")] == [str(n) for n in range(250)]


# -- what the service says ------------------------------------------------------------------------


def test_not_found_is_a_400_of_its_own_code(client: Client):
    """And becomes the error that every backend has for it."""
    with pytest.raises(JobNotFound) as caught:
        client.show("0000")

    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    "body",
    [
        {"error_msg": "no", "error_code": "ModelArts.1"},
        {"errorMsg": "no", "errorCode": "ModelArts.1"},
        {"message": "no", "code": "ModelArts.1"},
        {"error": {"message": "no", "code": "ModelArts.1"}},
    ],
)
def test_every_form_of_an_error_is_read(body: dict[str, Any]):
    """The service, its gateway and IAM each have one."""
    found = refusals.read(400, json.dumps(body).encode(), "r")

    assert (found.code, found.message) == ("ModelArts.1", "no")


@pytest.mark.parametrize("body", [b"", b"<html>no</html>", b"[1]", b"null", b"\xff", b"oops"])
def test_an_error_without_a_form_is_an_error(body: bytes):
    """A proxy answers with a page, a gateway with nothing."""
    found = refusals.error("doing", refusals.read(502, body, ""))

    assert found.message.startswith("doing: ")
    assert "\n" not in found.message


def test_an_answer_that_is_no_json_is_told(service: FakeModelArts, client: Client):
    """Somebody else listens there."""
    service.faults.append(once("GET", Reply(200, b"<html>hello</html>")))
    with pytest.raises(BackendError) as caught:
        client.show("0")

    assert caught.value.message == "asking for job 0: the answer is no JSON"


# -- who we are -----------------------------------------------------------------------------------


def test_wrong_keys_are_told_as_such(service: FakeModelArts):
    """Not as a missing job."""
    wrong = Client(site_of(service, keys=Keys("AK", "wrong")))
    with pytest.raises(NotAuthorised) as caught:
        wrong.show("0")

    assert "APIGW.0301" in caught.value.message
    assert len(service.seen) == 1


def test_the_project_is_asked_for_where_nobody_says_it(service: FakeModelArts):
    """By the name of the region, once."""
    job = service.add("train")
    client = Client(site_of(service, project_id=""))
    client.show(job)
    client.show(job)

    assert client.project_id() == PROJECT
    assert len(service.asked("/v3/projects?name=cn-north-4")) == 1


def test_a_region_without_a_project_is_told(service: FakeModelArts):
    """The account has none of that name."""
    with pytest.raises(NotAuthorised) as caught:
        Client(site_of(service, project_id="", region="mars-1")).show("0")

    assert caught.value.message.startswith("asking for the project of mars-1: ")


def test_a_password_gets_a_token(service: FakeModelArts):
    """Which says for which project it is, and is used until it is over."""
    job = service.add("train")
    login = Login("me", "my-domain", "right")
    client = Client(site_of(service, keys=None, login=login, project_id=""))
    client.show(job)
    client.show(job)

    asked = service.asked("/v3/auth/tokens")
    assert len(asked) == 1
    assert asked[0].json["auth"]["identity"]["password"]["user"]["domain"] == {"name": "my-domain"}
    assert client.project_id() == PROJECT


def test_a_token_that_is_over_in_mid_run_is_renewed(service: FakeModelArts):
    """The service refuses it with 401."""
    job = service.add("train")
    client = Client(site_of(service, keys=None, login=Login("me", "d", "right")))
    client.show(job)
    service.token = "another"

    assert client.show(job)["metadata"]["id"] == job
    assert len(service.asked("/v3/auth/tokens")) == 2


def test_keys_may_be_exchanged_for_a_token(service: FakeModelArts):
    """Then no request is signed; a token that is over is renewed."""
    job = service.add("train")
    client = Client(site_of(service, wants_token=True, project_id=""))
    client.show(job)
    service.token = "another"
    client.show(job)

    assert client.project_id() == PROJECT
    assert len(service.asked("/v3/auth/tokens")) == 2
    assert not [seen for seen in service.seen if "authorization" in seen.headers]


def test_a_wrong_password_is_told(service: FakeModelArts):
    """In IAM's words."""
    client = Client(site_of(service, keys=None, login=Login("me", "d", "wrong")))
    with pytest.raises(NotAuthorised) as caught:
        client.show("0")

    assert (
        caught.value.message
        == "asking IAM for a token: The password is wrong (401, request "
        + (caught.value.message.rpartition(" ")[2])
    )
    assert "wrong" not in repr(Login("me", "d", "wrong"))


def test_temporary_keys_are_read_again_when_they_are_over(service: FakeModelArts, tmp_path: Path):
    """Somebody writes fresh ones to the file."""
    job = service.add("train")
    file = tmp_path / "credentials"
    write_keys(file, KEYS._replace(token="old"))
    service.keys = KEYS._replace(token="old")
    found = site.find(
        {"region": "cn-north-4", "endpoint": service.endpoint},
        {
            "HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file),
            "HUAWEICLOUD_SDK_PROJECT_ID": PROJECT,
        },
        tmp_path,
        tmp_path,
    )
    client = Client(found)
    client.show(job)
    service.keys = KEYS._replace(token="new")
    write_keys(file, service.keys)

    assert client.show(job)["metadata"]["id"] == job


def write_keys(file: Path, keys: Keys) -> None:
    """Write what Huawei's SDKs read."""
    file.touch(0o600)
    file.write_text(
        f"[basic]\nak = {keys.access_key}\nsk = {keys.secret_key}\nsecurity_token = {keys.token}\n"
    )


def test_a_clock_that_is_wrong_is_noticed_and_mended(service: FakeModelArts):
    """The service refuses what is 15 minutes off, and says what its own clock shows."""
    job = service.add("train")
    service.ahead_s = 3600
    client = Client(site_of(service))

    assert client.show(job)["metadata"]["id"] == job
    assert -3700 < client.clock_ahead_s < -3500
    assert len(service.asked("GET")) == 2


# -- where the service is -------------------------------------------------------------------------

ENVIRON = {"HUAWEICLOUD_SDK_AK": "AK", "HUAWEICLOUD_SDK_SK": "SK", "HW_REGION_NAME": "cn-north-4"}


def test_a_region_says_where_everything_is(tmp_path: Path):
    """The public addresses of a region."""
    found = site.find({"bucket": "mine/jobs"}, ENVIRON, tmp_path, tmp_path)

    assert found.endpoint == "https://modelarts.cn-north-4.myhuaweicloud.com"
    assert found.iam_endpoint == "https://iam.cn-north-4.myhuaweicloud.com"
    assert found.store_uri == "obs://mine/jobs?region=cn-north-4"
    assert found.keys == Keys("AK", "SK")


def test_the_section_wins_over_the_environment(tmp_path: Path):
    """And what it does not say comes from there."""
    options = {"region": "eu-west-101", "project_id": "p"}
    found = site.find(options, {**ENVIRON, "HUAWEICLOUD_SDK_PROJECT_ID": "q"}, tmp_path, tmp_path)

    assert found.endpoint == "https://modelarts.eu-west-101.myhuaweicloud.eu"
    assert found.project_id == "p"


def test_an_endpoint_says_its_region(tmp_path: Path):
    """As the console shows it."""
    environ = {
        "HUAWEICLOUD_SDK_AK": "AK",
        "HUAWEICLOUD_SDK_SK": "SK",
        "CLOUDJOB_MODELARTS_ENDPOINT": "modelarts.ap-southeast-1.myhuaweicloud.com",
    }
    found = site.find({}, environ, tmp_path, tmp_path)

    assert found.region == "ap-southeast-1"


def test_a_file_that_others_may_read_is_refused(tmp_path: Path):
    """The vendor's own file must be for its owner alone."""
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
def test_a_file_that_says_nothing_is_told(text: str, tmp_path: Path):
    """One line, and no traceback."""
    file = tmp_path / "credentials"
    file.touch(0o600)
    file.write_text(text)
    environ = {"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file), "HW_REGION_NAME": "cn-north-4"}
    with pytest.raises((UsageError, NotAuthorised)) as caught:
        site.find({}, environ, tmp_path, tmp_path)

    assert caught.value.hint


def test_nobody_is_told_how_to_begin(tmp_path: Path):
    """Without an account there is the emulator."""
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
    """The folder of a state with an emulator in it."""
    file = tmp_path / site.EMULATOR_FILE
    file.parent.mkdir()
    file.write_text(json.dumps(EMULATOR))
    return tmp_path


def test_an_emulator_is_found_where_nothing_else_is_said(emulator: Path):
    """So that a first job needs no account and no configuration."""
    found = site.find({}, {}, emulator, emulator)

    assert found.endpoint == "http://127.0.0.1:7000"
    assert found.is_local
    assert found.keys == Keys("EMU", "emulated")
    assert found.store_uri.startswith("obs://cloudjob?endpoint=http://127.0.0.1:7002")
    assert found.default_flavor


def test_an_account_wins_over_the_emulator_unless_it_is_named(emulator: Path):
    """Nobody sends a job to the wrong place by an emulator that was forgotten, or by his keys."""
    assert not site.find({}, ENVIRON, emulator, emulator).is_local
    named = site.find({"endpoint": "emulator"}, {"HW_REGION_NAME": "x"}, emulator, emulator)
    assert named.is_local


def test_a_broken_note_of_an_emulator_is_no_emulator(emulator: Path):
    """As though there were none."""
    (emulator / site.EMULATOR_FILE).write_text("{}")
    with pytest.raises(NotAuthorised):
        site.find({}, {}, emulator, emulator)


def test_temporary_keys_get_no_token(tmp_path: Path):
    """IAM gives one for lasting keys only; a user's password needs no such word."""
    environ = {**ENVIRON, "HUAWEICLOUD_SDK_SECURITY_TOKEN": "t"}
    assert site.find({"auth": "token"}, ENVIRON, tmp_path, tmp_path).wants_token
    assert not site.find({}, ENVIRON, tmp_path, tmp_path).wants_token
    with pytest.raises(UsageError) as caught:
        site.find({"auth": "token"}, environ, tmp_path, tmp_path)

    assert caught.value.message == "modelarts.auth: token: IAM gives none for temporary keys"
