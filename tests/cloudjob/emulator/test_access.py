"""Who is let in: signatures, clocks, tokens, temporary keys, the project, how often."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from cloudjob.emulator import daemon
from tests.support.emulator import DATE_FORMAT, Api, await_true, running

PATH = "{p}/training-job-flavors"
PLAIN = {"Authorization": ""}


def date(**offset: float) -> str:
    """Return a time for a signature, so far from now."""
    return (datetime.now(timezone.utc) + timedelta(**offset)).strftime(DATE_FORMAT)


def words(answer: tuple[int, Any, Any]) -> tuple[int, str, str]:
    """Return status, code and message."""
    status, values, headers = answer
    assert values["request_id"] == headers["x-request-id"]
    return status, values["error_code"], values["error_msg"]


def password(api: Api, **changes: Any) -> dict[str, Any]:
    """Return the body that asks for a token by password."""
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
    """Return a token."""
    status, values, headers = api.ask(
        "POST", "/v3/auth/tokens", password(api), headers={"Authorization": "none"}
    )
    assert status == 201
    assert values["token"]["project"]["id"] == api.address.project_id
    return headers["x-subject-token"]


def test_a_signature_lets_in(api: Api):
    """And each answer has its id."""
    status, _, headers = api.ask("GET", PATH)

    assert status == 200
    assert len(headers["x-request-id"]) == 32


def test_who_says_nothing_is_refused(api: Api):
    """As one without a token."""
    status, code, message = words(api.ask("GET", PATH, headers=PLAIN))

    assert (status, code) == (401, "APIGW.0301")
    assert "x-auth-token not found" in message


def test_a_wrong_secret_is_refused_and_more_than_five_lock_the_key(api: Api):
    """For a while, also the right one."""
    for _ in range(6):
        status, code, message = words(api.ask("GET", PATH, secret="wrong"))
        assert (status, code) == (401, "APIGW.0301")
        assert "verify aksk signature fail" in message
    _, _, message = words(api.ask("GET", PATH))
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
    asked: dict[str, Any] = {"method": "GET", "path": target, "body": b"{}", **changes}
    asked["headers"] = {**signed, **asked.get("headers", {})}

    assert "verify aksk signature fail" in words(api.ask(**asked))[2]
    daemon.clear_faults(api.home)
    await_true(lambda: api.ask("GET", PATH)[0] == 200)


@pytest.mark.parametrize(
    "authorization",
    ["Bearer x", "SDK-HMAC-SHA256 Access=a", "V11-HMAC-SHA256 Credential=a, Signature=0"],
)
def test_an_authorization_of_another_kind_is_refused(api: Api, authorization: str):
    answer = api.ask("GET", PATH, headers={"Authorization": authorization})
    assert "signature header is not in the right form" in words(answer)[2]


def test_an_unknown_key_is_refused(api: Api):
    """By its name."""
    status, code, message = words(api.ask("GET", PATH, access="NOBODY"))

    assert (status, code) == (401, "APIGW.0301")
    assert "Get secretKey failed,ak:NOBODY,err:ak not exist" in message


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_clock_that_is_wrong_is_refused(api: Api, minutes: int):
    """More than fifteen minutes, either way."""
    status, code, message = words(api.ask("GET", PATH, date=date(minutes=minutes)))

    assert (status, code) == (401, "APIGW.0301")
    assert "signature expired" in message


@pytest.mark.parametrize("minutes", [-14, 14])
def test_a_clock_that_is_a_little_wrong_is_not(api: Api, minutes: int):
    """Up to fifteen minutes."""
    assert api.ask("GET", PATH, date=date(minutes=minutes))[0] == 200


def test_a_token_lets_in_until_it_expires(api: Api):
    """One of nobody's, one of ours, and the same when it has expired."""
    own = token(api)

    assert "decrypt token fail" in words(api.ask("GET", PATH, headers={"X-Auth-Token": "x"}))[2]
    assert api.ask("GET", PATH, headers={"X-Auth-Token": own})[0] == 200
    api.fault("expire-tokens")
    status, code, message = words(api.ask("GET", PATH, headers={"X-Auth-Token": own}))
    assert (status, code) == (401, "APIGW.0301")
    assert "token expires" in message


def test_a_token_for_a_key(api: Api):
    """The other method that clients use."""
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
def test_wrong_words_get_no_token(api: Api, changes: dict[str, Any]):
    """401, in the form of IAM."""
    status, values, _ = api.ask("POST", "/v3/auth/tokens", password(api, **changes), headers=PLAIN)

    assert (status, values["error"]["code"]) == (401, 401)


def test_a_temporary_key_signs_until_it_expires(api: Api):
    """With its security token, and not without it."""
    body = {"auth": {"identity": {"methods": ["token"], "token": {"duration_seconds": 900}}}}
    status, values, _ = api.ask(
        "POST",
        "/v3.0/OS-CREDENTIAL/securitytokens",
        body,
        headers={"X-Auth-Token": token(api)},
    )
    key = values["credential"]
    how = {"access": key["access"], "secret": key["secret"]}
    with_token = {"X-Security-Token": key["securitytoken"]}

    assert status == 201
    assert api.ask("GET", PATH, headers=with_token, **how)[0] == 200
    assert api.ask("GET", PATH, **how)[0] == 401
    api.fault("expire-tokens")
    assert api.ask("GET", PATH, headers=with_token, **how)[0] == 401


def test_the_project_must_be_ours(api: Api):
    """In the path, and in the header where there is one."""
    status, values, _ = api.ask("GET", "/v2/other/training-job-flavors")
    assert (status, values["error_code"]) == (404, "ModelArts.2786")
    status, values, _ = api.ask("GET", PATH, headers={"X-Project-Id": "other"})
    assert (status, values["error_code"]) == (400, "ModelArts.0210")


def test_projects_and_domains_are_found_by_a_signature(api: Api):
    """How SDKs learn the project's id."""
    found = api.ok("GET", f"/v3/projects?name={api.address.region}")["projects"]
    assert [item["id"] for item in found] == [api.address.project_id]
    assert api.ok("GET", "/v3/projects?name=other")["projects"] == []
    assert len(api.ok("GET", "/v3/auth/domains")["domains"]) == 1
    assert api.ask("GET", "/v3/projects", headers=PLAIN)[0] == 401


def test_what_nobody_answers_is_said_by_the_gateway(api: Api):
    """An API that does not exist."""
    status, code, _ = words(api.ask("GET", "{p}/nothing"))

    assert (status, code) == (404, "APIGW.0101")


def test_too_many_requests_are_refused():
    """With 429, and when to come again."""
    with running("engine: process\nrequests_per_min: 5\n") as api:
        if time.monotonic() % 60 > 50:
            time.sleep(11)  # the minute in which they are counted must not end meanwhile
        found = [api.ask("GET", PATH) for _ in range(7)]

    assert [status for status, _, _ in found] == [200] * 5 + [429] * 2
    assert found[-1][1]["error_code"] == "APIGW.0308"
    assert found[-1][2]["retry-after"] == "1"


def test_the_owners_door_is_shut_to_others(api: Api):
    """A key of the account opens the service and no more."""
    assert api.ask("GET", "/emulator/faults")[0] == 401
    assert api.ask("POST", "/emulator/faults", {"kind": "error"})[0] == 401
    assert daemon.faults(api.home) == []
