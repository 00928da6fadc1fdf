"""The checks of secrets and of expiring keys before a submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloudjob.model.job import JobSpec
from cloudjob.model.times import seconds_of
from cloudjob.store import open_store
from cloudjob.store.s3 import S3Store
from cloudjob.submission import checks

EXPIRES_AT = "2099-01-08T02:56:19.587000Z"
NOW = 1_800_000_000.0
MIN = 60.0


def spec(**values: Any) -> JobSpec:
    return JobSpec(script="train.py", **values)


@pytest.mark.parametrize(
    ("values", "left_s", "expected"),
    [
        ({}, 59 * MIN, "expire in 59 min (at "),
        ({}, 59 * MIN, "), and the job has no timeout_min"),
        ({"timeout_min": 90}, 60 * MIN, "expire in 1 h (at "),
        ({"timeout_min": 90}, 60 * MIN, "), and the job may run for 1 h 30 min"),
        (
            {"timeout_min": 30, "retries": 2, "backend": "slurm"},
            61 * MIN,
            "the job may run for 1 h 30 min",
        ),
    ],
)
def test_keys_that_expire_before_the_job_ends_are_a_warning(
    values: dict[str, Any], left_s: float, expected: str
):
    (check,) = checks.key_checks(spec(**values), NOW + left_s, NOW)

    assert expected in check.found
    assert not check.is_ok
    assert not check.is_needed


@pytest.mark.parametrize(
    ("values", "end_at"),
    [
        ({}, 0.0),
        ({}, NOW + 48 * 60 * MIN),
        ({"timeout_min": 30}, NOW + 31 * MIN),
        ({"timeout_min": 30, "retries": 1, "backend": "slurm"}, NOW + 61 * MIN),
        ({"timeout_min": 30, "retries": 9, "backend": "process"}, NOW + 31 * MIN),
    ],
)
def test_keys_that_last_long_enough_pass(values: dict[str, Any], end_at: float):
    assert list(checks.key_checks(spec(**values), end_at, NOW)) == []


def test_a_submit_with_expired_keys_is_refused():
    (check,) = checks.key_checks(spec(timeout_min=1), NOW - 1, NOW)

    assert check.is_needed


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return variables without credentials; those of this process are removed for boto3."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return {"OBS_ENDPOINT": "https://obs.cn-north-4.myhuaweicloud.com"}


def keys_end_at(uri: str, environ: dict[str, str]) -> float:
    store = open_store(uri, environ)
    assert isinstance(store, S3Store)
    return store.keys_end_at()


def test_boto3_knows_when_keys_of_a_process_expire(environ: dict[str, str], tmp_path: Path):
    answer = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "S", "SessionToken": "T"}
    (tmp_path / "answer").write_text(json.dumps({**answer, "Expiration": EXPIRES_AT}))
    (tmp_path / "config").write_text(f"[profile p]\ncredential_process = cat {tmp_path}/answer\n")

    assert keys_end_at("s3://bucket/x?profile=p", environ) == pytest.approx(seconds_of(EXPIRES_AT))


def test_variables_say_when_their_keys_expire(environ: dict[str, str]):
    keys = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S", "AWS_SESSION_TOKEN": "T"}
    environ.update(keys, AWS_CREDENTIAL_EXPIRATION="2099-01-08T02:56:19+00:00")

    assert keys_end_at("s3://bucket/x", environ) == seconds_of("2099-01-08T02:56:19Z")
    del environ["AWS_CREDENTIAL_EXPIRATION"]
    assert keys_end_at("s3://bucket/x", environ) == 0.0


@pytest.mark.parametrize("line", ["", f"expires_at = {EXPIRES_AT}\n"])
def test_the_file_of_huawei_s_sdks_says_when_its_keys_expire(
    environ: dict[str, str], tmp_path: Path, line: str
):
    path = tmp_path / "huawei"
    path.write_text(f"[basic]\nak = A\nsk = S\nsecurity_token = T\n{line}")
    path.chmod(0o600)
    environ["HUAWEICLOUD_SDK_CREDENTIALS_FILE"] = str(path)

    expected = seconds_of(EXPIRES_AT) if line else 0.0
    assert keys_end_at("obs://bucket/x", environ) == pytest.approx(expected)


def test_permanent_keys_never_expire(environ: dict[str, str]):
    environ.update(AWS_ACCESS_KEY_ID="A", AWS_SECRET_ACCESS_KEY="S")

    assert keys_end_at("s3://bucket/x", environ) == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"args": ("--token=hunter2hunter2",)}, ["TOKEN"]),
        ({"env": {"URL": "https://me:hunter2hunter2@host"}}, ["TOKEN"]),
        ({"args": ("--token", "short1")}, []),
        ({"env": {"DB_PASSWORD": "hunter2", "HF_TOKEN": ""}}, ["DB_PASSWORD"]),
        ({}, []),
    ],
)
def test_a_secret_that_the_job_s_records_would_show_is_a_warning(
    values: dict[str, Any], expected: list[str]
):
    secrets = {"TOKEN": "hunter2hunter2", "SHORT": "short1"}

    warnings = list(checks.secret_checks(spec(secrets=secrets, **values)))

    assert [
        next(name for name in check.hint.split() if name.isupper()) for check in warnings
    ] == expected
    assert not any("hunter2" in check.found + check.hint or check.is_needed for check in warnings)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"backend": "process", "retry": {"on": ("hang",)}}, ""),
        ({"backend": "slurm"}, ""),
        ({"backend": "slurm", "retry": {"on": ("exit", "network")}}, "crash, platform, preempted"),
        ({"backend": "kubernetes"}, "kubernetes cannot tell user from other failures"),
        ({"backend": "modelarts"}, "modelarts cannot tell user from other failures"),
        ({"backend": "modelarts", "retry": {"on": ("platform", "hang", "preempted")}}, ""),
        ({"backend": "modelarts", "retry": {"on": ("hang",)}}, "platform, preempted"),
    ],
)
def test_submit_warns_of_failures_that_a_platform_repeats_unasked(
    values: dict[str, Any], expected: str
):
    warnings = list(checks.retry_checks(spec(retries=2, **values)))

    assert bool(warnings) is bool(expected)
    assert all(expected in check.found and not check.is_needed for check in warnings)
    assert list(checks.retry_checks(spec(**values))) == []
