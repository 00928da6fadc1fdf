"""What nodes record of a job: phases, ranks and resources, while it runs and afterwards."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from cloudjob import tracking
from tests.jobs.conftest import poll

WORK = """
if rank == 0:
    print('jobentry# {"phase":"forged","from":1,"to":2}', flush=True)
    sys.stdout.write('part'); sys.stdout.flush()
    time.sleep(0.5)
    sys.stdout.write('\\rjobentry# {"phase":"forged","from":1,"to":2}\\n'); sys.stdout.flush()
print("hello", flush=True)
while not os.path.exists(f"{results}/go"):
    if rank == 1:
        sum(range(100_000))
    elif rank == 2:
        time.sleep(0.05)
    else:
        print("step", flush=True)
        time.sleep(0.05)
"""


def test_each_rank_is_shown_with_its_own_state_while_a_job_runs(cloud: Any):
    """Rank 1 works, rank 2 is silent, and a script cannot forge what its node records."""
    script = cloud.script(WORK)
    running = cloud.start_submit("--nodes", "2", "--procs-per-node", "2", script)
    job = tracking.find(cloud.home, running.job)

    def last(rank: int) -> Any:
        points = job.journals().ranks.get(rank, ())
        return points[-1].sample if points else None

    poll(lambda: last(2) and last(2).quiet_s >= 3 and last(1), "a rank that is silent")
    poll(lambda: last(1).cpu_percent > 3 * max(1, last(2).cpu_percent), "a rank that works")
    assert last(0).quiet_s < last(2).quiet_s
    assert [last(rank).state in "RSD" for rank in range(4)] == [True] * 4
    assert {rank: points[-1].node for rank, points in job.journals().ranks.items()} == {
        0: 0, 1: 0, 2: 1, 3: 1,
    }  # fmt: skip
    status = cloud.status(running.job)
    unfinished = {
        (phase["node"], phase["name"]) for phase in status["phases"] if not phase["ended_at"]
    }
    assert status["state"] == "RUNNING"
    assert unfinished == {(0, "run"), (1, "run")}
    assert {"stage", "package", "bring-up", "first output"} <= {
        phase["name"] for phase in status["phases"] if phase["ended_at"] and phase["node"] == 1
    }

    (cloud.results / "go").touch()
    done = running.end()
    assert done.code == 0, done
    assert b"[0] jobentry# {" in done.out
    assert not any(line.startswith(b"jobentry# ") for line in (done.out + done.err).split(b"\n"))
    raw = cloud.raw(running.job, 0)
    forged = b'jobentry# {"phase":"forged","from":1,"to":2}\n'
    assert raw.startswith(forged + b"part\r" + forged + b"hello\nstep\n")

    ended = tracking.find(cloud.home, running.job).journals()
    assert all(points[-1].sample.state == "E" for points in ended.ranks.values())
    assert all(samples[-1].memory for samples in ended.resources.values())
    assert "forged" not in {phase.name for phase in ended.phases}
    assert {phase["node"] for phase in cloud.status(running.job)["phases"]} == {0, 1}
    for node in range(2):
        assert (cloud.home / "store" / running.job / "record" / f"journal-{node}.jsonl.gz").exists()


def test_transfers_are_phases_with_their_size(cloud: Any):
    """Inputs, outputs and each save of the outputs while the job runs are phases."""
    (cloud.folder / "data").write_bytes(b"x" * 70_000)
    script = cloud.script("""
weights = open(os.path.join(os.environ["MODEL"], "weights"), "wb")
weights.write(b"w" * 50_000); weights.close()
print("written", flush=True)
while not os.path.exists(f"{results}/go"): time.sleep(0.05)
""")
    running = cloud.start_submit(
        *("--input", f"DATA=file://{cloud.folder}/data", "--output", "MODEL="),
        *("--output-sync-s", "1", script),
    )
    job = tracking.find(cloud.home, running.job)

    def phase_of(name: str) -> Any:
        return next((phase for phase in job.journals().phases if phase.name == name), None)

    poll(lambda: phase_of("checkpoint"), "a save of the outputs")
    (cloud.results / "go").touch()
    assert running.end().code == 0

    assert (phase_of("input DATA").done_bytes, phase_of("input DATA").total_bytes) == (
        70_000,
        70_000,
    )
    assert phase_of("checkpoint").done_bytes == 50_000
    assert phase_of("outputs").ended_at is not None


def test_a_node_that_is_killed_leaves_what_its_log_holds(cloud: Any):
    """The node did not store its journal, so the journal is read from the log."""
    script = cloud.script('write_result("up%d" % rank)\nprint("up", flush=True)\ntime.sleep(600)')
    running = cloud.start_submit("--nodes", "2", script)
    cloud.await_results("up1")
    job = tracking.find(cloud.home, running.job)
    poll(lambda: len(job.journals().ranks) == 2, "both nodes")
    os.kill(cloud.state(running.job)["nodes"][1]["process"], signal.SIGKILL)
    running.end()

    assert tracking.find(cloud.home, running.job).journals().nodes == {0, 1}


def test_metrics_of_a_training_come_by_rank_and_step(cloud: Any):
    """Metrics come from a pattern in the job file or given later, JSON lines and event files."""
    cloud.write("job.yaml", "metrics: {loss: 'loss ([0-9.]+)'}\n")
    script = cloud.script("""
import json, struct
for step in range(3):
    print(f"epoch {step} loss {rank + 1 / (step + 1):.3f} speed={step}", flush=True)
    print(json.dumps({"step": 10 * step, "lr": 0.1}), flush=True)
if rank == 0:
    value = b"\\x0a\\x03acc\\x15" + struct.pack("<f", 0.5)
    event = b"\\x10\\x07\\x2a" + bytes([len(value) + 2]) + b"\\x0a" + bytes([len(value)]) + value
    with open(os.environ["LOG"] + "/events.out.tfevents.1.host", "wb") as file:
        file.write(struct.pack("<QI", len(event), 0) + event + b"0000")
""")
    done = cloud.submit(
        *("--config", "job.yaml", "--procs-per-node", "2", "--output", "LOG=", script)
    )
    assert done.code == 0, done

    table = cloud.cli("metrics", done.job).out.decode()
    assert {tuple(line.split()[:3]) for line in table.splitlines()[1:5]} == {
        (name, "rank", rank) for name in ("loss", "lr") for rank in "01"
    }
    points = json.loads(cloud.cli("metrics", "--json", "--metric", "speed=speed=(.)", done.job).out)
    value_of = {(point["name"], point["rank"], point["step"]): point["value"] for point in points}
    assert value_of["loss", 1, 2] == 1.333
    assert value_of["lr", 0, 20] == 0.1
    assert value_of["speed", 0, 1] == 1.0
    assert value_of["acc", None, 7] == 0.5
    csv = cloud.cli("metrics", "--csv", done.job).out.decode().splitlines()
    assert csv[0] == "name,rank,step,value,at,source,is_detected"
    assert len(csv) == 1 + 2 * 3 * 2 + 1
    assert b"memory_mib" in cloud.cli("metrics", "--resources", done.job).out
    refused = cloud.cli("metrics", "--metric", "loss=(", done.job)
    assert (refused.code, refused.err.count(b"Traceback")) == (2, 0)
