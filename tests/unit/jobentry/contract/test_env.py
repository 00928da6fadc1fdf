"""The environment of a node: settings are written and read, and every error is reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import env, hang_actions, names, preflight_levels
from jobentry.contract.env import EnvError, MindSpore, NodeEnv, OpenMpi

TEXT = st.text(st.characters(exclude_characters="\0"), max_size=20)
SOME_TEXT = TEXT.filter(bool)
FILES = st.just("") | TEXT.map(lambda text: "/" + text.rstrip("/") + "f")
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
HOSTS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True)
SECONDS = st.floats(0, 1e9, allow_nan=False)
DEVICES = ("10.0.0.1 0=192.168.1.1 1=fe80::1", "s@p 0=192.168.1.1/3")
PAIRS = st.dictionaries(NAMES, TEXT, max_size=3).map(lambda pairs: tuple(pairs.items()))
VARIABLES = sorted(
    {value for name, value in vars(names).items() if name == value and name.isupper()}
)


@st.composite
def nodes(draw: st.DrawFn) -> NodeEnv:
    """Generate any valid node."""
    hosts = tuple(draw(st.lists(HOSTS, min_size=1, max_size=4, unique=True)))
    inputs = draw(PAIRS)
    return NodeEnv(
        job=draw(HOSTS),
        node=draw(st.integers(0, len(hosts) - 1)),
        hosts=hosts,
        slots=draw(st.integers(1, 999999999)),
        launcher=draw(SOME_TEXT),
        interpreter=draw(TEXT),
        code_uri=draw(TEXT),
        code_digest=draw(TEXT),
        record_uri=draw(TEXT),
        node_dir=draw(TEXT),
        control_dir=draw(TEXT),
        delivered_dir=draw(TEXT),
        stall_s=draw(SECONDS),
        ssh_key=draw(TEXT),
        sshd_port=draw(st.integers(1, 65535)),
        env_names=tuple(draw(st.lists(NAMES, max_size=3))),
        secret_names=tuple(draw(st.lists(NAMES, max_size=3))),
        inputs=inputs,
        input_nodes=tuple((name, "0,2-3") for name, _ in inputs[:1]),
        outputs=draw(PAIRS),
        restore_outputs=draw(st.sampled_from(env.RESTORE_CHOICES)),
        output_sync_s=draw(SECONDS),
        output_limit_s=draw(SECONDS),
        grace_s=draw(SECONDS),
        timeout_s=draw(SECONDS),
        start_timeout_s=draw(SECONDS),
        preflight=draw(st.sampled_from(preflight_levels.LEVELS)),
        hang_action=draw(st.sampled_from(hang_actions.ACTIONS)),
        hang_after_s=draw(SECONDS),
        hang_scale=draw(st.floats(0.001, 1000)),
        first_version=draw(st.booleans()),
        open_mpi=OpenMpi(
            np=draw(st.none() | st.integers(1, 999999999)),
            host_file=draw(FILES),
            tune_file=draw(FILES),
            bind_args=draw(st.none() | TEXT),
            x_args=draw(st.none() | TEXT),
            mca_args=draw(st.none() | TEXT),
            extra_args=draw(st.none() | TEXT),
        ),
        mindspore=MindSpore(
            device_target=draw(TEXT),
            parallel_mode=draw(TEXT),
            search_mode=draw(TEXT),
            devices=tuple(draw(st.lists(st.sampled_from(DEVICES), max_size=3))),
        ),
    )


def problems(environ: dict[str, str]) -> list[str]:
    """Return the problems of an environment."""
    with pytest.raises(EnvError) as caught:
        env.read(environ)
    return caught.value.problems


@given(nodes())
def test_written_settings_are_read_back(node: NodeEnv):
    assert env.read(env.write(node)) == node


@given(nodes())
def test_written_settings_are_a_valid_environment(node: NodeEnv):
    written = env.write(node)

    assert all(env.is_name(name) for name in written)
    assert not any("\0" in value for value in written.values())


def test_invalid_choices_and_lists_are_reported():
    given_ = {
        "CLOUDJOB_RESTORE_OUTPUTS": "some",
        "CLOUDJOB_INPUT_NODES": '{"DATA": "first"}',
        "CLOUDJOB_OUTPUT_SYNC_S": "often",
    }

    assert problems(given_) == [
        "CLOUDJOB_INPUT_NODES: DATA: 'first' is not a list of nodes",
        "CLOUDJOB_RESTORE_OUTPUTS='some' is not valid (allowed: none, own, all)",
        "CLOUDJOB_OUTPUT_SYNC_S='often' is not a number of seconds",
    ]


def test_an_invalid_line_of_devices_is_reported():
    assert problems({"CLOUDJOB_DEVICES": "s 0=1.1.1.1\ns"}) == [
        "CLOUDJOB_DEVICES: 's' names no devices"
    ]


def test_an_empty_environment_is_one_node():
    assert env.read({}) == NodeEnv(job="job", node=0, hosts=("localhost",), slots=1)


def test_the_platforms_variables_are_enough():
    node = env.read(
        {
            "MA_VJ_NAME": "modelarts-job-7f3c",
            "MA_TASK_NAME": "worker",
            "MA_NUM_HOSTS": "2",
            "MA_NUM_GPUS": "8",
            "VC_TASK_INDEX": "1",
            "VC_WORKER_NUM": "2",
            "VC_WORKER_HOSTS": "worker-0.job.ns.svc, worker-1.job.ns.svc",
            "SSHD_PORT": "38888",
        }
    )

    assert node == NodeEnv(
        job="modelarts-job-7f3c",
        node=1,
        hosts=("worker-0.job.ns.svc", "worker-1.job.ns.svc"),
        slots=8,
        sshd_port=38888,
    )
    assert (node.nodes, node.host, node.is_head) == (2, "worker-1.job.ns.svc", False)


def test_host_names_follow_the_platforms_pattern():
    node = env.read({"MA_VJ_NAME": "ma-job", "MA_NUM_HOSTS": "2", "MA_TASK_INDEX": "1"})

    assert node.hosts == ("ma-job-worker-0.ma-job", "ma-job-worker-1.ma-job")


def test_the_first_variable_that_is_set_wins():
    """An empty variable counts as not set; CLOUDJOB_PROCS_PER_NODE precedes MA_NUM_GPUS."""
    node = env.read(
        {
            "VC_WORKER_HOSTS": "a,b,c",
            "MA_TASK_INDEX": "",
            "VC_TASK_INDEX": "1",
            "VK_TASK_INDEX": "2",
            "CLOUDJOB_PROCS_PER_NODE": "4",
            "MA_NUM_GPUS": "8",
        }
    )

    assert (node.node, node.slots) == (1, 4)


def test_a_node_without_gpus_has_one_slot():
    """The platform sets MA_NUM_GPUS=0 on a node without GPUs."""
    assert env.read({"MA_NUM_GPUS": "0"}).slots == 1


def test_a_node_without_a_given_number_has_a_slot_for_each_gpu_or_npu():
    assert env.read({"MA_NUM_GPUS": "0", "MA_NUM_NPUS": "8"}).slots == 8
    assert env.read({"MA_NUM_GPUS": "4"}).slots == 4
    assert env.read({"CLOUDJOB_PROCS_PER_NODE": "2", "MA_NUM_NPUS": "8"}).slots == 2
    assert "CLOUDJOB_PROCS_PER_NODE" not in env.write(
        NodeEnv(job="j", node=0, hosts=("a",), slots=0)
    )


@pytest.mark.parametrize("text", ["x", "-1", "1.5", " 1", "1_0", "٣", "²", "9" * 10, "9" * 5000])
@pytest.mark.parametrize(
    "name",
    [
        "MA_TASK_INDEX",
        "VC_TASK_INDEX",
        "VK_TASK_INDEX",
        "MA_NUM_GPUS",
        "CLOUDJOB_PROCS_PER_NODE",
        "MA_NUM_HOSTS",
        "VC_WORKER_NUM",
        "SSHD_PORT",
        "OPENMPI_NP",
    ],
)
def test_an_invalid_number_is_reported(name: str, text: str):
    beginning = text if len(text) <= 80 else text[:80] + "…"

    assert problems({name: text}) == ["%s=%r is not a whole number" % (name, beginning)]


@pytest.mark.parametrize("text", ["0", "00", "000000000"])
def test_zero_ranks_are_refused(text: str):
    assert problems({"OPENMPI_NP": text}) == ["OPENMPI_NP=%r: a job has at least 1 rank" % text]
    assert env.read({"OPENMPI_NP": ""}).open_mpi.np is None


@pytest.mark.parametrize("text", ["hostfile", "./hostfile", " /tmp/x", "/tmp/folder/"])
@pytest.mark.parametrize("name", ["OPENMPI_HOST_FILE_PATH", "TUNE_ENV_FILE"])
def test_a_relative_path_is_refused(name: str, text: str):
    assert problems({name: text}) == ["%s=%r is not the absolute path of a file" % (name, text)]


@pytest.mark.parametrize("text", ["0", "65536", "999999999"])
def test_an_invalid_port_is_reported(text: str):
    assert problems({"SSHD_PORT": text}) == ["SSHD_PORT='%s' is not a port" % text]


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "-inf", "1e999", "1s"])
@pytest.mark.parametrize(
    "name", ["CLOUDJOB_GRACE_S", "CLOUDJOB_TIMEOUT_S", "CLOUDJOB_START_TIMEOUT_S"]
)
def test_an_invalid_number_of_seconds_is_reported(name: str, text: str):
    assert problems({name: text}) == ["%s=%r is not a number of seconds" % (name, text)]


@pytest.mark.parametrize("text", ["1A", "A-B", "A=1", "Ä"])
@pytest.mark.parametrize("name", ["CLOUDJOB_ENV_NAMES", "CLOUDJOB_SECRET_NAMES"])
def test_an_invalid_variable_name_is_reported(name: str, text: str):
    assert problems({name: "GOOD %s" % text}) == ["%s: %r is not a variable name" % (name, text)]


@pytest.mark.parametrize(
    "text", ["x", "[]", '"a"', "null", "1", '{"A": 1}', '{"A": null}', "{", "[" * 100_000]
)
@pytest.mark.parametrize("name", ["CLOUDJOB_INPUTS", "CLOUDJOB_OUTPUTS"])
def test_invalid_json_is_reported(name: str, text: str):
    beginning = text if len(text) <= 80 else text[:80] + "…"

    assert problems({name: text}) == ["%s=%r is not a JSON object of strings" % (name, beginning)]


@pytest.mark.parametrize("key", ["", "a=b", "../../etc", "a b", "a\\u0000b"])
@pytest.mark.parametrize("name", ["CLOUDJOB_INPUTS", "CLOUDJOB_OUTPUTS"])
def test_an_input_must_be_a_variable_name(name: str, key: str):
    """The name of an input becomes a variable of the ranks, and a part of a path."""
    problems_there = problems({name: '{"%s": "file:///x"}' % key})

    assert problems_there == [
        "%s: %r is not a variable name" % (name, key.replace("\\u0000", "\0"))
    ]


@pytest.mark.parametrize("text", ["-a", "a b", "a/b", "../x", "a;b", "a\nb", "a:b", "é"])
@pytest.mark.parametrize("name", ["CLOUDJOB_JOB", "MA_VJ_NAME"])
def test_an_invalid_job_id_is_reported(name: str, text: str):
    assert problems({name: text}) == ["%s=%r is not a job id" % (name, text)]


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=x", "a,", ",", "a b", "a:22", "a,b\nc", "a slots=9"]
)
def test_invalid_host_names_are_reported(text: str):
    assert problems({"VC_WORKER_HOSTS": text})[0] == (
        "VC_WORKER_HOSTS=%r is not a list of hosts" % text
    )


@pytest.mark.parametrize(
    "environ", [{"MA_VJ_NAME": "-oProxyCommand=x"}, {"MA_VJ_NAME": "j", "MA_TASK_NAME": "a b"}]
)
def test_invalid_host_names_made_from_the_pattern_are_reported(environ: dict[str, str]):
    problems_there = problems({"CLOUDJOB_JOB": "good", "MA_NUM_HOSTS": "2", **environ})

    assert problems_there == [
        "MA_VJ_NAME=%r and MA_TASK_NAME=%r do not form a host name"
        % (environ["MA_VJ_NAME"], environ.get("MA_TASK_NAME", "worker"))
    ]


def test_a_repeated_host_is_reported():
    """Open MPI would start a node's ranks twice."""
    assert problems({"VC_WORKER_HOSTS": "a,b,a"}) == ["VC_WORKER_HOSTS names a host twice"]


def test_a_count_that_differs_from_the_list_is_reported():
    assert problems({"VC_WORKER_HOSTS": "a,b", "MA_NUM_HOSTS": "3"}) == [
        "VC_WORKER_HOSTS lists 2 hosts, but there should be 3"
    ]


def test_an_index_beyond_the_last_node_is_reported():
    assert problems({"VC_WORKER_HOSTS": "a,b", "VC_TASK_INDEX": "2"}) == [
        "this node has the index 2, but there are 2 nodes in VC_WORKER_HOSTS"
    ]


@pytest.mark.parametrize("count", ["2", "999999999"])
def test_nodes_without_host_names_are_reported(count: str):
    assert problems({"MA_NUM_HOSTS": count}) == [
        "%s nodes, but neither VC_WORKER_HOSTS nor MA_VJ_NAME gives their names" % count
    ]


def test_all_problems_are_reported_at_once():
    """A user must not have to submit five times to find five errors."""
    problems_there = problems(
        {
            "VC_WORKER_HOSTS": "a,-b",
            "MA_NUM_HOSTS": "3",
            "VC_TASK_INDEX": "x",
            "MA_NUM_GPUS": "many",
            "SSHD_PORT": "ssh",
            "OPENMPI_NP": "all",
            "CLOUDJOB_GRACE_S": "soon",
            "CLOUDJOB_ENV_NAMES": "A-B",
            "CLOUDJOB_INPUTS": "{",
            "CLOUDJOB_JOB": "a b",
        }
    )

    assert sorted(problems_there) == sorted(
        [
            "VC_WORKER_HOSTS='a,-b' is not a list of hosts",
            "VC_WORKER_HOSTS lists 2 hosts, but there should be 3",
            "VC_TASK_INDEX='x' is not a whole number",
            "MA_NUM_GPUS='many' is not a whole number",
            "SSHD_PORT='ssh' is not a whole number",
            "OPENMPI_NP='all' is not a whole number",
            "CLOUDJOB_GRACE_S='soon' is not a number of seconds",
            "CLOUDJOB_ENV_NAMES: 'A-B' is not a variable name",
            "CLOUDJOB_INPUTS='{' is not a JSON object of strings",
            "CLOUDJOB_JOB='a b' is not a job id",
        ]
    )


VALUES = TEXT | st.sampled_from(["0", "1", "2", "a,b", "{}", '{"a": "b"}', "[]", "-1", "1e5", "j"])


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_any_environment_is_read_or_reported(environ: dict[str, str]):
    try:
        node = env.read(environ)
    except EnvError as error:
        problems_there = error.problems
    else:
        problems_there = ["none"]
        assert env.read(env.write(node)) == node
    assert problems_there
    assert all(problems_there)


def test_the_head_carries_variables_that_are_the_same_on_all_nodes():
    """It passes on PATH, the user's variables and those with a documented prefix, but no others."""
    node = NodeEnv(env_names=("LR", "HOME"), secret_names=("TOKEN", "S3_KEY"))
    carried = {
        name
        for name in [
            "MA_VJ_NAME",
            "MA_CURRENT_IP",
            "MA_TASK_INDEX",
            "SHARED_X",
            "S3_URL",
            "S3_KEY",
            "PATH",
            "PATHS",
            "VC_WORKER_NUM",
            "VC_TASK_INDEX",
            "SCC_X",
            "CRED_X",
            "LR",
            "TOKEN",
            "HOME",
            "HOSTNAME",
            "USER",
            "CLOUDJOB_NODE_DIR",
        ]
        if env.is_carried(name, node)
    }

    assert carried == {
        "MA_VJ_NAME", "SHARED_X", "S3_URL", "PATH", "VC_WORKER_NUM", "SCC_X", "CRED_X", "LR",
    }  # fmt: skip


@given(TEXT)
def test_valid_variable_names_are_recognised(text: str):
    assert env.is_name(text) == (
        text.isascii() and text.replace("_", "a").isalnum() and not text[0].isdigit()
    )
