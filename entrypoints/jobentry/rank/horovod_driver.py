"""Runs Horovod's elastic driver (0.28) with the nodes that the head reports as available.

It runs on the head, under the Python of the script. ``horovodrun`` is not used, as it starts its
own remote shell and puts the job's variables, including secrets, on command lines.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

# Seconds between SIGTERM and SIGKILL for a rank that Horovod drops.
_GRACE_S = 5.0
_POLL_S = 0.1
_LOST = 128 + signal.SIGKILL
# Marks the line in which the shell of a node prints the process group.
_MARK = "cloudjob-group"


class Member(NamedTuple):
    """A node that takes part: its number and its host name."""

    node: int
    host: str


def main(path: str) -> int:
    """Run the ranks described by the settings file ``path``; return 0 if they succeed.

    Otherwise return the exit code of the first rank that failed, or 1 if too few nodes are left.
    """
    with open(path, encoding="ascii") as file:
        settings = json.load(file)
    _hide_tracebacks()
    driver_module = importlib.import_module("horovod.runner.elastic.driver")
    rendezvous = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
    nodes = _Nodes(settings["members"], settings["slots"])
    driver = driver_module.ElasticDriver(
        rendezvous,
        nodes,
        settings["min_ranks"],
        settings["max_ranks"],
        timeout=int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or settings["timeout_s"]),
    )
    handler = importlib.import_module("horovod.runner.elastic.rendezvous")
    port = rendezvous.start(handler.create_rendezvous_handler(driver))
    starter = _Starter(settings, nodes, port)
    driver.start(settings["min_ranks"], starter.run)
    results = driver.get_results()
    driver.stop()
    if results.error_message:
        sys.stderr.write(results.error_message + "\n")
    ends = sorted(results.worker_results.values(), key=lambda end: float(end[1]))
    codes = [int(code) for code, _ in ends]
    # No results: the driver gave up.
    return next((code for code in codes if code), 0 if codes else 1)


def _hide_tracebacks() -> None:
    """Hide tracebacks: Horovod's threads raise exceptions whenever ranks come and go."""

    class Brief(logging.Formatter):
        def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
            return "%s: %s" % (ei[0].__name__, ei[1])

    handler = logging.StreamHandler()
    handler.setFormatter(Brief("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    threading.excepthook = lambda args: logging.debug("%s", args.exc_value)


class _Nodes:
    """Horovod's host discovery: the available nodes, from a file that the head writes."""

    def __init__(self, path: str, slots: int) -> None:
        self._path = path
        self._slots = slots
        self._members: dict[str, Member] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each available node."""
        return dict.fromkeys(self.members(), self._slots)

    def members(self) -> Mapping[str, Member]:
        """Return the available nodes by their names in Horovod."""
        with open(self._path, encoding="ascii") as file:
            now = {name: Member(*member) for name, member in json.load(file).items()}
        self._members.update(now)
        return now

    def member(self, name: str) -> Member:
        """Return a node that is or was available."""
        return self._members[name]


class _Starter:
    """Starts ranks for the driver and waits for their end, each in a thread."""

    def __init__(self, settings: Mapping[str, Any], nodes: _Nodes, port: int) -> None:
        self._settings = settings
        self._nodes = nodes
        self._env = {**settings["env"], "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}

    def run(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Run the rank of ``slot``; return its exit code and the time of its end.

        Args:
            slot: Horovod's ``SlotInfo``.
            events: Horovod sets one of them to stop the rank.
        """
        member = self._nodes.member(slot.hostname)
        wrapper = ["env", *self._variables(slot, member), *self._settings["wrapper"]]
        try:
            process, group = self._start(member, wrapper)
        except OSError as error:
            sys.stderr.write("starting a rank on %s: %s\n" % (member.host, error.strerror))
            return 127, time.time()
        ended_at = 0.0
        while process.poll() is None:
            if slot.hostname not in self._nodes.members():
                _kill(process)
                process.wait()
                return _LOST, time.time()
            if any(event.is_set() for event in events):
                number = signal.SIGKILL if ended_at else signal.SIGTERM
                if not ended_at or time.monotonic() > ended_at:
                    ended_at = time.monotonic() + _GRACE_S
                    self._signal(member, group, number)
            time.sleep(_POLL_S)
        code = process.returncode
        return (code if code >= 0 else 128 - code), time.time()

    def _variables(self, slot: Any, member: Member) -> list[str]:
        local = slot.local_rank
        variables = {
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": slot.rank,
            "HOROVOD_SIZE": slot.size,
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_LOCAL_SIZE": slot.local_size,
            "HOROVOD_CROSS_RANK": slot.cross_rank,
            "HOROVOD_CROSS_SIZE": slot.cross_size,
            # Horovod may renumber a running rank; this number, used for its log, stays.
            "CLOUDJOB_RANK": member.node * self._settings["slots"] + local,
        }
        return ["%s=%s" % item for item in {**self._env, **variables}.items()]

    def _start(self, member: Member, wrapper: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start a rank wrapper; return the local process and the process group on its node.

        The process group is 0 if it is unknown.
        """
        if member.node == 0:
            process = subprocess.Popen(wrapper, stdin=subprocess.DEVNULL, start_new_session=True)
            return process, process.pid
        command = f"echo {_MARK} $$; exec " + " ".join(map(shlex.quote, wrapper))
        process = subprocess.Popen(
            [*self._settings["shell"], member.host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        return process, _group(process.stdout)

    def _signal(self, member: Member, group: int, number: int) -> None:
        if not group:
            return
        command = "kill -s %d -- -%d" % (number, group)
        shell = [] if member.node == 0 else [*self._settings["shell"], member.host]
        argv = [*shell, command] if shell else ["/bin/sh", "-c", command]
        nothing = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.call(argv, stdin=nothing, stderr=nothing, timeout=_GRACE_S)


def _group(lines: Iterable[bytes]) -> int:
    """Return the process group that a shell prints after our mark; 0 if it never does.

    The shell's start-up files, such as ``~/.zshenv``, may print other lines first.
    """
    for line in lines:
        _, mark, text = line.partition(_MARK.encode())
        if mark and text.strip().isdigit():
            return int(text)
        printed = line.decode("utf-8", "replace").strip()
        sys.stderr.write(f"the shell of a node prints: {printed}\n")
    return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
