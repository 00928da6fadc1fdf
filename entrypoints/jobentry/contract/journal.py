"""The journal of a node: its phases, the resources that it and its ranks use, hangs, slow ranks.

The laptop reads it. A journal consists of JSON lines with short keys. In the node's log each line
starts with ``MARK``. Lines of ranks start with the mark of their rank, and messages of the entry
with ``jobentry: ``, so a script cannot print a line that is read as part of the journal. At the end
of the job the lines without their mark become one compressed object beside the exit record.
"""

from __future__ import annotations

import json
import re
import zlib
from enum import Enum
from typing import Any, Iterable, Iterator, NamedTuple, Sequence, Union

from jobentry.contract import hangs, slow
from jobentry.contract.hangs import Hang
from jobentry.contract.lists import numbers, ranges
from jobentry.contract.malformed import MALFORMED, finite, whole
from jobentry.contract.slow import Slow

MARK = b"jobentry# "
# Limits for reading: a longer line is not part of a journal, and a larger object is not one.
LINE_LIMIT_BYTES = 64 * 1024
LIMIT_BYTES = 64 * 1024 * 1024
_NAME_LIMIT = 80
# The most ranks of one node: a short line may name any number of equal ones.
_RANKS_LIMIT = 1024


class State(Enum):
    """The state of a rank, by the letter that a journal has for it.

    While the rank runs, it is the state of its process in proc(5), which may be another letter.
    """

    RUNNING = "R"
    WAITING = "S"
    IDLE = "I"
    WAITS_FOR_DISK = "D"
    PAUSED = "T"
    TRACED = "t"
    ZOMBIE = "Z"
    DEAD = "X"
    # It has ended with exit code 0.
    ENDED = "E"
    # It has ended with another exit code, or by a signal of others.
    FAILED = "F"
    # It has ended because cloudjob or its launcher stopped it.
    STOPPED = "C"
    # It has ended without a report of its wrapper.
    LOST = "L"

    @property
    def has_ended(self) -> bool:
        """Whether it is the end of a rank."""
        return self in (State.ENDED, State.FAILED, State.STOPPED, State.LOST)

    @property
    def is_trouble(self) -> bool:
        """Whether a rank in this state does not do its part of a running job."""
        unable = (State.PAUSED, State.TRACED, State.ZOMBIE, State.DEAD)
        return self in (*unable, State.FAILED, State.LOST)


def state_of(letter: str) -> State | None:
    """Return the state with this letter; None for one that is not known."""
    return next((state for state in State if state.value == letter), None)


# The letters of ranks that have ended.
ENDS = frozenset(state.value for state in State if state.has_ended)


class Phase(NamedTuple):
    """One step of a node's work. Times are seconds since 1970, by the clock of the node.

    Args:
        ended_at: None while the phase lasts.
        at: When this was written.
        total_bytes: The size of a transfer; 0 if it is not known or nothing is transferred.
    """

    name: str
    started_at: float
    ended_at: float | None = None
    at: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0


class Device(NamedTuple):
    """A GPU or NPU; a value that its driver does not give is None.

    Args:
        kind: ``gpu`` or ``npu``.
        ecc_errors: Errors of its memory that could not be corrected.
        xid: The last critical error that the driver reported since the journal began, 0 for none.
    """

    kind: str
    number: int
    utilisation_percent: float | None = None
    memory_mib: float | None = None
    memory_limit_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    ecc_errors: int | None = None
    xid: int = 0


class RankSample(NamedTuple):
    """A rank and the processes it has started, at one moment.

    Args:
        cpu_percent: CPU time since the last sample, in percent of one CPU.
        rss_mib: Resident memory; pages that processes share count in each.
        quiet_s: Seconds since its last output, or since it was first seen.
        state: The letter of its ``State``, or another one of proc(5).
        threads: The number of all its threads.
        children: The number of processes that its program has started.
        waits_percent: For how much of the time since the last sample it waited for other ranks or
            for its device; None if that is not known.
        place: Where it was last: ``train.py:41``, after the call in which it waits; empty if that
            is not known.
    """

    rank: int
    cpu_percent: int
    rss_mib: int
    quiet_s: int
    state: str
    threads: int
    children: int
    waits_percent: int | None = None
    place: str = ""


class Sample(NamedTuple):
    """The resources that a node uses at one moment; a value that cannot be read is None or empty.

    Rates and percentages are means since the last sample.

    Args:
        at: Seconds since 1970, by the clock of the node.
        cpu: User, system, waiting for I/O, and stolen by the hypervisor, in percent of all CPUs of
            the machine.
        cpus: The CPUs of the machine.
        own_cpu: CPU time used by the node's control group, and time for which its limit throttled
            it, in percent of one CPU.
        memory: Memory in use, and the limit, in MiB: of the control group, or else of the machine.
        pressure: Time in the last 10 s in which processes waited for CPU, for memory, all of them
            for memory, for I/O, all of them for I/O, in percent.
        oom_kills: Processes that the kernel has killed for lack of memory since the journal began.
        disk: Data read and written by the machine, in KiB/s.
        network: Data received and sent, in KiB/s, without the loopback interface.
        rdma: The same for InfiniBand and RoCE, which bypasses the network above.
        space: Space not available, and the size, in MiB, of the file system with the node's folder.
    """

    at: float
    cpu: tuple[float, ...] = ()
    cpus: int = 0
    own_cpu: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    pressure: tuple[float, ...] = ()
    oom_kills: int = 0
    disk: tuple[float, ...] = ()
    network: tuple[float, ...] = ()
    rdma: tuple[float, ...] = ()
    space: tuple[float, ...] = ()
    devices: tuple[Device, ...] = ()
    ranks: tuple[RankSample, ...] = ()


Entry = Union[Phase, Sample, Hang, Slow]

_BEFORE_MARK = re.compile(rb"(?<=\n)(?=%s)" % MARK)
# A line of the log between journal entries: the time of the lines that follow.
_TIME = re.compile(rb'\{"time":(\d{1,12}(?:\.\d)?)\}')

_LISTS = {
    "cpu": 4,
    "own_cpu": 2,
    "memory": 2,
    "pressure": 5,
    "disk": 2,
    "network": 2,
    "rdma": 2,
    "space": 2,
}
_COLUMNS = ("c", "m", "q", "s", "t", "k")
# Columns that readers before them ignore: the percentage of waiting, -1 if it is not known; the
# different places, and the index of that of each rank.
_WAITS, _PLACES, _PLACE_OF = "w", "n", "p"
_NO_PERCENT = -1
_PLACE_LIMIT = 120


def dump(entry: Entry) -> bytes:
    """Return an entry as one line of JSON, without a mark; empty values are left out."""
    return json.dumps(_values(entry), separators=(",", ":")).encode("ascii") + b"\n"


def load(line: bytes) -> Entry | None:
    """Return the entry in a line without its mark; None if the line is not an entry."""
    if len(line) > LINE_LIMIT_BYTES:
        return None
    try:
        values = json.loads(line.decode("ascii"))
        if "hang" in values:
            return hangs.from_values(values["hang"])
        if "slow" in values:
            return slow.from_values(values["slow"])
        return _read_phase(values) if "phase" in values else _read_sample(values)
    except MALFORMED:
        return None


def time_mark(at: float) -> bytes:
    """Return a marked line that only gives the time, and for which ``load`` returns None."""
    return MARK + b'{"time":%.1f}\n' % at


def time_of(line: bytes) -> float:
    """Return when a line of the journal, without its mark, was written; 0 if it has no time."""
    match = _TIME.fullmatch(line.rstrip())
    if match:
        return float(match[1])
    entry = load(line)
    return entry.at if entry else 0.0


def by_time(data: bytes) -> Iterator[tuple[float, bytes]]:
    """Yield the lines of a log in parts, each with the time in its first line.

    The time is 0 for lines before the first line of the journal.
    """
    if MARK not in data:
        yield 0.0, data
        return
    # The pattern matches at the start of each marked line, so every part but the first has one.
    for part in _BEFORE_MARK.split(data):
        is_marked = part.startswith(MARK)
        yield time_of(part[len(MARK) :].partition(b"\n")[0]) if is_marked else 0.0, part


def split(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return whole lines of a log without the journal's, and the journal's without their mark."""
    if MARK not in data:
        return data, []
    others, journal_lines = zip(*parts(data))
    return b"".join(others), [line for line in journal_lines if line is not None]


def parts(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the lines before each line of the journal, and that line without its mark.

    The last pair has the lines after the journal's last line, and None.
    """
    # A regular expression takes thirty times as long.
    at, mark = 0, data.find(MARK)
    while mark >= 0:
        after = mark + len(MARK)
        if data[mark - 1 : mark] == b"\n" or not mark:
            end = data.find(b"\n", after) + 1 or len(data) + 1
            yield data[at:mark], data[after : end - 1]
            at = after = end
        mark = data.find(MARK, after)
    yield data[at:], None


def pack(lines: Iterable[bytes]) -> bytes:
    """Return the compressed object that holds the lines of a journal."""
    # Not gzip, which imports as much again as an entry needs.
    writer = zlib.compressobj(6, wbits=31)
    return writer.compress(b"".join(lines)) + writer.flush()


def unpack(data: bytes) -> list[bytes]:
    """Return the lines passed to ``pack``; a damaged object has none, and a long one is cut."""
    reader = zlib.decompressobj(wbits=31)
    try:
        text = reader.decompress(data, LIMIT_BYTES)
    except zlib.error:
        return []
    return text.split(b"\n")[:-1]


def _values(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, Hang):
        return {"hang": hangs.to_values(entry)}
    if isinstance(entry, Slow):
        return {"slow": slow.to_values(entry)}
    return _phase(entry) if isinstance(entry, Phase) else _sample(entry)


# ---- phases --------------------------------------------------------------------------------------


def _phase(phase: Phase) -> dict[str, Any]:
    values: dict[str, Any] = {"phase": phase.name, "from": round(phase.started_at, 3)}
    if phase.ended_at is not None:
        values["to"] = round(phase.ended_at, 3)
    if phase.at:
        values["at"] = round(phase.at, 3)
    if phase.done_bytes or phase.total_bytes:
        values["bytes"] = [phase.done_bytes, phase.total_bytes]
    return values


def _read_phase(values: dict[str, Any]) -> Phase | None:
    name, ended_at = values["phase"], values.get("to")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_LIMIT or not name.isprintable():
        return None
    done_bytes, total_bytes = values.get("bytes", (0, 0))
    return Phase(
        name,
        finite(values["from"]),
        None if ended_at is None else finite(ended_at),
        finite(values.get("at", 0.0)),
        whole(done_bytes),
        whole(total_bytes),
    )


# ---- samples -------------------------------------------------------------------------------------


def _sample(sample: Sample) -> dict[str, Any]:
    values: dict[str, Any] = {"at": round(sample.at, 1)}
    for name in _LISTS:
        numbers = getattr(sample, name)
        if numbers:
            values[name] = [_short(number) for number in numbers]
    for name in ("cpus", "oom_kills"):
        if getattr(sample, name):
            values[name] = getattr(sample, name)
    if sample.devices:
        values["devices"] = [
            [item if isinstance(item, str) else _short(item) for item in device]
            for device in sample.devices
        ]
    if sample.ranks:
        values["ranks"] = _columns(sample.ranks)
    return values


def _read_sample(values: dict[str, Any]) -> Sample:
    return Sample(
        at=finite(values["at"]),
        cpus=whole(values.get("cpus", 0)),
        oom_kills=whole(values.get("oom_kills", 0)),
        devices=tuple(_device(device) for device in values.get("devices", ())),
        ranks=_ranks(values["ranks"]) if "ranks" in values else (),
        **{name: _list(values[name], length) for name, length in _LISTS.items() if name in values},
    )


def _list(items: Any, length: int) -> tuple[float, ...]:
    if len(items) != length:
        raise ValueError("not a list of this length")
    return tuple(finite(item) for item in items)


def _device(items: Sequence[Any]) -> Device:
    kind, number, *numbers, errors, xid = items
    percent, memory_mib, memory_limit_mib, power_w, power_limit_w, heat = [
        None if value is None else finite(value) for value in numbers
    ]
    return Device(
        str(kind), whole(number), percent, memory_mib, memory_limit_mib, power_w, power_limit_w,
        heat, None if errors is None else whole(errors), whole(xid),
    )  # fmt: skip


def _columns(ranks: Sequence[RankSample]) -> dict[str, Any]:
    """Return ranks as columns; a column stores a value that is the same for all ranks once."""
    columns: dict[str, Any] = {"r": ranges([rank.rank for rank in ranks])}
    for name, column in zip(_COLUMNS, list(zip(*ranks))[1 : 1 + len(_COLUMNS)]):
        columns[name] = column[0] if len(set(column)) == 1 else list(column)
    if isinstance(columns["s"], list):
        columns["s"] = "".join(columns["s"])
    waits = [_NO_PERCENT if rank.waits_percent is None else rank.waits_percent for rank in ranks]
    if any(percent != _NO_PERCENT for percent in waits):
        columns[_WAITS] = waits[0] if len(set(waits)) == 1 else waits
    places = sorted({rank.place for rank in ranks})
    if any(places):
        columns[_PLACES] = [place[:_PLACE_LIMIT] for place in places]
        indices = [places.index(rank.place) for rank in ranks]
        columns[_PLACE_OF] = indices[0] if len(places) == 1 else indices
    return columns


def _ranks(columns: dict[str, Any]) -> tuple[RankSample, ...]:
    ranks = numbers(columns["r"])
    if len(ranks) > _RANKS_LIMIT:
        raise ValueError("too many ranks for a node")
    rows: list[Sequence[Any]] = []
    for name in _COLUMNS:
        column = _column(columns[name], len(ranks))
        rows.append([str(item)[:1] if name == "s" else whole(item) for item in column])
    waits = _column(columns.get(_WAITS, _NO_PERCENT), len(ranks))
    rows.append([None if percent < 0 else whole(percent) for percent in waits])
    places = [str(place)[:_PLACE_LIMIT] for place in columns.get(_PLACES, [""])]
    rows.append([places[index] for index in _column(columns.get(_PLACE_OF, 0), len(ranks))])
    return tuple(RankSample(*row) for row in zip(ranks, *rows))


def _column(column: Any, length: int) -> Sequence[Any]:
    """Return one value for each rank; a value that is the same for all stands once.

    Raises:
        ValueError: There are more or fewer.
    """
    if isinstance(column, int) or (isinstance(column, str) and len(column) == 1):
        return [column] * length
    if len(column) != length:
        raise ValueError("columns of different lengths")
    typed: Sequence[Any] = column
    return typed


def _short(number: float | None) -> float | None:
    """Round a number to three significant digits, as a chart shows no more."""
    if number is None or isinstance(number, int):
        return number
    return round(number) if abs(number) >= 100 else round(number, 1)
