"""The table of all nodes: the problems of each, and hints. No I/O."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from jobentry.contract.lists import columns, some

# For a thousand nodes, a table of the nodes with problems is more useful than a full one.
MAX_SHOWN_NODES = 32
# The number of nodes that one hint names.
_NAMED = 8

_HEADINGS = (
    "node",
    "host",
    "address",
    "port",
    "control",
    "code",
    "Open MPI",
    "Python",
    "clock",
    "",
)
_SAME_CODE = (
    "every node of a job must be given the same variables and the same package; submit again"
)
_SAME_MODULE = "every node's Python needs the same framework: use the same image"
_SAME_PLACE = "every node needs the same image, and the same home folder (MA_HOME)"
_SAME_VERSION = "every node needs the same image, or the same {} first on PATH"


class Row(NamedTuple):
    """One node, as far as it was reached.

    Args:
        address: Empty while its name does not resolve.
        port: Whether something listens on its control port; None if unknown.
        has_control: Whether the control connection works; None if unknown.
        facts: What its entry has reported; empty before that.
        clock_ahead_s: How far its clock is ahead of the head's.
        problem: What is wrong with it, empty for nothing.
        hint: What to do about that.
    """

    node: int
    host: str
    address: str = ""
    port: bool | None = None
    has_control: bool | None = None
    facts: Mapping[str, Any] = {}
    clock_ahead_s: float = 0.0
    problem: str = ""
    hint: str = ""


def compare(row: Row, head: Row) -> Row:
    """Return ``row``, marked with its incompatibility with the head if there is one.

    The code and Open MPI must be the same. So must the first two numbers of Python's version, as
    ranks exchange objects, and the path of the entry, as the head's mpirun starts it on all nodes.
    """
    worker_facts, head_facts = row.facts, head.facts
    if not worker_facts:
        return row
    for key, what, hint, of in _DIFFERENCES:
        if _part(worker_facts, key, of) != _part(head_facts, key, of):
            worker_value, head_value = worker_facts.get(key), head_facts.get(key)
            return row._replace(
                problem=f"{what}: {worker_value}, and the head has {head_value}", hint=hint
            )
    return row


# A fact, the name of a difference, a hint, and how many of its version numbers are compared.
_DIFFERENCES: tuple[tuple[str, str, str, int | None], ...] = (
    ("code", "other code", _SAME_CODE, None),
    ("mpi", "another MPI", _SAME_VERSION.format("mpirun"), None),
    ("module", "another version of the launcher's framework", _SAME_MODULE, None),
    ("python", "another Python", _SAME_VERSION.format("python3"), 2),
    ("entry", "its entry elsewhere", _SAME_PLACE, None),
)


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the table: the head, then the nodes with problems, then the others."""
    head = rows[0]
    ordered = [head, *sorted(rows[1:], key=lambda row: not row.problem)]
    cells = [_HEADINGS, *(_cells(row, head) for row in ordered[:MAX_SHOWN_NODES])]
    text = columns(cells)
    more = len(ordered) - MAX_SHOWN_NODES
    return [*text, "... and %d more" % more] if more > 0 else text


def hints(rows: Sequence[Row]) -> list[str]:
    """Return the hints, one line for each, with the nodes that they concern."""
    nodes_of: dict[str, list[int]] = {}
    for row in rows:
        if row.hint:
            nodes_of.setdefault(row.hint, []).append(row.node)
    return [
        "hint: %s %s: %s"
        % ("node" if len(nodes) == 1 else "nodes", some(list(map(str, nodes)), _NAMED), hint)
        for hint, nodes in nodes_of.items()
    ]


def named(nodes: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the nodes as text, each with its host; of many nodes, the first and their number."""
    return some(["node %d (%s)" % (node, hosts[node]) for node in nodes], _NAMED)


def _cells(row: Row, head: Row) -> tuple[str, ...]:
    facts = row.facts
    is_same = facts.get("code") == head.facts.get("code")
    clock = "%+.1f s" % row.clock_ahead_s if facts and row is not head else "-"
    return (
        "%d" % row.node,
        row.host,
        row.address or "-",
        _claim_text(row.port, "open", "closed"),
        _claim_text(row.has_control, "yes", "no"),
        _claim_text(is_same if facts else None, "same", "other"),
        str(facts.get("mpi", "-")),
        str(facts.get("python", "-")),
        clock,
        row.problem or ("the head" if row is head else "ready"),
    )


def _claim_text(claim: bool | None, yes: str, no: str) -> str:
    if claim is None:
        return "-"
    return yes if claim else no


def _part(facts: Mapping[str, Any], key: str, count: int | None) -> list[str]:
    return str(facts.get(key, "")).split(".")[:count]
