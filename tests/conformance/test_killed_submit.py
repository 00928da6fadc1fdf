"""A submit killed at any of its requests to a bucket never leaves an incomplete package."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from cloudjob.store.base import ObjectStore
from jobentry.contract.zip_layer import open_layer
from jobentry.staging import code_package
from tests.conformance.conftest import PART_BYTES, EmptyStore
from tests.support.servers import Fault, FaultProxy, Request

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
# Three parts in the first layer.
SIZE = 2 * PART_BYTES + 17

# The steps of a submit before it calls the backend.
SUBMIT = f"""
import sys
from pathlib import Path
from cloudjob.package import claims
from cloudjob.package import cache, pack
from cloudjob.store.s3 import S3Store, bucket_uri

uri, source, home, job = sys.argv[1:]
store = S3Store(bucket_uri.read(uri), part_bytes={PART_BYTES}, retry_s=60.0)
cache_file = cache.path_of(Path(home), Path(source), uri)
package = pack(
    Path(source), Path(home, "layer"), script="train.py", limit_bytes=1 << 30,
    source_cache=cache.load(cache_file),
)
with claims.Claim(store, job) as claim:
    try:
        kept = claim.keep(package)
    except claims.LayerMissing:
        package = pack(Path(source), Path(home, "layer"), script="train.py", limit_bytes=1 << 30)
        kept = claim.keep(package)
    cache.save(cache_file, cache.with_layers(package.source_cache, kept.layers))
    claim.check()
    store.put_bytes(claims.descriptor(package, kept.layers), job + "/code.json")
"""


class Laptop:
    """A user whose source changes with each submit."""

    def __init__(self, empty_store: EmptyStore, folder: Path) -> None:
        assert empty_store.proxy is not None
        self.store = empty_store
        self.proxy: FaultProxy = empty_store.proxy
        self.source = folder / "source"
        self.home = folder / "home"
        self.count = 0
        self.source.mkdir()
        self.home.mkdir()

    def edit(self) -> None:
        """Change every source file."""
        (self.source / "train.py").write_text(f"print({self.count})\n")
        (self.source / "large.bin").write_bytes(os.urandom(SIZE))

    def large(self) -> bytes:
        """Return the content of the larger file."""
        return (self.source / "large.bin").read_bytes()

    def submit(self, *, killed_at: int = 0, passes: int | None = None) -> int:
        """Submit, and return the exit code.

        Args:
            killed_at: The number of the request, from 1, at which the submit is killed; 0: never.
            passes: How many bytes of that request's body still reach the service; None: all.
        """
        self.count += 1
        self.proxy.clear()
        begun: Future[subprocess.Popen[bytes]] = Future()

        def choose(_: Request) -> Fault | None:
            # The proxy calls this before it records the request.
            if len(self.proxy.requests) + 1 != killed_at:
                return None
            begun.result(DEADLINE_S).kill()
            begun.result().wait(DEADLINE_S)
            return Fault(cut_request_at=passes)

        self.proxy.choose = choose
        arguments = [self.store.uri, str(self.source), str(self.home), f"job-{self.count}"]
        environ = {**self.store.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/entrypoints"}
        begun.set_result(subprocess.Popen([sys.executable, "-c", SUBMIT, *arguments], env=environ))
        code = begun.result().wait(DEADLINE_S)
        self.proxy.choose = lambda _: None
        return code


@pytest.fixture
def laptop(new_store: Callable[[str], EmptyStore], tmp_path: Path) -> Laptop:
    """Make a user whose store is on a real server."""
    return Laptop(new_store("s3 on SeaweedFS"), tmp_path)


@pytest.fixture
def node(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Open the store, and set the variables with which nodes reach it."""
    store = laptop.store.open()
    for name, value in store.access().items():
        monkeypatch.setenv(name, value)
    return store


def check(store: ObjectStore, checked: set[str], target: Path) -> None:
    """Check that each layer and each new job in the store is complete."""
    for key in set(store.list()) - checked:
        if key.startswith("layers/"):
            digest = key.removeprefix("layers/").partition(".")[0]
            with open_layer(io.BytesIO(store.get_bytes(key)), digest):
                pass
        elif key.endswith("/code.json"):
            digest = json.loads(store.get_bytes(key))["digest"]
            code_package.fetch_code(store.uri(key), digest, str(target))
        checked.add(key)


@pytest.mark.long
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.lengthy)])
def test_a_submit_killed_at_any_request_leaves_no_incomplete_package(
    laptop: Laptop, node: ObjectStore, tmp_path: Path, step: int
):
    """A node never finds an incomplete job, and the next submit works.

    Of an interrupted PUT's body, the service gets all, the first 20 bytes or nothing, in turn.
    It is killed at every ``step``-th request, and at the last.
    """
    laptop.edit()
    assert laptop.submit() == 0
    methods = [request.method for request in laptop.proxy.requests]
    checked: set[str] = set()
    puts = 0
    for number in reversed(range(len(methods), 0, -step)):
        laptop.edit()
        method = methods[number - 1]
        puts += method == "PUT"
        passes = (0, None, 20)[puts % 3] if method == "PUT" else None
        assert laptop.submit(killed_at=number, passes=passes) == -signal.SIGKILL
        check(node, checked, tmp_path / "code")
    # The last submit was killed while it removed its claim, after it had stored everything.
    assert f"job-{laptop.count}/code.json" in checked

    for _ in range(2):
        assert laptop.submit() == 0
        check(node, checked, tmp_path / "code")
        assert f"job-{laptop.count}/code.json" in checked
        assert (tmp_path / "code" / "large.bin").read_bytes() == laptop.large()
        laptop.edit()
