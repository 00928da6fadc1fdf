"""Jobs in real containers: they run, report how they ended, and leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from cloudjob.backends import open_backend
from jobentry.contract import names, variables
from tests.support.polling import poll

pytestmark = pytest.mark.docker

# See conftest.py.
LIMIT_S = 240.0
DIGITS = Path(__file__).parents[2] / "examples" / "digits"
REPORT = """\
import importlib.util, json, os, socket, sys
names = sorted(n for n in os.environ if n.startswith(("MA_", "VC_", "SSHD_")))
print(json.dumps({
    "rank": os.environ["OMPI_COMM_WORLD_RANK"], "host": socket.gethostname(), "uid": os.getuid(),
    "gid": os.getgid(), "cwd": os.getcwd(), "address": socket.gethostbyname(socket.gethostname()),
    "argv": sys.argv[1:], "hosts": open("/etc/volcano/worker.host").read(),
    "cache": os.access("/cache", os.W_OK), "moxing": bool(importlib.util.find_spec("moxing")),
    **{n: os.environ[n] for n in names},
}), flush=True)
"""
SLEEP = """\
import os, signal, sys, time
def end(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", os.environ["OMPI_COMM_WORLD_RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["base_image", "open_mpi_5_image"], ids=["4.1", "5.0"])
def cloud(cloud, request):
    """The command line, with Open MPI 4.1 or 5.0 on the nodes."""
    cloud.image = request.getfixturevalue(request.param)
    return cloud


def reports(done):
    """Return what each rank printed with REPORT, by rank."""
    lines = [json.loads(line.partition(b"] ")[2]) for line in done.out.splitlines()]
    return {int(line["rank"]): line for line in lines}


def test_a_job_of_one_node_has_modelarts_user_folders_and_variables(cloud):
    cloud.script(REPORT)

    done = cloud.run("submit", "--backend", "docker", "train.py", "--a=b", "ü x")

    assert done.code == 0, done
    rank = reports(done)[0]
    host = f"ma-job-{done.job}-worker-0"
    assert (rank["uid"], rank["gid"]) == (1000, 100)
    assert rank["argv"] == ["--a=b", "ü x"]
    assert rank["host"] == host
    assert rank["hosts"] == f"{host}.ma-job-{done.job}\n"
    assert rank["cwd"] == "/home/ma-user/modelarts/user-job-dir/code"
    assert rank["MA_CURRENT_IP"] == rank["address"]
    assert rank["MA_VJ_NAME"] == f"ma-job-{done.job}"
    assert rank["cache"]
    assert rank["moxing"]


@pytest.mark.parametrize(("nodes", "procs"), [(2, 2), (4, 1)])
def test_ranks_on_several_nodes_connect_through_ssh(cloud, nodes, procs):
    cloud.script(REPORT)

    done = cloud.submit("--nodes", str(nodes), "--procs-per-node", str(procs))

    assert done.code == 0, done
    ranks = reports(done)
    assert sorted(ranks) == list(range(nodes * procs))
    for rank, value in ranks.items():
        assert value["host"] == f"ma-job-{done.job}-worker-{rank // procs}"
        assert value["VC_TASK_INDEX"] == str(rank // procs)
        assert value["MA_CURRENT_IP"] == value["address"]


def test_the_example_trains_on_two_nodes(cloud, examples_image):
    done = cloud.run(
        *("submit", "--backend", "docker", "--nodes", "2", "--image", examples_image),
        *("--output", "model=", "--source", str(DIGITS), "train.py", "--epochs", "3"),
    )

    assert done.code == 0, done
    assert b"identical on all 2 ranks" in done.out
    assert cloud.run("outputs", done.job).out == b"model/digits.npz\n"


@pytest.mark.surroundings
def test_secrets_and_unusual_bytes_reach_every_rank(cloud):
    """Secrets and values that are not UTF-8 arrive unchanged; no metadata contains the secret."""
    cloud.environ["TOKEN"] = b"s3cr3t \xff =;'"
    cloud.script("""\
        import os, sys
        sys.stdout.buffer.write(repr([os.environb[b"TOKEN"], os.environb[b"ODD"]]).encode())
        print(flush=True)
        """)

    job = cloud.detach("--nodes", "2", "--secret", "TOKEN", "-e", b"ODD=\xfe\n=")
    inspected = [json.dumps(cloud.engine.inspect_container(c["Id"])) for c in cloud.containers(job)]
    done = cloud.run("wait", job)

    assert done.code == 0, done
    line = repr([b"s3cr3t \xff =;'", b"\xfe\n="]).encode()
    log = cloud.run("logs", job).out
    assert sorted(log.splitlines()) == [b"[0] " + line, b"[1] " + line]
    assert not any("s3cr3t" in text for text in inspected)
    processes = subprocess.run(
        ["grep", "-r", "-l", "s3cr3t", cloud.home / "store", cloud.home / "records.db"],
        capture_output=True,
        check=False,
    )
    assert processes.stdout == b""


def test_a_secret_is_gone_from_the_container_when_the_job_has_ended(cloud):
    """The container deletes its secrets and its key itself, before any command checks the job."""
    cloud.environ["TOKEN"] = "s3cr3t-in-a-file"
    cloud.script("print('done')")

    job = cloud.detach("--nodes", "2", "--secret", "TOKEN")
    for container in cloud.containers(job):
        cloud.engine.wait(container["Id"])
        files = b"".join(cloud.engine.export(container["Id"]))
        assert b"worker.host" in files
        assert b"s3cr3t-in-a-file" not in files
        # The start of a private key in base64; the BEGIN line before it also occurs in ssh itself.
        assert b"b3BlbnNzaC1rZXktdjE" not in files

    assert cloud.run("wait", job).code == 0


def test_fresh_keys_are_put_where_only_the_job_s_user_reads_them(cloud):
    cloud.script(
        "import pathlib, time\nwhile not pathlib.Path('/tmp/go').exists(): time.sleep(0.1)"
    )
    job = cloud.detach("--nodes", "2")
    backend = open_backend("docker", cloud.home)
    keys = dict.fromkeys(names.STORE_KEYS, "fresh")
    backend.refresh(f"docker://local/{job}", keys)

    for container in cloud.containers(job):
        path = "/run/cloudjob/store-keys"
        data, _ = cloud.engine.get_archive(container["Id"], path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(data))) as archive:
            (member,) = archive.getmembers()
            assert (member.uid, member.mode & 0o777) == (1000, 0o400)
            assert archive.extractfile(member).read() == variables.dump(keys)
        started = cloud.engine.exec_create(container["Id"], ["touch", "/tmp/go"])
        cloud.engine.exec_start(started["Id"])
    assert cloud.run("wait", job).code == 0


def test_stacks_show_the_rank_that_the_others_wait_for(cloud, tmp_path):
    """The entry reads them inside of its container, without any capability."""
    cloud.script(
        "import os, time\n"
        "class comm: Barrier = time.sleep  # the image has no mpi4py\n"
        "def load(): time.sleep(600)\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '3': load()\n"
        "comm.Barrier(600)\n"
    )
    job = cloud.detach("--nodes", "2", "--procs-per-node", "2")

    def stacks_now():
        done = cloud.run("stacks", "--json", job)
        return json.loads(done.out) if done.code == 0 else {}

    poll(lambda: stacks_now().get("odd_ranks") == [3], "the rank that sleeps")

    odd, waiting = stacks_now()["groups"]
    assert odd["frames"][0] == {
        "file": "train.py",
        "line": 3,
        "function": "load",
        "source": "def load(): time.sleep(600)",
    }
    assert (odd["nodes"], odd["problem"]) == ([1], "")
    assert (waiting["ranks"], waiting["does"]) == ([0, 1, 2], "waiting for other ranks")
    page = tmp_path / "profile.html"
    done = cloud.run("profile", job, "--rank", "3", "--seconds", "1", "-o", str(page))
    assert done.code == 0, done
    assert "load() at train.py:3: 100.0 %" in page.read_text()
    assert cloud.run("cancel", "--now", job).code == 0
    refused = cloud.run("stacks", job)
    assert (refused.code, refused.err.partition("\n")[0]) == (
        2,
        f"error: reading the stacks of {job}: it is CANCELLED",
    )


def test_a_command_runs_in_a_container_as_a_rank_would(cloud):
    cloud.script(SLEEP)
    cloud.environ["TOKEN"] = "s3cr3t"
    options = ("-e", "TEXT= a\nb ", "--secret", "TOKEN")
    job = cloud.detach("--nodes", "2", "--procs-per-node", "2", *options)
    poll(lambda: cloud.run("logs", job).out.count(b"ready") == 4, "four ranks")
    program = 'printf "%s|" "$TEXT" "$TOKEN" $VC_TASK_INDEX $OMPI_COMM_WORLD_RANK $(pwd); exit 7'

    done = cloud.run("exec", "--rank", "3", job, "sh", "-c", program)

    assert done.code == 7, done
    assert done.out == b" a\nb |s3cr3t|1|3|/home/ma-user/modelarts/user-job-dir/code|"
    assert cloud.run("exec", "--node", "1", job, "nothing").code == 127
    assert cloud.run("cancel", "--now", job).code == 0


def test_logs_keep_every_byte(cloud):
    """A line of 1 MB, bytes that are not UTF-8 and an unfinished last line arrive complete."""
    cloud.script("""\
        import sys
        out = sys.stdout.buffer
        out.write(b"x" * 1_000_000 + b"\\n" + b"\\xff\\xfe\\x80\\n")
        out.write(b"\\xc3\\xa9" * 20_000 + b"\\n")
        out.write(b"y" * 16_384 + b"\\n" + b"\\n\\n" + b"z" * 32_768 + b"\\n" + b"end")
        """)
    exact = b"x" * 1_000_000 + b"\n\xff\xfe\x80\n" + b"\xc3\xa9" * 20_000 + b"\n"
    exact += b"y" * 16_384 + b"\n\n\n" + b"z" * 32_768 + b"\nend"

    job = cloud.detach()
    live = cloud.run("logs", job, "-f", "--rank", "0", "--raw").out
    assert cloud.run("wait", job).code == 0
    kept = cloud.run("logs", job, "--rank", "0", "--raw").out

    assert live == exact
    assert kept == exact


def test_many_lines_arrive_once_and_in_order(cloud):
    cloud.script("for i in range(20_000): print(i)")

    done = cloud.submit("--nodes", "2")

    assert done.code == 0, done
    for rank in (b"0", b"1"):
        mark = b"[" + rank + b"] "
        lines = [line[len(mark) :] for line in done.out.splitlines() if line.startswith(mark)]
        assert lines == [b"%d" % i for i in range(20_000)]


def test_a_failing_script_sets_the_exit_code_and_is_named(cloud):
    cloud.script("""\
        import os, sys
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            sys.exit(7)
        import time; time.sleep(600)
        """)

    done = cloud.submit("--nodes", "2")

    assert done.code == 7, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "user")
    assert (status["failure"]["node"], status["failure"]["rank"]) == (1, 1)


def test_a_detached_job_is_seen_from_any_shell(cloud):
    cloud.script("import time; print('a', flush=True); time.sleep(8); print('b')")

    job = cloud.detach("--nodes", "2")
    assert cloud.status(job)["state"] == "RUNNING"
    followed = cloud.run("logs", job, "-f").out
    assert sorted(followed.split()) == sorted(b"[0] a [1] a [0] b [1] b".split())
    assert cloud.run("wait", job).code == 0

    assert cloud.containers(job) == []
    assert cloud.status(job)["state"] == "SUCCEEDED"
    assert sorted(cloud.run("logs", job).out.split()) == sorted(followed.split())
    assert set(cloud.run("logs", job, "--node", "1").out.splitlines()) == {b"[1] a", b"[1] b"}


def test_cancel_gives_every_rank_its_grace_period(cloud):
    cloud.script(SLEEP)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"ready 0", b"ready 1")

    assert cloud.run("cancel", job).code == 0

    assert cloud.status(job)["state"] == "CANCELLED"
    assert cloud.run("logs", job).out.count(b"saved") == 2


def test_an_urgent_cancel_kills_the_containers(cloud):
    cloud.script(SLEEP.replace("sys.exit(0)", "pass"))
    job = cloud.detach("--grace-s", "600")
    cloud.await_log(job, b"ready")

    assert cloud.run("cancel", "--now", job).code == 0

    assert cloud.status(job)["state"] == "CANCELLED"
    assert b"saved" not in cloud.run("logs", job).out


def test_a_node_over_its_memory_limit_is_reported_as_such(cloud):
    cloud.script("""\
        import os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            block = b"x" * (400 << 20)
        time.sleep(600)
        """)
    Path(cloud.source, "cloudjob.yaml").write_text("docker: {memory_gib: 0.2}\n")

    done = cloud.submit("--nodes", "2")

    assert done.code == 137, done
    message = cloud.status(done.job)["failure"]["message"]
    assert re.search(r"out of memory.*\bnode 1\b", message), message
    assert re.findall(r"limit \S+ \S+", message) == ["limit 205 MiB;"], message


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_node_ends_the_job(cloud, node):
    cloud.script(SLEEP)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"ready 0", b"ready 1")

    cloud.engine.kill(cloud.containers(job)[node]["Id"], "SIGKILL")
    done = cloud.run("wait", job)

    assert done.code == 137, done
    status = cloud.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform")
    assert status["failure"]["node"] == node
    assert f"node {node} (ma-job-{job}-worker-{node}" in status["failure"]["message"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_container_that_is_stopped_fails_the_job_and_is_named(cloud, node):
    """After `docker stop` of one node, the job fails within its grace period, not as cancelled."""
    cloud.script(SLEEP)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"ready 0", b"ready 1")

    cloud.engine.kill(cloud.containers(job)[node]["Id"], "SIGTERM")
    done = cloud.run("wait", job)

    assert done.code == 143, done
    assert cloud.run("logs", job).out.count(b"saved") == 2
    status = cloud.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == node, status
    assert "stopped from outside with SIGTERM" in status["failure"]["message"], status


@pytest.mark.parametrize(
    ("calls", "node", "code"),
    [
        (("restart",), 0, 143),
        (("restart",), 1, 143),
        (("kill", "start"), 0, 137),
        (("kill", "start"), 1, 137),
    ],
)
def test_a_node_that_is_started_again_fails_the_job_and_is_named(cloud, calls, node, code):
    """The node of a job runs once; its second run neither ends well nor blames another node."""
    cloud.script(SLEEP)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"ready 0", b"ready 1")
    container = cloud.containers(job)[node]["Id"]
    for call in calls:
        getattr(cloud.engine, call)(container)

    assert cloud.run("wait", job).code == code
    status = cloud.status(job)
    assert (status["state"], status["cause"], status["exit_code"]) == ("FAILED", "platform", code)
    assert status["failure"]["node"] == node


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_job_whose_containers_are_all_removed_has_failed(cloud, is_attached):
    cloud.script(SLEEP)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"ready 0", b"ready 1")
    attached = cloud.start("attach", job) if is_attached else None
    if attached is not None:
        assert attached.stdout.readline()
    for item in cloud.containers(job):
        cloud.engine.remove_container(item["Id"], force=True)

    if attached is not None:
        _, err = attached.communicate(timeout=LIMIT_S)
        assert attached.returncode == 137, err
    assert cloud.run("wait", job).code == 137
    status = cloud.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform")
    assert status["failure"]["message"] == "the containers of all nodes were removed"
    assert cloud.networks() == []
    assert cloud.run("logs", job).code == 0


def test_ctrl_c_cancels_the_job(cloud):
    """An interrupted attached submit cancels its job and leaves nothing in the engine."""
    cloud.script(SLEEP)
    submit = cloud.start("submit", "--backend", "docker", "--nodes", "2", "train.py")
    assert submit.stdout is not None
    for line in submit.stdout:
        if line == b"[1] ready 1\n":
            break

    submit.send_signal(signal.SIGINT)
    _, err = submit.communicate(timeout=LIMIT_S)

    assert b"CANCELLED" in err


def test_a_killed_submit_leaves_a_running_job(cloud):
    """The job continues without its submitter; a later command sees its end and cleans up."""
    cloud.script("import time; print('a', flush=True); time.sleep(3); print('b')")
    submit = cloud.start("submit", "--backend", "docker", "train.py")
    assert submit.stdout is not None
    assert submit.stdout.readline() == b"[0] a\n"

    submit.kill()
    submit.communicate()

    (listed,) = json.loads(cloud.run("list", "--json").out)
    assert cloud.run("wait", listed["job"]).code == 0
    assert b"[0] b" in cloud.run("logs", listed["job"]).out


def test_an_output_folder_without_write_permission_is_refused(cloud, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 1000:
        pytest.skip("uid 1000 may write to its own folder")
    cloud.script("print(1)")

    done = cloud.submit("--output", f"OUT={folder.as_uri()}")

    assert done.code == 5, done
    assert "chown 1000:100" in done.err


def test_file_uris_work_for_inputs_and_outputs(cloud, tmp_path):
    (tmp_path / "data.txt").write_text("42")
    (tmp_path / "data.txt").chmod(0o644)
    cloud.script("""\
        import os
        text = open(os.environ["DATA"]).read()
        open(os.environ["OUT"] + "/result", "w").write(text)
        """)

    out = tmp_path / "out"
    done = cloud.submit(
        *("--input", f"DATA={(tmp_path / 'data.txt').as_uri()}", "--output", f"OUT={out.as_uri()}")
    )

    assert done.code == 0, done
    assert (out / "result").read_text() == "42"


@pytest.mark.parametrize("cloud", ["base_image"], indirect=True)
def test_a_job_is_followed_from_another_state_folder_and_cancelled_from_its_own(cloud, tmp_path):
    """Only the submitter's state folder asks the engine; others read the store."""
    store = (tmp_path / "store").as_uri()
    cloud.script(SLEEP)
    job = cloud.detach("--store", store)
    cloud.environ["CLOUDJOB_HOME"] = str(tmp_path / "laptop")
    followed = cloud.start("attach", f"{store}/{job}")
    assert followed.stderr is not None
    assert (
        b"it was not started on this machine with this state folder" in followed.stderr.readline()
    )
    assert cloud.run("cancel", job).code == 5
    cloud.environ["CLOUDJOB_HOME"] = str(cloud.home)
    cancelled = cloud.run("cancel", job)
    rest, _ = followed.communicate(timeout=LIMIT_S)

    assert cancelled.code == 0, cancelled
    assert b"[0] saved\n" in rest
    assert cloud.status(job)["state"] == "CANCELLED"
    assert b"[0] saved\n" in cloud.run("logs", job).out
