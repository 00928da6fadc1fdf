"""The start of a job: its shared folders, its network and its containers."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from itertools import islice
from pathlib import Path
from typing import Any

from cloudjob.backends.delivery import BOOT, new_ssh_key
from cloudjob.backends.docker import delivery, engine, shared_folders
from cloudjob.backends.docker import request as requests
from cloudjob.backends.docker.request import DockerRequest
from cloudjob.errors import BackendError


def start(client: Any, request: DockerRequest, image: Mapping[str, Any]) -> None:
    """Start the containers of a job; if this raises, some of them may be left behind.

    Args:
        image: What the engine knows about the image of the job.
    """
    with_entry = request.has_entry and needs_entry(image, request.image)
    with engine.translate_errors("asking the engine for its configuration"):
        info = client.info()
    _share_folders(request, info)
    addresses = _make_network(client, request)
    # Podman has other log drivers, which also keep every byte.
    has_driver = requests.LOG_DRIVER in ((info.get("Plugins") or {}).get("Log") or [])
    _make_containers(client, request, addresses, with_entry=with_entry, has_driver=has_driver)


def needs_entry(image: Mapping[str, Any], reference: str) -> bool:
    """Whether the image's entry has another version than ours.

    Raises:
        BackendError: The image has no entry.
    """
    config = image.get("Config") or {}
    if not any(str(argument).endswith(BOOT) for argument in config.get("Entrypoint") or ()):
        raise BackendError(
            f"starting containers of {reference}: its ENTRYPOINT is not cloudjob's",
            hint="`cloudjob docs images` shows how to add it; `cloudjob doctor --image` checks it",
        )
    return (config.get("Labels") or {}).get(delivery.ENTRY_LABEL) != delivery.entry_digest()


def _share_folders(request: DockerRequest, info: Mapping[str, Any]) -> None:
    options = info.get("SecurityOptions") or []
    maps_users = any("rootless" in option or "userns" in option for option in options)
    with engine.translate_errors(f"sharing folders with the containers of job {request.job}"):
        for path in request.written:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (*request.written, *request.read):
            shared_folders.open_to_containers(Path(path), maps_users=maps_users)
        for path in request.outputs:
            shared_folders.check_output(Path(path), maps_users=maps_users)


def _make_network(client: Any, request: DockerRequest) -> list[str]:
    """Create the network of the job and return an address for each node.

    A node must know its address before it starts, and the engine accepts chosen addresses only in a
    network whose range was chosen too. So the engine picks a free range, which we then choose.
    """
    doing = f"creating the network of job {request.job}"
    network = request.network
    options = {
        "name": network["Name"],
        "driver": network["Driver"],
        "labels": network["Labels"],
        "check_duplicate": network["CheckDuplicate"],
    }
    for attempt in range(3):
        with engine.translate_errors(doing):
            network_id = client.create_network(**options)["Id"]
            pool = client.inspect_network(network_id)["IPAM"]["Config"][0]
            client.remove_network(network_id)
        pool = {key: pool[key] for key in ("Subnet", "Gateway") if key in pool}
        try:
            with engine.translate_errors(doing):
                client.create_network(**options, ipam={"Config": [pool]})
        except BackendError as error:
            # Another job has taken this range in the meantime.
            if attempt == 2 or not engine.is_refusal(error, engine.EngineRefusal.RANGE_IS_TAKEN):
                raise
            continue
        break
    gateway = pool.get("Gateway", "").partition("/")[0]
    free = (str(address) for address in ip_network(pool["Subnet"]).hosts())
    addresses = list(islice((item for item in free if item != gateway), len(request.nodes)))
    if len(addresses) < len(request.nodes):
        raise BackendError(
            f"{doing}: {pool['Subnet']} is too small for {len(request.nodes)} nodes",
            hint="set larger ranges as default-address-pools in the engine's daemon.json",
        )
    return addresses


def _make_containers(
    client: Any, request: DockerRequest, addresses: list[str], *, with_entry: bool, has_driver: bool
) -> None:
    key = new_ssh_key() if request.has_key else b""
    hosts = tuple(node.host for node in request.nodes)
    fixed_hosts = [
        f"{name}:{address}"
        for names, address in zip(request.aliases, addresses, strict=False)
        for name in names
    ]

    def make(index: int) -> str:
        node = request.nodes[index]
        config = requests.with_address(node.config, addresses[index])
        if not has_driver:
            del config["HostConfig"]["LogConfig"]
        if fixed_hosts:
            config["HostConfig"]["ExtraHosts"] = fixed_hosts
        with engine.translate_errors(f"creating the container {node.name}"):
            container_id = client.create_container_from_config(config, node.name)["Id"]
            archive = delivery.archive(node, hosts, key, with_entry=with_entry)
            client.put_archive(container_id, "/", archive)
        return str(container_id)

    def start(container_id: str) -> None:
        with engine.translate_errors(f"starting job {request.job}"):
            client.start(container_id)

    engine.for_each(engine.for_each(range(len(request.nodes)), make), start)
