"""The line between the head and a worker: real FIFOs, a real shell, and a script for ssh."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry import peers
from jobentry.contract.env import NodeEnv
from jobentry.peers import Lines, Message, Peer, PeerError

JSON = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=3)


@given(
    st.text(),
    st.dictionaries(st.text().filter(lambda name: name not in ("word", "values")), JSON),
)
def test_what_is_said_is_heard(word: str, values: dict[str, object]):
    """One line, without a newline in it, that holds word and values."""
    line = peers.dump(word, **values)

    assert line.count(b"\n") == 1
    assert peers.load(line) == Message(word, values)


@given(st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b""))), st.data())
def test_lines_are_put_together(lines: list[bytes], data: st.DataObject):
    """However the stream is cut, its lines come out, and a rest without a newline waits."""
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    together = Lines()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)]):
        found += together.feed(stream[start:end])

    assert found == lines
    assert together.feed(b"\n") == [b"rest"]


def test_a_command_goes_over_ssh():
    """With the settings of the job, and the port of the nodes' sshd."""
    node = NodeEnv(hosts=("a", "b"), sshd_port=38888)

    assert peers.shell_command(node, "b", "echo 'x'", "/n/config") == [
        "ssh", "-F", "/n/config", "-p", "38888", "-o", "SetEnv=SHLVL=1", "b", "echo 'x'",
    ]  # fmt: skip
    assert peers.shell_command(node._replace(remote_shell="/agent"), "b", "x y", "/n/config") == [
        "/agent", "b", "x y",
    ]  # fmt: skip


class Far:
    """The far side: the FIFOs of a worker's entry, and a remote shell that leads to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "worker"
        self.folder.mkdir()
        self.shell = folder / "agent"
        # As sshd: a clean environment, the command as one word for a shell.
        self.shell.write_text(
            '#!/bin/sh\n[ "$1" = far ] || exit 255\n'
            'exec env -i PATH="$PATH" HOME=%s CLOUDJOB_NODE_DIR=%s /bin/sh -c "$2"\n'
            % (folder, self.folder)
        )
        self.shell.chmod(0o755)
        self.node = NodeEnv(job="j", hosts=("near", "far"), remote_shell=str(self.shell))
        self.from_head = self.to_head = -1

    def open(self) -> None:
        """Make the FIFOs and open them, as the worker's entry does."""
        for name in ("to-head", "from-head"):
            if not (self.folder / name).exists():
                os.mkfifo(self.folder / name)
        self.to_head = os.open(self.folder / "to-head", os.O_RDWR | os.O_NONBLOCK)
        self.from_head = os.open(self.folder / "from-head", os.O_RDONLY | os.O_NONBLOCK)

    def say(self, data: bytes) -> None:
        os.write(self.to_head, data)

    def hear(self, within_s: float = 20.0) -> bytes:
        """Return what comes from the head next; nothing is the end."""
        assert select.select([self.from_head], [], [], within_s)[0]
        return os.read(self.from_head, 65536)

    def close(self) -> None:
        for descriptor in (self.to_head, self.from_head):
            if descriptor >= 0:
                os.close(descriptor)
        self.to_head = self.from_head = -1


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    """A worker's side, whose FIFOs are not yet there."""
    far = Far(tmp_path)
    yield far
    far.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """A function that opens the head's side; its remote shells are ended with the test."""
    found: list[Peer] = []

    def make(node: NodeEnv) -> Peer:
        peer = Peer(node, 1, str(tmp_path / "peer.log"), "/n/config")
        found.append(peer)
        peer.open()
        return peer

    yield make
    for peer in found:
        peer.close(patience_s=0.0)
        if peer._session is not None and peer._session.stdout is not None:
            peer._session.stdout.close()


@pytest.fixture
def near(far: Far, opened: Callable[..., Peer]) -> Peer:
    """The head's side, whose remote shell has been started."""
    return opened(far.node)


def session(peer: Peer) -> subprocess.Popen[bytes]:
    """Return the remote shell of a peer."""
    assert peer._session is not None
    return peer._session


def hang_up(peer: Peer) -> None:
    """Close the input of the remote shell, as the kernel does when the head is killed."""
    stdin = session(peer).stdin
    assert stdin is not None
    stdin.close()


def heard(peer: Peer, within_s: float = 20.0) -> list[Message] | None:
    """Return what the worker says next; None is the end."""
    assert select.select([peer], [], [], within_s)[0]
    return peer.hear()


def processes_in(leader: int) -> list[str]:
    """Return the names of the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except (OSError, UnicodeDecodeError):
            continue
        state, _, _, number = rest.split()[:4]
        if int(number) == leader and state not in "ZX":
            found.append(name)
    return found


def test_both_sides_hear_each_other(far: Far, near: Peer):
    """The session waits for the worker's FIFOs, and then each line goes through."""
    near.tell("more", a=1)
    far.open()
    text = far.hear()
    while text.count(b"\n") < 2:
        text += far.hear()
    far.say(peers.dump("ready", at_s=1.0) + peers.dump("start", rank=3))

    assert [peers.load(line) for line in text.splitlines()] == [
        Message("hello", {}),
        Message("more", {"a": 1}),
    ]
    assert not near.is_ready
    found = heard(near)
    while found is not None and len(found) < 2:
        found += heard(near) or []
    assert found == [Message("ready", {"at_s": 1.0}), Message("start", {"rank": 3})]
    assert near.is_ready
    near.tell("end", code=0)
    assert peers.load(far.hear()) == Message("end", {"code": 0})


def test_what_was_said_before_the_session_waits(far: Far, opened: Callable[..., Peer]):
    """A worker that is up first loses no word."""
    far.open()
    far.say(peers.dump("idle"))
    peer = opened(far.node)

    assert heard(peer) == [Message("idle", {})]
    assert peer.is_idle
    far.close()
    assert heard(peer) is None
    peer.close(patience_s=5.0)
    assert session(peer).returncode is not None


def test_the_head_notices_that_the_worker_went(far: Far, near: Peer):
    """Its entry was killed: the kernel closes its FIFOs."""
    far.open()
    far.hear()
    far.close()

    assert heard(near) is None


def test_the_worker_notices_that_the_head_went(far: Far, near: Peer):
    """The head's entry was killed: the kernel closes the remote shell's input."""
    far.open()
    far.hear()
    hang_up(near)

    assert far.hear() == b""


def test_the_worker_notices_that_the_session_was_killed(far: Far, near: Peer):
    """Sshd ends what it started when the connection is gone; nothing of it stays."""
    far.open()
    far.hear()
    os.killpg(near.process, signal.SIGKILL)

    assert far.hear() == b""
    assert heard(near) is None


def test_nothing_stays_on_the_worker_when_both_went(
    far: Far, near: Peer, until: Callable[..., None]
):
    """Shell and cats are gone once both ends are closed."""
    far.open()
    far.hear()
    assert processes_in(near.process)
    hang_up(near)
    far.close()
    session(near).wait(20)

    until(lambda: processes_in(near.process) == [])


def test_a_worker_that_never_comes_leaves_no_session(near: Peer, until: Callable[..., None]):
    """The head gives up before the FIFOs are there."""
    near.close(patience_s=0.2)

    assert session(near).returncode is not None
    until(lambda: processes_in(near.process) == [])


def test_a_remote_shell_that_started_others_leaves_none(
    far: Far, opened: Callable[..., Peer], until: Callable[..., None]
):
    """A script in the place of ssh need not be one process."""
    far.shell.write_text("#!/bin/sh\nsleep 60\nexit 0\n")
    peer = opened(far.node)
    until(lambda: "sleep" in processes_in(peer.process))
    peer.close(patience_s=0.0)

    until(lambda: processes_in(peer.process) == [])


def test_words_for_a_worker_that_went_are_lost(far: Far, near: Peer):
    """Who tells the end to all nodes need not know which of them are still there."""
    far.open()
    far.hear()
    far.close()
    session(near).wait(20)

    near.tell("end", code=0)
    near.tell("end", code=0)
    near.close(1.0)
    near.tell("end", code=0)


def test_a_session_can_be_opened_again(far: Far, near: Peer):
    """A remote shell that got nowhere is tried again; half a line of the first one is forgotten."""
    far.open()
    far.hear()
    far.say(b'{"half')
    assert heard(near) == []
    os.killpg(near.process, signal.SIGKILL)
    assert heard(near) is None
    first = session(near)
    near.close(1.0)
    near.open()
    assert first.stdout is not None
    first.stdout.close()

    assert far.hear() in (b"", peers.dump("hello"))
    far.say(peers.dump("idle"))
    assert heard(near) == [Message("idle", {})]


def test_what_a_remote_shell_says_is_kept(far: Far, opened: Callable[..., Peer]):
    """The last of it stands in the message on a worker that cannot be reached."""
    far.shell.write_text(
        "#!/bin/sh\necho first >&2; printf 'ssh: no \\377 route\\n' >&2\nexit 255\n"
    )
    peer = opened(far.node)

    assert heard(peer) is None
    peer.close(patience_s=5.0)
    assert session(peer).returncode == 255
    assert peer.words() == "first; ssh: no \ufffd route"


def test_a_remote_shell_that_is_not_there_is_named(far: Far, opened: Callable[..., Peer]):
    """Nothing was started, and the message says what was tried."""
    with pytest.raises(PeerError) as caught:
        opened(far.node._replace(remote_shell="/no/agent"))

    assert str(caught.value) == (
        "opening a remote shell to far: /no/agent: No such file or directory"
    )


def test_why_a_shell_failed_is_known_until_the_next_could_say_so(
    tmp_path: Path, opened: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
):
    """The moment in which a start is given up may be one in which another has just begun."""
    shell, now = tmp_path / "agent", tmp_path / "has-begun"
    shell.write_text(f"""\
#!/bin/sh
[ -e {now} ] && exec sleep 600
touch {now}
echo "Host key verification failed." >&2
""")
    shell.chmod(0o755)
    peer = opened(NodeEnv(hosts=("a", "b"), job="x", remote_shell=str(shell)))
    peer.close(patience_s=10.0)
    assert peer.words() == "Host key verification failed."

    peer.open()
    assert peer.words() == "Host key verification failed."
    monkeypatch.setattr(peers, "_EARLIER_S", 0.0)
    assert peer.words() == ""
