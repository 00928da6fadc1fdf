"""Successful jobs: every rank runs in the right folder with the right arguments and variables."""

from __future__ import annotations

import json

import pytest

ALLREDUCE = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank + 1)
write_result(f"rank-{rank}", f"{comm.rank} {comm.size} {node} {total}")
print("total", total)
"""
REPORT = """
import json, socket
def address(name):
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        return f"no address: {error}"
hosts = os.environ["VC_WORKER_HOSTS"].split(",")
write_result(f"rank-{rank}", json.dumps({
    "cwd": os.getcwd(), "host": socket.gethostname(), "env": dict(os.environ), "node": node,
    "files": sorted(os.listdir(".")), "addresses": [address(host) for host in hosts],
    "short": [address(host.split(".")[0]) for host in hosts],
    "home_is_folder": os.path.isdir(os.environ["HOME"]),
    "tmp": "%d-%d" % os.stat(os.environ["TMPDIR"])[1:3],
}))
"""


@pytest.mark.every_mpi
@pytest.mark.parametrize(("nodes", "procs"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_allreduce_has_the_right_result_on_every_rank(cloud, nodes, procs):
    script = cloud.script(ALLREDUCE)

    done = cloud.submit("--nodes", str(nodes), "--procs-per-node", str(procs), script)

    assert done.code == 0, done
    size = nodes * procs
    total = size * (size + 1) // 2
    expected = {
        f"rank-{rank}": f"{rank} {size} {rank // procs} {total}".encode() for rank in range(size)
    }
    assert cloud.results_written() == expected
    assert sorted(done.lines) == sorted(b"[%d] total %d" % (rank, total) for rank in range(size))
    status = cloud.status(done.job)
    assert (status["state"], status["exit_code"], status["cause"]) == ("SUCCEEDED", 0, None)
    assert status["failure"] is None
    assert {phase["name"] for phase in status["phases"]} >= {"stage", "run"}


@pytest.mark.every_mpi
def test_a_job_runs_on_eight_nodes(cloud):
    script = cloud.script('write_result(f"rank-{rank}", node)')

    done = cloud.submit("--nodes", "8", script)

    assert done.code == 0, done
    assert cloud.results_written() == {f"rank-{rank}": b"%d" % rank for rank in range(8)}


def test_each_node_has_its_own_folders_name_and_address(cloud):
    cloud.write("data/words.txt", "hello")
    script = cloud.script(REPORT)

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 0, done
    ranks = [json.loads(cloud.results_written()[f"rank-{rank}"]) for rank in range(4)]
    assert [report["node"] for report in ranks] == [0, 0, 1, 1]
    head_rank, worker_rank = ranks[0], ranks[2]
    temporary = [report["tmp"] for report in ranks]
    assert temporary[0] == temporary[1] != temporary[2] == temporary[3]
    for name in (
        "HOME",
        "HOSTNAME",
        "MA_HOME",
        "MA_JOB_DIR",
        "MA_LOG_DIR",
        "MA_MOUNT_PATH",
        "MA_CURRENT_IP",
        "MA_CURRENT_HOST_IP",
        "MA_CURRENT_INSTANCE_NAME",
        "VC_TASK_INDEX",
        "VK_TASK_INDEX",
    ):
        values = [report["env"][name] for report in ranks]
        assert values[0] == values[1] != values[2] == values[3], (name, values)
    for name in (
        "MA_NUM_HOSTS",
        "MA_NUM_GPUS",
        "MA_VJ_NAME",
        "MA_TASK_NAME",
        "VC_WORKER_NUM",
        "VC_WORKER_HOSTS",
        "PATH",
    ):
        assert len({report["env"][name] for report in ranks}) == 1, name
    assert head_rank["env"]["MA_NUM_HOSTS"] == head_rank["env"]["VC_WORKER_NUM"] == "2"
    hosts = head_rank["env"]["VC_WORKER_HOSTS"].split(",")
    job = head_rank["env"]["MA_VJ_NAME"]
    assert hosts == [f"{job}-worker-{index}.{job}" for index in range(2)]
    assert worker_rank["env"]["MA_CURRENT_INSTANCE_NAME"] == hosts[1].partition(".")[0]
    for report in ranks:
        assert report["cwd"] == report["env"]["WORKSPACE"] == report["env"]["PWD"]
        assert report["cwd"].startswith(report["env"]["HOME"] + "/")
        assert report["files"] == ["data", "job.py"]
        assert report["home_is_folder"]
    if head_rank["host"] == worker_rank["host"]:
        return  # This host allows no namespaces, so the nodes share its name.
    assert [report["host"] for report in ranks] == [
        hosts[report["node"]].partition(".")[0] for report in ranks
    ]
    for report in ranks:
        assert report["addresses"] == report["short"]
        assert len(set(report["addresses"])) == 2
        assert report["addresses"][report["node"]] == report["env"]["MA_CURRENT_IP"]


UGLY_ARGS = [
    b"plain",
    b"a b",
    b"'",
    b'"',
    b'it\'s "x"',
    b":",
    b"::",
    b"a:b",
    b"--",
    b"-np",
    b"-x",
    b"--nodes",
    b"9",
    b"",
    b"\xff\xfe\x80",
    b"line\nline",
    b"%3A",
    b"%25",
    b"%",
    b"$HOME",
    b"$(id)",
    b"`id`",
    b"*",
    b"~",
    b"\\",
    b";",
    b"&",
    b"|",
    b"#",
    b"=",
    b"-e",
    b"A=B",
    b"--json",
    b"--help",
    "训练 🚀".encode(),
    b"\t",
    b" ",
    bytes(range(1, 256)),
    b"y" * 100_000,
]


@pytest.mark.every_mpi
@pytest.mark.parametrize("nodes", [1, 2])
def test_arguments_arrive_byte_for_byte(cloud, nodes):
    script = cloud.script(
        'write_result(f"rank-{rank}", b"\\0".join(os.fsencode(a) for a in sys.argv))'
    )

    done = cloud.submit("--nodes", str(nodes), script, *UGLY_ARGS)

    assert done.code == 0, done
    for rank in range(nodes):
        assert cloud.results_written()[f"rank-{rank}"].split(b"\0") == [b"job.py", *UGLY_ARGS]


def test_arguments_without_a_colon_arrive_byte_for_byte(cloud):
    args = [arg for arg in UGLY_ARGS if arg != b":"]
    script = cloud.script(
        'write_result(f"rank-{rank}", b"\\0".join(os.fsencode(a) for a in sys.argv))'
    )

    done = cloud.submit("--nodes", "2", script, *args)

    assert done.code == 0, done
    for rank in range(2):
        assert cloud.results_written()[f"rank-{rank}"].split(b"\0") == [b"job.py", *args]


def test_a_script_runs_as_under_plain_python(cloud):
    """It is ``__main__``, imports from its folder, and works with pickle and multiprocessing."""
    cloud.write("pkg/helper.py", "VALUE = 42\n")
    script = cloud.script(
        """
        import helper, json, multiprocessing, pickle
        class Thing: pass
        def double(x): return 2 * x
        if __name__ == "__main__":
            assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                doubled = pool.map(double, [1, 2, 3])
            write_result(f"rank-{rank}", json.dumps([
                helper.VALUE, os.path.relpath(__file__), sys.argv, doubled,
                "jobentry" in sys.modules,
            ]))
        """,
        "pkg/job.py",
    )

    done = cloud.submit(script, "x")

    assert done.code == 0, done
    assert json.loads(cloud.results_written()["rank-0"]) == [
        42,
        "pkg/job.py",
        ["pkg/job.py", "x"],
        [2, 4, 6],
        False,
    ]


@pytest.mark.every_mpi
def test_shell_scripts_and_programs_run(cloud):
    """A .sh file runs without execute permission, any other program only with it."""
    cloud.write("run.sh", 'echo "sh $1"\nexit 3\n')
    cloud.write("tool", '#!/bin/sh\necho "tool $1"\nexit 4\n').chmod(0o755)
    cloud.write("flat", "#!/bin/sh\n").chmod(0o644)

    first, second, third = (cloud.submit(name, "a b") for name in ("run.sh", "tool", "flat"))

    assert (first.code, first.out) == (3, b"[0] sh a b\n"), first
    assert (second.code, second.out) == (4, b"[0] tool a b\n"), second
    assert third.code == 126, third
    assert cloud.status(third.job)["cause"] == "entry"


@pytest.mark.every_mpi
def test_two_jobs_of_one_user_do_not_interfere(cloud):
    script = cloud.script(
        'write_result(f"{sys.argv[1]}-{rank}", os.environ["HOME"])\n'
        'for name in ("a", "b"):\n'
        '    for other in range(4): await_file(f"{name}-{other}")\n'
        "sys.exit(int(sys.argv[2]))\n"
    )

    one = cloud.start_submit("--nodes", "2", "--procs-per-node", "2", script, "a", "0")
    two = cloud.start_submit("--nodes", "2", "--procs-per-node", "2", script, "b", "5")

    assert (one.end().code, two.end().code) == (0, 5), (one.end(), two.end())
    assert len(set(cloud.results_written().values())) == 4


@pytest.mark.surroundings
def test_a_failed_job_is_retried(cloud):
    script = cloud.script(
        """
        tries = len([name for name in os.listdir(results) if name.startswith(f"try-{rank}-")])
        write_result(f"try-{rank}-{tries}")
        print("try", tries)
        for other in range(size): await_file(f"try-{other}-{tries}")
        sys.exit(0 if tries == 2 else 9)
        """
    )

    done = cloud.submit("--nodes", "2", "--retries", "2", script)

    assert done.code == 0, done
    assert cloud.status(done.job)["state"] == "SUCCEEDED"
    assert [line for line in done.lines if line.startswith(b"[0]")] == [
        b"[0] try 0",
        b"[0] try 1",
        b"[0] try 2",
    ], done


def test_retries_that_are_not_enough_keep_the_last_code(cloud):
    script = cloud.script(
        'tries = len(os.listdir(results))\nwrite_result(f"try-{tries}")\nsys.exit(10 + tries)'
    )

    done = cloud.submit("--retries", "1", script)

    assert done.code == 11, done
    assert cloud.status(done.job)["failure"]["exit_code"] == 11


@pytest.mark.surroundings
def test_inputs_are_fetched_before_and_outputs_uploaded_after_the_run(cloud):
    data = cloud.folder / "data" / "part"
    data.mkdir(parents=True)
    (data / "one.bin").write_bytes(bytes(range(256)))
    script = cloud.script(
        """
        data = open(os.path.join(os.environ["data"], "part", "one.bin"), "rb").read()
        os.makedirs(os.environ["model"] + "/deep", exist_ok=True)
        with open(os.environ["model"] + f"/deep/rank {rank}.bin", "wb") as file:
            file.write(data * (rank + 1))
        """
    )

    done = cloud.submit(
        "--nodes", "2", "--input", f"data=file://{cloud.folder}/data", "--output", "model=", script
    )

    assert done.code == 0, done
    assert cloud.cli("outputs", done.job).lines == [
        b"model/deep/rank 0.bin",
        b"model/deep/rank 1.bin",
    ]
    target = cloud.folder / "fetched"
    assert cloud.cli("outputs", "--to", target, done.job).code == 0
    for rank in range(2):
        fetched = (target / "model" / "deep" / f"rank {rank}.bin").read_bytes()
        assert fetched == bytes(range(256)) * (rank + 1)


@pytest.mark.surroundings
def test_an_input_may_be_a_single_file(cloud):
    (cloud.folder / "one.bin").write_bytes(bytes(range(256)))
    script = cloud.script('write_result(f"rank-{rank}", open(os.environ["data"], "rb").read())')

    done = cloud.submit("--nodes", "2", "--input", f"data=file://{cloud.folder}/one.bin", script)

    assert done.code == 0, done
    assert set(cloud.results_written().values()) == {bytes(range(256))}


@pytest.mark.surroundings
def test_outputs_of_a_failed_job_are_kept(cloud):
    """A checkpoint that was written before the failure must not be lost."""
    script = cloud.script(
        'open(os.environ["model"] + f"/{rank}", "w").close()\nwrite_result(f"up-{rank}")\n'
        'for other in range(size): await_file(f"up-{other}")\n'
        "sys.exit(7 if rank else 0)"
    )

    done = cloud.submit("--nodes", "2", "--output", "model=", script)

    assert done.code == 7, done
    listed = cloud.cli("outputs", done.job).lines
    # A file that was written within the last two seconds is listed as possibly incomplete.
    assert [line.partition(b"  ")[0] for line in listed] == [b"model/0", b"model/1"]


def test_outputs_that_cannot_be_uploaded_are_reported_before_the_start(cloud):
    script = cloud.script('write_result(f"ran-{rank}")')

    done = cloud.submit("--nodes", "2", "--output", "model=file:///proc/nowhere", script)

    assert done.code == 125, done
    assert "preparing the output model" in cloud.status(done.job)["failure"]["message"]
    assert cloud.results_written() == {}


@pytest.mark.parametrize("writer", [0, 1], ids=["head", "worker"])
def test_outputs_that_cannot_be_uploaded_fail_the_job(cloud, tmp_path, writer):
    (tmp_path / "kept").mkdir()
    script = cloud.script(
        f"""
        if rank == {writer}:
            os.mkdir(os.environ["model"] + "/deep")
            open(os.environ["model"] + "/deep/weights", "w").close()
            open("{tmp_path}/kept/deep", "w").close()
        """
    )

    done = cloud.submit("--nodes", "2", "--output", f"model=file://{tmp_path}/kept", script)

    assert done.code == 125, done
    failure = cloud.status(done.job)["failure"]
    assert failure["node"] == writer
    assert "uploading the output model" in failure["message"]
    assert "deep/weights" in failure["message"]


def test_a_missing_input_ends_the_job_with_125(cloud, tmp_path):
    script = cloud.script("")

    done = cloud.submit("--nodes", "2", "--input", f"data=file://{tmp_path}/absent", script)

    assert done.code in (4, 125), done
    assert b"absent" in done.err, done
    assert b"Traceback" not in done.err, done


def test_a_job_runs_from_a_job_file_alone(cloud):
    cloud.script('write_result(f"rank-{rank}", " ".join(sys.argv[1:]) + os.environ["COLOUR"])')
    cloud.write(
        "job.yaml",
        f"script: job.py\nargs: [a, b]\nnodes: 2\nenv:\n  COLOUR: ' blue'\n"
        f"  RESULTS: {cloud.results}\n",
    )

    done = cloud.cli("submit", "--config", "job.yaml")

    assert done.code == 0, done
    assert cloud.results_written() == {"rank-0": b"a b blue", "rank-1": b"a b blue"}


@pytest.mark.surroundings
def test_a_job_changes_nothing_in_the_source_folder(cloud):
    script = cloud.script("open('made-by-the-job', 'w').close()")
    before = sorted(path.name for path in cloud.source.iterdir())

    assert cloud.submit("--nodes", "2", script).code == 0

    assert sorted(path.name for path in cloud.source.iterdir()) == before


def test_a_job_waits_for_background_processes_of_its_shell_script(cloud, poll):
    wait = 'while [ ! -e "$RESULTS/go" ]; do sleep 0.1; done'
    cloud.write("run.sh", f"({wait}; echo trained; exit 4) &\nexit 0\n")
    run = cloud.start_submit("run.sh")
    poll(
        lambda: b"its script has ended, but it started processes" in run.out + run.err, "the report"
    )
    (cloud.results / "go").touch()
    done = run.end()

    assert done.code == 4, done
    assert b"[0] trained" in done.out


def test_a_shell_script_that_starts_ranks_is_refused(cloud):
    cloud.write("run.sh", "mpirun -n 2 python train.py &\n")
    done = cloud.submit("run.sh")

    assert done.code == 2, done
    assert b"error: script: run.sh line 1 starts mpirun itself" in done.err
    assert b"hint: submit what it starts: cloudjob submit --launcher mpirun" in done.err
    assert cloud.jobs() == []
