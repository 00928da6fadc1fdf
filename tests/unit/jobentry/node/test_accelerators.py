"""GPUs, from a library with the functions of NVML; NPUs: the table of npu-smi."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobentry.contract.journal import Device
from jobentry.node.accelerators import NpuSmi, Nvml, describe, read_npu_smi

# An H200 that multiplies matrices; its second one reports an error once $XID_FILE exists, and its
# memory has had 5 errors, and 7 once $ECC_FILE exists.
LIBRARY = r"""
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { void *device; uint64_t kind, data; unsigned gpu, compute; } Event;

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(uintptr_t)(4096 + index); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = 100; rates[1] = 3; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) {
    memory[0] = 8UL << 30; memory[1] = 6UL << 30; memory[2] = 2UL << 30; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 521100; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
    *milliwatts = 700000; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) {
    *degrees = 61; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, uint64_t *count) {
    if (device != (void *)4097) return 3; /* not supported */
    *count = access(getenv("ECC_FILE"), F_OK) ? 5 : 7; return 0; }
int nvmlEventSetCreate(void **set) { *set = (void *)1; return 0; }
int nvmlDeviceRegisterEvents(void *device, uint64_t kinds, void *set) { return 0; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned wait_ms) {
    if (unlink(getenv("XID_FILE"))) return 10; /* time out */
    event->device = (void *)4097; event->kind = 8; event->data = 31; return 0; }
"""

TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.rc3                 Version: 23.0.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 12          0    / 0          4152 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | 91.2        38                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          4148 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | python                   | 1024                    |
+===========================+===============+====================================================+
"""
ATLAS = """\
| 4     310P3               | OK            | NA           45                12477 / 12477       |
| 0     0                   | 0000:01:00.0  | 7            1708 / 21527                          |
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nvml")
    path = folder / "libnvidia-ml.so.1"
    (folder / "nvml.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "nvml.c"], check=True)
    return str(path)


def test_gpus_are_read_and_their_errors_are_said(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XID_FILE", str(tmp_path / "xid"))
    monkeypatch.setenv("ECC_FILE", str(tmp_path / "ecc"))
    gpus = Nvml(library)
    gpu = Device("gpu", 0, 100.0, 2048.0, 8192.0, 521.1, 700.0, 61.0, None, 0)

    assert gpus.read() == (gpu, gpu._replace(number=1, ecc_errors=5))
    assert gpus.recent_errors() == ""
    (tmp_path / "xid").touch()
    assert gpus.recent_errors() == (
        "GPU 1 reported Xid 31 (the program used an address that is not its own)"
    )
    assert [device.xid for device in gpus.read()] == [0, 31]
    (tmp_path / "ecc").touch()
    assert gpus.recent_errors().endswith(", the memory of GPU 1 had 2 uncorrectable errors (ECC)")


def test_an_error_without_a_known_meaning_is_a_number():
    assert describe({0: 999}, {0: 0}) == "GPU 0 reported Xid 999"
    assert describe({}, {0: 1}) == "the memory of GPU 0 had 1 uncorrectable error (ECC)"
    assert describe({}, {}) == ""


def test_the_table_of_npu_smi_is_read():
    assert read_npu_smi(TABLE) == (
        Device("npu", 0, 12.0, 4152.0, 65536.0, 93.6, None, 40.0),
        Device("npu", 1, 0.0, 4148.0, 65536.0, 91.2, None, 38.0),
    )


def test_a_chip_without_hbm_has_the_other_memory_and_no_power():
    assert read_npu_smi(ATLAS) == (Device("npu", 0, 7.0, 1708.0, 21527.0, None, None, 45.0),)


def test_npu_smi_is_run_rarely():
    reader = NpuSmi(("echo", ATLAS))
    assert len(reader.read()) == 1
    assert reader.read() == ()


def test_a_program_that_fails_shows_no_devices():
    assert NpuSmi(("/missing/npu-smi",)).read() == ()
    assert NpuSmi(("echo", "no devices")).read() == ()
