"""torchrun on every node; it starts a rank wrapper for each rank."""

from __future__ import annotations

from typing import Sequence

from jobentry.launchers.common import Launch, Process, Site, port, program


def launch(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return torchrun for this node; the rendezvous is on the head."""
    node = site.node
    argv = (
        site.interpreter,
        "-m",
        "torch.distributed.run",
        "--nnodes=%d" % node.nodes,
        "--nproc-per-node=%d" % node.slots,
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=%s:%d" % (node.hosts[0], port(site)),
        "--rdzv-id=" + node.job,
        # torchrun may fail to recognise the head by its host name.
        "--rdzv-conf=is_host=%d" % node.is_head,
        "--local-addr=" + site.own_address,
        "--no-python",
        *site.entry,
        "--rank",
        "--",
        *program(site, script_argv),
    )
    env = dict(site.environment)
    if node.slots > 1:
        # torchrun's own default, which it sets with a dozen lines of warning.
        env.setdefault("OMP_NUM_THREADS", "1")
    return Launch((Process("torchrun", argv, env),), node.nodes * node.slots)
