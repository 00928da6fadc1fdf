"""What the facts of a job's nodes mean: which node is named, and how certain it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jobentry.contract.preflight import (
    Disk,
    Endpoint,
    Finding,
    Library,
    Limits,
    Link,
    Name,
    NodeFacts,
    Reach,
    Speeds,
    Subject,
    Transfer,
    Weight,
)
from jobentry.contract.preflight_levels import FULL, QUICK
from jobentry.preflight.judgement import Setting, judge

MIB, GIB = 1 << 20, 1 << 30
ALL = (Library.OTHER, Library.MPI, Library.NCCL, Library.GLOO)
MPI, TORCH, PYTHON = (Setting(QUICK, name) for name in ("mpirun", "torchrun", "python"))


def job(nodes: int = 4, **changes: dict[int, Any]) -> list[NodeFacts]:
    """Return healthy nodes, except for ``field={node: value}``."""
    return [
        NodeFacts(
            node=node,
            host=f"w{node}",
            endpoints=(Endpoint("eth0", f"10.0.0.{node + 1}", 4000 + node, 1500, ALL),),
            links=tuple(Link(to, 0, Reach.WORKS, 200) for to in range(nodes) if to != node),
            names=tuple(Name(of, (f"10.0.0.{of + 1}",)) for of in range(nodes)),
            disks=(Disk("/log", 100 * GIB, 1000, is_needed=True),),
            limits=Limits(),
            shm_bytes=8 * GIB,
            versions=(("driver", "550.54"), ("NCCL", "2.21.5")),
        )._replace(**{name: values[node] for name, values in changes.items() if node in values})
        for node in range(nodes)
    ]


def broken(nodes: list[NodeFacts], *pairs: tuple[int, int], reach: Reach) -> list[NodeFacts]:
    """Return the nodes with connections that do not work, each from a node to another."""
    return [
        node._replace(
            links=tuple(
                link._replace(reach=reach) if (node.node, link.to) in pairs else link
                for link in node.links
            )
        )
        for node in nodes
    ]


def serious(nodes: list[NodeFacts], setting: Setting = MPI) -> list[Finding]:
    return [each for each in judge(nodes, setting) if each.weight is not Weight.NOTE]


def of(number: int, count: int = 4) -> dict[str, list[tuple[int, int]]]:
    others = [each for each in range(count) if each != number]
    return {
        "in": [(each, number) for each in others],
        "out": [(number, each) for each in others],
    }


@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
def test_healthy_nodes_have_no_findings(nodes: int):
    assert judge(job(nodes), MPI) == ()


# -- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [reach for reach in Reach if reach.is_broken])
@pytest.mark.parametrize("culprit", [0, 2, 3])
@pytest.mark.parametrize("sides", [("in",), ("out",), ("in", "out")])
def test_the_node_that_cannot_be_reached_is_named_and_not_its_peers(
    reach: Reach, culprit: int, sides: tuple[str, ...]
):
    pairs = [pair for side in sides for pair in of(culprit)[side]]

    findings = serious(broken(job(), *pairs, reach=reach))

    assert {finding.nodes for finding in findings} == {(culprit,)}
    assert {finding.weight for finding in findings} == {Weight.FAULT}
    expected = Subject.PACKETS if reach is Reach.LARGE_LOST else Subject.NETWORK
    assert {finding.subject for finding in findings} == {expected}
    assert all(finding.hint for finding in findings)


def test_of_two_nodes_the_one_that_refuses_is_named():
    (finding,) = serious(broken(job(2), (0, 1), reach=Reach.SILENT))

    assert (finding.nodes, finding.text) == ((1,), "no answer on eth0 (tried from node 0)")


def test_two_broken_nodes_are_both_named():
    pairs = [(a, b) for a, b in itertools.permutations(range(6), 2) if b in (1, 4)]

    findings = serious(broken(job(6), *pairs, reach=Reach.SILENT))

    assert [finding.nodes for finding in findings] == [(1, 4)]


def test_nodes_that_only_each_other_cannot_reach_are_not_called_unreachable():
    findings = serious(broken(job(3), (1, 2), (2, 1), reach=Reach.SILENT))

    assert [(finding.nodes, finding.text) for finding in findings] == [
        ((2,), "no answer on eth0 (tried from node 1)"),
        ((1,), "no answer on eth0 (tried from node 2)"),
    ]


def test_a_fault_of_all_nodes_is_one_finding():
    pairs = itertools.permutations(range(4), 2)

    (finding,) = serious(broken(job(), *pairs, reach=Reach.ITSELF))

    assert finding.nodes == (0, 1, 2, 3)
    assert (
        finding.text == "the address of eth0 is not its alone, so connections to it end elsewhere"
    )


def test_what_is_wrong_with_many_nodes_is_one_finding():
    (finding,) = serious(job(64, shm_bytes=dict.fromkeys(range(64), 64 * MIB)), TORCH)

    assert finding.nodes == tuple(range(64))


def test_a_slow_answer_is_no_finding():
    assert serious(broken(job(), *of(1)["in"], reach=Reach.SLOW)) == []


def test_a_script_that_may_not_need_the_others_is_only_warned():
    nodes = broken(job(2), (0, 1), (1, 0), reach=Reach.SILENT)

    assert {finding.weight for finding in serious(nodes, PYTHON)} == {Weight.DOUBT}
    assert {finding.weight for finding in serious(nodes, Setting(FULL, "python"))} == {Weight.FAULT}


def test_a_job_that_limits_its_ports_is_only_warned():
    nodes = job(2, has_limited_ports={0: True, 1: True})

    (finding,) = serious(broken(nodes, (0, 1), reach=Reach.SILENT))

    assert finding.weight is Weight.DOUBT


@pytest.mark.parametrize(
    ("setting", "gpus", "weight"),
    [(MPI, 0, Weight.DOUBT), (MPI, 8, Weight.FAULT), (TORCH, 8, Weight.FAULT)],
)
def test_an_interface_for_nccl_that_every_machine_has_is_a_fault_if_there_are_gpus(
    setting: Setting, gpus: int, weight: Weight
):
    """NCCL_SOCKET_IFNAME=docker0: the same address on all nodes."""
    others = (Library.OTHER, Library.MPI, Library.GLOO)
    nodes = [
        node._replace(
            gpus=gpus,
            endpoints=(
                node.endpoints[0]._replace(libraries=others),
                Endpoint("docker0", "172.17.0.1", 4000 + node.node, 1500, (Library.NCCL,)),
            ),
            links=(*node.links, Link(1 - node.node, 1, Reach.ITSELF)),
        )
        for node in job(2)
    ]

    findings = serious(nodes, setting)

    assert {finding.weight for finding in findings} == {weight}
    assert all("docker0" in finding.text for finding in findings)


def test_another_mtu_is_named():
    (finding,) = serious(job(endpoints={2: (Endpoint("eth0", "10.0.0.3", 4002, 9000, ALL),)}))

    assert (finding.subject, finding.nodes) == (Subject.PACKETS, (2,))
    assert finding.text == "the MTU of its interface is 9000, and 1500 on the other nodes"


def test_a_node_far_away_is_named():
    far = tuple(Link(to, 0, Reach.WORKS, 20_000) for to in (0, 1, 2))
    nodes = [
        node._replace(
            links=tuple(
                link._replace(round_trip_us=20_000) if link.to == 3 else link for link in node.links
            )
        )
        for node in job(links={3: far})
    ]

    (finding,) = serious(nodes)

    assert (finding.subject, finding.nodes) == (Subject.ROUND_TRIP, (3,))
    assert finding.text == "a round trip to it takes 20.0 ms, to the others 0.2 ms"


# -- names ----------------------------------------------------------------------------------------


def named(addresses: dict[int, tuple[str, ...]], of_node: int) -> list[NodeFacts]:
    """Return nodes of which one resolves names to these addresses."""
    nodes = job()
    names = tuple(
        name._replace(addresses=addresses.get(name.of, name.addresses)) for name in nodes[0].names
    )
    return job(names={of_node: names})


@pytest.mark.parametrize(("setting", "weight"), [(TORCH, Weight.FAULT), (MPI, Weight.DOUBT)])
def test_a_head_whose_name_means_the_worker_itself_is_a_fault_of_the_worker(
    setting: Setting, weight: Weight
):
    (finding,) = serious(named({0: ("127.0.1.1",)}, of_node=2), setting)

    assert (finding.weight, finding.subject, finding.nodes) == (weight, Subject.NAMES, (2,))


def test_a_name_that_does_not_resolve_is_a_doubt():
    (finding,) = serious(named({3: ()}, of_node=1))

    assert (finding.weight, finding.nodes) == (Weight.DOUBT, (1,))
    assert finding.text == "the name of node 3 does not resolve"


@pytest.mark.parametrize(("of", "addresses"), [(1, ("127.0.1.1",)), (1, ()), (2, ("2001:db8::2",))])
def test_names_as_debian_writes_them_and_ipv6_are_only_noted(of: int, addresses: tuple[str, ...]):
    nodes = named({of: addresses}, of_node=1)

    assert serious(nodes) == []
    assert [(each.subject, each.nodes) for each in judge(nodes, MPI)] == [(Subject.NAMES, (1,))]


def test_emulated_nodes_may_have_loopback_addresses():
    nodes = [node._replace(is_emulated=True) for node in named({0: ("127.0.0.1",)}, of_node=1)]

    assert judge(nodes, TORCH) == ()


# -- a node by itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "setting", "weight", "subject", "text"),
    [
        ({"disks": (Disk("/log", 4096, 9, True),)}, MPI, Weight.FAULT, Subject.SPACE, "0.0 MiB"),
        ({"disks": (Disk("/log", GIB, 0, True),)}, MPI, Weight.FAULT, Subject.SPACE, "inodes"),
        ({"disks": (Disk("/tmp", 0, 9),)}, MPI, Weight.DOUBT, Subject.SPACE, "/tmp"),
        ({"disks": (Disk("/log", 9 * MIB, 9, True),)}, MPI, Weight.DOUBT, Subject.SPACE, "9.0 MiB"),
        ({"shm_bytes": 64 * MIB}, TORCH, Weight.DOUBT, Subject.SHARED_MEMORY, "64.0 MiB"),
        ({"shm_bytes": 64 * MIB}, MPI, Weight.NOTE, Subject.SHARED_MEMORY, "64.0 MiB"),
        (
            {"limits": Limits(locked_bytes=65536), "has_infiniband": True},
            *(MPI, Weight.DOUBT, Subject.LIMITS, "locked in memory"),
        ),
        ({"limits": Limits(open_files=256)}, MPI, Weight.DOUBT, Subject.LIMITS, "256 open files"),
        ({"limits": Limits(processes=100)}, MPI, Weight.DOUBT, Subject.LIMITS, "100 processes"),
        ({"limits": Limits(stack_bytes=65536)}, MPI, Weight.DOUBT, Subject.LIMITS, "stack"),
        ({"clock_ahead_s": 3600.0}, MPI, Weight.DOUBT, Subject.CLOCK, "+3600 s"),
        ({"versions": (("driver", "535.1"),)}, MPI, Weight.DOUBT, Subject.VERSIONS, "535.1"),
        ({"gpus": 7}, MPI, Weight.DOUBT, Subject.VERSIONS, "GPUs is 7, and 0"),
        (
            {"late": ("everything",)},
            *(Setting(FULL, "mpirun"), Weight.DOUBT, Subject.ANSWER, "everything"),
        ),
        ({"late": ("everything",)}, MPI, Weight.NOTE, Subject.ANSWER, "everything"),
    ],
)
def test_a_node_with_a_problem_is_named(
    changes: dict[str, Any], setting: Setting, weight: Weight, subject: Subject, text: str
):
    (finding,) = judge(job(**{name: {2: value} for name, value in changes.items()}), setting)

    assert (finding.weight, finding.subject, finding.nodes) == (weight, subject, (2,))
    assert text in finding.text


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": Limits(locked_bytes=65536)},
        {"limits": Limits(locked_bytes=65536, can_lock=True), "has_infiniband": True},
        {"clock_ahead_s": -1.5},
    ],
)
def test_what_does_no_harm_is_no_finding(changes: dict[str, Any]):
    assert judge(job(**{name: {2: value} for name, value in changes.items()}), MPI) == ()


def test_faults_come_first():
    disks = {1: (Disk("/log", 0, 9, True),)}

    findings = judge(job(late={0: ("names",)}, clock_ahead_s={2: 99.0}, disks=disks), MPI)

    assert [each.weight for each in findings] == list(Weight)


# -- speed ----------------------------------------------------------------------------------------


def test_the_partner_of_a_node_with_a_slow_network_is_not_blamed():
    slow = {0: (1, 2), 1: (0, 3), 2: (3, 0), 3: (2, 1)}
    transfers = {
        node: tuple(Transfer(to, 10.0 if 3 in (node, to) else 1000.0) for to in partners)
        for node, partners in slow.items()
    }

    (finding,) = serious(job(transfers=transfers))

    assert (finding.subject, finding.nodes) == (Subject.SPEED, (3,))


@pytest.mark.parametrize("speeds", [Speeds(disk_mb_s=20), Speeds(memory_gb_s=3)])
def test_a_slow_disk_and_slow_memory_are_named(speeds: Speeds):
    usual = Speeds(disk_mb_s=400, memory_gb_s=10)

    (finding,) = serious(job(speeds={0: usual, 1: usual, 2: speeds, 3: usual}))

    assert (finding.subject, finding.nodes) == (Subject.SPEED, (2,))


def test_a_slow_gpu_is_named():
    usual = Speeds(matrix_tflops=(300.0, 310.0))

    (finding,) = serious(job(2, speeds={0: usual, 1: Speeds(matrix_tflops=(305.0, 90.0))}))

    assert finding.nodes == (1,)
    assert finding.text.startswith("GPU 1: 90 TFLOPS")


def test_speeds_of_two_nodes_are_not_compared():
    nodes = job(2, speeds={0: Speeds(memory_gb_s=9), 1: Speeds(memory_gb_s=1)})

    assert judge(nodes, MPI) == ()
