"""Valid and invalid jobs; every error is reported at once."""

import json
import math
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.errors import SpecError
from cloudjob.model.job import JobSpec, default_name, masked
from cloudjob.model.rules import MAX_ARG_BYTES, NAME_RULE
from cloudjob.model.text import one_line
from cloudjob.model.validation import check, validate


def spec(**values):
    """Return a job with these values."""
    return JobSpec(**{"script": "train.py", **values})


def problems(**values):
    """Return every problem of a job with these values."""
    _, conflicts = validate({"script": "train.py", **values})
    return [f"{one_line(key)}: {what}" for key, what in conflicts]


def only_problem(**values):
    """Return the only problem of a job with these values."""
    (problem,) = problems(**values)
    return problem


def test_a_script_alone_is_a_job():
    """Everything but the script has a sensible default."""
    check(spec())

    assert spec().name == "train"


def test_every_problem_is_reported_at_once():
    """``problems`` lists every error with the given and the allowed value."""
    values = {"nodes": 0, "retries": 11, "backend": "proces", "env": {"1A": "x"}}

    assert sorted(problems(**values, script="../train.py")) == sorted([
        "script: lies outside the source folder (given '../train.py')",
        "nodes: is out of range (given 0; allowed 1 to 10000)",
        "retries: is out of range (given 11; allowed 0 to 10)",
        "backend: is not known, did you mean 'process'? (given 'proces'; allowed process, docker, "
        "modelarts, kubernetes, slurm)",
        "env.1A: is not a variable's name (given '1A'; allowed letters, digits and '_', "
        "not a digit first)",
    ])  # fmt: skip


def test_an_invalid_value_causes_no_further_errors():
    assert len(problems(nodes="many", inputs={"D": "file:///d"}, input_nodes={"D": "5"})) == 1
    assert len(problems(launcher="mpirum", script="/bin/true")) == 1


def test_a_launcher_that_was_found_is_checked_again():
    with pytest.raises(SpecError, match="must be 1 with the launcher python"):
        check(spec(procs_per_node=2, launcher="python"))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"nodes": 10_001}, "nodes"),
        ({"procs_per_node": 0}, "procs_per_node"),
        ({"procs_per_node": 1025}, "procs_per_node"),
        ({"nodes": 1000, "procs_per_node": 101}, "nodes"),
        ({"timeout_min": -1}, "timeout_min"),
        ({"timeout_min": math.nan}, "timeout_min"),
        ({"timeout_min": math.inf}, "timeout_min"),
        ({"grace_s": -0.1}, "grace_s"),
        ({"source_limit_mb": math.inf}, "source_limit_mb"),
        ({"retries": -1}, "retries"),
        ({"launcher": "mpiexec"}, "launcher"),
        ({"script": ""}, "script"),
        ({"script": "/etc/train.py"}, "script"),
        ({"script": "a/../../train.py"}, "script"),
        ({"script": "./."}, "script"),
        ({"script": "a\0.py"}, "script"),
        ({"name": "my job"}, "name"),
        ({"name": "job\n"}, "name"),
        ({"name": "é"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"args": ("ok", "a\0b")}, "args[1]"),
        ({"args": ("x" * (MAX_ARG_BYTES + 1),)}, "args[0]"),
        ({"args": ("\ud800",)}, "args[0]"),
        ({"image": "a\0b"}, "image"),
        ({"env": {"": "x"}}, "env."),
        ({"env": {"A-B": "x"}}, "env.A-B"),
        ({"env": {"A\n": "x"}}, r"env.A\n"),
        ({"env": {"\udcff": "x"}}, r"env.\udcff"),
        ({"env": {"MA_X": "x"}}, "env.MA_X"),
        ({"env": {"CLOUDJOB_X": "x"}}, "env.CLOUDJOB_X"),
        ({"env": {"A": "x\0"}}, "env.A"),
        ({"secrets": {"MA_X": "x"}}, "secrets.MA_X"),
        ({"inputs": {"MY-DATA": "s3://b/k"}}, "inputs.MY-DATA"),
        ({"inputs": {"DATA": ""}}, "inputs.DATA"),
        ({"outputs": {"9": ""}}, "outputs.9"),
        ({"input_nodes": {"DATA": "0"}}, "input_nodes.DATA"),
        ({"inputs": {"D": "file:///d"}, "input_nodes": {"D": "first"}}, "input_nodes.D"),
        ({"inputs": {"D": "file:///d"}, "input_nodes": {"D": "1-2"}}, "input_nodes.D"),
        ({"restore_outputs": "some"}, "restore_outputs"),
        ({"output_sync_s": -1.0}, "output_sync_s"),
        ({"process": {"pyton": "x"}}, "process.pyton"),
        ({"process": {"isolation": "full"}}, "process.isolation"),
        ({"proces": {}}, "proces"),
    ],
)
def test_a_problem_names_its_key(values, key):
    """Each invalid value causes one problem, a single line that starts with the key."""
    problem = only_problem(**values)

    assert problem.startswith(f"{key}: ")
    assert problem.isprintable()


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 10_000, "procs_per_node": 10},
        {"script": "a/../b/./train.py"},
        {"script": "a b/trän..py"},
        {"outputs": {"MODEL": ""}},
        {"env": {"_a1": "", "B": "=\n\udcff'\"$"}},
        {"args": ("", "\udcff", "--nodes")},
        {"process": {"isolation": "none"}},
        {"name": "A_b-9" * 12},
    ],
)
def test_unusual_but_valid_jobs_are_accepted(values):
    assert problems(**values) == []


@pytest.mark.parametrize("letter", ["x", "é", "\udcff"])
def test_a_variable_is_measured_in_bytes_with_its_name(letter):
    """The limit of Linux counts the bytes of NAME=VALUE, including invalid UTF-8."""
    character_bytes = len(letter.encode("utf-8", "surrogateescape"))
    available_bytes = MAX_ARG_BYTES - len("AB=")
    longest = letter * (available_bytes // character_bytes) + "x" * (
        available_bytes % character_bytes
    )

    assert problems(env={"AB": longest}) == []
    assert "is too long (given 131072 bytes" in only_problem(env={"AB": longest + "x"})


def test_the_limit_is_the_one_of_linux():
    """A program starts with a variable of the maximum size, but not with one byte more."""
    env = {"AB": "x" * (MAX_ARG_BYTES - 3)}
    subprocess.run(["/bin/true"], env=env, check=True)

    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], env={"AB": env["AB"] + "x"}, check=True)


@pytest.mark.parametrize("first", ["env", "secrets", "inputs"])
def test_two_fields_that_set_the_same_variable_are_refused(first):
    assert only_problem(**{first: {"A": "file:///x"}, "outputs": {"A": ""}}) == (
        f"outputs.A: is also in {first} (allowed: each name once)"
    )


@pytest.mark.parametrize("uri", ["data", "/data", "", "ftp://host/x", "s3:/bucket"])
@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_an_input_or_output_that_no_node_could_reach_is_refused(field, uri):
    if field == "outputs" and not uri:
        assert problems(outputs={"A": uri}) == []
        return
    problem = "has an unsupported scheme" if uri.startswith("ftp:") else "is not a URI"
    assert only_problem(**{field: {"A": uri}}).startswith(f"{field}.A: {problem} (given ")


def test_outputs_cannot_be_stored_on_a_web_server():
    assert problems(inputs={"A": "https://host/x"}) == []
    message = only_problem(outputs={"A": "https://host/x?signature=secret"})

    assert (
        "has an unsupported scheme (given 'https://host/x'; allowed file://, s3://, obs://, pvc://)"
        in message
    )


def test_secret_values_are_never_shown():
    value = spec(secrets={"TOKEN": "hunter2"})
    problems_there = problems(secrets={"TOKEN": "hunter2\0", "MA_X": "hunter2"})
    with pytest.raises(SpecError) as caught:
        spec(secrets={"TOKEN": "hunter2\0"})

    assert len(problems_there) == 2
    for text in (repr(value), *problems_there, json.dumps(masked(value)), str(caught.value)):
        assert "hunter2" not in text
    assert masked(value)["secrets"] == {"TOKEN": "***"}


def test_variables_with_the_name_of_a_secret_are_masked():
    env = {"DB_PASSWORD": "pw", "wandb_api_key": "0123456789abcdef", "HF_TOKEN": "", "LR": "pw"}
    value = spec(env=env, args=("--key=0123456789abcdef",))

    masked_spec = masked(value)
    assert masked_spec["env"] == {**env, "DB_PASSWORD": "***", "wandb_api_key": "***"}
    assert masked_spec["args"] == ["--key=***"]
    assert value.env == env


def test_a_job_spec_is_deeply_immutable():
    env = {"A": "1"}
    value = spec(env=env, process={"python": "py"})
    env["A"] = "2"

    assert value.env == {"A": "1"}
    with pytest.raises(AttributeError, match="immutable"):
        value.nodes = 2
    with pytest.raises(TypeError):
        value.env["A"] = "3"
    with pytest.raises(AttributeError, match="immutable"):
        value.process.python = "x"


def test_equal_jobs_are_equal():
    """Jobs with the same values are equal; jobs that differ in one field are not."""
    assert spec(env={"A": "1"}, args=["x"]) == spec(env={"A": "1"}, args=("x",))
    assert spec().with_values(nodes=2) == spec(nodes=2) != spec()


def test_a_section_is_complete():
    value = spec(process={"isolation": "none"})

    assert value.section("process") == {
        "python": "",
        "isolation": "none",
        "gpus": 0,
        "source_limit_mb": 0.0,
    }


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/b/my train.v2.py", "my-train-v2"),
        (".py", "py"),
        ("", "job"),
        ("été/", "job"),
        ("__main__.py", "__main__"),
        ("a" * 99, "a" * 64),
    ],
)
def test_a_name_comes_from_the_script(script, name):
    """The default name is the stem of the script, reduced to the allowed characters."""
    assert default_name(script) == name


@given(st.text(st.characters(codec=None), max_size=100))
def test_every_script_gives_an_allowed_name(script):
    assert re.fullmatch(NAME_RULE, default_name(script))


@given(st.text(st.sampled_from("aZ0_-. \n\0é"), max_size=70))
def test_the_rule_for_names_matches_the_platforms(name):
    """A name is invalid exactly if it breaks the platform's rule."""
    allowed = 1 <= len(name) <= 64 and set(name) <= set("aZ0_-")

    assert any(p.startswith("name: ") for p in problems(name=name or "?")) != allowed


def test_a_name_that_is_not_a_text_is_reported():
    """With pydantic, the check of such a mapping never ended."""
    assert only_problem(env={5: "x"}) == "env[5]: must be one text or number"
    assert only_problem(process={5: "x"}).startswith("process[5]: no such key (allowed python, ")


def test_the_defaults_of_jobs_are_their_own():
    for values in ({}, {"modelarts": {"pool_id": "p"}}):
        first = spec(**values)
        first.modelarts.volumes.append({"name": "v"})
        first.modelarts.body["x"] = 1

        assert spec(**values).modelarts.volumes == []
        assert spec(**values).modelarts.body == {}
