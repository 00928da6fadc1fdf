"""Tests of the permissions in a cluster: those that ``doctor`` asks for are those of the guide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudjob.backends.kubernetes import discovery
from cloudjob.backends.kubernetes.client import POD
from cloudjob.backends.kubernetes.discovery import Permission
from cloudjob.backends.kubernetes.engine import SECRET, Engine
from cloudjob.backends.kubernetes.request import ENGINES
from tests.support.fake_kube_api import FakeApi
from tests.unit.cloudjob.backends.test_kubernetes_backend import auto_backend, offer

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "kubernetes-permissions.md"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
LIST_JOBS = "list jobs.batch"


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()


def needed(engine: Engine) -> dict[str, list[Permission]]:
    """Return all permissions of an engine, by what needs them."""
    return {"submit, status, logs": discovery.required(engine), **discovery.optional(engine)}


def roles() -> dict[str, list[dict[str, Any]]]:
    """Return the rules of each role in the guide."""
    text = next(part for part in GUIDE.read_text().split("```") if part.startswith("yaml\n"))
    documents = yaml.safe_load_all(text.removeprefix("yaml\n"))
    return {role["metadata"]["name"]: role["rules"] for role in documents}


def expanded(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return each verb, group and resource of some rules."""
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def table() -> str:
    """Return the table of permissions; engines with the same ones share a row."""
    lines = ["| for | engine | permissions |", "|---|---|---|"]
    for what in needed(ENGINES["job"]):
        rows: dict[str, list[str]] = {}
        for name, engine in ENGINES.items():
            for item in needed(engine)[what]:
                text = f"{item.verb} JOB" if item.resource == engine.resource else str(item)
                rows.setdefault(text, []).append(name)
        for names in dict.fromkeys(map(tuple, rows.values())):
            texts = ", ".join(f"`{text}`" for text, those in rows.items() if tuple(those) == names)
            engines = "all" if len(names) == len(ENGINES) else ", ".join(f"`{x}`" for x in names)
            lines.append(f"| {what} | {engines} | {texts} |")
    return "\n".join(lines)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_roles_of_the_guide_contain_what_is_needed_and_no_more(engine: str):
    expected = {
        (item.verb, item.resource.group, f"{item.resource.plural}/{item.part}".rstrip("/"))
        for items in needed(ENGINES[engine]).values()
        for item in items
    }

    assert expanded([*roles()["cloudjob"], *roles()[f"cloudjob-{engine}"]]) == expected


def test_the_table_of_the_guide_is_that_of_the_code():
    assert table() in GUIDE.read_text(), f"when this is right, write it to the guide:\n{table()}"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods/log"]}, True),
        ({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}, True),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["*/log"]}, True),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}, False),
        ({"verbs": ["list"], "apiGroups": [""], "resources": ["pods/log"]}, False),
        ({"verbs": ["get"], "apiGroups": ["batch"], "resources": ["pods/log"]}, False),
        (
            {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "resourceNames": ["mine"]},
            False,
        ),
    ],
)
def test_a_rule_of_a_role_covers_a_permission(rule: dict[str, Any], expected: bool):
    """As the RBAC authoriser of Kubernetes decides."""
    assert discovery.covers(rule, Permission("get", POD, "log")) is expected


@pytest.mark.parametrize(
    ("is_complete", "denied", "asked"), [(True, [LIST_JOBS], 0), (False, [], 1)]
)
def test_the_permissions_of_a_user_are_listed_with_one_request(
    api: FakeApi, tmp_path: Path, is_complete: bool, denied: list[str], asked: int
):
    """An authoriser that lists only a part of its rules is asked for the others one by one."""
    offer(api, "job")
    answer = api.on_change
    items = [item for items in needed(ENGINES["job"]).values() for item in items]
    rules = [
        {
            "verbs": [item.verb],
            "apiGroups": [item.resource.group],
            "resources": [f"{item.resource.plural}/{item.part}".rstrip("/")],
        }
        for item in items
        if str(item) != LIST_JOBS
    ]

    def review(path: str, body: dict[str, Any]) -> None:
        answer(path, body)
        if path.startswith(REVIEWS):
            body["status"] = {"resourceRules": rules, "incomplete": not is_complete}

    api.on_change = review
    rows = {row.name: row for row in auto_backend(api, tmp_path).checks(None, "")}

    lost = "".join(f"; without list ({text})" for text in denied)
    assert rows["engine job"].found == f"usable in lab{lost}"
    assert rows["engine job"].is_ok
    assert len(api.requests_with("POST", "selfsubjectaccessreviews")) == asked
    assert len(api.requests_with("POST", "selfsubjectrulesreviews")) == 1


def test_a_user_who_may_not_patch_the_objects_of_a_job_cannot_submit(api: FakeApi, tmp_path: Path):
    """The job becomes the owner of its Secret only once it exists."""
    offer(api, "job", denied=("patch secrets", "list events", "create pods"))
    rows = {row.name: row for row in auto_backend(api, tmp_path).checks(None, "")}

    assert rows["engine job"].found == f"not allowed in lab: {Permission('patch', SECRET)}"
    offer(api, "job", denied=("list events", "delete secrets"))
    rows = {row.name: row for row in auto_backend(api, tmp_path).checks(None, "")}
    assert rows["engine job"].found == (
        "usable in lab; without rm (delete secrets); without events, why a job waits (list events)"
    )
