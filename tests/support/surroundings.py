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
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.support.machines import limited_files
from tests.support.users import USER, as_user, has_name, python_of_user

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
    """The command line of whole-job tests, which a surrounding changes.

    Args:
        python: The interpreter of the laptop half; empty for the program beside the tests' own.
        groups: Further groups of an ordinary user.
    """

    folder: Path
    python: str
    prefix: tuple[str, ...]
    environ: dict[str, str | bytes]
    groups: tuple[int, ...]

    @property
    def store(self) -> Path: ...

    def chown_to(self, user: int) -> None: ...


def words(line: CommandLine) -> tuple[str, ...]:
    """Return the words that start cloudjob."""
    module = (line.python, "-m", "cloudjob.cli")
    program = (str(Path(sys.executable).parent / "cloudjob"),)
    return (*line.prefix, *(module if line.python else program))


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


# Full paths, as some tests have a PATH with their own programs only.
_ENV, _SH, _UNSHARE = "/usr/bin/env", "/bin/sh", "/usr/bin/unshare"


def _shell_before(text: str, *arguments: str) -> tuple[str, ...]:
    """Return the command before another one that first runs a text in a shell."""
    return (_SH, "-ec", f'{text}\nexec "$@"', "sh", *arguments)


def _apart(kind: str, text: str) -> tuple[str, ...]:
    """Return the command before another one that runs it in a namespace that a text prepares."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return (_UNSHARE, kind, *_shell_before(f"(PATH={path}\n{text})"))


# -- what each row does ---------------------------------------------------------------------------


def _home(line: CommandLine) -> Path:
    """Give the user a home folder, and return it."""
    folder = line.folder / "user"
    folder.mkdir(exist_ok=True)
    line.environ["HOME"] = str(folder)
    return folder


def _ordinary_user(line: CommandLine) -> None:
    _home(line)
    line.python, line.prefix = python_of_user()[0], as_user(*line.groups)
    line.chown_to(USER)


def _hosts_of_debian(line: CommandLine) -> None:
    """Resolve the machine's own name to 127.0.1.1, as the installer of Debian and Ubuntu does."""
    path = line.folder / "etc-hosts"
    path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n::1 localhost\n")
    line.prefix = _apart("--mount", f"mount --bind '{path}' /etc/hosts")


# Shows whether this user may replace the hosts file.
_BIND = "mount --bind /etc/hosts /etc/hosts"


def _long_tmpdir(line: CommandLine) -> None:
    path = line.folder / ("temporary files of a project with a long name " * 3).strip()
    path.mkdir()
    line.environ["TMPDIR"] = str(path)


def _locale(assignments: tuple[str, ...], line: CommandLine) -> None:
    line.prefix = (_ENV, "-u", "LANG", "-u", "LC_ALL", "-u", "LC_CTYPE", *assignments)


def _umask(mask: str, line: CommandLine) -> None:
    line.prefix = _shell_before(f"umask {mask}")


def _noisy_shell(shell: str, line: CommandLine) -> None:
    home = _home(line)
    for name in _PROFILES:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_NOISE.replace(">&2", "") if "csh" in name or "login" in name else _NOISE)
    line.environ["SHELL"] = str(shutil.which(shell))


def _store_without_locks(line: CommandLine) -> None:
    """Give the store a file system without locks, hard links and unnamed files."""
    lacks = ("no-locks=37", "no-links", "no-tmpfile")
    line.environ.update(limited_files(line.store, *lacks))


def _python_here(version: str, line: CommandLine) -> None:
    line.python = str(_OURS / version / "bin" / "python")


def _python_of_nodes(version: str, line: CommandLine) -> None:
    _home(line)
    key = f"  python: {_python(version)}\n"
    write_config(line.folder, f"process:\n{key}slurm:\n{key}")


def write_config(folder: Path, text: str) -> None:
    """Write the user's configuration for a command line with this folder."""
    config = folder / "user" / ".config" / "cloudjob" / "config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)


def _networks(text: str, line: CommandLine) -> None:
    line.prefix = _apart("--net", text)


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
    try:
        done = subprocess.run([*_apart(kind, text), "true"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
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
    Surrounding("lang-c", partial(_locale, ("LANG=C", "LC_ALL=C"))),
    Surrounding("no-lang", partial(_locale, ())),
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

_NO_SHELL = {"noisy": "no login shell starts"}
_FRAMEWORK = {
    "nodes-python": "the nodes' Python is the one that has the framework",
    "ordinary-user": "the framework is in a folder of root",
    **_NO_SHELL,
}
_APART = {
    "ipv6": "the nodes are machines with networks of their own",
    "virtual-bridge": "the nodes are machines with networks of their own",
    "tls-store": "this store listens on loopback, which other machines do not reach",
}
_IMAGE = {
    "nodes-python": "the nodes' Python is the one of their image",
    "hosts": "the nodes have names of their own",
    **_NO_SHELL,
    **_APART,
}
# For each part of the tests, the rows that mean nothing there, and why.
_UNSUITABLE = {
    **{
        f"tests/jobs/test_{name}.py": _FRAMEWORK
        for name in ("torchrun", "horovod", "mindspore", "tensorflow", "mpich")
    },
    "tests/e2e_docker/": _IMAGE,
    "tests/e2e_kube/": {
        "ordinary-user": "the API server's certificate is in a folder of root",
        **_IMAGE,
    },
    "tests/e2e_slurm/": {
        "hosts": "the login node's file has the names of the nodes",
        **({} if has_name() else {"ordinary-user": "Slurm refuses a user without a name"}),
        **_APART,
    },
    "tests/e2e_console/": {
        "ordinary-user": "the state folder is that of root's other jobs",
        **_NO_SHELL,
        "ipv6": "the browser is outside of this network",
        "virtual-bridge": "the browser is outside of this network",
        "tls-store": "the state folder has a store of its own",
    },
}


# -- choosing a row -------------------------------------------------------------------------------


def of_today() -> str:
    """Return what chooses the rows of this run; the workers of a run get the same."""
    return os.environ.setdefault(VARIABLE, datetime.date.today().isoformat())


def choose(test: str, *, has_own_folder: bool = False) -> Surrounding | None:
    """Return the row for a test; None for the usual surroundings.

    Args:
        has_own_folder: Whether the test uses a folder that another user cannot reach.
    """
    chosen = of_today()
    if chosen == "none":
        return None
    why_not = {row.name: unsuitable(test, row.name) or row.missing() for row in TABLE}
    if has_own_folder:
        why_not[TABLE[0].name] = "the test uses a folder that only root can reach"
    rows = [row for row in TABLE if not why_not[row.name]]
    if chosen in why_not:
        if why_not[chosen]:
            pytest.skip(f"not in the surroundings {chosen}: {why_not[chosen]}")
        return next(row for row in rows if row.name == chosen)
    try:
        day = datetime.date.fromisoformat(chosen).toordinal()
    except ValueError:
        allowed = f"none, a date, or one of {', '.join(why_not)}"
        raise pytest.UsageError(f"{VARIABLE}={chosen}: no such row ({allowed})") from None
    return rows[(day + zlib.crc32(test.encode())) % len(rows)]


def unsuitable(test: str, row: str) -> str:
    """Return why a row means nothing to a test; empty if it does."""
    return next(
        (
            why
            for part, reasons in _UNSUITABLE.items()
            for start, why in reasons.items()
            if test.startswith(part) and row.startswith(start)
        ),
        "",
    )


def header() -> list[str]:
    """Return the lines of a test run's header."""
    lines = [f"surroundings: {of_today()} ({VARIABLE})"]
    missing = [f"{row.name} ({why})" for row in TABLE if (why := row.missing())]
    return [*lines, f"surroundings not on this machine: {', '.join(missing)}"] if missing else lines
