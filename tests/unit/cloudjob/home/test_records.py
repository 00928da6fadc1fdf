"""The job records: look-up, use by several processes, and errors for damaged files."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cloudjob.errors import JobNotFound, RecordsError
from cloudjob.home.records import VERSION, JobRecord, Records, hint_for

ROOT = Path(__file__).parents[4]


def record(job="train-0001", **values):
    """Return a record with these values in its columns."""
    return JobRecord(
        job=job,
        name="train",
        backend="process",
        handle=f"process://here/{job}",
        state="PENDING",
        nodes=2,
        procs_per_node=1,
        created_at="2026-01-01T00:00:00.000Z",
        code_uri="file:///code",
        code_digest="sha256:0",
        code_size_bytes=10,
        code_files=2,
        store="file:///store",
        spec_json='{"script": "train.py"}',
    )._replace(**values)


@pytest.fixture
def path(tmp_path):
    """The path of the records, where no file exists yet."""
    return tmp_path / "home" / "records.db"


@pytest.fixture
def records(path):
    """Open new records."""
    with Records(path) as db:
        yield db


def start_python(code, path):
    """Start code that uses ``record`` and ``path`` in a separate process."""
    start = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
    start += f"from test_records import *\npath = Path({str(path)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_record_reads_back_as_it_was_written(path):
    unusual = record(handle="process://ünï/'\"; --", spec_json="{}\n" * 1000, code_size_bytes=2**40)
    with Records(path) as records:
        records.add(unusual)

    with Records(path) as records:
        assert records.get(unusual.job) == unusual


def test_the_records_are_private(path, records):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_update_changes_only_its_columns(records):
    records.add(record())
    records.update("train-0001", state="RUNNING", handle="process://here/7")

    assert records.get("train-0001") == record(state="RUNNING", handle="process://here/7")


def test_an_update_of_an_unknown_column_is_refused(records):
    """A column that does not exist never reaches SQL."""
    with pytest.raises(TypeError):
        records.update("train-0001", **{"state = 'x' --": 1})


def test_the_list_is_newest_first(records):
    """Jobs are sorted by time, then by the order in which they were added."""
    records.add(record("b", created_at="2026-01-02T00:00:00.000Z"))
    records.add(record("a", created_at="2026-01-01T00:00:00.000Z"))
    records.add(record("c", created_at="2026-01-02T00:00:00.000Z"))

    assert [r.job for r in records.list()] == ["c", "b", "a"]
    assert [r.job for r in records.list(limit=1)] == ["c"]
    assert records.list()[1] == record("b", created_at="2026-01-02T00:00:00.000Z", spec_json="")


def test_ten_thousand_jobs_are_listed_quickly(records):
    long = "x" * 1000
    with sqlite3.connect(records._path) as database:
        database.executemany(
            f"INSERT INTO jobs VALUES ({','.join('?' * len(JobRecord._fields))})",
            (record(f"train-{i}", spec_json=long) for i in range(10_000)),
        )
    database.close()

    times = []
    for _ in range(3):
        start = time.process_time()
        assert len(records.list()) == 10_000
        times.append(time.process_time() - start)
    assert min(times) < 0.2  # seconds of CPU; 0.03 on a quiet machine


def test_a_job_is_found_by_id_name_or_prefix(records):
    """An id takes precedence, a name selects its newest job, and a unique prefix is enough."""
    records.add(record("eval-0001", name="eval"))
    records.add(record("train-0001", created_at="2026-01-01T00:00:00.000Z"))
    records.add(record("train-0002", created_at="2026-01-02T00:00:00.000Z"))
    records.add(record("train-0003", name="eval-0001", created_at="2026-01-03T00:00:00.000Z"))

    job_of = {name: records.get(name).job for name in ("eval-0001", "train", "eval-", "train-0003")}

    assert job_of == {
        "eval-0001": "eval-0001",
        "train": "train-0002",
        "eval-": "eval-0001",
        "train-0003": "train-0003",
    }


def test_a_prefix_of_several_ids_is_refused_with_all_of_them(records):
    records.add(record("train-0001"))
    records.add(record("train-0002"))

    with pytest.raises(JobNotFound) as caught:
        records.get("train-0")
    assert caught.value.hint == "one of train-0002, train-0001?"


@pytest.mark.parametrize("name", ["", "%", "nothing", "'", "train-00011", "\udcff"])
def test_an_unknown_name_finds_no_job(records, name):
    records.add(record("train-0001"))

    with pytest.raises(JobNotFound) as caught:
        records.get(name)
    assert caught.value.hint


def test_the_hint_for_a_mistyped_id_names_the_nearest(records):
    records.add(record("train-0001"))

    with pytest.raises(JobNotFound) as caught:
        records.get("trian-0001")
    assert "train-0001" in caught.value.hint


def test_a_removed_job_is_gone(records):
    """``remove`` affects only the given job, which must exist."""
    records.add(record("a"))
    records.add(record("ab"))
    records.remove("a")

    assert [r.job for r in records.list()] == ["ab"]
    with pytest.raises(JobNotFound):
        records.remove("a")
    with pytest.raises(JobNotFound):
        records.update("a", state="FAILED")


def test_an_id_is_used_once(records):
    """A second job with the same id is refused, and the first one is kept."""
    records.add(record(state="RUNNING"))

    with pytest.raises(RecordsError, match="UNIQUE"):
        records.add(record())
    assert records.get("train-0001").state == "RUNNING"


def test_processes_can_add_jobs_at_the_same_time(path):
    """Six processes create the file, add jobs and update them; no change is lost."""
    code = (
        "job = str(os.getpid())\n"
        "with Records(path) as r:\n"
        " r.add(record(job))\n"
        " r.update(job, state='RUNNING')"
    )
    children = [start_python(code, path) for _ in range(6)]
    for child in children:
        child.communicate()

    assert [child.returncode for child in children] == [0] * 6
    with Records(path) as records:
        assert [record.state for record in records.list()] == ["RUNNING"] * 6


def test_a_killed_writer_leaves_complete_records(path):
    """Only the open transaction of a killed process is undone."""
    code = (
        "with Records(path) as r:\n"
        " r.add(record('kept'))\n"
        " r._database.execute('BEGIN IMMEDIATE')\n"
        " r.add(record('lost'))\n"
        " os.kill(os.getpid(), 9)"
    )
    child = start_python(code, path)
    child.communicate()

    assert child.returncode == -signal.SIGKILL

    with Records(path) as records:
        assert [r.job for r in records.list()] == ["kept"]


def refused(path, **options):
    """Return the error raised by opening the records, adding a job or listing them."""

    def use():
        with Records(path, **options) as records:
            records.add(record("more"))
            records.list()

    with pytest.raises(RecordsError) as caught:
        use()
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_locked_file_is_reported_as_locked(path):
    """The error is raised after a timeout, while another connection holds the lock."""
    Records(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    error = refused(path, busy_timeout_s=0.05)
    other.close()

    assert "locked" in error.message
    assert isinstance(error.__cause__, sqlite3.OperationalError)


def test_a_newer_file_is_left_unchanged(path):
    Records(path).close()
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    before = path.read_bytes()

    error = refused(path)

    assert "newer" in error.message
    assert "upgrade" in error.hint
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_is_left_unchanged(path):
    path.parent.mkdir()
    path.write_text("my notes\n" * 1000)

    assert "not a database" in refused(path).message
    assert path.read_text() == "my notes\n" * 1000


def test_a_damaged_file_is_reported_as_damaged(path):
    with Records(path) as records:
        for i in range(200):
            records.add(record(f"train-{i}", spec_json="x" * 500))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))

    assert "malformed" in refused(path).message


def test_a_damaged_value_affects_no_other_job_and_has_the_type_of_its_column(path):
    """SQLite stores any value in any column."""
    with Records(path) as records:
        records.add(record("train-1", nodes="x", name=b"train", created_at=5))
        records.add(record("train-2"))
        all_records = [*records.list(), records.get("train-1")]

    plain = record()
    for each in all_records:
        assert [type(value) for value in each] == [type(value) for value in plain], each


def test_a_truncated_file_is_reported_as_damaged(path):
    with Records(path) as records:
        for i in range(200):
            records.add(record(f"train-{i}", spec_json="x" * 500))
    os.truncate(path, path.stat().st_size // 2)

    refused(path)


def test_a_folder_at_the_path_of_the_records_is_refused(path):
    path.mkdir(parents=True)

    assert "directory" in refused(path).message.lower()


def test_a_file_at_the_path_of_the_home_folder_is_refused(path):
    path.parent.write_text("")

    refused(path)


def test_a_read_only_file_is_refused():
    with TemporaryDirectory() as folder, as_ordinary_user(folder):
        path = Path(folder, "records.db")
        Records(path).close()
        path.chmod(0o400)

        assert "denied" in refused(path).message


@contextmanager
def as_ordinary_user(folder):
    """Run as an ordinary user, because permissions do not restrict root."""
    nobody = 65534
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, nobody, nobody)
        os.seteuid(nobody)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_system_file_that_cannot_be_opened_is_refused():
    """No folder can be created below /proc, even by root; the error has a hint."""
    refused(Path("/proc/cloudjob/records.db"))


def test_a_full_disk_is_reported(path):
    with Records(path) as records:
        records._database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(RecordsError, match="full") as caught:
            records.add(record(spec_json="x" * 100_000))
    assert "free some space" in caught.value.hint


def test_a_file_size_limit_is_reported(path):
    """A write that fails half way raises an error, and the records stay intact."""
    Records(path).close()
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "with Records(path) as r:\n"
        " try: r.add(record(spec_json='x' * 100_000))\n"
        " except RecordsError as e: print(e.message, '|', e.hint)"
    )
    stdout, stderr = start_python(code, path).communicate()

    assert stderr == b""
    assert b"free some space" in stdout
    with Records(path) as records:
        assert records.list() == []


def test_text_that_cannot_be_stored_is_an_error_of_records(records):
    """A lone surrogate in a column causes no traceback."""
    with pytest.raises(RecordsError):
        records.add(record(handle="\udcff"))


def test_every_error_of_sqlite_is_translated(records):
    foreign = [
        value
        for value in vars(sqlite3).values()
        if isinstance(value, type) and issubclass(value, sqlite3.Error)
    ]
    for kind in [*foreign, OSError, PermissionError]:
        with pytest.raises(RecordsError) as caught, records._translate_errors("reading"):
            raise kind("something")
        assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("database is locked", "again"),
        ("attempt to write a readonly database", "writable"),
        ("database or disk is full", "space"),
        ("file is not a database", "move"),
        ("unable to open database file", "inodes"),
        ("never heard", "CLOUDJOB_HOME"),
    ],
)
def test_messages_of_sqlite_have_a_fitting_hint(message, hint):
    assert hint in hint_for(message)
