"""Reports of ended nodes: ranks may write to the folder in which the head looks for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable

import pytest

from jobentry.contract import node_end
from jobentry.contract.env import NodeEnv
from jobentry.node import early_ends


def _write_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(node_end.dump(137))
    path.symlink_to(target)


REPORTS: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "none": (lambda path: None, None),
    "a report": (lambda path: path.write_bytes(node_end.dump(137)), 137),
    "half a report": (lambda path: path.write_bytes(b"13"), None),
    "a large file": (lambda path: path.write_bytes(b"1" * 100_000 + b"\n"), None),
    "a pipe": (os.mkfifo, None),
    "a link": (_write_link, None),
    "a folder": (Path.mkdir, None),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_only_a_file_with_an_exit_code_is_a_report(kind: str, tmp_path: Path):
    write, expected = REPORTS[kind]
    write(tmp_path / node_end.file_name(1))
    node = NodeEnv(hosts=("node0", "node1"), control_dir=str(tmp_path))

    assert early_ends.reported_code(node, 1) == expected
