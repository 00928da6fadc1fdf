"""NPUs: the table of npu-smi, and a program that fails."""

from __future__ import annotations

from jobentry.contract.journal import Device
from jobentry.node.accelerators import NpuSmi, read_npu_smi

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
