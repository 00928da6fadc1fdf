"""The number of ranks on a node: the number in the job, or else one for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends import open_backend
from cloudjob.backends.process import devices
from cloudjob.errors import SpecError
from cloudjob.model.job import JobSpec, masked
from cloudjob.submission.preparation import choose_ranks


def chosen(tmp_path: Path, **keys: Any) -> tuple[int, str]:
    spec = JobSpec(**{"script": "train.py", "launcher": "mpirun", **keys})
    backend = open_backend(spec.backend, tmp_path, dict(spec.section(spec.backend)))
    spec, message = choose_ranks(spec, backend, may_query=False)
    return spec.procs_per_node, message


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"procs_per_node": 2, "docker": {"gpus": 8}, "backend": "docker"}, (2, "")),
        ({"backend": "docker"}, (1, "")),
        ({"backend": "docker", "docker": {"gpus": 8}}, (8, "procs_per_node 8: docker.gpus is 8")),
        (
            {"backend": "docker", "docker": {"gpus": 8}, "launcher": "python"},
            (1, ""),
        ),
        (
            {"backend": "kubernetes", "kubernetes": {"gpus": 4}},
            (4, "procs_per_node 4: kubernetes.gpus is 4"),
        ),
        ({"backend": "slurm", "slurm": {"gpus": 4}}, (4, "procs_per_node 4: slurm.gpus is 4")),
        ({"process": {"gpus": 3}, "nodes": 2}, (3, "procs_per_node 3: process.gpus is 3")),
        (
            {"mindspore": {"devices": ["s 0=1.1.1.1 1=1.1.1.2"]}, "launcher": "rank-table"},
            (2, "procs_per_node 2: mindspore.devices"),
        ),
    ],
)
def test_a_node_has_a_rank_for_each_device_that_it_is_given(
    keys: dict[str, Any], expected: tuple[int, str], tmp_path: Path
):
    assert chosen(tmp_path, **keys) == expected


@pytest.mark.parametrize(
    ("option", "ranks"),
    [
        ("--gres=gpu:8", 8),
        ("--gres=gpu:a100:4(S:0-1)", 4),
        ("--gres=nvme:1,gpu:2", 2),
        ("--gres=gpu", 1),
        ("--gres=nvme:4", 1),
        ("--gres=gpumem:40", 1),
        ("--gres npu:8", 8),
        ("--gpus-per-node=4", 4),
        ("--gpus-per-node=v100:4", 4),
        ("--mem=8G", 1),
    ],
)
def test_slurm_counts_the_devices_of_an_option(option: str, ranks: int, tmp_path: Path):
    assert chosen(tmp_path, backend="slurm", slurm={"sbatch": [option]})[0] == ranks


def test_slurm_counts_gres(tmp_path: Path):
    choice = chosen(tmp_path, backend="slurm", slurm={"gres": "gpu:h100:8"})

    assert choice == (8, "procs_per_node 8: #SBATCH --gres=gpu:h100:8")


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,5"}, (3, "GPU")),
        ({"CUDA_VISIBLE_DEVICES": ""}, (0, "GPU")),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, (2, "GPU")),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, (4, "NPU")),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, (0, "NPU")),
        ({}, (8, "NPU")),
    ],
)
def test_the_local_devices_are_those_that_the_shell_may_use(
    environ: dict[str, str], count: tuple[int, str], tmp_path: Path
):
    for name in (*(f"davinci{number}" for number in range(8)), "davinci_manager"):
        (tmp_path / name).touch()

    assert devices.count(environ, tmp_path / "no-driver", tmp_path) == count


def test_a_single_local_node_has_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in devices._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")

    assert chosen(tmp_path) == (8, "procs_per_node 8: this machine has 8 GPUs")
    # Two nodes would share the devices, which are not divided between them.
    assert chosen(tmp_path, nodes=2) == (1, "")


def test_too_many_ranks_are_refused_whoever_chose_their_number(tmp_path: Path):
    with pytest.raises(SpecError, match="too many ranks"):
        chosen(tmp_path, backend="kubernetes", nodes=10_000, kubernetes={"gpus": 64})


def test_an_undecided_number_is_shown_as_auto():
    assert masked(JobSpec(script="train.py"))["procs_per_node"] == "auto"
    assert JobSpec(script="train.py", procs_per_node="auto") == JobSpec(script="train.py")
