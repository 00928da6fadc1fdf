"""The emulator: creates its parts, and serves requests until it is stopped."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from cloudjob.emulator import state
from cloudjob.emulator.app import Api
from cloudjob.emulator.auth import Gateway
from cloudjob.emulator.database import Database
from cloudjob.emulator.docker_nodes import DockerRuntime, check_image, gateway
from cloudjob.emulator.fault_injection import Faults
from cloudjob.emulator.http_server import LOOPBACK, HttpServer, bind, port_of
from cloudjob.emulator.nodes import ImageMissing, NewKeys
from cloudjob.emulator.obs.client import Obs
from cloudjob.emulator.obs.proxy import Proxy
from cloudjob.emulator.obs.request import Refusal
from cloudjob.emulator.obs.seaweedfs import SeaweedFS
from cloudjob.emulator.obs.signatures import ObsSignatures
from cloudjob.emulator.process_nodes import ProcessRuntime
from cloudjob.emulator.routes import (
    account,
    algorithms,
    authorizations,
    control,
    experiments,
    iam,
    images,
    job_details,
    jobs,
    not_enabled,
    pools,
    tags,
    workspaces,
)
from cloudjob.emulator.scheduler import Scheduler
from cloudjob.emulator.service import EmulatedService, Runtime
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import Account, Address
from cloudjob.errors import BackendError

ENDPOINTS = (
    *jobs.ENDPOINTS,
    *job_details.ENDPOINTS,
    *account.ENDPOINTS,
    *pools.ENDPOINTS,
    *workspaces.ENDPOINTS,
    *authorizations.ENDPOINTS,
    *algorithms.ENDPOINTS,
    *experiments.ENDPOINTS,
    *tags.ENDPOINTS,
    *images.ENDPOINTS,
    *iam.ENDPOINTS,
    *control.ENDPOINTS,
    *not_enabled.ENDPOINTS,
)
_SKEW_S, _SLOW_S = 3600.0, 1.0


class Emulator:
    """An emulator with its state in ``folder``; the main thread must create and close it.

    Args:
        seaweedfs: The launched server, which need not answer yet.
    """

    def __init__(
        self, folder: Path, settings: Settings, account: Account, seaweedfs: SeaweedFS
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._account = account
        self._seaweedfs = seaweedfs
        self._database = Database(folder / state.DATABASE)
        self._faults = Faults()
        self._stop = threading.Event()
        self._services: dict[str, EmulatedService] = {}
        self._server = HttpServer()

    def start(self, port: int) -> Address:
        """Start all parts, and return the addresses.

        Args:
            port: The port of the API; 0 for the same as before.

        Raises:
            CloudJobError: A part does not start.
        """
        kind, bridge, note = kind_of(self._settings)
        old = state.address(self._folder)
        s3 = [_bind(_port_of(old.s3_endpoint) if old else 0)]
        of_nodes = f"http://{bridge or LOOPBACK}:{port_of(s3[0])}"
        s3_endpoint = f"http://{LOOPBACK}:{port_of(s3[0])}"
        if bridge and sys.platform == "linux":
            # Containers and this machine can both reach this address, so they share one endpoint.
            s3.append(bridge_socket(bridge, port_of(s3[0])))
            s3_endpoint = of_nodes
        api = [_api_socket(port, _port_of(old.endpoint) if old else 0)]
        api_of_nodes = f"http://{bridge or LOOPBACK}:{port_of(api[0])}"
        if bridge and sys.platform == "linux":
            api.append(bridge_socket(bridge, port_of(api[0])))
        # Through the proxy, so that injected faults of OBS affect the platform, too.
        obs = Obs(s3_endpoint, self._account.owner.keys, self._settings.region)
        access = Gateway(self._account, self._settings, self._database, self._clock)
        runtime = self._runtime(kind, access.agency_keys, of_nodes, api_of_nodes)
        note = "; ".join(filter(None, (note, runtime.note)))
        for project in self._account.projects.values():
            self._services[project] = self._service(project, obs, runtime, access)
        token = secrets.token_urlsafe(24)
        hosts = (LOOPBACK, bridge) if bridge else (LOOPBACK,)
        self._server.add(Api(ENDPOINTS, self._services, token, self._clock, hosts), api)
        # An injected error of the clock is one of the API; OBS has a clock of its own.
        signatures = ObsSignatures(self._account, self._database, time.time)
        keys = (self._seaweedfs.bucket_keys, self._seaweedfs.object_keys)
        self._server.add(Proxy(self._seaweedfs.socket, hosts, keys, self._inject, signatures), s3)
        self._seaweedfs.await_ready()
        self._server.start()
        for service in self._services.values():
            service.scheduler.start()
        address = self._address(port_of(api[0]), s3_endpoint, kind, note, token)
        state.write_private(self._folder / state.ADDRESS, json.dumps(asdict(address)))
        return address

    def _service(
        self, project: str, obs: Obs, runtime: Runtime, access: Gateway
    ) -> EmulatedService:
        """Return the service of one project, with its own jobs and queue."""
        folder = self._folder / state.JOBS
        folder.mkdir(mode=0o700, exist_ok=True)
        database = self._database
        if project != self._account.project_id:
            path = self._folder / f"{project}-{state.DATABASE}"
            database = Database(path)
        service = EmulatedService(
            account=self._account,
            settings=self._settings,
            database=database,
            faults=self._faults,
            obs=obs,
            access=access,
            runtime=runtime,
            folder=folder,
            projects=self._services,
        )
        service.scheduler = Scheduler(service)
        return service

    def _runtime(self, kind: str, new_keys: NewKeys, s3_endpoint: str, api: str) -> Runtime:
        home = self._folder / state.BACKENDS
        home.mkdir(mode=0o700, exist_ok=True)
        runtime_class = DockerRuntime if kind == "docker" else ProcessRuntime
        return runtime_class(home, self._settings, new_keys, s3_endpoint, api)

    def _address(self, port: int, s3: str, kind: str, note: str, token: str) -> Address:
        account, settings = self._account, self._settings
        owner, *others = account.users
        endpoint = f"http://{LOOPBACK}:{port}"
        return Address(
            pid=os.getpid(),
            endpoint=endpoint,
            iam_endpoint=endpoint,
            s3_endpoint=s3,
            access_key=owner.keys.access_key,
            secret_key=owner.keys.secret_key,
            project_id=account.project_id,
            region=settings.region,
            user=owner.name,
            domain=settings.domain,
            password=owner.password,
            engine=kind,
            note=note,
            control=token,
            users={
                user.name: {
                    "access_key": user.keys.access_key,
                    "secret_key": user.keys.secret_key,
                    "password": user.password,
                }
                for user in others
            },
            projects={name: account.projects[name] for name in settings.projects},
        )

    def wait(self) -> None:
        """Wait for SIGTERM or SIGINT, and restart SeaweedFS if it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        while not self._stop.wait(0.5):
            if not self._seaweedfs.is_alive():
                sys.stderr.write("SeaweedFS ended and is restarted\n")
                self._seaweedfs.start()

    def close(self) -> None:
        """Stop everything except running jobs, which the next emulator resumes."""
        self._server.close()
        for service in self._services.values():
            service.scheduler.close()
        self._seaweedfs.stop()
        for service in self._services.values():
            service.database.close()

    # -- faults -------------------------------------------------------------------------------

    def _clock(self) -> float:
        skew = self._faults.find("clock-skew")
        return time.time() + ((skew.amount or _SKEW_S) if skew else 0.0)

    def _inject(self, target: str, needs_space: bool) -> Refusal | None:
        slow = self._faults.take("slow-obs", path=target)
        delay_s = (slow.amount or _SLOW_S) if slow else 0.0
        if self._faults.take("obs-error", path=target):
            return Refusal(503, "ServiceUnavailable", "Reduce your request rate.", delay_s)
        if needs_space and self._faults.take("full-obs", path=target):
            return Refusal(403, "InsufficientStorageSpace", "Insufficient storage space.", delay_s)
        return Refusal(delay_s=delay_s) if delay_s else None


def kind_of(settings: Settings) -> tuple[str, str, str]:
    """Return the kind of nodes, the host that containers reach, and a note for the user.

    Raises:
        BackendError: The settings require containers, and no engine can run them.
    """
    if settings.engine == "process":
        return "process", "", ""
    # Only on Linux can nodes be processes.
    engine = "docker" if sys.platform != "linux" else settings.engine
    note = ""
    try:
        bridge = gateway()
        bridge_socket(bridge, 0).close()
        check_image(settings.image)
    except ImageMissing:
        note = (
            f"the engine does not have the image {settings.image} for presets; "
            "`cloudjob image build base` makes cloudjob/base"
        )
    except BackendError as error:
        if engine == "docker":
            raise
        note = error.message
    if note and engine == "auto":
        return "process", "", f"nodes are processes: {note}"
    return "docker", bridge, note


def bridge_socket(address: str, port: int) -> socket.socket:
    """Return a listening socket at an address that containers can reach.

    Raises:
        BackendError: The address is not one of this machine.
    """
    try:
        return bind((sys.platform == "linux" and address) or LOOPBACK, port)
    except OSError as error:
        raise BackendError(
            f"listening for containers on {address}:{port}: {os.strerror(error.errno or 0)}",
            hint="the engine must run on this machine and as root; else set engine: process",
        ) from error


def _api_socket(port: int, old: int) -> socket.socket:
    if not port:
        # The same port as before, so that stored addresses stay valid.
        return _bind(old)
    try:
        return bind(LOOPBACK, port)
    except OSError as error:
        raise BackendError(
            f"listening on {LOOPBACK}:{port}: {os.strerror(error.errno or 0)}",
            hint="give another --port",
        ) from error


def _bind(port: int) -> socket.socket:
    """Listen on this port, or on another one if it is in use."""
    try:
        return bind(LOOPBACK, port)
    except OSError:
        return bind(LOOPBACK, 0)


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
