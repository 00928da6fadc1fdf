"""The emulated OBS: one bucket through boto3 and the vendor's own SDK, and its faults."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from cloudjob.emulator import daemon
from tests.support.emulator import Api, new_name

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # invalid escapes in its sources, on newer Pythons
    from obs import ObsClient

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", params=["obs", "v2", "v4"])
def vendor(request: pytest.FixtureRequest, session_api: Api, s3: Any) -> Iterator[Any]:
    """The vendor's client, signing each way that it knows."""
    address = session_api.address
    client = ObsClient(
        access_key_id=address.access_key,
        secret_access_key=address.secret_key,
        server=address.s3_endpoint,
        signature=request.param,
        path_style=True,
        region=address.region,
        is_signature_negotiation=False,
    )
    yield client
    client.close()


@pytest.mark.parametrize("key", ["plain.txt", "a/b/ü ~+=.bin"])
def test_both_clients_see_the_same_objects(vendor: Any, s3: Any, key: str):
    key = f"{new_name()}/{key}"
    data = os.urandom(300_000)
    assert vendor.putContent("data", key, data).status == 200
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == data
    s3.put_object(Bucket="data", Key=key + "2", Body=data[::-1])
    found = vendor.getObject("data", key + "2", loadStreamInMemory=True)
    listed = vendor.listObjects("data", prefix=key)

    assert (found.status, found.body.buffer) == (200, data[::-1])
    assert [(item.key, item.size) for item in listed.body.contents] == [
        (key, len(data)),
        (key + "2", len(data)),
    ]
    assert vendor.deleteObject("data", key).status == 204
    assert [item["Key"] for item in s3.list_objects(Bucket="data", Prefix=key)["Contents"]] == [
        key + "2"
    ]
    assert vendor.getObject("data", key, loadStreamInMemory=True).status == 404


def test_the_vendors_client_uploads_in_parts(vendor: Any, s3: Any, tmp_path: Any):
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(11_000_000))
    key = new_name()
    done = vendor.uploadFile("data", key, str(path), partSize=5 * 1024 * 1024, taskNum=3)

    assert done.status == 200, done
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == path.read_bytes()


def test_obs_refuses_an_unknown_key_and_a_wrong_secret(session_api: Api, s3: Any):
    import boto3
    from botocore.config import Config

    address = session_api.address
    for access, secret in (("NOBODY", "x"), (address.access_key, "x")):
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=address.s3_endpoint,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            region_name="r",
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )
        with pytest.raises(ClientError) as caught:
            client.list_objects(Bucket="data")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def temporary(api: Api) -> dict[str, str]:
    """Return a temporary key."""
    identity = {"methods": ["hw_ak_sk"], "hw_ak_sk": {"access": {"key": api.address.access_key}}}
    identity["hw_ak_sk"]["secret"] = {"key": api.address.secret_key}
    _, _, headers = api.ask("POST", "/v3/auth/tokens", {"auth": {"identity": identity}})
    _, values, _ = api.ask(
        "POST",
        "/v3.0/OS-CREDENTIAL/securitytokens",
        {"auth": {"identity": {"methods": ["token"], "token": {}}}},
        headers={"X-Auth-Token": headers["x-subject-token"]},
    )
    credential: dict[str, str] = values["credential"]
    return credential


def test_a_temporary_key_works_for_obs_until_it_expires(api: Api, s3: Any):
    import boto3
    from botocore.config import Config

    key = temporary(api)

    def client(**changes: str) -> Any:
        words = {
            "aws_access_key_id": key["access"],
            "aws_secret_access_key": key["secret"],
            "aws_session_token": key["securitytoken"],
            **changes,
        }
        return boto3.session.Session().client(
            "s3",
            endpoint_url=api.address.s3_endpoint,
            region_name="r",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
            **words,
        )

    def code(asked: Any) -> str:
        with pytest.raises(ClientError) as caught:
            asked.list_objects(Bucket="data", MaxKeys=1)
        return str(caught.value.response["Error"]["Code"])

    good = client()
    name = f"{new_name()}/ü a+b~"
    good.put_object(Bucket="data", Key=name, Body=b"x" * 100_000)
    assert s3.get_object(Bucket="data", Key=name)["Body"].read() == b"x" * 100_000
    assert good.list_objects(Bucket="data", Prefix=name)["Contents"][0]["Key"] == name
    assert good.get_object(Bucket="data", Key=name)["ContentLength"] == 100_000
    assert code(client(aws_secret_access_key="wrong")) == "SignatureDoesNotMatch"
    assert code(client(aws_session_token="wrong")) == "InvalidToken"
    api.fault("expire-tokens")
    assert code(good) == "ExpiredToken"


def test_large_objects_pass_the_proxy_unchanged(s3: Any):
    data = os.urandom(20_000_000)
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=data, ChecksumAlgorithm="SHA256")

    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == data


def test_a_full_obs_refuses_writes_only(api: Api, s3: Any):
    key = new_name()
    s3.put_object(Bucket="data", Key=key, Body=b"x")
    api.fault("full-obs")
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket="data", Key=key, Body=b"y" * 3_000_000)

    assert caught.value.response["Error"]["Code"] == "InsufficientStorageSpace"
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"x"
    s3.delete_objects(Bucket="data", Delete={"Objects": [{"Key": key}]})


def test_slow_obs_delays_as_many_requests_as_asked_for(api: Api, s3: Any):
    import time

    api.fault("slow-obs", count=1, amount=0.7)
    begun = time.monotonic()
    s3.list_objects(Bucket="data", MaxKeys=1)

    assert time.monotonic() - begun >= 0.7
    assert daemon.faults(api.home) == []


def test_obs_error_answers_503_as_often_as_asked_for(api: Api, s3: Any):
    api.fault("obs-error", count=1)
    with pytest.raises(ClientError) as caught:
        s3.list_objects(Bucket="data", MaxKeys=1)

    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    s3.list_objects(Bucket="data", MaxKeys=1)
