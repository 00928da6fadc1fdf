"""Jobs on Slurm: how they run, end, wait, and are cancelled, retried and removed."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.e2e_slurm.conftest import SYSTEM_PATH, poll
from tests.support import portable_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
SIZE = ("--nodes", "2", "--procs-per-node", "2")
# The common beginning of the scripts. It does not import MPI, so that they start quickly.
PRELUDE = """\
import os, signal, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or 0)
node = int(os.environ["VC_TASK_INDEX"])
results = os.environ["RESULTS"]
def write_result(name, text=""):
    with open(f"{results}/{name}.new", "w") as file:
        file.write(str(text))
    os.rename(f"{results}/{name}.new", f"{results}/{name}")
def await_file(name, limit_s=90):
    end = time.monotonic() + limit_s
    while not os.path.exists(f"{results}/{name}"):
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.05)
"""
# Waits for SIGTERM, and then saves for longer than the grace periods of Slurm and mpirun.
SAVES_ON_SIGTERM = (
    PRELUDE
    + """
def end(number, frame):
    time.sleep(3)
    write_result(f"saved-{rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
write_result(f"up-{rank}")
time.sleep(300)
"""
)


@pytest.mark.long
def test_a_job_that_ran_here_runs_there_with_another_backend(cloud):
    """The same job file gives the same accuracy and outputs, on two nodes with two ranks each."""
    for path in EXAMPLE.iterdir():
        if path.is_file():
            cloud.write(path.name, path.read_text())
    cloud.write(
        "job.yaml",
        """
        backend: process
        nodes: 2
        procs_per_node: 2
        script: train.py
        args: [--epochs, "3"]
        outputs: {model: ""}
        """,
    )
    here = cloud.run("submit", "--config", "job.yaml")
    job_file = (cloud.source / "job.yaml").read_text()
    cloud.write("job.yaml", job_file.replace("backend: process", "backend: slurm"))
    there = cloud.run("submit", "--config", "job.yaml")
    cloud.run("outputs", there.job, "--to", str(cloud.folder / "fetched"))

    assert (here.code, there.code) == (0, 0), f"{here}\n{there}"
    outputs = [re.sub(r"in [\d.]+ s", "", done.out.decode()) for done in (here, there)]
    assert "identical on all 4 ranks" in outputs[1]
    assert re.findall(r"accuracy \S+", outputs[0]) == (re.findall(r"accuracy \S+", outputs[1]))
    assert [p.name for p in (cloud.folder / "fetched").rglob("*.npz")] == ["digits.npz"]


def test_the_job_file_of_all_backends_runs_here(cloud):
    """``tests.support.portable_job``, which also runs on the other backends."""
    for backend in ("process", "slurm"):
        portable_job.write(cloud.source, backend, {})
        done = cloud.run("submit", "--config", "job.yaml")
        target = cloud.folder / f"fetched-{backend}"
        fetched = cloud.run("outputs", done.job, "--to", str(target))

        assert (done.code, fetched.code) == (0, 0), f"{backend}: {done}\n{fetched}"
        assert sorted(done.out.decode().splitlines()) == portable_job.LINES, backend
        assert portable_job.files(target) == portable_job.FILES, backend


def test_ranks_of_two_nodes_run_on_their_nodes(cloud):
    """Ranks have Slurm's host names and the user's home, but no variables of Slurm's job steps."""
    cloud.write(
        "train.py",
        PRELUDE
        + """
import socket
slurm = sorted(name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SRUN")))
home = os.path.expanduser("~")
hosts = os.environ["VC_WORKER_HOSTS"]
write_result(f"rank-{rank}", [node, socket.gethostname(), hosts, home, slurm])
""",
    )
    done = cloud.submit(*SIZE, "train.py")

    assert done.code == 0, done
    results = {path.name: path.read_text() for path in cloud.results.iterdir()}
    names = ["SLURM_CONF", "SLURM_JOB_ID"]
    assert results == {
        f"rank-{rank}": str([rank // 2, f"n{rank // 2 + 1}", "n1,n2", str(cloud.folder), names])
        for rank in range(4)
    }


def test_stacks_show_the_rank_that_the_others_wait_for(cloud, tmp_path):
    """A step of the job asks the head, whose node need not be the one with the lowest name."""
    cloud.write(
        "train.py",
        PRELUDE
        + """
from mpi4py import MPI
def load(): time.sleep(600)
write_result(f"up-{rank}", "")
if rank == 3: load()
MPI.COMM_WORLD.Barrier()
""",
    )
    job = cloud.detach(*SIZE, "train.py")
    cloud.await_results(*(f"up-{rank}" for rank in range(4)))

    def stacks_now():
        done = cloud.run("stacks", "--json", job)
        assert done.code == 0, done
        return json.loads(done.out)

    poll(lambda: stacks_now()["odd_ranks"] == [3], lambda: str(stacks_now()))

    odd, waiting = stacks_now()["groups"]
    assert [frame["function"] for frame in odd["frames"]] == ["load", "<module>"]
    assert odd["does"] == "sleeping"
    assert (waiting["ranks"], waiting["does"]) == ([0, 1, 2], "waiting for other ranks")
    page = tmp_path / "profile.html"
    done = cloud.run("profile", job, "--rank", "3", "--seconds", "1", "-o", str(page))
    assert done.code == 0, done
    assert "load() at train.py:" in page.read_text()
    assert cloud.run("cancel", "--now", job).code == 0


def test_a_command_runs_on_each_node_as_a_rank_would(cloud):
    cloud.write(
        "train.py",
        PRELUDE + 'write_result(f"up-{rank}", os.uname().nodename)\nawait_file("go")\n',
    )
    job = cloud.detach(*SIZE, "-e", "TEXT= a\nb ", "train.py")
    cloud.await_results(*(f"up-{rank}" for rank in range(4)))
    program = 'printf "%s|" "$TEXT" "$(hostname)" "$OMPI_COMM_WORLD_RANK"; exit 7'

    for rank in ("0", "3"):
        done = cloud.run("exec", "--rank", rank, job, "--", "sh", "-c", program)

        host = (cloud.results / f"up-{rank}").read_text()
        assert (done.code, done.out) == (7, f" a\nb |{host}|{rank}|".encode()), done
    assert cloud.run("exec", "--rank", "0", job, "nothing").code == 127
    (cloud.results / "go").touch()
    assert cloud.run("wait", job).code == 0


@pytest.mark.surroundings
def test_the_exact_variables_and_secrets_reach_every_rank(cloud):
    """No script, command line or log of Slurm contains a secret."""
    values = {"BLANK": " a b ", "QUOTES": '"it\'s" $HOME `id` \\', "NEWLINE": "a\nb", "EMPTY": ""}
    cloud.environ.update(TOKEN="s3cr3t, with blanks", SBATCH_EXPORT="NONE", MA_STRAY="of the shell")
    cloud.write(
        "train.py",
        PRELUDE
        + f"""
import json
names = {[*values, "TOKEN", "MA_STRAY"]}
write_result(f"rank-{{rank}}", json.dumps({{name: os.environ.get(name) for name in names}}))
if rank == 0:
    await_file("go")
""",
    )
    options = [option for name, value in values.items() for option in ("-e", f"{name}={value}")]
    job = cloud.detach(*SIZE, *options, "--secret", "TOKEN", "train.py")
    cloud.await_results(*(f"rank-{rank}" for rank in range(4)))
    number = cloud.number(job)
    everything = cloud.slurm.run("scontrol", "show", "job", "-d", number)
    everything += cloud.slurm.run("scontrol", "write", "batch_script", number, "-")
    everything += cloud.slurm.run("ps", "-eww", "-o", "args")
    folder = cloud.job_folder(job)
    paths = (folder, folder / "env", folder / "ssh-key")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in paths]
    (cloud.results / "go").touch()
    poll(lambda: "end 0" in (folder / "state").read_text(), cloud.logs)
    # The job itself deletes its secrets; no cloudjob command has run since it ended.
    names = {path.name for path in folder.iterdir()}
    done = cloud.run("wait", job)

    assert done.code == 0, done
    expected = {**values, "TOKEN": "s3cr3t, with blanks", "MA_STRAY": None}
    for rank in range(4):
        assert json.loads((cloud.results / f"rank-{rank}").read_text()) == expected
    assert "s3cr3t" not in everything
    assert "train.py" in everything
    assert modes == [0o700, 0o600, 0o600]
    assert not {"env", "ssh-key", "ssh-key.pub"} & names


def test_a_failed_rank_is_named(cloud):
    """Commands exit with the rank's exit code, and the status names the rank and its node."""
    cloud.write("train.py", PRELUDE + "if rank == 3: sys.exit(7)\nawait_file('never')\n")
    done = cloud.submit(*SIZE, "train.py")
    status = cloud.status(done.job)

    assert done.code == 7, done
    assert (status["state"], status["cause"], status["exit_code"]) == ("FAILED", "user", 7)
    failure = status["failure"]
    assert (failure["rank"], failure["node"], failure["host"]) == (3, 1, "n2")


def test_a_cancelled_job_gets_its_grace_period(cloud):
    """The grace period may be longer than those of mpirun and Slurm."""
    cloud.write("train.py", SAVES_ON_SIGTERM)
    job = cloud.detach(*SIZE, "train.py")
    cloud.await_results(*(f"up-{rank}" for rank in range(4)))
    cancelled = cloud.run("cancel", job)
    done = cloud.run("wait", job)
    status = cloud.status(job)

    assert cancelled.code == 0, cancelled
    assert (done.code, status["state"], status["cause"]) == (143, "CANCELLED", "cancelled"), done
    assert {path.name for path in cloud.results.glob("saved-*")} == {
        f"saved-{rank}" for rank in range(4)
    }
    details = cloud.slurm.run("scontrol", "--oneliner", "show", "job", cloud.number(job))
    assert "JobState=CANCELLED" in details


def test_cancel_now_skips_the_grace_period(cloud):
    """The head still writes its record, and nothing remains on the nodes."""
    cloud.write("train.py", SAVES_ON_SIGTERM.replace("time.sleep(3)", "time.sleep(300)"))
    job = cloud.detach("--grace-s", "600", *SIZE, "train.py")
    cloud.await_results("up-0", "up-3")
    cloud.start("cancel", job)
    poll((cloud.job_folder(job) / "asked").exists, cloud.logs)
    cancelled = cloud.run("cancel", "--now", job, limit_s=60)
    done = cloud.run("wait", job, limit_s=60)

    assert (cancelled.code, done.code) == (0, 143), f"{cancelled}\n{done}"
    assert cloud.status(job)["state"] == "CANCELLED"


def test_a_suspended_job_can_be_cancelled(cloud):
    """Its stopped processes cannot receive a signal, so Slurm kills them; nothing of them stays."""
    cloud.write("train.py", SAVES_ON_SIGTERM)
    job = cloud.detach("train.py")
    cloud.await_results("up-0")
    cloud.slurm.run("scontrol", "suspend", cloud.number(job))
    native = cloud.status(job)["native_state"]
    cancelled = cloud.run("cancel", job, limit_s=60)
    cloud.run("wait", job, limit_s=60)

    assert native == "SUSPENDED"
    assert cancelled.code == 0, cancelled
    assert cloud.status(job)["state"] == "CANCELLED"


@pytest.mark.parametrize("mpi", ["ssh", "pmix"])
def test_every_rank_sees_the_gpus_of_its_node_whatever_option_requested_them(cloud, mpi):
    cloud.write("job.yaml", f"slurm: {{mpi: {mpi}, sbatch: [--gpus-per-task=1]}}\n")
    cloud.write(
        "train.py",
        PRELUDE + "write_result(f'rank-{rank}', [os.environ.get(name) for name in"
        " ('CUDA_VISIBLE_DEVICES', 'MA_NUM_GPUS')])\n",
    )
    done = cloud.submit("--config", "job.yaml", *SIZE, "train.py")

    assert done.code == 0, done
    assert {path.name: path.read_text() for path in cloud.results.iterdir()} == {
        f"rank-{rank}": str(["0,1", "2"]) for rank in range(4)
    }


@pytest.mark.parametrize(("mpi", "most"), [("ssh", ("0,1,2", "3")), ("pmix", ("0", "3"))])
def test_nodes_may_have_different_numbers_of_gpus(cloud, mpi, most):
    """``--gpus=4`` gives three GPUs on one node and one on the other; srun gives one on each."""
    cloud.write("job.yaml", f"slurm: {{mpi: {mpi}, sbatch: [--gpus=4]}}\n")
    cloud.write(
        "train.py",
        PRELUDE + "write_result(f'rank-{rank}', [os.environ.get(name) for name in"
        " ('CUDA_VISIBLE_DEVICES', 'MA_NUM_GPUS')])\n",
    )
    done = cloud.submit("--config", "job.yaml", "--nodes", "2", "train.py")

    assert done.code == 0, done
    assert {path.name: path.read_text() for path in cloud.results.iterdir()} == {
        "rank-0": str([*most]),
        "rank-1": str(["0", "1"]),
    }


def test_a_waiting_job_is_reported_with_the_reason_and_can_be_cancelled(cloud):
    """The status has Slurm's reason and its meaning; a cancel removes such a job at once."""
    cloud.write("train.py", PRELUDE + "await_file('go')\n")
    cloud.write("job.yaml", "slurm: {sbatch: [--hold]}\n")
    job = cloud.detach("--config", "job.yaml", "train.py")
    status = cloud.status(job)
    cancelled = cloud.run("cancel", job)
    done = cloud.run("wait", job)

    assert cancelled.code == 0, cancelled
    assert status["state"] == "PENDING"
    assert status["native_state"] == ("PENDING (JobHeldUser: is held: scontrol release starts it)")
    assert cloud.status(job)["state"] == "CANCELLED", done


def test_a_list_of_many_jobs_asks_slurm_once(cloud):
    """The list has the same values as ``status``, except for the phases.

    Slurm is queried again only for a job that has ended.
    """
    cloud.write("train.py", PRELUDE + "await_file('go')\n")
    cloud.write("job.yaml", "slurm: {sbatch: [--hold]}\n")
    jobs = [cloud.detach("--config", "job.yaml", "train.py") for _ in range(4)]
    cloud.slurm.run("scontrol", "release", cloud.number(jobs[0]))
    poll(lambda: cloud.status(jobs[0])["state"] == "RUNNING", cloud.logs)
    shutil.rmtree(cloud.job_folder(jobs[3]))
    folder = cloud.folder / "bin"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sacct"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho {name} >>{folder}/asked\nexec /usr/bin/{name} "$@"\n')
        path.chmod(0o755)
    cloud.environ["PATH"] = f"{folder}:{SYSTEM_PATH}"

    listed = json.loads(cloud.run("list", "--json").out)

    calls = (folder / "asked").read_text().split()
    assert calls == ["squeue"]
    statuses = [{**cloud.status(job), "phases": []} for job in reversed(jobs)]
    assert [status.pop("git_commit") for status in statuses] == [""] * len(jobs)
    assert listed == statuses
    states = [item["state"] for item in listed]
    assert states == ["UNKNOWN", "PENDING", "PENDING", "RUNNING"]


def test_a_plain_scancel_counts_as_a_cancel(cloud):
    cloud.write("train.py", SAVES_ON_SIGTERM)
    job = cloud.detach(*SIZE, "train.py")
    cloud.await_results(*(f"up-{rank}" for rank in range(4)))
    cloud.slurm.run("scancel", cloud.number(job))
    cloud.run("wait", job)

    assert cloud.status(job)["state"] == "CANCELLED"


# Submits the job, and then kills its callers before they can save the job's number.
SBATCH = """\
#!/bin/sh
number=$(/usr/bin/sbatch "$@") || exit
cloudjob=$(ps -o ppid= -p "$PPID")
kill -9 "$PPID" $cloudjob
"""


def test_a_job_is_found_again_when_its_submitter_was_killed(cloud):
    """The submitter dies when Slurm has the job, but no process has saved its number."""
    sbatch = cloud.folder / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    cloud.environ["PATH"] = f"{sbatch.parent}:{SYSTEM_PATH}"
    cloud.write("train.py", PRELUDE + "print('hello', rank)\n")
    cloud.write("job.yaml", "slurm: {sbatch: [--hold]}\n")
    killed = cloud.submit("--config", "job.yaml", "train.py")
    cloud.environ["PATH"] = SYSTEM_PATH
    kept = [path.name for path in cloud.home.glob("slurm/*/*")]
    (job,) = (item["job"] for item in json.loads(cloud.run("list", "--json").out))
    waiting = cloud.status(job)
    number = cloud.number(job)
    cloud.slurm.run("scontrol", "release", number)
    done = cloud.run("wait", job)
    log = cloud.run("logs", job)

    assert killed.code == -9, killed
    assert "job.sh" in kept
    assert "id" not in kept
    assert (waiting["state"], done.code) == ("PENDING", 0), done
    assert f"JobName=cloudjob-{job}" in cloud.slurm.run("scontrol", "show", "job", number)
    assert log.out == b"[0] hello 0\n"


def test_a_removed_job_leaves_nothing(cloud, cluster):
    """Slurm, the job's folder and the store are clean, even if the job was still running."""
    cloud.write("train.py", SAVES_ON_SIGTERM)
    job = cloud.detach(*SIZE, "train.py")
    cloud.await_results("up-3")
    number = cloud.number(job)
    refused = cloud.run("rm", job)
    code = (
        "import sys, pathlib; from cloudjob.backends import open_backend; "
        "open_backend('slurm', pathlib.Path(sys.argv[1])).remove(sys.argv[2])"
    )
    handle = f"slurm://{cloud.job_folder(job)}"
    cluster.run(sys.executable, "-c", code, str(cloud.home), handle)
    removed = cloud.run("rm", job)

    assert (refused.code, removed.code) == (2, 0), f"{refused}\n{removed}"
    assert not cloud.job_folder(job).exists()
    assert "CANCELLED" in cluster.run("squeue", "-h", "-t", "all", "-j", number, "-o", "%T")
    assert json.loads(cloud.run("list", "--json").out) == []


def test_retries_start_the_whole_job_again(cloud):
    """The first attempt's failure is not a failure of the job."""
    cloud.write(
        "train.py",
        PRELUDE + "if not os.path.exists(results + '/once'):\n"
        "    write_result('once')\n    sys.exit(3)\n"
        "write_result(f'again-{rank}', os.environ['CLOUDJOB_ATTEMPT'])\n",
    )
    done = cloud.submit("--nodes", "2", "--retries", "1", "train.py")

    assert done.code == 0, done
    assert cloud.status(done.job)["state"] == "SUCCEEDED"
    assert "attempt 1 of 2 failed (exit code 3); attempt 2 of 2 begins" in done.err
    assert (cloud.results / "again-1").read_text() == "2"


def test_an_exception_is_not_retried(cloud):
    cloud.write("train.py", PRELUDE + "print('once', flush=True)\nraise ValueError('always')\n")
    done = cloud.submit("--retries", "2", "train.py")

    assert (done.code, done.out.count(b"once")) == (1, 1), done
    assert "attempt 1 of 3 failed (exit code 1); the job is not tried again" in done.err


def test_a_refused_job_leaves_nothing(cloud):
    """The error has Slurm's message and a hint, and nothing is left."""
    cloud.write("train.py", "")
    cloud.write("job.yaml", "slurm: {partition: mian}\n")
    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "invalid partition specified: mian" in done.err
    assert "hint: sinfo -s lists the partitions" in done.err
    assert list(cloud.home.glob("slurm/*")) == []
    assert json.loads(cloud.run("list", "--json").out) == []


def test_doctor_reports_what_the_cluster_has(cloud):
    """It shows the version, controller, partitions and a folder; accounting may be missing."""
    done = cloud.run("doctor", "--backend", "slurm")
    text = done.out.decode() + done.err

    assert done.code == 0, done
    for expected in ("slurm-wlm 22.05", "is UP", "main*", str(cloud.home / "slurm")):
        assert expected in text


@pytest.mark.parametrize("size", [("--nodes", "1", "--procs-per-node", "2"), SIZE], ids=["1", "2"])
def test_ranks_can_be_started_by_srun_and_its_pmix(cloud, size):
    """MPI connects through Slurm's PMIx; variables, secrets and logs are as with mpirun."""
    cloud.environ["TOKEN"] = "s3cr3t"
    cloud.write("job.yaml", "slurm: {mpi: pmix}\n")
    cloud.write(
        "train.py",
        PRELUDE
        + """
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
write_result(f"rank-{world.rank}", [node, world.size, total, os.environ["TOKEN"], os.environ["A"]])
print("hello", world.rank)
""",
    )
    options = ("--config", "job.yaml", "--secret", "TOKEN", "-e", "A= b ")
    done = cloud.submit(*size, *options, "train.py")

    ranks = 2 * int(size[1])
    total = ranks * (ranks + 1) // 2
    assert done.code == 0, done
    assert {path.name: path.read_text() for path in cloud.results.iterdir()} == {
        f"rank-{rank}": str([rank // 2, ranks, total, "s3cr3t", " b "]) for rank in range(ranks)
    }
    assert sorted(done.out.splitlines()) == [b"[%d] hello %d" % (r, r) for r in range(ranks)]


def test_under_srun_a_failed_rank_ends_the_others_with_their_grace_period(cloud):
    """As with mpirun, the other ranks get SIGTERM and time to save."""
    cloud.write("job.yaml", "slurm: {mpi: pmix}\n")
    body = SAVES_ON_SIGTERM.replace(
        'write_result(f"up-{rank}")',
        "write_result(f'up-{rank}')\nif rank == 1:\n"
        "    [await_file(f'up-{r}') for r in range(4)]\n    sys.exit(5)",
    )
    cloud.write("train.py", body)
    done = cloud.submit("--config", "job.yaml", *SIZE, "train.py")
    status = cloud.status(done.job)

    assert done.code == 5, done
    assert (status["failure"]["rank"], status["failure"]["host"]) == (1, "n1")


def test_a_folder_that_the_nodes_do_not_share_is_named_as_the_cause(cloud):
    # Each node of the cluster has its own /tmp.
    cloud.write("cloudjob.yaml", "slurm: {folder: /tmp/not-shared}")
    cloud.write("train.py", "print('never')")

    done = cloud.submit("train.py")

    assert done.code == 125, done
    text = "does not see the job's folder or cannot write there: it must be on a disk that all"
    assert text in done.err, done
    assert cloud.status(done.job)["cause"] == "platform"
