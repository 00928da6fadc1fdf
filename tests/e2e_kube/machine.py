"""A cluster node and the controllers: pods run as containers of this host's engine.

The manifests are those that the API server stored. The rules of the operators and of the Job
controller turn them into pods (``tests.support.operators``) and a kubelet's rules turn each pod
into a container (``tests.support.kubelet``); this module reports pod states, serves logs and
applies the controllers' restart and clean-up policies.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker

from tests.e2e_kube.conftest import Lab
from tests.support import jobset, kubelet, operators

LABEL = "cloudjob-test.namespace"
_POLL_S = 0.2
# Seconds before a failed index starts again, twice as many each time. Kubernetes waits for 10.
_BACKOFF_S = 1.0


class PodRunner:
    """Runs the pods of one job until the job has ended."""

    def __init__(
        self, lab: Lab, engine: docker.APIClient, image: str, *, held: tuple[int, ...] = ()
    ) -> None:
        """Prepare it.

        Args:
            held: The nodes for whose pods there is no room until ``release``.
        """
        self.lab = lab
        self._engine = engine
        self._image = image
        self._held = held
        self._waiting: list[tuple[dict[str, Any], kubelet.Objects, int]] = []
        # The head may print while the pods after it are not held yet.
        self._holding = threading.Lock()
        # The pods of an Indexed Job that the controller has counted, once each: the node and the
        # exit code. When each index that has failed starts again.
        self._counted: dict[str, tuple[int, int]] = {}
        self._due: dict[int, float] = {}
        self._starts = 0
        self._running: dict[str, str] = {}
        # The pods at the last poll, and what the controller has last said of an Indexed Job. Each
        # request takes time from the ranks, which run on the same machine.
        self._pods: list[dict[str, Any]] = []
        self._progress: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.network = f"cloudjob-test-{lab.namespace}"
        self.errors: list[BaseException] = []
        self.attempts = 0

    def __enter__(self) -> PodRunner:
        self._engine.create_network(self.network, labels={LABEL: self.lab.namespace})
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        for item in self._containers():
            with contextlib.suppress(docker.errors.APIError):
                self._engine.remove_container(item["Id"], force=True, v=True)
        self._engine.remove_network(self.network)
        for error in self.errors:
            raise AssertionError(f"the stand-in for a kubelet failed: {error!r}") from error

    def kill(self, pod: str) -> None:
        """Kill a pod's container, as the kernel does when it is out of memory."""
        self._engine.kill(self._running[pod])

    def release(self) -> None:
        """Start the pods for which there was no room."""
        with self._holding:
            self._held = ()
            waiting, self._waiting = self._waiting, []
        for pod, objects, index in waiting:
            self._start_pod(pod, objects, index)

    def pod_of(self, node: int) -> str:
        """Return the name of the running pod of a node of an Indexed Job."""
        pods = _nodes(self._listed()).items()
        return next(pod for pod, index in pods if index == node and pod in self._running)

    def delete(self, pod: str, reason: str = "", message: str = "") -> None:
        """Delete a pod of an Indexed Job with its grace period.

        Args:
            reason: The reason of the condition DisruptionTarget; empty for none.
        """
        if reason:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
            self.lab.pod_status(pod, {"conditions": [{**condition, "message": message}]})
        self.lab.cluster.ask("DELETE", self.lab.core("Pod", pod))
        grace_s = self.lab.get(self.lab.core("Pod", pod))["spec"]["terminationGracePeriodSeconds"]
        self._engine.stop(self._running[pod], timeout=grace_s)

    def evict(self, pod: str, message: str) -> None:
        """Kill a pod's container, and report the pod as evicted, as a kubelet short of memory."""
        container = self._running.pop(pod)
        self._engine.kill(container)
        self._engine.wait(container)
        self.lab.finish(pod, 137)
        self.lab.pod_status(pod, {"phase": "Failed", "reason": "Evicted", "message": message})

    @contextlib.contextmanager
    def paused(self, pod: str) -> Iterator[None]:
        """Pause a pod's container, as if it took long to finish."""
        container = self._running[pod]
        self._engine.pause(container)
        try:
            yield
        finally:
            self._engine.unpause(container)

    def _containers(self) -> list[dict[str, Any]]:
        filters = {"label": f"{LABEL}={self.lab.namespace}"}
        listed: list[dict[str, Any]] = self._engine.containers(all=True, filters=filters)
        return listed

    def _run(self) -> None:
        try:
            self._run_job()
        except BaseException as error:  # noqa: BLE001 (reported at the end)
            self.errors.append(error)

    # -- the operator -------------------------------------------------------------------------

    def _run_job(self) -> None:
        """Run the only job of the namespace to its end."""
        while not self._stop.is_set():
            jobs = self.lab.get(self.lab.path())["items"]
            if jobs:
                break
            time.sleep(_POLL_S)
        else:
            return
        name = jobs[0]["metadata"]["name"]
        retries = 0
        while not self._stop.is_set():
            self._start_pods(name)
            self.lab.phase(name, "Running", **({"retryCount": retries} if retries else {}))
            phase = self._follow(name)
            if phase != "Restarting":
                self.lab.phase(name, phase, **({"retryCount": retries} if retries else {}))
                self._await_kept_pods(name)
                return
            retries += 1
            self.lab.phase(name, "Restarting", retryCount=retries)
            self._delete_pods(keep_ended=False)
            if retries >= self._manifest(name)["spec"]["maxRetry"]:
                self.lab.phase(name, "Failed", retryCount=retries)
                return

    def _follow(self, name: str) -> str:
        """Wait until a pod's exit or a stop request changes the phase of the job; return it."""
        policies = {
            "volcano": self._volcano,
            "mpi-operator": self._mpi,
            "ms-operator": self._mindspore,
            "job": self._indexed,
            "jobset": self._jobset,
        }
        while not self._stop.is_set():
            ended = self._exit_codes()
            phase = policies[self.lab.engine](name, ended)
            if phase:
                return phase
            time.sleep(_POLL_S)
        return "Unknown"

    def _volcano(self, name: str, ended: dict[str, int]) -> str:
        """pkg/controllers/job/state/running.go, and the policies."""
        spec = self._manifest(name)["spec"]
        group = "/apis/bus.volcano.sh/v1alpha1/namespaces/{}/commands"
        for command in self.lab.get(group.format(self.lab.namespace))["items"]:
            assert command["action"] == "AbortJob"
            self._delete_pods(keep_ended=True)
            return "Aborted"
        actions = {item["event"]: item["action"] for item in spec["policies"]}
        if any(ended.values()) and "PodFailed" in actions:
            assert actions["PodFailed"] == "RestartJob"
            return "Restarting"
        if len(ended) == spec["tasks"][0]["replicas"]:
            good = sum(not code for code in ended.values())
            return "Completed" if good >= spec["minAvailable"] else "Failed"
        return ""

    def _mpi(self, name: str, ended: dict[str, int]) -> str:
        """pkg/controller/mpi_job_controller.go: updateMPIJobStatus, cleanUpWorkerPods."""
        policy = self._manifest(name)["spec"]["runPolicy"]
        if policy.get("suspend"):
            self._delete_pods(keep_ended=False)
            return "Suspended"
        launcher = next((code for pod, code in ended.items() if "-launcher-" in pod), None)
        if launcher is None:
            return ""
        assert policy["cleanPodPolicy"] == "Running"
        self._delete_pods(keep_ended=True)
        return "Failed" if launcher else "Succeeded"

    def _mindspore(self, name: str, ended: dict[str, int]) -> str:
        """pkg/controllers/v1/msjob_controller.go: ReconcileJobs, UpdateJobStatus."""
        spec = self._manifest(name)["spec"]
        if spec["runPolicy"].get("activeDeadlineSeconds") == 0:
            return "Failed"
        assert spec["successPolicy"] == "AllWorkers"
        workers = [code for pod, code in ended.items() if "-worker-" in pod]
        if not any(workers) and len(workers) == spec["msReplicaSpecs"]["Worker"]["replicas"]:
            return "Succeeded"
        return "Failed" if any(ended.values()) else ""

    def _indexed(self, name: str, ended: dict[str, int]) -> str:
        """Apply the documentation of Jobs: suspend, the success policy, and limits per index."""
        spec = self._manifest(name)["spec"]
        if spec.get("suspend"):
            # The controller gives up these pods before it deletes them, so they do not count.
            self._delete_pods(keep_ended=True)
            return "Suspended"
        assert spec["podReplacementPolicy"] == "Failed"
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        failures = self._count(ended)
        good = sorted(node for node, code in self._counted.values() if not code)
        bad = sorted(x for x, count in failures.items() if count > spec["backoffLimitPerIndex"])
        # The last failed pod of an index stays, and is not counted, until another replaces it.
        waiting = self._due.keys() - {*good, *bad}
        self._forget_deleted(waiting)
        indexes = {
            "completedIndexes": ",".join(map(str, good)),
            "failedIndexes": ",".join(map(str, bad)),
            "failed": sum(failures.values()) - len(waiting),
        }
        if 0 in good:
            self.lab.phase(name, "Running", **indexes, **_held("SuccessCriteriaMet"))
            self._delete_pods(keep_ended=True)
            return "Succeeded"
        if len(good) + len(bad) == spec["completions"]:
            self.lab.phase(name, "Running", **indexes)
            return "Failed"
        progress = {**indexes, "active": spec["completions"] - len(good) - len(bad)}
        if progress != self._progress:
            self.lab.phase(name, "Running", **progress)
            self._progress = progress
        for node in waiting:
            if self._due[node] <= time.monotonic():
                del self._due[node]
                self._start_index(name, node, failures)
        return ""

    def _count(self, ended: dict[str, int]) -> Counter[int]:
        """Count the pods that have ended, and return how many of each index have failed."""
        nodes = _nodes(self._pods)
        for pod in ended.keys() - self._counted.keys():
            self._counted[pod] = (nodes[pod], ended[pod])
            count = sum(node == nodes[pod] for node, _ in self._counted.values())
            self._due[nodes[pod]] = time.monotonic() + _BACKOFF_S * 2 ** (count - 1)
        return Counter(node for node, code in self._counted.values() if code)

    def _start_index(self, name: str, node: int, failures: Mapping[int, int]) -> None:
        """Start a node of an Indexed Job again."""
        manifest = self._manifest(name)
        pod = operators.indexed_job(manifest, manifest["metadata"]["uid"], failures).pods[node]
        item = self.lab.cluster.ask("POST", self.lab.core("Pod"), pod)
        self._starts += 1
        self.attempts = max(self.attempts, failures[node] + 1)
        self._start_pod(item, self._objects(), node)

    def _jobset(self, name: str, ended: dict[str, int]) -> str:
        """Apply the documentation of JobSet to the only Job of the set."""
        manifest = self._manifest(name)
        spec = manifest["spec"]
        if spec.get("suspend"):
            self._delete_pods(keep_ended=True)
            return "Suspended"
        (group,) = spec["replicatedJobs"]
        reason = jobset.end_of_job(group["template"]["spec"], self._pods)
        if reason == "SuccessPolicy":
            self._delete_pods(keep_ended=True)
            return "Succeeded"
        if not reason:
            return ""
        assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
        restarted = jobset.after_failure(manifest, reason)
        if not restarted:
            return "Failed"
        self._delete_pods(keep_ended=False)
        self._start_pods(name)
        self.lab.phase(name, "Running", **restarted)
        return ""

    def _forget_deleted(self, waiting: set[int]) -> None:
        """Remove deleted pods that have been counted: the controller removes its finalizer.

        Args:
            waiting: The indexes that will start again.
        """
        nodes = _nodes(self._pods)
        for item in self._pods:
            name = item["metadata"]["name"]
            is_counted = name not in self._running and nodes[name] not in waiting
            if item["metadata"].get("deletionTimestamp") and is_counted:
                self.lab.log(name).end()
                self.lab.delete(name)
                self.lab.cluster.kubelet.forget(self.lab.namespace, name)

    def _await_kept_pods(self, name: str) -> None:
        """Let the pods continue that the operator keeps when it considers the job ended."""
        if self.lab.engine != "ms-operator":
            return
        if self._manifest(name)["spec"]["runPolicy"]["cleanPodPolicy"] == "Running":
            self._delete_pods(keep_ended=True)
        while self._running and not self._stop.is_set():
            self._exit_codes()
            time.sleep(_POLL_S)

    def _listed(self) -> list[dict[str, Any]]:
        """Return the pods that exist."""
        items: list[dict[str, Any]] = self.lab.get(self.lab.core("Pod"))["items"]
        return items

    def _manifest(self, name: str) -> dict[str, Any]:
        manifest: dict[str, Any] = self.lab.get(self.lab.path(name))
        return manifest

    # -- the kubelet --------------------------------------------------------------------------

    def _start_pods(self, name: str) -> None:
        """Create the pods and start a container for each."""
        manifest = self._manifest(name)
        self._open_store()
        pod_names = self.lab.operate(name, again=self.attempts > 0)
        self.attempts += 1
        self._starts += 1
        objects = self._objects()
        # An MPIJob may request that its launcher, the first pod, starts after the workers.
        is_last = manifest["spec"].get("launcherCreationPolicy") == "WaitForWorkersReady"
        pods = [*enumerate(pod_names)]
        for index, pod in [*pods[1:], pods[0]] if is_last else pods:
            item = self.lab.get(self.lab.core("Pod", pod))
            with self._holding:
                is_held = index in self._held
                if is_held:
                    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                    self.lab.pod_status(pod, {"conditions": [{**reason, "message": "no room"}]})
                    self._waiting.append((item, objects, index))
            if not is_held:
                self._start_pod(item, objects, index)

    def _objects(self) -> kubelet.Objects:
        """Return the objects whose contents pods read."""
        kinds = ("ConfigMap", "Secret")
        items = [(kind, self.lab.get(self.lab.core(kind))["items"]) for kind in kinds]
        return kubelet.Objects([{**item, "kind": kind} for kind, each in items for item in each])

    def _open_store(self) -> None:
        """Give the pods' user write access to the store, as the owner of a network disk would."""
        for folder, _, files in os.walk(self.lab.folder / "store"):
            Path(folder).chmod(0o777)
            for file in files:
                Path(folder, file).chmod(0o666)

    def _start_pod(self, pod: dict[str, Any], objects: kubelet.Objects, index: int) -> None:
        name = pod["metadata"]["name"]
        # Choose the address before the container exists, as its variables contain it.
        pool = self._engine.inspect_network(self.network)["IPAM"]["Config"][0]["Subnet"]
        ip = pool.rpartition(".")[0] + f".{10 + index + 20 * self._starts}"
        started = kubelet.container(pod, objects, ip=ip)
        names = self._names(pod, started)
        endpoint = {"Aliases": names, "IPAMConfig": None}
        config = {
            "Image": self._image,
            "Entrypoint": list(started.command),
            "Cmd": list(started.args),
            "Env": [f"{key}={value}" for key, value in started.env.items()],
            "Hostname": started.host,
            "User": f"{started.user}:{started.group}",
            "WorkingDir": started.folder,
            "Labels": {LABEL: self.lab.namespace},
            "HostConfig": {
                "NetworkMode": self.network,
                "ShmSize": started.shm_bytes,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges:true"],
                "Binds": [f"{source}:{path}" for path, source in started.binds.items()],
            },
            "NetworkingConfig": {"EndpointsConfig": {self.network: endpoint}},
        }
        container_id = self._engine.create_container_from_config(config)["Id"]
        self._engine.put_archive(container_id, "/", _volumes(started))
        self._engine.start(container_id)
        self._running[name] = container_id
        self.lab.begin(name)
        thread = threading.Thread(target=self._log, args=(name, container_id), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _names(self, pod: dict[str, Any], started: kubelet.Started) -> list[str]:
        """Return the host names of a pod: its own and those of its services."""
        names = [started.host] if started.domain else []
        names += [f"{started.host}.{started.domain}"] if started.domain else []
        labels = pod["metadata"]["labels"].items()
        for item in self.lab.get(self.lab.core("Service"))["items"]:
            selector = item["spec"].get("selector")
            if selector and selector.items() <= labels:
                names.append(item["metadata"]["name"])
        return [*names, *(f"{name}.{self.lab.namespace}.svc" for name in names)]

    def _log(self, pod: str, container: str) -> None:
        """Serve the container's log as the kubelet does."""
        log = self.lab.log(pod)
        rest = b""
        stream = self._engine.logs(container, stream=True, follow=True, timestamps=True)
        for piece in stream:
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            for line in whole.split(b"\n") if newline else ():
                moment, _, text = line.partition(b" ")
                log.write(text, at=moment.decode())

    def _exit_codes(self) -> dict[str, int]:
        """Report newly ended containers to the API server; return all exit codes by pod."""
        for pod, container in list(self._running.items()):
            state = self._engine.inspect_container(container)["State"]
            if state["Running"]:
                continue
            del self._running[pod]
            time.sleep(0.3)  # the engine may still be delivering the last log lines
            reason = "OOMKilled" if state["OOMKilled"] else ""
            self.lab.finish(pod, state["ExitCode"], reason)
        codes = {}
        self._pods = self._listed()
        for item in self._pods:
            states = (item["status"].get("containerStatuses") or [{}])[0].get("state") or {}
            if "terminated" in states:
                codes[item["metadata"]["name"]] = states["terminated"]["exitCode"]
        return codes

    def _delete_pods(self, *, keep_ended: bool) -> None:
        """Delete pods with their grace period, as the API server and a kubelet would."""
        stopping = []
        for pod, container in list(self._running.items()):
            spec = self.lab.get(self.lab.core("Pod", pod))["spec"]
            grace_s = spec["terminationGracePeriodSeconds"]
            options = {"timeout": grace_s}
            stop = threading.Thread(target=self._engine.stop, args=(container,), kwargs=options)
            stop.start()
            stopping.append((pod, stop))
            del self._running[pod]
        for pod, stop in stopping:
            stop.join()
            time.sleep(0.3)  # as above
            self.lab.log(pod).end()
            self.lab.delete(pod)
        if not keep_ended:
            for item in self._listed():
                self.lab.delete(item["metadata"]["name"])
        kubelet_ = self.lab.cluster.kubelet
        for key in list(kubelet_.logs):
            namespace, _, pod = key.partition("/")
            if namespace == self.lab.namespace and not self.lab.get(self.lab.core("Pod", pod)):
                kubelet_.forget(namespace, pod)


def _nodes(pods: list[dict[str, Any]]) -> dict[str, int]:
    """Return the nodes of pods of an Indexed Job, by name."""
    return {
        item["metadata"]["name"]: int(item["metadata"]["annotations"][operators.INDEX])
        for item in pods
    }


def _held(*kinds: str) -> dict[str, Any]:
    """Return these conditions of a Job, as true."""
    return {"conditions": [{"type": kind, "status": "True"} for kind in kinds]}


def _volumes(started: kubelet.Started) -> bytes:
    """Return the volumes as a tar; files belong to root and the pod's group, folders are open."""
    group = int(started.group)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        for path in started.empty:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.mode, member.gid = tarfile.DIRTYPE, 0o2777, group
            members.addfile(member)
        for path, file in started.files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.mode, member.gid, member.size = file.mode, group, len(file.data)
            members.addfile(member, io.BytesIO(file.data))
    return data.getvalue()
