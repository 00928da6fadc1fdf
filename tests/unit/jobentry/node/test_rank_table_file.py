"""Rank tables: the platform's table and a list of devices, converted to the formats of HCCL."""

from __future__ import annotations

import json

import pytest

from jobentry.contract import devices
from jobentry.contract.devices import Device, Server
from jobentry.contract.env import MindSpore, NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.launchers import rank_table
from jobentry.launchers.common import ArgsError, Site
from jobentry.node import rank_table_file

PATHS = NodePaths("/h", "/j", "/m", "/l", "/n")


def v0(*pods: tuple[str, str, list[str]], status: str = "completed") -> str:
    """Return a table in the platform's format; a pod is a name, a server and device addresses."""
    instances = [
        {
            "pod_name": pod,
            "server_id": server,
            "devices": [
                {"device_id": str(index), "device_ip": address}
                for index, address in enumerate(addresses)
            ],
        }
        for pod, server, addresses in pods
    ]
    group = {
        "group_name": "fake-job",
        "device_count": str(sum(len(addresses) for _, _, addresses in pods)),
        "instance_count": str(len(pods)),
        "instance_list": instances,
    }
    return json.dumps({"status": status, "group_count": "1", "group_list": [group]})


# The input of the example of the platform's own adapter, with its pods in the wrong order.
PUBLISHED = v0(
    (
        "fake-job-pod-1",
        "10.19.1.79",
        [
            *("192.1.194.107", "192.2.151.252", "192.3.151.103", "192.4.42.97"),
            *("192.1.231.84", "192.2.33.15", "192.3.129.242", "192.4.33.172"),
        ],
    ),
    (
        "fake-job-pod-0",
        "10.19.1.142",
        [
            *("192.1.65.251", "192.2.119.60", "192.3.23.207", "192.4.186.90"),
            *("192.1.72.194", "192.2.38.84", "192.3.199.174", "192.4.178.32"),
        ],
    ),
)


def test_the_platforms_table_becomes_version_1_0():
    table = json.loads(rank_table.from_text(PUBLISHED).text)

    first, second = table["server_list"]
    assert {name: table[name] for name in ("status", "version", "server_count")} == {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
    }
    assert (first["server_id"], second["server_id"]) == ("10.19.1.142", "10.19.1.79")
    assert first["device"][0] == {
        "device_id": "0",
        "device_ip": "192.1.65.251",
        "rank_id": "0",
    }
    assert second["device"][7] == {
        "device_id": "7",
        "device_ip": "192.4.33.172",
        "rank_id": "15",
    }
    assert [device["rank_id"] for server in (first, second) for device in server["device"]] == [
        str(rank) for rank in range(16)
    ]


def test_pods_are_sorted_by_their_numbers_and_not_by_their_text():
    """Pod 10 comes after pod 9, and a note says that the servers are not sorted by name."""
    table = rank_table.from_text(
        v0(("p-10", "10.0.0.2", ["1.1.1.3"]), ("p-9", "10.0.0.3", ["1.1.1.2"]))
    )

    assert [server["server_id"] for server in json.loads(table.text)["server_list"]] == [
        "10.0.0.3",
        "10.0.0.2",
    ]
    assert [note.partition(",")[0] for note in table.notes] == [
        "ranks follow the order of the nodes"
    ]


def test_two_pods_of_one_server_share_its_entry():
    """A table lists each server once."""
    table = rank_table.from_text(v0(("p-0", "s", ["1.1.1.1"]), ("p-1", "s", ["1.1.1.2"])))

    values = json.loads(table.text)
    assert values["server_count"] == "1"
    assert [device["rank_id"] for device in values["server_list"][0]["device"]] == ["0", "1"]
    assert [[rank for rank, _ in mine] for mine in table.nodes] == [[0], [1]]


def test_nodes_in_super_pods_get_version_1_2():
    """The published example of an Atlas A3: two of the devices of one server."""
    line = "192.168.0.1@0 0=192.168.1.1/37748736 7=192.168.1.7/38600711"

    assert json.loads(rank_table.from_servers([devices.parse(line)]).text) == {
        "version": "1.2",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "192.168.0.1",
                "device": [
                    {
                        "device_id": "0",
                        "device_ip": "192.168.1.1",
                        "rank_id": "0",
                        "super_device_id": "37748736",
                    },
                    {
                        "device_id": "7",
                        "device_ip": "192.168.1.7",
                        "rank_id": "1",
                        "super_device_id": "38600711",
                    },
                ],
            }
        ],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "192.168.0.1"}]}],
        "status": "completed",
    }


def test_super_pods_list_their_servers():
    """Two super pods of two servers each, as in HCCL's manual."""
    servers = [devices.parse(f"node_{i}@super_pod_{i // 2} 0=192.168.1.{i}/{i}") for i in range(4)]

    assert json.loads(rank_table.from_servers(servers).text)["super_pod_list"] == [
        {
            "super_pod_id": "super_pod_0",
            "server_list": [{"server_id": f"node_{i}"} for i in (0, 1)],
        },
        {
            "super_pod_id": "super_pod_1",
            "server_list": [{"server_id": f"node_{i}"} for i in (2, 3)],
        },
    ]


@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_a_table_with_ranks_stays_unchanged(version):
    text = json.dumps(
        {
            "version": version,
            "server_list": [
                {"server_id": "b", "device": [{"device_id": "0", "rank_id": "1"}]},
                {"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]},
            ],
            "status": "completed",
        }
    )

    table = rank_table.from_text(text)

    assert table.text == text
    assert table.nodes == (((0, Device("0", "")),), ((1, Device("0", "")),))


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"group_list": [{}]}', '{"server_list": [1]}'])
def test_an_invalid_table_is_reported(text):
    with pytest.raises(ArgsError) as caught:
        rank_table.from_text(text)

    assert len(caught.value.problems) == 1
    assert "rank table cannot be read" in caught.value.problems[0]


def test_a_line_of_devices_is_parsed():
    assert devices.parse("10.0.0.1 0=192.168.1.1  1=fe80::1") == Server(
        "10.0.0.1", (Device("0", "192.168.1.1"), Device("1", "fe80::1"))
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "names no devices"),
        ("10.0.0.1", "names no devices"),
        ("10.0.0.1 0", "has '0', which is not DEVICE=ADDRESS"),
        ("10.0.0.1 x=1.1.1.1", "has 'x=1.1.1.1', which is not DEVICE=ADDRESS"),
        ("10.0.0.1 0=1.1.1.1 0=1.1.1.2", "names a device twice"),
        ("s@p 0=1.1.1.1", "must name a super pod and every device's number in it, or neither"),
        ("s 0=1.1.1.1/3", "must name a super pod and every device's number in it, or neither"),
    ],
)
def test_an_invalid_line_of_devices_is_reported(line, problem):
    with pytest.raises(ValueError, match=r"\S") as caught:
        devices.parse(line)

    assert str(caught.value) == problem


# -- the launcher -------------------------------------------------------------------------------

LINES = ("10.0.0.1 4=192.168.1.1 5=192.168.2.1", "10.0.0.2 0=192.168.1.2 1=192.168.2.2")


def make_site(node: int = 0, **values) -> Site:
    """Return the site of a job of two nodes with two ranks each."""
    settings = {"mindspore": MindSpore(devices=LINES), "slots": 2, **values}
    table = settings.pop("rank_table", "")
    env = NodeEnv(job="j", node=node, hosts=("a", "b"), **settings)
    return Site(
        env, {"A": "b"}, PATHS, "/py", ("/usr/bin/python3", "-I", "/e.pyz"), rank_table=table
    )


def test_each_device_has_a_rank_with_its_number():
    launch = rank_table.launch(make_site(node=1), ["train.py", "--lr", "1"])

    assert launch.ranks == 4
    assert [process.argv for process in launch.processes] == [
        (
            *("/usr/bin/python3", "-I", "/e.pyz", "--rank", "--"),
            *("/py", "/e.pyz", "--script", "train.py", "--lr", "1"),
        )
    ] * 2
    assert [process.env for process in launch.processes] == [
        {
            "A": "b",
            "RANK_TABLE_FILE": "/n/rank-table.json",
            "RANK_ID": str(2 + index),
            "RANK_SIZE": "4",
            "DEVICE_ID": str(index),
            "ASCEND_DEVICE_ID": str(index),
            "JOB_ID": "j",
            "CLOUDJOB_RANK": str(2 + index),
        }
        for index in range(2)
    ]
    assert [(file.path, file.mode) for file in launch.files] == [("/n/rank-table.json", 0o600)]
    assert json.loads(launch.files[0].text)["server_list"][1]["device"][1]["rank_id"] == "3"


def test_all_nodes_write_the_same_table():
    """HCCL compares the tables of all nodes."""
    tables = [rank_table.launch(make_site(node=node), ["x.py"]).files[0].text for node in range(2)]

    assert tables[0] == tables[1]


@pytest.mark.parametrize("values", [{"slots": 1}, {"hosts": ("a", "b", "c")}])
def test_a_table_with_another_number_of_devices_is_refused(values):
    with pytest.raises(ArgsError, match=r"nodes: 2, devices per node: 2, 2\).*--procs-per-node"):
        rank_table.launch(make_site()._replace(node=make_site().node._replace(**values)), ["x.py"])


def test_a_job_without_a_table_is_refused():
    with pytest.raises(ArgsError, match=r"mindspore\.devices lists no devices"):
        rank_table.launch(make_site(mindspore=MindSpore()), ["x.py"])


# -- the platform's file ------------------------------------------------------------------------


def test_an_incomplete_table_is_waited_for(tmp_path, until):
    import threading

    path = tmp_path / "jobstart_hccl.json"
    tables: list[str] = []
    reader = threading.Thread(
        target=lambda: tables.append(rank_table_file.read({"RANK_TABLE_FILE": str(tmp_path)}, 60))
    )
    reader.start()
    for text in ("", PUBLISHED[:40], v0(status="initializing")):
        path.write_text(text)
        # The reader polls five times a second.
        reader.join(0.5)
        assert not tables, text

    path.write_text(PUBLISHED)

    reader.join(30)
    assert tables == [PUBLISHED]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "it does not exist"),
        ("{", "not a JSON object"),
        (v0(status="initializing"), "'initializing'"),
    ],
)
def test_a_table_that_stays_incomplete_is_reported(tmp_path, text, problem):
    path = tmp_path / "hccl.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(EntryError, match=problem) as caught:
        rank_table_file.read({"RANK_TABLE_FILE": str(tmp_path)}, 0.3)

    assert str(tmp_path) in str(caught.value)
