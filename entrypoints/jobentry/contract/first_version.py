"""The variables of ModelArts' first version, for scripts that read no others. No I/O."""

from __future__ import annotations

from typing import Mapping, Sequence

from jobentry.contract.names import BATCH_CURRENT_HOST, DLS_TASK_INDEX

# The documented port of the other nodes.
_PORT = 6666
_ADDRESSES = {"data_url": "DLS_DATA_URL", "train_url": "DLS_TRAIN_URL"}
_CACHE_HOME = "CACHE_HOME"
# A variable of the second version -> its name in the first one.
_OTHER_NAMES = {
    "ACCESS_KEY_ID": "USER_AWS_ACCESS_KEY_ID",
    "SECRET_ACCESS_KEY": "USER_AWS_SECRET_ACCESS_KEY",
    "SECURITY_TOKEN": "USER_AWS_SESSION_TOKEN",
    "S3_ENDPOINT": "USER_S3_ENDPOINT",
    "S3_USE_HTTPS": "USER_S3_USE_HTTPS",
    "S3_VERIFY_SSL": "USER_S3_VERIFY_SSL",
}


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the local cache and the access to OBS, from variables of the second version."""
    values = {new: environ[name] for name, new in _OTHER_NAMES.items() if environ.get(name)}
    values["DLS_LOCAL_CACHE_PATH"] = environ.get(_CACHE_HOME) or "/cache"
    return values


def variables(node: int, hosts: Sequence[str], addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one node; its ``VK_TASK_INDEX`` is always set.

    Args:
        addresses: The URIs of inputs and outputs by their names.
    """
    values = {DLS_TASK_INDEX: str(node), "DLS_TASK_NUMBER": str(len(hosts))}
    values.update({f"BATCH_CUSTOM{at}_HOSTS": f"{host}:{_PORT}" for at, host in enumerate(hosts)})
    values[BATCH_CURRENT_HOST] = f"{hosts[node]}:{_PORT}"
    for name, variable in _ADDRESSES.items():
        if name in addresses:
            values[variable] = addresses[name]
    return values
