"""Objects, as a container reads and writes them."""

from __future__ import annotations

import resource
import threading
from functools import partial
from pathlib import Path

import pytest

from jobentry import objects
from jobentry.objects import ObjectError
from jobentry.objects.base import in_parallel


def listed(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_written_objects_are_read_back(tmp_path: Path):
    (tmp_path / "in").write_bytes(b"\0data" * 1_000_000)
    uri = f"file://{tmp_path}/job/outputs/a%20b"

    objects.put(str(tmp_path / "in"), uri)
    objects.fetch(uri.replace("file://", "file://localhost"), str(tmp_path / "out"))
    objects.write(b"small", uri + "2")

    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert objects.read(uri + "2") == b"small"
    assert listed(tmp_path / "job" / "outputs") == ["a b", "a b2"]


def test_objects_are_private(tmp_path: Path):
    """Folders are 0700 and objects 0600, as the store makes them."""
    objects.write(b"", f"file://{tmp_path}/job/a")

    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "job" / "a").stat().st_mode & 0o777 == 0o600


def test_a_failed_write_changes_nothing(tmp_path: Path):
    uri = f"file://{tmp_path}/job/a"
    objects.write(b"old", uri)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ObjectError, match=r"writing file://.*/job/a: file too large"):
            objects.write(b"x" * 1001, uri)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert objects.read(uri) == b"old"
    assert listed(tmp_path / "job") == ["a"]


def test_errors_name_the_object_or_the_file(tmp_path: Path):
    missing = f"file://{tmp_path}/missing"
    (tmp_path / "file").touch()
    calls = {
        f"fetching {missing}: no such file or directory": lambda: objects.fetch(
            missing, str(tmp_path / "out")
        ),
        f"reading {missing}: no such file or directory": lambda: objects.read(missing),
        "reading /missing: no such file or directory": lambda: objects.put("/missing", missing),
        f"writing file://{tmp_path}/file/a: not a directory": lambda: objects.put(
            str(tmp_path / "file"), f"file://{tmp_path}/file/a"
        ),
        f"writing {tmp_path}/file/out: not a directory": lambda: objects.fetch(
            f"file://{tmp_path}/file", str(tmp_path / "file" / "out")
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ObjectError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize("uri", ["/a", "file://a", "file:///a%00", ""])
def test_an_unknown_uri_scheme_is_refused(uri: str):
    with pytest.raises(ObjectError, match="not a URI of the form file:///its/path"):
        objects.read(uri)


def test_the_results_of_parallel_tasks_come_in_order():
    begun = [threading.Event() for _ in range(4)]

    def task(number: int) -> int:
        begun[number].set()
        # Each task waits for the next one.
        assert begun[min(number + 1, 3)].wait(60)
        return number

    assert in_parallel([partial(task, number) for number in range(4)], 4) == [0, 1, 2, 3]


def test_the_first_failure_of_parallel_tasks_is_raised_and_cancels_those_that_wait():
    is_over = threading.Event()
    done: list[int] = []

    def fail() -> None:
        raise ObjectError("no space left")

    def wait(number: int) -> None:
        assert is_over.wait(60)
        done.append(number)

    tasks = [partial(wait, 0), fail, *(partial(wait, number) for number in range(1, 100))]
    with pytest.raises(ObjectError, match="no space left"):
        in_parallel(tasks, 2)
    is_over.set()

    # Only the tasks that already had a thread have run.
    assert set(done) <= {0, 1}
