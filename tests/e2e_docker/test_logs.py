"""Logs through an engine, which splits lines into parts of 16 KiB, keep every byte."""

from __future__ import annotations

from pathlib import Path

import docker
import pytest

from cloudjob.backends.docker import logs
from cloudjob.backends.docker.request import LOG_DRIVER

pytestmark = pytest.mark.docker

# Lines around the engine's part size, a line of 1 MB, a progress bar, and UTF-8 across parts. Each
# piece is flushed by itself, so that the engine also gets pieces without a newline.
WRITE = """\
import sys, time
out = sys.stdout.buffer
def write(*pieces):
    for piece in pieces:
        out.write(piece)
        out.flush()
        time.sleep(0.02)
for size in (1, 16383, 16384, 16385, 32767, 32768, 32769):
    write(b"%d " % size + b"s" * size + b"\\n")
write(b"m" * 1_000_000 + b"\\n")
write(b"part one, ", b"part two", b"\\n")
for done in range(0, 101, 10):
    write(b"\\r%3d%% " % done + b"#" * done)
write(b"\\n")
write(("a" + "é" * 30_000).encode(), b"\\n", b"\\n\\n")
write(b"\\r" * 20_000 + b"\\n", b"crlf\\r\\n")
"""


def written() -> bytes:
    """Return what WRITE writes."""
    sizes = (1, 16383, 16384, 16385, 32767, 32768, 32769)
    data = b"".join(b"%d " % size + b"s" * size + b"\n" for size in sizes)
    data += b"m" * 1_000_000 + b"\npart one, part two\n"
    data += b"".join(b"\r%3d%% " % done + b"#" * done for done in range(0, 101, 10)) + b"\n"
    return data + ("a" + "é" * 30_000 + "\n\n\n").encode() + b"\r" * 20_000 + b"\ncrlf\r\n"


@pytest.mark.parametrize("follow", [True, False], ids=["live", "afterwards"])
@pytest.mark.parametrize("driver", [LOG_DRIVER, "json-file"])
def test_long_lines_and_progress_bars_are_exact(
    engine: docker.APIClient, base_image: str, tmp_path: Path, driver: str, follow: bool
):
    """Test the driver that we request, and the default one for engines without it.

    The default driver splits lines at any byte and stores JSON, so a character that it splits is
    lost; that is why we request the other driver (tried on 20.10).
    """
    config = engine.create_host_config(log_config={"type": driver, "config": {}})
    container_id = engine.create_container(
        base_image, entrypoint=["python3", "-c", WRITE], host_config=config
    )["Id"]
    try:
        engine.start(container_id)
        if not follow:
            engine.wait(container_id, timeout=60)
        source = logs.LogSource(0, container_id, driver, tmp_path / "none")
        pieces = list(logs.read(engine, source, follow=follow))
    finally:
        engine.remove_container(container_id, force=True)

    data = b"".join(pieces)
    if driver == LOG_DRIVER:
        assert data == written()
    else:
        cut, letter = "\ufffd".encode(), "é".encode()
        assert data.count(letter) > 29_900
        assert data.replace(cut, b"").replace(letter, b"") == written().replace(letter, b"")
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_the_log_of_a_rank_with_a_progress_bar_is_exact(cloud):
    cloud.script(WRITE)

    done = cloud.submit("--nodes", "2")
    log = cloud.run("logs", done.job, "--rank", "1").out
    raw = {rank: cloud.run("logs", done.job, "--rank", rank, "--raw").out for rank in "01"}

    assert done.code == 0, done
    assert raw == {"0": written(), "1": written()}
    assert b"[1] " + b"m" * 1_000_000 + b"\n" in done.out
    assert b"[1] " + b"m" * 1_000_000 + b"\n" in log
    # Only the last state of a progress bar is shown.
    assert b"[1] 100% " + b"#" * 100 + b"\n" in done.out


def test_the_log_of_deleted_containers_is_read_from_the_store(cloud):
    """The containers are deleted before any cloudjob command has polled the job."""
    cloud.script("import os; print('hello', os.environ['OMPI_COMM_WORLD_RANK'])")
    job = cloud.detach("--nodes", "2")
    for container in cloud.containers(job):
        cloud.engine.wait(container["Id"])
        cloud.engine.remove_container(container["Id"])

    log = cloud.run("logs", job)

    assert log.code == 0, log
    assert sorted(log.out.splitlines()) == [b"[0] hello 0", b"[1] hello 1"]
    assert log.err.count("the platform has no log of this node") == 2, log
    # Remove the rest of the job, such as its network.
    assert cloud.run("rm", "--force", job).code == 0
