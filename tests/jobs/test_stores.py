"""Whole jobs with code, outputs and records in a bucket of a real S3 server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers import (
    ACCESS_KEY,
    OBS_DOMAIN,
    SECRET_KEY,
    FaultProxy,
    Server,
    boto3_client,
)
from tests.support.tls import Authority, front

# Each rank writes its environment, which must not contain the store's keys, to a file.
SCRIPT = """\
import json
folder = os.environ["model"]
with open(f"{folder}/rank-{rank}.txt", "w") as file:
    file.write(f"weights of {rank}")
write_result(f"environ-{rank}", json.dumps(dict(os.environ)))
with open(os.environ["data"]) as file:
    print("input:", file.read())
print("done", rank)
"""


@pytest.fixture
def bucket(seaweedfs: Server, new_bucket: Callable[[Server], str]) -> str:
    """Make an empty bucket with an input in it."""
    name = new_bucket(seaweedfs)
    boto3_client(seaweedfs.endpoint).put_object(Bucket=name, Key="in/numbers.txt", Body=b"1 2 3")
    return name


@pytest.mark.parametrize("scheme", ["s3", "obs"])
def test_a_job_keeps_code_inputs_outputs_and_record_in_a_bucket(
    cloud,
    seaweedfs: Server,
    bucket: str,
    scheme: str,
    fault_proxy: Callable[[Server], FaultProxy],
    tmp_path: Path,
):
    proxy = fault_proxy(seaweedfs)
    environ = seaweedfs.environ
    if scheme == "obs":
        environ = {
            "OBS_ACCESS_KEY_ID": ACCESS_KEY,
            "OBS_SECRET_ACCESS_KEY": SECRET_KEY,
            "OBS_ENDPOINT": f"http://{OBS_DOMAIN}",
            "http_proxy": proxy.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    cloud.environ.update(environ)
    store = f"{scheme}://{bucket}/jobs"
    arguments = ["--store", store, "-n", "2", "--input", f"data={scheme}://{bucket}/in/numbers.txt"]
    if scheme == "obs":
        arguments += ["-e", f"http_proxy={proxy.endpoint}"]
    script = cloud.script(SCRIPT)
    dry = cloud.submit("--dry-run", "--json", *arguments, "--output", "model=", script)

    done = cloud.submit(*arguments, "--output", "model=", script)
    assert done.code == 0, done
    fetched = cloud.cli("outputs", done.job, "--to", str(tmp_path / "fetched"))
    status = cloud.status(done.job)

    assert done.out.count(b"input: 1 2 3\n") == 2
    assert fetched.code == 0, fetched
    assert {path.name: path.read_text() for path in (tmp_path / "fetched").rglob("*.txt")} == {
        f"rank-{rank}.txt": f"weights of {rank}" for rank in range(2)
    }
    assert status["state"] == "SUCCEEDED"
    assert status["code"]["uri"].startswith(store)
    assert not (cloud.home / "store").exists()
    _check_secrecy(cloud, dry, done, seaweedfs, bucket)
    removed = cloud.cli("rm", "--force", done.job)
    assert removed.code == 0, removed
    keys = [key for key in _objects(seaweedfs, bucket) if key.startswith(f"jobs/{done.job}/")]
    assert keys == []


def _check_secrecy(cloud, dry, done, server: Server, bucket: str) -> None:
    """The secret key is in no log, record, object, dry run or rank's environment."""
    secret = SECRET_KEY.encode()
    assert dry.code == 0, dry
    values = json.loads(dry.out)
    assert values["submission"]["access"]["CLOUDJOB_S3_SECRET_KEY"] == "***"
    for text in (dry.out, dry.err, done.out, done.err):
        assert secret not in text
    for key, data in _objects(server, bucket).items():
        assert secret not in data, key
    for path in cloud.home.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path
    for rank in range(2):
        environ = json.loads(cloud.results_written()[f"environ-{rank}"])
        assert not [name for name in environ if name.startswith("CLOUDJOB_S3_")]
        assert SECRET_KEY not in environ.values()


def _objects(server: Server, bucket: str) -> dict[str, bytes]:
    client = boto3_client(server.endpoint)
    listed = client.list_objects(Bucket=bucket).get("Contents", [])
    return {
        item["Key"]: client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for item in listed
    }


def test_a_store_error_is_one_line_with_a_hint(cloud, seaweedfs: Server, bucket: str):
    cloud.environ.update({**seaweedfs.environ, "AWS_SECRET_ACCESS_KEY": "wrong"})

    done = cloud.submit("--store", f"s3://{bucket}/jobs", cloud.script("print(1)"))

    assert done.code == 4, done
    assert (
        b"the signature is wrong (403 SignatureDoesNotMatch)\nhint: does the secret key" in done.err
    )
    assert b"Traceback" not in done.err
    assert cloud.cli("list").out == b""


def test_doctor_checks_the_configured_store(cloud, seaweedfs: Server, bucket: str):
    cloud.environ.update({**seaweedfs.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    section = f"{{endpoint: '{seaweedfs.endpoint}', addressing: path}}"
    cloud.write("cloudjob.yaml", f"store: s3://{bucket}/jobs\ns3: {section}\n")

    configured = json.loads(cloud.cli("doctor", "--json").out)
    missing = json.loads(cloud.cli("doctor", "--json", "--store", "s3://no-such-bucket/x").out)

    checks = {check["name"]: check for check in configured}
    assert checks["store"]["is_ok"], checks
    assert checks["clock"]["is_ok"], checks
    (store,) = [check for check in missing if check["name"] == "store"]
    assert not store["is_ok"]
    assert "no such bucket" in store["found"]
    assert _objects(seaweedfs, bucket).keys() == {"in/numbers.txt"}


def test_a_submit_with_expired_keys_is_refused(cloud, seaweedfs: Server, bucket: str):
    expired = {"AWS_SESSION_TOKEN": "token", "AWS_CREDENTIAL_EXPIRATION": "2020-01-08T02:56:19Z"}
    cloud.environ.update({**seaweedfs.environ, **expired})

    done = cloud.submit("--store", f"s3://{bucket}/jobs", cloud.script("print(1)"))

    assert done.code == 5, done
    assert b"error: keys: the store's keys expired at 2020-01-0" in done.err
    assert cloud.jobs() == []


LOGS = """
print("hello", rank, "x" * 100_000)
write_result(f"up-{rank}")
await_file("go")
"""
STORED = b"cloudjob: the platform has no log of this node; this one is from the job's store\n"


@pytest.mark.parametrize("is_bucket", [False, True], ids=["folder", "bucket"])
def test_the_log_of_a_removed_job_is_read_from_the_store(
    cloud, seaweedfs: Server, bucket: str, is_bucket: bool
):
    """The stored log equals the platform's, byte for byte."""
    cloud.environ.update(seaweedfs.environ)
    arguments = ["--store", f"s3://{bucket}/jobs"] if is_bucket else []
    (cloud.results / "go").touch()
    done = cloud.submit(*arguments, "-n", "2", cloud.script(LOGS))
    raw = cloud.raw(done.job, 1)
    stored = cloud.cli("logs", "--stored", done.job)
    cloud.await_cleanup()
    shutil.rmtree(cloud.home / "process" / done.job)

    log = cloud.cli("logs", done.job)
    followed = cloud.cli("logs", "-f", done.job)

    assert done.code == 0, done
    assert raw.startswith(b"hello 1 xxx")
    for each in (stored, log, followed):
        assert each.code == 0, each
        assert sorted(each.lines) == sorted(done.lines), each
    assert log.err.count(STORED) == followed.err.count(STORED) == 2, log
    assert STORED not in stored.err
    assert cloud.raw(done.job, 1) == raw


def test_the_log_of_a_job_that_was_killed_is_in_the_store(cloud, poll: Callable[..., None]):
    """Its entries are killed, too, so none of them stores a last part of the log."""
    running = cloud.start_submit("-n", "2", cloud.script(LOGS))
    job = running.job
    cloud.await_results("up-0", "up-1")
    poll(
        lambda: all(
            cloud.cli("logs", "--stored", "--node", node, job).out.startswith(b"[%s] hello" % rank)
            for node, rank in (("0", b"0"), ("1", b"1"))
        ),
        "the logs in the store",
    )
    for process in cloud.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    running.end()
    shutil.rmtree(cloud.home / "process" / job)

    log = cloud.cli("logs", job)

    assert sorted(line[:11] for line in log.lines) == [b"[0] hello 0", b"[1] hello 1"], log


# -- a private certificate authority ---------------------------------------------------------------

READS_INPUTS = """\
for name in ("data", "page"):
    with open(os.environ[name]) as file:
        print(name, file.read())
print([name for name in os.environ if "CA_CERT" in name])
"""


@pytest.mark.parametrize(
    "variable",
    [
        "SSL_CERT_FILE",
        pytest.param("AWS_CA_BUNDLE", marks=pytest.mark.lengthy),
        pytest.param("REQUESTS_CA_BUNDLE", marks=pytest.mark.lengthy),
    ],
)
def test_nodes_trust_the_authority_of_the_store_and_of_web_servers(
    cloud, seaweedfs: Server, bucket: str, tmp_path: Path, variable: str
):
    """What ``doctor`` trusts, nodes trust: the store, inputs of a web server, and outputs."""
    authority = Authority(tmp_path)
    with front(authority, seaweedfs.port) as server:
        page = _signed_for(server.endpoint, bucket)
        cloud.environ.update(seaweedfs.environ)
        cloud.environ.update({"AWS_ENDPOINT_URL": server.endpoint, variable: str(authority.bundle)})
        store = f"s3://{bucket}/jobs"
        checked = cloud.cli("doctor", "--store", store)
        done = cloud.submit(
            *("--store", store, "-n", "2", "--input", f"data=s3://{bucket}/in/numbers.txt"),
            *("--input", f"page={page}", cloud.script(READS_INPUTS)),
        )

    assert b"an object was written, listed and read" in checked.out, checked
    assert done.code == 0, done
    assert done.out.count(b"data 1 2 3\n") == done.out.count(b"page 1 2 3\n") == 2
    assert done.out.count(b"[]\n") == 2


def test_inputs_of_a_web_server_are_trusted_without_a_store_in_a_bucket(
    cloud, seaweedfs: Server, bucket: str, tmp_path: Path
):
    authority = Authority(tmp_path)
    with front(authority, seaweedfs.port) as server:
        page = _signed_for(server.endpoint, bucket)
        script = cloud.script("print(open(os.environ['page']).read())")
        refused = cloud.submit("--input", f"page={page}", script)
        cloud.environ["AWS_CA_BUNDLE"] = str(authority.bundle)
        done = cloud.submit("--input", f"page={page}", script)

    assert refused.code == 125, refused
    assert b"certificate verify failed" in refused.err
    assert b"hint: for a private authority set AWS_CA_BUNDLE=FILE where you submit" in refused.err
    assert done.code == 0, done
    assert b"1 2 3" in done.out


def test_an_unusable_file_of_certificates_is_named(
    cloud, bucket: str, seaweedfs: Server, tmp_path: Path
):
    path = tmp_path / "authority.pem"
    cloud.environ.update({**seaweedfs.environ, "AWS_CA_BUNDLE": str(path)})
    done = cloud.submit("--store", f"s3://{bucket}/jobs", cloud.script("print(1)"))

    assert done.code == 4, done
    assert f"error: reading certificates: AWS_CA_BUNDLE={path}: ".encode() in done.err
    assert b"no such file" in done.err
    assert b"hint: it must be a file of certificates in PEM format" in done.err
    # A job without any store but a folder of this machine does not need them.
    assert cloud.submit(cloud.script("print(1)")).code == 0


def _signed_for(endpoint: str, bucket: str) -> str:
    parameters = {"Bucket": bucket, "Key": "in/numbers.txt"}
    url = boto3_client(endpoint).generate_presigned_url("get_object", parameters, ExpiresIn=600)
    return str(url)
