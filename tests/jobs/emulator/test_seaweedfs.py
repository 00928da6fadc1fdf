"""The ports and sockets of SeaweedFS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloudjob.emulator.obs import seaweedfs
from tests.support.emulator import await_true


def test_seaweedfs_uses_other_ports_if_some_are_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free_ports = seaweedfs._free_ports
    with ExitStack() as stack:
        first = seaweedfs.SeaweedFS(tmp_path / "first", "bucket")
        stack.callback(first.stop)
        first.start()
        next_ports: Iterator[int] = iter([first.port])
        monkeypatch.setattr(seaweedfs, "_free_ports", lambda: next(next_ports, 0) or free_ports())
        second = seaweedfs.SeaweedFS(tmp_path / "second", "bucket")
        stack.callback(second.stop)
        second.start()

        assert next(next_ports, None) is None
        assert second.port != first.port
        assert first.is_alive()
        assert second.is_alive()


def test_no_sockets_are_left_in_tmp_after_a_stop_or_a_kill(tmp_path: Path):
    sockets_of_runs: list[set[Path]] = []
    with ExitStack() as stack:
        for _ in range(2):
            server = seaweedfs.SeaweedFS(tmp_path, "bucket")
            stack.callback(server.stop)
            server.start()
            ports = enumerate(seaweedfs._NAMES, server.port + 10_000)
            sockets = {Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock") for port, name in ports}
            await_true(lambda sockets=sockets: all(path.exists() for path in sockets))
            sockets_of_runs.append(sockets)
            assert server._process
            server._process.kill()
            await_true(lambda server=server: not server.is_alive())
        assert not [path for path in sockets_of_runs[0] if path.exists()]

    assert not [path for path in sockets_of_runs[1] if path.exists()]
