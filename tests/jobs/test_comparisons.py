"""The jobs of a sweep, and the differences between two jobs, as a user sees them."""

from __future__ import annotations

import json

ONE_RANK = ("--launcher", "python")


def test_the_status_of_a_sweep_shows_its_jobs_with_their_values(cloud):
    cloud.write("train.py", "import sys; sys.exit(sys.argv[1] == '0.01')")
    submitted = cloud.cli("submit", "--sweep", "lr=0.1,0.01", *ONE_RANK, "train.py", "{lr}")
    sweep = cloud.cli("list", "--json").out
    sweep = json.loads(sweep)[0]["job"].rpartition("-")[0]
    assert submitted.code == 1, submitted

    done = cloud.cli("status", sweep)

    assert done.code == 0, done
    assert done.err.decode() == f"sweep {sweep}: 1 SUCCEEDED, 1 FAILED\n"
    rows = [line.split() for line in done.out.decode().splitlines()]
    assert rows[0] == ["JOB", "STATE", "VALUES", "DURATION", "REASON"]
    assert [row[:3] for row in rows[1:]] == [
        [f"{sweep}-0", "SUCCEEDED", "lr=0.1"],
        [f"{sweep}-1", "FAILED", "lr=0.01"],
    ]
    values = json.loads(cloud.cli("status", "--json", sweep).out)
    assert values["sweep"] == sweep
    assert [each["state"] for each in values["jobs"]] == ["SUCCEEDED", "FAILED"]


def test_diff_names_files_and_shows_values_as_they_were_given(cloud):
    cloud.write("train.py", "print(1)")
    cloud.write("old.py", "")
    options = (*ONE_RANK, "-e", "EMPTY=", "-e", "LR=0.1", "train.py", "a b", "c")
    first = cloud.submit("--name", "first", *options).job
    cloud.write("train.py", "print(2)")
    cloud.write("new.py", "")
    (cloud.source / "old.py").unlink()
    second = cloud.submit("--name", "second", *ONE_RANK, "-e", "LR=0.2", "train.py").job

    done = cloud.cli("diff", first, second)

    assert done.code == 1, done
    assert done.out.decode().splitlines() == [
        "args: 'a b' c -> (none)",
        f"code: new.py only in {second}",
        f"code: old.py only in {first}",
        "code: train.py differs",
        'env.EMPTY: "" -> (not set)',
        "env.LR: 0.1 -> 0.2",
        "name: first -> second",
    ]
    assert json.loads(cloud.cli("diff", "--json", first, second).out)["args"] == [["a b", "c"], []]
