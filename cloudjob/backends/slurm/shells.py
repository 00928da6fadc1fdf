"""Run programs of ``sh`` on this machine, or on another one through any login shell.

ssh passes a command to the user's login shell, which may be tcsh or fish, and whose startup files
may print text, ask questions or fail. So the command is one line that all shells read in the same
way; the program follows on standard input behind a random marker, and the same marker surrounds its
output. What the login shell itself reads or prints stays outside.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from cloudjob.errors import BackendError, Unreachable

# Seconds for which a command may be silent: a busy controller answers late.
LIMIT_S = 60.0
# Output of a command, and what a login shell may print before it.
ANSWER_BYTES, _NOISE_BYTES = 64 << 20, 1 << 20
# The end of stderr that is kept, and of each message.
_ERROR_BYTES, _MESSAGE_CHARS = 64 << 10, 600
_PIECE_BYTES = 1 << 16
_SSH_DOWN = 255
_AGAIN_S = 3.0
# Nothing that shells quote differently: no single quote, backslash, exclamation mark or newline.
# Empty lines come first, as a profile may read a line. dd reads no more than the program.
_BOOT = (
    'while read -r a n; do test "$a" = {marker} && break; done; test "$a" = {marker} || exit 97;'
    ' p=$(dd bs=1 count="$n" 2>/dev/null); echo {marker}; echo {marker} >&2; (eval "$p"); c=$?;'
    " echo; echo {marker} $c"
)
_SPARE_LINES = b"\n" * 20
# A Unix socket's path has at most 103 bytes on macOS; ssh adds a hash of 40 and a suffix of 17.
_SOCKET_FOLDER_BYTES = 103 - 1 - 40 - 17
# A space, a percent sign and others have a meaning in ssh's configuration.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")
# Options of the user's own configuration that suit a session, but not a command; no banners.
_SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=20",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "LogLevel=ERROR",
)


class CommandResult(NamedTuple):
    """The result of a command."""

    code: int
    out: bytes
    err: bytes

    @property
    def message(self) -> str:
        """Its stderr, or its stdout if that is empty, as one line; each line once."""
        return (
            one_line(self.err) or one_line(self.out) or f"exit code {self.code} without a message"
        )


def one_line(output: bytes) -> str:
    """Return the lines of an output as one, without repetitions and control characters.

    The middle is left out if it is long, as the cause may be at either end.
    """
    lines = output.decode("utf-8", "replace").splitlines()
    stripped = ("".join(c if c.isprintable() else " " for c in line).strip() for line in lines)
    text = "; ".join(dict.fromkeys(filter(None, stripped)))
    if len(text) <= _MESSAGE_CHARS:
        return text
    return f"{text[: _MESSAGE_CHARS // 2]} … {text[-_MESSAGE_CHARS // 2 :]}"


def run_here(text: str, stdin: bytes, *, folder: str, doing: str) -> CommandResult:
    """Run a program of sh on this machine.

    Raises:
        BackendError: It cannot be started, is silent for too long or prints too much.
    """
    transfer = _Transfer(["/bin/sh", "-c", text], stdin, cwd=folder)
    return transfer.run(doing, lambda: "`scontrol ping` shows whether the controller is up")


def run_there(
    host: str, text: str, stdin: bytes, *, is_reading: bool, limit_bytes: int
) -> CommandResult:
    """Run a program of sh on another machine.

    Args:
        is_reading: Whether the program may be repeated even if it has run already.
        limit_bytes: The size of its longest output.

    Raises:
        BackendError: It is silent for too long or prints too much.
        Unreachable: ssh cannot connect, or the login shell does not run the program.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        session = _Session(host, text, stdin, limit_bytes)
        done = session.run()
        # A broken connection must not end a wait; a program that only reads may be repeated.
        if done.code != _SSH_DOWN or not is_reading or time.monotonic() > deadline:
            break
        time.sleep(_AGAIN_S)
    return session.answer(done)


def command_there(host: str, text: str, *, is_terminal: bool) -> list[str]:
    """Return the ssh command that runs a program of sh, whose input and output are ours.

    Unlike ``run_there``, the program gets no marker, so what the login shell prints is shown, too.
    """
    # One line that all login shells read in the same way.
    program = base64.b64encode(os.fsencode(text)).decode("ascii")
    line = f"/bin/sh -c 'eval \"$(echo {program} | base64 -d)\"'"
    return [*_ssh(host, is_terminal=is_terminal), line]


class _Session:
    """One program that runs on another machine."""

    def __init__(self, host: str, text: str, stdin: bytes, limit_bytes: int) -> None:
        self._host = host
        self._marker = secrets.token_hex(16)
        program = os.fsencode(text)
        header = f"{self._marker} {len(program)}\n".encode("ascii")
        boot = _BOOT.format(marker=self._marker)
        self._transfer = _Transfer(
            [*_ssh(host), f"/bin/sh -c '{boot}'"],
            _SPARE_LINES + header + program + stdin,
            marker=self._marker.encode("ascii") + b"\n",
            limit_bytes=limit_bytes,
        )

    @property
    def has_begun(self) -> bool:
        """Whether the program has started."""
        return self._transfer.has_begun

    def run(self) -> CommandResult:
        return self._transfer.run(f"asking Slurm on {self._host}", self._hint)

    def answer(self, done: CommandResult) -> CommandResult:
        """Return the result of the program without what surrounds it."""
        mark = self._marker.encode("ascii")
        begin, end = done.out.find(mark + b"\n"), done.out.rfind(b"\n" + mark + b" ")
        err = done.err.rpartition(mark + b"\n")[2]
        if done.code == _SSH_DOWN and end < 0:
            raise Unreachable(
                f"connecting to {self._host} with ssh: {one_line(err) or 'no message'}",
                hint=f"try: ssh -o BatchMode=yes {self._host} sinfo",
            )
        if begin < 0:
            said = CommandResult(done.code, done.out, done.err).message
            raise Unreachable(
                f"running /bin/sh on {self._host} with ssh: the login shell ended with exit code"
                f" {done.code} and did not run it: {said}",
                hint=self._hint(),
            )
        code = re.match(rb"[0-9]{1,3}", done.out[end + len(mark) + 2 :]) if end > begin else None
        if code is None:
            raise Unreachable(
                f"running a command on {self._host} with ssh: the connection ended before it:"
                f" {one_line(err) or 'no message'}"
            )
        return CommandResult(int(code[0]), done.out[begin + len(mark) + 1 : end], err)

    def _hint(self) -> str:
        if self.has_begun:
            return "`scontrol ping` shows whether the controller is up"
        return (
            f"`ssh -T {self._host} /bin/sh -c true` must end without a question: look at the"
            " startup files of its shell, such as ~/.bashrc, and for a ForceCommand"
        )


class _Transfer:
    """Writes to a process and reads from it, as long as anything moves.

    Args:
        marker: What the process must print before its output; empty if nothing.
    """

    def __init__(
        self,
        argv: Sequence[str],
        stdin: bytes,
        *,
        cwd: str = "",
        marker: bytes = b"",
        limit_bytes: int = ANSWER_BYTES,
    ) -> None:
        self._argv, self._cwd = argv, cwd
        self._rest = memoryview(stdin)
        self._marker, self._limit_bytes = marker, limit_bytes
        self._out, self._err = bytearray(), bytearray()
        self.has_begun = not marker

    def run(self, doing: str, hint: Callable[[], str]) -> CommandResult:
        try:
            process = subprocess.Popen(
                self._argv,
                cwd=self._cwd or None,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise BackendError(
                f"{doing}: {error.filename or self._argv[0]}: {error.strerror}"
            ) from error
        with process:
            try:
                why = self._transfer(process)
                if why:
                    process.kill()
            except BaseException:
                process.kill()
                raise
        if why:
            said = one_line(bytes(self._out[-_ERROR_BYTES:]) if not self.has_begun else b"")
            raise Unreachable(f"{doing}: {why}" + (f": {said}" if said else ""), hint=hint())
        return CommandResult(process.returncode, bytes(self._out), bytes(self._err))

    def _transfer(self, process: subprocess.Popen[bytes]) -> str:
        """Transfer everything; return why that was given up, or an empty text."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        begun_s = time.monotonic()
        moved_s = begun_s
        with selectors.DefaultSelector() as selector:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE, self._write)
            selector.register(process.stdout, selectors.EVENT_READ, self._read_out)
            selector.register(process.stderr, selectors.EVENT_READ, self._read_err)
            while selector.get_map():
                since_s = moved_s if self.has_begun else begun_s
                ready = selector.select(max(0.0, since_s + LIMIT_S - time.monotonic()))
                if not ready:
                    return f"no answer in {LIMIT_S:g} s"
                moved_s = time.monotonic()
                for key, _ in ready:
                    if key.data(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                if why := self._excess():
                    return why
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
            return ""
        return f"no end within {LIMIT_S:g} s"

    def _excess(self) -> str:
        if not self.has_begun and len(self._out) > _NOISE_BYTES:
            return f"the login shell printed more than {_NOISE_BYTES >> 20} MiB"
        if len(self._out) > self._limit_bytes + _NOISE_BYTES:
            return f"more than {self._limit_bytes >> 20} MiB of output"
        return ""

    def _write(self, file: IO[bytes]) -> bool:
        """Write the next piece; return whether that was the last one."""
        try:
            written = os.write(file.fileno(), self._rest[:_PIECE_BYTES])
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        self._rest = self._rest[written:]
        return not self._rest

    def _read_out(self, file: IO[bytes]) -> bool:
        data = os.read(file.fileno(), _PIECE_BYTES)
        before = max(0, len(self._out) - len(self._marker))
        self._out += data
        self.has_begun = self.has_begun or self._marker in self._out[before:]
        return not data

    def _read_err(self, file: IO[bytes]) -> bool:
        data = os.read(file.fileno(), _PIECE_BYTES)
        self._err += data
        del self._err[:-_ERROR_BYTES]
        return not data


def _ssh(host: str, *, is_terminal: bool = False) -> list[str]:
    """The ssh command with the user's configuration; one connection is shared for a minute."""
    argv = ["ssh", "-t" if is_terminal else "-T"]
    for option in _SSH_OPTIONS:
        argv += ["-o", option]
    folder = _socket_folder()
    if folder:
        argv += ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C"]
        argv += ["-o", "ControlPersist=60"]
    else:
        argv += ["-o", "ControlMaster=no", "-o", "ControlPath=none"]
    return [*argv, "--", host]


def _socket_folder() -> str:
    """Return a folder that only this user can read, for the socket of a shared connection.

    Empty if there is none whose path is short enough.
    """
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(parent, f"cloudjob-ssh-{os.getuid()}")
        path = str(folder)
        if len(os.fsencode(path)) > _SOCKET_FOLDER_BYTES or not _PLAIN_PATH.fullmatch(path):
            continue
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if status.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o700)
                return path
    return ""
