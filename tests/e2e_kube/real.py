"""A cluster node with a real kubelet, which runs pods in this host's engine through dockershim.

Its cluster also has kube-scheduler and the controllers that watch nodes; the tests play only the
operators. Pods cannot find each other by name, as the cluster has no DNS.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import ipaddress
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker

from tests.support.kube_cluster import Cluster, free_port, programs
from tests.support.polling import poll

NODE = "machine-real"
PAUSE = "cloudjob-test/pause:1"
# A kubelet removes the containers of other kubelets from its engine, so only one runs at a time.
_LOCK = Path(tempfile.gettempdir()) / "cloudjob-test-kubelet.lock"
# Kernel settings that a kubelet changes for the whole host; they are restored.
_TUNED = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
_TUNED_KEYS = ("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")
# Seconds without a report from a node before the cluster marks its pods.
_GRACE_S = 6


class RealNode:
    """A kubelet, and the programs of the cluster that manage nodes."""

    def __init__(
        self, cluster: Cluster, engine: docker.APIClient, folder: Path, image: str
    ) -> None:
        self.cluster = cluster
        self.engine = engine
        self.folder = folder
        self.image = image
        self._kubelet: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the kubelet and these programs, and wait until the node accepts pods."""
        _make_pause_image(self.engine, self.image)
        quick = [f"--node-monitor-grace-period={_GRACE_S}s", "--node-monitor-period=1s"]
        self.cluster.controllers("nodelifecycle", "podgc", "garbagecollector", more=quick)
        self.cluster.scheduler()
        self.resume()

    def resume(self) -> None:
        """Start the kubelet, and wait until its node is ready."""
        with _kept_tunables():
            self._start_kubelet()
            poll(self.is_ready, "a machine that is ready", limit_s=120)

    def is_ready(self) -> bool:
        """Whether the cluster considers the node ready."""
        assert self._kubelet is not None
        assert self._kubelet.poll() is None, self.log_tail()
        nodes = self.cluster.ask("GET", "/api/v1/nodes")["items"]
        return any(
            item["type"] == "Ready" and item["status"] == "True"
            for node in nodes
            if node["metadata"]["name"] == NODE
            for item in node["status"].get("conditions") or ()
        )

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the kubelet, and start it again at the end; its containers keep running."""
        self._kill()
        try:
            yield
        finally:
            self.resume()

    def _kill(self) -> None:
        assert self._kubelet is not None
        self._kubelet.kill()
        self._kubelet.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the kubelet with SIGSTOP, so that it accepts connections but never answers."""
        assert self._kubelet is not None
        self._kubelet.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._kubelet.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the kubelet, and remove its containers and mounts."""
        if self._kubelet is not None:
            self._kill()
        for namespace in self._namespaces():
            filters = {"label": f"io.kubernetes.pod.namespace={namespace}"}
            for item in self.engine.containers(all=True, filters=filters):
                with contextlib.suppress(docker.errors.APIError):
                    self.engine.remove_container(item["Id"], force=True, v=True)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in sorted(mounts, reverse=True):
            if path.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", path], check=False)

    def log_tail(self) -> str:
        """Return the last lines of the kubelet's log, for an error message."""
        return (self.folder / "kubelet.log").read_text(errors="replace")[-3000:]

    def _namespaces(self) -> list[str]:
        namespaces = self.cluster.ask("GET", "/api/v1/namespaces")["items"]
        return [item["metadata"]["name"] for item in namespaces]

    def _start_kubelet(self) -> None:
        network = self.engine.inspect_network("bridge")["IPAM"]["Config"][0]["Subnet"]
        # The host's address on the engine's bridge, as a kubelet rejects loopback addresses.
        address = str(next(ipaddress.ip_network(network).hosts()))
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(_configuration(address)))
        command = [
            *(str(programs() / "kubelet"), f"--config={config}", f"--node-ip={address}"),
            *(f"--kubeconfig={self.cluster.kubeconfig()}", f"--hostname-override={NODE}"),
            *(f"--root-dir={self.folder}/root", f"--cert-dir={self.folder}/certificates"),
            *("--container-runtime=docker", f"--docker-endpoint={_endpoint()}"),
            *(f"--pod-infra-container-image={PAUSE}", "--network-plugin="),
            f"--volume-plugin-dir={self.folder}/plugins",
        ]
        with (self.folder / "kubelet.log").open("ab") as log:
            self._kubelet = subprocess.Popen(command, stdout=log, stderr=log)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Allow these tests only one kubelet at a time on this host."""
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _configuration(address: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        **{"address": address, "port": free_port(), "readOnlyPort": 0, "healthzPort": 0},
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        # Cgroups of pods would need permissions that a CI container lacks.
        **{"cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": []},
        **{"failSwapOn": False, "makeIPTablesUtilChains": False},
        # The kubelet must not manage the engine's images or the host's disk.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%"},
        **{"nodeStatusUpdateFrequency": "1s", "nodeLeaseDurationSeconds": 4},
        "syncFrequency": "2s",
    }


def _endpoint() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _make_pause_image(engine: docker.APIClient, base: str) -> None:
    """Build the image of the container that holds a pod's network; stopping it kills it at once."""
    text = f'FROM {base}\nUSER 0\nENTRYPOINT ["sleep", "infinity"]\nSTOPSIGNAL SIGKILL\n'
    for line in engine.build(fileobj=io.BytesIO(text.encode()), tag=PAUSE, rm=True, decode=True):
        assert "error" not in line, line


@contextlib.contextmanager
def _kept_tunables() -> Iterator[None]:
    """Restore the kernel settings that a kubelet changes when it starts."""
    files = [Path("/proc/sys", name) for name in (*_TUNED, *_TUNED_KEYS)]
    before = {file: file.read_text() for file in files if file.exists()}
    try:
        yield
    finally:
        for file, text in before.items():
            if file.read_text() != text:
                file.write_text(text)
