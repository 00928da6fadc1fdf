"""One process for each device, with a rank table of all devices, as MindSpore needs it on Ascend.

The table comes from the platform, in its own form 0.1 or in MindSpore's 1.0 or 1.2, or from the
job's list of devices. Ranks are numbered by node, then by device.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any, Mapping, NamedTuple, Sequence

from jobentry.contract import devices, names
from jobentry.contract.devices import Device, Server
from jobentry.launchers.common import PRIVATE, ArgsError, File, Launch, Site, program, rank_wrapper

COMPLETED = "completed"
# Where ModelArts puts its table; its RANK_TABLE_FILE is this folder.
PLATFORM_FOLDER = "/user/config"


class Table(NamedTuple):
    """A rank table.

    Args:
        text: The table in MindSpore's form.
        nodes: For each node, its devices with their ranks.
    """

    text: str
    nodes: tuple[tuple[tuple[int, Device], ...], ...]
    notes: tuple[str, ...] = ()


def launch(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return a rank for each device of this node.

    Raises:
        ArgsError: There is no table, or it does not match the job's nodes and ranks.
    """
    node = site.node
    if node.mindspore.devices:
        table = from_servers([devices.parse(line) for line in node.mindspore.devices])
    elif site.rank_table:
        table = from_text(site.rank_table)
    else:
        raise ArgsError(["there is no rank table, and mindspore.devices lists no devices"])
    counts = [len(node_devices) for node_devices in table.nodes]
    if counts != [node.slots] * node.nodes:
        listed = ", ".join(str(count) for count in counts[:8])
        raise ArgsError(
            [
                "the rank table (nodes: %d, devices per node: %s) does not match the job"
                " (--nodes %d, --procs-per-node %d)" % (len(counts), listed, node.nodes, node.slots)
            ]
        )
    path = posixpath.join(site.paths.node_dir, "rank-table.json")
    processes = tuple(
        rank_wrapper(
            site,
            rank,
            program(site, script_argv),
            {
                names.RANK_TABLE_FILE: path,
                "RANK_ID": str(rank),
                "RANK_SIZE": str(sum(counts)),
                "DEVICE_ID": device.id,
                "ASCEND_DEVICE_ID": device.id,
                "JOB_ID": site.environment.get("JOB_ID", node.job),
            },
        )
        for rank, device in table.nodes[node.node]
    )
    return Launch(
        processes, sum(counts), files=(File(path, PRIVATE, table.text),), notes=table.notes
    )


def from_text(text: str) -> Table:
    """Parse the platform's rank table.

    Raises:
        ArgsError: It has none of the known forms.
    """
    try:
        value = json.loads(text)
        if "server_list" in value:
            return Table(text, _ranked(value["server_list"]))
        return from_servers(_servers(value["group_list"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"the platform's rank table cannot be read: {type(error).__name__} {error}"
        raise ArgsError([problem]) from None


def from_servers(servers: Sequence[Server]) -> Table:
    """Return a table of the nodes in their order: version 1.2 for super pods, otherwise 1.0."""
    nodes = []
    listed: dict[str, list[dict[str, str]]] = {}
    rank = 0
    for server in servers:
        node_devices = []
        for device in server.devices:
            entry = {"device_id": device.id, "device_ip": device.address, "rank_id": str(rank)}
            if device.super_id:
                entry["super_device_id"] = device.super_id
            listed.setdefault(server.id, []).append(entry)
            node_devices.append((rank, device))
            rank += 1
        nodes.append(tuple(node_devices))
    pods: dict[str, list[dict[str, str]]] = {}
    for name, pod in {server.id: server.super_pod for server in servers}.items():
        pods.setdefault(pod, []).append({"server_id": name})
    table: dict[str, Any] = {
        "status": COMPLETED,
        "version": "1.0",
        "server_count": str(len(listed)),
        "server_list": [{"server_id": name, "device": members} for name, members in listed.items()],
    }
    if all(pods):
        table["version"] = "1.2"
        table["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": members} for pod, members in pods.items()
        ]
    elif any(pods):
        raise ArgsError(["some nodes name a super pod, and some do not"])
    notes: tuple[str, ...] = ()
    if list(listed) != sorted(listed):
        notes = (
            "ranks follow the order of the nodes, whose servers are not sorted by name, as the"
            " documentation of MindSpore asks for",
        )
    return Table(json.dumps(table, indent=1), tuple(nodes), notes)


def placeholder(hosts: Sequence[str], slots: int) -> str:
    """Return a table with ``?`` for the addresses, which only the platform knows, for a dry run."""
    unknown_devices = tuple(Device(str(index), "?") for index in range(slots))
    return from_servers([Server(host, unknown_devices) for host in hosts]).text


def _servers(groups: Sequence[Mapping[str, Any]]) -> list[Server]:
    """Return the nodes of a table in the platform's form 0.1, in the order of its pods."""
    instances = [instance for group in groups for instance in group["instance_list"]]
    instances.sort(key=lambda instance: int(instance["pod_name"].rpartition("-")[2]))
    return [
        Server(
            instance["server_id"],
            tuple(
                Device(device["device_id"], device["device_ip"], device.get("super_device_id", ""))
                for device in instance["devices"]
            ),
            instance.get("super_pod_id", ""),
        )
        for instance in instances
    ]


def _ranked(
    servers: Sequence[Mapping[str, Any]],
) -> tuple[tuple[tuple[int, Device], ...], ...]:
    """Return the devices of each node from a table that contains ranks."""
    nodes = [
        tuple(
            sorted(
                (int(device["rank_id"]), Device(device["device_id"], device.get("device_ip", "")))
                for device in server["device"]
            )
        )
        for server in servers
    ]
    return tuple(sorted(nodes))
