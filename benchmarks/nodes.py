"""Containers that keep running, in which the same job is started and timed in several ways."""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.engine import AT_ONCE, Engine, EngineError
from benchmarks.measure import Failed
from benchmarks.venv import PEERS, ROOT, NotRun

LABEL = "cloudjob.bench"
BARE_PORT = 38889
_INSIDE = "/bench"
_RAN = b"noop ran"
_LIMIT_S = 180.0
# Variables that say where the code comes from and the record goes; here the code is on every node.
_LEFT_OUT = re.compile(r"CLOUDJOB_(CODE_URI|CODE_DIGEST|RECORD_URI|ENV_FILE)=|WORKSPACE=")

# Set-up, not timed, for the subjects without a key and an sshd of their own.
_SET_UP = f"""
    mkdir -p -m 700 .ssh;
    install -m 600 {_INSIDE}/key .ssh/id_ed25519;
    ssh-keygen -y -f .ssh/id_ed25519 >.ssh/authorized_keys;
    printf '%s\\n' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' 'LogLevel ERROR'
        >.ssh/config;
    exec /usr/sbin/sshd -p {BARE_PORT} -h "$HOME/.ssh/id_ed25519" -o PidFile=none
        -o StrictModes=no -o UsePAM=no -o MaxStartups=1000
"""


@dataclass(frozen=True)
class Run:
    """Times of events, in seconds since all nodes got the command to start."""

    first_line_s: float
    done_s: float
    cpu_s: float
    head_cpu_s: float


class Nodes:
    """Containers as cloudjob's docker backend creates them, except that they wait for commands."""

    def __init__(self, count: int, cloudjob: Path, image: str) -> None:
        self.count = count
        self._engine = Engine()
        self._label = f"{LABEL}={os.getpid()}"
        self._name = f"bench-{secrets.token_hex(4)}"
        self._folder = Path(tempfile.mkdtemp(prefix="bench-nodes-"))
        self._meters: list[Path] = []
        self._gates: list[int] = []
        self._outs: list[int] = []
        try:
            self._check(image, cloudjob)
            request = self._request(cloudjob, image)
            self.hosts = [each["config"]["Hostname"] for each in request["containers"]]
            self._write_files()
            self._start(request)
            self._run_commands([_SET_UP] * count, ranks=0)
        except BaseException:
            self.close()
            raise

    def run(self, way: Way) -> Run:
        """Run a job in this way, then restore the nodes.

        Raises:
            Failed: As ``_run_commands`` does.
        """
        commands = [way.command if way.on_all or index == 0 else ":" for index in range(self.count)]
        try:
            return self._run_commands(commands, self.count)
        finally:
            if way.clean_up:
                self._run_commands([way.clean_up] * self.count, 0)

    def _run_commands(self, commands: list[str], ranks: int) -> Run:
        """Start each node's command at the same time and wait until all have ended.

        Raises:
            Failed: Node 0 failed, the line of some rank is missing, or the run took too long.
        """
        before = self._cpu_s()
        messages = _NodeMessages(self._outs)
        for gate, command in zip(self._gates, commands, strict=True):
            os.write(gate, " ".join(command.split()).encode() + b"\n")
        messages.listen()
        ran = sum(text.count(_RAN) for text in messages.outputs)
        if b"bench: exit 0\n" not in messages.outputs[0] or ran != ranks:
            raise Failed(f"{ran} of {ranks} ranks ran; node 0 says {_last(messages.outputs[0])}")
        after = self._cpu_s()
        spent = [late - early for early, late in zip(before, after, strict=True)]
        return Run(messages.first_line_s, messages.ends_s[0], sum(spent), spent[0])

    def close(self) -> None:
        """Remove the containers."""
        self._engine.remove(self._label)
        for descriptor in (*self._gates, *self._outs):
            os.close(descriptor)
        self._gates, self._outs = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self, image: str, cloudjob: Path) -> None:
        """Refuse an image with another version of the entry, as that would be measured instead."""
        script = "from cloudjob.backends.docker.delivery import entry_digest as d; print(d())"
        python = str(cloudjob.parent / "python")
        digest = _output((python, "-c", script)).strip()
        try:
            details = self._engine.request("GET", f"/images/{image}/json")
        except EngineError as error:
            raise NotRun(
                f"no image {image}: cloudjob image build base; --image names another"
            ) from error
        if (details["Config"].get("Labels") or {}).get("cloudjob.entry") != digest:
            raise NotRun(f"the entry in {image} is of another version: cloudjob image build base")

    def _request(self, cloudjob: Path, image: str) -> dict[str, Any]:
        """Return the backend's request to the engine."""
        options = ("--backend", "docker", "--nodes", str(self.count), "--image", image)
        argv = (str(cloudjob), "submit", *options, "--dry-run", "--json", "noop.py")
        env = {**os.environ, "CLOUDJOB_HOME": str(self._folder / "home")}
        text = _output(argv, cwd=ROOT / "benchmarks" / "jobs", env=env)
        request: dict[str, Any] = json.loads(text)["request"]
        return request

    def _write_files(self) -> None:
        # The user in the containers is not the current user.
        self._folder.chmod(0o755)
        folder = self._folder / "jobs"
        folder.mkdir(mode=0o755)
        shutil.copy(ROOT / "benchmarks" / "jobs" / "noop.py", folder)
        for script in (ROOT / "benchmarks" / "gate.sh", PEERS / "serial.sh"):
            shutil.copy(script, self._folder)
        # A key for this run only; only our containers mount this folder.
        key = self._folder / "key"
        _output(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)))
        key.chmod(0o644)
        lines = "".join(f"{host} slots=1\n" for host in self.hosts)
        (self._folder / "hosts").write_text(lines)
        for index in range(self.count):
            self._gates.append(self._fifo(f"in-{index}"))
            self._outs.append(self._fifo(f"out-{index}"))

    def _fifo(self, name: str) -> int:
        path = self._folder / name
        os.mkfifo(path)
        path.chmod(0o666)
        # Opened for reading and writing, so that it neither waits for the other end nor closes with
        # it.
        return os.open(path, os.O_RDWR)

    def _start(self, request: dict[str, Any]) -> None:
        labels = dict([self._label.split("=")])
        network = {"Name": self._name, "Driver": "bridge", "Labels": labels}
        self._engine.request("POST", "/networks/create", network)
        ids = []
        for index, each in enumerate(request["containers"]):
            config = self._config(each["config"], index, labels)
            details = self._engine.request(
                "POST", "/containers/create", config, name=f"{self._name}-{index}"
            )
            ids.append(details["Id"])
        for each in ids:
            self._engine.request("POST", f"/containers/{each}/start")
            state = self._engine.request("GET", f"/containers/{each}/json")["State"]
            self._meters.append(_meter(state["Pid"]))

    def _config(self, config: dict[str, Any], index: int, labels: dict[str, str]) -> dict[str, Any]:
        """Return the backend's configuration of a node, with the gate and our folder added."""
        (endpoint,) = config["NetworkingConfig"]["EndpointsConfig"].values()
        env = [text for text in config["Env"] if not _LEFT_OUT.match(text)]
        settings = [f"CLOUDJOB_SSH_KEY={_INSIDE}/key", f"WORKSPACE={_INSIDE}/jobs"]
        mount = {"Type": "bind", "Source": str(self._folder), "Target": _INSIDE}
        return {
            **config,
            "Entrypoint": ["/usr/bin/tini", "--", "bash", f"{_INSIDE}/gate.sh", str(index)],
            "Cmd": [],
            "Env": [text for text in env if not text.startswith("CLOUDJOB_SSH_KEY=")] + settings,
            "Labels": labels,
            "HostConfig": {**config["HostConfig"], "NetworkMode": self._name, "Mounts": [mount]},
            "NetworkingConfig": {"EndpointsConfig": {self._name: endpoint}},
        }

    def _cpu_s(self) -> list[float]:
        """Return the CPU seconds that each node has used so far."""
        return [_used_s(path) for path in self._meters]


class _NodeMessages:
    """The messages of the nodes from now on, with their times."""

    def __init__(self, outs: list[int]) -> None:
        self.outputs = [b""] * len(outs)
        self.first_line_s = 0.0
        self.ends_s: dict[int, float] = {}
        self._outs = outs
        self._begun = time.perf_counter()

    def listen(self) -> None:
        """Listen until the command of each node has ended.

        Raises:
            Failed: It took too long.
        """
        with selectors.DefaultSelector() as selector:
            for index, out in enumerate(self._outs):
                selector.register(out, selectors.EVENT_READ, index)
            while len(self.ends_s) < len(self._outs):
                left_s = self._begun + _LIMIT_S - time.perf_counter()
                ready = selector.select(max(0.0, left_s))
                if not ready:
                    raise Failed(f"no end after {_LIMIT_S:g} s: {_last(self.outputs[0])}")
                for key, _ in ready:
                    self._take(key.data, os.read(key.fd, 65536))

    def _take(self, index: int, data: bytes) -> None:
        now_s = time.perf_counter() - self._begun
        self.outputs[index] += data
        if not self.first_line_s and _RAN in self.outputs[index]:
            self.first_line_s = now_s
        if b"bench: exit " in self.outputs[index]:
            self.ends_s.setdefault(index, now_s)


class Pool:
    """The current nodes: as many as were requested last."""

    def __init__(self, cloudjob: Path, image: str) -> None:
        self.cloudjob = cloudjob
        self.image = image
        self._nodes: Nodes | None = None

    def nodes(self, count: int) -> Nodes:
        """Return ``count`` nodes.

        Raises:
            NotRun: They cannot be created here.
        """
        if self._nodes is None or self._nodes.count != count:
            self.close()
            print(f"making {count} containers ...", file=sys.stderr, flush=True)
            self._nodes = Nodes(count, self.cloudjob, self.image)
        return self._nodes

    def close(self) -> None:
        """Remove all containers and networks."""
        nodes, self._nodes = self._nodes, None
        if nodes:
            nodes.close()


@dataclass(frozen=True)
class Way:
    """A way to start a job with one rank per node; ``on_all`` runs the command on every node."""

    command: str
    on_all: bool = True
    clean_up: str = ""


# Plain mpirun on node 0, with an sshd on each other node.
MPIRUN = Way(
    f"""
    mpirun -np $MA_NUM_HOSTS -hostfile {_INSIDE}/hosts
        -mca plm_rsh_args "-p {BARE_PORT}" -mca plm_rsh_no_tree_spawn true
        -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib
        python3 {_INSIDE}/jobs/noop.py
    """,
    on_all=False,
)
_SERIAL = f"bash {_INSIDE}/serial.sh python3 {_INSIDE}/jobs/noop.py"
SERIAL = Way(_SERIAL, clean_up='kill "$(cat serial/sshd.pid)"')
# cloudjob's entry, as the image starts it.
ENTRY = Way("/opt/cloudjob/boot.sh noop.py")


# The phases of a submit, as in its record.
PHASES = ("make_s", "stage_s", "bring_up_s", "run_s", "end_s")


def submitted(pool: Pool, source: Path, count: int) -> dict[str, float]:
    """Submit a no-op to the docker backend; return the figures of its phases."""
    pool.close()
    engine = Engine()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        # The nodes write to the store as another user.
        Path(scratch).chmod(0o755)
        home = Path(scratch, "home")
        env = {**os.environ, "CLOUDJOB_HOME": str(home)}
        options = ("--backend", "docker", "--nodes", str(count), "--image", pool.image)
        begun = time.time()
        try:
            text = _output((str(pool.cloudjob), "submit", *options, "noop.py"), cwd=source, env=env)
            ended = time.time()
            listed = _output((str(pool.cloudjob), "list", "--json"), env=env)
        finally:
            # The job cleans up by itself, unless this process was killed.
            for owner in home.glob("docker/owner"):
                engine.remove(f"cloudjob.owner={owner.read_text()}")
    if text.count("noop ran") != count:
        raise Failed(f"the output of {text.count('noop ran')} of {count} ranks came out")
    (status,) = json.loads(listed)
    marks = {each["name"]: each for each in status["phases"]}
    stage, bring_up, run = (marks[name] for name in ("stage", "bring-up", "run"))
    return {
        "wall_s": ended - begun,
        "make_s": _moment(stage["started_at"]) - begun,
        "stage_s": _moment(stage["ended_at"]) - _moment(stage["started_at"]),
        "bring_up_s": _moment(bring_up["ended_at"]) - _moment(stage["ended_at"]),
        "run_s": _moment(run["ended_at"]) - _moment(run["started_at"]),
        "end_s": ended - _moment(run["ended_at"]),
    }


def engine_alone(pool: Pool, count: int) -> dict[str, float]:
    """Create, start and remove containers that do nothing: the lower limit for any job."""
    pool.close()
    engine = Engine()
    label = {LABEL: str(os.getpid())}
    name = f"bench-{secrets.token_hex(4)}"

    def make(index: int) -> str:
        config = {
            "Image": pool.image,
            "Entrypoint": ["/usr/bin/tini", "--", "sleep", "365d"],
            "Labels": label,
            "HostConfig": {"NetworkMode": name},
        }
        container_id = engine.request("POST", "/containers/create", config, name=f"{name}-{index}")
        return str(container_id["Id"])

    def start(container_id: str) -> None:
        engine.request("POST", f"/containers/{container_id}/start")

    begun = time.perf_counter()
    try:
        network = {"Name": name, "Driver": "bridge", "Labels": label}
        engine.request("POST", "/networks/create", network)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(start, list(threads.map(make, range(count)))))
        started = time.perf_counter()
    finally:
        engine.remove(f"{LABEL}={os.getpid()}")
    ended = time.perf_counter()
    return {"wall_s": ended - begun, "make_s": started - begun, "end_s": ended - started}


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _meter(process: int) -> Path:
    """Return the file in which the kernel counts the CPU time of a container (cgroups 1 and 2)."""
    groups = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    for line in groups:
        _, names, path = line.split(":", 2)
        if "cpuacct" in names.split(","):
            return Path(f"/sys/fs/cgroup/cpuacct{path}/cpuacct.usage")
    path = groups[-1].partition("::")[2]
    return Path(f"/sys/fs/cgroup{path}/cpu.stat")


def _used_s(meter: Path) -> float:
    fields = meter.read_text().split()
    return int(fields[0]) / 1e9 if len(fields) == 1 else int(fields[1]) / 1e6


def _last(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-300:] or "nothing"


def _output(argv: tuple[str, ...], **options: Any) -> str:
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            argv, check=False, capture_output=True, text=True, **options
        )
    except OSError as error:
        raise NotRun(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        raise NotRun(f"{argv[0]}: exit {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout
