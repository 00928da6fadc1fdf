"""Tests of how the emulated nodes of a job share this machine's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudjob.backends.process import devices
from cloudjob.errors import SpecError


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", ("0",)),
        ("3,1", ("3", "1")),
        (" GPU-5a , MIG-7/1 ", ("GPU-5a", "MIG-7/1")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_variables_of_the_shell_select_the_gpus(tmp_path: Path, visible, expected):
    assert devices.gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == expected


def test_gpus_are_those_of_the_driver_if_the_variable_is_not_set(tmp_path: Path):
    """The driver has a folder for each GPU; without a driver there are no GPUs."""
    for name in ("0000:3b:00.0", "0000:af:00.0"):
        (tmp_path / name).mkdir()

    assert devices.gpus({}, tmp_path) == ("0", "1")
    assert devices.gpus({}, tmp_path / "missing") == ()


def test_each_node_has_its_own_gpus():
    """GPUs are assigned in the order in which the shell lists them."""
    visible_gpus = ("7", "5", "3", "1", "0")

    gpus = [devices.gpus_of_node(visible_gpus, 2, 2, node) for node in range(2)]

    assert gpus == [
        {"CUDA_VISIBLE_DEVICES": "7,5", "MA_NUM_GPUS": "2"},
        {"CUDA_VISIBLE_DEVICES": "3,1", "MA_NUM_GPUS": "2"},
    ]
    assert devices.gpus_of_node(visible_gpus, 9, 0, 0) == {}


@pytest.mark.parametrize(
    ("visible_gpus", "nodes", "message"),
    [
        (("4",), 2, "2 nodes with 1 each need 2, but this shell sees 1: 4 (given 1;"),
        ((), 1, "1 node with 1 each need 1, but this shell sees none (given 1; allowed 0"),
    ],
)
def test_too_few_devices_are_refused(visible_gpus, nodes, message):
    with pytest.raises(SpecError, match=r"process\.gpus: ") as raised:
        devices.gpus_of_node(visible_gpus, nodes, 1, 0)

    assert message in raised.value.message
