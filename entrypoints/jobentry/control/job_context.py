"""The objects that the parts of the head share: bring-up, run and stop."""

from __future__ import annotations

from typing import NamedTuple

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.elastic_hosts import ElasticHosts
from jobentry.control.event_loop import NodeLoop
from jobentry.control.launch_processes import LaunchProcesses
from jobentry.control.remote_commands import RemoteCommands
from jobentry.control.stop import Stop
from jobentry.control.worker_pool import WorkerPool
from jobentry.launchers.plan import LaunchPlan


class JobContext(NamedTuple):
    """The objects that the parts of the head share.

    Args:
        launcher: Starts the ranks of this node.
        commands: Runs the launcher's commands on other nodes; None if it has none.
        elastic: The nodes of an elastic job; None for other jobs.
    """

    node: NodeEnv
    paths: NodePaths
    plan: LaunchPlan
    loop: NodeLoop
    pool: WorkerPool
    launcher: LaunchProcesses
    commands: RemoteCommands | None
    stop: Stop
    elastic: ElasticHosts | None
