"""Nodes as containers of the docker backend, and requests to the container engine."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

from cloudjob import installation
from cloudjob.backends.docker import engine
from cloudjob.backends.docker import request as requests
from cloudjob.backends.docker.backend import DockerBackend
from cloudjob.emulator import node_plan
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import HOME
from cloudjob.emulator.node_plan import NodeContext
from cloudjob.emulator.nodes import ImageMissing, NewKeys, NodeState, folder
from cloudjob.emulator.settings import Settings
from cloudjob.errors import BackendError, JobNotFound
from cloudjob.model.times import seconds_of
from jobentry.contract.sigv4 import Keys

# The network that is created if the engine has no bridge.
BRIDGE = "cloudjob-emulator"
# Folders that saved images leave out, besides .cloudjob, where cloudjob's entry stores variables.
_TEMPORARY = ("run/", "tmp/", "dev/", "proc/", "sys/")


class DockerRuntime:
    """Nodes as containers of the engine."""

    kind = "docker"
    note = ""

    def __init__(
        self, home: Path, settings: Settings, new_keys: NewKeys, endpoint: str, api: str
    ) -> None:
        self._backend = DockerBackend(home, {})
        self._client = engine.connect()
        self._settings = settings
        self._new_keys = new_keys
        self._context = NodeContext(
            root="",
            python="python3",
            entry=("/opt/cloudjob/boot.sh",),
            endpoint=endpoint,
            api=api,
            first_version=settings.first_version,
        )
        # Any image must work, so the packages that the platform would install are mounted.
        archive = str(installation.ENTRY)
        self._archive = {
            "Type": "bind",
            "Source": archive,
            "Target": self._context.archive,
            "ReadOnly": True,
        }

    def check_image(self, image: str) -> None:
        """Check that the engine has the image; nothing is pulled."""
        check_image(image)

    def tags(self, repository: str) -> list[str] | None:
        """Return the tags of a repository that the engine has."""
        with engine.translate_errors(f"listing the images {repository}"):
            images = self._client.images(name=repository)
        names = [name for image in images for name in image.get("RepoTags") or ()]
        return sorted(name.rpartition(":")[2] for name in names)

    def restart(self, handle: str) -> bool:
        """Start the containers again."""
        self._backend.restart(handle)
        return True

    def handle(self, key: str) -> str:
        """Return the handle of an attempt, whether it was started or not."""
        return f"docker://local/{key}"

    def start(self, row: JobRow, key: str, nodes: Path, image: str) -> str:
        """Start all nodes and return the handle; remove leftovers of an interrupted start first."""
        handle = self.handle(key)
        containers = self._backend.nodes(handle)
        if len(containers) == row.nodes and all(item.started_at for item in containers):
            return handle
        self._backend.remove(handle)
        return self._backend.send(self._request(row, key, nodes, image))

    def _request(self, row: JobRow, key: str, nodes: Path, image: str) -> requests.DockerRequest:
        labels = {
            requests.JOB_LABEL: key,
            requests.OWNER_LABEL: self._backend.owner(),
            requests.GRACE_LABEL: repr(self._settings.grace_s),
            requests.MEMORY_LABEL: "0.0",
        }
        is_led = node_plan.is_led_by_entry(row)
        keys = self._new_keys(row.user_name)
        return requests.DockerRequest(
            job=key,
            image=image,
            network=requests.network_of(key, labels),
            nodes=tuple(
                self._node(row, index, nodes, image, labels, keys) for index in range(row.nodes)
            ),
            written=(str(nodes),),
            read=(),
            outputs=(),
            has_key=is_led and row.nodes > 1,
            secret_names=(),
            has_entry=is_led,
            aliases=tuple(node_plan.aliases(row, index) for index in range(row.nodes)),
        )

    def _node(
        self,
        row: JobRow,
        index: int,
        nodes: Path,
        image: str,
        labels: Mapping[str, str],
        keys: Keys,
    ) -> requests.ContainerRequest:
        network = requests.network_name(labels[requests.JOB_LABEL])
        unknown = requests.UNKNOWN_ADDRESS
        context = self._context
        env = {
            **requests.OPEN_MPI,
            **node_plan.environment(row, index, unknown, context, self._settings, keys),
        }
        if node_plan.is_led_by_entry(row) and row.nodes > 1:
            env["CLOUDJOB_SSH_KEY"] = requests.SSH_KEY
        host = node_plan.names(row)[index]
        short, _, domain = host.partition(".")
        config = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", node_plan.becoming("0")],
            "Cmd": [node_plan.start(row, index, context)],
            "User": f"{requests.USER_ID}:{requests.GROUP_ID}",
            "WorkingDir": HOME,
            "StopSignal": "SIGTERM",
            "Hostname": short,
            "Domainname": domain,
            "Env": [f"{name}={value}" for name, value in sorted(env.items())],
            "Labels": {
                **labels,
                requests.NODE_LABEL: str(index),
                requests.NAME_LABEL: short,
            },
            "HostConfig": {
                "NetworkMode": network,
                "ShmSize": 1 << 30,
                **requests.OF_NODES,
                "Mounts": [
                    self._archive,
                    *self._config(row, index, nodes),
                    *(
                        {
                            "Type": "bind",
                            "Source": str(folder(nodes, index, path)),
                            "Target": target,
                        }
                        for target, path in node_plan.mounts(row).items()
                    ),
                ],
            },
            "NetworkingConfig": {
                "EndpointsConfig": {network: {"Aliases": list(node_plan.aliases(row, index))}}
            },
        }
        return requests.ContainerRequest(name=short, host=host, config=config, env={})

    def _config(self, row: JobRow, index: int, nodes: Path) -> list[dict[str, Any]]:
        """Return the mount of the rank table, which the emulator writes once the nodes run."""
        if not node_plan.has_rank_table(row, self._settings):
            return []
        source = str(folder(nodes, index, node_plan.CONFIG))
        target = node_plan.CONFIG
        return [{"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}]

    def states(self, handle: str, count: int) -> list[NodeState]:
        """Return the state of each node.

        Raises:
            JobNotFound: They were never started, or are gone.
        """
        nodes = self._backend.nodes(handle)
        if not nodes:
            raise JobNotFound(f"looking for {handle}: the engine does not know it")
        by_index = {item.node: item for item in nodes}
        states = []
        for index in range(count):
            item = by_index.get(index)
            if item is None:
                states.append(NodeState(exit_code=137, note="its container was removed"))
                continue
            states.append(
                NodeState(
                    seconds_of(item.started_at),
                    0.0 if item.is_alive else seconds_of(item.ended_at),
                    None if item.is_alive else item.exit_code,
                    "out of memory" if item.is_out_of_memory else item.error,
                )
            )
        return states

    def addresses(self, handle: str, count: int) -> list[str]:
        """Return the address of each node; empty for one whose container is gone."""
        address_of = dict.fromkeys(range(count), "")
        with engine.translate_errors("asking the engine for the addresses of nodes"):
            for item in self._backend.nodes(handle):
                networks = self._client.inspect_container(item.id)["NetworkSettings"]["Networks"]
                address_of[item.node] = (
                    next(iter(networks.values()))["IPAddress"] if networks else ""
                )
        return list(address_of.values())[:count]

    def logs(self, handle: str) -> Iterator[tuple[int, bytes]]:
        """Yield the output of each node, from the start, until all nodes have ended."""
        return self._backend.logs(handle, None, follow=True)

    def stop(self, handle: str, *, is_urgent: bool) -> None:
        """Send all nodes SIGTERM; with ``is_urgent`` SIGKILL."""
        self._backend.signal(handle, "SIGKILL" if is_urgent else "SIGTERM")

    def end_node(self, handle: str, index: int) -> None:
        """End one node as if its power had failed."""
        self._backend.signal(handle, "SIGKILL", index)

    def usage(self, handle: str, count: int) -> list[tuple[float, float]]:
        """Return processor and memory of each node in percent; -1 for unknown."""
        node_of = {item.node: item for item in self._backend.nodes(handle)}
        return [
            _usage_of(self._client, node_of[index].id)
            if index in node_of and node_of[index].is_alive
            else (-1.0, -1.0)
            for index in range(count)
        ]

    def remove(self, handle: str) -> None:
        """Remove everything of an attempt."""
        self._backend.remove(handle)

    def save_image(self, handle: str, index: int, scratch: Path, image: str) -> None:
        """Store the files of a running node as an image with the settings of the node's image.

        A commit would keep the job's variables, and so its keys. Files that are mounted or
        temporary, and the key for ssh, are not part of the image.

        Raises:
            BackendError: The container is gone, or the engine refuses.
        """
        with (
            engine.translate_errors(f"saving the image {image}"),
            TemporaryFile(dir=scratch) as file,
        ):
            node = next((item for item in self._backend.nodes(handle) if item.node == index), None)
            if node is None:
                raise BackendError(f"saving the image {image}: the container was removed")
            base = self._client.inspect_container(node.id)["Image"]
            _copy_permanent(self._client.export(node.id), file)
            file.seek(0)
            repository, _, tag = image.rpartition(":")
            config = self._client.inspect_image(base)["Config"]
            done = self._client.import_image(
                file, repository=repository, tag=tag, changes=_changes(config)
            )
            if "error" in done:
                raise BackendError(f"saving the image {image}: {done}")


def gateway() -> str:
    """Return the host under which every container reaches this machine; empty for none.

    This is the address of the engine's bridge, which is created if there is none; other machines
    cannot reach it. On systems other than Linux, containers run in a virtual machine with a host
    name for the loopback interface of this machine.

    Raises:
        BackendError: There is no engine, or it refuses.
    """
    client = engine.connect()
    with engine.translate_errors("asking the engine for its bridge"):
        networks = client.networks(names=["bridge", BRIDGE])
    if sys.platform != "linux":
        return "host.docker.internal"
    bridges = sorted(item["Name"] for item in networks if item["Name"] in ("bridge", BRIDGE))
    return bridge_address(inspected(client, bridges[0] if bridges else BRIDGE))


def inspected(client: Any, name: str) -> Any:
    """Return a network of the engine; create it unless it exists."""
    with engine.translate_errors(f"creating the network {name}"):
        if not any(item["Name"] == name for item in client.networks(names=[name])):
            client.create_network(name, driver="bridge", check_duplicate=True)
        return client.inspect_network(name)


def bridge_address(network: Mapping[str, Any]) -> str:
    """Return the address that a bridge of the engine has on this machine; empty for none.

    A newly installed engine reports none; its bridge then has the first address of its subnet.
    """
    pools = network["IPAM"]["Config"] or [{}]
    if pools[0].get("Gateway"):
        return str(pools[0]["Gateway"])
    return str(ip_network(pools[0]["Subnet"])[1]) if pools[0].get("Subnet") else ""


def check_image(image: str) -> None:
    """Check that the engine has an image.

    Raises:
        ImageMissing: The engine does not have it.
        BackendError: There is no engine.
    """
    client = engine.connect()
    try:
        with engine.translate_errors(f"looking for the image {image}"):
            client.inspect_image(image)
    except BackendError as error:
        if engine.status_code(error) == engine.NOT_FOUND:
            raise ImageMissing(image) from error
        raise


def _copy_permanent(archive: Iterator[bytes], target: Any) -> None:
    """Copy the tar archive of a container without temporary files and files of the entry."""
    source = SimpleNamespace(read=lambda _size: next(archive, b""))
    with (
        tarfile.open(fileobj=source, mode="r|") as whole,
        tarfile.open(fileobj=target, mode="w") as kept,
    ):
        for item in whole:
            if not item.name.startswith(_TEMPORARY) and "/.cloudjob/" not in item.name:
                kept.addfile(item, whole.extractfile(item) if item.isreg() else None)


def _changes(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of an image as lines of a Dockerfile."""
    lines = []
    for variable in config.get("Env") or ():
        name, _, value = variable.partition("=")
        for special in '\\"$':
            value = value.replace(special, "\\" + special)
        lines.append(f'ENV {name}="{value}"')
    for name, key in (("ENTRYPOINT", "Entrypoint"), ("CMD", "Cmd")):
        if config.get(key):
            lines.append(f"{name} {json.dumps(config[key])}")
    for name, key in (("USER", "User"), ("WORKDIR", "WorkingDir")):
        if config.get(key):
            lines.append(f"{name} {config[key]}")
    return lines


def _usage_of(client: Any, container: str) -> tuple[float, float]:
    """Return processor and memory usage of a container, in percent, as the engine measures it."""
    try:
        with engine.translate_errors("asking what a node uses"):
            stats = client.stats(container, stream=False)
    except BackendError:
        return -1.0, -1.0
    cpu, before = stats["cpu_stats"], stats["precpu_stats"]
    span = cpu.get("system_cpu_usage", 0) - before.get("system_cpu_usage", 0)
    used = cpu["cpu_usage"]["total_usage"] - before["cpu_usage"]["total_usage"]
    memory = stats.get("memory_stats") or {}
    share = memory.get("usage", 0) / memory["limit"] * 100 if memory.get("limit") else -1.0
    return round(used / span * 100 if span > 0 else 0.0, 2), round(share, 2)
