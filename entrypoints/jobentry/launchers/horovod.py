"""Horovod with either of its controllers: MPI under mpirun, or Gloo with our key-value store."""

from __future__ import annotations

from typing import Mapping, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.launchers import mpirun
from jobentry.launchers.common import (
    ArgsError,
    Launch,
    Process,
    Site,
    port,
    program,
    rank_wrapper,
)

CONTROLLER = "HOROVOD_CONTROLLER"
OPERATIONS = "HOROVOD_CPU_OPERATIONS"
TIMELINE = "HOROVOD_TIMELINE"
TIMEOUT_S = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_LAUNCHERS = {"mpi": "horovod", "gloo": "horovod-gloo"}


def mpi(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return mpirun on the head, whose ranks connect over MPI.

    Raises:
        ArgsError: The job sets another controller, or an mpirun option is invalid.
    """
    env = _variables(site, "mpi")
    node = site.node._replace(env_names=(*site.node.env_names, *env))
    mpi_site = site._replace(node=node, environment={**site.environment, **env})
    return mpirun.launch(mpi_site, script_argv)


def gloo(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return the ranks of this node and, on the head, the key-value store of the rendezvous.

    Raises:
        ArgsError: The job sets another controller, or its port is invalid.
    """
    node, number = site.node, port(site)
    env = {**_variables(site, "gloo"), **_rendezvous(site, number)}
    argv = program(site, script_argv)
    processes = [
        rank_wrapper(site, node.node * node.slots + local, argv, {**env, **_position(node, local)})
        for local in range(node.slots)
    ]
    if node.is_head:
        store = (*site.entry, "--rendezvous", str(number), str(node.nodes), str(node.slots))
        processes.insert(0, Process("rendezvous", store, site.environment, is_server=True))
    return Launch(tuple(processes), node.nodes * node.slots)


def _variables(site: Site, controller: str) -> dict[str, str]:
    """Return the variables that select the controller, the same for all ranks."""
    asked = site.environment.get(CONTROLLER, controller).lower()
    if asked != controller:
        other = _LAUNCHERS.get(asked)
        raise ArgsError(
            [
                f"{CONTROLLER}={asked[:80]}: the launcher {site.node.launcher} is for {controller}"
                + (f", and {other} for that" if other else "")
            ]
        )
    env = {CONTROLLER: controller}
    env[OPERATIONS] = site.environment.get(OPERATIONS, controller)
    if TIMELINE in dict(site.node.outputs):
        # Horovod expects a file, but an output is a folder; only rank 0 writes the file.
        env[TIMELINE] = site.paths.output(TIMELINE) + "/timeline.json"
    return env


def _rendezvous(site: Site, number: int) -> Mapping[str, str]:
    node, environment = site.node, site.environment
    env = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": node.hosts[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(number),
        "HOROVOD_HOSTNAME": node.host,
        # Horovod's default of 30 s is too short for ranks with slow imports.
        TIMEOUT_S: environment.get(TIMEOUT_S, "%d" % max(30, node.start_timeout_s)),
    }
    interface = environment.get("HOROVOD_GLOO_IFACE", environment.get(names.GLOO_SOCKET_IFNAME, ""))
    if interface:
        env["HOROVOD_GLOO_IFACE"] = interface
    return env


def _position(node: NodeEnv, local: int) -> Mapping[str, str]:
    """Return a rank's number and the size among all ranks, on its node, and across nodes."""
    numbers = {
        "HOROVOD_RANK": node.node * node.slots + local,
        "HOROVOD_SIZE": node.nodes * node.slots,
        "HOROVOD_LOCAL_RANK": local,
        "HOROVOD_LOCAL_SIZE": node.slots,
        "HOROVOD_CROSS_RANK": node.node,
        "HOROVOD_CROSS_SIZE": node.nodes,
    }
    return {name: str(number) for name, number in numbers.items()}
