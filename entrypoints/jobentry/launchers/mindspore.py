"""MindSpore's dynamic cluster: a scheduler on the head, and ranks that register with it.

Three launchers form it: ``dynamic-cluster`` starts the ranks itself, ``msrun`` and
``mindspore-mpi`` have MindSpore's msrun and Open MPI's mpirun start them.
"""

from __future__ import annotations

import posixpath
from typing import Mapping, Sequence

from jobentry.contract import names
from jobentry.launchers import mpirun
from jobentry.launchers.common import PRIVATE, File, Launch, Process, Site, door, port, program
from jobentry.launchers.mpi import Mpi

# In seconds, at random between the two: after such a pause a rank asks the scheduler again whether
# all have met, and it sleeps through one when it ends. MindSpore's own choice is 3 to 5.
_PAUSES = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER")
# Of more ranks MindSpore takes a cluster for a large one, and spares its scheduler.
_FEW_RANKS = 256

# What msrun starts instead of a script: its own parser mixes the script's words up with its own. It
# becomes the door of a rank; where msrun wants a scheduler, there is one already.
_DOOR = """\
from os import environ, execv
if environ.get("MS_ROLE") != "MS_SCHED":
    for name, value in %r.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    environ[%r] = environ["MS_NODE_ID"]
    execv(%r, %r)
"""


def dynamic_cluster(site: Site, words: Sequence[str]) -> Launch:
    """Return a rank for each slot of this node, and on the head the scheduler."""
    node = site.node
    ranks = range(node.node * node.slots, (node.node + 1) * node.slots)
    shared = cluster(site)
    doors = (
        door(
            site,
            rank,
            program(site, words),
            {
                **shared,
                "MS_ROLE": "MS_WORKER",
                "MS_NODE_ID": str(rank),
                "RANK_ID": str(rank),
                "DEVICE_ID": str(rank - ranks[0]),
            },
            ("--address", "MS_SCHED_HOST"),
        )
        for rank in ranks
    )
    return Launch((*_scheduler(site, shared), *doors), node.nodes * node.slots)


def msrun(site: Site, words: Sequence[str]) -> Launch:
    """Return msrun for this node, which starts our doors, and on the head the scheduler.

    msrun starts a scheduler where it takes the head's address for its own, which is on no node of
    some networks, and on several of others: so ours is started instead.
    """
    node = site.node
    shared = cluster(site)
    path = posixpath.join(site.paths.node_dir, "msrun-door.py")
    ranks = node.nodes * node.slots
    argv = (
        site.interpreter,
        "-m",
        "mindspore.parallel.cluster.run",
        "--worker_num=%d" % ranks,
        "--local_worker_num=%d" % node.slots,
        "--node_rank=%d" % node.node,
        "--master_addr=" + shared["MS_SCHED_HOST"],
        "--master_port=" + shared["MS_SCHED_PORT"],
        "--cluster_time_out=" + shared["MS_TOPO_TIMEOUT"],
        "--log_dir=" + posixpath.join(site.paths.node_dir, "msrun"),
        # No rank has this number: each has a log of its own, which we show ourselves.
        "--tail_worker_log=%d" % ranks,
        "--join=True",
        "python3",
        path,
    )
    folder = posixpath.dirname(site.interpreter)
    old = site.environment.get("PATH", "")
    # msrun warns at length of what is as it should be, and finds python3 on PATH.
    changed = {"GLOG_v": "3", "PATH": f"{folder}:{old}" if folder and old else folder or old}
    restored = {name: site.environment.get(name) for name in changed}
    entry = (*site.entry, "--rank", "--", *program(site, words))
    text = _DOOR % (restored, names.CLOUDJOB_RANK, entry[0], entry)
    pauses = {name: shared[name] for name in _PAUSES if name in shared}
    env = {**site.environment, **pauses, **changed}
    return Launch(
        (*_scheduler(site, shared), Process("msrun", argv, env)),
        ranks,
        files=(File(path, PRIVATE, text),),
    )


def mpi(site: Site, tools: Mpi, words: Sequence[str]) -> Launch:
    """Return mpirun on the head, whose ranks form the cluster, and the scheduler beside it.

    GPU and Ascend need neither cluster nor scheduler: there MindSpore asks Open MPI itself.
    """
    if site.node.mindspore.device_target not in ("", "CPU"):
        return mpirun.launch(site, tools, words)
    shared = {**cluster(site), "MS_ROLE": "MS_WORKER"}
    node = site.node
    carrying = site._replace(
        node=node._replace(env_names=(*node.env_names, *shared)),
        environment={**site.environment, **shared},
    )
    options = ("--mpi-cluster", "--address", "MS_SCHED_HOST")
    launch = mpirun.launch(carrying, tools, words, options)
    return launch._replace(processes=(*_scheduler(site, shared), *launch.processes))


def cluster(site: Site) -> dict[str, str]:
    """Return what the scheduler and all ranks of a job are told; the user's word on time goes."""
    node = site.node
    ranks = node.nodes * node.slots
    is_quick = ranks <= _FEW_RANKS and not any(site.environment.get(name) for name in _PAUSES)
    return {
        "MS_WORKER_NUM": str(ranks),
        "RANK_SIZE": str(ranks),
        "MS_SCHED_HOST": node.hosts[0],
        "MS_SCHED_PORT": str(port(site, "MS_SCHED_PORT")),
        "MS_TOPO_TIMEOUT": site.environment.get("MS_TOPO_TIMEOUT")
        or "%d" % max(1, node.start_timeout_s),
        **(dict.fromkeys(_PAUSES, "1") if is_quick else {}),
    }


def _scheduler(site: Site, shared: Mapping[str, str]) -> tuple[Process, ...]:
    if not site.node.is_head:
        return ()
    env = {**site.environment, **shared, "MS_ROLE": "MS_SCHED"}
    # It warns of every try to register.
    env.setdefault("GLOG_v", "3")
    argv = (*site.under_interpreter, "--scheduler")
    return (Process("scheduler", argv, env, is_server=True),)
