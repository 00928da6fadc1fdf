"""What the facts of all nodes mean for the job. No I/O.

A fault is certain: no rank of this job could work. Everything else is a doubt, which is logged, or
a note, which only ``cloudjob doctor`` shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.lists import some
from jobentry.contract.preflight import (
    UNKNOWN,
    UNLIMITED,
    Endpoint,
    Finding,
    Library,
    Link,
    NodeFacts,
    Reach,
    Subject,
    Weight,
)
from jobentry.contract.preflight_levels import FULL
from jobentry.system.addresses import is_loopback

_MIB = 1 << 20
# If clocks differ by more than this, the times in logs and records of two nodes are misleading.
CLOCK_S = 60.0
# Docker's default; a few batches of PyTorch's DataLoader fill it, and it ends with SIGBUS.
_SMALL_SHM_BYTES = 64 * _MIB
# Below this, a log or a checkpoint soon fills the disk; below the second, so does the first line.
_LITTLE_SPACE_BYTES, _NO_SPACE_BYTES = 512 * _MIB, _MIB
_FEW_OPEN_FILES, _FEW_PROCESSES, _SMALL_STACK_BYTES = 1024, 1024, _MIB
# Registering buffers for RDMA fails with the usual limits of 64 KiB and 8 MiB.
_LITTLE_LOCKED_BYTES = 1024 * _MIB
# A node is far away if its shortest round trip is so much longer than the usual one.
_FAR_FACTOR, _FAR_US = 10, 5_000
# Below these parts of the usual speed, a node slows down the others.
_SLOW_NETWORK, _SLOW_DISK, _SLOW_MEMORY, _SLOW_GPU = 0.5, 0.3, 0.6, 0.8
# Versions that bring-up does not compare already, as jobs can run with different ones.
_COMPARED = ("driver", "CUDA", "NCCL", "torch")
# With these a script may run without the other nodes.
_SEPARATE = ("python", "command")
# Launchers whose ranks meet at the head's name, and those whose scripts usually use PyTorch.
_NEEDS_TWO = 2
_TORCH = ("torchrun", "pytorch-modelarts")


class Setting(NamedTuple):
    """What the job needs of its nodes: how thoroughly it is checked, and its launcher."""

    level: str
    launcher: str

    @property
    def library(self) -> Library:
        """The library by which the ranks of this launcher certainly exchange data."""
        launcher = LAUNCHERS.get(self.launcher)
        if self.launcher == "srun" or (launcher is not None and launcher.needs_mpi):
            return Library.MPI
        is_gloo = self.launcher in (*_TORCH, "horovod-gloo")
        return Library.GLOO if is_gloo else Library.OTHER

    @property
    def may_be_separate(self) -> bool:
        """Whether a script may work although the nodes cannot reach each other."""
        return self.level != FULL and self.launcher in _SEPARATE


def judge(nodes: Sequence[NodeFacts], setting: Setting) -> tuple[Finding, ...]:
    """Return what is wrong with the nodes, the certain faults first."""
    findings = [
        *_links(nodes, setting),
        *_names(nodes, setting),
        *_spaces(nodes),
        *_shared_memory(nodes, setting),
        *_limits(nodes),
        *_clocks(nodes),
        *_versions(nodes),
        *_packet_sizes(nodes),
        *_round_trips(nodes),
        *_speeds(nodes),
        *_late(nodes, setting),
    ]
    order = list(Weight)
    return tuple(sorted(_merged(findings), key=lambda finding: order.index(finding.weight)))


# -- the network ----------------------------------------------------------------------------------


def broken_links(nodes: Sequence[NodeFacts]) -> frozenset[tuple[int, int, int]]:
    """Return the connections that do not work: from a node to an endpoint of another."""
    return frozenset(
        (node.node, link.to, link.endpoint)
        for node in nodes
        for link in node.links
        if link.reach.is_broken
    )


def confirmed(
    nodes: Sequence[NodeFacts], broken: frozenset[tuple[int, int, int]]
) -> list[NodeFacts]:
    """Return the nodes without the failures that a second try has not shown.

    Even a healthy network now and then loses each packet of one connection for a second.

    Args:
        broken: The connections that failed at the second try.
    """
    return [
        node._replace(
            links=tuple(
                link
                if not link.reach.is_broken or (node.node, link.to, link.endpoint) in broken
                else link._replace(reach=Reach.SLOW)
                for link in node.links
            )
        )
        for node in nodes
    ]


class _Broken(NamedTuple):
    """A connection that does not work: from a node to an interface of another."""

    sender: int
    receiver: int
    interface: str
    reach: Reach
    is_certain: bool


class _Side(NamedTuple):
    """A node as a receiver or a sender of connections on one interface."""

    node: int
    is_receiver: bool
    interface: str


_REACH_TEXTS: Mapping[Reach, tuple[str, str]] = {
    Reach.SILENT: (
        "no answer on %s",
        "does a firewall or a network policy allow all ports between the nodes? MPI, NCCL and Gloo"
        " use any free one",
    ),
    Reach.REFUSED: (
        "connections to %s are refused",
        "does a firewall reject them, or does the address lead to another machine?",
    ),
    Reach.NO_ROUTE: (
        "no route to %s",
        "are the nodes in one network? `ip route` shows the routes of a node",
    ),
    Reach.ITSELF: (
        "the address of %s is not its alone, so connections to it end elsewhere",
        "choose the interface that leads to the other nodes (NCCL_SOCKET_IFNAME and the like), not"
        " one such as docker0 that every machine has",
    ),
    Reach.LARGE_LOST: (
        "small packets arrive at %s and large ones do not",
        "set the MTU of its interface to what the network carries, usually 1500 (`ip link`)",
    ),
}


def _links(nodes: Sequence[NodeFacts], setting: Setting) -> list[Finding]:
    broken = [
        _Broken(
            *(node.node, link.to, _interface(nodes, link), link.reach),
            _is_certain(nodes, link, setting),
        )
        for node in nodes
        for link in node.links
        if link.reach.is_broken
    ]
    alike: dict[Finding, list[tuple[int, str]]] = {}
    while broken:
        side = _culprit(broken)
        explained = [each for each in broken if _is_of(each, side)]
        finding, tried = _link_finding(side, explained, len(nodes))
        if _works_for_some(nodes, side):
            finding = finding._replace(text=f"{finding.text} ({tried})")
            tried = ""
        alike.setdefault(finding, []).append((side.node, tried))
        broken = [each for each in broken if not _is_of(each, side)]
    return [
        finding._replace(
            nodes=tuple(sorted(node for node, _ in pairs)),
            # For several nodes, which others have tried each of them says little.
            text=finding.text + (f" ({pairs[0][1]})" if len(pairs) == 1 and pairs[0][1] else ""),
        )
        for finding, pairs in alike.items()
    ]


def _works_for_some(nodes: Sequence[NodeFacts], side: _Side) -> bool:
    """Whether other connections of this node work, so that it matters which ones do not."""
    return any(
        link.reach is Reach.WORKS
        and _is_of(_Broken(node.node, link.to, _interface(nodes, link), link.reach, False), side)
        for node in nodes
        for link in node.links
    )


def _interface(nodes: Sequence[NodeFacts], link: Link) -> str:
    endpoint = _endpoint(nodes, link)
    return endpoint.interface if endpoint else ""


def _is_certain(nodes: Sequence[NodeFacts], link: Link, setting: Setting) -> bool:
    """Whether the ranks of the job need this connection."""
    endpoint = _endpoint(nodes, link)
    receiver = next((node for node in nodes if node.node == link.to), None)
    if endpoint is None or receiver is None:
        return False
    if setting.may_be_separate or receiver.has_limited_ports:
        return False
    has_nccl = Library.NCCL in endpoint.libraries and receiver.gpus > 0
    return has_nccl or setting.library in endpoint.libraries


def _endpoint(nodes: Sequence[NodeFacts], link: Link) -> Endpoint | None:
    """Return where a link leads to; None if that node has reported nothing."""
    for node in nodes:
        if node.node == link.to and 0 <= link.endpoint < len(node.endpoints):
            return node.endpoints[link.endpoint]
    return None


def _is_of(broken: _Broken, side: _Side) -> bool:
    node = broken.receiver if side.is_receiver else broken.sender
    return node == side.node and broken.interface == side.interface


def _culprit(broken: Sequence[_Broken]) -> _Side:
    """Return the node that explains most of the broken connections.

    If a receiver and a sender explain as many, it is the receiver: firewalls refuse what comes in.
    """
    counts: Counter[_Side] = Counter()
    for each in broken:
        counts[_Side(each.receiver, True, each.interface)] += 1
        counts[_Side(each.sender, False, each.interface)] += 1
    return max(counts, key=lambda side: (counts[side], side.is_receiver, side.node))


def _link_finding(side: _Side, broken: Sequence[_Broken], count: int) -> tuple[Finding, str]:
    """Return what is wrong with a node, without its number, and who has tried it."""
    reach = Counter(each.reach for each in broken).most_common(1)[0][0]
    text, hint = _REACH_TEXTS[reach]
    others = sorted({each.sender if side.is_receiver else each.receiver for each in broken})
    where = side.interface or "its address"
    tried = f"tried from {_nodes(others, count)}"
    if not side.is_receiver:
        where, tried = f"{where} of {_nodes(others, count)}", "tried from this node"
    is_certain = any(each.is_certain for each in broken)
    subject = Subject.PACKETS if reach is Reach.LARGE_LOST else Subject.NETWORK
    weight = Weight.FAULT if is_certain else Weight.DOUBT
    return Finding(weight, subject, (), text % where, hint), tried


def _names(nodes: Sequence[NodeFacts], setting: Setting) -> list[Finding]:
    findings = []
    needs_head = setting.library is not Library.MPI and not setting.may_be_separate
    for node in nodes:
        if node.is_emulated:
            continue
        for name in node.names:
            if name.of == node.node:
                findings += _own_name(node, name.addresses)
            elif not name.addresses:
                text = f"the name of node {name.of} does not resolve"
                findings.append(_doubt(Subject.NAMES, node, text, _NAME_HINT))
            elif all(is_loopback(address) for address in name.addresses):
                weight = Weight.FAULT if needs_head and name.of == 0 else Weight.DOUBT
                text = f"the name of node {name.of} means {name.addresses[0]}, which is this node"
                findings.append(Finding(weight, Subject.NAMES, (node.node,), text, _NAME_HINT))
            elif all(":" in address for address in name.addresses):
                text = f"the name of node {name.of} has only an IPv6 address"
                findings.append(_note(Subject.NAMES, node, text))
    return findings


_NAME_HINT = "correct /etc/hosts or the name server of this node"


def _own_name(node: NodeFacts, addresses: Sequence[str]) -> list[Finding]:
    if not addresses:
        return [_note(Subject.NAMES, node, "its own name does not resolve")]
    if all(is_loopback(address) for address in addresses):
        text = f"its own name means {addresses[0]}, which other nodes cannot reach"
        return [_note(Subject.NAMES, node, text)]
    return []


def _packet_sizes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    sizes = {
        node.node: str(node.endpoints[0].mtu)
        for node in nodes
        if node.endpoints and node.endpoints[0].mtu
    }
    hint = "give the interfaces of all nodes the same MTU"
    return _minorities(sizes, Subject.PACKETS, "the MTU of its interface is", hint)


def _round_trips(nodes: Sequence[NodeFacts]) -> list[Finding]:
    shortest: dict[int, int] = {}
    for node in nodes:
        for link in node.links:
            if link.round_trip_us > 0:
                for end in (node.node, link.to):
                    shortest[end] = min(link.round_trip_us, shortest.get(end, link.round_trip_us))
    if len(shortest) <= _NEEDS_TWO:
        return []
    usual_us = median(shortest.values())
    return [
        Finding(
            Weight.DOUBT,
            Subject.ROUND_TRIP,
            (number,),
            f"a round trip to it takes {us / 1000:.1f} ms, to the others {usual_us / 1000:.1f} ms",
            "is it in another rack, zone or network?",
        )
        for number, us in sorted(shortest.items())
        if us > max(_FAR_US, _FAR_FACTOR * usual_us)
    ]


# -- a node by itself -----------------------------------------------------------------------------


def _spaces(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for node in nodes:
        for disk in node.disks:
            is_full = disk.free_bytes < _NO_SPACE_BYTES or disk.free_files == 0
            if not is_full and disk.free_bytes >= _LITTLE_SPACE_BYTES:
                continue
            free = f"{size_text(disk.free_bytes)} free" if disk.free_files else "no free inodes"
            weight = Weight.FAULT if is_full and disk.is_needed else Weight.DOUBT
            hint = "remove what earlier jobs have left there"
            yield Finding(weight, Subject.SPACE, (node.node,), f"{disk.folder} has {free}", hint)


def _shared_memory(nodes: Sequence[NodeFacts], setting: Setting) -> Iterable[Finding]:
    for node in nodes:
        if node.shm_bytes == UNKNOWN or node.shm_bytes > _SMALL_SHM_BYTES:
            continue
        is_used = setting.launcher in _TORCH or node.gpus > 0
        yield Finding(
            Weight.DOUBT if is_used else Weight.NOTE,
            Subject.SHARED_MEMORY,
            (node.node,),
            f"/dev/shm has only {size_text(node.shm_bytes)}:"
            " PyTorch's DataLoader and NCCL need more",
            "shm_gib of the backend sets it",
        )


def _limits(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for node in nodes:
        limits = node.limits
        rules = (
            (limits.open_files, _FEW_OPEN_FILES, "open files", "ulimit -n"),
            (limits.processes, _FEW_PROCESSES, "processes", "ulimit -u"),
            (limits.stack_bytes, _SMALL_STACK_BYTES, "bytes of stack", "ulimit -s"),
        )
        for value, least, what, command in rules:
            if value != UNLIMITED and value < least:
                yield _doubt(
                    *(Subject.LIMITS, node, f"only {value} {what} are allowed"),
                    f"raise the limit: `{command}`, or that of the container",
                )
        locked = limits.locked_bytes
        is_small = locked != UNLIMITED and locked < _LITTLE_LOCKED_BYTES and not limits.can_lock
        if node.has_infiniband and is_small:
            yield _doubt(
                *(Subject.LIMITS, node, f"only {size_text(locked)} may be locked in memory"),
                "NCCL and MPI cannot use InfiniBand with that: `ulimit -l unlimited`",
            )


def _clocks(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for node in nodes:
        if abs(node.clock_ahead_s) > CLOCK_S:
            yield _doubt(
                *(Subject.CLOCK, node, f"its clock is {node.clock_ahead_s:+.0f} s from the head's"),
                "times in logs and records mislead, and certificates and signed requests may be"
                " refused; set the clocks (NTP)",
            )


def _versions(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for program in _COMPARED:
        versions = {
            node.node: text for node in nodes for name, text in node.versions if name == program
        }
        hint = "every node needs the same image and the same driver"
        yield from _minorities(versions, Subject.VERSIONS, f"its {program} is", hint)
    counts = {node.node: str(node.gpus) for node in nodes}
    hint = "has a GPU failed? `nvidia-smi` lists them"
    yield from _minorities(counts, Subject.VERSIONS, "its number of GPUs is", hint)


def _late(nodes: Sequence[NodeFacts], setting: Setting) -> Iterable[Finding]:
    """A quick check may be too short for a busy node; a full one must not call it healthy."""
    weight = Weight.DOUBT if setting.level == FULL else Weight.NOTE
    for node in nodes:
        if node.late:
            text = "not found out in time: " + ", ".join(node.late)
            yield Finding(weight, Subject.ANSWER, (node.node,), text)


# -- speed ----------------------------------------------------------------------------------------


def _speeds(nodes: Sequence[NodeFacts]) -> list[Finding]:
    measured: tuple[tuple[str, Callable[[NodeFacts], float], float, str], ...] = (
        ("disk writes", lambda node: node.speeds.disk_mb_s, _SLOW_DISK, "MB/s"),
        ("memory", lambda node: node.speeds.memory_gb_s, _SLOW_MEMORY, "GB/s"),
    )
    findings = _slow_ends(nodes)
    for what, speed_of, least, unit in measured:
        speeds = {node.node: speed_of(node) for node in nodes if speed_of(node) > 0}
        findings += _slow(speeds, what, least, unit)
    return findings + _slow_gpus(nodes)


def _slow_ends(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return the nodes that were slow with every partner: the partner of a slow node is not."""
    best: dict[int, float] = {}
    for node in nodes:
        for transfer in node.transfers:
            for end in (node.node, transfer.to):
                best[end] = max(transfer.mb_s, best.get(end, 0.0))
    return _slow(best, "transfers with any other node", _SLOW_NETWORK, "MB/s")


def _slow(speeds: Mapping[int, float], what: str, least: float, unit: str) -> list[Finding]:
    if len(speeds) <= _NEEDS_TWO:
        return []
    usual = median(speeds.values())
    return [
        Finding(
            Weight.DOUBT,
            Subject.SPEED,
            (number,),
            f"{what}: {speed:.3g} {unit}, and usually {usual:.3g} {unit} here",
            "the whole job is as slow as its slowest node: is another job running there?",
        )
        for number, speed in sorted(speeds.items())
        if speed < least * usual
    ]


def _slow_gpus(nodes: Sequence[NodeFacts]) -> list[Finding]:
    all_tflops = [each for node in nodes for each in node.speeds.matrix_tflops]
    if len(all_tflops) < _NEEDS_TWO:
        return []
    usual = median(all_tflops)
    return [
        _doubt(
            *(Subject.SPEED, node, f"GPU {number}: {tflops:.3g} TFLOPS, and usually {usual:.3g}"),
            "is it hot, or limited in power? `nvidia-smi -q -d PERFORMANCE`",
        )
        for node in nodes
        for number, tflops in enumerate(node.speeds.matrix_tflops)
        if tflops < _SLOW_GPU * usual
    ]


# -- words ----------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    """Return the median; the module ``statistics`` takes longer to import than the check."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for all nodes with which the same is wrong."""
    nodes: dict[Finding, list[int]] = {}
    for finding in findings:
        nodes.setdefault(finding._replace(nodes=()), []).extend(finding.nodes)
    return [finding._replace(nodes=tuple(numbers)) for finding, numbers in nodes.items()]


def _minorities(values: Mapping[int, str], subject: Subject, text: str, hint: str) -> list[Finding]:
    """Return a doubt for each group of nodes whose value is not that of most nodes.

    If two values are equally common, the one of the first node counts as the usual one.
    """
    counts = Counter(values[number] for number in sorted(values))
    if len(counts) <= 1:
        return []
    # Of equal counts, ``most_common`` returns the one that was met first.
    usual = counts.most_common(1)[0][0]
    return [
        Finding(
            *(Weight.DOUBT, subject),
            tuple(number for number in sorted(values) if values[number] == value),
            f"{text} {value}, and {usual} on the other nodes",
            hint,
        )
        for value in counts
        if value != usual
    ]


def _doubt(subject: Subject, node: NodeFacts, text: str, hint: str) -> Finding:
    return Finding(Weight.DOUBT, subject, (node.node,), text, hint)


def _note(subject: Subject, node: NodeFacts, text: str) -> Finding:
    return Finding(Weight.NOTE, subject, (node.node,), text)


def _nodes(numbers: Sequence[int], count: int) -> str:
    if len(numbers) > _NEEDS_TWO and len(numbers) >= count - 1:
        return "all other nodes"
    return ("node " if len(numbers) == 1 else "nodes ") + some([str(each) for each in numbers], 8)


def size_text(size_bytes: int) -> str:
    """Return a number of bytes as findings and the table show it."""
    mib = size_bytes / _MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
