"""Whole jobs of an ordinary user, without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support import folders
from tests.support.users import USER, as_user, python_of_user


@pytest.fixture(scope="session")
def user_python():
    """An interpreter with this project's packages that an ordinary user may run."""
    python, missing = python_of_user()
    if missing:
        pytest.skip(missing)
    return python


@pytest.fixture
def user(cloud, user_python):
    """The command line of an ordinary user."""
    if os.geteuid() != 0:
        yield cloud
        return
    folder = Path(tempfile.mkdtemp(prefix="cj-", dir=folders.ROOT))
    value = type(cloud)(folder, cloud.mpi, user_python, as_user())
    value.chown_to(USER)
    yield value
    remaining = value.kill_remaining()
    shutil.rmtree(folder)
    assert not remaining, remaining


@pytest.mark.every_mpi
def test_a_job_with_an_allreduce_runs_on_two_nodes(user):
    script = user.script(
        """
        from mpi4py import MPI
        total = MPI.COMM_WORLD.allreduce(rank + 1)
        write_result(f"rank-{rank}", f"{total} {os.getuid()} {node}")
        print("done", rank)
        """
    )

    done = user.submit("--nodes", "2", "--procs-per-node", "2", "-e", "UGLY=a b=c\n;", script)

    assert done.code == 0, done
    uid = USER if os.geteuid() == 0 else os.getuid()
    assert user.results_written() == {
        f"rank-{rank}": b"10 %d %d" % (uid, rank // 2) for rank in range(4)
    }
    assert user.status(done.job)["state"] == "SUCCEEDED"


def test_each_node_has_its_host_name_in_a_namespace(user):
    script = user.script(
        """
        import json, socket
        hosts = os.environ["VC_WORKER_HOSTS"].split(",")
        addresses = [socket.gethostbyname(host) for host in hosts]
        write_result(f"rank-{rank}", json.dumps([socket.gethostname(), addresses]))
        """
    )
    if not allows_namespaces(user):
        pytest.skip("this kernel allows an ordinary user no namespaces")

    done = user.submit("--nodes", "2", script)

    assert done.code == 0, done
    reports = [json.loads(user.results_written()[f"rank-{rank}"]) for rank in range(2)]
    assert reports[0][0] != reports[1][0]
    assert reports[0][1] == reports[1][1]
    assert len(set(reports[0][1])) == 2


def allows_namespaces(user):
    command = [*user.prefix, "unshare", "-Urm", "--uts", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_each_node_of_each_job_has_its_own_empty_folders(user):
    if not allows_namespaces(user):
        pytest.skip("this kernel allows an ordinary user no namespaces")
    script = user.script(
        """
        import tempfile
        for folder in ("/tmp", "/cache", "/home/ma-user", "/home/work"):
            open(folder + "/copy_sync.lock0", "x").close()
        code = "/home/ma-user/user-job-dir/code/" + os.path.basename(__file__)
        write_result(f"rank-{rank}", f"{os.path.samefile(code, __file__)} {tempfile.gettempdir()}")
        """
    )

    for _ in range(2):
        done = user.submit("--nodes", "2", script)
        assert done.code == 0, done
        assert set(user.results_written().values()) == {b"True /tmp"}

    folders = (Path("/tmp"), Path("/cache"), Path("/home/ma-user"), Path("/home/work"))
    assert not any((folder / "copy_sync.lock0").exists() for folder in folders)


@pytest.mark.every_mpi
def test_mpi_works_on_nodes_without_namespaces(user):
    user.write("job.yaml", "process: {isolation: none}\n")
    script = user.script(
        """
        from mpi4py import MPI
        write_result(f"rank-{rank}", MPI.COMM_WORLD.allreduce(1))
        """
    )

    done = user.submit("--config", "job.yaml", "--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 0, done
    assert set(user.results_written().values()) == {b"4"}


def test_a_failing_job_reports_code_and_rank_and_leaves_no_process(user):
    script = user.script(
        "write_result(f'up-{rank}')\nfor o in range(size): await_file(f'up-{o}')\n"
        "if rank == 3: sys.exit(7)\ntime.sleep(60)"
    )

    done = user.submit("--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 7, done
    assert user.status(done.job)["failure"]["rank"] == 3


@pytest.mark.every_mpi
def test_a_cancelled_job_saves_on_both_nodes(user):
    script = user.script(
        """
        def on_sigterm(*_):
            time.sleep(1.5)
            write_result(f"saved-{rank}")
            os._exit(0)
        signal.signal(signal.SIGTERM, on_sigterm)
        write_result(f"up-{rank}")
        time.sleep(60)
        """
    )
    job = user.detach("--nodes", "2", script)
    user.await_results("up-0", "up-1")

    assert user.cli("cancel", job).code == 0

    assert len(user.results_written("saved-*")) == 2
    assert user.status(job)["state"] == "CANCELLED"


def test_ranks_end_with_their_killed_worker(user):
    script = user.script("write_result(f'up-{rank}')\ntime.sleep(60)")
    job = user.detach("--nodes", "2", script)
    user.await_results("up-0", "up-1")

    os.kill(user.state(job)["nodes"][1]["process"], 9)

    assert user.cli("wait", job).code != 0
    assert user.status(job)["cause"] == "platform"


def test_an_unreadable_script_is_reported_in_one_line(user):
    script = user.script("")
    (user.source / script).chmod(0)
    if os.geteuid() == 0:
        os.chown(user.source / script, 0, 0)

    done = user.cli("submit", script)

    assert done.code == 3, done
    assert done.err.startswith(b"error: "), done
    assert script.encode() in done.err
    assert b"hint: " in done.err


def test_an_unreadable_source_file_is_reported_in_one_line(user):
    script = user.script("")
    path = user.write("data.bin", "x")
    path.chmod(0)
    if os.geteuid() == 0:
        os.chown(path, 0, 0)

    done = user.cli("submit", script)

    assert done.code == 3, done
    assert b"data.bin" in done.err
    assert b"Traceback" not in done.err


def test_a_read_only_state_folder_is_reported_with_a_hint(user):
    script = user.script("")
    user.home.mkdir(exist_ok=True)
    user.home.chmod(0o555)
    if os.geteuid() == 0:
        os.chown(user.home, USER, USER)

    for arguments in (["submit", script], ["list"]):
        done = user.cli(*arguments)
        assert b"Traceback" not in done.err, done
        if arguments[0] == "submit":
            assert done.code in (1, 4, 5), done
            assert b"hint: " in done.err, done
    user.home.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root adds a file to /etc/ssh")
def test_ssh_reads_the_files_that_the_systems_configuration_includes(user, tmp_path):
    """Root's files belong to nobody in a node's user namespace, and ssh refuses to include them."""
    if not allows_namespaces(user):
        pytest.skip("this kernel allows an ordinary user no namespaces")
    tmp_path.chmod(0o755)
    (tmp_path / "10-site.conf").write_text("Host site-*\n    Port 2222\n")
    (tmp_path / "10-site.conf").chmod(0o644)
    mount = 'mount --bind "$0" /etc/ssh/ssh_config.d && exec "$@"'
    user.prefix = ("unshare", "--mount", "sh", "-c", mount, str(tmp_path), *user.prefix)
    command = 'ssh -G site-1 >"$RESULTS/one" 2>&1; ssh -G other >"$RESULTS/other" 2>&1'

    done = user.submit("--launcher", "command", "sh", "-c", command)

    assert done.code == 0, done
    one, other = (user.results_written()[name].decode() for name in ("one", "other"))
    assert "\nport 2222\n" in one, one
    assert "\nport 22\n" in other, other
