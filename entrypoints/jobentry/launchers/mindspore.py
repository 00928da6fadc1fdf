"""MindSpore's dynamic cluster: a scheduler on the head, with which the ranks register.

Three launchers create it: ``dynamic-cluster`` starts the ranks itself, ``msrun`` uses MindSpore's
msrun, and ``mindspore-mpi`` Open MPI's mpirun.
"""

from __future__ import annotations

import posixpath
from typing import Iterator, Mapping, Sequence

from jobentry.contract import names
from jobentry.launchers import mpirun
from jobentry.launchers.common import (
    PRIVATE,
    ArgsError,
    File,
    Launch,
    Process,
    Site,
    port,
    program,
    rank_wrapper,
)
from jobentry.launchers.rank_table import PLATFORM_FOLDER

# Lower and upper limit, in seconds, of the random pause after which a rank asks the scheduler again
# whether all have registered; an ending rank also sleeps for one. MindSpore's default is 3 to 5.
_PAUSES = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER")
# Above this number of ranks, keep MindSpore's pauses, which spare the scheduler.
_FEW_RANKS = 256
_SERVERS = "MS_SERVER_NUM"

# msrun starts this instead of the user's script, as its parser treats the script's arguments as its
# own. It becomes a rank wrapper, or exits as the scheduler, as there is one already.
_WRAPPER_SCRIPT = """\
from os import environ, execv
if environ.get("MS_ROLE") != "MS_SCHED":
    for name, value in %r.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    environ[%r] = environ["MS_NODE_ID"]
    execv(%r, %r)
"""


def dynamic_cluster(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return this node's ranks and parameter servers and, on the head, the scheduler.

    ``MS_SERVER_NUM`` is the number of parameter servers of the job, which run the script as well.
    """
    site = _without_rank_table(site)
    node = site.node
    ranks = range(node.node * node.slots, (node.node + 1) * node.slots)
    shared = cluster(site)
    wrappers = (
        rank_wrapper(
            site,
            rank,
            program(site, script_argv),
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
    servers = _parameter_servers(site, shared, script_argv)
    return Launch((*_scheduler(site, shared), *servers, *wrappers), node.nodes * node.slots)


def msrun(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return msrun for this node, which starts rank wrappers, and, on the head, the scheduler.

    msrun's own scheduler is not used: msrun starts it on each node that recognises the address of
    the head as its own, which can be none or several.
    """
    site = _without_rank_table(site)
    node = site.node
    shared = cluster(site)
    path = posixpath.join(site.paths.node_dir, "msrun-wrapper.py")
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
        # A rank that does not exist: the entry shows the log of each rank itself.
        "--tail_worker_log=%d" % ranks,
        "--join=True",
        "python3",
        path,
    )
    folder = posixpath.dirname(site.interpreter)
    old = site.environment.get("PATH", "")
    # Hide msrun's long warnings, and let it find python3 on PATH.
    changed = {"GLOG_v": "3", "PATH": f"{folder}:{old}" if folder and old else folder or old}
    restored = {name: site.environment.get(name) for name in changed}
    entry = (*site.entry, "--rank", "--", *program(site, script_argv))
    text = _WRAPPER_SCRIPT % (restored, names.CLOUDJOB_RANK, entry[0], entry)
    pauses = {name: shared[name] for name in _PAUSES if name in shared}
    env = {**site.environment, **pauses, **changed}
    return Launch(
        (*_scheduler(site, shared), Process("msrun", argv, env)),
        ranks,
        files=(File(path, PRIVATE, text),),
    )


def mpi(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return mpirun, whose ranks form the cluster, and the scheduler, both on the head.

    On GPU and Ascend, MindSpore uses Open MPI itself and needs neither cluster nor scheduler.
    """
    if site.node.mindspore.device_target not in ("", "CPU"):
        return mpirun.launch(site, script_argv)
    shared = {**cluster(site), "MS_ROLE": "MS_WORKER"}
    node = site.node
    carrying = site._replace(
        node=node._replace(env_names=(*node.env_names, *shared)),
        environment={**site.environment, **shared},
    )
    options = ("--mpi-cluster", "--address", "MS_SCHED_HOST")
    launch = mpirun.launch(carrying, script_argv, options)
    return launch._replace(processes=(*_scheduler(site, shared), *launch.processes))


def _without_rank_table(site: Site) -> Site:
    """Remove the platform's ``RANK_TABLE_FILE``, which is a folder with a table of another version.

    HCCL would read it instead of asking the scheduler's cluster; the user's own file stays.
    """
    name = names.RANK_TABLE_FILE
    value = site.environment.get(name, "")
    is_platforms = posixpath.join(value, "").startswith(posixpath.join(PLATFORM_FOLDER, ""))
    if name in site.node.env_names or not is_platforms:
        return site
    environment = {key: content for key, content in site.environment.items() if key != name}
    return site._replace(environment=environment)


def cluster(site: Site) -> dict[str, str]:
    """Return the variables of the scheduler and all ranks; the user's timeouts take precedence."""
    node = site.node
    ranks = node.nodes * node.slots
    is_quick = ranks <= _FEW_RANKS and not any(site.environment.get(name) for name in _PAUSES)
    return {
        "MS_WORKER_NUM": str(ranks),
        "RANK_SIZE": str(ranks),
        "MS_SCHED_HOST": site.own_address if node.is_head else node.hosts[0],
        "MS_SCHED_PORT": str(port(site, "MS_SCHED_PORT")),
        "MS_TOPO_TIMEOUT": site.environment.get("MS_TOPO_TIMEOUT")
        or "%d" % max(1, node.start_timeout_s),
        **(dict.fromkeys(_PAUSES, "1") if is_quick else {}),
    }


def _parameter_servers(
    site: Site, shared: Mapping[str, str], script_argv: Sequence[str]
) -> Iterator[Process]:
    """Yield this node's share of the parameter servers, which are assigned to the nodes in turn."""
    text = site.environment.get(_SERVERS) or "0"
    if not (text.isdecimal() and text.isascii() and len(text) < 6):
        raise ArgsError([f"{_SERVERS}={text[:80]!r} is not a number of parameter servers"])
    env = {**site.environment, **shared, "MS_ROLE": "MS_PSERVER", "PYTHONUNBUFFERED": "1"}
    argv = (*site.under_interpreter, "--parameter-server", *program(site, script_argv))
    for index in range(site.node.node, int(text), site.node.nodes):
        yield Process("parameter server %d" % index, argv, env, is_server=True)


def _scheduler(site: Site, shared: Mapping[str, str]) -> tuple[Process, ...]:
    if not site.node.is_head:
        return ()
    env = {**site.environment, **shared, "MS_ROLE": "MS_SCHED"}
    # Hide its warning about every attempt to register.
    env.setdefault("GLOG_v", "3")
    argv = (*site.under_interpreter, "--scheduler")
    return (Process("scheduler", argv, env, is_server=True),)
