"""Output files as one zip file that is made while it is downloaded."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from cloudjob.console.text import displayable
from cloudjob.tracking.outputs import Output, Outputs

_LEFT_OUT = "left out.txt"
# A zip file cannot hold earlier or later times: 1980 to 2107, and a day less for any time zone.
_EARLIEST_S, _LATEST_S = 315_619_200, 4_354_646_400


class _Sink:
    """Keeps what the archive writes until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def zipped(outputs: Outputs, folder: str) -> Iterator[bytes]:
    """Yield a zip file of the files in a folder of the outputs, in pieces that are not empty.

    Links are left out, because programs that unpack an archive may follow them; a file in it names
    them. If a file cannot be read, the archive has no end, so that a browser reports it.

    Args:
        folder: The start of their names, which the archive leaves out; empty for all.

    Raises:
        StoreError: A file cannot be read.
    """
    start, used = f"{folder}/" if folder else "", Counter[str]()
    files = [file for file in outputs if file.name.startswith(start)]
    sink = _Sink()
    # Most outputs are compressed or do not shrink.
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        for file in files:
            if file.link:
                continue
            info = zipfile.ZipInfo(_new_name(file.name[len(start) :], used), _moment(file))
            with archive.open(info, "w", force_zip64=True) as entry:
                for piece in outputs.read(file):
                    entry.write(piece)
                    if taken := sink.take():
                        yield taken
        links = [
            f"{displayable(file.name)} -> {displayable(file.link)}" for file in files if file.link
        ]
        if links:
            archive.writestr(_new_name(_LEFT_OUT, used), "\n".join(["links:", *links, ""]))
    yield sink.take()


def _new_name(name: str, used: Counter[str]) -> str:
    """Return the name of an entry: readable, in the folder of the archive, and not yet used.

    Without its control characters, a name may lead out of the folder; on Windows, a backslash does.
    """
    parts = (displayable(part).replace("\\", "_") for part in name.split("/"))
    readable = new = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    while used[new]:
        used[readable] += 1
        new = f"{readable}~{used[readable]}"
    used[new] += 1
    return new


def _moment(file: Output) -> tuple[int, int, int, int, int, int]:
    at_s = min(max(_EARLIEST_S, file.modified_ns // 10**9), _LATEST_S)
    return datetime.fromtimestamp(at_s).timetuple()[:6]
