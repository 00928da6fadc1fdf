"""Authentication: signatures, clock skew, tokens, temporary keys, projects and rate limits."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from cloudjob.emulator import daemon, settings, state
from cloudjob.emulator.auth import Gateway
from cloudjob.emulator.database import Database
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.request import Request
from tests.support.emulator import DATE_FORMAT, Api, await_true, running, s3_client

PATH = "{p}/training-job-flavors"
PLAIN = {"Authorization": ""}


def date(**offset: float) -> str:
    """Return the date for a signature, at this offset from now."""
    return (datetime.now(timezone.utc) + timedelta(**offset)).strftime(DATE_FORMAT)


def error_of(response: tuple[int, Any, Any]) -> tuple[int, str, str]:
    """Return the HTTP status, the error code and the error message."""
    status, values, headers = response
    assert values["request_id"] == headers["x-request-id"]
    return status, values["error_code"], values["error_msg"]


def password_request(api: Api, **changes: Any) -> dict[str, Any]:
    """Return the body of a token request with a password."""
    address = api.address
    user = {
        "name": address.user,
        "password": address.password,
        "domain": {"name": address.domain},
        **changes,
    }
    return {
        "auth": {
            "identity": {"methods": ["password"], "password": {"user": user}},
            "scope": {"project": {"name": address.region}},
        }
    }


def token(api: Api) -> str:
    """Request a token with the password, and return it."""
    status, values, headers = api.ask(
        "POST", "/v3/auth/tokens", password_request(api), headers={"Authorization": "none"}
    )
    assert status == 201
    assert values["token"]["project"]["id"] == api.address.project_id
    return headers["x-subject-token"]


def test_a_signed_request_is_answered_with_a_request_id(api: Api):
    status, _, headers = api.ask("GET", PATH)

    assert status == 200
    assert len(headers["x-request-id"]) == 32


def test_a_request_without_token_or_signature_is_refused(api: Api):
    status, code, message = error_of(api.ask("GET", PATH, headers=PLAIN))

    assert (status, code) == (401, "APIGW.0301")
    assert "x-auth-token not found" in message


def test_more_than_five_wrong_signatures_lock_the_key_for_a_while(api: Api):
    for _ in range(6):
        status, code, message = error_of(api.ask("GET", PATH, secret="wrong"))
        assert (status, code) == (401, "APIGW.0301")
        assert "verify aksk signature fail" in message
    _, _, message = error_of(api.ask("GET", PATH))
    assert "AK access failed to reach the limit" in message
    await_true(lambda: api.ask("GET", PATH)[0] == 200)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "PUT"},
        {"path": "{p}/training-job-engines?a=1&b=%C3%BC"},
        {"path": "{p}/training-quotas"},
        {"body": b'{"name": "x"}'},
        {"headers": {"X-Project-Id": "other"}},
        {"headers": {"X-Sdk-Content-Sha256": "0" * 64}},
    ],
    ids=str,
)
def test_a_request_that_was_changed_after_it_was_signed_is_refused(
    api: Api, changes: dict[str, Any]
):
    target = "{p}/training-quotas?a=1&b=%C3%BC"
    host = api.address.endpoint.removeprefix("http://")
    signed = {"Host": host, "Content-Type": "application/json", "X-Project-Id": "p"}
    signed = api.signed("GET", api.target(target), b"{}", signed)
    request: dict[str, Any] = {"method": "GET", "path": target, "body": b"{}", **changes}
    request["headers"] = {**signed, **request.get("headers", {})}

    assert "verify aksk signature fail" in error_of(api.ask(**request))[2]
    daemon.clear_faults(api.home)
    await_true(lambda: api.ask("GET", PATH)[0] == 200)


@pytest.mark.parametrize(
    "authorization",
    ["Bearer x", "SDK-HMAC-SHA256 Access=a", "V11-HMAC-SHA256 Credential=a, Signature=0"],
)
def test_an_authorization_of_another_kind_is_refused(api: Api, authorization: str):
    answer = api.ask("GET", PATH, headers={"Authorization": authorization})
    assert "signature header is not in the right form" in error_of(answer)[2]


def test_an_unknown_access_key_is_refused_by_name(api: Api):
    status, code, message = error_of(api.ask("GET", PATH, access="NOBODY"))

    assert (status, code) == (401, "APIGW.0301")
    assert "Get secretKey failed,ak:NOBODY,err:ak not exist" in message


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_clock_more_than_fifteen_minutes_off_is_refused(api: Api, minutes: int):
    status, code, message = error_of(api.ask("GET", PATH, date=date(minutes=minutes)))

    assert (status, code) == (401, "APIGW.0301")
    assert "signature expired" in message


@pytest.mark.parametrize("minutes", [-14, 14])
def test_a_clock_less_than_fifteen_minutes_off_is_accepted(api: Api, minutes: int):
    assert api.ask("GET", PATH, date=date(minutes=minutes))[0] == 200


def test_a_token_is_accepted_until_it_expires(api: Api):
    headers_token = token(api)

    assert "decrypt token fail" in error_of(api.ask("GET", PATH, headers={"X-Auth-Token": "x"}))[2]
    assert api.ask("GET", PATH, headers={"X-Auth-Token": headers_token})[0] == 200
    api.fault("expire-tokens")
    status, code, message = error_of(api.ask("GET", PATH, headers={"X-Auth-Token": headers_token}))
    assert (status, code) == (401, "APIGW.0301")
    assert "token expires" in message


def test_an_access_key_is_exchanged_for_a_token(api: Api):
    address = api.address
    identity = {
        "methods": ["hw_ak_sk"],
        "hw_ak_sk": {"access": {"key": address.access_key}, "secret": {"key": address.secret_key}},
    }
    status, _, headers = api.ask(
        "POST", "/v3/auth/tokens", {"auth": {"identity": identity}}, headers=PLAIN
    )

    assert status == 201
    assert api.ask("GET", PATH, headers={"X-Auth-Token": headers["x-subject-token"]})[0] == 200


@pytest.mark.parametrize(
    "changes", [{"password": "wrong"}, {"name": "nobody"}, {"domain": {"name": "x"}}], ids=str
)
def test_wrong_credentials_get_no_token(api: Api, changes: dict[str, Any]):
    status, values, _ = api.ask(
        "POST", "/v3/auth/tokens", password_request(api, **changes), headers=PLAIN
    )

    assert (status, values["error"]["code"]) == (401, 401)


def test_a_temporary_key_signs_with_its_security_token_until_it_expires(api: Api):
    body = {"auth": {"identity": {"methods": ["token"], "token": {"duration_seconds": 900}}}}
    status, values, _ = api.ask(
        "POST",
        "/v3.0/OS-CREDENTIAL/securitytokens",
        body,
        headers={"X-Auth-Token": token(api)},
    )
    key = values["credential"]
    credentials = {"access": key["access"], "secret": key["secret"]}
    with_token = {"X-Security-Token": key["securitytoken"]}

    assert status == 201
    assert api.ask("GET", PATH, headers=with_token, **credentials)[0] == 200
    assert api.ask("GET", PATH, **credentials)[0] == 401
    api.fault("expire-tokens")
    assert api.ask("GET", PATH, headers=with_token, **credentials)[0] == 401


def test_another_project_is_refused_in_path_and_header(api: Api):
    status, values, _ = api.ask("GET", "/v2/other/training-job-flavors")
    assert (status, values["error_code"]) == (404, "ModelArts.2786")
    status, values, _ = api.ask("GET", PATH, headers={"X-Project-Id": "other"})
    assert (status, values["error_code"]) == (400, "ModelArts.0210")


def test_a_user_may_do_what_the_settings_allow(api: Api, s3: Any):
    user = api.address.users["reader"]
    credentials = {"access": user["access_key"], "secret": user["secret_key"]}
    job = api.create("true")
    path = f"{{p}}/training-jobs/{job}"

    def refused(method: str, path: str, body: Any = None) -> Any:
        status, values, _ = api.ask(method, path, body, **credentials)
        return status, values["error_code"], values["error_msg"].split("(")[-1].split(")")[0]

    assert api.ask("GET", path, **credentials)[0] == 200
    assert api.ask("POST", "{p}/training-job-searches", {}, **credentials)[0] == 200
    forbidden = (403, "ModelArts.0108")
    assert refused("POST", "{p}/training-jobs", api.body("true")) == (
        *forbidden,
        "modelarts:trainJob:create",
    )
    assert refused("PUT", path, {}) == (*forbidden, "modelarts:trainJob:update")
    assert refused("DELETE", path) == (*forbidden, "modelarts:trainJob:delete")
    s3.put_object(Bucket="data", Key="read-only", Body=b"x")
    guest = s3_client(api.address, user["access_key"], user["secret_key"])
    assert guest.get_object(Bucket="data", Key="read-only")["Body"].read() == b"x"
    with pytest.raises(ClientError, match="AccessDenied"):
        guest.put_object(Bucket="data", Key="read-only", Body=b"y")


def test_a_token_is_that_of_its_user_and_its_project(api: Api):
    reader = {"name": "reader", "password": api.address.users["reader"]["password"]}
    status, values, headers = api.ask(
        "POST", "/v3/auth/tokens", password_request(api, **reader), headers=PLAIN
    )
    user_headers = {"X-Auth-Token": headers["x-subject-token"]}
    team = api.address.projects["emulator-1_team"]

    assert (status, values["token"]["user"]["name"]) == (201, "reader")
    assert api.ask("GET", PATH, headers=user_headers)[0] == 200
    assert api.ask("POST", "{p}/training-jobs", {}, headers=user_headers)[0] == 403
    status, values, _ = api.ask("GET", f"/v2/{team}/training-job-flavors", headers=user_headers)
    assert (status, values["error_code"]) == (404, "ModelArts.2786")


def test_a_job_of_a_user_whom_the_settings_no_longer_have_gets_no_access(tmp_path: Path):
    no_users = settings.load(None)
    account = state.account(tmp_path, no_users)
    database = Database(tmp_path / "state.db")
    access = Gateway(account, no_users, database, time.time)
    key = access.agency_keys("former")
    header = f"SDK-HMAC-SHA256 Access={key.access_key}, SignedHeaders=x-sdk-date, Signature="
    headers = {"authorization": header + "0" * 64, "x-security-token": key.token}
    headers["x-sdk-date"] = date()
    with pytest.raises(ServiceRefusal, match="ak not exist"):
        access.check(Request("GET", "/", headers, b"", "1", {}))
    database.close()


def test_a_project_has_its_own_jobs(api: Api):
    team = f"/v2/{api.address.projects['emulator-1_team']}"
    body = api.body("echo $ACCESS_KEY_ID; test -n $SECURITY_TOKEN")
    job = api.ok("POST", f"{team}/training-jobs", body)["metadata"]["id"]
    show = f"{team}/training-jobs/{job}"
    await_true(lambda: api.ok("GET", show)["status"]["phase"] == "Completed")

    assert api.ok("POST", f"{team}/training-job-searches", {})["total"] == 1
    log = api.ok("GET", f"{show}/tasks/worker-0/logs/preview")["content"]
    assert re.search("^HST[0-9A-F]{17}$", log, re.MULTILINE)
    assert api.ask("GET", f"{{p}}/training-jobs/{job}")[1]["error_code"] == "ModelArts.2775"
    # The names of jobs are unique only within a project.
    assert api.ask("POST", "{p}/training-jobs", body)[0] == 201


def test_status_and_faults_know_the_jobs_of_all_projects(api: Api):
    team = f"/v2/{api.address.projects['emulator-1_team']}"
    before = daemon.status(api.home)["jobs"]
    job = api.ok("POST", f"{team}/training-jobs", api.body("sleep 60"))["metadata"]["id"]
    show = f"{team}/training-jobs/{job}"
    await_true(lambda: api.ok("GET", show)["status"]["phase"] == "Running")

    emulator_status = daemon.status(api.home)
    assert emulator_status["jobs"] == before + 1
    assert emulator_status["unfinished"]["Running"] >= 1
    assert daemon.jobs(api.home)["jobs"][0]["id"] == job
    assert api.fault("lose-node", job=job)["job"] == job
    await_true(lambda: api.ok("GET", show)["status"]["phase"] == "Failed")


def test_without_an_authorization_no_job_can_be_created(api: Api):
    path = "{p}/authorizations"
    assert api.ok("GET", path)["auth"][0]["content"] == "modelarts_agency"
    api.ok("DELETE", f"{path}?user_id=all-users")
    try:
        status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("true"))
        assert (status, values["error_code"]) == (403, "ModelArts.2785")
        assert api.ask("DELETE", path)[1]["error_code"] == "ModelArts.0429"
    finally:
        api.ok("POST", path, {"user_id": "all-users", "type": "agency", "content": "a"})
    assert api.ask("POST", path, {})[1]["error_code"] == "ModelArts.0424"
    assert api.ask("POST", "{p}/training-jobs", api.body("true"))[0] == 201


def test_sdks_find_project_and_domain_with_a_signature(api: Api):
    projects = api.ok("GET", f"/v3/projects?name={api.address.region}")["projects"]
    assert [item["id"] for item in projects] == [api.address.project_id]
    assert api.ok("GET", "/v3/projects?name=other")["projects"] == []
    assert len(api.ok("GET", "/v3/auth/domains")["domains"]) == 1
    assert api.ask("GET", "/v3/projects", headers=PLAIN)[0] == 401


def test_an_api_that_does_not_exist_is_refused_by_the_gateway(api: Api):
    status, code, _ = error_of(api.ask("GET", "{p}/nothing"))

    assert (status, code) == (404, "APIGW.0101")


def test_too_many_requests_in_a_minute_are_refused_with_429_and_a_retry_time():
    with running("engine: process\nrequests_per_min: 5\n") as api:
        if time.monotonic() % 60 > 50:
            time.sleep(11)  # all requests must be counted in the same minute
        answers = [api.ask("GET", PATH) for _ in range(7)]

    assert [status for status, _, _ in answers] == [200] * 5 + [429] * 2
    assert answers[-1][1]["error_code"] == "APIGW.0308"
    assert answers[-1][2]["retry-after"] == "1"


def test_the_keys_of_the_account_are_refused_for_control_requests(api: Api):
    assert api.ask("GET", "/emulator/faults")[0] == 401
    assert api.ask("POST", "/emulator/faults", {"kind": "error"})[0] == 401
    assert daemon.faults(api.home) == []
