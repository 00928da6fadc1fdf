"""A command that enters a node takes its surroundings from the rank's own program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobentry.contract import names
from jobentry.node import enter

STRANGER = 65534


@pytest.fixture
def start(until: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """A function that starts a program with the environment of a rank."""
    programs: list[subprocess.Popen[bytes]] = []

    def run(rank: str, node_dir: Path, **more: object) -> None:
        environment = {
            names.CLOUDJOB_NODE_DIR: str(node_dir),
            names.CLOUDJOB_END_FD: "3",
            names.CLOUDJOB_RANK: rank,
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        }
        command = ["/bin/sleep", "600"]
        program = subprocess.Popen(command, env=environment, cwd="/", **more)  # type: ignore[call-overload]
        programs.append(program)
        path = Path(f"/proc/{program.pid}/environ")
        until(lambda: str(node_dir).encode() in path.read_bytes())

    yield run
    for program in programs:
        program.kill()
        program.wait()


def test_the_lowest_rank_of_the_node_is_the_model(start: Callable[..., None], tmp_path: Path):
    for rank in ("3", "2"):
        start(rank, tmp_path)
    start("0", tmp_path / "other")

    entered = enter.of_rank(str(tmp_path), None)

    assert entered is not None
    assert entered.environment[names.CLOUDJOB_RANK] == "2"
    assert names.CLOUDJOB_END_FD not in entered.environment
    assert entered.folder == "/"
    assert enter.of_rank(str(tmp_path), 3) is not None
    assert enter.of_rank(str(tmp_path), 0) is None


def test_a_program_with_an_odd_rank_is_none(start: Callable[..., None], tmp_path: Path):
    start("first", tmp_path)

    assert enter.of_rank(str(tmp_path), None) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts a program as another user")
def test_a_program_of_another_user_is_no_model(start: Callable[..., None], tmp_path: Path):
    """Its variables, such as LD_PRELOAD, would choose what runs with the rights of this user."""
    start("0", tmp_path, preexec_fn=lambda: os.setuid(STRANGER))

    assert enter.of_rank(str(tmp_path), None) is None
