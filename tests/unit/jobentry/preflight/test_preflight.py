"""What a node gathers, how it is sent, and what the head makes of it."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import preflight
from jobentry.contract.env import NodeEnv
from jobentry.contract.lists import columns
from jobentry.contract.paths import node_paths
from jobentry.contract.preflight import (
    Disk,
    Endpoint,
    Finding,
    Library,
    Limits,
    Link,
    Name,
    NodeFacts,
    PreflightError,
    Reach,
    Report,
    Speeds,
    Subject,
    Transfer,
    Weight,
)
from jobentry.control.preflight import rounds
from jobentry.node.network import Interface, NodeNetwork, Route
from jobentry.preflight import facts, table
from jobentry.preflight.node import NodePreflight, peers_of

FACTS = NodeFacts(
    node=3,
    host="w3",
    endpoints=(Endpoint("eth0", "10.0.0.4", 4000, 1500, (Library.MPI, Library.NCCL)),),
    links=(Link(1, 0, Reach.LARGE_LOST, 200),),
    names=(Name(0, ("10.0.0.1", "::1")), Name(1, ())),
    disks=(Disk("/log", 1 << 40, 10, True),),
    limits=Limits(1024, -1, 8 << 20, 100, True),
    shm_bytes=1 << 26,
    versions=(("driver", "550"),),
    gpus=8,
    has_infiniband=True,
    has_limited_ports=True,
    is_emulated=True,
    clock_ahead_s=1.5,
    late=("names",),
    speeds=Speeds(400.0, 10.0, (300.0, 310.5)),
    transfers=(Transfer(1, 1000.0),),
)
REPORT = Report(
    (Finding(Weight.FAULT, Subject.NETWORK, (1, 2), "no answer", "a firewall?"),),
    (("node", ""), ("1", "FAULT")),
)


# -- formats --------------------------------------------------------------------------------------


def test_facts_arrive_as_they_were_sent():
    assert preflight.from_values(json.loads(json.dumps(preflight.to_values(FACTS)))) == FACTS


def test_a_report_is_read_as_it_was_written():
    assert preflight.load(preflight.dump(REPORT)) == REPORT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FACTS._fields)), JSON)
def test_facts_of_another_form_are_refused_or_read(field: str, value: object):
    values = {**json.loads(json.dumps(preflight.to_values(FACTS))), field: value}
    with contextlib.suppress(PreflightError):
        assert isinstance(preflight.from_values(values), NodeFacts)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"findings": 1, "rows": []}']
)
def test_bytes_that_are_no_report_are_refused(data: bytes):
    with pytest.raises(PreflightError):
        preflight.load(data)


def test_text_of_others_cannot_control_a_terminal():
    value = preflight.to_values(FACTS._replace(versions=(("driver", "\x1b[2J" + "x" * 1000),)))

    ((_, text),) = preflight.from_values(value).versions

    assert text.startswith("?[2Jxx")
    assert len(text) == 300


# -- a node ---------------------------------------------------------------------------------------


def test_a_node_gathers_what_the_system_says(tmp_path: Path):
    node = NodeEnv(node=1, hosts=("w0", "w1"), node_dir=str(tmp_path))
    environ = {"HOME": str(tmp_path), "MA_LOG_DIR": str(tmp_path), "PWD": str(tmp_path)}

    node_facts = facts.gather(node, node_paths(environ, node), environ)

    assert (node_facts.node, node_facts.host) == (1, "w1")
    assert node_facts.limits.open_files > 0
    assert node_facts.shm_bytes == preflight.UNKNOWN or node_facts.shm_bytes >= 0
    assert any(disk.is_needed and disk.free_bytes > 0 for disk in node_facts.disks)
    assert not node_facts.has_limited_ports


def test_versions_come_from_the_wheels_of_the_first_python_on_path(tmp_path: Path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("torch-2.4.0", "nvidia_nccl_cu12-2.20.5", "nvidia_cuda_runtime_cu12-12.1.105"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    node = NodeEnv(node_dir=str(tmp_path))
    environ = {"PATH": f"{tmp_path}/none:{tmp_path}/bin", "HOME": str(tmp_path)}

    versions = dict(facts.gather(node, node_paths(environ, node), environ).versions)

    expected = {"torch": "2.4.0", "NCCL": "2.20.5", "CUDA": "12.1.105"}
    assert {name: versions[name] for name in expected} == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_MCA_btl_tcp_port_min_v4": "5000"},
        {"OPENMPI_MCA_ARGS": "--mca oob_tcp_dynamic_ipv4_ports 5000-5100"},
    ],
)
def test_a_job_that_limits_the_ports_of_open_mpi_says_so(tmp_path: Path, environ: dict[str, str]):
    node = NodeEnv(node_dir=str(tmp_path))

    assert facts.gather(node, node_paths({}, node), environ).has_limited_ports


NETWORK = NodeNetwork(
    (
        Interface("lo", ("127.0.0.1",), is_loopback=True),
        Interface("docker0", ("172.17.0.1",)),
        Interface("eth0", ("10.0.0.4", "10.0.0.5")),
        Interface("ib0", ("10.9.0.4",)),
    ),
    Route("eth0", "10.0.0.5"),
)


def test_all_libraries_use_the_way_to_the_other_nodes():
    environ = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }

    for variables in (environ, {}):
        (endpoint,) = facts.endpoints(NETWORK, variables, 4000)
        assert endpoint[:3] == ("eth0", "10.0.0.5", 4000)
        assert set(endpoint.libraries) == set(Library)


@pytest.mark.parametrize(
    ("name", "value", "library"),
    [
        ("NCCL_SOCKET_IFNAME", "docker", Library.NCCL),
        ("NCCL_SOCKET_IFNAME", "^eth,ib,lo", Library.NCCL),
        ("GLOO_SOCKET_IFNAME", "docker0", Library.GLOO),
        ("OMPI_MCA_btl_tcp_if_include", "docker0,ib0", Library.MPI),
    ],
)
def test_an_interface_that_somebody_chose_is_checked_as_well(
    name: str, value: str, library: Library
):
    way, chosen = facts.endpoints(NETWORK, {name: value}, 4000)

    assert way.interface == "eth0"
    assert library not in way.libraries
    assert (chosen.interface, chosen.address, chosen.libraries) == (
        *("docker0", "172.17.0.1"),
        (library,),
    )


def test_names_are_looked_up_and_one_that_does_not_resolve_has_no_address():
    node = NodeEnv(hosts=("localhost", "127.0.0.7", "w.invalid"))

    names = {name.of: name.addresses for name in facts.resolve(node, [0, 1, 2], 60.0)}

    assert names[1] == ("127.0.0.7",)
    assert "127.0.0.1" in names[0]
    assert names[2] == ()


@pytest.mark.parametrize("nodes", [2, 3, 64, 65, 1000])
def test_every_node_reaches_others_and_is_reached_as_often(nodes: int):
    peers = [peers_of(node, nodes) for node in range(nodes)]

    sizes = {len(each) for each in peers}
    assert len(sizes) == 1
    assert all(node not in each for node, each in enumerate(peers))
    reached = [number for each in peers for number in each]
    assert {reached.count(node) for node in range(nodes)} == sizes
    assert sizes.pop() == (
        nodes - 1 if nodes <= 64 else nodes.bit_length() - (nodes & nodes - 1 == 0)
    )


@pytest.fixture
def alone(tmp_path: Path) -> NodePreflight:
    """The only node of a job."""
    node = NodeEnv(node_dir=str(tmp_path))
    environ = {"PWD": str(tmp_path), "HOME": str(tmp_path)}
    return NodePreflight(node, node_paths(environ, node), b"key", None, NETWORK, environ)


def ask(node: NodePreflight, **values: object) -> dict[str, Any]:
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    node.start(values, answers.put)
    return answers.get(timeout=60.0)


def test_a_single_node_answers_with_its_own_facts(alone: NodePreflight):
    answer = ask(alone, number=3, step="facts", endpoints=[])

    assert answer["number"] == 3
    node_facts = preflight.from_values(json.loads(json.dumps(answer["found"])))
    assert (node_facts.node, node_facts.links) == (0, ())
    assert node_facts.disks


@pytest.mark.parametrize(
    "values",
    [
        {"step": "facts"},
        {"step": "facts", "endpoints": [[1, [["lo", "127.0.0.1"]]]]},
        {"step": "facts", "endpoints": 7},
        {"step": "transfer", "endpoint": ["lo", "x", 1, 1, []], "to": "x", "seconds": 1},
        {"number": 1},
    ],
)
def test_a_question_of_another_form_is_answered_with_a_problem(
    alone: NodePreflight, values: dict[str, object]
):
    assert set(ask(alone, **values)["found"]) == {"problem"}


def test_a_node_that_can_start_no_thread_answers_with_a_problem(
    alone: NodePreflight, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    answer = ask(alone, number=1, step="facts", endpoints=[])

    assert answer == {"number": 1, "found": {"problem": "can't start new thread"}}


# -- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 5, 8, 63, 64])
def test_every_node_has_two_different_partners(count: int):
    nodes = [10 * number for number in range(count)]
    partners: dict[int, set[int]] = {node: set() for node in nodes}
    for pairs in rounds(nodes):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for first, second in pairs:
            partners[first].add(second)
            partners[second].add(first)

    assert all(len(with_node) >= 2 for with_node in partners.values())


def test_two_nodes_have_only_each_other_and_one_has_none():
    assert list(rounds([0, 1])) == [[(0, 1)]]
    assert [pair for pairs in rounds([0]) for pair in pairs] == []


def test_the_table_marks_the_nodes_of_a_finding():
    nodes = [NodeFacts(0, "w0"), FACTS._replace(node=1, host="w1"), NodeFacts(2, "w2")]

    rows = table.report(nodes, REPORT.findings).rows

    assert [row[-1] for row in rows] == ["", "ok", "FAULT", "FAULT"]
    assert len({len(row) for row in rows}) == 1
    places = {line.rindex(row[-1]) for line, row in list(zip(columns(rows), rows))[1:]}
    assert len(places) == 1, "the marks stand below each other"


def test_the_log_has_a_line_for_each_finding_and_a_limit():
    hosts = [f"w{node}" for node in range(3)]

    assert table.warnings(REPORT.findings, hosts) == [
        "checking the nodes: node 1 (w1), node 2 (w2): no answer",
        "hint: a firewall?",
    ]
    note = Finding(Weight.NOTE, Subject.NAMES, (0,), "x")
    assert table.warnings([note], hosts) == []
    assert table.warnings(REPORT.findings * 20, hosts)[-1] == "checking the nodes: 8 more findings"
