"""Every error is one line with a hint and the documented exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import folders


def refused(done, code, *texts, hint=True):
    """Check that a command failed with ``code``, ``texts`` in its messages, and a hint."""
    text = done.err.decode("utf-8", "backslashreplace")
    assert "Traceback" not in text, done
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors, done
    assert done.code == code, done
    for expected in texts:
        assert expected in text, text
    if hint:
        assert any(line.startswith("hint: ") for line in lines), text
    earlier_messages = (
        "left out of the package",
        "sent ",
        "launcher mpirun: job.py imports none of",
    )
    assert all(line.startswith(("error: ", "hint: ", *earlier_messages)) for line in lines), text
    assert done.out == b""


@pytest.fixture
def script(cloud):
    """A script that runs without errors."""
    cloud.write("job.py", "print('it ran')\n")
    return "job.py"


def test_cloudjob_without_arguments_prints_help(cloud):
    assert cloud.cli().code == 2
    assert cloud.cli("--help").code == 0
    assert b"submit" in cloud.cli("--help").out


# No file can have a name like this.
LONG = "x" * 300
INVALID_ARGUMENTS = [
    (["submit"], 2, "script"),
    (["submit", "absent.py"], 3, "absent.py"),
    (["submit", "jbo.py"], 3, "jbo.py"),
    (["submit", "folder"], 3, "folder"),
    (["submit", "../outside.py"], 2, "outside"),
    (["submit", "/etc/passwd"], 2, "/etc/passwd"),
    (["submit", "pipe.py"], 3, "pipe.py is a named pipe"),
    (["submit", "-m", "package.module"], 2, "has no option -m"),
    (["submit", LONG], 3, "file name too long\nhint: is the path right?"),
    (["submit", "--source", LONG, "job.py"], 2, "File name too long\nhint: is the path right, "),
    (["submit", "--config", LONG, "job.py"], 2, "File name too long\nhint: is the path right, "),
    (["submit", "--store", f"file:///tmp/{LONG}", "job.py"], 4, "file name too long"),
    (["logs", LONG], 6, "x"),
    (["attach", LONG], 6, "x"),
    (["submit", "--source", "/nowhere", "job.py"], 3, "/nowhere"),
    (["submit", "--source", "job.py", "job.py"], 3, "job.py"),
    (["submit", "--nodes", "0", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "-1", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "10000000000", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "9" * 5000, "job.py"], 2, "nodes"),
    (["submit", "--nodes", "x", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "1.5", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "٣", "job.py"], 2, "nodes"),
    (["submit", "--nodes", "10000", "--procs-per-node", "1024", "job.py"], 2, "nodes"),
    (["submit", "--timeout-min", "nan", "job.py"], 2, "timeout_min"),
    (["submit", "--timeout-min", "-1", "job.py"], 2, "timeout_min"),
    (["submit", "--grace-s", "inf", "job.py"], 2, "grace_s"),
    (["submit", "--backend", "proces", "job.py"], 2, "process"),
    (["submit", "--launcher", "mpirum", "job.py"], 2, "mpirun"),
    (["submit", "--nodse", "2", "job.py"], 2, "--nodse"),
    (["submit", "--node", "2", "job.py"], 2, "--node"),
    (["submit", "--nodes"], 2, "--nodes"),
    (["submit", "-e", "NOT_SET_HERE", "job.py"], 2, "NOT_SET_HERE"),
    (["submit", "-e", "1X=2", "job.py"], 2, "1X"),
    (["submit", "-e", "my.var-x=2", "job.py"], 2, "my.var-x"),
    (["submit", "-e", "=2", "job.py"], 2, "env"),
    (["submit", "-e", "MA_X=2", "job.py"], 2, "MA_"),
    (["submit", "-e", "CLOUDJOB_X=2", "job.py"], 2, "CLOUDJOB_"),
    (["submit", "-e", "A=1", "--secret", "A=@job.py", "job.py"], 2, "A"),
    (["submit", "--env-file", "absent.env", "job.py"], 2, "absent.env"),
    (["submit", "--secret", "A=@absent", "job.py"], 2, "absent"),
    (["submit", "--name", "a b", "job.py"], 2, "name"),
    (["submit", "--name", "x" * 65, "job.py"], 2, "name"),
    (["submit", "--name", "Grüße", "job.py"], 2, "name"),
    (["submit", "--input", "data", "job.py"], 2, "data"),
    (["submit", "--config", "absent.yaml", "job.py"], 2, "absent.yaml"),
    (["submit", "--store", "nonsense://x", "job.py"], 4, "nonsense"),
    (["sumbit", "job.py"], 2, "sumbit"),
    (["status"], 2, "JOB"),
    (["status", "no-such-job"], 6, "no-such-job"),
    (["logs", "no-such-job"], 6, "no-such-job"),
    (["wait", "no-such-job"], 6, "no-such-job"),
    (["cancel", "no-such-job"], 6, "no-such-job"),
    (["outputs", "no-such-job"], 6, "no-such-job"),
    (["status", ""], 6, ""),
    (["status", "../../etc"], 6, ""),
    (["status", "process://local/x"], 6, "x"),
    (["logs", "--rank", "x", "job"], 2, "rank"),
    (["logs", "--raw", "job"], 6, "job"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    INVALID_ARGUMENTS,
    ids=lambda value: None if isinstance(value, int | str) else " ".join(value)[:60],
)
def test_invalid_arguments_are_refused_and_start_nothing(cloud, script, arguments, code, message):
    (cloud.source / "folder").mkdir()
    if "pipe.py" in arguments:
        os.mkfifo(cloud.source / "pipe.py")

    done = cloud.query(*arguments)

    refused(done, code, message)
    assert cloud.jobs() == []


@pytest.mark.parametrize(
    ("argument", "near"), [("--backend=proccess", "process"), ("--launcher=mpi-run", "mpirun")]
)
def test_a_mistyped_command_gets_a_suggestion(cloud, script, argument, near):
    refused(cloud.query("submit", argument, script), 2, f"'{near}'", hint=False)


def test_a_mistyped_option_gets_a_suggestion(cloud, script):
    done = cloud.query("submit", "--nodse", "2", script)
    assert b"--nodes" in done.err, done


def test_a_mistyped_script_name_gets_a_suggestion(cloud, script):
    done = cloud.query("submit", "jbo.py")
    assert b"job.py" in done.err, done


def test_all_errors_in_a_job_are_reported_together(cloud, script):
    done = cloud.query(
        "submit", "--nodes", "0", "--backend", "x", "--name", "a b", "-e", "MA_A=1", script
    )

    errors = [line for line in done.err.splitlines() if line.startswith(b"error: ")]
    assert len(errors) == 4, done


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("nodes: [1, 2\nscript: job.py\n", ":2:"),
        ("script: job.py\n\tnodes: 2\n", ":2:"),
        ("a: b: c\n", ":1:"),
    ],
)
def test_a_yaml_syntax_error_is_reported_with_file_line_and_column(cloud, script, text, place):
    cloud.write("job.yaml", text)

    done = cloud.query("submit", "--config", "job.yaml")

    refused(done, 2, "job.yaml", place)
    assert re.search(rb"job\.yaml:\d+:\d+", done.err), done


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodez: 2\n", "nodes"),
        ("nodes: two\n", "nodes"),
        ("nodes: 2\nnodes: 3\n", "nodes"),
        ("- a\n", "job.yaml"),
        ("script: [a]\n", "script"),
        ("env: 3\n", "env"),
        ("\xff", "job.yaml"),
        ("process: {pyhton: x}\n", "python"),
        ("nodes: true\n", "nodes"),
        ("a: &a [*a]\n", "a"),
        ("!!python/object:os.system {}\n", "job.yaml"),
    ],
)
def test_unknown_keys_and_wrong_types_in_yaml_are_reported_with_their_path(
    cloud, script, text, message
):
    (cloud.source / "job.yaml").write_bytes(text.encode("latin-1"))

    refused(cloud.query("submit", "--config", "job.yaml", script), 2, message, hint=False)


def test_a_job_with_more_gpus_than_the_machine_has_is_refused(cloud, script):
    cloud.environ["CUDA_VISIBLE_DEVICES"] = "3"
    cloud.write("job.yaml", "process: {gpus: 1}\n")

    done = cloud.query("submit", "--config", "job.yaml", "--nodes", "2", script)

    refused(done, 2, "process.gpus: 2 nodes with 1 each need 2, but this shell sees 1: 3")
    assert cloud.jobs() == []


def test_a_missing_mpirun_is_reported_with_what_to_install(cloud, script):
    """The message names what to install; launchers without mpirun still work."""
    tools = cloud.folder / "tools"
    tools.mkdir()
    for name in ("sh", "env", "cat"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    venv = cloud.folder / "venv"
    subprocess.run(
        [cloud.python, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True
    )
    packages = next(venv.glob("lib/python*/site-packages"))
    import yaml

    import cloudjob
    import jobentry

    roots = {str(Path(module.__file__).parent.parent) for module in (cloudjob, jobentry, yaml)}
    (packages / "paths.pth").write_text("\n".join(sorted(roots)))
    cloud.python = str(venv / "bin" / "python")

    done = cloud.cli("submit", script, env={"PATH": str(tools)})

    refused(done, 5, "mpirun")
    assert b"openmpi" in done.err.lower(), done
    cloud.write("plain.py", "print('done')")
    done = cloud.cli("submit", "--launcher", "python", "plain.py", env={"PATH": str(tools)})
    assert (done.code, done.out) == (0, b"[0] done\n"), done
    cloud.write("ranks.py", "import torch.distributed")
    for arguments in (["--launcher", "torchrun"], ["--launcher", "msrun"], ["--launcher", "auto"]):
        done = cloud.cli("submit", "--dry-run", *arguments, "ranks.py", env={"PATH": str(tools)})
        assert done.code == 0, done


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'HYDRA build details:'; echo ' Version: 3.1'", "MPICH"),
        ("echo 'mpirun (Open MPI) 3.1.6'", "3.1"),
        ("echo 'mpirun (Open MPI) 6.0.0'", "6.0"),
        ("exit 1", "mpirun"),
        ("kill -9 $$", "mpirun"),
        ("head -c 3000000 /dev/urandom", "mpirun"),
    ],
    ids=["mpich", "3.1", "6.0", "fails", "dies", "noise"],
)
def test_an_unsupported_mpirun_is_reported_with_its_version(cloud, script, text, message):
    tools = cloud.folder / "tools"
    tools.mkdir()
    (tools / "mpirun").write_text(f"#!/bin/sh\n{text}\n")
    (tools / "mpirun").chmod(0o755)

    done = cloud.cli("submit", "--nodes", "2", script, env={"PATH": f"{tools}:/usr/bin:/bin"})

    assert b"Traceback" not in done.err, done
    assert done.code in (5, 125, 127), done
    assert message.encode() in done.err, done
    assert b"hint: " in done.err, done


def test_a_source_over_the_size_limit_is_refused_with_its_largest_files(cloud, script):
    with (cloud.source / "big.bin").open("wb") as file:
        file.truncate(3_000_000)
    cloud.write("middle.bin", b"x" * 500_000)

    done = cloud.query("submit", "--source-limit-mb", "1", script)

    refused(done, 3, "big.bin", "middle.bin")
    cloud.write("cloudjob.yaml", "process: {source_limit_mb: 2}\ndocker: {source_limit_mb: 9}\n")
    refused(cloud.query("submit", script), 3, "over the limit of 2.0 MB", "big.bin")


def test_files_that_usually_hold_secrets_are_skipped_with_a_message(cloud):
    cloud.write(".env", "TOKEN=1\n")
    cloud.write(
        "id_rsa", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
    )
    cloud.write(
        "deep/key.pem", "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n"
    )
    script = cloud.script(
        """
        found = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
        write_result("files", repr(sorted(found)))
        """
    )

    done = cloud.submit(script)

    assert done.code == 0, done
    assert cloud.results_written()["files"] == b"['./job.py']", cloud.results_written()
    for name in (b".env", b"id_rsa", b"key.pem"):
        assert name in done.err, done


@pytest.mark.parametrize("name", [".env", "id_rsa", ".env.py"])
def test_a_script_with_the_name_of_a_secret_file_is_refused(cloud, name):
    cloud.write(name, "print(1)\n" if name != "id_rsa" else "-----BEGIN OPENSSH PRIVATE KEY-----\n")

    done = cloud.cli("submit", name)

    if name == ".env.py" and done.code == 0:
        return
    refused(done, 3, name)


def test_a_state_folder_in_the_source_is_not_packed(cloud):
    """A second submit finds nothing new, although the first one wrote to that folder."""
    cloud.write("job.py", "print('done')")
    cloud.environ["CLOUDJOB_HOME"] = str(cloud.source / "state")

    first, second = (cloud.submit("--launcher", "python", "job.py") for _ in range(2))

    for done in (first, second):
        assert done.code == 0, done
        assert done.err.count(b"left out of the package: state/: ") == 1, done
    assert b"nothing new: 1 file" in second.err, second


def test_a_script_that_contains_a_private_key_is_refused(cloud):
    cloud.write(
        "job.py",
        'KEY = """-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n'
        '-----END RSA PRIVATE KEY-----"""\n',
    )

    refused(cloud.cli("submit", "job.py"), 3, "job.py")


# -- the state folder and the disk ------------------------------------------------------------


# A state folder with one job, and the job's id, for each version of Open MPI.
_used_homes: dict[str, tuple[Path, str]] = {}


@pytest.fixture
def records(cloud, script, tmp_path_factory):
    """The records file of a state folder with one job in it."""
    version = cloud.mpi.version
    if version not in _used_homes:
        done = cloud.submit(script)
        assert done.code == 0, done
        cloud.await_cleanup()
        copy = tmp_path_factory.mktemp("home") / "home"
        shutil.copytree(cloud.home, copy, symlinks=True)
        _used_homes[version] = (copy, done.job)
    copy, cloud.job = _used_homes[version]
    shutil.copytree(copy, cloud.home, symlinks=True, dirs_exist_ok=True)
    return cloud.home / "records.db"


COMMANDS = ("list", "status", "submit")


def run(cloud, command, script="job.py"):
    """Run one of ``COMMANDS``."""
    arguments = {"list": ["list"], "status": ["status", cloud.job], "submit": ["submit", script]}[
        command
    ]
    return cloud.cli(*arguments)


def test_a_command_waits_for_locked_records(cloud, records, poll):
    connection = sqlite3.connect(records)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        running = cloud.start("list")
        poll(lambda: b"the job records are locked" in running.err, "a notice of what is waited for")
    finally:
        connection.rollback()
        connection.close()

    assert running.end().code == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "data",
    [b"no database at all", b"", b"SQLite format 3\0" + b"\0" * 5000],
    ids=["text", "empty", "header"],
)
def test_damaged_records_are_reported_with_a_hint(cloud, records, command, data):
    """The error names the file and what to do; an empty file counts as an empty database."""
    for path in cloud.home.glob("records.db-*"):
        path.unlink()
    records.write_bytes(data)

    done = run(cloud, command)

    if data:
        refused(done, 1, "records.db")
    else:
        assert b"Traceback" not in done.err
        assert done.code == {"list": 0, "status": 6, "submit": 0}[command], done


@pytest.mark.parametrize("command", COMMANDS)
def test_truncated_records_are_reported(cloud, records, command):
    with contextlib.closing(sqlite3.connect(records)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = records.read_bytes()
    for path in cloud.home.glob("records.db-*"):
        path.unlink()
    records.write_bytes(data[: len(data) // 2] if len(data) > 8192 else data[:4096])

    done = run(cloud, command)

    assert b"Traceback" not in done.err, done
    if done.code not in (0, 6):
        refused(done, 1, "records.db")


@pytest.mark.parametrize("command", COMMANDS)
def test_records_of_a_newer_version_are_refused_and_left_as_they_are(cloud, records, command):
    with contextlib.closing(sqlite3.connect(records)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.commit()

    refused(run(cloud, command), 1, "newer")


@pytest.mark.parametrize("command", ["list", "submit"])
def test_a_state_folder_that_is_a_file_is_reported(cloud, script, command):
    cloud.remove_home()
    cloud.home.write_text("a file")
    cloud.job = ""

    done = run(cloud, command)

    assert done.code in (1, 4, 5), done
    refused(done, done.code, "home")
    cloud.home.unlink()


@pytest.mark.parametrize("command", ["list", "submit"])
def test_a_state_folder_that_cannot_be_created_is_reported(cloud, script, command):
    cloud.job = ""
    cloud.environ["CLOUDJOB_HOME"] = "/proc/nowhere/home"

    done = run(cloud, command)

    assert done.code in (1, 4, 5), done
    refused(done, done.code, "/proc/nowhere")


@contextmanager
def disk_of(size: str, folder: Path) -> Iterator[None]:
    """Mount a disk of its own on a folder."""
    argv = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(cloud):
    with disk_of("256k", cloud.home):
        yield


@pytest.mark.parametrize(("variable", "size"), [("CLOUDJOB_HOME", "1m"), ("TMPDIR", "8k")])
def test_the_hint_of_a_full_disk_names_the_variable_of_its_folder(cloud, variable, size):
    """The entry of a node does not fit on the first disk, and its files of a job on the second."""
    folder = Path(tempfile.mkdtemp(dir=folders.ROOT))
    with disk_of(size, folder):
        cloud.environ[variable] = str(folder)

        done = cloud.cli("submit", cloud.script(""))

    folder.rmdir()
    assert done.code == 5, done
    refused(done, 5, f"{folder}/")
    assert f"hint: free some space, or set {variable} to a folder elsewhere" in done.err.decode()


def test_a_full_disk_at_submit_is_reported_and_leaves_nothing_behind(cloud, small_disk):
    cloud.write("big.bin", b"x" * 1_000_000)

    done = cloud.cli("submit", cloud.script(""))

    assert done.code in (1, 3, 4, 5), done
    refused(done, done.code, "space")
    assert cloud.jobs() == []
    assert cloud.cli("list", "--json").out.strip() == b"[]"


def test_a_job_ends_and_reports_it_when_the_disk_fills(cloud, small_disk):
    script = cloud.script(
        "try:\n    for n in range(40000): os.write(1, b'x' * 99 + b'\\n')\n"
        "except OSError as error: write_result('error', str(error))\nwrite_result('end')"
    )

    done = cloud.submit("--nodes", "2", script)

    assert b"Traceback (most recent call last)" not in done.err, done
    assert done.code is not None
    state = cloud.cli("status", "--json", done.job)
    assert b"Traceback" not in state.err, state


@pytest.mark.parametrize("limit_bytes", [2000, 20_000, 60_000])
def test_a_write_beyond_the_file_size_limit_is_reported(cloud, script, limit_bytes):
    running = cloud.start(
        "submit",
        script,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
    )

    done = running.end()

    assert b"Traceback" not in done.err, done
    if done.code:
        assert b"error: " in done.err or b"job " in done.err, done


def test_a_job_whose_folder_is_gone_is_unknown_and_not_a_success(cloud, records):
    with contextlib.closing(sqlite3.connect(records)) as connection:
        connection.execute("UPDATE jobs SET final_json = ''")
        connection.commit()
    shutil.rmtree(cloud.home / "process" / cloud.job)

    status = cloud.status(cloud.job)

    assert status["state"] == "UNKNOWN", status
    assert cloud.cli("list").code == 0
    waited = cloud.start("logs", cloud.job).end()
    assert b"Traceback" not in waited.err


def test_wait_ends_when_the_job_is_unknown(cloud, records):
    with contextlib.closing(sqlite3.connect(records)) as connection:
        connection.execute("UPDATE jobs SET final_json = ''")
        connection.commit()
    shutil.rmtree(cloud.home / "process" / cloud.job)
    running = cloud.start("wait", cloud.job)

    done = running.end()

    assert done.code != 0, done
    assert b"Traceback" not in done.err


def test_a_head_that_cannot_start_the_job_reports_why_to_its_workers(cloud):
    hosts = "OPENMPI_HOST_FILE_PATH=/no/folder/hosts"
    done = cloud.submit("--nodes", "2", "-e", hosts, cloud.script(""))

    reason = b"writing a file for mpirun: /no/folder/hosts: No such file or directory"
    assert done.code == 125, done
    assert re.search(rb"jobentry: the head \(.*\) ends the job: " + reason, done.out + done.err)
    assert cloud.status(done.job)["failure"]["message"].encode() == reason
