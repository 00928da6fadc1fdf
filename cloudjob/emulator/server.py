"""The process of the emulator: puts its parts together, answers, and ends when it is asked to."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

from cloudjob import locks
from cloudjob.emulator import state
from cloudjob.emulator.access import Access
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.answers import body as error_body
from cloudjob.emulator.catalog import Catalog
from cloudjob.emulator.control import PREFIX, Control
from cloudjob.emulator.database import Database
from cloudjob.emulator.gate import Gate, Refusal, is_write
from cloudjob.emulator.ground import Context
from cloudjob.emulator.iam import Iam
from cloudjob.emulator.jobs import Jobs
from cloudjob.emulator.nodes import (
    DockerMachines,
    ImageMissing,
    Machines,
    ProcessMachines,
    check_image,
    gateway,
)
from cloudjob.emulator.obs import Obs
from cloudjob.emulator.parts import Parts
from cloudjob.emulator.resign import Key, resigned
from cloudjob.emulator.runner import Runner
from cloudjob.emulator.service import Service
from cloudjob.emulator.settings import Settings, load
from cloudjob.emulator.state import Address
from cloudjob.emulator.web import Answer, Request, Routes, Server, is_from_here
from cloudjob.emulator.weed import Weed
from cloudjob.errors import BackendError, CloudJobError

LOOPBACK = "127.0.0.1"
READY = b"ready\n"
_SKEW_S, _SLOW_S = 3600.0, 1.0
_IAM = "/v3"
BUCKET = "cloudjob"


class Front:
    """Answers every request: faults first, then who asks, then what is asked."""

    def __init__(self, service: Service, access: Access, word: str) -> None:
        self._database = service.database
        self._access = access
        self._control = Control(service, word)
        self._routes = Routes()
        for part in (
            Jobs(service),
            Parts(service),
            Catalog(service),
            Iam(access, service.settings),
            self._control,
        ):
            part.add_to(self._routes)

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request; it never raises."""
        try:
            return self._answer(request)
        except ApiError as error:
            body = None if error.status == 204 else error_body(error, request.id)
            headers = {"Retry-After": "1"} if error.status == 429 else {}
            return Answer(error.status, body, headers)
        except Exception:  # noqa: BLE001 (a fault of ours is the service's internal error)
            traceback.print_exc()
            return Answer(500, error_body(ApiError("ModelArts.0010"), request.id))

    def _answer(self, request: Request) -> Answer:
        if not is_from_here(request.headers, (LOOPBACK,)):
            raise ApiError("APIGW.0101")
        path = request.path
        found = self._routes.find(request.method, path)
        if path.startswith(PREFIX):
            self._control.check(request)
        else:
            self._go_wrong(path)
        if found is None:
            raise ApiError("APIGW.0101")
        endpoint, words = found
        if not path.startswith((PREFIX, _IAM)):
            self._access.check(request)
        answer = endpoint(replace(request, words=words))
        is_lost = not path.startswith(PREFIX) and self._database.take_fault(
            "lost-answer", path=path
        )
        return replace(answer, is_lost=True) if is_lost else answer

    def _go_wrong(self, path: str) -> None:
        if self._database.take_fault("throttle", path=path):
            raise ApiError("APIGW.0308", "1,time:1 second")
        if self._database.take_fault("error", path=path):
            raise ApiError("ModelArts.0010")


class Emulator:
    """One emulator, whose state lies in ``folder``; made and ended in the main thread."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        path = folder / state.SETTINGS
        self._settings = load(path if path.exists() else None)
        self._account = state.account(folder, self._settings)
        self._database = Database(folder / state.DATABASE)
        # The bucket is where the backend modelarts keeps code and outputs when no store is named.
        self._weed = Weed(folder / state.OBS, self._account, BUCKET)
        self._stop = threading.Event()
        self._runner: Runner | None = None
        self._servers: list[Server] = []

    def start(self) -> Address:
        """Start everything, and say where it listens."""
        self._weed.start()
        kind, bridge, note = _kind(self._settings)
        gate = Gate(self._weed.socket, self._judge, self._sign)
        old = state.address(self._folder)
        s3_port = _listen(gate, LOOPBACK, _port_of(old.s3_endpoint) if old else 0)
        host = LOOPBACK
        if bridge:
            # Containers reach this address, and so do we: one endpoint for both.
            gate.listen(bridge, s3_port)
            host = bridge
        s3_endpoint = f"http://{host}:{s3_port}"
        machines = self._machines(kind, s3_endpoint)
        # Through the gate: what goes wrong with OBS goes wrong for the platform as well.
        obs = Obs(s3_endpoint, self._account, self._settings.region)
        self._runner = self._make_runner(obs, machines)
        word = secrets.token_urlsafe(24)
        port = self._serve(obs, self._runner, word, old)
        self._runner.start()
        found = self._address(port, s3_endpoint, kind, note, word)
        state.write_private(self._folder / state.ADDRESS, {**found.shown(), "control": word})
        return found

    def _make_runner(self, obs: Obs, machines: Machines) -> Runner:
        jobs = self._folder / state.JOBS
        jobs.mkdir(mode=0o700, exist_ok=True)
        return Runner(Context(self._settings, self._database, obs, machines, jobs))

    def _machines(self, kind: str, s3_endpoint: str) -> Machines:
        home = self._folder / state.BACKENDS
        home.mkdir(mode=0o700, exist_ok=True)
        made = DockerMachines if kind == "docker" else ProcessMachines
        return made(home, self._settings, self._account, s3_endpoint)

    def _serve(self, obs: Obs, runner: Runner, word: str, old: Address | None) -> int:
        service = Service(self._account, self._settings, self._database, obs, runner)
        access = Access(self._account, self._settings, self._database, self._clock)
        front = Front(service, access, word)
        server = _server(front, self._port, _port_of(old.endpoint) if old else 0)
        server.clock = self._clock
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        return server.server_port

    def _address(self, port: int, s3: str, kind: str, note: str, word: str) -> Address:
        account, settings = self._account, self._settings
        endpoint = f"http://{LOOPBACK}:{port}"
        return Address(
            pid=os.getpid(),
            endpoint=endpoint,
            iam_endpoint=endpoint,
            s3_endpoint=s3,
            access_key=account.access_key,
            secret_key=account.secret_key,
            project_id=account.project_id,
            region=settings.region,
            user=settings.user,
            domain=settings.domain,
            password=account.password,
            engine=kind,
            note=note,
            control=word,
        )

    def wait(self) -> None:
        """Go on until somebody asks to end; keep OBS alive meanwhile."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        while not self._stop.wait(0.5):
            if not self._weed.is_alive():
                sys.stderr.write("SeaweedFS has ended; it is started again\n")
                self._weed.start()

    def close(self) -> None:
        """End everything; jobs that run go on, and are found again by the next emulator."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self._runner:
            self._runner.close()
        self._weed.stop()
        self._database.close()

    # -- faults -------------------------------------------------------------------------------

    def _clock(self) -> float:
        skew = self._database.fault("clock-skew")
        return time.time() + ((skew.amount or _SKEW_S) if skew else 0.0)

    def _sign(self, head: bytes) -> bytes | Refusal:
        own = (self._account.access_key, self._account.secret_key)
        return resigned(head, own, self._key, self._clock())

    def _key(self, access: str) -> Key | None:
        found = self._database.key(access)
        return Key(*found) if found else None

    def _judge(self, method: str, target: str) -> Refusal | None:
        database = self._database
        slow = database.take_fault("slow-obs", path=target)
        delay_s = (slow.amount or _SLOW_S) if slow else 0.0
        if database.take_fault("obs-error", path=target):
            return Refusal(delay_s, 503, "ServiceUnavailable", "Reduce your request rate.")
        if is_write(method, target) and database.take_fault("full-obs", path=target):
            return Refusal(delay_s, 403, "InsufficientStorageSpace", "Insufficient storage space.")
        return Refusal(delay_s) if delay_s else None


def _kind(settings: Settings) -> tuple[str, str, str]:
    """Return what plays the nodes, the address that containers reach, and why it is so."""
    if settings.engine == "process":
        return "process", "", ""
    try:
        bridge = gateway()
        if settings.engine == "docker":
            return "docker", bridge, ""
        check_image(settings.image)
    except BackendError as error:
        if settings.engine == "docker":
            raise
        return "process", "", f"nodes are processes: {error.message}"
    except ImageMissing:
        words = f"nodes are processes: the engine does not have the image {settings.image}"
        return "process", "", f"{words} (`cloudjob image build base` makes it)"
    return "docker", bridge, ""


def _listen(gate: Gate, host: str, wanted: int) -> int:
    try:
        return gate.listen(host, wanted)
    except OSError:
        return gate.listen(host, 0)


def _server(front: Front, asked: int, old: int) -> Server:
    if asked:
        try:
            return Server((LOOPBACK, asked), front.answer)
        except OSError as error:
            raise BackendError(
                f"listening on {LOOPBACK}:{asked}: {error.strerror}", hint="give another --port"
            ) from error
    try:
        # As before, so that what a user has written down stays true.
        return Server((LOOPBACK, old), front.answer)
    except OSError:
        return Server((LOOPBACK, 0), front.answer)


def _lock(folder: Path) -> int | None:
    """Take the lock; who asks whether we run has it for a moment, too."""
    for _ in range(40):
        taken = locks.take(folder / state.LOCK)
        if taken is not None:
            return taken
        time.sleep(0.05)
    return None


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def main() -> None:
    """Run an emulator: ``FOLDER PORT``; says ``ready`` or what is wrong on its output."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    os.umask(0o077)
    taken = _lock(folder)
    try:
        if taken is None:
            raise BackendError(f"starting the emulator in {folder}: one runs already")
        emulator = Emulator(folder, port)
        emulator.start()
    except CloudJobError as error:
        os.write(1, f"{error.message}\n{error.hint}\n".encode())
        os._exit(1)
    os.write(1, READY)
    # Whoever started us goes; from here on everything is told to the log.
    os.dup2(2, 1)
    emulator.wait()
    emulator.close()
    # Threads of jobs are in the middle of things, which the next emulator takes up.
    os._exit(0)
