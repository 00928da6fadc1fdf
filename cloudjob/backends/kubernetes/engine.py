"""What an operator is to us: its resource, what it is told of a job, and what its words mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes.pod import CONTAINER, JOB_LABEL, Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission


class Resource(NamedTuple):
    """A kind of object in the API.

    Args:
        group: Empty for the API's own core.
        plural: Its name in paths.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """What a manifest says of it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of all such objects of a namespace, or of one."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        tail = f"/{name}" if name else ""
        return f"{root}/namespaces/{namespace}/{self.plural}{tail}"


class Stage(NamedTuple):
    """Where a job stands by its operator's own word.

    Args:
        message: Why, where the operator says so.
        ended_at: RFC 3339 as the API writes it; empty when it has not ended, or not said when.
        started_at: When it began to run; empty when that is not said.
        attempt_at: When the last attempt began; empty while there was only one.
        has_asked: Whether the operator itself ended the pods.
    """

    state: JobState
    native: str
    message: str = ""
    ended_at: str = ""
    started_at: str = ""
    attempt_at: str = ""
    has_asked: bool = False


def own_selector(called: Names) -> str:
    """Return the selector of the label that we give to pods."""
    return f"{JOB_LABEL}={called.job}"


def no_services(_submission: Submission, _called: Names) -> list[dict[str, Any]]:
    """Return nothing: the operator gives names to all nodes."""
    return []


class Engine(NamedTuple):
    """An operator.

    Args:
        hosts: The network names of the nodes, from the job's name and how many there are.
        manifest: The job's manifest.
        left_out: Variables that the operator gives to each pod.
        makes_key: Whether the operator makes a key for ssh.
        node_of: The number of the node that a pod is, from the job's name and the pod; None for
            none.
        stage: Where a job stands, from its manifest with its status, and whether we have
            cancelled it.
        stop: What ends the pods of a job and keeps its manifest: method, resource, name and body.
        no_retries: Why it cannot start a job again; empty when it can.
        container: The name that the container has in its pods.
        launchers: Those that it can be used with; empty for all.
        runs: What these are, in words.
        selector: What finds the pods of a job, as a selector of labels.
        services: The services that the nodes need and the operator does not make.
        is_early: Whether it takes a job for ended while the head may still have work to do.
    """

    name: str
    resource: Resource
    hosts: Callable[[str, int], tuple[str, ...]]
    manifest: Callable[[Submission, Names, bool], dict[str, Any]]
    environment: Callable[[Submission, Names, int], dict[str, str]]
    makes_key: bool
    node_of: Callable[[str, Mapping[str, Any]], int | None]
    stage: Callable[[Mapping[str, Any], bool], Stage]
    stop: Callable[[Mapping[str, Any]], tuple[str, Resource, str, dict[str, Any]]]
    no_retries: str = ""
    container: str = CONTAINER
    launchers: tuple[str, ...] = ()
    runs: str = ""
    selector: Callable[[Names], str] = own_selector
    services: Callable[[Submission, Names], list[dict[str, Any]]] = no_services
    is_early: bool = False


def numbered(pod: str, prefix: str) -> int | None:
    """Return the number that follows the prefix in the name of a pod."""
    number = pod.removeprefix(prefix)
    if pod.startswith(prefix) and number.isascii() and number.isdecimal():
        return int(number)
    return None
