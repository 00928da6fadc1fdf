"""Whole jobs through the modelarts backend, on the emulator with its nodes as processes.

The emulator verifies the requests: it checks signatures, bodies and limits as the service
does. docs/guides/modelarts.md lists what it cannot check.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
ROOT = Path(__file__).parents[2]
SETTINGS = """\
engine: process
poll_s: 0.05
upload_period_s: 0.4
grace_s: 5
log_preview_bytes: 20000
"""


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of an emulator that runs for the whole session."""
    folder = tmp_path_factory.mktemp("emulator")
    settings = folder / "settings.yaml"
    settings.write_text(SETTINGS)
    run(folder, "up", "--settings", str(settings))
    yield folder
    run(folder, "down")


def run(folder: Path, *arguments: str) -> str:
    """Run an emulator command."""
    # No virtual environment on PATH: the Open MPI found there may differ from the one of Python.
    environ = {**os.environ, "CLOUDJOB_HOME": str(folder), "PATH": SYSTEM_PATH}
    done = subprocess.run(
        [sys.executable, "-m", "cloudjob.cli", "emulator", *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def emulated_cloud(cloud: Any, emulator: Path) -> Any:
    """The command line of a user whose only platform is the emulator."""
    (cloud.home / "emulator").mkdir(parents=True)
    shutil.copy2(emulator / "emulator" / "address.json", cloud.home / "emulator")
    run(emulator, "fault", "clear")
    return cloud


@pytest.fixture
def fault(emulator: Path) -> Callable[..., str]:
    """Inject a fault."""
    return lambda *arguments: run(emulator, "fault", *arguments)


def submit(emulated_cloud: Any, *arguments: str, **more: Any) -> Any:
    """Submit to ModelArts and stay attached."""
    return emulated_cloud.submit("--backend", "modelarts", *arguments, limit_s=300, **more)


# -- jobs that succeed ----------------------------------------------------------------------------


def test_a_rank_table_of_the_platform_starts_a_rank_for_each_ascend(emulated_cloud: Any):
    """The platform's table is in /user/config, and complete only once all nodes run."""
    emulated_cloud.write(
        "train.py",
        """\
        import json, os
        with open("/user/config/jobstart_hccl.json") as file:
            given = json.load(file)
        with open(os.environ["RANK_TABLE_FILE"]) as file:
            table = json.load(file)
        instance = given["group_list"][0]["instance_list"][int(os.environ["VC_TASK_INDEX"])]
        servers = [item["server_id"] for item in table["server_list"]]
        assert instance["server_id"] == os.environ["MA_CURRENT_IP"], instance
        assert instance["pod_name"] == os.environ["MA_CURRENT_INSTANCE_NAME"], instance
        print("status", given["status"], "rank", os.environ["RANK_ID"], "of", len(servers))
        """,
    )
    emulated_cloud.write("job.yaml", "mindspore: {device_target: Ascend}\n")
    flavor = ("--nodes", "2", "--flavor", "modelarts.kat1.xlarge", "--launcher", "rank-table")
    done = submit(emulated_cloud, "--config", "job.yaml", *flavor, "train.py")

    assert done.code == 0, done
    for rank in (0, 1):
        assert f"status completed rank {rank} of 2".encode() in done.out, done


def test_the_example_of_the_readme_runs(emulated_cloud: Any):
    """It runs on two nodes without account or configuration; log, result and status are right."""
    done = emulated_cloud.submit(
        *("--backend", "modelarts", "--nodes", "2", "--source", str(ROOT / "examples")),
        "digits/train.py",
        limit_s=180,
    )
    status = emulated_cloud.status(done.job)

    assert done.code == 0, done
    assert b"identical on all 2 ranks" in done.out
    assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0)
    assert {phase["name"] for phase in status["phases"]} >= {"stage", "bring-up", "run"}


def test_every_argument_and_variable_arrives_exactly(
    emulated_cloud: Any, ugly_values: dict[str, bytes]
):
    script = emulated_cloud.script(
        """
        import json
        found = {k: v for k, v in os.environb.items() if k.startswith(b"UGLY_") or k == b"TOKEN"}
        write_result(f"env-{rank}", repr(sorted(found.items())))
        write_result(f"argv-{rank}", json.dumps(sys.argv[1:]))
        """
    )
    values = {f"UGLY_{name}": value for name, value in ugly_values.items()}
    options = [
        option for name, value in values.items() for option in ("-e", name.encode() + b"=" + value)
    ]
    args = ["a b", "$HOME", "'", '"', "", "--", "-x", "\n", "ü"]
    done = submit(
        emulated_cloud,
        "--nodes",
        "2",
        "--secret",
        "TOKEN",
        *options,
        script,
        *args,
        env={"TOKEN": "s3$cr t"},
    )
    expected = {**{k.encode(): v for k, v in values.items()}, b"TOKEN": b"s3$cr t"}

    assert done.code == 0, done
    for rank in (0, 1):
        assert emulated_cloud.results_written()[f"env-{rank}"].decode() == repr(
            sorted(expected.items())
        )
        assert json.loads(emulated_cloud.results_written()[f"argv-{rank}"]) == args


def test_the_platform_copies_inputs_and_outputs(emulated_cloud: Any):
    first = submit(
        emulated_cloud,
        *("--output", "OUT=", "--nodes", "2"),
        emulated_cloud.script(
            """
            os.makedirs(os.environ["OUT"] + "/sub", exist_ok=True)
            with open(f"{os.environ['OUT']}/sub/rank-{rank}", "w") as file:
                file.write(f"rank {rank}")
            """
        ),
    )
    assert first.code == 0, first
    listed = emulated_cloud.cli("outputs", first.job).out.decode().split()
    assert listed == ["OUT/sub/rank-0", "OUT/sub/rank-1"]
    emulated_cloud.cli("outputs", first.job, "--to", str(emulated_cloud.folder / "got"))
    assert (emulated_cloud.folder / "got" / "OUT" / "sub" / "rank-1").read_text() == "rank 1"

    second = submit(
        emulated_cloud,
        *("--input", f"DATA=obs://cloudjob/{first.job}/outputs/OUT/"),
        emulated_cloud.script(
            'write_result("data", open(os.environ["DATA"] + "/sub/rank-1").read())',
            name="second.py",
        ),
    )
    assert second.code == 0, second
    assert emulated_cloud.results_written()["data"] == b"rank 1"

    misspelt = submit(emulated_cloud, "--input", "DATA=obs://cloudjob/nope/", "second.py")
    assert misspelt.code == 5, misspelt
    assert b"there is nothing at obs://cloudjob/nope/" in misspelt.err


def test_parameters_of_the_platform_are_appended_to_the_scripts_arguments(emulated_cloud: Any):
    script = emulated_cloud.script('import json; write_result("argv", json.dumps(sys.argv[1:]))')
    (emulated_cloud.source / "job.yaml").write_text("modelarts: {parameters: {epochs: 3}}\n")
    done = submit(emulated_cloud, "--config", "job.yaml", script, "--lr", "0.1")

    assert done.code == 0, done
    assert json.loads(emulated_cloud.results_written()["argv"]) == ["--lr", "0.1", "--epochs=3"]


def test_a_preset_engine_runs_the_job_through_our_boot_file(emulated_cloud: Any):
    """The engine's own Python starts the boot file, and the script runs as usual."""
    script = emulated_cloud.script('write_result(f"rank-{rank}", f"{size} {sys.argv[1]}")')
    engine = "PyTorch:pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"
    (emulated_cloud.source / "job.yaml").write_text(f'modelarts: {{engine: "{engine}"}}\n')
    size = ("--launcher", "mpirun", "--procs-per-node", "2")
    done = submit(emulated_cloud, "--config", "job.yaml", *size, script, "word")

    assert done.code == 0, done
    assert emulated_cloud.results_written("rank-*") == {"rank-0": b"2 word", "rank-1": b"2 word"}


def test_a_log_longer_than_the_platforms_window_is_complete(emulated_cloud: Any):
    script = emulated_cloud.script(
        """
        for number in range(4000):
            print(f"rank {rank} line {number:05d} {'x' * (number % 60)}", flush=True)
            if number % 200 == 0:
                time.sleep(0.02)
        """
    )
    done = submit(emulated_cloud, "--nodes", "2", script)

    assert done.code == 0, done
    for rank in (0, 1):
        mark = b"[%d] " % rank
        got = [line[len(mark) :] for line in done.lines if line.startswith(mark)]
        expected = [b"rank %d line %05d %s" % (rank, n, b"x" * (n % 60)) for n in range(4000)]
        assert got == expected, (len(got), done.err[-500:])
    assert b"are lost" not in done.out + done.err


# -- jobs that fail, are cancelled, removed or retried --------------------------------------------


def test_the_status_names_the_rank_that_failed(emulated_cloud: Any):
    script = emulated_cloud.script(
        """
        print("about to fail", flush=True)
        time.sleep(0.2)
        if rank == 1:
            raise ValueError("the reason")
        time.sleep(30)
        """
    )
    done = submit(emulated_cloud, "--nodes", "2", script)
    status = emulated_cloud.status(done.job)

    assert done.code == 1, done
    assert (status["state"], status["cause"]) == ("FAILED", "user")
    assert status["failure"]["rank"] == 1
    assert any("the reason" in line for line in status["failure"]["last_lines"])


def test_cancel_ends_the_job_and_deletes_its_secrets(emulated_cloud: Any, emulator: Path):
    script = emulated_cloud.script('write_result(f"up-{rank}"); time.sleep(120)')
    job = detach(
        emulated_cloud, "--secret", "TOKEN", "--nodes", "2", script, env={"TOKEN": "s3cret"}
    )
    emulated_cloud.await_results("up-0", "up-1")
    assert secrets_of(emulated_cloud, job) == {"env", "ssh-key"}
    done = emulated_cloud.cli("cancel", job, limit_s=300)

    assert done.code == 0, done
    status = emulated_cloud.status(job)
    assert status["state"] == "CANCELLED", (status, done)
    assert secrets_of(emulated_cloud, job) == set()
    # The head gets the platform's signal, and writes its record.
    assert "sent SIGTERM" in status["failure"]["message"], status


@pytest.mark.long
def test_stacks_are_asked_for_through_the_store(emulated_cloud: Any):
    """No command reaches the nodes, and they have no keys of the store."""
    script = emulated_cloud.script(
        """
        assert "CLOUDJOB_SIGNED_URIS" not in os.environ
        from mpi4py import MPI
        def load(path):
            with open(path) as file:
                return file.read()
        def step():
            if rank == 1:
                os.mkfifo(f"{results}/pipe")
                load(f"{results}/pipe")
            MPI.COMM_WORLD.Barrier()
        write_result(f"up-{rank}")
        step()
        """
    )
    job = detach(emulated_cloud, "--nodes", "2", script)
    emulated_cloud.await_results("up-0", "up-1")

    done = emulated_cloud.cli("stacks", "--json", job, limit_s=300)

    assert done.code == 0, done
    answer = json.loads(done.out)
    frames = [(group["ranks"], group["frames"]) for group in answer["groups"]]
    assert [(ranks, frame[0]["function"]) for ranks, frame in frames] == [
        ([1], "load"),
        ([0], "step"),
    ]
    assert frames[0][1][0]["source"] == "with open(path) as file:"
    assert (answer["waiting_ranks"], answer["odd_ranks"]) == ([0], [1])
    assert not objects(emulated_cloud, f"{job}/") & {"request.json", "answer.json"}
    done = emulated_cloud.cli("profile", job)
    assert (done.code, b"its backend cannot reach them" in done.err) == (2, True), done
    emulated_cloud.cli("cancel", "--now", job, limit_s=300)


def detach(emulated_cloud: Any, *arguments: str, **more: Any) -> str:
    """Submit with --detach, and return the job's id."""
    done = submit(emulated_cloud, "--detach", *arguments, **more)
    assert done.code == 0, done
    return str(done.out.decode().strip().rpartition("/")[2])


def secrets_of(emulated_cloud: Any, job: str) -> set[str]:
    """Return the names of the secrets in the store for the nodes of a job."""
    return {name for name in objects(emulated_cloud, f"{job}/node/") if name in ("env", "ssh-key")}


def objects(emulated_cloud: Any, prefix: str) -> set[str]:
    """Return the names of the objects below a prefix of the emulator's bucket."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from cloudjob.backends.modelarts.backend import ModelArtsBackend\n"
        "from cloudjob.store import open_store\n"
        "here = Path(sys.argv[1])\n"
        "backend = ModelArtsBackend(here, {}, environ={}, user_home=here)\n"
        "store = open_store(*backend.store())\n"
        "print(json.dumps(list(store.list(sys.argv[2], with_unfinished=True))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(emulated_cloud.home), prefix],
        capture_output=True,
        check=True,
    )
    return {key[len(prefix) :] for key in json.loads(done.stdout)}


def test_rm_leaves_nothing(emulated_cloud: Any):
    done = submit(emulated_cloud, emulated_cloud.script("pass"))
    assert emulated_cloud.cli("rm", done.job).code == 0

    assert objects(emulated_cloud, f"{done.job}/") == set()
    assert emulated_cloud.cli("status", done.job).code == 6


def test_a_failed_job_restarted_by_the_platform_runs_again(emulated_cloud: Any):
    script = emulated_cloud.script(
        """
        write_result(f"attempt-{len(os.listdir(results))}", os.environ["TOKEN"])
        sys.exit(3 if len(os.listdir(results)) < 2 else 0)
        """
    )
    done = submit(
        emulated_cloud, "--retries", "2", "--secret", "TOKEN", script, env={"TOKEN": "s3cret"}
    )

    assert done.code == 0, done
    assert emulated_cloud.results_written("attempt-*") == {
        "attempt-0": b"s3cret",
        "attempt-1": b"s3cret",
    }
    assert emulated_cloud.status(done.job)["state"] == "SUCCEEDED"


# -- faults of the service ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("throttle", "--count", "6"),
        ("error", "--count", "5"),
        ("lost-answer", "--count", "3"),
        ("clock-skew", "--amount", "3600", "--seconds", "20"),
        ("expire-tokens",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_job_survives_transient_failures(
    arguments: tuple[str, ...], emulated_cloud: Any, fault: Callable[..., str]
):
    fault(*arguments)
    name = f"once-{arguments[0]}"
    done = submit(emulated_cloud, "--name", name, emulated_cloud.script("print('it ran')"))

    assert done.code == 0, done
    assert b"[0] it ran\n" in done.out
    assert len(jobs_of(emulated_cloud, name)) == 1


def test_a_create_request_with_a_lost_answer_creates_one_job(
    emulated_cloud: Any, fault: Callable[..., str]
):
    fault("lost-answer", "--path", "/training-jobs", "--count", "1")
    done = submit(emulated_cloud, "--name", "lost-create", emulated_cloud.script("pass"))

    assert done.code == 0, done
    assert len(jobs_of(emulated_cloud, "lost-create")) == 1


@pytest.mark.long
def test_following_a_log_survives_failed_requests(emulated_cloud: Any, fault: Callable[..., str]):
    script = emulated_cloud.script(
        """
        write_result("up")
        for number in range(60):
            print(f"line {number}", flush=True)
            time.sleep(0.05)
        """
    )
    running = emulated_cloud.start_submit("--backend", "modelarts", script)
    emulated_cloud.await_results("up")
    fault("throttle", "--count", "5")
    fault("lost-answer", "--count", "3")
    done = running.end(300)

    assert done.code == 0, done
    assert [line for line in done.lines if line.startswith(b"[0] line")] == [
        b"[0] line %d" % number for number in range(60)
    ]


def jobs_of(emulated_cloud: Any, name: str) -> list[dict[str, Any]]:
    """Return the jobs of the service whose names match ``name``."""
    from cloudjob.backends.modelarts.client import ModelArtsClient
    from cloudjob.backends.modelarts.site import find

    site = find({}, {}, emulated_cloud.home, emulated_cloud.folder)
    return list(
        ModelArtsClient(site).search([{"key": "name", "operator": "like", "value": [name]}])
    )


def test_an_image_that_cannot_be_pulled_is_a_platform_failure(
    emulated_cloud: Any, fault: Callable[..., str]
):
    fault("image-pull", "--count", "1")
    done = submit(emulated_cloud, emulated_cloud.script("pass"))
    status = emulated_cloud.status(done.job)

    assert done.code != 0
    assert (status["state"], status["cause"]) == ("FAILED", "platform")
    assert b"Failed to pull image" in done.err, done
    events = emulated_cloud.cli("events", done.job)
    assert re.search(rb"(?i)pull", events.out), events


def test_a_lost_node_is_a_platform_failure(
    emulated_cloud: Any, fault: Callable[..., str], poll: Callable[..., Any]
):
    job = detach(
        emulated_cloud,
        "--nodes",
        "2",
        emulated_cloud.script('write_result(f"up-{rank}"); time.sleep(60)'),
    )
    emulated_cloud.await_results("up-0", "up-1")
    native = next(item for item in jobs_of(emulated_cloud, job))["metadata"]["id"]
    fault("lose-node", "--job", native, "--node", "1")
    done = emulated_cloud.cli("wait", job, limit_s=300)

    assert done.code != 0
    status = emulated_cloud.status(job)
    # The head writes that it was told to end, which says nothing about the cause.
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 1, status


# -- before the submit ----------------------------------------------------------------------------


def test_everything_that_would_fail_is_reported_before_the_submit(emulated_cloud: Any):
    done = submit(
        emulated_cloud,
        "--nodes",
        "99",
        "--flavor",
        "modelarts.vm.cpu.2u",
        emulated_cloud.script("pass"),
    )

    assert done.code == 5, done
    assert b"error: flavor: modelarts.vm.cpu.2u: at most 16 nodes, but the job has 99" in done.err
    assert b"hint: ask for 16 --nodes or fewer" in done.err
    assert json.loads(emulated_cloud.cli("list", "--json").out) == []


def test_a_missing_emulator_is_reported_with_a_hint(emulated_cloud: Any):
    address = emulated_cloud.home / "emulator" / "address.json"
    values = json.loads(address.read_text())
    address.write_text(json.dumps({**values, "endpoint": "http://127.0.0.1:9"}))
    done = submit(emulated_cloud, emulated_cloud.script("pass"))

    assert done.code == 5, done
    assert b"hint: cloudjob emulator up" in done.err


def test_doctor_checks_the_service(emulated_cloud: Any):
    done = emulated_cloud.cli("doctor", "--backend", "modelarts", "--json")
    check_of = {check["name"]: check for check in json.loads(done.out)}

    assert done.code == 0, done
    assert "4 flavors: " in check_of["flavor"]["found"] or "flavors" in check_of["flavor"]["found"]
    assert check_of["bucket"]["is_ok"]


# -- many jobs ------------------------------------------------------------------------------------


def test_jobs_of_several_backends_are_listed_copied_compared_and_cancelled(emulated_cloud: Any):
    script = emulated_cloud.script('write_result(f"up-{os.getpid()}"); time.sleep(120)')
    near = emulated_cloud.detach("--name", "near", "-e", "A=1", script)
    far = detach(emulated_cloud, "--name", "far", "-e", "A=1", script)
    done = emulated_cloud.cli("cp", "--detach", "-e", "A=2", "--name", "farther", far, "--", "word")
    assert done.code == 0, done
    copied = done.out.decode().strip().rpartition("/")[2]

    def listed(*arguments: str) -> list[str]:
        statuses = json.loads(emulated_cloud.cli("list", "--json", *arguments).out)
        return [status["job"] for status in statuses]

    assert listed() == [copied, far, near]
    assert listed("--backend", "modelarts") == [copied, far]
    assert listed("--name", "far") == [far]
    assert listed("--name", "far*", "--limit", "1") == [copied]
    assert listed("--since", "1h") == [copied, far, near]
    assert listed("--since", "2099-01-01") == []
    assert listed("--state", "succeeded") == []

    differ = emulated_cloud.cli("diff", "--json", far, copied)
    assert differ.code == 1
    assert json.loads(differ.out) == {
        "args": [[], ["word"]],
        "env.A": ["1", "2"],
        "name": ["far", "farther"],
    }
    assert emulated_cloud.cli("diff", far, far).code == 0

    ended = emulated_cloud.cli("cancel", "--backend", "modelarts", limit_s=300)
    assert ended.code == 0, ended
    assert b"2 of 2 jobs cancelled" in ended.err
    assert listed("--state", "CANCELLED") == [copied, far]
    assert emulated_cloud.cli("cancel", "--all", limit_s=300).code == 0
    assert listed("--state", "CANCELLED") == [copied, far, near]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cancel",), b"cancel: which job?"),
        (("cancel", "--all", "x"), b"cancel: which job?"),
        (("list", "--state", "DONE"), b"reading the filter state DONE: no such state"),
        (("list", "--backend", "dokcer"), b"did you mean 'docker'?"),
        (("list", "--since", "tomorrow"), b"reading the filter since tomorrow: not a time"),
        (("events", "nothing"), b"finding 'nothing': no such job"),
    ],
)
def test_invalid_requests_are_reported_in_one_line(
    arguments: tuple[str, ...], message: bytes, cloud: Any
):
    done = cloud.cli(*arguments)

    assert message in done.err
    assert b"Traceback" not in done.err
    assert done.code in (2, 6)


def test_events_of_a_backend_that_records_none_are_an_error(cloud: Any):
    done = cloud.submit(cloud.script("pass"))
    answer = cloud.cli("events", done.job)

    assert answer.code == 2
    assert b"the backend process keeps none" in answer.err
