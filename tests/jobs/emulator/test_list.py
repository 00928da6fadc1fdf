"""The list of jobs: filters, sort order, pages, ten thousand jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.modelarts.backend import ModelArtsBackend
from cloudjob.emulator import models
from cloudjob.emulator.database import Database, JobRow, StopRequest
from cloudjob.emulator.settings import defaults
from tests.support.emulator import SETTINGS, Api, running

SEARCH = "{p}/training-job-searches"
JOB_COUNT = 10_000


def fill(api: Api, count: int) -> None:
    """Add ended jobs to the database of a running emulator."""
    database = Database(Path(api.home, "emulator", "state.db"))
    body = models.job(api.body("true"), defaults())
    with database.transaction():
        for index in range(count):
            phase = ("Completed", "Failed", "Terminated")[index % 3]
            name = f"old-{index:05d}"
            body.metadata.name = name
            row = JobRow(
                id=f"{index:08d}-0000-0000-0000-000000000000",
                name=name,
                workspace="0",
                kind="job",
                phase=phase,
                secondary=phase,
                priority=1,
                algorithm_name="",
                user_name="emulator",
                create_ms=1_000_000 + index,
                start_ms=1,
                end_ms=2,
                nodes=1 + index % 4,
                pool="",
                stop_request=StopRequest.NONE,
                body=body,
                run=models.Run(),
            )
            database.add_job(row, (), {})
    database.close()


@pytest.fixture(scope="module")
def full() -> Any:
    """An emulator with ten thousand jobs."""
    with running(SETTINGS) as api:
        fill(api, JOB_COUNT)
        yield api


def names(page: Any) -> list[str]:
    """Return the names of the jobs on a page."""
    return [item["metadata"]["name"] for item in page["items"]]


def test_offset_is_a_page_number_and_pages_show_every_job_once(full: Api):
    page = full.ok("POST", SEARCH, {"limit": 50, "offset": 3})
    last = full.ok("POST", SEARCH, {"limit": 50, "offset": 199})
    past_the_end = full.ok("POST", SEARCH, {"limit": 50, "offset": 200})

    assert page["total"] == JOB_COUNT
    assert names(page) == [f"old-{JOB_COUNT - 1 - index:05d}" for index in range(150, 200)]
    assert names(last)[-1] == "old-00000"
    assert (past_the_end["count"], past_the_end["items"]) == (0, [])


@pytest.mark.parametrize(
    ("filters", "total"),
    [
        ([{"key": "phase", "operator": "in", "value": ["Failed"]}], 3333),
        ([{"key": "phase", "operator": "not", "value": ["Failed", "Terminated"]}], 3334),
        ([{"key": "name", "operator": "like", "value": ["old-000"]}], 100),
        ([{"key": "name", "operator": "like", "value": ["old_000"]}], 0),
        ([{"key": "name", "operator": "in", "value": ["old-00007", "old-00008"]}], 2),
        ([{"key": "create_time", "operator": "between", "value": ["1000000", "1000009"]}], 10),
        (
            [
                {"key": "phase", "operator": "in", "value": ["Failed"]},
                {"key": "name", "operator": "like", "value": ["old-0000"]},
            ],
            3,
        ),
        ([{"key": "kind", "operator": "in", "value": ["job"]}], JOB_COUNT),
        ([{"key": "user_id", "operator": "in", "value": ["somebody"]}], 0),
    ],
    ids=str,
)
def test_a_search_applies_every_filter(full: Api, filters: list[dict[str, Any]], total: int):
    assert full.ok("POST", SEARCH, {"filters": filters, "limit": 1})["total"] == total


def test_a_search_sorts_by_name(full: Api):
    page = full.ok("POST", SEARCH, {"sort_by": "name", "order": "asc", "limit": 2})

    assert names(page) == ["old-00000", "old-00001"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"limit": 51}, "2764"),
        ({"limit": 0}, "2764"),
        ({"offset": -1}, "2764"),
        ({"sort_by": "colour"}, "2790"),
        ({"order": "up"}, "2790"),
        ({"filters": [{"key": "colour", "operator": "in", "value": ["x"]}]}, "2789"),
        ({"filters": [{"key": "name", "operator": "near", "value": ["x"]}]}, "2789"),
        ({"filters": [{"key": "name; DROP TABLE jobs", "operator": "in", "value": ["x"]}]}, "2789"),
    ],
    ids=str,
)
def test_an_invalid_search_has_its_documented_code(full: Api, body: dict[str, Any], code: str):
    status, values, _ = full.ask("POST", SEARCH, body)

    assert (status, values["error_code"]) == (400, f"ModelArts.{code}")


def test_pages_of_ten_thousand_jobs_do_not_grow_the_memory(full: Api):
    search = {"limit": 50, "offset": 199}
    for _ in range(20):
        full.ok("POST", SEARCH, search)
    before = memory_kb(full)
    for _ in range(300):
        full.ok("POST", SEARCH, search)
    growth_kb = memory_kb(full) - before

    assert growth_kb < 20_000
    assert memory_kb(full) < 400_000


def memory_kb(api: Api) -> int:
    """Return the resident memory of the emulator's process, without its children."""
    text = Path(f"/proc/{api.address.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


def test_cloudjob_list_finds_running_jobs_among_ten_thousand_in_one_search(full: Api):
    full.fault("hang-pending")
    job = full.create("true")
    full.await_phase(job, "Pending")
    backend = ModelArtsBackend(full.home, {}, environ={}, user_home=full.home)
    host = full.address.endpoint.partition("//")[2]
    prefix = f"modelarts+http://{host}/{full.address.project_id}"
    ended = f"{prefix}/00000007-0000-0000-0000-000000000000/old-00007"

    status_of = backend.statuses([f"{prefix}/{job}/x", ended, f"{prefix}/none/x"])

    assert [status and status.native for status in status_of.values()] == ["Pending"]


def test_pages_of_events_show_every_event_once(api: Api):
    api.fault("hang-pending")
    job = api.create("true")
    api.await_phase(job, "Pending")
    database = Database(Path(api.home, "emulator", "state.db"))
    with database.transaction():
        for index in range(250):
            database.add_event(job, f"event {index}")
    database.close()
    pages = [
        api.ok("GET", f"{{p}}/training-jobs/{job}/events?order=asc&limit=100&offset={page}")
        for page in range(4)
    ]
    messages = [event["message"] for page in pages for event in page["events"]]
    backend = ModelArtsBackend(api.home, {}, environ={}, user_home=api.home)
    host = api.address.endpoint.partition("//")[2]
    events = backend.events(f"modelarts+http://{host}/{api.address.project_id}/{job}/name")

    assert [page["offset"] for page in pages] == [0, 1, 2, 3]
    assert pages[3]["events"] == []
    assert len(messages) == pages[0]["total"]
    assert [message for message in messages if message.startswith("event ")] == [
        f"event {index}" for index in range(250)
    ]
    assert [event.message for event in events] == messages
