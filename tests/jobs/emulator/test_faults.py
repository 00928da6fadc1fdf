"""Injected faults."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from typing import Any

import pytest

from cloudjob.emulator import daemon
from cloudjob.emulator.fault_injection import Faults
from cloudjob.errors import BackendError, UsageError
from tests.support.emulator import Api, keys

FLAVORS = "{p}/training-job-flavors"


def test_throttle_refuses_the_requested_number_of_requests(api: Api):
    api.fault("throttle", count=2)
    answers = [api.ask("GET", FLAVORS) for _ in range(3)]

    assert [status for status, _, _ in answers] == [429, 429, 200]
    assert answers[0][1]["error_code"] == "APIGW.0308"
    assert answers[0][2]["retry-after"] == "1"


def test_errors_are_limited_to_the_given_path(api: Api):
    api.fault("error", path="training-job-flavors")

    assert api.ask("GET", FLAVORS)[0] == 500
    assert api.ask("GET", FLAVORS)[1]["error_code"] == "ModelArts.0010"
    assert api.ask("GET", "{p}/training-job-engines")[0] == 200
    assert daemon.clear_faults(api.home) == 1
    assert api.ask("GET", FLAVORS)[0] == 200


def test_a_fault_ends_after_its_seconds(api: Api):
    api.fault("error", seconds=4)
    assert api.ask("GET", FLAVORS)[0] == 500
    end = time.monotonic() + 180
    while api.ask("GET", FLAVORS)[0] != 200:
        assert time.monotonic() < end
    assert daemon.faults(api.home) == []


def test_a_job_whose_answer_was_lost_exists(api: Api):
    body = api.body("true")
    api.fault("lost-answer", count=1, path="training-jobs")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        api.ask("POST", "{p}/training-jobs", body)
    status, values, _ = api.ask("POST", "{p}/training-jobs", body)

    assert (status, values["error_code"]) == (400, "ModelArts.2751")


def test_with_a_skewed_clock_current_signatures_have_expired(api: Api):
    api.fault("clock-skew")
    status, values, _ = api.ask("GET", FLAVORS)

    assert status == 401
    assert "signature expired" in values["error_msg"]
    daemon.clear_faults(api.home)
    assert api.ask("GET", FLAVORS)[0] == 200


def test_a_job_hangs_pending_until_the_fault_ends(api: Api):
    api.fault("hang-pending")
    waiting = api.create("true")
    time.sleep(1.5)  # the scheduler checks the queue three times in that time
    assert api.show(waiting)["status"]["phase"] == "Pending"
    daemon.clear_faults(api.home)
    assert api.await_phase(waiting)["status"]["phase"] == "Completed"


def test_a_job_that_hangs_pending_can_be_terminated(api: Api):
    api.fault("hang-pending")
    job = api.create("true")
    api.await_phase(job, "Pending")
    api.ok("POST", f"{{p}}/training-jobs/{job}/actions", {"action_type": "terminate"})
    details = api.await_phase(job)

    assert (details["status"]["phase"], details["status"]["start_time"]) == ("Terminated", 0)


def test_a_job_whose_image_cannot_be_pulled_fails_with_an_event(api: Api):
    api.fault("image-pull", count=1)
    job = api.create("true")

    assert api.await_phase(job)["status"]["phase"] == "Failed"
    assert any("Failed to pull image" in event for event in api.events(job))


def test_a_job_fails_if_its_outputs_cannot_be_uploaded(api: Api, s3: Any):
    output = {"name": "o", "remote": {"obs": {"obs_url": "/data/full/"}}, "access_method": "env"}
    api.fault("full-obs")
    job = api.create("echo x > $o/f", algorithm={"outputs": [output]})
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Failed"
    assert details["status"]["task_statuses"][0]["exit_code"] == 0
    assert any("Upload training output" in event and "failed" in event for event in api.events(job))
    assert keys(s3, "full/") == []


@pytest.mark.parametrize(
    "values",
    [{"kind": "nothing"}, {"kind": "error", "job": "nobody"}, {"kind": "lose-node", "job": "x"}],
    ids=str,
)
def test_an_impossible_fault_is_refused(api: Api, values: dict[str, Any]):
    with pytest.raises(UsageError):
        daemon.add_fault(api.home, **values)


def test_faults_without_a_running_emulator_hint_at_up(tmp_path: Path):
    with pytest.raises(BackendError) as caught:
        daemon.faults(tmp_path)

    assert caught.value.hint == "cloudjob emulator up"


def test_a_fault_is_limited_to_its_time_job_and_path():
    faults = Faults()
    fault = faults.add(kind="error", until_s=time.time() + 60, job="j", path="/x")

    assert faults.find("error", job="j", path="/a/x") is fault
    assert not faults.find("throttle", job="j", path="/a/x")
    assert not faults.find("error", job="k", path="/a/x")
    assert not faults.find("error", job="j", path="/a")
    fault.until_s = time.time()
    assert not faults.find("error", job="j", path="/a/x")
