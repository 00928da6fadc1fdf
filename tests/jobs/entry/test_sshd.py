"""The sshd and the ssh client of a node: real programs, on loopback, with the key of the job."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths, node_paths
from jobentry.node import sshd

PROGRAMS = all(shutil.which(name, path=sshd._search_path()) for name in ("sshd", "ssh-keygen"))
needs_ssh = pytest.mark.skipif(
    not PROGRAMS and os.environ.get("CLOUDJOB_REQUIRE_ALL") != "1",
    reason="there is no OpenSSH here: apt-get install openssh-server",
)


def key_pair(path: Path, kind: str = "ed25519") -> bytes:
    """Create a key pair and return the private key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path.read_bytes()


class Node:
    """A node with its own sshd."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir(mode=0o700)
        self.env = NodeEnv(job="j", hosts=("127.0.0.1", "localhost"), sshd_port=port)
        environ = {"MA_HOME": str(folder), "CLOUDJOB_NODE_DIR": str(folder / "node")}
        self.env = self.env._replace(node_dir=environ["CLOUDJOB_NODE_DIR"])
        self.where: NodePaths = node_paths(environ, self.env)
        Path(self.where.node_dir).mkdir(mode=0o700)
        self.server: subprocess.Popen[bytes] | None = None

    def start(self, key: bytes) -> None:
        """Start sshd with a key."""
        sshd.prepare(self.env, self.where, key)
        self.server = sshd.start(self.where)

    def ssh(self, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command over ssh on this machine, with additional ssh options."""
        return subprocess.run(
            ["ssh", *args, "-F", self.where.ssh_config, "127.0.0.1", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def close(self) -> None:
        """Stop sshd."""
        if self.server:
            self.server.terminate()
            self.server.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with a free port for its sshd."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    node = Node(tmp_path / "n", port)
    yield node
    node.close()


def is_up(node: Node) -> Callable[[], bool]:
    """Return a function that checks whether the node's sshd answers."""

    def ask() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", node.env.sshd_port), 5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    return ask


@needs_ssh
def test_the_jobs_key_grants_access_to_every_node(
    node: Node, tmp_path: Path, until: Callable[..., None]
):
    """The command runs as the current user, and only CLOUDJOB_NODE_DIR is passed to it."""
    node.start(key_pair(tmp_path / "key"))
    until(is_up(node), 60)
    os.environ["LEAKS"] = "no"
    try:
        done = node.ssh('id -u; echo "$CLOUDJOB_NODE_DIR$LEAKS"')
    finally:
        del os.environ["LEAKS"]

    assert done.stdout.splitlines() == [str(os.geteuid()), node.where.node_dir], done
    assert (done.returncode, done.stderr) == (0, "")


@needs_ssh
def test_another_key_is_refused(node: Node, tmp_path: Path, until: Callable[..., None]):
    node.start(key_pair(tmp_path / "key"))
    until(is_up(node), 60)
    client = Node(tmp_path / "client", node.env.sshd_port)
    sshd.prepare(client.env, client.where, key_pair(tmp_path / "other"))
    ours, theirs = (sshd.files_in(each.where.node_dir).known for each in (node, client))
    shutil.copy(ours, theirs)

    done = client.ssh("echo in")

    assert (done.returncode, done.stdout) == (255, ""), done
    assert "Permission denied" in done.stderr


@needs_ssh
def test_an_sshd_with_another_host_key_is_refused(
    node: Node, tmp_path: Path, until: Callable[..., None]
):
    node.start(key_pair(tmp_path / "key"))
    until(is_up(node), 60)
    client = Node(tmp_path / "client", node.env.sshd_port)
    sshd.prepare(client.env, client.where, key_pair(tmp_path / "other"))

    done = client.ssh("echo in")

    assert (done.returncode, done.stdout) == (255, ""), done
    assert "Host key verification failed" in done.stderr


@needs_ssh
@pytest.mark.parametrize(
    "args",
    [["-W", "127.0.0.1:%(port)d"], ["-o", "ExitOnForwardFailure=yes", "-R", "0:localhost:1"]],
    ids=["there", "back"],
)
def test_sshd_allows_only_commands(
    node: Node, tmp_path: Path, args: list[str], until: Callable[..., None]
):
    """Forwarding is refused in both directions."""
    node.start(key_pair(tmp_path / "key"))
    until(is_up(node), 60)

    done = node.ssh("true", *(argument % {"port": node.env.sshd_port} for argument in args))

    assert done.returncode == 255, done


@needs_ssh
def test_files_are_private_and_replaced_on_a_restart(node: Node, tmp_path: Path):
    for name in ("one", "two"):
        key = key_pair(tmp_path / name)
        sshd.prepare(node.env, node.where, key)
        files = sshd.files_in(node.where.node_dir)
        for path in (files.key, files.authorized, files.known, files.server, node.where.ssh_config):
            assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert Path(files.key).read_bytes() == key
        public = (tmp_path / (name + ".pub")).read_text().split()[:2]
        assert Path(files.authorized).read_text().split() == public
        Path(files.key).chmod(0o400)


@needs_ssh
def test_a_key_without_a_final_newline_is_accepted(node: Node, tmp_path: Path):
    sshd.prepare(node.env, node.where, key_pair(tmp_path / "key").rstrip(b"\n"))


@needs_ssh
@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_the_public_key_is_read_from_the_private_key(node: Node, tmp_path: Path, kind: str):
    sshd.prepare(node.env, node.where, key_pair(tmp_path / "key", kind))

    authorized = Path(sshd.files_in(node.where.node_dir).authorized)
    assert authorized.read_text().split() == (tmp_path / "key.pub").read_text().split()[:2]


@needs_ssh
def test_a_truncated_or_encrypted_key_is_refused(node: Node, tmp_path: Path):
    lines = key_pair(tmp_path / "key").splitlines(keepends=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(tmp_path / "key")], check=True
    )

    for key in (b"".join([*lines[:-2], lines[-1]]), (tmp_path / "key").read_bytes()):
        with pytest.raises(sshd.SshError, match="reading the key of the job"):
            sshd.prepare(node.env, node.where, key)


@needs_ssh
def test_a_key_in_openssls_format_is_accepted(node: Node, tmp_path: Path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "", "-f", str(tmp_path / "key")],
        check=True,
    )
    sshd.prepare(node.env, node.where, (tmp_path / "key").read_bytes())

    authorized = Path(sshd.files_in(node.where.node_dir).authorized)
    assert authorized.read_text().split() == (tmp_path / "key.pub").read_text().split()[:2]


@needs_ssh
@pytest.mark.parametrize("key", [b"", b"no key at all", b"\xff\x00"])
def test_an_invalid_key_is_refused_without_showing_it(node: Node, key: bytes):
    with pytest.raises(sshd.SshError, match="reading the key of the job") as caught:
        sshd.prepare(node.env, node.where, key)

    assert "no key at all" not in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_ssh
def test_a_port_in_use_is_reported(node: Node, tmp_path: Path, until: Callable[..., None]):
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(
        ("", node.env.sshd_port), family=family, dualstack_ipv6=family == socket.AF_INET6
    ):
        node.start(key_pair(tmp_path / "key"))
        assert node.server is not None
        assert node.server.wait(60) != 0

    assert "Address already in use" in sshd.last_lines(node.where)


def test_a_missing_ssh_program_is_reported(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sshd, "_search_path", lambda: str(tmp_path))

    with pytest.raises(sshd.SshError, match=r"looking for sshd: not found in this image"):
        sshd.start(node.where)
    with pytest.raises(sshd.SshError, match="looking for ssh-keygen: not found"):
        sshd.prepare(node.env, node.where, b"key")


def test_an_sshd_that_never_ran_has_no_log(node: Node):
    assert sshd.last_lines(node.where) == ""
