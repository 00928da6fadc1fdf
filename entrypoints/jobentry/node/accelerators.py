"""Samples the GPUs and NPUs of this node: NVIDIA's through NVML, Ascend's through npu-smi."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import threading
import time
from typing import Any, Mapping, Sequence

from jobentry.contract.journal import Device
from jobentry.system.processes import output_of

_MIB = 1024 * 1024
# Constants of nvml.h.
_XID = 8
_TEMPERATURE_OF_CHIP = _VOLATILE = 0
_UNCORRECTED = 1
# Critical errors of NVIDIA's driver: https://docs.nvidia.com/deploy/xid-errors/
_XIDS = {
    13: "an error in the program's own kernel, such as an index out of range",
    31: "the program used an address that is not its own",
    43: "the program's kernel was stopped for an error of it",
    48: "its memory is faulty",
    62: "its own firmware stopped",
    63: "its memory is faulty",
    64: "its memory is faulty",
    74: "NVLink is faulty",
    79: "it is no longer on the PCIe bus",
    94: "its memory is faulty",
    95: "its memory is faulty",
    119: "its own firmware does not answer",
    120: "its own firmware stopped",
}
# An error so long before the end of a rank may be the reason for it.
_RECENT_S = 30.0
# npu-smi takes about a second of CPU time, so it runs for at most 1/300 of the time.
_NPU_SHARE = 300
_NPU_PERIOD_S = 60.0
_NPU_TIMEOUT_S = 20.0


class Accelerators:
    """The devices of a node; those of this class are none."""

    def read(self) -> tuple[Device, ...]:
        """Return the state of each device; empty while it is too early to ask again."""
        return ()

    def recent_errors(self) -> str:
        """Return the critical errors of the last seconds in words; empty if there were none."""
        return ""


def find() -> Accelerators:
    """Return the devices of this node that can be read."""
    if glob.glob("/dev/nvidia[0-9]*"):
        with contextlib.suppress(ImportError, OSError, AttributeError):
            return Nvml()
    if glob.glob("/dev/davinci[0-9]*"):
        # On ModelArts it is not on PATH for every user.
        program = shutil.which("npu-smi") or "/usr/local/sbin/npu-smi"
        if os.path.exists(program):
            return NpuSmi((program, "info"))
    return Accelerators()


class Nvml(Accelerators):
    """Reads GPUs through the driver's library, which needs no process.

    Raises:
        OSError: The library or its driver is missing.
    """

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        import ctypes

        self._types = ctypes
        self._nvml = ctypes.CDLL(library)
        if self._nvml.nvmlInit_v2():
            raise OSError("NVML does not start")
        count = ctypes.c_uint()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self._devices = [self._device(index) for index in range(count.value)]
        # The last error of each GPU, and when it was read.
        self._errors: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._events = self._watch_errors()
        self._first_ecc_errors = self._ecc_errors()

    def read(self) -> tuple[Device, ...]:
        """Return the state of each GPU."""
        self._read_errors()
        return tuple(self._read(index, device) for index, device in enumerate(self._devices))

    def recent_errors(self) -> str:
        """Return the critical errors of the last seconds in words; empty if there were none."""
        self._read_errors()
        now_s = time.monotonic()
        xids = {
            index: xid
            for index, (xid, at_s) in sorted(self._errors.items())
            if now_s - at_s <= _RECENT_S
        }
        new_ecc_errors = {
            index: after - before
            for index, (before, after) in enumerate(zip(self._first_ecc_errors, self._ecc_errors()))
        }
        return describe(xids, new_ecc_errors)

    def _device(self, index: int) -> Any:
        device = self._types.c_void_p()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(index, self._types.byref(device))
        return device

    def _read(self, index: int, device: Any) -> Device:
        types = self._types
        used = self._query("nvmlDeviceGetUtilizationRates", device, types.c_uint * 2)
        memory = self._query("nvmlDeviceGetMemoryInfo", device, types.c_ulonglong * 3)
        power = self._query("nvmlDeviceGetPowerUsage", device, types.c_uint * 1)
        most = self._query("nvmlDeviceGetEnforcedPowerLimit", device, types.c_uint * 1)
        heat = self._query(
            "nvmlDeviceGetTemperature", device, types.c_uint * 1, _TEMPERATURE_OF_CHIP
        )
        return Device(
            kind="gpu",
            number=index,
            utilisation_percent=used[0] if used else None,
            # Total, free, used.
            memory_mib=memory[2] / _MIB if memory else None,
            memory_limit_mib=memory[0] / _MIB if memory else None,
            power_w=power[0] / 1000 if power else None,
            power_limit_w=most[0] / 1000 if most else None,
            temperature_c=heat[0] if heat else None,
            ecc_errors=self._ecc_errors_of(device),
            xid=self._errors.get(index, (0, 0.0))[0],
        )

    def _ecc_errors(self) -> list[int]:
        """Return how many errors the memory of each GPU has had that it could not correct."""
        return [self._ecc_errors_of(device) or 0 for device in self._devices]

    def _ecc_errors_of(self, device: Any) -> int | None:
        kind = self._types.c_ulonglong * 1
        name = "nvmlDeviceGetTotalEccErrors"
        errors = self._query(name, device, kind, _UNCORRECTED, _VOLATILE)
        return errors[0] if errors else None

    def _query(self, name: str, device: Any, kind: Any, *arguments: int) -> Sequence[int] | None:
        """Call a function that stores its result; None if the device does not support it."""
        answer = kind()
        failed = getattr(self._nvml, name)(device, *arguments, self._types.byref(answer))
        return None if failed else list(answer)

    def _watch_errors(self) -> Any:
        """Return the set of events in which the driver reports critical errors, or None."""
        events = self._types.c_void_p()
        if self._nvml.nvmlEventSetCreate(self._types.byref(events)):
            return None
        for device in self._devices:
            self._nvml.nvmlDeviceRegisterEvents(device, self._types.c_ulonglong(_XID), events)
        return events

    def _read_errors(self) -> None:
        if self._events is None:
            return
        types = self._types

        class Event(types.Structure):  # type: ignore[name-defined, misc]
            """``nvmlEventData_t``."""

            _fields_ = (
                ("device", types.c_void_p),
                ("kind", types.c_ulonglong),
                ("data", types.c_ulonglong),
                ("gpu_instance", types.c_uint),
                ("compute_instance", types.c_uint),
            )

        event = Event()
        numbers = [device.value for device in self._devices]
        with self._lock:
            while not self._nvml.nvmlEventSetWait_v2(self._events, types.byref(event), 0):
                if event.device in numbers:
                    index = numbers.index(event.device)
                    self._errors[index] = (event.data, time.monotonic())


def describe(xids: Mapping[int, int], new_ecc_errors: Mapping[int, int]) -> str:
    """Return the errors of GPUs in words.

    Args:
        xids: The last critical error of each GPU, by its number.
        new_ecc_errors: How many errors of its memory each GPU has counted, by its number.
    """
    texts = [
        f"GPU {index} reported Xid {xid}" + (f" ({_XIDS[xid]})" if xid in _XIDS else "")
        for index, xid in xids.items()
    ]
    texts += [
        f"the memory of GPU {index} had {count} uncorrectable error{'s' * (count > 1)} (ECC)"
        for index, count in new_ecc_errors.items()
        if count > 0
    ]
    return ", ".join(texts)


class NpuSmi(Accelerators):
    """Reads NPUs by running ``npu-smi info`` now and then."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._due_s = 0.0

    def read(self) -> tuple[Device, ...]:
        """Return the state of each NPU; empty while it is too early to ask again."""
        begun_s = time.monotonic()
        if begun_s < self._due_s:
            return ()
        output = output_of(self._argv, _NPU_TIMEOUT_S)
        now_s = time.monotonic()
        self._due_s = now_s + max(_NPU_PERIOD_S, _NPU_SHARE * (now_s - begun_s))
        return read_npu_smi(output)


# Two rows for each chip: | 0     910B3  | OK           | 93.6   40            0    / 0     |
#                         | 0            | 0000:C1:00.0 | 0      0    / 0      4152 / 65536 |
_NPU = re.compile(
    r"\|\s*(\d+)\s+\S[^|]*\|\s*[^|]+\|\s*([\d.]+|-|NA)\s+(\d+|-|NA)\b[^|]*\|\s*\n"
    r"\|\s*\d+(?:\s+\d+)?\s*\|\s*(?:[0-9A-Fa-f]{4}:[^|]+|NA\s*)\|\s*(\d+)\s+([^|]*)\|"
)


def read_npu_smi(text: str) -> tuple[Device, ...]:
    """Return the devices in the table that ``npu-smi info`` prints."""
    devices = []
    for index, (_, power, heat, used, memory) in enumerate(_NPU.findall(text)):
        # Memory of the host's side and HBM; older chips have only the first.
        pairs = [pair for pair in re.findall(r"(\d+)\s*/\s*(\d+)", memory) if pair[1] != "0"]
        in_use, limit = pairs[-1] if pairs else ("", "")
        devices.append(
            Device(
                "npu",
                index,
                _value(used),
                _value(in_use),
                _value(limit),
                _value(power),
                None,
                _value(heat),
            )
        )
    return tuple(devices)


def _value(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
