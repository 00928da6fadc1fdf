"""The table of surroundings in which tests marked ``surroundings`` run: one a day for each test.

The day and the name of the test choose a row of the table, so that every test gets every row in the
course of time. ``CLOUDJOB_TEST_SURROUNDINGS`` repeats a run: a date, the name of a row for all of
these tests, or ``none``.
"""

from __future__ import annotations

import datetime
import functools
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.support.machines import limited_files
from tests.support.users import USER, as_user, python_of_user

VARIABLE = "CLOUDJOB_TEST_SURROUNDINGS"
# Interpreters: pyenv's, and environments with our packages that ``scripts/pythons`` creates.
_PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
_OURS = Path(__file__).parents[2] / ".cache" / "pythons"
# What a login shell may print before anything else.
_NOISE = "echo 'Welcome to this site!'\necho 'mail waiting' >&2\n"
_PROFILES = (
    *(".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv", ".kshrc", ".cshrc", ".tcshrc"),
    *(".login", ".config/fish/config.fish"),
)


class CommandLine(Protocol):
    """The command line of whole-job tests, which a surrounding changes."""

    folder: Path
    python: str
    prefix: tuple[str, ...]
    environ: dict[str, str | bytes]
    has_own_processes: bool

    @property
    def home(self) -> Path: ...

    def chown_to(self, user: int) -> None: ...


class Surrounding(NamedTuple):
    """A row of the table.

    Args:
        missing: Returns why this machine cannot provide it; empty if it can.
        fixture: The fixture with variables of its command line; empty for none.
    """

    name: str
    apply: Callable[[CommandLine], None] = lambda _line: None
    missing: Callable[[], str] = str
    fixture: str = ""


def _shell_before(text: str, *arguments: str) -> tuple[str, ...]:
    """Return the command before another one that first runs a text in a shell."""
    return ("sh", "-ec", f'{text}\nexec "$@"', "sh", *arguments)


# -- what each row does ---------------------------------------------------------------------------


def _ordinary_user(line: CommandLine) -> None:
    line.python, line.prefix = python_of_user()[0], as_user()
    line.chown_to(USER)


def _hosts_of_debian(line: CommandLine) -> None:
    """Resolve the machine's own name to 127.0.1.1, as the installer of Debian and Ubuntu does."""
    path = line.folder / "etc-hosts"
    path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n::1 localhost\n")
    mount = _shell_before(f"mount --bind '{path}' /etc/hosts")
    line.prefix = ("unshare", "--mount", *mount)


# Shows whether this user may replace the hosts file.
_BIND = "mount --bind /etc/hosts /etc/hosts"


def _long_tmpdir(line: CommandLine) -> None:
    path = line.folder / ("temporary files of a project with a long name " * 3).strip()
    path.mkdir()
    line.environ["TMPDIR"] = str(path)


def _locale(values: dict[str, str], line: CommandLine) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        line.environ.pop(name, None)
    line.environ.update(values)


def _umask(mask: str, line: CommandLine) -> None:
    line.prefix = _shell_before(f"umask {mask}")


def _noisy_shell(shell: str, line: CommandLine) -> None:
    for name in _PROFILES:
        path = line.folder / "user" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_NOISE.replace(">&2", "") if "csh" in name or "login" in name else _NOISE)
    line.environ["SHELL"] = str(shutil.which(shell))


def _store_without_locks(line: CommandLine) -> None:
    """Give the store a file system without locks, hard links and unnamed files."""
    lacks = ("no-locks=37", "no-links", "no-tmpfile")
    line.environ.update(limited_files(line.home / "store", *lacks))


def _python_here(version: str, line: CommandLine) -> None:
    line.python = str(_OURS / version / "bin" / "python")


def _python_of_nodes(version: str, line: CommandLine) -> None:
    write_config(line.folder, f"process:\n  python: {_python(version)}\n")


def write_config(folder: Path, text: str) -> None:
    """Write the user's configuration for a command line with this folder."""
    config = folder / "user" / ".config" / "cloudjob" / "config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)


def _networks(text: str, line: CommandLine) -> None:
    line.prefix = ("unshare", "--net", *_shell_before(text))


_IPV6 = """\
ip link set lo up
ip link add eth0 type veth peer name peer0
ip link set peer0 up
ip address add 192.0.2.7/24 dev eth0
ip address add 2001:db8::7/64 dev eth0 nodad
ip link set eth0 up"""
_BRIDGE = """\
ip link set lo up
ip link add eth0 type veth peer name peer0
ip link set peer0 up
ip address add 192.0.2.7/24 dev eth0
ip link set eth0 up
ip link add virbr0 type bridge
ip address add 192.168.122.1/24 dev virbr0
ip link set virbr0 up"""


# -- what each row needs --------------------------------------------------------------------------


def _no_root() -> str:
    return "" if os.geteuid() == 0 else "only root can"


def _no_program(name: str) -> str:
    return "" if shutil.which(name) else f"no {name}"


@functools.cache
def _no_namespace(kind: str, text: str) -> str:
    """Return why a text cannot run in a new namespace; empty if it can."""
    command = ("unshare", kind, *_shell_before(text), "true")
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or "no namespaces"


def _no_python_here(version: str) -> str:
    folder = _OURS / version
    return "" if (folder / "bin" / "python").exists() else f"no {folder}: scripts/pythons makes it"


def _no_python(version: str) -> str:
    return "" if _python(version) else f"no Python {version}"


def _python(version: str) -> str:
    """Return an interpreter of a version for nodes, without packages; empty if there is none."""
    for folder in sorted(_PYENV.glob(f"{version}.*")):
        if (folder / "bin" / "python3").exists():
            return str(folder / "bin" / "python3")
    return shutil.which(f"python{version}") or ""


def _no_compiler() -> str:
    return "" if shutil.which("cc") or shutil.which("gcc") else "no C compiler"


TABLE = (
    Surrounding("ordinary-user", _ordinary_user, lambda: _no_root() or python_of_user()[1]),
    Surrounding("hosts-127.0.1.1", _hosts_of_debian, partial(_no_namespace, "--mount", _BIND)),
    Surrounding("long-tmpdir-with-spaces", _long_tmpdir),
    Surrounding("lang-c", partial(_locale, {"LANG": "C", "LC_ALL": "C"})),
    Surrounding("no-lang", partial(_locale, {})),
    Surrounding("umask-077", partial(_umask, "077")),
    Surrounding("umask-000", partial(_umask, "000")),
    *(
        Surrounding(f"noisy-{shell}", partial(_noisy_shell, shell), partial(_no_program, shell))
        for shell in ("bash", "dash", "zsh", "tcsh", "fish", "ksh")
    ),
    Surrounding("store-without-locks", _store_without_locks, _no_compiler),
    *(
        Surrounding(
            f"python-{version}", partial(_python_here, version), partial(_no_python_here, version)
        )
        for version in ("3.10", "3.12", "3.13", "3.14")
    ),
    *(
        Surrounding(
            f"nodes-python-{version}",
            partial(_python_of_nodes, version),
            partial(_no_python, version),
        )
        for version in ("3.8", "3.9", "3.10", "3.12", "3.13", "3.14")
    ),
    Surrounding(
        "ipv6-beside-ipv4", partial(_networks, _IPV6), partial(_no_namespace, "--net", _IPV6)
    ),
    Surrounding(
        "virtual-bridge", partial(_networks, _BRIDGE), partial(_no_namespace, "--net", _BRIDGE)
    ),
    Surrounding("tls-store", fixture="tls_store"),
)


# -- choosing a row -------------------------------------------------------------------------------


def of_today() -> str:
    """Return what chooses the rows of this run; the workers of a run get the same."""
    return os.environ.setdefault(VARIABLE, datetime.date.today().isoformat())


def choose(test: str, *, needs_own_folder: bool) -> Surrounding | None:
    """Return the row for a test; None for the usual surroundings.

    Args:
        needs_own_folder: Whether the test uses a folder that another user cannot reach.
    """
    chosen = of_today()
    if chosen == "none":
        return None
    by_name = {row.name: row for row in TABLE}
    if chosen in by_name:
        row = by_name[chosen]
        return None if row.missing() else row
    try:
        day = datetime.date.fromisoformat(chosen).toordinal()
    except ValueError:
        allowed = f"none, a date, or one of {', '.join(by_name)}"
        raise pytest.UsageError(f"{VARIABLE}={chosen}: no such row ({allowed})") from None
    rows = [row for row in TABLE if not (row.missing() or (needs_own_folder and row == TABLE[0]))]
    return rows[(day + zlib.crc32(test.encode())) % len(rows)]


def header() -> list[str]:
    """Return the lines of a test run's header."""
    lines = [f"surroundings: {of_today()} ({VARIABLE})"]
    missing = [f"{row.name} ({why})" for row in TABLE if (why := row.missing())]
    return [*lines, f"surroundings not on this machine: {', '.join(missing)}"] if missing else lines
