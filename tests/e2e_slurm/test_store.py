"""Jobs on Slurm with a bucket instead of a shared folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from tests.e2e_slurm.test_jobs import PRELUDE, SIZE
from tests.support.servers import SECRET_KEY, SeaweedFS, client_environ
from tests.support.slurm import LOGIN_ADDRESS, Slurm

CREATE_BUCKET = "import boto3, sys; boto3.client('s3').create_bucket(Bucket=sys.argv[1])"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


@dataclass
class OnTheLoginNode(SeaweedFS):
    """A server in the login node's network, where the nodes can reach it."""

    cluster: Slurm | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{LOGIN_ADDRESS}:{self.port}"

    def argv(self, program: str = "") -> list[str]:
        assert self.cluster is not None
        command = [
            argument.replace("127.0.0.1", LOGIN_ADDRESS) for argument in super().argv(program)
        ]
        return self.cluster.argv(*command)

    def is_ready(self) -> bool:
        assert self.cluster is not None
        try:
            self.cluster.run(sys.executable, "-c", CONNECT, LOGIN_ADDRESS, str(self.port))
        except RuntimeError:
            return False
        return True


@pytest.fixture
def bucket(cloud, cluster):
    """The URI of a bucket; the commands of ``cloud`` have its keys."""
    server = OnTheLoginNode(cloud.folder / "s3", cluster=cluster)
    try:
        server.start()
        cloud.environ.update(client_environ(server.endpoint))
        variables = (f"{name}={value}" for name, value in server.environ.items())
        cluster.run("env", *variables, sys.executable, "-c", CREATE_BUCKET, "jobs")
        yield "s3://jobs/team"
    finally:
        server.kill()


def test_code_and_outputs_can_go_through_a_bucket(cloud, bucket):
    """Nodes fetch code from it and store outputs in it; no file of the job still has its keys."""
    cloud.write("part.txt", "weights")
    cloud.write(
        "train.py",
        PRELUDE + "text = open('part.txt').read()\n"
        "open(os.environ['KEPT'] + f'/{rank}', 'w').write(text)\nprint('hello', rank)\n",
    )
    done = cloud.submit("--store", bucket, "--output", "KEPT=", *SIZE, "train.py")
    target = cloud.folder / "fetched"
    fetched = cloud.run("outputs", done.job, "--to", str(target))
    folder = cloud.job_folder(done.job)

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[%d] hello %d" % (rank, rank) for rank in range(4)]
    assert fetched.code == 0, fetched
    assert {path.name: path.read_text() for path in target.rglob("*") if path.is_file()} == {
        ".gitignore": "*\n",
        **{str(rank): "weights" for rank in range(4)},
    }
    assert not (folder / "env").exists()
    assert all(SECRET_KEY not in path.read_text("latin-1") for path in folder.glob("*.*"))
    assert not (cloud.home / "store").exists()
