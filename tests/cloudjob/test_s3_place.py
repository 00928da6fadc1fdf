"""What URIs of stores, variables and files say about where a bucket is and who we are."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudjob.errors import StoreError
from cloudjob.store import full_uri, open_store
from cloudjob.store.s3 import keys, place
from cloudjob.store.s3.keys import KeyRing, Keys
from cloudjob.store.s3.place import Endpoint

HOME = Path("/nonexistent")


def reached(
    uri: str,
    environ: dict[str, str] | None = None,
    profile: dict[str, str] | None = None,
    home: Path = HOME,
) -> Endpoint:
    """Return how a bucket is reached."""
    return place.endpoint(place.read(uri), environ or {}, profile or {}, home)


@pytest.mark.parametrize(
    ("uri", "environ", "url", "region", "host", "target"),
    [
        (
            "s3://bucket",
            {},
            "https://s3.us-east-1.amazonaws.com",
            "us-east-1",
            "bucket.s3.us-east-1.amazonaws.com",
            "/a%20b",
        ),
        (
            "s3://bucket?region=cn-north-1",
            {},
            "https://s3.cn-north-1.amazonaws.com.cn",
            "cn-north-1",
            "bucket.s3.cn-north-1.amazonaws.com.cn",
            "/a%20b",
        ),
        (
            # A bucket with dots has no certificate that fits.
            "s3://my.bucket",
            {"AWS_REGION": "eu-west-1"},
            "https://s3.eu-west-1.amazonaws.com",
            "eu-west-1",
            "s3.eu-west-1.amazonaws.com",
            "/my.bucket/a%20b",
        ),
        (
            "s3://bucket",
            {"AWS_ENDPOINT_URL": "http://minio:9000"},
            "http://minio:9000",
            "us-east-1",
            "minio:9000",
            "/bucket/a%20b",
        ),
        (
            "s3://bucket?endpoint=https://other&addressing=virtual",
            {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_DEFAULT_REGION": "x-y-1"},
            "https://other",
            "x-y-1",
            "bucket.other",
            "/a%20b",
        ),
        (
            "obs://bucket?region=cn-north-4",
            {},
            "https://obs.cn-north-4.myhuaweicloud.com",
            "cn-north-4",
            "bucket.obs.cn-north-4.myhuaweicloud.com",
            "/a%20b",
        ),
        (
            "obs://bucket",
            {"OBS_ENDPOINT": "obs.ap-southeast-1.myhuaweicloud.com", "HW_REGION_NAME": "other"},
            "https://obs.ap-southeast-1.myhuaweicloud.com",
            "ap-southeast-1",
            "bucket.obs.ap-southeast-1.myhuaweicloud.com",
            "/a%20b",
        ),
        (
            "obs://bucket?region=cn-east-3",
            {"S3_ENDPOINT": "http://127.0.0.1:8333"},
            "http://127.0.0.1:8333",
            "cn-east-3",
            "127.0.0.1:8333",
            "/bucket/a%20b",
        ),
    ],
)
def test_a_bucket_is_reached(
    uri: str, environ: dict[str, str], url: str, region: str, host: str, target: str
):
    """The URI's own options first, then variables, then what the service's names are."""
    found = reached(uri, environ)

    assert (found.url, found.region, found.host, found.target("a b")) == (url, region, host, target)


def test_a_profile_says_what_nothing_else_does():
    """It stands behind variables and before names."""
    profile = {"endpoint": "https://ceph", "region": "r-1", "addressing": "virtual"}

    assert reached("s3://bucket", {}, profile) == Endpoint(
        "https://ceph", "r-1", "virtual", "bucket"
    )
    assert reached("s3://bucket", {"AWS_REGION": "r-2"}, profile).region == "r-2"


def test_obsutil_has_said_it_before(tmp_path: Path):
    """Its file has the endpoint and the keys."""
    (tmp_path / ".obsutilconfig").write_text(
        "endpoint=obs.cn-south-1.myhuaweicloud.com\nak=A\nsk=S=\ntoken=\n"
    )

    assert reached("obs://bucket", home=tmp_path).region == "cn-south-1"
    assert KeyRing(place.read("obs://bucket"), {}, tmp_path).current() == Keys("A", "S=", "")


@pytest.mark.parametrize(
    ("environ", "keys_there"),
    [
        (
            {
                "OBS_ACCESS_KEY_ID": "a",
                "OBS_SECRET_ACCESS_KEY": "b",
                "OBS_SECURITY_TOKEN": "c",
                "HUAWEICLOUD_SDK_AK": "x",
                "HUAWEICLOUD_SDK_SK": "y",
            },
            Keys("a", "b", "c"),
        ),
        ({"HUAWEICLOUD_SDK_AK": "x", "HUAWEICLOUD_SDK_SK": "y"}, Keys("x", "y")),
        ({"HW_ACCESS_KEY": "x", "HW_SECRET_KEY": "y"}, Keys("x", "y")),
        ({"OBS_ACCESS_KEY_ID": "a", "HW_ACCESS_KEY": "x", "HW_SECRET_KEY": "y"}, Keys("x", "y")),
    ],
)
def test_obs_keys_come_from_its_own_variables(environ: dict[str, str], keys_there: Keys):
    """The nearest that is complete."""
    assert KeyRing(place.read("obs://bucket"), environ, HOME).current() == keys_there


def test_the_file_of_the_sdks_is_read(tmp_path: Path):
    """And read again when its keys are refused."""
    file = tmp_path / "credentials"
    ring = KeyRing(
        place.read("obs://bucket"), {"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file)}, HOME
    )
    file.write_text("[basic]\nak = a\nsk = s\nsecurity_token = t1\n")
    first = ring.current()
    unchanged = ring.renew(first)
    file.write_text("[basic]\nak = a\nsk = s\nsecurity_token = t2\n")

    assert (first, unchanged) == (Keys("a", "s", "t1"), False)
    assert ring.renew(first)
    assert ring.current() == Keys("a", "s", "t2")


def test_aws_profiles_and_a_program_that_makes_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever botocore understands: here a profile with an endpoint, and credential_process."""
    said = '{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q", "SessionToken": "r"}'
    (tmp_path / "make-keys").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "make-keys").chmod(0o755)
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = lab-1\nendpoint_url = https://lab\n"
        f"credential_process = {tmp_path}/make-keys\ns3 =\n  addressing_style = virtual\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    lab = place.read("s3://bucket?profile=lab")

    assert keys.profile(lab) == {
        "endpoint": "https://lab",
        "region": "lab-1",
        "addressing": "virtual",
    }
    assert KeyRing(lab, {}, HOME).current() == Keys("p", "q", "r")


@pytest.mark.parametrize(
    ("uri", "message", "hint"),
    [
        ("s3://", "'' is no bucket", "s3://bucket/its/prefix"),
        ("s3:///key", "'' is no bucket", "s3://bucket/its/prefix"),
        ("obs://a b/c", "'a b' is no bucket", "obs://bucket/its/prefix"),
        ("s3://AK:SK@bucket/x", "keys do not belong into a URI", "set AWS_ACCESS_KEY_ID and"),
        ("s3://bucket/a//b", "not a key", ""),
        ("s3://bucket/../b", "not a key", ""),
        ("s3://bucket?regoin=x", "no option 'regoin', did you mean 'region'?", "allowed: endp"),
        ("s3://bucket?addressing=both", "addressing 'both' is not known", "allowed: auto, path"),
    ],
)
def test_a_uri_that_means_nothing_is_refused(uri: str, message: str, hint: str):
    """At once, and without showing keys that stand in it."""
    with pytest.raises(StoreError) as caught:
        open_store(uri)

    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)
    assert "SK" not in caught.value.message.replace("SKey", "")


@pytest.mark.parametrize(
    ("uri", "environ", "message"),
    [
        ("obs://bucket", {}, "no region"),
        ("s3://bucket?endpoint=https://host/path", {}, "not https://host or http://host:port"),
        ("s3://bucket?endpoint=https://host:0", {}, "not https://host or http://host:port"),
        ("s3://bucket?endpoint=https://host:x", {}, "not https://host or http://host:port"),
        (
            "obs://bucket?endpoint=bucket.obs.cn-north-4.myhuaweicloud.com",
            {},
            "it names the bucket",
        ),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(uri: str, environ: dict[str, str], message: str):
    """Before anything is sent to it."""
    with pytest.raises(StoreError, match=message) as caught:
        reached(uri, environ)

    assert caught.value.hint


def test_a_section_fills_in_what_the_uri_leaves_out():
    """So that the record of a job is all that is needed to find its objects again."""
    sections = {
        "s3": {"endpoint": "https://minio:9000", "region": "r", "addressing": "auto"},
        "process": {"python": "x"},
    }

    assert full_uri("s3://b/p?region=own", sections) == (
        "s3://b/p?endpoint=https://minio:9000&region=own"
    )
    assert full_uri("obs://b/p", sections) == "obs://b/p"
    assert full_uri("file:///b/p", sections) == "file:///b/p"


def test_a_uri_of_an_object_has_no_options():
    """The container half has them from variables, and a key may hold any character."""
    store = open_store("s3://bucket/a%20b/?region=x")

    assert store.uri("50%/é#?") == "s3://bucket/a%20b/50%25/%C3%A9%23%3F"


def test_bytes_that_are_no_utf8_name_no_object():
    """S3's keys are text."""
    with pytest.raises(StoreError, match="not a key"):
        open_store("s3://bucket").put_bytes(b"", "a\udcff")
