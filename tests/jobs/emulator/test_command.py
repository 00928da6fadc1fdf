"""The command `cloudjob emulator`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cloudjob.cli import main
from cloudjob.emulator import daemon
from cloudjob.emulator.server import bridge_socket
from cloudjob.errors import BackendError
from tests.support.emulator import Api

BIN = Path(sys.executable).parent / "cloudjob"
DOCUMENTED_KEYS = {
    "endpoint",
    "iam_endpoint",
    "s3_endpoint",
    "access_key",
    "secret_key",
    "project_id",
}


def cloudjob(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run ``cloudjob emulator`` with these arguments and state folder."""
    return subprocess.run(
        [str(BIN), "emulator", *args],
        env={**os.environ, "CLOUDJOB_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bridge_address_of_another_host_is_reported_with_a_hint():
    with pytest.raises(BackendError, match=r"listening for containers on 192\.0\.2\.1:0") as caught:
        bridge_socket("192.0.2.1", 0)
    assert "engine: process" in caught.value.hint


@pytest.mark.parametrize("options", [[], ["--settings", "flavors.yaml"]])
def test_a_missing_library_of_the_emulator_is_named(options: list[str], tmp_path: Path):
    (tmp_path / "flavors.yaml").write_text("flavors: []\n")
    # A module of this value counts as not installed.
    code = "import sys; sys.modules['pydantic'] = None; from cloudjob.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "emulator", "up", *options],
        env={**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.stderr.splitlines() == [
        "error: starting the emulator: pydantic is not installed",
        "hint: pip install 'cloudjob[emulator]'",
    ]


def test_up_prints_the_addresses_of_a_running_emulator(api: Api):
    done = cloudjob(api.home, "up", "--json")
    addresses = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert addresses.keys() >= DOCUMENTED_KEYS
    assert addresses["endpoint"] == api.address.endpoint
    assert "control" not in addresses
    printed = dict(line.split(None, 1) for line in cloudjob(api.home, "up").stdout.splitlines())
    assert printed["endpoint"] == api.address.endpoint


def test_up_prints_its_notice_once(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    note = "nodes are processes: there is no engine"
    address = replace(api.address, note=note)
    monkeypatch.setattr(daemon, "up", lambda *_, **__: address)

    assert main(["emulator", "up"]) == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(note) == 1


def test_status_shows_jobs_and_faults(api: Api):
    emulator_status = json.loads(cloudjob(api.home, "status", "--json").stdout)

    assert emulator_status["is_running"] is True
    assert emulator_status["faults"] == []


def test_faults_are_added_listed_and_cleared(api: Api):
    done = cloudjob(api.home, "fault", "error", "--count", "3", "--path", "nowhere")
    assert json.loads(done.stdout)["count"] == 3, done.stderr
    assert [item["kind"] for item in json.loads(cloudjob(api.home, "fault", "list").stdout)] == [
        "error"
    ]
    assert cloudjob(api.home, "fault", "clear").stderr == "1 fault ended\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("fault", "nothing"), 2, "hint: choose one of throttle"),
        (("fault", "lose-node", "--job", "x"), 2, "Training job (ID: x) not found"),
        (("up", "--settings", "no.yaml"), 2, "it is already running, perhaps"),
        (("up", "--port", "x"), 2, "not a whole number"),
        (("sideways",), 2, "cloudjob emulator has no action 'sideways'"),
    ],
    ids=str,
)
def test_an_error_is_one_line_with_a_hint(api: Api, args: tuple[str, ...], code: int, message: str):
    done = cloudjob(api.home, *args)

    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_commands_report_that_no_emulator_is_running(tmp_path: Path):
    assert cloudjob(tmp_path, "down").stderr == "no emulator is running\n"
    assert json.loads(cloudjob(tmp_path, "status", "--json").stdout) == {"is_running": False}
    done = cloudjob(tmp_path, "fault", "list")
    assert (done.returncode, done.stderr.splitlines()[1]) == (5, "hint: cloudjob emulator up")


@pytest.mark.parametrize("missing", ["weed", "boto3", "uvicorn"])
def test_a_missing_part_of_the_extra_is_named_with_a_hint(tmp_path: Path, missing: str):
    code = (
        "import sys, cloudjob.emulator.daemon as daemon, cloudjob.emulator.obs.seaweedfs as weed\n"
        "from pathlib import Path\n"
        "from cloudjob.errors import BackendError\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "(folder / 'settings.yaml').write_text('engine: process')\n"
        "try:\n"
        f"    if {missing!r} == 'weed':\n"
        "        sys.executable, weed.shutil.which = '/nowhere/python', lambda *_: None\n"
        "        weed.program()\n"
        f"    daemon.find_spec = lambda name: name != {missing!r} or None\n"
        "    daemon.up(folder)\n"
        "except BackendError as error:\n"
        "    print(error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )

    assert done.stdout == "pip install 'cloudjob[emulator]'\n", done.stderr
