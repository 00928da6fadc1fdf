"""Nodes as processes of the process backend."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudjob.backends import interpreters
from cloudjob.backends.process import isolation, node_files
from cloudjob.backends.process import request as requests
from cloudjob.backends.process.backend import ProcessBackend
from cloudjob.backends.process.keeper import NodeRequest, descendants_of
from cloudjob.emulator import node_plan
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import HOME
from cloudjob.emulator.node_plan import NodeContext
from cloudjob.emulator.nodes import NewKeys, NodeState, folder
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import run_dir_of
from cloudjob.errors import JobNotFound
from jobentry.contract.sigv4 import Keys

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessRuntime:
    """Nodes as groups of processes on this machine."""

    kind = "process"

    def __init__(
        self, home: Path, settings: Settings, new_keys: NewKeys, endpoint: str, api: str
    ) -> None:
        requests.need_linux()
        # This forks, so it is called while the process has only one thread.
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
        self._machine = requests.machine_of(options, home, interpreters.entry_of(home))
        requests.need_mpirun(self._machine)
        self._used: dict[str, tuple[float, float]] = {}

    def check_image(self, image: str) -> None:
        """Accept any image, because nodes use the tools of this machine instead."""

    def tags(self, repository: str) -> list[str] | None:
        """Return None, because any tag is accepted."""
        return None

    def restart(self, handle: str) -> bool:
        """Return False, because a new attempt in the same folders has the same effect."""
        return False

    def handle(self, key: str) -> str:
        """Return the handle of an attempt, whether it was started or not."""
        return f"process://local/{key}"

    def start(self, row: JobRow, key: str, nodes: Path, image: str) -> str:
        """Start all nodes unless they are running, and return the handle."""
        handle = self.handle(key)
        with contextlib.suppress(JobNotFound):
            self.states(handle, row.nodes)
            return handle
        # Remove the leftovers of an interrupted start.
        shutil.rmtree(self._home / "process" / key, ignore_errors=True)
        return self._backend.send(self._request(row, key, nodes))

    def _context_of(self, nodes: Path, index: int) -> NodeContext:
        machine = self._machine
        return NodeContext(
            root="" if self._level == "files" else str(nodes / str(index)),
            python=machine.python,
            entry=(machine.entry_python, "-I", "-S", machine.entry),
            endpoint=self._endpoint,
            api=self._api,
            first_version=self._settings.first_version,
            archive=machine.entry,
        )

    def _request(self, row: JobRow, key: str, nodes: Path) -> requests.ProcessRequest:
        run_dir = run_dir_of(key)
        shutil.rmtree(run_dir, ignore_errors=True)
        keys = self._new_keys(row.user_name)
        node_requests = [self._node(row, index, key, nodes, keys) for index in range(row.nodes)]
        return requests.ProcessRequest(
            job=key,
            folder=str(self._home / "process" / key),
            run_dir=run_dir,
            hosts=f"{run_dir}/hosts" if self._level != "none" else "",
            hosts_text="".join(
                f"{requests.address_of(index)} {' '.join(node_plan.aliases(row, index))}\n"
                for index in range(row.nodes)
            ),
            argv=("/bin/sh", "-c", node_plan.becoming("CLOUDJOB_EMULATOR_COMMAND")),
            retries=0,
            grace_s=self._settings.grace_s,
            nodes=tuple(node_requests),
            secret_names=(),
            is_led=node_plan.is_led_by_entry(row),
            keeps_homes=True,
            python=self._machine.python,
        )

    def _node(self, row: JobRow, index: int, key: str, nodes: Path, keys: Keys) -> NodeRequest:
        context = self._context_of(nodes, index)
        machine = self._machine
        has_files = self._level == "files"
        run_dir = run_dir_of(key)
        # The path of the same folder inside the node.
        run = isolation.RUN_DIR if has_files else run_dir
        address = requests.address_of(index)
        # A preset starts `python` and needs the programs in the same folder, such as mpirun.
        path = f"{Path(machine.python).parent}:{machine.path}"
        libmpi = interpreters.libmpi_of(shutil.which("mpirun", path=path) or "", machine.python)
        env = {
            "PATH": path,
            "LANG": "C.UTF-8",
            "TMPDIR": f"{run_dir}/{index}",
            **(requests.variables_of_own_files(path) if has_files else {}),
            **machine.devices,
            **requests.open_mpi_of_one_machine(is_isolated=self._level != "none"),
            "CLOUDJOB_NODE_DIR": f"{run}/{index}/node",
            # A socket, because all jobs of this machine would share a fixed port.
            "CLOUDJOB_CONTROL_DIR": run,
            "CLOUDJOB_SSH_KEY": f"{run}/{requests.KEY}",
            **node_plan.environment(row, index, address, context, self._settings, keys),
        }
        if machine.library_path:
            env.setdefault("LD_LIBRARY_PATH", machine.library_path)
        if libmpi:
            env.setdefault("MPI4PY_LIBMPI", libmpi)
        env["CLOUDJOB_EMULATOR_COMMAND"] = (
            f"unset CLOUDJOB_EMULATOR_COMMAND; {node_plan.start(row, index, context)}"
        )
        return NodeRequest(
            host=node_plan.names(row)[index],
            env=env,
            home=str(folder(nodes, index, HOME)),
            tmp=f"{run_dir}/{index}",
            log=str(self._home / "process" / key / f"node-{index}.log"),
            protected=node_files.changes_of(machine.installed, str(nodes / str(index) / "python"))
            if has_files
            else (),
            mounts=self._mounts(row, index, nodes, f"{run_dir}/{index}") if has_files else (),
            named=self._named(nodes, index, env) if has_files else (),
            shown=node_files.shown_of((*machine.places, machine.entry)) if has_files else (),
        )

    def _named(
        self, nodes: Path, index: int, env: Mapping[str, str]
    ) -> tuple[tuple[str, str], ...]:
        # Paths below /home/ma-user in variables belong to the node; those in a folder of all users
        # may belong to a test on this machine.
        folders = isolation.OF_ALL_USERS
        visible = node_files.shown_of((*self._machine.places, self._machine.entry))
        named = node_files.besides(visible, isolation.paths_named_in(env.values(), folders))
        return node_files.changes_of(named, str(nodes / str(index) / "named"))

    def _mounts(self, row: JobRow, index: int, nodes: Path, tmp: str) -> Any:
        home, cache, work, var_tmp = (
            str(folder(nodes, index, name))
            for name in (HOME, node_plan.CACHE, node_plan.WORK, isolation.VAR_TMP)
        )
        channels = {node_plan.normal(item.path) for item in node_plan.folders(row)}
        if node_plan.has_rank_table(row, self._settings):
            channels.add(node_plan.CONFIG)
        return (
            *requests.mounts_of(home, cache, work, var_tmp, tmp),
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
            # The emulator was killed during the start, so the job's controller gave up.
            raise JobNotFound(f"looking for {handle}: its nodes were never started")
        node_states = [
            NodeState(
                node["started_at"] or 0.0,
                node["ended_at"] or (time.time() if has_ended else 0.0),
                # The nodes end with their controller when it is killed.
                137 if has_ended and node["exit_code"] is None else node["exit_code"],
            )
            for node in nodes
        ]
        return node_states or [NodeState(exit_code=137 if has_ended else None)] * count

    def addresses(self, handle: str, count: int) -> list[str]:
        """Return the address of each node."""
        return [requests.address_of(index) for index in range(count)]

    def logs(self, handle: str) -> Iterator[tuple[int, bytes]]:
        """Yield the output of each node, from the start, until all nodes have ended."""
        return self._backend.logs(handle, None, follow=True)

    def stop(self, handle: str, *, is_urgent: bool) -> None:
        """Send all nodes SIGTERM; with ``is_urgent`` SIGKILL."""
        with contextlib.suppress(JobNotFound):
            self._backend.cancel(handle, is_urgent=is_urgent)

    def end_node(self, handle: str, index: int) -> None:
        """End one node as if its power had failed."""
        self._backend.end_node(handle, index)

    def usage(self, handle: str, count: int) -> list[tuple[float, float]]:
        """Return processor and memory of each node in percent; -1 for unknown."""
        try:
            _, nodes = self._backend.nodes(handle)
        except JobNotFound:
            return [(-1.0, -1.0)] * count
        return [
            _usage_of(node["process"], f"{handle}/{index}", self._used)
            for index, node in enumerate(nodes)
        ]

    def remove(self, handle: str) -> None:
        """Remove everything of an attempt."""
        self._backend.remove(handle)
        # The controller removes this folder, unless the emulator was killed during the start.
        shutil.rmtree(run_dir_of(handle.rpartition("/")[2]), ignore_errors=True)


def _usage_of(
    keeper: int, name: str, previous: dict[str, tuple[float, float]]
) -> tuple[float, float]:
    """Return processor and memory usage of all processes below ``keeper``, in percent.

    Args:
        name: The name of the node in ``previous``.
        previous: The time and processor time at the last call for each node; it is updated.
    """
    if not keeper or not Path(f"/proc/{keeper}").exists():
        return -1.0, -1.0
    used_s, memory = 0.0, 0
    for process in descendants_of(keeper):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # A program's name may contain spaces and brackets; the last bracket ends the name.
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            used_s += sum(int(fields[index]) for index in (11, 12, 13, 14)) / _TICKS_PER_S
            memory += int(fields[21]) * _PAGE_BYTES
    now = time.monotonic()
    before, at = previous.get(name, (0.0, 0.0))
    previous[name] = (used_s, now)
    cores = os.cpu_count() or 1
    cpu = max(0.0, used_s - before) / (now - at) / cores * 100 if at else 0.0
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return round(min(cpu, 100.0), 2), round(memory / total * 100, 2)
