"""Endpoint and credentials of a bucket, from store URIs, variables and files."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

import pytest

from cloudjob.errors import StoreError, UsageError
from cloudjob.store import full_uri, job_store, open_store
from cloudjob.store.s3 import S3Store, bucket_uri
from jobentry.contract import names


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any settings."""
    for name in os.environ:
        if name.startswith(("AWS_", "OBS_", "HUAWEICLOUD_", "HW_", "S3_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def store_of(uri: str, environ: dict[str, str] | None = None) -> S3Store:
    return S3Store(bucket_uri.read(uri), environ=environ or {})


def credentials(store: S3Store) -> tuple[str, str, str]:
    """Return the credentials that the store passes to the nodes."""
    access = store.access()
    keys = access[names.CLOUDJOB_S3_ACCESS_KEY], access[names.CLOUDJOB_S3_SECRET_KEY]
    return (*keys, access.get(names.CLOUDJOB_S3_SESSION_TOKEN, ""))


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.mark.parametrize(
    ("uri", "environ", "url", "region", "host", "target"),
    [
        (
            "s3://bucket",
            {},
            "https://s3.amazonaws.com",
            "us-east-1",
            "bucket.s3.amazonaws.com",
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
            # No wildcard certificate matches the host name of a bucket with dots.
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
def test_endpoint_region_and_addressing_come_from_uri_variables_or_defaults(
    uri: str, environ: dict[str, str], url: str, region: str, host: str, target: str
):
    """The URI's options take precedence, then variables, then the service's default names."""
    store = store_of(uri, {**KEYS, **environ})
    signed = urllib.parse.urlsplit(store.sign("GET", "a b", 60))
    access = store.access()

    assert access[names.CLOUDJOB_S3_ENDPOINT] == url
    assert access[names.CLOUDJOB_S3_REGION] == region
    assert (signed.netloc, signed.path) == (host, target)


def test_the_settings_of_obsutil_are_read(home: Path):
    (home / ".obsutilconfig").write_text(
        "endpoint=obs.cn-south-1.myhuaweicloud.com\nak=A\nsk=S=\ntoken=\n"
    )
    store = store_of("obs://bucket")

    assert store.access()[names.CLOUDJOB_S3_REGION] == "cn-south-1"
    assert credentials(store) == ("A", "S=", "")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "OBS_ACCESS_KEY_ID": "a",
                "OBS_SECRET_ACCESS_KEY": "b",
                "OBS_SECURITY_TOKEN": "c",
                "HUAWEICLOUD_SDK_AK": "x",
                "HUAWEICLOUD_SDK_SK": "y",
            },
            ("a", "b", "c"),
        ),
        ({"HUAWEICLOUD_SDK_AK": "x", "HUAWEICLOUD_SDK_SK": "y"}, ("x", "y", "")),
        ({"HW_ACCESS_KEY": "x", "HW_SECRET_KEY": "y"}, ("x", "y", "")),
        ({"OBS_ACCESS_KEY_ID": "a", "HW_ACCESS_KEY": "x", "HW_SECRET_KEY": "y"}, ("x", "y", "")),
    ],
)
def test_obs_credentials_come_from_its_own_variables(
    environ: dict[str, str], expected: tuple[str, str, str]
):
    """The first complete pair of keys is used."""
    assert credentials(store_of("obs://bucket?region=r", environ)) == expected


def test_the_file_of_the_vendors_sdks_is_read(tmp_path: Path):
    file = tmp_path / "credentials"
    file.write_text("[basic]\nak = a\nsk = s\nsecurity_token = t\n")
    file.chmod(0o600)
    environ = {"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file)}

    assert credentials(store_of("obs://bucket?region=r", environ)) == ("a", "s", "t")


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("[basic]\nak = a\nsk = s\n", 0o644, r"other users may read it \(mode 0644\)$"),
        ("[other]\nak = a\nsk = s\n", 0o600, "not a credentials file of Huawei's SDKs$"),
    ],
)
def test_a_file_of_the_vendors_sdks_is_refused_as_on_modelarts(
    tmp_path: Path, text: str, mode: int, expected: str
):
    file = tmp_path / "credentials"
    file.write_text(text)
    file.chmod(mode)
    environ = {"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(file)}

    with pytest.raises(UsageError, match=expected):
        credentials(store_of("obs://bucket?region=r", environ))


def test_a_profile_and_a_program_that_prints_credentials_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    printed = '{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q", "SessionToken": "r"}'
    (tmp_path / "make-keys").write_text(f"#!/bin/sh\necho '{printed}'\n")
    (tmp_path / "make-keys").chmod(0o755)
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = lab-1\nendpoint_url = https://lab\n"
        f"credential_process = {tmp_path}/make-keys\ns3 =\n  addressing_style = virtual\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = store_of("s3://bucket?profile=lab")
    access = store.access()

    assert access[names.CLOUDJOB_S3_ENDPOINT] == "https://lab"
    assert access[names.CLOUDJOB_S3_REGION] == "lab-1"
    assert access[names.CLOUDJOB_S3_ADDRESSING] == "virtual"
    assert credentials(store) == ("p", "q", "r")


@pytest.mark.parametrize(
    ("uri", "message", "hint"),
    [
        ("s3://", "'' is not a bucket name", "s3://bucket/its/prefix"),
        ("s3:///key", "'' is not a bucket name", "s3://bucket/its/prefix"),
        ("obs://a b/c", "'a b' is not a bucket name", "obs://bucket/its/prefix"),
        ("s3://AK:SK@bucket/x", "a URI must not contain access keys", "set AWS_ACCESS_KEY_ID and"),
        ("s3://bucket/a//b", "not a valid key", ""),
        ("s3://bucket/../b", "not a valid key", ""),
        (
            "s3://bucket?regoin=x",
            "unknown option 'regoin', did you mean 'region'?",
            "allowed: endp",
        ),
        ("s3://bucket?addressing=both", "unknown addressing 'both'", "allowed: auto, path"),
    ],
)
def test_an_invalid_bucket_uri_is_refused(uri: str, message: str, hint: str):
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
        ("s3://bucket?endpoint=https://[host", {}, "not https://host or http://host:port"),
        ("s3://bucket?endpoint=https://host:x", {}, "not https://host or http://host:port"),
        (
            "obs://bucket?endpoint=bucket.obs.cn-north-4.myhuaweicloud.com",
            {},
            "it contains the bucket name",
        ),
    ],
)
def test_an_invalid_endpoint_is_refused(uri: str, environ: dict[str, str], message: str):
    with pytest.raises(StoreError, match=message) as caught:
        store_of(uri, {**KEYS, **environ}).access()

    assert caught.value.hint


def test_an_endpoint_without_a_region_is_not_suggested_again():
    with pytest.raises(StoreError, match="no region") as caught:
        store_of("obs://bucket?endpoint=https://10.0.0.1", KEYS).access()

    assert "OBS_ENDPOINT" not in caught.value.hint


def test_a_section_adds_options_that_the_uri_does_not_set():
    sections = {
        "s3": {"endpoint": "https://minio:9000", "region": "r", "addressing": "auto"},
        "process": {"python": "x"},
    }

    assert full_uri("s3://b/p?region=own", sections) == (
        "s3://b/p?endpoint=https://minio:9000&region=own"
    )
    assert full_uri("obs://b/p", sections) == "obs://b/p"
    assert full_uri("file:///b/p", sections) == "file:///b/p"


def test_a_job_store_gets_the_options_of_the_platforms_store():
    default = "obs://cloudjob?endpoint=http://127.0.0.1:9&region=emulator-1&addressing=path"
    sections = {"obs": {"region": "own"}}

    assert job_store("", default, {}) == default
    assert job_store("obs://b/p", default, {}) == default.replace("cloudjob", "b/p")
    assert "region=own" in job_store("obs://b/p", default, sections)
    assert "endpoint=http://h&" in job_store("obs://b?endpoint=http://h", default, {})
    assert job_store("s3://b", default, {}) == "s3://b"
    assert job_store("obs://b", "", {}) == "obs://b"


def test_a_uri_of_an_object_has_no_options():
    """The node half gets options from variables, and a key may contain any character."""
    store = open_store("s3://bucket/a%20b/?region=x")

    assert store.uri("50%/é#?") == "s3://bucket/a%20b/50%25/%C3%A9%23%3F"


def test_a_key_that_is_not_utf8_is_refused():
    """S3 keys are Unicode text."""
    with pytest.raises(StoreError, match="not a valid key"):
        open_store("s3://bucket").put_bytes(b"", "a\udcff")
