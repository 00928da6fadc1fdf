"""Other machines for tests: namespaces with a host name, processes and a kernel of their own.

``limited_files`` makes the file system of a folder behave like one of another site, and
``hung_file_system`` like one whose server is away.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("file_system.c")
_BOOT = "/proc/sys/kernel/random/boot_id"
_READY = "ready"
_MNT_DETACH = 2
_HOLD = f'hostname "$1"; [ -z "$2" ] || mount --bind "$2" {_BOOT}; echo {_READY}; exec sleep inf'


class Machine:
    """Namespaces in which commands run as if on another machine, until ``stop``.

    Args:
        name: Its host name.
        boot: A file with the id of its kernel; None for a container of this machine.
    """

    def __init__(self, name: str, boot: Path | None = None) -> None:
        root = () if os.geteuid() == 0 else ("--map-root-user",)
        spaces = ("--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
        self._process = subprocess.Popen(
            ["unshare", *root, *spaces, "sh", "-ec", _HOLD, "sh", name, str(boot or "")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        with self._process.stdout as output:
            if output.readline().strip() != _READY.encode():
                self.stop()
                pytest.skip("this kernel allows no namespaces")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        spaces = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        first = children.read_text().split()[0]
        target = (f"--target={first}", "--")
        self.prefix = ("nsenter", *spaces, "--uts", "--pid", "--mount", "--wd=.", *target)

    def stop(self) -> None:
        """End all of its processes at once, as a power failure does."""
        self._process.kill()
        self._process.wait()


def new_boot(folder: Path) -> Path:
    """Return a file with the id of another kernel."""
    path = folder / f"boot-{uuid.uuid4().hex}"
    path.write_text(f"{uuid.uuid4()}\n")
    return path


NewMachine = Callable[..., Machine]


@functools.cache
def _library() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        assert os.environ.get("CLOUDJOB_REQUIRE_ALL") != "1", "a C compiler is needed"
        pytest.skip("no C compiler")
    folder = Path(tempfile.mkdtemp(prefix="cloudjob-preload-"))
    atexit.register(shutil.rmtree, folder)
    # Every user may load it.
    folder.chmod(0o755)
    library = folder / "file_system.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True
    )
    return library


def limited_files(root: Path, *lacks: str) -> dict[str, str]:
    """Return the variables with which the files below ``root`` lack something.

    Args:
        lacks: See ``file_system.c``.
    """
    return {
        "LD_PRELOAD": str(_library()),
        "CLOUDJOB_TEST_FS": ",".join(lacks),
        "CLOUDJOB_TEST_FS_ROOT": str(root),
    }


@contextlib.contextmanager
def hung_file_system(folder: Path) -> Iterator[None]:
    """Mount a file system that answers nothing, as NFS does while its server is away.

    Whoever looks at a file in ``folder`` waits in the kernel, where signals other than SIGKILL do
    nothing. At the end all of them go on with an error.
    """
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        assert os.environ.get("CLOUDJOB_REQUIRE_ALL") != "1", "root and FUSE are needed"
        pytest.skip("only root may mount, and with FUSE")
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    daemon = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={daemon},rootmode=40000,user_id=0,group_id=0".encode()
        path = os.fsencode(folder)
        if libc.mount(b"hung", path, b"fuse", 0, options):
            pytest.skip(f"mounting: {os.strerror(ctypes.get_errno())}")
        try:
            # No request is ever read from ``daemon``.
            yield
        finally:
            libc.umount2(path, _MNT_DETACH)
    finally:
        os.close(daemon)
