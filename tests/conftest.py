"""Fixtures of several folders: S3 servers, a fault-injecting proxy, and containers."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import folders, guardian, surroundings
from tests.support.servers import FaultProxy, Moto, SeaweedFS, Server, boto3_client

if TYPE_CHECKING:
    import docker

# Before any thread starts, and before any test.
guardian.guard()

_NUMBERS = itertools.count()

os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folders.ROOT))

# Hypothesis must not fail a test because the machine is slow: on two shared cores, drawing a value
# may take seconds. In CI the values are the same each time, so that no merge depends on chance;
# elsewhere they are random.
# `scripts/test` tries few values; CI's heavy tier tries many: pytest --hypothesis-profile=thorough.
settings.register_profile(
    "cloudjob",
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1",
)
settings.register_profile("thorough", parent=settings.get_profile("cloudjob"), max_examples=300)
settings.load_profile("cloudjob")


def pytest_report_header() -> list[str]:
    """Name what chooses the surroundings of tests, and those that are not to be had here."""
    return surroundings.header()


def pytest_configure(config: pytest.Config) -> None:
    """Reset the signal dispositions: under nohup or `&`, some signals are ignored.

    Every process that a test starts would inherit them.
    """
    config.addinivalue_line(
        "markers",
        "surroundings: runs in the surroundings of the day (tests/support/surroundings.py)",
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Midnight must not change the surroundings during a run.
    surroundings.of_today()


@pytest.fixture(scope="session", autouse=True)
def _shared_service_descriptions() -> Iterator[None]:
    """Parse botocore's description of S3 once: it takes half of the time that a client needs."""
    try:
        from botocore import loaders
    except ImportError:
        # The tests of the node half also run on a Python without it.
        yield
        return
    load_file = functools.cache(loaders.JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders.JSONFileLoader, "load_file", lambda _, path: load_file(path))
        yield


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Undo what a command that a test has called in this process does to signals.

    A process that a later test forks would handle them otherwise.
    """
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that are marked as long first."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        if item.get_closest_marker("surroundings") and "surround" not in item.fixturenames:
            raise pytest.UsageError(f"{item.nodeid}: no fixture gives it surroundings")


# The name of the row of the table of surroundings that a test has got.
_CHOSEN = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """Name the surroundings of a failed test."""
    report = yield
    chosen = item.stash.get(_CHOSEN, None)
    if report.failed and chosen:
        again = f"{surroundings.VARIABLE}={chosen} scripts/test '{item.nodeid}'"
        report.sections.append(("surroundings", f"{chosen}; to repeat: {again}"))
    return report


@pytest.fixture
def surrounding(request: pytest.FixtureRequest) -> surroundings.Surrounding | None:
    """The row of the table of surroundings for this test; None for the usual ones."""
    item = request.node
    if item.get_closest_marker("surroundings") is None:
        return None
    has_own_folder = "tmp_path" in inspect.signature(item.function).parameters
    row = surroundings.choose(item.nodeid, has_own_folder=has_own_folder)
    if row:
        item.stash[_CHOSEN] = row.name
    return row


@pytest.fixture
def surround(
    request: pytest.FixtureRequest, surrounding: surroundings.Surrounding | None
) -> Callable[[surroundings.CommandLine], None]:
    """Return a function that gives a command line the surroundings of this test."""

    def surround(line: surroundings.CommandLine) -> None:
        if surrounding and surrounding.fixture:
            line.environ.update(request.getfixturevalue(surrounding.fixture))
        if surrounding:
            surrounding.apply(line)

    return surround


@pytest.fixture
def laptop_folder(tmp_path: Path, surrounding: surroundings.Surrounding | None) -> Iterator[Path]:
    """A folder for a command line that its user can reach."""
    if surrounding != surroundings.TABLE[0]:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="cj-", dir=folders.ROOT) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


_WHOLE_FILES = (
    "tests/jobs/emulator/",
    "tests/e2e_docker/test_emulator.py",
    "tests/e2e_slurm/test_full_disks.py",
    "tests/test_wheel.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of files whose fixtures take long, such as an emulator, in one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.startswith(_WHOLE_FILES) else nodeid

    return Scheduling(config, log)


_failed_once: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the tests whose first run failed; CI repeats a failed test once."""
    path = os.environ.get("CLOUDJOB_CI_FAILED_ONCE")
    # The teardown of a failed test may also fail, because of what the test left behind.
    is_first = report.outcome == "rerun" and report.nodeid not in _failed_once
    # The main process of xdist calls this hook for the reports of its workers.
    if path and is_first and "PYTEST_XDIST_WORKER" not in os.environ:
        _failed_once.add(report.nodeid)
        crash = getattr(report.longrepr, "reprcrash", None)
        why = " ".join(crash.message.split())[:300] if crash else report.when
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}: {why}\n")
        # The report of the next attempt would replace this one.
        with Path(f"{path}.reports").open("a", encoding="utf-8") as file:
            file.write(f"-- {report.nodeid}\n{report.longreprtext[-20_000:]}\n")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a real S3 server that keeps its objects on disk."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run moto's server."""
    server = Moto(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def new_bucket() -> Callable[[Server], str]:
    """Return a function that creates an empty bucket and returns its name."""

    def make(server: Server) -> str:
        name = f"bucket-{next(_NUMBERS)}"
        boto3_client(server.endpoint).create_bucket(
            Bucket=name,
            CreateBucketConfiguration={"LocationConstraint": "cn-north-4"},
        )
        return name

    return make


@pytest.fixture
def fault_proxy() -> Iterator[Callable[..., FaultProxy]]:
    """Return a function that starts a fault-injecting proxy in front of a server."""
    proxies: list[FaultProxy] = []

    def make(server: Server, host: str = "127.0.0.1") -> FaultProxy:
        proxies.append(FaultProxy(server.port, host=host))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.APIClient]:
    """A client of this machine's Docker engine."""
    from tests.support import containers

    client = containers.connect()
    yield client
    client.close()


@pytest.fixture(scope="session")
def build(engine: docker.APIClient) -> Callable[..., str]:
    """Return a function that builds an image of images/ and returns its tag."""
    built: dict[tuple[str, ...], str] = {}

    def build(name: str, *words: str) -> str:
        if (name, *words) not in built:
            program = Path(sys.executable).with_name("cloudjob")
            done = subprocess.run(
                [program, "image", "build", name, *words], capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:].decode()
            built[(name, *words)] = done.stdout.decode().strip()
        return built[(name, *words)]

    return build


@pytest.fixture(scope="session")
def base_image(build: Callable[..., str]) -> str:
    """The image of a node."""
    return build("base")


@pytest.fixture(scope="session")
def open_mpi_5_image(build: Callable[..., str]) -> str:
    """The image of a node with Open MPI 5.0 instead of Debian's 4.1."""
    bundle = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    return build("openmpi5", "--ca-bundle", bundle)


@pytest.fixture(scope="session")
def with_entry(engine: docker.APIClient) -> Iterator[Callable[[str], str]]:
    """Return a function that puts the current entry into an image and returns the new tag."""
    from tests.support import containers

    image_of: dict[str, str] = {}

    def with_entry(image: str) -> str:
        if image not in image_of:
            image_of[image] = containers.add_entry(engine, image)
        return image_of[image]

    yield with_entry
    for tag in image_of.values():
        containers.remove(engine, tag)


@pytest.fixture
def ugly_values() -> dict[str, bytes]:
    """Values that Open MPI damages in at least one way of passing variables."""
    return UGLY_VALUES


UGLY_VALUES: dict[str, bytes] = {
    "blank": b"a b",
    "only_blank": b" ",
    "outer_blanks": b"  a  ",
    "tab": b"a\tb",
    "newline": b"a\nb",
    "newlines": b"\n\nMA_X=1\n-x FOO\n",
    "crlf": b"a\r\nb\r",
    "single_quote": b"it's",
    "double_quote": b'say "hi"',
    "quoted": b"\"a b\" 'c d'",
    "open_quote": b'"',
    "equals": b"k=v=w",
    "begins_equals": b"=x",
    "semicolon": b"a;b;c",
    "hash": b"# no comment",
    "slashes": b"http://x//y /* z */",
    "dollar": b"$HOME ${HOME} $(id) `id`",
    "backslash": b"\\ \\n \\\\ \\",
    "percent": b"%3A %25 %s %n",
    "colon": b":",
    "comma": b"a,b,,c",
    "star": b"* ? [a-z] ~",
    "bang": b"!! !$",
    "amp": b"a && b || c & d | e > f < g",
    "braces": b"{a,b} {}",
    "json": b'{"a": ["b", null], "c": {"d": 1.5}}',
    "dash": b"-x FOO",
    "dashes": b"--",
    "control": bytes(range(1, 32)) + b"\x7f",
    "separator": b"a\x01b",
    "latin": "Grüße, søster".encode(),
    "chinese": "训练作业 🚀".encode(),
    "invalid": b"\xff\xfe\x80 \xc3(",
    "all_bytes": bytes(range(1, 256)),
    "empty": b"",
    "zero": b"0",
    "long": b"x" * 100_000,
    "long_ugly": b'a b="c";\n$\'' * 9000,
}
