"""The variables of ModelArts' first version, for scripts that read no others. No I/O."""

from __future__ import annotations

from typing import Mapping, Sequence

from jobentry.contract.names import BATCH_CURRENT_HOST, DLS_TASK_INDEX

# The documented port of the other nodes.
_PORT = 6666
_ADDRESSES = {"data_url": "DLS_DATA_URL", "train_url": "DLS_TRAIN_URL"}


def variables(node: int, hosts: Sequence[str], addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one node; its ``VK_TASK_INDEX`` is always set.

    Args:
        addresses: The URIs of inputs and outputs by their names.
    """
    found = {DLS_TASK_INDEX: str(node), "DLS_TASK_NUMBER": str(len(hosts))}
    found.update({f"BATCH_CUSTOM{at}_HOSTS": f"{host}:{_PORT}" for at, host in enumerate(hosts)})
    found[BATCH_CURRENT_HOST] = f"{hosts[node]}:{_PORT}"
    for name, variable in _ADDRESSES.items():
        if name in addresses:
            found[variable] = addresses[name]
    return found
