"""A killed emulator restarts with its jobs, keys and objects."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cloudjob.emulator import daemon, state
from cloudjob.errors import BackendError, SpecError, UsageError
from tests.support.emulator import Api, await_true, bucket_of, keys, running


def kill(api: Api) -> None:
    """Kill the emulator, and wait until its process has ended."""
    os.kill(api.address.pid, signal.SIGKILL)
    await_true(lambda: not state.is_running(daemon.folder(api.home)))


def test_kill_9_loses_no_job_object_or_key():
    with running("engine: process\npublic_nodes: 2\nupload_period_s: 0.3\n") as api:
        s3 = bucket_of(api)
        s3.put_object(Bucket="data", Key="kept", Body=b"bytes")
        output = {
            "name": "o",
            "access_method": "env",
            "remote": {"obs": {"obs_url": "/data/out/"}},
        }
        running_job = api.create(
            "n=0; while [ ! -e $HOME/stop ]; do n=$((n+1)); echo tick $n | tee -a $o/ticks; "
            "sleep 0.05; done; exit 0",
            nodes=2,
            algorithm={"outputs": [output]},
        )
        waiting = api.create("echo later")
        api.await_log(running_job, "tick 3", 1)
        kill(api)
        restarted = Api(daemon.up(api.home), api.home)

        assert restarted.address.endpoint == api.address.endpoint
        assert restarted.address.s3_endpoint == api.address.s3_endpoint
        assert restarted.address.access_key == api.address.access_key
        assert restarted.address.pid != api.address.pid
        assert s3.get_object(Bucket="data", Key="kept")["Body"].read() == b"bytes"
        assert restarted.show(running_job)["status"]["phase"] == "Running"
        assert restarted.show(waiting)["status"]["phase"] in ("Creating", "Pending")
        for index in (0, 1):
            nodes = Path(api.home, "emulator/jobs", running_job, "nodes")
            (nodes / str(index) / "home/ma-user/stop").touch()
        assert restarted.await_phase(running_job)["status"]["phase"] == "Completed"
        assert restarted.await_phase(waiting)["status"]["phase"] == "Completed"
        log = restarted.log(running_job)
        ticks = [int(line.split()[1]) for line in log.splitlines() if line.startswith("tick")]
        # No line is lost or repeated, whether written before, during or after the crash.
        assert ticks == list(range(1, len(ticks) + 1))
        assert len(ticks) > 3
        assert keys(s3, "out/") == ["out/ticks"]


def test_a_job_completes_after_a_crash_at_any_moment_of_its_start():
    with running("engine: process\n") as api:
        for moment_s in (0.0, 0.05, 0.15, 0.3):
            job = api.create("echo begun; sleep 0.5; echo ended", nodes=2)
            time.sleep(moment_s)  # the time of the crash, not a wait for a condition
            kill(api)
            api = Api(daemon.up(api.home), api.home)

            assert api.await_phase(job)["status"]["phase"] == "Completed", api.events(job)
            assert api.log(job, 1).count("ended") == 1


def test_jobs_survive_down_and_up_and_reset_deletes_them():
    with running("engine: process\n") as api:
        job = api.create("true")
        api.await_phase(job)
        assert daemon.status(api.home)["jobs"] == 1
        assert [(each["id"], each["phase"]) for each in daemon.jobs(api.home)["jobs"]] == [
            (job, "Completed")
        ]
        assert daemon.up(api.home) == api.address
        assert daemon.down(api.home)
        assert not daemon.down(api.home)
        assert daemon.status(api.home) == {"is_running": False}
        restarted = Api(daemon.up(api.home), api.home)
        assert restarted.show(job)["status"]["phase"] == "Completed"
        daemon.reset(api.home)
        fresh = daemon.status(api.home)
        assert (fresh["is_running"], fresh["jobs"]) == (True, 0)
        assert fresh["access_key"] != api.address.access_key


def test_several_ups_at_once_start_one_emulator():
    from concurrent.futures import ThreadPoolExecutor

    with running("engine: process\n") as api, ThreadPoolExecutor(4) as pool:
        daemon.down(api.home)
        addresses = list(pool.map(lambda _: daemon.up(api.home), range(4)))

    assert len({item.pid for item in addresses}) == 1


def test_keys_are_in_files_that_only_their_owner_reads_and_in_no_arguments(api: Api):
    folder = daemon.folder(api.home)
    assert folder.stat().st_mode & 0o077 == 0
    for name in (state.ACCOUNT, state.ADDRESS, state.DATABASE, "obs/s3.json"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name
    secret = api.address.secret_key.encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret not in path.read_bytes()
        except OSError:
            continue
    assert secret not in (folder / state.LOG).read_bytes()


def test_a_port_in_use_is_reported_with_a_hint(tmp_path: Path):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BackendError) as caught:
            daemon.up(tmp_path, port=port)

    assert str(port) in caught.value.message
    assert caught.value.hint == "give another --port"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("engine: magic\nflavours: []\npoll_s: fast\n", ["engine", "flavours", "poll_s"]),
        ("flavors: [{id: a, size: 3}]\n", ["flavors[0]"]),
        ("pools: 3\n", ["pools"]),
        ("- a\n", ["must be a mapping"]),
        ("users: {emulator: []}\n", ["exist already"]),
        ("projects: [emulator-1]\n", ["exist already"]),
    ],
    ids=["keys", "flavors", "pools", "list", "users", "projects"],
)
def test_every_error_in_the_settings_is_reported_and_nothing_starts(
    tmp_path: Path, text: str, messages: list[str]
):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        daemon.up(tmp_path, config=path)

    for message in messages:
        assert any(message in problem for problem in caught.value.problems), caught.value.problems
    assert not daemon.status(tmp_path)["is_running"]


def test_a_missing_settings_file_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no\.yaml"):
        daemon.up(tmp_path, config=tmp_path / "no.yaml")
