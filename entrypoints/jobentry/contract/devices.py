"""The devices of a node in one line: ``SERVER[@SUPER_POD] DEVICE=ADDRESS[/SUPER_DEVICE]...``.

A job file lists them where the platform does not; the entry turns them into rank tables.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Device(NamedTuple):
    """An accelerator: its number on its server and its address in the accelerators' network.

    Args:
        super_id: Its number in its super pod; empty without one.
    """

    id: str
    address: str
    super_id: str = ""


class Server(NamedTuple):
    """The devices of one node.

    Args:
        super_pod: The super pod of the server; empty without one.
    """

    id: str
    devices: tuple[Device, ...]
    super_pod: str = ""


def parse(line: str) -> Server:
    """Parse the devices of one node.

    Raises:
        ValueError: The line is invalid; the message completes a sentence that starts with it.
    """
    fields = line.split()
    if len(fields) < 2:
        raise ValueError("names no devices")
    name, _, pod = fields[0].partition("@")
    devices = []
    for field in fields[1:]:
        match = re.match(r"([0-9]{1,4})=([0-9A-Fa-f.:]+)(?:/([0-9]+))?\Z", field, re.ASCII)
        if not match:
            raise ValueError(f"has {field[:60]!r}, which is not DEVICE=ADDRESS")
        devices.append(Device(*(text or "" for text in match.groups())))
    if len({device.id for device in devices}) < len(devices):
        raise ValueError("names a device twice")
    if {bool(device.super_id) for device in devices} != {bool(pod)}:
        raise ValueError("must name a super pod and every device's number in it, or neither")
    return Server(name, tuple(devices), pod)
