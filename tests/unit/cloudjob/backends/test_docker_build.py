"""Tests of requests to a Docker engine, its responses and image inputs; no engine is needed."""

from __future__ import annotations

import io
import json
import math
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import docker.errors
import pytest
import requests.exceptions
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends import follow, supervision
from cloudjob.backends.delivery import new_ssh_key
from cloudjob.backends.docker import delivery, engine, logs, request, shared_folders, state
from cloudjob.backends.native import Ended, Running, Stop
from cloudjob.errors import BackendError, SpecError, UsageError
from cloudjob.machine import doctor, image_checks, images
from cloudjob.model.job import JobSpec
from cloudjob.model.status import Failure, JobState
from cloudjob.model.submission import StoredCode, Submission
from jobentry.contract import env, variables

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "docker-request.json"


def submission(**values) -> Submission:
    """Return a job of two nodes."""
    spec = {
        "script": "train.py",
        "launcher": "mpirun",
        "args": ("--lr", "0.1"),
        "nodes": 2,
        "procs_per_node": 4,
        "backend": "docker",
        "env": {"SEED": "7"},
        "secrets": {"TOKEN": "s3cr3t"},
        "inputs": {"DATA": "file:///data/digits"},
        "docker": {"cpus": 1.5, "memory_gib": 4.0, "gpus": 1},
        **values,
    }
    return Submission(
        spec=JobSpec(**spec),
        job="train-2345678b",
        code=StoredCode(
            uri="file:///home/me/st%20ore/train-2345678b/code.json",
            digest="sha256:" + "0" * 64,
            layers=("file:///home/me/st%20ore/layers/" + "1" * 64,),
        ),
        record_uri="file:///home/me/st%20ore/train-2345678b/record/exit.json",
        outputs=(("OUT", "file:///home/me/st%20ore/train-2345678b/outputs/OUT"),),
    )


def test_the_request_matches_the_golden_file():
    """The golden file holds the whole request, with secrets masked."""
    text = json.dumps(request.show(request.build(submission(), "me")), indent=1, sort_keys=True)

    assert text + "\n" == GOLDEN.read_text(), (
        f"when this is right, write it to {GOLDEN.relative_to(ROOT)}:\n{text}"
    )


def test_each_node_reads_its_own_environment():
    job_request = request.build(submission(), "me")

    nodes = [env.read(request.environment(node)) for node in job_request.nodes]
    assert [node.node for node in nodes] == [0, 1]
    assert nodes[0].hosts == tuple(node.host for node in job_request.nodes)
    assert nodes[0].ssh_key == request.SSH_KEY
    assert request.environment(job_request.nodes[1])["TOKEN"] == "s3cr3t"
    assert "s3cr3t" not in json.dumps([dict(node.config) for node in job_request.nodes])


def test_one_node_needs_no_key():
    """A single-node job does not use SSH."""
    job_request = request.build(submission(nodes=1), "me")

    assert not job_request.has_key
    assert env.read(request.environment(job_request.nodes[0])).ssh_key == ""


def test_bytes_that_json_cannot_contain_are_delivered_in_the_file():
    """Variables that are not UTF-8 are delivered like secrets; such arguments are refused."""
    job_request = request.build(submission(env={"ODD": "\udcff"}, secrets={}), "me")

    assert job_request.nodes[0].env == {"ODD": "\udcff"}
    with pytest.raises(SpecError) as caught:
        request.build(submission(args=("a", "\udcff"), retries=1), "me")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "retries",
        "args[1]",
    ]


def test_a_remote_store_is_not_mounted():
    """Only local folders are mounted into the containers."""
    job_request = request.build(
        Submission(
            **{name: getattr(submission(inputs={}), name) for name in ("spec", "job")},
            code=StoredCode("s3://bucket/job/code.json", "sha256:0", ("s3://bucket/layers/1",)),
            record_uri="s3://bucket/job/exit.json",
            outputs=(("OUT", "s3://bucket/job/outputs/OUT"), ("HERE", "file:///mine")),
        ),
        "me",
    )

    assert (job_request.written, job_request.read) == ((), ())
    assert job_request.outputs == ("/mine",)
    assert job_request.nodes[0].config["HostConfig"]["Mounts"] == [
        {"Type": "bind", "Source": "/mine", "Target": "/mine"}
    ]


def test_access_to_the_store_is_masked_like_a_secret():
    """The credentials are in the entry's file, not in the configuration, and masked when shown."""
    access = {"CLOUDJOB_S3_ENDPOINT": "https://s3", "CLOUDJOB_S3_SECRET_KEY": "k3y"}

    job_request = request.build(submission()._replace(access=access), "me")

    for node in job_request.nodes:
        assert "k3y" not in json.dumps(node.config)
        assert {name: node.env[name] for name in access} == access
        assert request.environment(node)["CLOUDJOB_S3_SECRET_KEY"] == "k3y"
    description = request.show(job_request)
    assert "k3y" not in json.dumps(description)
    assert description["containers"][0]["delivered"]["CLOUDJOB_S3_SECRET_KEY"] == "***"


def test_a_node_knows_its_address_before_it_starts():
    """The returned copy has the address in its environment and network; the original has not."""
    node = request.build(submission(), "me").nodes[1]

    config = request.with_address(node.config, "172.18.0.3")

    assert "MA_CURRENT_IP=172.18.0.3" in config["Env"]
    assert request.UNKNOWN_ADDRESS not in json.dumps(config)
    assert request.UNKNOWN_ADDRESS in json.dumps(dict(node.config))
    (endpoint,) = config["NetworkingConfig"]["EndpointsConfig"].values()
    assert endpoint["IPAMConfig"] == {"IPv4Address": "172.18.0.3"}


def test_only_the_jobs_user_can_read_what_is_delivered():
    node = request.build(submission(), "me").nodes[0]
    data = delivery.archive(node, ("a", "b"), b"KEY", with_entry=True)

    with tarfile.open(fileobj=io.BytesIO(data)) as members:
        member_of = {member.name: member for member in members}
        secret = members.extractfile("run/cloudjob/env")
        assert secret is not None
        assert variables.load(secret.read()) == {"TOKEN": "s3cr3t"}
    for name, mode in (("", 0o700), ("/env", 0o400), ("/ssh-key", 0o400)):
        member = member_of["run/cloudjob" + name]
        assert (member.uid, member.gid, member.mode) == (1000, 100, mode)
    assert member_of["opt/cloudjob/jobentry.pyz"].uid == 0


def test_every_key_is_fresh():
    """Two jobs never share a key, and keys are in OpenSSH format."""
    one, two = new_ssh_key(), new_ssh_key()

    assert one != two
    assert one.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----\n")


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_]\w{0,9}", fullmatch=True).filter(str.isascii),
        st.binary().filter(lambda b: b"\0" not in b),
    )
)
def test_variables_survive_their_file(values):
    environ = {name: value.decode("utf-8", "surrogateescape") for name, value in values.items()}

    assert variables.load(variables.dump(environ)) == environ


# --- logs


def frames(*pieces: tuple[int, bytes]) -> bytes:
    """Return log data as the engine multiplexes it."""
    return b"".join(struct.pack(">BxxxL", stream, len(data)) + data for stream, data in pieces)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=20),
    st.integers(1, 50),
)
def test_lines_are_complete_however_the_bytes_arrive(pieces, step):
    """Both streams arrive complete and in whole lines, however the connection splits them."""
    sent = frames(*((stream, data.replace(b"\n", b"") + b"\n") for stream, data in pieces))
    lines = logs.Frames("json-file")

    got = b"".join(lines.feed(sent[at : at + step]) for at in range(0, len(sent), step))

    assert got + lines.finish() == b"".join(data.replace(b"\n", b"") + b"\n" for _, data in pieces)


def test_a_line_of_one_stream_is_not_cut_by_the_other():
    """A long line arrives in pieces; the other stream's lines that come between them go first."""
    lines = logs.Frames("json-file")

    got = lines.feed(frames((1, b"x" * 16384), (2, b"said\n"), (1, b"y\n")))

    assert got == b"said\n" + b"x" * 16384 + b"y\n"


def test_the_newline_that_the_local_driver_loses_is_put_back():
    """The last piece of a split line lacks its newline, and so may the end of the log."""
    lines = logs.Frames("local")

    got = lines.feed(frames((1, b"x" * 16384), (1, b"end"), (1, b"y" * 16384), (1, b"")))

    assert got == b"x" * 16384 + b"end\n" + b"y" * 16384 + b"\n"
    lines.feed(frames((1, b"z" * 16384)))
    assert lines.finish() == b"z" * 16384 + b"\n"


def test_a_saved_log_continues_at_the_same_byte(tmp_path):
    (tmp_path / "node-0.log").write_bytes(b"one\ntwo\nthree\n")

    assert b"".join(follow.read_file(tmp_path / "node-0.log", 4)) == b"two\nthree\n"
    assert list(follow.read_file(tmp_path / "node-1.log")) == []


# --- states


def node(index: int = 0, **values) -> state.Container:
    """Return a container that has exited with code 0."""
    labels = {"cloudjob.node": str(index), "cloudjob.memory_gib": "0.5"}
    fields = {"native": "exited", "exit_code": 0, "ended_at": "2026-01-01T00:00:01.000Z", **values}
    return state.Container(id=str(index), node=index, host=f"w-{index}", labels=labels, **fields)


@pytest.mark.parametrize(
    ("containers", "is_cancelled", "expected"),
    [
        ([node(), node(1)], False, JobState.SUCCEEDED),
        ([node(), node(1, exit_code=1)], False, JobState.SUCCEEDED),
        ([node(exit_code=3), node(1)], False, JobState.FAILED),
        ([node(exit_code=143)], True, JobState.CANCELLED),
        ([node(), node(1)], True, JobState.SUCCEEDED),
        ([node(), node(1, native="created")], True, JobState.CANCELLED),
        ([node(1)], True, JobState.CANCELLED),
        ([node(1)], False, JobState.FAILED),
    ],
)
def test_the_head_decides_how_the_job_ended(containers, is_cancelled, expected):
    """The exit code of node 0 is the job's; without node 0 the job has failed."""
    status = state.ended_status(containers, is_cancelled=is_cancelled)

    assert status.state is expected


ENDED = [
    state.ended_status([node()], is_cancelled=False),
    state.ended_status([node(exit_code=143)], is_cancelled=True),
    state.ended_status([node(exit_code=3, is_out_of_memory=True)], is_cancelled=False),
    state.all_removed(is_cancelled=False),
    state.with_failed_node(
        state.ended_status([node(exit_code=143)], is_cancelled=False), [node(1, exit_code=1)]
    ),
]


@pytest.mark.parametrize("status", ENDED)
def test_a_saved_status_is_read_as_it_was_written(status):
    assert state.load(state.dump(status)) == status


def test_a_status_that_an_earlier_version_saved_is_read():
    saved = {
        "state": "FAILED", "native": "exited", "started_at": None, "ended_at": None,
        "exit_code": 1, "message": "node 1 (w-1) ended with exit code 1", "node": 1, "reason": "",
        "attempt_at": "", "has_asked": True, "knows_cancels": True, "is_unwatched": False,
        "cause": "",
    }  # fmt: skip
    failure = Failure(1, exit_code=1, message="node 1 (w-1) ended with exit code 1")

    read = state.load(json.dumps(saved).encode("ascii"))

    assert read == Ended("exited", failure=failure, stop=Stop.PLATFORM)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"state": "RUNNING"}', b"[" * 9999])
def test_a_damaged_status_is_refused(data):
    with pytest.raises(ValueError, match="it is not valid"):
        state.load(data)


def test_out_of_memory_names_the_node_and_its_limit():
    nodes = [node(exit_code=137), node(1, is_out_of_memory=True)]
    status = state.ended_status(nodes, is_cancelled=False)

    assert str(status.reason) == "out of memory: node 1 (w-1), limited to 0.5 GiB"


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ("created", JobState.PENDING),
        ("running", JobState.RUNNING),
        ("restarting", JobState.RUNNING),
        ("dreaming", JobState.UNKNOWN),
    ],
)
def test_a_state_that_cloudjob_does_not_know_is_unknown_and_keeps_its_name(native, expected):
    status = state.unended_status([node(native=native)])

    assert (status.state, status.native) == (expected, native)


def test_a_running_job_has_run_since_its_first_container_was_created():
    """The engine's list has no other time."""
    items = [
        {"Id": str(index), "State": "running", "Labels": node(index).labels, "Created": created}
        for index, created in enumerate((1767225601, 1767225600))
    ]
    status = state.unended_status([state.container(item) for item in items])

    assert status == Running("running", "2026-01-01T00:00:00.000Z")


def test_times_are_truncated_to_milliseconds():
    """The engine writes up to nine decimals, and the year 1 for a time that is not set."""
    details = {
        "State": {
            "Status": "exited",
            "StartedAt": "2026-01-01T00:00:00.123456789Z",
            "FinishedAt": "0001-01-01T00:00:00Z",
            "ExitCode": 0,
        }
    }

    inspected = node().inspected(details)

    assert (inspected.started_at, inspected.ended_at) == ("2026-01-01T00:00:00.123Z", "")


# --- errors


class Answer:
    """An HTTP response of an engine."""

    status_code = 409
    reason = "Conflict"
    url = "http+docker://x"


@pytest.mark.parametrize(
    ("error", "expected", "hint"),
    [
        (docker.errors.APIError("x", Answer(), "no space left"), "no space left", "system df"),
        (docker.errors.DockerException("x"), "x", "docker info"),
        (docker.errors.StreamParseError("x"), "x", "docker info"),
        (docker.errors.DockerException(FileNotFoundError(2, "")), "no engine", "DOCKER_HOST"),
        (requests.exceptions.ConnectionError(PermissionError(13, "")), "denied", "usermod"),
        (requests.exceptions.ReadTimeout("slow"), "slow", "docker info"),
        (ConnectionRefusedError(), "no engine", "start docker"),
        (ConnectionResetError("gone"), "gone", "docker info"),
    ],
)
def test_every_engine_error_becomes_a_backend_error(error, expected, hint):
    with pytest.raises(BackendError) as caught, engine.translate_errors("asking"):
        raise error

    assert caught.value.message.startswith("asking: ")
    assert expected in caught.value.message
    assert hint in caught.value.hint


def test_the_http_status_of_a_refusal_is_known():
    with pytest.raises(BackendError) as caught, engine.translate_errors("asking"):
        raise docker.errors.APIError("x", Answer(), "x")

    assert engine.status_code(caught.value) in engine.GONE
    assert engine.status_code(BackendError("x")) == 0


def test_a_folder_is_opened_only_below_a_private_folder(tmp_path):
    """If the engine maps users, the folder is opened to all users, so its parent must be private.

    Targets of symbolic links in the folder keep their permissions.
    """
    folder, outside = tmp_path / "job", tmp_path / "outside"
    folder.mkdir(mode=0o700)
    outside.mkdir(mode=0o700)
    (folder / "link").symlink_to(outside)
    (folder / "code.json").touch(mode=0o600)

    tmp_path.chmod(0o755)
    with pytest.raises(BackendError, match="every user of this machine could enter"):
        shared_folders.open_to_containers(folder, maps_users=True)
    tmp_path.chmod(0o700)
    shared_folders.open_to_containers(folder, maps_users=True)

    assert folder.stat().st_mode & 0o777 == 0o777
    assert (folder / "code.json").stat().st_mode & 0o777 == 0o666
    assert outside.stat().st_mode & 0o777 == 0o700


# --- images


def test_the_same_inputs_give_the_same_tag():
    """The hash covers the Dockerfile, files and base, but not the package index."""
    base = images.recipe_of("base")

    assert images.inputs(base, "sha256:1") == images.inputs(images.recipe_of("base"), "sha256:1")
    assert images.inputs(base, "sha256:1") != images.inputs(base, "sha256:2")
    changed = base._replace(files={**base.files, "entrypoints/boot.sh": b"x"})
    assert images.inputs(changed, "sha256:1") != images.inputs(base, "sha256:1")
    assert images.context(base, {}) == images.context(base, {})


def test_a_context_has_what_its_dockerfile_copies():
    """The base image copies the entry; images with pip packages copy their list and installer."""
    assert set(images.recipe_of("base").files) == {
        "cloudjob/jobentry.pyz",
        "entrypoints/boot.sh",
    }
    assert set(images.recipe_of("pytorch").files) == {
        "images/pip-install.sh",
        "images/pytorch.txt",
    }


def test_the_hint_for_an_unknown_image_lists_those_that_exist():
    with pytest.raises(UsageError) as caught:
        images.recipe_of("pytroch")

    assert "base" in caught.value.hint
    assert "pytorch" in caught.value.hint


@pytest.mark.parametrize("name", images.names())
def test_dockerfiles_are_clean(name):
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, ROOT / "images" / f"{name}.Dockerfile"], capture_output=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, b""), done.stdout.decode()


def test_every_image_is_documented():
    text = (ROOT / "docs" / "guides" / "images.md").read_text()

    for name in images.names():
        assert f"| `{name}` |" in text


# --- doctor

GOOD_IMAGE = {
    "sh": "/bin/sh", "python3": "/usr/bin/python3", "python3.version": "3.8.1",
    "ssh": "/usr/bin/ssh", "ssh-keygen": "/usr/bin/ssh-keygen",
    "shell.runs": "commands", "sshd": "/usr/sbin/sshd", "sshd.test": "fine",
    "mpirun": "/usr/bin/mpirun", "mpirun.version": "mpirun (Open MPI) 4.1.4", "user": "1000",
    "passwd": "ma-user", "passwd.home": "/home/ma-user", "passwd.shell": "/bin/bash",
    "home": "/home/ma-user", "tmp": "/tmp/x", "entry": "/opt/cloudjob",
}  # fmt: skip
IMAGE_CONFIG = {"User": "1000:100", "Entrypoint": ["/opt/cloudjob/boot.sh"]}


def test_a_good_image_passes():
    assert doctor.all_needed_ok(list(image_checks.image_checks(GOOD_IMAGE, IMAGE_CONFIG)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11", "Open MPI 5.0 (/usr/bin/mpirun)"),
        ("HYDRA build details:\n    Version:     4.0.2\n", "MPICH 4.0 (/usr/bin/mpirun)"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)",
            "Intel MPI 2021.19 (/usr/bin/mpirun)",
        ),
    ],
)
def test_every_supported_mpi_passes_the_check(text: str, expected: str):
    checks = {
        check.name: check
        for check in image_checks.image_checks({**GOOD_IMAGE, "mpirun.version": text}, IMAGE_CONFIG)
    }

    assert (checks["mpirun"].is_ok, checks["mpirun"].found) == (True, expected)


@pytest.mark.parametrize(
    ("change", "config", "name"),
    [
        ({"python3.version": "3.7.9"}, {}, "python3"),
        ({"python3.modules": "No module named 'ctypes'"}, {}, "python3"),
        ({"ssh": None}, {}, "ssh"),
        ({"sshd.test": "bad"}, {}, "sshd"),
        ({"mpirun": None}, {}, "mpirun"),
        ({"mpirun.version": "HYDRA build details:\n    Version:   3.1"}, {}, "mpirun"),
        ({"mpirun.version": "Platform MPI 9.1"}, {}, "mpirun"),
        ({"mpirun.version": "mpirun (Open MPI) 3.1.0"}, {}, "mpirun"),
        ({"passwd": None}, {}, "user"),
        ({"passwd.shell": None}, {}, "user"),
        ({}, {"User": ""}, "user"),
        ({"home": None}, {}, "home"),
        ({"tmp": None}, {}, "/tmp"),
        ({"entry": None}, {}, "entry"),
        ({}, {"Entrypoint": ["/bin/bash"]}, "ENTRYPOINT"),
        ({"sh": None}, {}, "sh"),
    ],
)
def test_each_part_that_an_image_lacks_is_named(change, config, name):
    facts = {key: value for key, value in {**GOOD_IMAGE, **change}.items() if value is not None}

    checks = list(image_checks.image_checks(facts, {**IMAGE_CONFIG, **config}))

    (failed,) = [check for check in checks if not check.is_ok]
    assert failed.name == name
    assert failed.hint


def test_the_nodes_of_a_job_as_the_rules_of_supervision_see_them():
    """A container that is not there may not be created yet; one without an end has no time."""

    def node(index: int, native: str, **values) -> state.Container:
        return state.Container(f"id-{index}", index, f"worker-{index}", native, {}, **values)

    ended = "2026-01-01T00:00:01.000Z"
    containers = [
        node(0, "running"),
        node(1, "exited", exit_code=3, ended_at=ended),
        node(3, "dead", exit_code=137),
    ]

    assert state.seen_nodes(containers, {"id-1"}) == [
        supervision.Node(),
        supervision.Node(False, 3, 1767225601.0, True),
        supervision.Node(),
        supervision.Node(False, 137, math.inf),
    ]
    assert state.seen_nodes([]) == []
