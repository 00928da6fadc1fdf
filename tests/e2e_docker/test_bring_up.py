"""Nodes that start late, twice, in an incompatible state, or not at all."""

from __future__ import annotations

import io
import re
import tarfile
import time
from datetime import datetime

import pytest

pytestmark = pytest.mark.docker

# The entry point of an image in which FAULT=WHAT:N gives node N the fault WHAT; N may be "all".
BOOT = """\
#!/bin/sh
if [ "${FAULT#*:}" = "$VC_TASK_INDEX" ] || [ "${FAULT#*:}" = all ]; then
    case ${FAULT%:*} in
        late) until [ -e /cache/go ]; do sleep 0.1; done ;;
        never) exec sleep 3600 ;;
        broken) echo "a fault of this node"; exit 9 ;;
        key)
            rm -f /run/cloudjob/ssh-key
            ssh-keygen -q -t ed25519 -N '' -f /run/cloudjob/ssh-key
            ;;
        hung) exec python3 /opt/test/hung.py ;;
        mpi) PATH=/opt/test:$PATH ;;
        again)
            /opt/cloudjob/boot.sh "$@" &
            until [ -e /cache/kill ]; do sleep 0.1; done
            kill -9 $!
            # As on a platform that runs the command again, and delivers no files.
            rm -f /run/cloudjob/has-run
            ;;
    esac
fi
exec /opt/cloudjob/boot.sh "$@"
"""
ACCEPTS_ONLY = """\
import os, socket
server = socket.create_server(("", int(os.environ["SSHD_PORT"])))
taken = []
while True:
    taken.append(server.accept())
"""
MPIRUN = "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.5'\n"
# A rank that finds the mark of an earlier run on its node prints "again" and exits.
RUNS_TWICE = """\
import os, pathlib, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
mark = pathlib.Path("/cache/seen")
if mark.exists():
    print("again", rank, flush=True)
else:
    mark.touch()
    print("first", rank, flush=True)
    time.sleep(600)
"""
# Long enough for healthy nodes to start on a busy host: 12 s were not.
SHORT_START_TIMEOUT = ("--start-timeout-min", "0.6")


@pytest.fixture(scope="module")
def faulty(derive):
    """An image whose nodes can be given faults."""
    return derive(
        "faulty",
        "COPY boot.sh hung.py mpirun /opt/test/\n"
        'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/test/boot.sh"]',
        **{"boot.sh": BOOT, "hung.py": ACCEPTS_ONLY, "mpirun": MPIRUN},
    )


def touch(cloud, container, name):
    """Create an empty file in a container's /cache."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        members.addfile(tarfile.TarInfo(name))
    cloud.engine.put_archive(container, "/cache", data.getvalue())


def row(done, node):
    """Return a node's row of the table that the head printed."""
    match = re.search(rf"^\[node \d+\] jobentry:   {node}  +ma-job-.*$", done.err, re.MULTILINE)
    assert match, done
    return re.sub(r" {2,}", "|", match[0].partition("jobentry:   ")[2])


def refused(cloud, done, *, node, message, code=125, most=1):
    """Assert that the entry failed the job and named the node and the reason.

    The message may occur up to ``most`` times, once per node with the same fault.
    """
    assert done.code == code, done
    assert "Traceback" not in done.err, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "entry"), status
    failure = status["failure"]
    assert (failure["node"], failure["exit_code"]) == (node, code), failure
    assert failure["host"].startswith(f"ma-job-{done.job}-worker-{node}"), failure
    assert message in failure["message"], failure
    assert 1 <= done.err.count(f"jobentry: {failure['message']}\n") <= most, done


def test_the_head_waits_for_a_late_worker(cloud, faulty, until):
    cloud.script("import os; print('rank', os.environ['OMPI_COMM_WORLD_RANK'])")
    job = cloud.detach("--nodes", "2", "--image", faulty, "-e", "FAULT=late:1")
    head, worker = (item["Id"] for item in cloud.containers(job))
    cloud.engine.kill(worker, "SIGKILL")
    touch(cloud, worker, "go")
    since = time.monotonic()
    until(lambda: time.monotonic() - since > 4, "end of the delay")
    assert cloud.engine.inspect_container(head)["State"]["Running"]

    cloud.engine.start(worker)
    done = cloud.run("wait", job)

    assert done.code == 0, done
    assert sorted(cloud.run("logs", job).out.split(b"\n")) == [b"", b"[0] rank 0", b"[1] rank 1"]


def test_a_missing_worker_is_reported_in_a_table(cloud, faulty):
    cloud.script("print('never')")

    # Less than 30 s, when the head shows the table for the first time while it waits.
    limit = ("--start-timeout-min", "0.45")
    done = cloud.submit("--nodes", "3", *limit, "--image", faulty, "-e", "FAULT=never:2")

    refused(
        cloud, done, node=2, message="waiting for the workers: after 27 s 1 of 2 have not come up"
    )
    assert re.match(r"0\|ma-.*\|-\|-\|-\|same\|4\.1\|3\.\d+\.\d+\|-\|the head", row(done, 0))
    assert re.match(r"1\|.*\|open\|yes\|same\|4\.1\|3\.\d+\.\d+\|[+-]0\.\d s\|ready", row(done, 1))
    assert re.match(r"2\|.*\|[\d.]+\|closed\|-\|-\|-\|-\|-\|port 38888: .* refused", row(done, 2))
    assert (
        "hint: node 2: a machine is up there, but no entry listens: is the address right,"
        " and what does its log say?" in done.err
    )
    assert done.err.count("jobentry: the nodes after") == 1


def test_a_worker_that_ends_before_it_connects_ends_the_job(cloud, faulty):
    cloud.script("print('never')")

    done = cloud.submit("--nodes", "2", "--image", faulty, "-e", "FAULT=broken:1")

    assert done.code == 9, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "entry")
    assert status["failure"]["node"] == 1
    assert ") ended with exit code 9 before it joined the job" in status["failure"]["message"]
    assert status["failure"]["last_lines"] == ["a fault of this node"]


def test_a_node_with_another_key_is_refused(cloud, faulty):
    cloud.script("print('never')")

    done = cloud.submit(
        "--nodes", "2", *SHORT_START_TIMEOUT, "--image", faulty, "-e", "FAULT=key:1"
    )

    refused(cloud, done, node=1, message="its key differs from the head")
    assert re.match(r"1\|.*\|open\|no\|-\|-\|-\|-\|its key differs", row(done, 1))
    assert "hint: node 1: every node of a job needs the same key" in done.err


def test_a_node_that_accepts_connections_but_never_answers_is_reported(cloud, faulty):
    cloud.script("print('never')")

    done = cloud.submit(
        "--nodes", "2", *SHORT_START_TIMEOUT, "--image", faulty, "-e", "FAULT=hung:1"
    )

    refused(cloud, done, node=1, message="its entry accepts the connection and then sends nothing")
    assert "hint: node 1: it hangs" in done.err


def test_nodes_with_different_open_mpis_are_refused_with_their_versions(cloud, faulty):
    """Open MPI 4.1 and 5.0 cannot communicate; without the check, the job would hang."""
    cloud.script("print('never')")

    done = cloud.submit("--nodes", "2", "--image", faulty, "-e", "FAULT=mpi:1")

    refused(cloud, done, node=1, message="another MPI: 5.0, and the head has 4.1")
    assert "hint: node 1: every node needs the same image" in done.err


@pytest.mark.parametrize(
    ("launcher", "name", "code", "message"),
    [
        ("command", "sshd", 125, "looking for sshd: not found in this image"),
        ("mpirun", "mpirun", 127, "looking for mpirun: not found on PATH"),
    ],
)
def test_missing_programs_in_an_image_are_reported_at_once(
    cloud, derive, launcher, name, code, message
):
    cloud.script("print('never')")

    image = derive(f"no-{name}", f"RUN rm $(command -v {name})")
    done = cloud.submit("--nodes", "2", "--launcher", launcher, "--image", image)

    refused(cloud, done, node=0, message=message, code=code, most=2)
    assert "jobentry: hint: " in done.err
    # A worker that waited for a head that never starts would be killed after 30 s.
    assert cloud.killed_nodes(done.job) == []


def times_of(cloud, job: str, node: int) -> list[float]:
    """Return when the entry of a node wrote to its log, in seconds; the engine needs more time."""
    log = (cloud.home / "docker" / job / f"node-{node}.log").read_text()
    return [float(text) for text in re.findall(r'^jobentry# .*"at":([\d.]+)', log, re.MULTILINE)]


def test_an_image_without_python_is_reported_from_its_log(cloud, derive):
    cloud.script("print('never')")

    done = cloud.submit(
        "--nodes",
        "2",
        "--image",
        derive("no-python3", "RUN rm /usr/bin/python3 /usr/bin/python3.*"),
    )

    assert done.code == 127, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform")
    assert status["failure"]["node"] == 0
    assert status["failure"]["last_lines"] == [
        "jobentry: looking for python3: not found in this image",
        "jobentry: hint: install Python 3.8 or later (cloudjob docs images)",
    ]


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", 137), ("SIGTERM", 143)])
def test_containers_that_are_started_again_run_nothing_twice(cloud, base_image, signal, code):
    """As after `docker restart`, which sends SIGTERM first, or a crash of the engine."""
    cloud.script(RUNS_TWICE)
    job = cloud.detach("--nodes", "2")
    cloud.await_log(job, b"first 1", b"first 0")
    ids = [item["Id"] for item in cloud.containers(job)]
    cloud.engine.kill(ids[0], signal)
    # The worker ends by itself.
    for item in ids:
        cloud.engine.wait(item)
    for item in ids:
        cloud.engine.start(item)
    done = cloud.run("wait", job)

    assert done.code == code, done
    status = cloud.status(job)
    assert (status["state"], status["failure"]["node"]) == ("FAILED", 0), status
    assert b"again" not in cloud.run("logs", job).out


def test_the_entry_runs_again_beside_processes_of_its_first_run(cloud, faulty):
    """The sshd, mpirun and ranks of the first run are still alive when the entry starts again."""
    cloud.script(RUNS_TWICE)

    job = cloud.detach("--nodes", "2", "--image", faulty, "-e", "FAULT=again:all")
    cloud.await_log(job, b"first 1", b"first 0")
    for item in cloud.containers(job):
        touch(cloud, item["Id"], "kill")
    done = cloud.run("wait", job)

    assert done.code == 0, done
    assert {b"[0] again 0", b"[1] again 1"} <= set(cloud.run("logs", job).out.split(b"\n"))


def test_orphans_are_reaped_while_the_job_runs(cloud):
    cloud.script("""\
        import os, pathlib, subprocess, time
        for _ in range(20):
            subprocess.run(["sh", "-c", "sh -c 'sleep 0.1' & exit 0"], check=True)
        def zombies():
            found = []
            for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
                try:
                    text = path.read_text().rpartition(")")[2]
                except OSError:
                    continue
                found.append(text.split()[0] == "Z")
            return sum(found)
        time.sleep(0.5)
        end = time.monotonic() + 20
        while zombies() and time.monotonic() < end:
            time.sleep(0.1)
        print("zombies:", zombies())
        """)

    done = cloud.submit("--nodes", "2")

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[0] zombies: 0", b"[1] zombies: 0"]


# -- without ssh ---------------------------------------------------------------------------------

# Every node starts its own ranks.
WITHOUT_SSH = ("--nodes", "2", "--launcher", "python")


@pytest.mark.parametrize(
    ("launcher", "user"), [("python", "sed -i /ma-user/d /etc/passwd"), ("mpirun", "true")]
)
def test_nodes_of_most_launchers_need_no_ssh(cloud, derive, launcher, user):
    """Except for mpirun, they need no user in /etc/passwd either."""
    image = derive(
        f"no-ssh-{launcher}",
        f"RUN rm /usr/sbin/sshd /usr/bin/ssh /usr/bin/ssh-keygen && {user}",
    )
    cloud.script("import os\nprint('hello from', os.environ['VC_TASK_INDEX'])")

    done = cloud.submit("--nodes", "2", "--launcher", launcher, "--image", image)

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[0] hello from 0", b"[1] hello from 1"]


def test_the_loss_of_a_node_ends_the_job(cloud):
    cloud.script("import time\nprint('up', flush=True)\ntime.sleep(600)")
    job = cloud.detach(*WITHOUT_SSH)
    cloud.await_log(job, b"[0] up", b"[1] up")

    cloud.engine.kill(cloud.containers(job)[1]["Id"])
    done = cloud.run("wait", job)

    assert done.code not in (0, -9), done
    status = cloud.status(job)
    assert (status["state"], status["failure"]["node"]) == ("FAILED", 1), status
    assert status["cause"] == "platform"


WAITS_FOR_GO = """\
import os, pathlib, time
print("up", flush=True)
end = time.monotonic() + 300
while not os.path.exists("/cache/go") and time.monotonic() < end:
    time.sleep(0.05)
print("went on", flush=True)
"""


@pytest.mark.parametrize(("way", "launcher"), [("pause", "mpirun"), ("disconnect", "python")])
def test_a_job_survives_a_silent_node(cloud, until, way, launcher):
    """The head reports the silent node and waits; the job then continues without lost output."""
    cloud.script(WAITS_FOR_GO)
    job = cloud.detach("--nodes", "2", "--launcher", launcher)
    cloud.await_log(job, b"[0] up", b"[1] up")
    head, worker = (item["Id"] for item in cloud.containers(job))
    (network,) = (item["Name"] for item in cloud.networks())
    endpoint = cloud.engine.inspect_container(worker)["NetworkSettings"]["Networks"][network]
    if way == "pause":
        cloud.engine.pause(worker)
    else:
        cloud.engine.disconnect_container_from_network(worker, network)
    # The worker's rank ends while the worker is disconnected.
    if way == "disconnect":
        touch(cloud, worker, "go")
    until(
        lambda: "silent for 15 s: node 1 (" in cloud.run("logs", job).err,
        "a message about the silent node",
    )
    if way == "pause":
        cloud.engine.unpause(worker)
        touch(cloud, worker, "go")
    else:
        cloud.engine.connect_container_to_network(worker, network, aliases=endpoint["Aliases"])
    until(lambda: "no longer silent: node 1 (" in cloud.run("logs", job).err, "its return")
    touch(cloud, head, "go")
    done = cloud.run("wait", job)

    assert done.code == 0, done
    lines = cloud.run("logs", job).out.splitlines()
    assert sorted(lines) == [b"[0] up", b"[0] went on", b"[1] up", b"[1] went on"]


# Prints the nodes that logged in to this node, according to the log of its sshd.
REPORT_LOGINS = """\
import os, pathlib, re, socket
node = os.environ["VC_TASK_INDEX"]
log = pathlib.Path(os.environ["CLOUDJOB_NODE_DIR"], "sshd.log").read_text()
hosts = os.environ["VC_WORKER_HOSTS"].split(",")
addresses = {socket.gethostbyname(host): str(index) for index, host in enumerate(hosts)}
found = {addresses[ip] for ip in re.findall(r"Accepted publickey .* from (\\S+) port", log)}
print(node, "heard", *sorted(found))
"""
# The tree of daemons has one child per node, so it is a chain.
TREE = "-mca plm_rsh_no_tree_spawn false -mca routed radix -mca routed_radix 1"


def test_daemons_can_be_started_as_a_tree(cloud):
    """The ssh of each node uses the port and the key of the job to reach the next node."""
    cloud.script(REPORT_LOGINS)

    done = cloud.submit("--nodes", "3", "-e", f"OPENMPI_MCA_ARGS={TREE}")

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[0] 0 heard", b"[1] 1 heard 0", b"[2] 2 heard 1"]


@pytest.mark.parametrize("launcher", ["python", "mpirun"])
def test_a_job_with_a_silent_node_can_be_cancelled(cloud, launcher):
    cloud.script("import time\nprint('up', flush=True)\ntime.sleep(600)")
    job = cloud.detach("--nodes", "2", "--launcher", launcher, "--grace-s", "3")
    cloud.await_log(job, b"[0] up", b"[1] up")
    worker = cloud.containers(job)[1]["Id"]
    (network,) = (item["Name"] for item in cloud.networks())
    cloud.engine.disconnect_container_from_network(worker, network)

    assert cloud.run("cancel", job).code == 0
    done = cloud.run("wait", job)

    status = cloud.status(job)
    begun = (cloud.home / "docker" / job / "cancelled").stat().st_mtime
    # The grace period and 5 s; the rest allows for a busy host. The script would go on for 10 min.
    assert datetime.fromisoformat(status["ended_at"]).timestamp() - begun < 60, (done, status)
    assert max(times_of(cloud, job, node=1)) - begun < 60
    assert status["state"] == "CANCELLED"
