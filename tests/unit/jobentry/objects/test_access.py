"""Endpoint, region and credentials of S3 and OBS, from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobentry.contract.sigv4 import Keys
from jobentry.objects import ObjectError, access
from jobentry.objects.access import Access

CASES: dict[str, tuple[str, dict[str, str], Access]] = {
    "aws": (
        "s3",
        {"AWS_REGION": "eu-west-1"},
        Access("https://s3.eu-west-1.amazonaws.com", "eu-west-1", "virtual", False),
    ),
    "aws without a region": (
        "s3",
        {},
        Access("https://s3.us-east-1.amazonaws.com", "us-east-1", "virtual", False),
    ),
    "obs by region": (
        "obs",
        {"CLOUDJOB_S3_REGION": "cn-north-4"},
        Access("https://obs.cn-north-4.myhuaweicloud.com", "cn-north-4", "virtual", True),
    ),
    "obs of the platform": (
        "obs",
        {"S3_ENDPOINT": "https://obs.cn-north-4.myhuaweicloud.com", "S3_VERIFY_SSL": "0"},
        Access("https://obs.cn-north-4.myhuaweicloud.com", "cn-north-4", "virtual", True, False),
    ),
    "s3 words for what is obs": (
        "s3",
        {"S3_ENDPOINT": "obs.cn-north-4.myhuaweicloud.com"},
        Access("https://obs.cn-north-4.myhuaweicloud.com", "cn-north-4", "virtual", True),
    ),
    "the platform's word on certificates is of its own endpoint only": (
        "s3",
        {"AWS_ENDPOINT_URL": "https://minio.local:9000/", "S3_VERIFY_SSL": "0", "S3_ENDPOINT": "x"},
        Access("https://minio.local:9000", "us-east-1", "path", False),
    ),
    "an address": (
        "obs",
        {"CLOUDJOB_S3_ENDPOINT": "http://127.0.0.1:9000"},
        Access("http://127.0.0.1:9000", "us-east-1", "path", True),
    ),
    "cloudjob's word is the first": (
        "s3",
        {
            "CLOUDJOB_S3_ENDPOINT": "http://minio:1",
            "CLOUDJOB_S3_REGION": "r",
            "CLOUDJOB_S3_ADDRESSING": "virtual",
            "AWS_ENDPOINT_URL": "http://other",
            "AWS_REGION": "other",
        },
        Access("http://minio:1", "r", "virtual", False),
    ),
}


@pytest.mark.parametrize(("scheme", "environ", "expected"), CASES.values(), ids=CASES)
def test_endpoint_region_and_addressing_are_derived(
    scheme: str, environ: dict[str, str], expected: Access
):
    assert access.access(environ, scheme) == expected


def test_obs_needs_a_region():
    with pytest.raises(ObjectError) as caught:
        access.access({}, "obs")

    assert "AWS_REGION" in caught.value.hint


def test_the_first_complete_credentials_win():
    """Keys for cloudjob precede the user's and the platform's; incomplete pairs are ignored."""
    environ = {
        "CLOUDJOB_S3_ACCESS_KEY": "a",
        "AWS_ACCESS_KEY_ID": "b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "AWS_SESSION_TOKEN": "d",
        "ACCESS_KEY_ID": "e",
        "SECRET_ACCESS_KEY": "f",
    }

    assert access.keys(environ) == Keys("b", "c", "d")
    environ["CLOUDJOB_S3_SECRET_KEY"] = "s"
    assert access.keys(environ) == Keys("a", "s", "")


def test_credentials_are_read_from_the_named_profile(tmp_path: Path):
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id=a\naws_secret_access_key=b%c\n"
        "[other]\naws_access_key_id = x\naws_secret_access_key = y\naws_session_token = z\n"
    )
    environ = {"AWS_SHARED_CREDENTIALS_FILE": str(path)}

    assert access.keys(environ) == Keys("a", "b%c")
    assert access.keys({**environ, "AWS_PROFILE": "other"}) == Keys("x", "y", "z")
    assert access.keys({**environ, "AWS_PROFILE": "none"}) is None
    path.write_bytes(b"\xff\0[")
    assert access.keys(environ) is None
    path.write_text("[default]\naws_access_key_id=new\naws_secret_access_key=s\n")
    assert access.keys(environ) == Keys("new", "s")
