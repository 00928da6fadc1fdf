"""The machines that stand in for the nodes of a job: processes or containers of the backends.

Both kinds have the same methods. ``key`` names one attempt at a job, ``handle`` its machines.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeAlias

import cloudjob
from cloudjob.emulator import node_plan
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import HOME
from cloudjob.emulator.node_plan import Machine
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import run_dir_of
from cloudjob.errors import BackendError, JobNotFound
from cloudjob.times import seconds_of
from jobentry.contract.paths import ENTRY
from jobentry.contract.sigv4 import Keys

# Of an engine without a bridge of its own.
BRIDGE = "cloudjob-emulator"
# Returns the temporary keys of a job of the user of this name.
NewKeys: TypeAlias = Callable[[str], Keys]


def folder(nodes: Path, index: int, path: str) -> Path:
    """Return where a path of node ``index`` lies on this machine.

    Args:
        nodes: The folder of the job's nodes.
    """
    return Path(node_plan.on_machine(str(nodes / str(index)), path))


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a node.

    Args:
        exit_code: None while it runs.
        note: Why it ended, if only its machine knows that.
    """

    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None
    note: str = ""


class ImageMissing(Exception):
    """The image of a job is not available."""


# -- processes ------------------------------------------------------------------------------------


class ProcessMachines:
    """Nodes as groups of processes on this machine."""

    kind = "process"

    def __init__(
        self, home: Path, settings: Settings, new_keys: NewKeys, endpoint: str, api: str
    ) -> None:
        from cloudjob.backends.process import isolation
        from cloudjob.backends.process.backend import ProcessBackend, machine_of, need_linux

        need_linux()
        # It forks, so it is asked while there is one thread.
        self._level = isolation.possible_level()
        self.note = (
            ""
            if self._level == "files"
            else "nodes share the files of this machine, which does not allow mount namespaces"
        )
        options = {"python": settings.python} if settings.python else {}
        self._backend = ProcessBackend(home, options)
        self._home = home
        self._settings = settings
        self._new_keys = new_keys
        self._endpoint, self._api = endpoint, api
        self._machine = machine_of(options, home)
        self._used: dict[str, tuple[float, float]] = {}

    def check_image(self, image: str) -> None:
        """Accept any image: nodes use the tools of this machine instead."""

    def tags(self, repository: str) -> list[str] | None:
        """Return None: any tag will do."""
        return None

    def restart(self, handle: str) -> bool:
        """Return False: a new attempt in the same folders is as good."""
        return False

    def handle(self, key: str) -> str:
        """Return the handle of an attempt, whether it was started or not."""
        return f"process://local/{key}"

    def start(self, row: JobRow, key: str, nodes: Path, image: str) -> str:
        """Start all nodes and return the handle; starting what runs already changes nothing."""
        handle = self.handle(key)
        with contextlib.suppress(JobNotFound):
            self.states(handle, row.nodes)
            return handle
        # Remove what an interrupted start has left.
        shutil.rmtree(self._home / "process" / key, ignore_errors=True)
        return self._backend.send(self._request(row, key, nodes))

    def _machine_of(self, nodes: Path, index: int) -> Machine:
        machine = self._machine
        return Machine(
            root="" if self._level == "files" else str(nodes / str(index)),
            python=machine.python,
            entry=(machine.entry_python, "-I", "-S", machine.entry),
            endpoint=self._endpoint,
            api=self._api,
            archive=machine.entry,
        )

    def _request(self, row: JobRow, key: str, nodes: Path) -> Any:
        from cloudjob.backends.process.backend import ProcessRequest, address_of

        run_dir = run_dir_of(key)
        shutil.rmtree(run_dir, ignore_errors=True)
        keys = self._new_keys(row.user_name)
        made = [self._node(row, index, key, nodes, keys) for index in range(row.nodes)]
        return ProcessRequest(
            job=key,
            folder=str(self._home / "process" / key),
            run_dir=run_dir,
            hosts=f"{run_dir}/hosts" if self._level != "none" else "",
            hosts_text="".join(
                f"{address_of(index)} {' '.join(node_plan.aliases(row, index))}\n"
                for index in range(row.nodes)
            ),
            argv=("/bin/sh", "-c", 'eval "$CLOUDJOB_EMULATOR_COMMAND"'),
            retries=0,
            grace_s=self._settings.grace_s,
            nodes=tuple(made),
            secret_names=(),
            is_led=node_plan.is_led_by_entry(row),
            keeps_homes=True,
            python=self._machine.python,
        )

    def _node(self, row: JobRow, index: int, key: str, nodes: Path, keys: Keys) -> Any:
        from cloudjob.backends import interpreters
        from cloudjob.backends.process import backend
        from cloudjob.backends.process.isolation import RUN_DIR
        from cloudjob.backends.process.node import NodeRequest

        machine = self._machine_of(nodes, index)
        own = self._machine
        has_files = self._level == "files"
        run_dir = run_dir_of(key)
        # The same folder, as the node sees it.
        run = RUN_DIR if has_files else run_dir
        address = backend.address_of(index)
        # A preset starts `python`, and needs the programs beside it, such as mpirun.
        path = f"{Path(own.python).parent}:{own.path}"
        libmpi = interpreters.libmpi_of(shutil.which("mpirun", path=path) or "", own.python)
        env = {
            "PATH": path,
            "LANG": "C.UTF-8",
            "TMPDIR": f"{run_dir}/{index}",
            **(backend.variables_of_own_files(path) if has_files else {}),
            **own.devices,
            **backend.open_mpi_of_one_machine(is_isolated=self._level != "none"),
            "CLOUDJOB_NODE_DIR": f"{run}/{index}/node",
            # A fixed port would be shared by all jobs of this machine.
            "CLOUDJOB_CONTROL_DIR": run,
            "CLOUDJOB_SSH_KEY": f"{run}/{backend.KEY}",
            **node_plan.environment(row, index, address, machine, self._settings, keys),
        }
        if own.library_path:
            env.setdefault("LD_LIBRARY_PATH", own.library_path)
        if libmpi:
            env.setdefault("MPI4PY_LIBMPI", libmpi)
        env["CLOUDJOB_EMULATOR_COMMAND"] = (
            f"unset CLOUDJOB_EMULATOR_COMMAND; {node_plan.start(row, index, machine)}"
        )
        return NodeRequest(
            host=node_plan.names(row)[index],
            env=env,
            home=str(folder(nodes, index, HOME)),
            tmp=f"{run_dir}/{index}",
            log=str(self._home / "process" / key / f"node-{index}.log"),
            protected=backend.protected_in(own, str(nodes / str(index) / "python"))
            if has_files
            else (),
            mounts=self._mounts(row, index, nodes, f"{run_dir}/{index}", env) if has_files else (),
        )

    def _mounts(
        self, row: JobRow, index: int, nodes: Path, tmp: str, env: Mapping[str, str]
    ) -> Any:
        from cloudjob.backends.process import backend
        from cloudjob.backends.process.isolation import TMP, named_in

        own = self._machine
        texts = (own.path, own.library_path, own.python, own.entry_python, own.entry, *own.places)
        home, cache, work = (
            str(folder(nodes, index, name)) for name in (HOME, node_plan.CACHE, node_plan.WORK)
        )
        channels = {node_plan.normal(item.path) for item in node_plan.folders(row)}
        return (
            *backend.mounts_of(home, cache, work, tmp, texts),
            # What a job names below /home/ma-user is the node's; below /tmp it may be a test's.
            *named_in(env.values(), [TMP]),
            *(
                (str(folder(nodes, index, item)), item)
                for item in sorted(channels)
                if not item.startswith((f"{HOME}/", f"{node_plan.CACHE}/", f"{node_plan.WORK}/"))
            ),
        )

    def states(self, handle: str, count: int) -> list[NodeState]:
        """Return the state of each node.

        Raises:
            JobNotFound: They were never started, or are gone.
        """
        has_ended, nodes = self._backend.nodes(handle)
        if has_ended and not any(node["process"] for node in nodes):
            # We were killed while we started it, so its controller gave up.
            raise JobNotFound(f"looking for {handle}: its nodes were never started")
        found = [
            NodeState(
                node["started_at"] or 0.0,
                node["ended_at"] or (time.time() if has_ended else 0.0),
                # A controller that was killed has taken its nodes with it.
                137 if has_ended and node["exit_code"] is None else node["exit_code"],
            )
            for node in nodes
        ]
        return found or [NodeState(exit_code=137 if has_ended else None)] * count

    def logs(self, handle: str) -> Iterator[tuple[int, bytes]]:
        """Yield what each node writes, from the beginning, until all have ended."""
        return self._backend.logs(handle, None, follow=True)

    def stop(self, handle: str, *, is_urgent: bool) -> None:
        """Ask all nodes to end; with ``is_urgent`` kill them."""
        with contextlib.suppress(JobNotFound):
            self._backend.cancel(handle, is_urgent=is_urgent)

    def end_node(self, handle: str, index: int) -> None:
        """End one node as if its power had failed."""
        self._backend.end_node(handle, index)

    def usage(self, handle: str, count: int) -> list[tuple[float, float]]:
        """Return processor and memory of each node in percent; -1 for unknown."""
        from cloudjob.emulator import node_metrics

        try:
            _, nodes = self._backend.nodes(handle)
        except JobNotFound:
            return [(-1.0, -1.0)] * count
        return [
            node_metrics.of_process(node["process"], f"{handle}/{index}", self._used)
            for index, node in enumerate(nodes)
        ]

    def remove(self, handle: str) -> None:
        """Remove everything of an attempt."""
        self._backend.remove(handle)
        # Its controller removes it, unless we were killed while we started it.
        shutil.rmtree(run_dir_of(handle.rpartition("/")[2]), ignore_errors=True)


# -- containers -----------------------------------------------------------------------------------


class DockerMachines:
    """Nodes as containers of the engine."""

    kind = "docker"
    note = ""

    def __init__(
        self, home: Path, settings: Settings, new_keys: NewKeys, endpoint: str, api: str
    ) -> None:
        from cloudjob.backends.docker import engine
        from cloudjob.backends.docker.backend import DockerBackend

        self._backend = DockerBackend(home, {})
        self._client = engine.connect()
        self._settings = settings
        self._new_keys = new_keys
        self._machine = Machine(
            root="",
            python="python3",
            entry=("/opt/cloudjob/boot.sh",),
            endpoint=endpoint,
            api=api,
        )
        # Any image will do, so the packages that we emulate come from outside.
        archive = str(Path(cloudjob.__file__).parent / ENTRY)
        self._archive = {
            "Type": "bind",
            "Source": archive,
            "Target": self._machine.archive,
            "ReadOnly": True,
        }

    def check_image(self, image: str) -> None:
        """Look for the image in the engine; nothing is pulled."""
        check_image(image)

    def tags(self, repository: str) -> list[str] | None:
        """Return what the engine has."""
        from cloudjob.backends.docker import engine

        with engine.translated(f"listing the images {repository}"):
            found = self._client.images(name=repository)
        names = [name for image in found for name in image.get("RepoTags") or ()]
        return sorted(name.rpartition(":")[2] for name in names)

    def restart(self, handle: str) -> bool:
        """Start the containers again."""
        self._backend.restart(handle)
        return True

    def handle(self, key: str) -> str:
        """Return the handle of an attempt, whether it was started or not."""
        return f"docker://local/{key}"

    def start(self, row: JobRow, key: str, nodes: Path, image: str) -> str:
        """Start all nodes and return the handle; remove what an interrupted start has left."""
        handle = self.handle(key)
        found = self._backend.nodes(handle)
        if len(found) == row.nodes and all(item.started_at for item in found):
            return handle
        self._backend.remove(handle)
        return self._backend.send(self._request(row, key, nodes, image))

    def _request(self, row: JobRow, key: str, nodes: Path, image: str) -> Any:
        from cloudjob.backends.docker import request as requests

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
            network={
                "Name": _network(key),
                "Driver": "bridge",
                "Labels": labels,
                "CheckDuplicate": True,
            },
            nodes=tuple(
                self._node(row, index, nodes, image, labels, keys) for index in range(row.nodes)
            ),
            folder=str(nodes),
            outputs=(),
            layers=(),
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
    ) -> Any:
        from cloudjob.backends.docker import request as requests

        network = _network(labels[requests.JOB_LABEL])
        unknown = requests.UNKNOWN_ADDRESS
        machine = self._machine
        env = {
            **requests.OPEN_MPI,
            **node_plan.environment(row, index, unknown, machine, self._settings, keys),
        }
        if node_plan.is_led_by_entry(row) and row.nodes > 1:
            env["CLOUDJOB_SSH_KEY"] = requests.SSH_KEY
        host = node_plan.names(row)[index]
        short, _, domain = host.partition(".")
        config = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c"],
            "Cmd": [node_plan.start(row, index, machine)],
            "User": f"{requests.USER_ID}:{requests.GROUP_ID}",
            "WorkingDir": HOME,
            "StopSignal": "SIGTERM",
            "Hostname": short,
            "Domainname": domain,
            "Env": [f"{name}={value}" for name, value in sorted(env.items())],
            "Labels": {**labels, requests.NODE_LABEL: str(index)},
            "HostConfig": {
                "NetworkMode": network,
                "ShmSize": 1 << 30,
                "LogConfig": requests.LOG_CONFIG,
                "RestartPolicy": {"Name": "no"},
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges:true"],
                "Mounts": [
                    self._archive,
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
        return requests.NodeRequest(name=short, host=host, config=config, env={})

    def states(self, handle: str, count: int) -> list[NodeState]:
        """Return the state of each node.

        Raises:
            JobNotFound: They were never started, or are gone.
        """
        found = self._backend.nodes(handle)
        if not found:
            raise JobNotFound(f"looking for {handle}: the engine does not know it")
        by_index = {item.node: item for item in found}
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

    def logs(self, handle: str) -> Iterator[tuple[int, bytes]]:
        """Yield what each node writes, from the beginning, until all have ended."""
        return self._backend.logs(handle, None, follow=True)

    def stop(self, handle: str, *, is_urgent: bool) -> None:
        """Ask all nodes to end; with ``is_urgent`` kill them."""
        self._backend.signal(handle, "SIGKILL" if is_urgent else "SIGTERM")

    def end_node(self, handle: str, index: int) -> None:
        """End one node as if its power had failed."""
        self._backend.signal(handle, "SIGKILL", index)

    def usage(self, handle: str, count: int) -> list[tuple[float, float]]:
        """Return processor and memory of each node in percent; -1 for unknown."""
        from cloudjob.emulator import node_metrics

        found = {item.node: item for item in self._backend.nodes(handle)}
        return [
            node_metrics.of_container(self._client, found[index].id)
            if index in found and found[index].is_alive
            else (-1.0, -1.0)
            for index in range(count)
        ]

    def remove(self, handle: str) -> None:
        """Remove everything of an attempt."""
        self._backend.remove(handle)


def _network(key: str) -> str:
    return f"cloudjob-{key}"


Machines: TypeAlias = ProcessMachines | DockerMachines


def gateway() -> str:
    """Return the host under which every container reaches this machine; empty for none.

    It is the address of the engine's own bridge, or of one that is created for an engine that has
    none: nobody outside this machine reaches it. Elsewhere than on Linux, containers run in a
    virtual machine, where a name leads to the loopback address of this one.

    Raises:
        BackendError: There is no engine, or it refuses.
    """
    from cloudjob.backends.docker import engine

    client = engine.connect()
    with engine.translated("asking the engine for its bridge"):
        found = client.networks(names=["bridge", BRIDGE])
    if sys.platform != "linux":
        return "host.docker.internal"
    bridges = sorted(item["Name"] for item in found if item["Name"] in ("bridge", BRIDGE))
    return bridge_address(inspected(client, bridges[0] if bridges else BRIDGE))


def inspected(client: Any, name: str) -> Any:
    """Return a network of the engine, which is created unless it exists."""
    from cloudjob.backends.docker import engine

    with engine.translated(f"creating the network {name}"):
        if not any(item["Name"] == name for item in client.networks(names=[name])):
            client.create_network(name, driver="bridge", check_duplicate=True)
        return client.inspect_network(name)


def bridge_address(network: Mapping[str, Any]) -> str:
    """Return the address that a bridge of the engine has on this machine; empty for none.

    An engine that was just installed names none for its own, and gives that the first of the pool.
    """
    pools = network["IPAM"]["Config"] or [{}]
    if pools[0].get("Gateway"):
        return str(pools[0]["Gateway"])
    return str(ip_network(pools[0]["Subnet"])[1]) if pools[0].get("Subnet") else ""


def check_image(image: str) -> None:
    """Look for an image in the engine.

    Raises:
        ImageMissing: The engine does not have it.
        BackendError: There is no engine.
    """
    from cloudjob.backends.docker import engine

    client = engine.connect()
    try:
        with engine.translated(f"looking for the image {image}"):
            client.inspect_image(image)
    except BackendError as error:
        if engine.status_code(error) == engine.NOT_FOUND:
            raise ImageMissing(image) from error
        raise
