"""Configure and start the sshd of this node, and configure ssh for the other nodes.

Both use one key, made for the job. It is the key of the user and of every host, so host keys are
pinned without a list of hosts, and any other sshd at the same address is refused.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from typing import NamedTuple

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.node.files import write_private

# The name of all hosts of the job in the file of known hosts.
_ALIAS = "cloudjob"

# Allow commands only: no terminal, forwarding, password, PAM, or variables from the client.
_SERVER = """\
Port {port}
HostKey {key}
AuthorizedKeysFile {authorized}
PidFile none
StrictModes no
UsePAM no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
HostbasedAuthentication no
AllowUsers {user}
PermitRootLogin prohibit-password
PermitUserEnvironment no
PermitUserRC no
PermitTTY no
DisableForwarding yes
MaxStartups 1000
MaxSessions 1000
LoginGraceTime 60
ClientAliveInterval 2
ClientAliveCountMax 4
UseDNS no
PrintMotd no
AcceptEnv SHLVL
SetEnv CLOUDJOB_NODE_DIR={node_dir}{tmp}
"""

# The default key exchange of OpenSSH 8.5 to 9.8 costs the head 50 ms of CPU for each connection;
# later versions have one that is as safe, and cheap. (ADR 15)
_CLIENT = """\
Host *
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    HostKeyAlias {alias}
    UserKnownHostsFile {known}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    UpdateHostKeys no
    KexAlgorithms -sntrup761x25519*
    BatchMode yes
    ConnectTimeout 10
    ServerAliveInterval 2
    ServerAliveCountMax 4
    ControlMaster no
    ForwardAgent no
    ForwardX11 no
    LogLevel ERROR
"""

_ROOT_FOLDER = "/run/sshd"


class SshError(Exception):
    """sshd or ssh cannot be set up."""


class SshFiles(NamedTuple):
    """The files of ssh in the node's folder.

    Args:
        key: The private key of the job.
        server: The configuration of sshd.
    """

    key: str
    authorized: str
    known: str
    server: str
    log: str


def files_in(folder: str) -> SshFiles:
    """Return the files of ssh in this folder of a node."""
    names = ("ssh-key", "ssh-authorized", "ssh-known", "sshd-config", "sshd.log")
    return SshFiles(*(os.path.join(folder, name) for name in names))


def prepare(node: NodeEnv, node_paths: NodePaths, key: bytes) -> None:
    """Write the files that sshd and ssh read.

    Raises:
        SshError: ssh is not installed, or the key is not valid.
    """
    files = files_in(node_paths.node_dir)
    write_private(files.key, key if key.endswith(b"\n") else key + b"\n")
    public = _public_key(files.key)
    values = {
        "port": node.sshd_port,
        "user": _user(),
        "key": files.key,
        "authorized": files.authorized,
        "known": files.known,
        "alias": _ALIAS,
        "node_dir": node_paths.node_dir,
        "tmp": _tmp(),
    }
    write_private(files.authorized, public.encode("ascii") + b"\n")
    write_private(files.known, (f"{_ALIAS} {public}\n").encode("ascii"))
    write_private(files.server, _SERVER.format(**values).encode("utf-8"))
    write_private(node_paths.ssh_config, _CLIENT.format(**values).encode("utf-8"))


def start(node_paths: NodePaths) -> subprocess.Popen[bytes]:
    """Start sshd as the current user."""
    files = files_in(node_paths.node_dir)
    program = shutil.which("sshd", path=_search_path())
    if program is None:
        raise SshError("looking for sshd: not found in this image")
    if os.geteuid() == 0:
        # As root, sshd needs a folder that Debian's service creates, which may not have run here.
        with contextlib.suppress(OSError):
            os.makedirs(_ROOT_FOLDER, mode=0o755, exist_ok=True)
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # sshd starts itself again for each session, so it needs its absolute path.
        return subprocess.Popen(
            [os.path.abspath(program), "-D", "-e", "-f", files.server],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A clean environment: sessions get no variables of this job except those of SetEnv.
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
    finally:
        os.close(log)


def last_lines(node_paths: NodePaths) -> str:
    """Return the last lines of sshd's log, joined to one line."""
    try:
        with open(files_in(node_paths.node_dir).log, "rb") as file:
            lines = file.read()[-2000:].decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return "; ".join(line.strip() for line in lines[-4:] if line.strip())


def _public_key(key: str) -> str:
    program = shutil.which("ssh-keygen", path=_search_path())
    if program is None:
        raise SshError("looking for ssh-keygen: not found in this image")
    done = subprocess.run(
        [program, "-y", "-P", "", "-f", key],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    words: list[str] = done.stdout.decode("ascii", "replace").split()
    if done.returncode or len(words) < 2:
        problem = done.stderr.decode("utf-8", "replace").strip() or "it is empty"
        raise SshError(f"reading the key of the job: {problem}")
    return f"{words[0]} {words[1]}"


def _tmp() -> str:
    """Return the ``SetEnv`` text for TMPDIR, in which mpirun's daemons create folders.

    Empty if the value has spaces or quotes, which sshd does not accept.
    """
    folder = os.environ.get("TMPDIR", "")
    return f" TMPDIR={folder}" if folder and not set(folder) & set(" \t\n\"'\\") else ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        raise SshError(
            "looking up user %d: it is not in /etc/passwd, so sshd accepts no login" % os.geteuid()
        ) from error


def _search_path() -> str:
    """Return ``PATH`` with the folders in which sshd is often installed."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin:/sbin:/usr/bin"
