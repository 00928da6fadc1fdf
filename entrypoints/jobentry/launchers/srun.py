"""Slurm's srun on the head, which starts our doors on all nodes; its PMIx is what MPI meets at."""

from __future__ import annotations

from typing import Sequence

from jobentry.contract import env, names
from jobentry.launchers.common import Launch, Process, Site, program


def launch(site: Site, words: Sequence[str]) -> Launch:
    """Return srun on the head; it takes the allocation from ``SLURM_JOB_ID``."""
    node = site.node
    ranks = node.slots * node.nodes
    if not node.is_head:
        return Launch((), ranks, is_everywhere=False)
    # The node's own folder is under the same path everywhere; there its door finds all the rest.
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
        # Beside the entries, which have the same processors.
        "--overlap",
        "--mpi=pmix",
        # By their names: a value in argv could be read by anybody.
        "--export=" + ",".join(carried),
        "--input=none",
        "--quiet",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--chdir=/",
        *site.entry,
        "--rank",
        "--",
        *program(site, words),
    )
    told = {
        name: value for name, value in site.environment.items() if name not in node.secret_names
    }
    return Launch((Process("srun", argv, told),), ranks, is_everywhere=False)
