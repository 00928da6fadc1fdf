"""Tests of the facts about a job."""

from __future__ import annotations

from typing import Any

import pytest

from cloudjob.console.facts import changed, facts
from cloudjob.errors import UsageError
from tests.support.statuses import status_of


class Job:
    """A job with this description; None if it was not recorded."""

    handle = "process://local/job"
    submitted_by = "ann@host"
    git_commit = "0123abcd with uncommitted changes"

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self._spec = spec

    def spec(self) -> dict[str, Any]:
        if self._spec is None:
            raise UsageError("it was not recorded")
        return self._spec

    def sweep_values(self) -> dict[str, str]:
        return {"lr": "0.1"}


def test_the_facts_name_the_command_the_image_the_commit_and_who_submitted():
    spec = {
        "script": "train.py",
        "args": ["--name", "a b\x1b[31m"],
        "image": "torch:2",
        "backend": "kubernetes",
        "kubernetes": {"labels": {"team": "<b>vision</b>"}},
        "process": {"python": "/not/of/this/backend"},
    }
    job = Job(spec)
    fact_of = dict(facts(status_of(), job))  # type: ignore[arg-type]

    assert fact_of["Command"] == "train.py --name 'a b'"
    assert (fact_of["Image"], fact_of["Sweep"]) == ("torch:2", "lr=0.1")
    assert fact_of["Git commit"] == "0123abcd with uncommitted changes"
    assert fact_of["Submitted by"] == "ann@host"
    assert fact_of["Labels"] == "team=<b>vision</b>"
    assert "Interpreter" not in fact_of


def test_the_facts_name_the_interpreter_that_was_chosen():
    job = Job({"backend": "process", "process": {"python": "/opt/python"}})

    assert dict(facts(status_of(), job))["Interpreter"] == "/opt/python"  # type: ignore[arg-type]


def test_only_what_differs_from_the_defaults_is_a_change():
    spec = {
        "script": "train.py",
        "args": [],
        "nodes": 2,
        "timeout_min": 0.0,
        "env": {},
        "kubernetes": {"keep_min": 0.0, "namespace": "team"},
        "slurm": {"host": ""},
        "of_a_later_version": 1,
    }
    assert changed(spec) == {
        "script": "train.py",
        "nodes": 2,
        "kubernetes": {"namespace": "team"},
        "of_a_later_version": 1,
    }


@pytest.mark.parametrize(
    "spec", [None, {}, {"script": None, "args": 5, "backend": [], "process": 1}]
)
def test_what_is_not_recorded_is_left_out(spec: dict[str, Any] | None):
    assert not {"Command", "Image"} & dict(facts(status_of(), Job(spec))).keys()  # type: ignore[arg-type]
