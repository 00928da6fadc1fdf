"""A separate container engine for a test, which can be restarted without affecting others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import docker
import requests

from tests.support.containers import REQUEST_S
from tests.support.polling import poll

_LIMIT_S = 180.0


class Dockerd:
    """An engine with its own files, socket and network namespace; needs root."""

    def __init__(self) -> None:
        # Short, as the path of a Unix socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ce-", dir="/tmp"))
        self.host = f"unix://{self.folder}/sock"
        # Holds the bridges of the nodes, so it must outlive a restart of the engine.
        self._network = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._engine: subprocess.Popen[bytes] | None = None
        # With a fixed version, the client sends no request before the engine runs.
        self.client = docker.APIClient(self.host, version="1.41", timeout=REQUEST_S)
        self.keep_containers(True)

    def keep_containers(self, is_kept: bool) -> None:
        """Set whether containers keep running while the engine is down."""
        (self.folder / "daemon.json").write_text(json.dumps({"live-restore": is_kept}))
        if self._engine is not None:
            self._engine.send_signal(signal.SIGHUP)
            poll(lambda: self.client.info()["LiveRestoreEnabled"] == is_kept, "new setting")

    def start(self) -> None:
        """Start the engine and wait until it answers."""
        folder = self.folder
        argv = ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", "dockerd"]
        argv += [f"--config-file={folder}/daemon.json", f"--host={self.host}"]
        argv += [f"--{name}={folder}/{name}" for name in ("data-root", "exec-root", "pidfile")]
        with (folder / "log").open("ab") as log:
            self._engine = subprocess.Popen(argv, stdout=log, stderr=log)
        poll(self._answers, "answer of the engine")

    def _answers(self) -> bool:
        assert self._engine is not None
        assert self._engine.poll() is None, (self.folder / "log").read_text()[-2000:]
        # The SDK leaves a socket open for each attempt that fails.
        with socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(self.host.removeprefix("unix://")):
                return False
        return bool(self.client.ping())

    def stop(self) -> None:
        """Stop the engine as the service manager does."""
        assert self._engine is not None
        self._engine.terminate()
        self._engine.wait(_LIMIT_S)

    def close(self) -> None:
        """Stop the engine and remove its files."""
        with contextlib.suppress(
            docker.errors.DockerException, requests.exceptions.RequestException
        ):
            for item in self.client.containers(all=True):
                self.client.remove_container(item["Id"], force=True)
        self.client.close()
        if self._engine is not None:
            self.stop()
        self._network.kill()
        self._network.wait()
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        places = [line.split()[1] for line in mounts]
        for place in sorted(places, reverse=True):
            if place.startswith(f"{self.folder}{os.sep}"):
                subprocess.run(["umount", place], check=True)
        shutil.rmtree(self.folder)
