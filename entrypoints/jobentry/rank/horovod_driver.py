"""Horovod's own elastic driver (0.28), told by the head which nodes are there.

It runs on the head, under the Python of the script. ``horovodrun`` would bring a remote shell of
its own, and the job's variables, secrets too, as words of its commands.
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

# What a rank whose node is no longer wanted has to end by itself, and then to be gone.
_GRACE_S = 5.0
_POLL_S = 0.1
_LOST = 128 + signal.SIGKILL
# What stands before the process id that the shell of a node prints.
_MARK = "cloudjob-group"


class Place(NamedTuple):
    """A node that takes part: its number, and its name in the network."""

    node: int
    host: str


def main(path: str) -> int:
    """Run the ranks that the settings in ``path`` describe; return 0 when they are done.

    Else the exit code of one that was not, or 1 where too few nodes are left for the job.
    """
    with open(path, encoding="ascii") as file:
        settings = json.load(file)
    _be_brief()
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
    # Without any result the driver had to give up.
    return next((code for code in codes if code), 0 if codes else 1)


def _be_brief() -> None:
    """Leave tracebacks out: what Horovod's threads raise when ranks come and go is no fault."""

    class Brief(logging.Formatter):
        def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
            return "%s: %s" % (ei[0].__name__, ei[1])

    shown = logging.StreamHandler()
    shown.setFormatter(Brief("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[shown])
    threading.excepthook = lambda args: logging.debug("%s", args.exc_value)


class _Nodes:
    """What Horovod calls the discovery of hosts: the nodes that the head says are there."""

    def __init__(self, path: str, slots: int) -> None:
        self._path = path
        self._slots = slots
        self._places: dict[str, Place] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return how many ranks each node has room for."""
        return dict.fromkeys(self.places(), self._slots)

    def places(self) -> Mapping[str, Place]:
        """Return the nodes by the names that they have here."""
        with open(self._path, encoding="ascii") as file:
            now = {name: Place(*place) for name, place in json.load(file).items()}
        self._places.update(now)
        return now

    def place(self, name: str) -> Place:
        """Return where a node is, or was."""
        return self._places[name]


class _Starter:
    """Starts ranks for the driver, each in a thread, and waits for its end."""

    def __init__(self, settings: Mapping[str, Any], nodes: _Nodes, port: int) -> None:
        self._settings = settings
        self._nodes = nodes
        self._env = {**settings["env"], "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}

    def run(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Run the rank of ``slot``; return its exit code, and when it ended.

        Args:
            slot: Horovod's ``SlotInfo``.
            events: Each says that the rank is no longer wanted.
        """
        place = self._nodes.place(slot.hostname)
        door = ["env", *self._words(slot, place), *self._settings["door"]]
        try:
            process, group = self._start(place, door)
        except OSError as error:
            sys.stderr.write("starting a rank on %s: %s\n" % (place.host, error.strerror))
            return 127, time.time()
        ended_at = 0.0
        while process.poll() is None:
            if slot.hostname not in self._nodes.places():
                _kill(process)
                process.wait()
                return _LOST, time.time()
            if any(event.is_set() for event in events):
                number = signal.SIGKILL if ended_at else signal.SIGTERM
                if not ended_at or time.monotonic() > ended_at:
                    ended_at = time.monotonic() + _GRACE_S
                    self._signal(place, group, number)
            time.sleep(_POLL_S)
        code = process.returncode
        return (code if code >= 0 else 128 - code), time.time()

    def _words(self, slot: Any, place: Place) -> list[str]:
        local = slot.local_rank
        told = {
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": slot.rank,
            "HOROVOD_SIZE": slot.size,
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_LOCAL_SIZE": slot.local_size,
            "HOROVOD_CROSS_RANK": slot.cross_rank,
            "HOROVOD_CROSS_SIZE": slot.cross_size,
            # Horovod's own number changes while a rank runs; that of its log does not.
            "CLOUDJOB_RANK": place.node * self._settings["slots"] + local,
        }
        return ["%s=%s" % item for item in {**self._env, **told}.items()]

    def _start(self, place: Place, door: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start a door; return what runs it here, and its process group there (0: not known)."""
        if place.node == 0:
            process = subprocess.Popen(door, stdin=subprocess.DEVNULL, start_new_session=True)
            return process, process.pid
        command = f"echo {_MARK} $$; exec " + " ".join(map(shlex.quote, door))
        process = subprocess.Popen(
            [*self._settings["shell"], place.host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        return process, _group(process.stdout)

    def _signal(self, place: Place, group: int, number: int) -> None:
        if not group:
            return
        command = "kill -s %d -- -%d" % (number, group)
        shell = [] if place.node == 0 else [*self._settings["shell"], place.host]
        words = [*shell, command] if shell else ["/bin/sh", "-c", command]
        nothing = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.call(words, stdin=nothing, stderr=nothing, timeout=_GRACE_S)


def _group(lines: Iterable[bytes]) -> int:
    """Return the process group that a shell prints behind our mark; 0 if it never does.

    A shell may print something of its own before: ``~/.zshenv`` does, for one.
    """
    for line in lines:
        _, mark, text = line.partition(_MARK.encode())
        if mark and text.strip().isdigit():
            return int(text)
        shown = line.decode("utf-8", "replace").strip()
        sys.stderr.write(f"the shell of a node prints: {shown}\n")
    return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
