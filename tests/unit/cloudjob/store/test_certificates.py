"""Certificates of private authorities, and checksums that other services than Amazon's refuse."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import botocore
import pytest
from botocore.exceptions import EndpointConnectionError

from cloudjob.errors import StoreError
from cloudjob.store import certificates, environment
from cloudjob.store.certificates import Bundle
from cloudjob.store.s3 import bucket_uri, client
from tests.support.tls import Authority

NAME = "CLOUDJOB_CA_CERTIFICATES"
PUBLIC = Path(botocore.__file__).parent / "cacert.pem"


def sent(path: Path) -> str:
    """Return what nodes get of a file."""
    return certificates.access(Bundle(str(path), "AWS_CA_BUNDLE")).get(NAME, "")


@pytest.mark.parametrize(
    ("environ", "profile", "expected"),
    [
        ({}, "", None),
        ({"AWS_CA_BUNDLE": "/a"}, "/p", Bundle("/a", "AWS_CA_BUNDLE")),
        ({"REQUESTS_CA_BUNDLE": "/r"}, "/p", Bundle("/p", "ca_bundle of the AWS profile")),
        (
            {"REQUESTS_CA_BUNDLE": "/r", "SSL_CERT_FILE": "/s"},
            "",
            Bundle("/r", "REQUESTS_CA_BUNDLE"),
        ),
        ({"AWS_CA_BUNDLE": "", "SSL_CERT_FILE": __file__}, "", Bundle(__file__, "SSL_CERT_FILE")),
        # OpenSSL ignores a file that is missing, too.
        ({"SSL_CERT_FILE": "/nowhere"}, "", None),
    ],
)
def test_the_first_file_that_is_named_applies(
    environ: dict[str, str], profile: str, expected: Bundle | None
):
    assert certificates.bundle(environ, profile) == expected


def test_nodes_get_certificates_and_nothing_else(tmp_path: Path):
    """A private key or a comment in the file stays here, and a certificate is sent once."""
    authority = Authority(tmp_path)
    text = authority.bundle.read_text()
    key = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    authority.bundle.write_text(f"# Our authority: Jörg\n{key}{text}{text}")

    assert sent(authority.bundle) == text
    ssl.create_default_context().load_verify_locations(cadata=sent(authority.bundle))


def test_nodes_get_no_public_authorities_of_a_large_file(tmp_path: Path):
    """A variable could not hold all of them, and images have them."""
    authority = Authority(tmp_path)
    certificate = authority.bundle.read_text()
    authority.bundle.write_text(PUBLIC.read_text() + certificate)

    assert sent(authority.bundle) == certificate
    assert sent(PUBLIC) == ""


def test_an_authority_is_private_although_this_machine_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """OpenSSL's own store of this machine, which ``SSL_CERT_FILE`` replaces, may contain it."""
    authority = Authority(tmp_path)
    certificate = authority.bundle.read_text()
    authority.bundle.write_text(PUBLIC.read_text() + certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))

    assert sent(authority.bundle) == certificate


def test_a_large_file_is_read_without_the_packages_for_s3(tmp_path: Path):
    large = tmp_path / "large.pem"
    large.write_text("".join(Path(path).read_text() for path in (PUBLIC, PUBLIC)))
    code = (
        "import sys; sys.modules['boto3'] = sys.modules['botocore'] = None;"
        "from cloudjob.store import certificates as c;"
        f"print(len(c.access(c.Bundle({str(large)!r}, 'SSL_CERT_FILE'))))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_folder_of_certificates_is_read(tmp_path: Path):
    other = Authority(tmp_path)
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "0a1b2c3d.0").write_text(other.bundle.read_text())
    os.mkfifo(folder / "pipe")

    assert sent(folder) == other.bundle.read_text()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", ""),
        ("missing", "no such file"),
        ("many", ""),
        ("empty", "it contains no certificate"),
        ("damaged", ".* is damaged"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, kind: str, reason: str):
    path = tmp_path / kind
    if kind == "empty":
        path.touch()
    if kind == "damaged":
        path.write_text("-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n")
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "many":
        texts = [
            Authority(tmp_path, f"Authority {n} " + "x" * 40).bundle.read_text() for n in range(200)
        ]
        path.write_text("".join(texts))

    with pytest.raises(StoreError, match=f"reading certificates: AWS_CA_BUNDLE={path}: {reason}"):
        sent(path)


@pytest.mark.parametrize(
    ("uri", "environ", "config", "expected"),
    [
        ("s3://bucket?region=eu-west-1", {}, "", "when_supported"),
        ("s3://bucket?endpoint=https://minio.example.com:9000", {}, "", "when_required"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "https://s3.example.com"}, "", "when_required"),
        ("s3://bucket", {}, "endpoint_url = https://s3.example.com\n", "when_required"),
        (
            "s3://bucket",
            {},
            "services = own\n[services own]\ns3 =\n  endpoint_url = https://s3.example.com\n",
            "when_required",
        ),
        ("s3://bucket?endpoint=https://s3.eu-west-1.amazonaws.com", {}, "", "when_supported"),
        ("s3://bucket?endpoint=https://amazonaws.com.example.com", {}, "", "when_required"),
        ("obs://bucket?region=cn-north-4", {}, "", "when_required"),
    ],
)
def test_only_amazon_gets_the_checksums_of_its_own_library(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    uri: str,
    environ: dict[str, str],
    config: str,
    expected: str,
):
    (tmp_path / "config").write_text(f"[default]\n{config}")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}
    for name in [name for name in os.environ if name.startswith(("AWS_", "OBS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    bucket = bucket_uri.read(uri)

    connection = client.connect(bucket, {**keys, **environ}, client.Retries(bucket, 1.0))

    assert connection.client.meta.config.request_checksum_calculation == expected


@pytest.mark.parametrize(
    "name",
    [
        "AWS_CA_BUNDLE",
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_RETRY_MODE",
        "AWS_DEFAULTS_MODE",
        "AWS_ACCOUNT_ID_ENDPOINT_MODE",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_FILE",
        "HTTPS_PROXY",
    ],
)
def test_a_variable_that_is_set_but_empty_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    """boto3 refuses some of them."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}
    for present in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(present)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv(name, "")
    bucket = bucket_uri.read("s3://bucket?endpoint=https://127.0.0.1:1")

    connection = client.connect(bucket, {**keys, name: ""}, client.Retries(bucket, 1.0))

    with pytest.raises(EndpointConnectionError):
        connection.client.list_buckets()


def test_keys_that_are_set_but_empty_do_not_hide_those_of_the_platform(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}

    assert keys.items() <= environment(keys).items()
