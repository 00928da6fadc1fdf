"""What the nodes of a job find out before its ranks start, and what the head concludes from it."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Mapping, NamedTuple, Sequence

from jobentry.contract.malformed import MALFORMED, finite, whole

# A limit that is not set, and a size that is not known.
UNLIMITED, UNKNOWN = -1, -2

# Limits for reading, since others may write to a store or be a broken node.
MAX_REPORT_BYTES = 32_000_000
_MAX_TEXT, _MAX_ROWS = 300, 10_000


class PreflightError(Exception):
    """The bytes are not a report, or the values are no facts."""


class Library(str, Enum):
    """A library by which ranks on different nodes exchange data."""

    MPI = "MPI"
    NCCL = "NCCL"
    GLOO = "Gloo"
    # Everything else, such as gRPC; it uses the way to the other nodes.
    OTHER = "other"


class Reach(str, Enum):
    """How a connection from one node to another went."""

    WORKS = "works"
    # The connection exists, but the program at the other end has not answered in time.
    SLOW = "slow"
    SILENT = "silent"
    REFUSED = "refused"
    NO_ROUTE = "no route"
    # The address is also one of the node that tries to reach it.
    ITSELF = "itself"
    # Small packets arrive, large ones do not.
    LARGE_LOST = "large packets lost"

    @property
    def is_broken(self) -> bool:
        """Whether ranks cannot use this connection; certain even if a node is very busy."""
        return self not in (Reach.WORKS, Reach.SLOW)


class Endpoint(NamedTuple):
    """Where the other nodes reach the probe of a node.

    Args:
        mtu: The largest packet of its interface in bytes; 0 if not known.
        libraries: Those whose ranks use this interface.
    """

    interface: str
    address: str
    port: int
    mtu: int = 0
    libraries: tuple[Library, ...] = ()


class Link(NamedTuple):
    """A connection that a node has tried, to an endpoint of the node ``to``.

    Args:
        round_trip_us: As the kernel has measured it; 0 if it has not.
    """

    to: int
    endpoint: int
    reach: Reach
    round_trip_us: int = 0


class Name(NamedTuple):
    """The addresses of the node ``of`` by its name, as another node resolves it."""

    of: int
    addresses: tuple[str, ...]


class Disk(NamedTuple):
    """The space in a folder; ``is_needed`` if no rank can run without it."""

    folder: str
    free_bytes: int
    free_files: int = UNKNOWN
    is_needed: bool = False


class Limits(NamedTuple):
    """Limits of the processes of a node.

    Args:
        can_lock: Whether memory may be locked without limit (CAP_IPC_LOCK).
    """

    open_files: int = UNLIMITED
    locked_bytes: int = UNLIMITED
    stack_bytes: int = UNLIMITED
    processes: int = UNLIMITED
    can_lock: bool = False


class Speeds(NamedTuple):
    """What a node has measured of itself; 0 for what it could not measure.

    Args:
        matrix_tflops: For each GPU, if the script's Python has torch.
    """

    disk_mb_s: float = 0.0
    memory_gb_s: float = 0.0
    matrix_tflops: tuple[float, ...] = ()


class Transfer(NamedTuple):
    """What this node has sent to another while every node had one partner."""

    to: int
    mb_s: float


class NodeFacts(NamedTuple):
    """What one node knows about itself and about the way to the others.

    Args:
        shm_bytes: The size of ``/dev/shm``.
        versions: ``(program, version)`` of what this node has.
        has_limited_ports: Whether the job restricts the ports of its ranks.
        is_emulated: Whether the nodes of the job share one machine.
        clock_ahead_s: How far its clock is ahead of the head's.
        late: What was not found out in time.
    """

    node: int
    host: str = ""
    endpoints: tuple[Endpoint, ...] = ()
    links: tuple[Link, ...] = ()
    names: tuple[Name, ...] = ()
    disks: tuple[Disk, ...] = ()
    limits: Limits = Limits()
    shm_bytes: int = UNKNOWN
    versions: tuple[tuple[str, str], ...] = ()
    gpus: int = 0
    has_infiniband: bool = False
    has_limited_ports: bool = False
    is_emulated: bool = False
    clock_ahead_s: float = 0.0
    late: tuple[str, ...] = ()
    speeds: Speeds = Speeds()
    transfers: tuple[Transfer, ...] = ()


class Weight(str, Enum):
    """What a finding means: the job cannot run, may not run well, or may run."""

    FAULT = "fault"
    DOUBT = "doubt"
    NOTE = "note"


class Subject(str, Enum):
    """What a finding is about."""

    NAMES = "names"
    NETWORK = "network"
    PACKETS = "packets"
    ROUND_TRIP = "round trip"
    CLOCK = "clock"
    LIMITS = "limits"
    SHARED_MEMORY = "shared memory"
    SPACE = "space"
    VERSIONS = "versions"
    SPEED = "speed"
    ANSWER = "answer"


class Finding(NamedTuple):
    """What is wrong with some nodes, and what to try."""

    weight: Weight
    subject: Subject
    nodes: tuple[int, ...]
    text: str
    hint: str = ""


class Report(NamedTuple):
    """The result of a check: the table of the nodes, and what is wrong with them.

    Args:
        rows: The heading, then one row for each node.
    """

    findings: tuple[Finding, ...]
    rows: tuple[tuple[str, ...], ...]


def to_values(facts: NodeFacts) -> dict[str, Any]:
    """Return the facts as values of a message."""
    return dict(facts._asdict())


def from_values(values: Mapping[str, Any]) -> NodeFacts:
    """Return the facts that ``to_values`` turned into values.

    Raises:
        PreflightError: The values have another form.
    """
    try:
        return _facts(values)
    except MALFORMED as error:
        raise PreflightError(f"reading what a node has found: {error}") from error


def endpoints_from(rows: Any) -> tuple[Endpoint, ...]:
    """Return endpoints from the rows of a message.

    Raises:
        PreflightError: The rows have another form.
    """
    try:
        return tuple(_endpoint(row) for row in _rows(rows))
    except MALFORMED as error:
        raise PreflightError(f"reading the endpoints of a node: {error}") from error


def speeds_from(row: Any) -> Speeds:
    """Return what a node has measured from the row of a message.

    Raises:
        PreflightError: The row has another form.
    """
    try:
        disk_mb_s, memory_gb_s, matrix_tflops = row
        return Speeds(
            *(finite(disk_mb_s), finite(memory_gb_s)),
            tuple(finite(each) for each in _rows(matrix_tflops)),
        )
    except MALFORMED as error:
        raise PreflightError(f"reading what a node has measured: {error}") from error


def dump(report: Report) -> bytes:
    """Serialise ``report`` as JSON for ``load``."""
    findings = [finding._asdict() for finding in report.findings]
    return json.dumps({"findings": findings, "rows": report.rows}).encode("ascii")


def load(data: bytes) -> Report:
    """Return the report that ``dump`` wrote.

    Raises:
        PreflightError: ``data`` is not a report.
    """
    try:
        value = json.loads(data.decode("ascii"))
        findings = tuple(
            Finding(
                Weight(item["weight"]),
                Subject(item["subject"]),
                tuple(whole(node) for node in _rows(item["nodes"])),
                _text(item["text"]),
                _text(item["hint"]),
            )
            for item in _rows(value["findings"])
        )
        rows = tuple(tuple(_text(cell) for cell in row[:32]) for row in _rows(value["rows"]))
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise ValueError("its rows are no table")
    except MALFORMED as error:
        raise PreflightError(f"reading a report: it is not valid: {error}") from error
    return Report(findings, rows)


def _facts(values: Mapping[str, Any]) -> NodeFacts:
    limits = values["limits"]
    return NodeFacts(
        node=whole(values["node"]),
        host=_text(values["host"]),
        endpoints=tuple(_endpoint(row) for row in _rows(values["endpoints"])),
        links=tuple(
            Link(whole(to), whole(endpoint), Reach(reach), whole(round_trip_us))
            for to, endpoint, reach, round_trip_us in _rows(values["links"])
        ),
        names=tuple(
            Name(whole(of), tuple(_text(each) for each in addresses[:16]))
            for of, addresses in _rows(values["names"])
        ),
        disks=tuple(
            Disk(_text(folder), whole(free), whole(files), bool(is_needed))
            for folder, free, files, is_needed in _rows(values["disks"])
        ),
        limits=Limits(
            *(whole(limits[0]), whole(limits[1]), whole(limits[2]), whole(limits[3])),
            bool(limits[4]),
        ),
        shm_bytes=whole(values["shm_bytes"]),
        versions=tuple((_text(name), _text(text)) for name, text in _rows(values["versions"])),
        gpus=whole(values["gpus"]),
        has_infiniband=bool(values["has_infiniband"]),
        has_limited_ports=bool(values["has_limited_ports"]),
        is_emulated=bool(values["is_emulated"]),
        clock_ahead_s=finite(values["clock_ahead_s"]),
        late=tuple(_text(each) for each in _rows(values["late"])),
        speeds=speeds_from(values["speeds"]),
        transfers=tuple(
            Transfer(whole(to), finite(mb_s)) for to, mb_s in _rows(values["transfers"])
        ),
    )


def _endpoint(row: Sequence[Any]) -> Endpoint:
    interface, address, port, mtu, libraries = row
    return Endpoint(
        *(_text(interface), _text(address), whole(port), whole(mtu)),
        tuple(Library(each) for each in _rows(libraries)),
    )


def _rows(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError("not a list")
    return value[:_MAX_ROWS]


def _text(value: Any) -> str:
    text = str(value)[:_MAX_TEXT]
    return "".join(letter if letter.isprintable() else "?" for letter in text)
