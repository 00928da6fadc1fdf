"""What NCCL says about its collectives is compared; a server answers as NCCL 2.28 does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobentry.contract.hangs import Progress
from jobentry.node import collectives
from jobentry.node.collectives import Launched

ELSEWHERE = "203.0.113.9"


def communicator(*counts: dict[str, int], host: str = "127.0.0.1") -> dict[str, Any]:
    """Return a communicator whose ranks have launched so much; the last one is on ``host``."""
    hosts = ["127.0.0.1"] * (len(counts) - 1) + [host]
    return {
        "hash": "0x6ef72b4e5e142dab",
        "size": len(counts),
        "ranks": [
            {
                "rank": rank,
                "host": hosts[rank],
                "pid": 100 + rank,
                "status": {"init_state": 0, "abort_flag": False},
                "collective_counts": {"Broadcast": 0, **each},
            }
            for rank, each in enumerate(counts)
        ],
        "missing_ranks": [],
    }


def status(*communicators: dict[str, Any]) -> dict[str, Any]:
    return {"nccl_version": "2.28.9", "communicators": list(communicators)}


@pytest.mark.parametrize(
    ("communicators", "expected"),
    [
        pytest.param(
            [communicator({"AllReduce": 30}, {"AllReduce": 30})],
            {100: Launched(Progress.LEVEL), 101: Launched(Progress.LEVEL)},
            id="all have launched the same",
        ),
        pytest.param(
            [communicator({"AllReduce": 31}, {"AllReduce": 30}, {"AllReduce": 31})],
            {100: Launched(Progress.AHEAD), 101: Launched(Progress.BEHIND, "AllReduce 31"),
             102: Launched(Progress.AHEAD)},
            id="one has not joined",
        ),
        pytest.param(
            [communicator({"AllReduce": 2}, {"AllReduce": 1}),
             communicator({"AllReduce": 69}, {"AllReduce": 70})],
            {100: Launched(Progress.BOTH, "AllReduce 70"),
             101: Launched(Progress.BOTH, "AllReduce 2")},
            id="each is in another group",
        ),
        pytest.param(
            [communicator({"AllReduce": 5, "Broadcast": 1}, {"AllReduce": 4, "Broadcast": 2})],
            {100: Launched(Progress.BOTH, "Broadcast 2"),
             101: Launched(Progress.BOTH, "AllReduce 5")},
            id="each has called something else",
        ),
        pytest.param(
            [communicator({"AllReduce": 5}, {"AllReduce": 4}, host=ELSEWHERE)],
            {100: Launched(Progress.AHEAD)},
            id="processes of other machines may have the same number",
        ),
        pytest.param(
            [communicator({"AllReduce": 5}, {"AllReduce": 5}),
             communicator({"AllGather": 9}, {"AllGather": 8})],
            {100: Launched(Progress.AHEAD), 101: Launched(Progress.BEHIND, "AllGather 9")},
            id="equal in one group, behind in another",
        ),
    ],
)  # fmt: skip
def test_counts_are_compared_within_each_communicator(
    communicators: list[dict[str, Any]], expected: dict[int, Launched]
):
    assert collectives.compare(status(*communicators)) == expected


class Server:
    """Answers one client as NCCL's RAS thread does, then closes."""

    def __init__(self, answer: bytes, bytes_s: float = 0.0) -> None:
        """Send the answer again and again, a byte every ``bytes_s`` seconds, if that is not 0."""
        self._bytes_s = bytes_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()[:2]
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        stream, _ = self._socket.accept()
        with stream, stream.makefile("rwb") as file:
            for line in file:
                replies = {
                    b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n",
                    b"SET FORMAT json\n": b"OK\n",
                }
                file.write(replies.get(line, self._answer))
                file.flush()
                if line not in replies:
                    # The client leaves at some time.
                    with contextlib.suppress(OSError):
                        while self._bytes_s:
                            time.sleep(self._bytes_s)
                            stream.sendall(b"x")
                    return

    def close(self) -> None:
        self._thread.join(180)
        self._socket.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (json.dumps(status(communicator({"AllReduce": 3}, {"AllReduce": 2}))).encode(),
         {100: Launched(Progress.AHEAD), 101: Launched(Progress.BEHIND, "AllReduce 3")}),
        (b'{"communicators": [{"ranks": [{}]}]}', {}),
        (b'{"communicators": [{"hash": "0x6ef72b4e5e142dab" "size": 2}]}', {}),
        (b'{"communicators": [3]}', {}),
        (b"[" * 100_000, {}),
        (b'{"communicators": [{"ranks": [{"host": "127.0.0.1", "pid": 1,'
         b' "collective_counts": {"AllReduce": Infinity}}]}]}', {}),
        (b"", {}),
        (json.dumps(status(communicator({"\x1b]0;x\x07": 3}, {"\x1b]0;x\x07": 2}))).encode(),
         {100: Launched(Progress.LEVEL), 101: Launched(Progress.LEVEL)}),
    ],
    ids=["as NCCL answers", "no counts", "malformed", "other values", "nested", "infinite",
         "nothing", "names that are none"],
)  # fmt: skip
def test_an_answer_is_read_and_one_that_makes_no_sense_is_none(
    answer: bytes, expected: dict[int, Launched]
):
    server = Server(answer)
    try:
        assert collectives.ask(server.address) == expected
    finally:
        server.close()


def test_a_server_that_answers_byte_by_byte_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "_TIMEOUT_S", 0.3)
    server = Server(b"x", bytes_s=0.02)
    try:
        assert collectives.ask(server.address) == {}
    finally:
        server.close()


def test_a_server_of_another_user_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(collectives.os, "geteuid", lambda: os.getuid() + 1)
        assert collectives.ask(server.getsockname()[:2]) == {}
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_only_this_user_may_listen_where_nccl_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another user may listen at one address, beside a rank of ours at all of them."""
    ours = os.geteuid()
    rows = {"0100007F": ours, "00000000": ours, "0100000A": ours + 1}
    for other, expected in ((ours, True), (ours + 1, False)):
        rows["0100007F"] = other
        table = tmp_path / "tcp"
        table.write_text(
            "  sl  local_address rem_address   st\n"
            + "".join(
                f"   0: {address}:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000"
                f" {user} 0 22901 1\n"
                for address, user in rows.items()
            )
        )
        monkeypatch.setattr(collectives, "_SOCKETS", str(table))
        assert collectives._is_of_this_user(28028) is expected


def test_without_a_server_nothing_is_known():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()[:2]

    assert collectives.ask(address) == {}
