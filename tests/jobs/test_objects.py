"""Whole jobs with inputs and outputs in S3, on a real server.

The entry transfers them, so it makes no difference which mpirun starts the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.servers import Fault, FaultProxy, Server, boto3_client

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Bucket:
    """A bucket, and the variables with which a job reaches it."""

    def __init__(self, server: Server, name: str, endpoint: str = "") -> None:
        self.name = name
        self.uri = f"s3://{name}"
        self.boto3 = boto3_client(server.endpoint)
        environ = {**server.environ, "AWS_ENDPOINT_URL": endpoint or server.endpoint}
        self.keys = {key: environ[key] for key in KEYS}
        self.arguments = ["-e", f"AWS_ENDPOINT_URL={environ['AWS_ENDPOINT_URL']}"]
        self.arguments += ["-e", f"AWS_REGION={environ['AWS_REGION']}"]
        for key in KEYS:
            self.arguments += ["--secret", key]

    def put(self, key: str, data: bytes) -> None:
        """Store an object as a user does."""
        self.boto3.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        """Return an object."""
        data: bytes = self.boto3.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def objects(self) -> list[str]:
        """Return all keys."""
        listed = self.boto3.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [item["Key"] for item in listed]

    def kept(self, prefix: str = "out", node: int = 0) -> dict[str, bytes]:
        """Return the files in a node's manifest, after a check of each object's digest."""
        key = f"{prefix}/.cloudjob-outputs/node-{node}.json"
        if key not in self.objects():
            return {}
        files = {}
        for file in json.loads(self.get(key))["files"]:
            data = self.get(f"{prefix}/{file['key']}")
            assert hashlib.sha256(data).hexdigest() == file["sha256"]
            files[file["name"]] = data
        return files


@pytest.fixture
def bucket(seaweedfs: Server, new_bucket: Callable[[Server], str]) -> Bucket:
    """An empty bucket on a real server."""
    return Bucket(seaweedfs, new_bucket(seaweedfs))


def start(cloud: Any, bucket: Bucket, *arguments: str) -> Any:
    """Submit in the background."""
    environ = {**cloud.environ, **bucket.keys}
    command = cloud.submit_arguments((*bucket.arguments, *arguments))
    return cloud.start(*command, env=environ)


def test_a_job_uses_inputs_and_outputs_in_a_bucket(cloud, bucket, tmp_path):
    """Every node gets the prefix, the ranks' files are stored, and no secret key is printed."""
    for name in ("a", "deep/b c"):
        bucket.put(f"data/{name}", name.encode() * 1000)
    script = cloud.script(
        """
        data = os.environ["DATA"]
        found = open(data + "/a").read() + open(data + "/deep/b c").read()
        with open(os.environ["OUT"] + f"/rank {rank}", "w") as file:
            file.write(found)
        """
    )
    arguments = ["--nodes", "2", "--input", f"DATA={bucket.uri}/data", "--output"]
    done = start(cloud, bucket, *arguments, f"OUT={bucket.uri}/out", script).end()

    expected = b"a" * 1000 + b"deep/b c" * 1000
    assert done.code == 0, done
    for rank in range(2):
        assert bucket.get(f"out/rank {rank}") == expected
        assert bucket.kept(node=rank) == {f"rank {rank}": expected}
    assert bucket.keys["AWS_SECRET_ACCESS_KEY"].encode() not in done.out + done.err


def test_a_script_of_the_first_version_copies_with_moxing_in_separate_processes(cloud, bucket):
    """It works on each node, in child processes of the ranks that mpirun starts."""
    bucket.put("data/in.txt", b"in")
    cloud.write("job.yaml", "modelarts: {first_version: true}\n")
    cloud.write(
        "nested.py",
        """
        import os, socket
        import moxing as mox
        index, count = os.environ["DLS_TASK_INDEX"], int(os.environ["DLS_TASK_NUMBER"])
        hosts = [os.environ["BATCH_CUSTOM%d_HOSTS" % node] for node in range(count)]
        for host in hosts:
            socket.gethostbyname(host.partition(":")[0])
        mox.file.copy_parallel(os.environ["BUCKET"] + "/data", "cache-" + index)
        text = open("cache-%s/in.txt" % index).read() + " " + os.environ["HOSTNAME"][-8:]
        mox.file.write(os.environ["BUCKET"] + "/out/" + index, text)
        """,
    )
    script = cloud.script("sys.exit(os.system('python nested.py') >> 8)")
    options = ["--nodes", "2", "--config", "job.yaml", "-e", f"BUCKET={bucket.uri}"]
    done = start(cloud, bucket, *options, script).end()

    assert done.code == 0, done
    assert [bucket.get(f"out/{node}") for node in (0, 1)] == [b"in worker-0", b"in worker-1"]


def test_a_checkpoint_uploaded_while_the_job_runs_survives_a_crash(cloud, bucket):
    """All processes are killed during a second checkpoint; the first one stays complete."""
    script = cloud.script(
        """
        # The files of one folder are replaced together.
        out = os.environ["OUT"] + "/checkpoint"
        os.mkdir(out)
        for part in "ab":
            with open(f"{out}/{part}", "wb") as file:
                file.write(b"1" * 1_000_000)
        await_file("kept")
        with open(f"{out}/a", "wb") as file:
            file.write(b"2" * 2_000_000)
        with open(f"{out}/b", "wb", buffering=0) as file:
            write_result("half")
            while True:
                file.write(b"2")
                time.sleep(0.05)
        """
    )
    arguments = ["--output", f"OUT={bucket.uri}/out", "--output-sync-s", "0.5", script]
    job = start(cloud, bucket, *arguments)
    first = {"checkpoint/a": b"1" * 1_000_000, "checkpoint/b": b"1" * 1_000_000}
    poll(lambda: bucket.kept() == first)
    cloud.results.joinpath("kept").touch()
    cloud.await_results("half")
    # Check several times while the second checkpoint is incomplete.
    seen = [bucket.kept() for _ in range(20)]
    for pid in cloud.processes():
        # A process may have exited because of one that was killed before it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.end()

    assert seen == [first] * 20
    assert bucket.kept() == first


def test_files_saved_during_the_grace_period_are_uploaded(cloud, bucket):
    script = cloud.script(
        """
        def save(*_):
            time.sleep(1)
            with open(os.environ["OUT"] + f"/last-{rank}", "w") as file:
                file.write("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        write_result(f"up-{rank}")
        while True:
            time.sleep(0.1)
        """
    )
    arguments = ["--nodes", "2", "--grace-s", "30", "--output", f"OUT={bucket.uri}/out", script]
    job = start(cloud, bucket, *arguments)
    cloud.await_results("up-0", "up-1")
    assert cloud.cli("cancel", job.job).code == 0
    job.end()

    assert bucket.kept(node=0) == {"last-0": b"saved"}
    assert bucket.kept(node=1) == {"last-1": b"saved"}


def test_a_second_attempt_starts_with_the_restored_outputs(cloud, bucket):
    script = cloud.script(
        """
        path = os.environ["OUT"] + "/step"
        step = int(open(path).read()) if os.path.exists(path) else 0
        if rank == 0:
            open(path + ".new", "w").write(str(step + 1))
            # Renamed, it is complete; a file system's clock ticks every few milliseconds.
            time.sleep(0.1)
            os.rename(path + ".new", path)
        write_result(f"{rank}-{step}")
        for other in range(size): await_file(f"{other}-{step}")
        sys.exit(3 if step == 0 else 0)
        """
    )
    arguments = ["--nodes", "2", "--retries", "1", "--restore-outputs", "all"]
    done = start(cloud, bucket, *arguments, "--output", f"OUT={bucket.uri}/out", script).end()

    assert done.code == 0, done
    assert set(cloud.results_written()) == {"0-0", "1-0", "0-1", "1-1"}
    assert bucket.kept() == {"step": b"2"}


def test_outputs_that_the_store_refuses_fail_the_job(cloud, seaweedfs, new_bucket, fault_proxy):
    """The message names the file and what to check."""
    proxy: FaultProxy = fault_proxy(seaweedfs)
    proxy.add(
        Fault(status=403, code="AccessDenied"), when=lambda r: r.path.endswith("/model"), times=99
    )
    bucket = Bucket(seaweedfs, new_bucket(seaweedfs), proxy.endpoint)
    script = cloud.script('open(os.environ["OUT"] + "/model", "w").write("x")')
    done = start(cloud, bucket, "--output", f"OUT={bucket.uri}/out", script).end()

    assert done.code == 125, done
    message = cloud.status(done.job)["failure"]["message"]
    assert f"uploading the output OUT: writing {bucket.uri}/out/model: 403" in message
    assert "right to do this" in message


def test_two_nodes_that_write_the_same_output_file_fail_the_job(cloud, tmp_path):
    script = cloud.script('open(os.environ["OUT"] + "/log", "w").write(str(rank))')
    done = cloud.submit("--nodes", "2", "--output", f"OUT=file://{tmp_path}/kept", script)

    assert done.code == 125, done
    assert "nodes 0, 1 all wrote 'log'" in cloud.status(done.job)["failure"]["message"]


def test_a_job_cannot_damage_its_input(cloud, tmp_path):
    """The job removes and replaces files in its copy; the user's files do not change."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("mine")
    script = cloud.script(
        """
        data = os.environ["DATA"]
        os.unlink(data + "/a")
        open(data + "/a", "w").write("theirs")
        open(data + "/b", "w").write("theirs")
        """
    )
    done = cloud.submit("--nodes", "2", "--input", f"DATA={data.as_uri()}", script)

    assert done.code == 0, done
    assert {path.name: path.read_text() for path in data.iterdir()} == {"a": "mine"}


def test_outputs_are_fetched_by_their_manifest(cloud, tmp_path):
    script = cloud.script('open(os.environ["OUT"] + "/model", "w").write("good")')
    kept = tmp_path / "kept"
    done = cloud.submit("--output", f"OUT={kept.as_uri()}", script)
    (kept / "half").write_text("half a checkpoint")
    listed = cloud.cli("outputs", done.job).lines
    fetched = cloud.cli("outputs", "--to", tmp_path / "to", done.job)
    (kept / "model").write_text("evil")
    refused = cloud.cli("outputs", "--to", tmp_path / "to", done.job)

    assert listed == [b"OUT/model"]
    assert fetched.code == 0, fetched
    assert refused.code == 4, refused
    assert b"it does not match its manifest" in refused.err
    assert (tmp_path / "to" / "OUT" / "model").read_text() == "good"
    assert [path.name for path in (tmp_path / "to" / "OUT").iterdir()] == ["model"]


def poll(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never was so"
        time.sleep(0.1)


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_files_being_written_when_a_job_failed_are_listed_as_incomplete(cloud, tmp_path, end):
    script = cloud.script(f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        out = os.environ["OUT"] + "/"
        for name in ("whole.ckpt", "idle.ckpt", "half.ckpt"):
            file = open(out + name, "wb", buffering=0)
            file.write(b"1")
            if name != "half.ckpt":
                os.utime(out + name, (1, 1))
            if name == "whole.ckpt":
                file.close()
            elif name == "idle.ckpt":
                idle = file
        write_result("up")
        {end}
    """)
    run = cloud.start_submit("--grace-s", "1", "--output", "OUT=", script)
    cloud.await_results("up")
    if "sleep" in end:
        assert cloud.cli("cancel", run.job).code == 0
    assert run.end().code != 0

    listed = cloud.cli("outputs", run.job)
    fetched = cloud.cli("outputs", "--to", tmp_path / "to", run.job)

    half, idle, whole = listed.lines
    assert half == b"OUT/half.ckpt  (may be incomplete)"
    assert whole == b"OUT/whole.ckpt"
    # If the rank ended by itself, this is known only if the node checked the file before that.
    assert idle.removesuffix(b"  (may be incomplete)") == b"OUT/idle.ckpt"
    assert idle != b"OUT/idle.ckpt" or "sleep" not in end
    assert b"OUT/half.ckpt may be incomplete: something was writing to it" in fetched.err
    assert sorted(path.name for path in (tmp_path / "to" / "OUT").iterdir()) == [
        "half.ckpt",
        "idle.ckpt",
        "whole.ckpt",
    ]
