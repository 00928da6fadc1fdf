"""Slurm's srun on the head; it starts the rank wrappers on all nodes and provides PMIx for MPI."""

from __future__ import annotations

from typing import Sequence

from jobentry.contract import env, names
from jobentry.launchers.common import Launch, Process, Site, program


def launch(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return srun on the head, in the allocation named by ``SLURM_JOB_ID``."""
    node = site.node
    ranks = node.slots * node.nodes
    if not node.is_head:
        return Launch((), ranks, is_everywhere=False)
    # The node's folder has the same path on all nodes; the rank wrapper finds the rest there.
    carried = [names.CLOUDJOB_NODE_DIR]
    carried += sorted(
        name for name in site.environment if env.is_carried(name, node) and env.is_name(name)
    )
    argv = (
        "srun",
        "--nodes=%d" % node.nodes,
        "--ntasks=%d" % ranks,
        "--ntasks-per-node=%d" % node.slots,
        "--distribution=block",
        # The step shares its processors with that of the entries.
        "--overlap",
        "--mpi=pmix",
        # Names only, as other users could read values in argv.
        "--export=" + ",".join(carried),
        "--input=none",
        "--quiet",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--chdir=/",
        *site.entry,
        "--rank",
        "--",
        *program(site, script_argv),
    )
    env_without_secrets = {
        name: value for name, value in site.environment.items() if name not in node.secret_names
    }
    return Launch((Process("srun", argv, env_without_secrets),), ranks, is_everywhere=False)
