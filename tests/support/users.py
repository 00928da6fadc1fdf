"""Ordinary users, as whom root runs commands in tests."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

USER = 1000
_PTH = "import site; site.addsitedir({folder!r})\n"


def as_user(*groups: int) -> tuple[str, ...]:
    """Return the command before another one that runs it as an ordinary user; empty if we are.

    Args:
        groups: The user's further groups.
    """
    if os.geteuid() != 0:
        return ()
    more = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ("setpriv", f"--reuid={USER}", f"--regid={USER}", more, "--no-new-privs")


def has_name() -> bool:
    """Whether this machine has a name for the ordinary user."""
    try:
        pwd.getpwuid(USER)
    except KeyError:
        return False
    return True


@functools.cache
def python_of_user() -> tuple[str, str]:
    """Return an interpreter with our packages that any user may run, or why there is none."""
    if os.geteuid() != 0:
        return sys.executable, ""
    real = Path(sys.executable).resolve()
    base = str(real) if _is_open(real) else "/usr/bin/python3"
    version = subprocess.run(
        [base, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if version != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return "", f"{real} is closed to ordinary users, and {base} is {version}"
    folder = Path(tempfile.mkdtemp(prefix="cj-user-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, folder)
    folder.chmod(0o755)
    subprocess.run([base, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = next((folder / "venv" / "lib").glob("*/site-packages"))
    (packages / "project.pth").write_text(_PTH.format(folder=sysconfig.get_paths()["purelib"]))
    return str(folder / "venv" / "bin" / "python"), ""


def _is_open(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in [path, *path.parents])
