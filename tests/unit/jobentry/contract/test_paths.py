"""Paths in the store and in the container."""

from __future__ import annotations

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import JobPaths, NodePaths, node_paths


def test_the_objects_of_a_job_are_below_its_id():
    paths = JobPaths("train-1")

    assert (paths.code, paths.submission, paths.record, paths.outputs) == (
        "train-1/code.json",
        "train-1/submission.json",
        "train-1/record/exit.json",
        "train-1/outputs",
    )


def test_the_documented_layout_is_the_default():
    assert node_paths({}, NodeEnv(job="j", node=1, hosts=("a", "b"))) == NodePaths(
        home="/home/ma-user",
        job_dir="/home/ma-user/modelarts/user-job-dir",
        mount="/home/ma-user/modelarts",
        log_dir="/home/ma-user/modelarts/log",
        node_dir="/home/ma-user/.cloudjob/j",
    )


def test_the_platforms_variables_take_precedence():
    environ = {
        "HOME": "/home/me",
        "MA_HOME": "/h",
        "MA_MOUNT_PATH": "/m",
        "MA_JOB_DIR": "/j",
        "MA_LOG_DIR": "/l",
    }

    assert node_paths(environ, NodeEnv(node_dir="/n")) == NodePaths("/h", "/j", "/m", "/l", "/n")


def test_the_home_folder_defaults_to_the_users():
    environ = {"HOME": "/home/me", "MA_HOME": "", "MA_LOG_DIR": ""}

    assert node_paths(environ, NodeEnv(job="j")) == NodePaths(
        "/home/me",
        "/home/me/modelarts/user-job-dir",
        "/home/me/modelarts",
        "/home/me/modelarts/log",
        "/home/me/.cloudjob/j",
    )


def test_the_files_of_a_node_are_in_its_folder():
    paths = NodePaths("/h", "/j", "/m", "/l", "/n")

    assert {
        name: getattr(paths, name)
        for name in (
            *("code", "host_file", "tune_file", "ssh_config", "node_env"),
            "events",
        )
    } == {
        "code": "/j/code",
        "host_file": "/n/hostfile",
        "tune_file": "/n/tune",
        "ssh_config": "/n/ssh-config",
        "node_env": "/n/env",
        "events": "/n/events",
    }
    assert paths.rank_log(12) == "/l/rank-12.log"
    assert paths.input("DATA") == "/m/inputs/DATA_0"
    assert paths.output("MODEL") == "/m/outputs/MODEL_0"
