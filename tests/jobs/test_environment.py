"""Variables reach every rank with their exact bytes, and secrets reach only the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

# Each rank writes its environment to a file, as NUL-separated NAME=VALUE like the kernel's.
DUMP = r"""
write_result(f"rank-{rank}", b"\0".join(k + b"=" + v for k, v in os.environb.items()))
"""


def environments(cloud, count):
    """Return the environment of each rank."""
    results = cloud.results_written("rank-*")
    assert sorted(results) == [f"rank-{rank}" for rank in range(count)]
    pairs = [
        dict(item.partition(b"=")[::2] for item in results[f"rank-{rank}"].split(b"\0"))
        for rank in range(count)
    ]
    return [{os.fsdecode(name): value for name, value in rank.items()} for rank in pairs]


def differences(ranks, expected):
    """Return the differences, shortened for an error message."""
    return [
        f"rank {index}: {name}: {rank.get(name, b'(absent)')[:60]!r} and not {value[:60]!r}"
        for index, rank in enumerate(ranks)
        for name, value in expected.items()
        if rank.get(name) != value
    ]


# Prefixes of variables that some rule might forward, drop or change.
PREFIXES = ("UGLY_", "S3_", "SHARED_", "VC_WORKER_X", "SCC", "CRED")


@pytest.mark.every_mpi
def test_variables_given_by_option_keep_every_byte(cloud, ugly_values):
    expected = {
        f"{PREFIXES[index % len(PREFIXES)]}{name}": value
        for index, (name, value) in enumerate(ugly_values.items())
    }
    options = [
        option
        for name, value in expected.items()
        for option in (b"-e", name.encode() + b"=" + value)
    ]

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", *options, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 4), expected) == []


@pytest.mark.lengthy
@pytest.mark.every_mpi
@pytest.mark.parametrize("prefix", ["S3_", "UGLY_"])
def test_every_carried_value_keeps_every_byte(cloud, ugly_values, prefix):
    """Variables are forwarded because of a name pattern or because the user set them."""
    expected = {f"{prefix}{name}": value for name, value in ugly_values.items()}
    options = [
        option
        for name, value in expected.items()
        for option in (b"-e", name.encode() + b"=" + value)
    ]

    done = cloud.submit("--nodes", "2", *options, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


@pytest.mark.every_mpi
def test_variables_in_a_file_keep_every_byte(cloud, ugly_values):
    """--env-file accepts the same values, quoted and escaped."""
    expected = {f"FILE_{name}": value for name, value in ugly_values.items()}
    text = b"# a comment\n"
    for name, value in expected.items():
        for old, new in (
            (b"\\", b"\\\\"),
            (b'"', b'\\"'),
            (b"$", b"\\$"),
            (b"\n", b"\\n"),
            (b"\r", b"\\r"),
        ):
            value = value.replace(old, new)
        text += name.encode() + b'="' + value + b'"\n'
    path = cloud.folder / "variables.env"
    path.write_bytes(text)

    done = cloud.submit("--nodes", "2", "--env-file", path, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


@pytest.mark.every_mpi
def test_secrets_keep_every_byte(cloud, ugly_values):
    """--secret passes on a variable of the caller's environment or the content of a file."""
    by_name = {f"NAMED_{name}": value for name, value in list(ugly_values.items())[:-2]}
    by_file = {f"FILED_{name}": value for name, value in ugly_values.items()}
    options = [option for name in by_name for option in ("--secret", name)]
    for name, value in by_file.items():
        path = cloud.folder / name
        path.write_bytes(value)
        options += ["--secret", f"{name}=@{path}"]

    done = cloud.submit(
        "--nodes", "2", "--procs-per-node", "2", *options, cloud.script(DUMP), env=by_name
    )

    assert done.code == 0, done
    assert differences(environments(cloud, 4), by_name | by_file) == []


@pytest.mark.every_mpi
def test_five_hundred_variables_and_a_megabyte_of_them_arrive(cloud):
    expected = {f"MANY_{index}": b"value %d of many" % index for index in range(400)}
    expected |= {f"S3_MANY_{index}": b"k=%d" % index for index in range(100)}
    expected |= {f"LARGE_{index}": b"%d " % index * 30_000 for index in range(10)}
    path = cloud.folder / "many.env"
    path.write_bytes(
        b"".join(name.encode() + b'="' + value + b'"\n' for name, value in expected.items())
    )

    done = cloud.submit("--nodes", "2", "--env-file", path, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


@pytest.mark.every_mpi
def test_ranks_have_the_documented_defaults_and_the_heads_path(cloud):
    """The ranks get no other variable of the submitter."""
    arguments = ("--nodes", "2", "-e", "NCCL_DEBUG=WARN")

    done = cloud.submit(*arguments, cloud.script(DUMP), env={"STRAY": "1", "S3_STRAY": "2"})

    assert done.code == 0, done
    ranks = environments(cloud, 2)
    for rank in ranks:
        # On nodes with their own file system, this folder has the interpreter's python and pip.
        rank["PATH"] = rank["PATH"].removeprefix(b"/.cloudjob/bin:")
        assert not {"STRAY", "S3_STRAY", "CLOUDJOB_HOME"} & set(rank)
    expected = {
        "PATH": cloud.mpi.path.encode(),
        # Idle ranks yield the CPU.
        "OMPI_MCA_mpi_yield_when_idle": b"1",
        # The defaults of the documented OPENMPI_X_ARGS; the user has set NCCL_DEBUG.
        "HOROVOD_MPI_THREADS_DISABLE": b"1",
        "NCCL_DEBUG": b"WARN",
        # Emulated nodes reach each other through the loopback interface.
        "NCCL_SOCKET_IFNAME": b"lo",
        "GLOO_SOCKET_IFNAME": b"lo",
        "NCCL_SOCKET_FAMILY": b"AF_INET",
        "NCCL_IB_DISABLE": b"0",
    }
    assert differences(ranks, expected) == []


@pytest.mark.every_mpi
def test_the_users_paths_and_choice_of_yielding_reach_the_ranks(cloud):
    expected = {
        "PATH": f"/opt/my tools:{cloud.mpi.path}".encode(),
        "LD_LIBRARY_PATH": b"/opt/a b:/opt/c",
        "OMPI_MCA_mpi_yield_when_idle": b"0",
    }
    options = [
        option
        for name, value in expected.items()
        for option in (b"-e", name.encode() + b"=" + value)
    ]

    done = cloud.submit("--nodes", "2", *options, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


@pytest.mark.parametrize(("gpus", "expected"), [(0, ["5,GPU-a", "5,GPU-a"]), (1, ["5", "GPU-a"])])
def test_ranks_use_only_the_gpus_visible_to_the_shell(cloud, gpus, expected):
    cloud.environ["CUDA_VISIBLE_DEVICES"] = "5,GPU-a"
    cloud.write("job.yaml", f"process: {{gpus: {gpus}}}\n")

    done = cloud.submit("--config", "job.yaml", "--nodes", "2", cloud.script(DUMP))

    assert done.code == 0, done
    ranks = environments(cloud, 2)
    assert [rank["CUDA_VISIBLE_DEVICES"].decode() for rank in ranks] == expected
    assert [rank["MA_NUM_GPUS"].decode() for rank in ranks] == [str(gpus)] * 2


def test_the_users_choice_of_gpus_reaches_the_ranks(cloud):
    cloud.environ["CUDA_VISIBLE_DEVICES"] = "5,6"
    cloud.write("job.yaml", "process: {gpus: 1}\n")
    expected = {"CUDA_VISIBLE_DEVICES": b"1, 2"}

    done = cloud.submit(
        *("--config", "job.yaml", "--nodes", "2", "-e", "CUDA_VISIBLE_DEVICES=1, 2"),
        cloud.script(DUMP),
    )

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


MEANINGFUL = [
    "HOSTNAME",
    "LANG",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONSTARTUP",
    "ENV",
    "BASH_ENV",
    "IFS",
    "CDPATH",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "OLDPWD",
    "TERM",
    "SHLVL",
    "OMPI_NOT_KNOWN",
    "PMIX_NOT_KNOWN",
    "SLURM_JOB_ID",
    "XDG_RUNTIME_DIR",
    "A",
    "a",
    "NCCL_DEBUG",
    "HOROVOD_MPI_THREADS_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "PERL5LIB",
    "GREP_OPTIONS",
    "POSIXLY_CORRECT",
    "TZ",
    "http_proxy",
    "PS4",
    "ROOT",
    "DISPLAY",
    "VC_OTHER",
    "SHARED_",
    "SCC",
    "CRED",
    "S3_",
]


def test_variables_with_a_special_meaning_can_be_set_by_the_user(cloud):
    expected = {name: b"/my own " + name.encode() for name in MEANINGFUL}
    options = [
        option
        for name, value in expected.items()
        for option in (b"-e", name.encode() + b"=" + value)
    ]

    done = cloud.submit("--nodes", "2", *options, cloud.script(DUMP))

    assert done.code == 0, done
    assert differences(environments(cloud, 2), expected) == []


@pytest.mark.parametrize("name", ["HOME", "TMPDIR", "_"])
def test_variables_that_a_node_needs_are_set_on_every_rank_or_refused(cloud, name):
    folder = cloud.folder / "own"
    folder.mkdir()

    done = cloud.submit("--nodes", "2", "-e", f"{name}={folder}", cloud.script(DUMP))

    if done.code == 2:
        assert name.encode() in done.err
        return
    assert done.code == 0, done
    assert differences(environments(cloud, 2), {name: str(folder).encode()}) == []


def test_missing_network_interfaces_are_reported_before_the_run(cloud):
    arguments = ("-e", "NCCL_SOCKET_IFNAME=none7,none8", "-e", "GLOO_SOCKET_IFNAME=lo")

    done = cloud.submit("--nodes", "2", *arguments, cloud.script(DUMP))

    assert done.code == 0, done
    expected = {"NCCL_SOCKET_IFNAME": b"none7,none8", "GLOO_SOCKET_IFNAME": b"lo"}
    assert differences(environments(cloud, 2), expected) == []
    for node in (0, 1):
        message = f"NCCL_SOCKET_IFNAME=none7,none8: no such network interface on node {node} "
        assert done.err.count(message.encode()) == 1, done
    assert b"GLOO_SOCKET_IFNAME" not in done.err


# -- where values and secrets can be read -----------------------------------------------------

SECRET = b"hush-3f9c17-hush"
VALUE = b"plain-81d2aa-plain"
WAIT = (
    DUMP
    + """
print("up", rank)
await_file("go")
"""
)


def files_with(folder, text):
    """Return the files below ``folder`` that contain ``text``."""
    paths = []
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and text in path.read_bytes():
                paths.append(str(path))
    return paths


def argvs_with(text):
    """Return the processes of this host whose command lines contain ``text``."""
    argvs = []
    for pid in (path.name for path in Path("/proc").iterdir()):
        if pid.isdecimal() and int(pid) != os.getpid():
            with contextlib.suppress(OSError):
                cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
                if text in cmdline:
                    argvs.append((pid, cmdline[:300]))
    return argvs


@pytest.mark.every_mpi
def test_no_value_is_in_an_argv_and_no_secret_in_a_file(cloud):
    script = cloud.script(WAIT)
    (cloud.folder / "value.env").write_bytes(b"PLAIN=" + VALUE + b"\nS3_PLAIN=" + VALUE + b"\n")
    (cloud.folder / "second").write_bytes(b"file-" + SECRET)
    arguments = [
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        "--secret",
        "TOKEN",
        "--secret",
        "S3_SECRET",
        "--secret",
        f"SECOND=@{cloud.folder}/second",
        "--env-file",
        cloud.folder / "value.env",
        script,
    ]
    env = {"TOKEN": SECRET, "S3_SECRET": SECRET}

    job = cloud.detach(*arguments, env=env)
    cloud.await_results("rank-0", "rank-1", "rank-2", "rank-3")
    in_argv = argvs_with(SECRET) + argvs_with(VALUE)
    in_files = files_with(cloud.home, SECRET) + files_with(cloud.source, SECRET)
    run_dir = Path("/tmp", f"cloudjob-{job.rpartition('-')[2]}")
    tune = list(run_dir.rglob("tune"))
    tunes = [(stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in tune]
    open_files = [
        str(path)
        for path in run_dir.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o077 and SECRET in path.read_bytes()
    ]
    run_dir_mode = stat.S_IMODE(run_dir.stat().st_mode)
    mpirun_environs = [Path(f"/proc/{pid}/environ").read_bytes() for pid in cloud.mpiruns()]
    running = cloud.cli("status", "--json", job)
    (cloud.results / "go").touch()
    waited = cloud.cli("wait", job)

    assert waited.code == 0, waited
    assert in_argv == []
    assert in_files == []
    # Open MPI 4.1 looks for the file on each node; on a worker, an empty one is enough.
    assert {mode for mode, _ in tunes} == {0o600}
    assert not any(SECRET in text or VALUE in text for _, text in tunes)
    assert any(b"MA_NUM_HOSTS" in text for _, text in tunes)
    assert run_dir_mode == 0o700
    assert open_files == []
    assert mpirun_environs
    # Open MPI's own connections are not encrypted, so mpirun must not have any secret.
    assert not any(SECRET in text for text in mpirun_environs)
    assert not run_dir.exists()
    for rank in environments(cloud, 4):
        assert rank["TOKEN"] == rank["S3_SECRET"] == SECRET
        assert rank["SECOND"] == b"file-" + SECRET
    after = [
        running,
        cloud.cli("status", "--json", job),
        cloud.cli("logs", job),
        cloud.cli("list", "--json"),
        cloud.cli("submit", "--dry-run", *arguments, env=env),
        cloud.cli("submit", "--dry-run", "--json", *arguments, env=env),
        cloud.cli("config", "show", "--secret", "TOKEN", env=env),
    ]
    for done in after:
        assert done.code == 0, done
        assert SECRET not in done.out + done.err, done
    assert b"***" in after[5].out
    assert files_with(cloud.home, SECRET) == []


def test_secrets_are_masked_in_logs_failures_and_records(cloud):
    """The log itself keeps the exact bytes, and ``--raw`` shows them."""
    script = cloud.script(
        """
        token = os.environ["TOKEN"]
        print("token", token, "end")
        sys.stdout.flush()
        if rank == 1: raise ValueError("bad token " + token)
        time.sleep(600)
        """
    )

    done = cloud.submit("--nodes", "2", "--secret", "TOKEN", script, env={"TOKEN": SECRET})

    assert done.code == 1, done
    # Rank 0 may be terminated before it prints.
    assert b"[1] token *** end" in done.lines, done
    outputs = [
        done,
        *(
            cloud.cli(*arguments, done.job)
            for arguments in (["logs"], ["status"], ["status", "--json"])
        ),
    ]
    for each in outputs:
        assert SECRET not in each.out + each.err, each
    assert b"ValueError: bad token ***" in done.err, done
    assert b"ValueError: bad token ***" in outputs[-1].out, outputs[-1]
    assert b"token " + SECRET + b" end\n" in cloud.raw(done.job, 1)
    (record,) = cloud.home.rglob("record/exit.json")
    assert b"bad token ***" in record.read_bytes()


def test_secrets_in_arguments_and_variables_are_masked_and_reach_the_job_exactly(cloud):
    # Not SECRET: another test searches the command lines of this host for that.
    secret = "quiet-6b20d4-quiet"
    env, value = {"TOKEN": secret}, secret.encode()
    script = cloud.script("print(sys.argv[1] == os.environ['URL'] == 'x:' + os.environ['TOKEN'])")
    arguments = ["--secret", "TOKEN", "-e", f"URL=x:{secret}"]

    done = cloud.submit(*arguments, script, f"x:{secret}", env=env)
    outputs = [
        done,
        cloud.cli("submit", *arguments, "--dry-run", script, f"x:{secret}", env=env),
        cloud.cli("submit", *arguments, "--dry-run", "--json", script, f"x:{secret}", env=env),
        cloud.cli("config", "show", *arguments, env=env),
        cloud.cli("report", done.job, "--to", "report.html"),
    ]
    refused = cloud.cli("cp", done.job, env=env)
    copied = cloud.cli("cp", "-e", f"URL=x:{secret}", done.job, "--", f"x:{secret}", env=env)

    assert (done.code, done.lines) == (0, [b"[0] True"]), done
    assert b"the value of TOKEN is in arguments or variables" in done.err, done
    for each in outputs:
        assert each.code == 0, each
        assert value not in each.out + each.err, each
    cloud.await_cleanup()
    stored = [path for path in files_with(cloud.home, value) if "/process/" not in path]
    assert stored == []
    assert refused.code == 2, refused
    for key in (b"args", b"env.URL"):
        assert b": %s: was recorded with *** for the value of a secret" % key in refused.err
    assert (copied.code, copied.lines) == (0, [b"[0] True"]), copied


def test_a_secret_whose_variable_is_not_set_is_refused(cloud):
    done = cloud.submit("--secret", "NOT_SET_ANYWHERE", cloud.script(""))

    assert done.code == 2, done
    assert b"NOT_SET_ANYWHERE" in done.err, done
    assert cloud.jobs() == []


def test_a_failing_job_does_not_reveal_its_secrets(cloud):
    done = cloud.submit(
        "--nodes", "2", "--secret", "TOKEN", cloud.script("sys.exit(3)"), env={"TOKEN": SECRET}
    )

    assert done.code == 3, done
    assert SECRET not in done.out + done.err
    cloud.await_cleanup()
    assert files_with(cloud.home, SECRET) == []


# -- the entry alone, without any backend of cloudjob -----------------------------------------


@pytest.fixture
def short_folder():
    """A folder with a short path, as Open MPI creates sockets below TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="cj-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.every_mpi
def test_the_heads_variables_reach_ranks_of_a_worker_without_them(cloud, ugly_values, short_folder):
    hosts = ("127.0.0.1", "127.0.0.2")
    folder = short_folder
    script = cloud.script(DUMP).encode()
    (folder / "key").write_text("the key of the job")
    entry = Path(__file__).parents[2] / "cloudjob" / "jobentry.pyz"
    workers = []
    for index, host in enumerate(hosts):
        home = folder / host
        (home / "tmp").mkdir(parents=True)
        (home / "code").mkdir()
        (home / "code" / "job.py").write_bytes((cloud.source / "job.py").read_bytes())
        workers.append(
            {
                "HOME": str(home),
                "MA_HOME": str(home),
                "TMPDIR": f"{home}/tmp",
                "PATH": f"{cloud.mpi.mpirun.parent}:/bin",
                "WORKSPACE": f"{home}/code",
                "CLOUDJOB_NODE_DIR": f"{home}/node",
                "CLOUDJOB_JOB": "bare",
                "VC_TASK_INDEX": str(index),
                "VC_WORKER_HOSTS": ",".join(hosts),
                "MA_CURRENT_IP": host,
                "MA_CURRENT_INSTANCE_NAME": f"own-{index}",
                "CLOUDJOB_PROCS_PER_NODE": "2",
                "MA_SCRIPT_INTERPRETER": sys.executable,
                "CLOUDJOB_START_TIMEOUT_S": "30",
                "CLOUDJOB_CONTROL_DIR": str(folder),
                "CLOUDJOB_SSH_KEY": str(folder / "key"),
            }
        )
    carried = {}
    for index, (name, value) in enumerate(ugly_values.items()):
        prefix = ("S3_", "MA_", "SHARED_", "SCC", "CRED", "VC_WORKER_", "MINE_")[index % 7]
        carried[f"{prefix}{name}"] = value
    forwarded_names = " ".join(name for name in carried if name.startswith("MINE_"))
    head = {
        **workers[0],
        **carried,
        "PATH": cloud.mpi.path,
        "RESULTS": str(cloud.results),
        "CLOUDJOB_ENV_NAMES": f"RESULTS {forwarded_names}",
    }
    command = [sys.executable, "-I", "-S", entry, script]
    worker_log = (cloud.folder / "worker.log").open("wb")
    worker = subprocess.Popen(
        command, env=workers[1], cwd=workers[1]["HOME"], stdout=worker_log, stderr=worker_log
    )
    try:
        done = subprocess.run(
            command, env=head, cwd=workers[0]["HOME"], capture_output=True, timeout=180
        )
        code = worker.wait(180)
    finally:
        worker.kill()
        worker.wait()
        worker_log.close()

    output = (done.stdout + done.stderr + (cloud.folder / "worker.log").read_bytes()).decode(
        errors="replace"
    )
    assert (done.returncode, code) == (0, 0), output
    ranks = environments(cloud, 4)
    assert differences(ranks, carried | {"PATH": cloud.mpi.path.encode()}) == []
    assert [rank["VC_TASK_INDEX"] for rank in ranks] == [b"0", b"0", b"1", b"1"]
    assert [rank["MA_CURRENT_IP"] for rank in ranks] == [b"127.0.0.1"] * 2 + [b"127.0.0.2"] * 2
    assert ranks[3]["HOME"] == str(folder / "127.0.0.2").encode()


# -- the user's options for mpirun -------------------------------------------------------------

ALLREDUCE = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == size
write_result(f"ok-{rank}")
"""


@pytest.mark.every_mpi
def test_extra_args_are_passed_to_mpirun(cloud):
    done = cloud.submit(
        "--nodes",
        "2",
        "-e",
        "OPENMPI_EXTRA_ARGS=--report-bindings",
        "-e",
        "OPENMPI_BIND_ARGS=-bind-to core -map-by slot",
        cloud.script(DUMP),
    )

    assert done.code == 0, done
    assert b"bound to" in done.err, done


@pytest.mark.every_mpi
def test_the_last_of_repeated_mca_parameters_wins(cloud):
    args = "-mca btl ^openib -mca btl tcp,self -mca pml ob1 --mca btl_tcp_if_include lo"
    done = cloud.submit(
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        "-e",
        f"OPENMPI_MCA_ARGS={args}",
        cloud.script(ALLREDUCE),
    )

    assert done.code == 0, done
    assert len(cloud.results_written("ok-*")) == 4


@pytest.mark.every_mpi
def test_x_args_are_split_as_in_a_shell(cloud):
    args = """-x FOO="a b" -x 'BAR=it'"'"'s $HOME' -x UNSET_NAME -x EMPTY= -x EQ=a=b"""
    args += " -x MA_CURRENT_IP"
    done = cloud.submit("--nodes", "2", "-e", f"OPENMPI_X_ARGS={args}", cloud.script(DUMP))

    assert done.code == 0, done
    ranks = environments(cloud, 2)
    expected = {"FOO": b"a b", "BAR": b"it's $HOME", "EMPTY": b"", "EQ": b"a=b"}
    assert differences(ranks, expected) == []
    assert all("UNSET_NAME" not in rank for rank in ranks)
    assert ranks[0]["MA_CURRENT_IP"] != ranks[1]["MA_CURRENT_IP"]
    assert all("NCCL_DEBUG" not in rank for rank in ranks), "the user's value replaces the default"
    assert b"UNSET_NAME" in done.err, done


@pytest.mark.every_mpi
def test_bind_args_control_the_placement_of_ranks(cloud):
    done = cloud.submit(
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        "-e",
        "OPENMPI_BIND_ARGS=-bind-to none -map-by node",
        cloud.script('write_result(f"rank-{rank}", node)'),
    )

    assert done.code == 0, done
    assert list(cloud.results_written().values()) == [b"0", b"1", b"0", b"1"]


@pytest.mark.every_mpi
@pytest.mark.parametrize("np", [1, 3])
def test_a_job_may_have_fewer_ranks_than_slots(cloud, np):
    """OPENMPI_NP may be less than the number of slots, even if a node then has no rank."""
    done = cloud.submit(
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        "-e",
        f"OPENMPI_NP={np}",
        cloud.script('write_result(f"rank-{rank}", size)'),
    )

    assert done.code == 0, done
    assert cloud.results_written() == {f"rank-{rank}": b"%d" % np for rank in range(np)}


@pytest.mark.every_mpi
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        # One error that the entry finds, and two that only mpirun finds; test_mpirun.py has more.
        ("OPENMPI_NP", "5", b"OPENMPI_NP"),
        ("OPENMPI_BIND_ARGS", "-bind-to nonsense", b"nonsense"),
        ("OPENMPI_EXTRA_ARGS", "--no-such-option", b"no-such-option"),
    ],
)
def test_invalid_options_for_mpirun_end_the_job_with_a_message(cloud, variable, value, expected):
    done = cloud.submit(
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        "-e",
        f"{variable}={value}",
        cloud.script("write_result(f'rank-{rank}')"),
    )

    assert done.code in (2, 125), done
    assert expected in done.err, done
    assert b"Traceback" not in done.err, done
    assert cloud.results_written() == {}
    if done.code == 125:
        status = cloud.status(done.job)
        assert status["cause"] == "entry", status
        assert status["failure"]["message"], status


def test_options_for_mpirun_are_never_run_by_a_shell(cloud):
    mark = cloud.folder / "pwned"
    for variable in (
        "OPENMPI_EXTRA_ARGS",
        "OPENMPI_X_ARGS",
        "OPENMPI_MCA_ARGS",
        "OPENMPI_BIND_ARGS",
    ):
        value = f"; touch {mark} | $(touch {mark}) `touch {mark}`"
        done = cloud.submit("--dry-run", "-e", f"{variable}={value}", cloud.script(""))
        assert b"Traceback" not in done.err, done
    done = cloud.submit(
        "--nodes",
        "2",
        "-e",
        f"OPENMPI_EXTRA_ARGS=$(touch {mark}) ; touch {mark}",
        "-e",
        f"OPENMPI_X_ARGS=-x 'FOO=$(touch {mark}); touch {mark}'",
        cloud.script(""),
    )

    assert not mark.exists()
    assert b"Traceback" not in done.err, done


def test_a_dry_run_prints_the_masked_plan_and_starts_nothing(cloud):
    done = cloud.submit(
        "--dry-run",
        "--json",
        "--nodes",
        "2",
        "--secret",
        "TOKEN",
        cloud.script(""),
        "a b",
        env={"TOKEN": SECRET},
    )

    assert done.code == 0, done
    head, worker = json.loads(done.out)["plans"]
    assert (head["role"], worker["role"]) == ("head", "worker")
    assert head["argv"][0] == str(cloud.mpi.mpirun)
    assert head["argv"][1:3] == ["-np", "2"]
    assert head["argv"][-2:] == ["job.py", "a b"]
    assert worker["argv"] == []
    assert set(head) >= {"argv", "env", "files", "role", "cwd"}
    assert cloud.jobs() == []
    assert textwrap.dedent(done.out.decode()).count(SECRET.decode()) == 0


def test_long_names_leave_the_paths_of_sockets_short(cloud):
    """A Unix socket's path has at most 107 bytes, so long names and folders are not part of it."""
    home, temporary = cloud.folder / ("h" * 120), cloud.folder / ("t" * 120)
    temporary.mkdir()
    cloud.environ.update(CLOUDJOB_HOME=str(home), TMPDIR=str(temporary))
    text = """
        import multiprocessing.connection as connections
        connections.Listener(family="AF_UNIX").close()
        print("up", rank)
    """

    done = cloud.submit("--nodes", "2", cloud.script(text, f"{'n' * 80}.py"))

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[0] up 0", b"[1] up 1"], done
    assert list(temporary.iterdir()) == []
