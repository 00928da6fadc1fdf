"""Tests of the layers of a job's configuration: precedence, exact values and errors."""

import contextlib
import json
import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from cloudjob.config import Copied, load, show
from cloudjob.config.env_file import read_env_file
from cloudjob.config.schema import json_schema
from cloudjob.errors import SpecError, UsageError
from cloudjob.model.job import SECTIONS, JobSpec, masked
from cloudjob.model.rules import BACKENDS, VARIABLE_RULE
from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.stores import STORE_SECTIONS

ROOT = Path(__file__).parents[4]

# Text that both a YAML file and the environment can hold: no NUL and no lone surrogates.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
NAMES = st.from_regex(VARIABLE_RULE, fullmatch=True).filter(
    lambda name: not name.startswith(("MA_", "CLOUDJOB_"))
)


@pytest.fixture
def environ():
    """Return an environment with an empty user file, so that the real one has no effect."""
    return {"CLOUDJOB_CONFIG": os.devnull}


@pytest.fixture
def job(tmp_path, environ):
    """Return a function that loads a job file with this text, together with flags."""

    def loaded(text="", flags=None, **options):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "job.yaml").write_bytes(data)
        return load(
            {"script": "train.py", **(flags or {})},
            **{"job_file": "job.yaml", "cwd": tmp_path, "environ": environ, **options},
        )

    return loaded


def problems_of(job, *args, **options):
    """Return the problems reported when a job is loaded, each of which must fit on one line."""
    with pytest.raises(SpecError) as caught:
        job(*args, **options)
    assert all(problem.isprintable() for problem in caught.value.problems)
    return list(caught.value.problems)


# --- layers


def test_an_input_that_is_a_path_is_relative_to_the_folder_of_the_file_that_names_it(job, tmp_path):
    loaded = job("inputs: {A: ./a b, B: s3://bucket/x}", flags={"inputs": {"C": "/c", "D": ".."}})

    assert loaded.spec.inputs == {
        "A": f"file://{tmp_path}/a%20b", "B": "s3://bucket/x", "C": "file:///c",
        "D": f"file://{tmp_path.parent}",
    }  # fmt: skip
    assert "is not a URI (given 'data'" in problems_of(job, "inputs: {A: data}")[0]
    of_sweep = job("inputs: {A: './d/{i}'}\nsweep: {i: '1,2'}")
    assert of_sweep.spec.inputs["A"] == f"file://{tmp_path}/d/{{i}}"


def test_a_script_alone_is_a_job(job, tmp_path):
    loaded = job(job_file=None)

    assert loaded.spec == JobSpec(script="train.py", source=str(tmp_path))
    assert loaded.origins["script"] == "command line"
    assert "nodes" not in loaded.origins


def test_the_nearest_layer_wins(job, tmp_path, environ):
    """Options take precedence over the job file, the project's file and the user's file."""
    user = tmp_path / "user.yaml"
    user.write_text("nodes: 1\nprocs_per_node: 1\nretries: 1\ngrace_s: 1\nenv: {A: u, U: u}\n")
    (tmp_path / "cloudjob.yaml").write_text(
        "nodes: 2\nprocs_per_node: 2\nretries: 2\nenv:\n  A: p\n  P: p\n"
    )
    loaded = job(
        "nodes: 3\nprocs_per_node: 3\nenv: {A: j, J: j}\nprocess: {isolation: none}",
        {"nodes": "4", "env": {"A": "f"}},
        environ={"CLOUDJOB_CONFIG": str(user)},
    )

    spec = loaded.spec
    assert (spec.nodes, spec.procs_per_node, spec.retries, spec.grace_s) == (4, 3, 2, 1.0)
    assert spec.env == {"A": "f", "U": "u", "P": "p", "J": "j"}
    assert {key: loaded.origins[key] for key in ("nodes", "procs_per_node", "retries")} == {
        "nodes": "--nodes",
        "procs_per_node": "job.yaml:2",
        "retries": "cloudjob.yaml:3",
    }
    assert loaded.origins["env.A"] == "--env"
    assert loaded.origins["env.P"] == "cloudjob.yaml:6"
    assert loaded.origins["env.U"] == f"{user}:5"
    assert loaded.origins["process.isolation"] == "job.yaml:4"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("-x.py", "./-x.py"),
        ("{source}/a/train.py", "a/train.py"),
        ("{link}/a/train.py", "a/train.py"),
        ("{source}/../other/train.py", None),
        ("/etc/passwd", None),
        ("{source}", None),
    ],
)
def test_a_script_is_named_as_the_nodes_find_it(job, tmp_path, script, expected):
    """An absolute path in the source is accepted, and a name is never taken for an option."""
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to("source")
    script = script.format(source=tmp_path / "source", link=tmp_path / "link")
    flags = {"script": script, "source": str(tmp_path / "source")}

    if expected is None:
        with pytest.raises(SpecError, match="must be relative to the source folder"):
            job("", flags)
    else:
        assert job("", flags).spec.script == expected
        assert job("", {**flags, "launcher": "command"}).spec.script == script


@pytest.mark.parametrize("mark", [".git", "pyproject.toml", "cloudjob.yaml", ""])
def test_the_project_of_a_script_outside_the_current_folder_is_the_source(job, tmp_path, mark):
    """The source is the nearest folder above that looks like a project, else the script's own."""
    project, current_folder = tmp_path / "project", tmp_path / "here"
    (project / "src").mkdir(parents=True)
    current_folder.mkdir()
    if mark:
        (project / mark).touch()
    (project / "src" / "train.py").touch()
    source = project if mark else project / "src"

    for script in ("../project/src/train.py", str(project / "src" / "train.py")):
        loaded = job(flags={"script": script}, job_file=None, cwd=current_folder)
        assert Path(loaded.spec.source) == source
        assert loaded.spec.script == ("src/train.py" if mark else "train.py")
        assert loaded.chosen_source.startswith(f"source {source}: the ")
        assert loaded.origins["source"] == "the script's path"
        with pytest.raises(SpecError, match=r"outside the source|relative to the source"):
            job(flags={"script": script, "source": "."}, job_file=None, cwd=current_folder)
        command = job(
            flags={"script": script, "launcher": "command"}, job_file=None, cwd=current_folder
        )
        assert command.spec.source == str(current_folder)


def test_a_world_writable_folder_does_not_become_the_source_by_itself(job, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "train.py").touch()
    (tmp_path / "here").mkdir()

    with pytest.raises(SpecError, match="must be relative to the source folder"):
        job(flags={"script": str(shared / "train.py")}, job_file=None, cwd=tmp_path / "here")


def test_a_system_folder_does_not_become_the_source_by_itself(job, tmp_path):
    with pytest.raises(SpecError, match="must be relative to the source folder"):
        job(flags={"script": "/etc/passwd"}, job_file=None, cwd=tmp_path)


def test_a_script_may_start_from_the_current_folder(job, tmp_path):
    """Shells complete paths from the current folder, whatever the source is."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    flags = {"script": "project/train.py", "source": "project"}

    assert job(flags=flags, job_file=None).spec.script == "train.py"


def test_a_project_file_that_is_a_named_pipe_is_not_waited_for(job, tmp_path):
    os.mkfifo(tmp_path / "cloudjob.yaml")

    with pytest.raises(UsageError, match=r"reading project file: cloudjob.yaml: is a named pipe"):
        job()


def test_the_job_file_may_give_script_and_args(job):
    """A job file can describe the whole job; the command line takes precedence."""
    text = "script: file.py\nargs: [--epochs, 3, yes, '']"

    assert job(text, {"script": None}).spec.script == "file.py"
    assert job(text, {"script": None}).spec.args == ("--epochs", "3", "yes", "")
    assert job(text, {"args": ["x"]}).spec.args == ("x",)


def test_the_project_file_is_searched_in_the_source(job, tmp_path):
    (tmp_path / "cloudjob.yaml").write_text("nodes: 2")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "cloudjob.yaml").write_text("nodes: 3")

    loaded = job("", {"source": "src"})

    assert loaded.spec.nodes == 3
    assert loaded.spec.source == str(tmp_path / "src")


def test_a_project_file_as_job_file_is_read_once(job, tmp_path):
    """Its problems are not reported twice."""
    (tmp_path / "cloudjob.yaml").write_text("node: 2")

    assert len(problems_of(job, "", job_file="cloudjob.yaml")) == 1


def test_paths_in_a_file_are_relative_to_it(job, tmp_path):
    """A job file works from any folder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "token").write_text("t")
    (tmp_path / "sub" / "job.yaml").write_text("source: code\nsecrets: {T: '@token'}")

    spec = job("", job_file="sub/job.yaml").spec

    assert spec.source == str(tmp_path / "sub" / "code")
    assert spec.secrets == {"T": "t"}


def test_a_null_value_counts_as_missing(job, tmp_path):
    """An empty value counts as missing, unless the key allows an empty one."""
    (tmp_path / "cloudjob.yaml").write_text("nodes: 2\nenv: {A: p}")
    spec = job("nodes:\nname: ~\nenv: {A: null, B: '', C: 'null'}\noutputs: {M: }\nprocess:").spec

    assert (spec.nodes, spec.name) == (2, "train")
    assert spec.env == {"A": "p", "B": "", "C": "null"}
    assert spec.outputs == {"M": ""}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~", "{}", "\ufeff", "\r\n"])
def test_an_empty_file_sets_nothing(job, text):
    """A file without keys is valid."""
    assert job(text).spec.nodes == 1


# --- exactness


PLAIN_SCALARS = [
    "yes",
    "no",
    "on",
    "off",
    "true",
    "0123",
    "0x10",
    "1e3",
    "1_000",
    "1:30",
    "2024-01-01",
]
PLAIN_SCALARS += [".5", ".inf", "=", "+1", "0o7", "12345678901234567890", "1.10", "Null!", "<<"]


@pytest.mark.parametrize("scalar", PLAIN_SCALARS)
def test_a_plain_scalar_in_yaml_stays_text(job, scalar):
    """YAML's implicit types do not change the values of variables."""
    assert job(f"env: {{A: {scalar}}}").spec.env["A"] == scalar


VALUES = st.fixed_dictionaries(
    {
        "env": st.dictionaries(NAMES, TEXT, max_size=4),
        "args": st.lists(TEXT, max_size=4),
        "image": TEXT,
        "nodes": st.integers(1, 10_000),
        "grace_s": st.floats(0, 86_400),
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=VALUES, unicode=st.booleans(), style=st.sampled_from([None, "'", '"', "|", ">"]))
@example(values={"env": {"y": "\x85\u2028\ufeff"}, "args": ["\r\n"]}, unicode=False, style="|")
def test_what_is_dumped_is_loaded(job, values, unicode, style):
    """Every string and number is read back exactly, in every YAML style."""
    text = yaml.safe_dump(values, allow_unicode=unicode, default_style=style)
    # With allow_unicode, PyYAML writes U+0085 unescaped, which YAML 1.1 reads as a line break.
    assume(yaml.safe_load(text) == values)

    spec = job(text).spec

    assert {**values, "args": list(spec.args)} == values
    assert {name: getattr(spec, name) for name in values if name != "args"} == {
        name: value for name, value in values.items() if name != "args"
    }


def test_option_values_keep_every_byte(job):
    """Bytes that are not UTF-8 on the command line are kept."""
    spec = job("", {"args": ["\udcff", ""], "env": {"A": "\udcfe=\n"}, "image": " x "}).spec

    assert (spec.args, spec.env["A"], spec.image) == (("\udcff", ""), "\udcfe=\n", " x ")


def test_aliases_are_followed(job):
    """A value may be written once and used twice."""
    assert job("env: {A: &a x, B: *a}").spec.env == {"A": "x", "B": "x"}


# --- faults


def test_every_problem_in_every_file_is_reported_at_once(job, tmp_path):
    """One run reports every error, each with its line."""
    (tmp_path / "cloudjob.yaml").write_text("nodez: 2\nretries: many\n")
    text = (
        "nodes: 0\nprocs-per-node: 2\nenv:\n  A: [1]\n  MA_X: y\ngrace_s: 1 s\nprocess: {pyton: x}"
    )

    assert problems_of(job, text, {"timeout_min": "soon", "secrets": {"T": ""}}) == [
        "cloudjob.yaml:1: nodez: no such key, did you mean 'nodes'?",
        "cloudjob.yaml:2: retries: is not a whole number (given 'many'; allowed 0 to 10)",
        "job.yaml:1: nodes: is out of range (given 0; allowed 1 to 10000)",
        "job.yaml:2: procs-per-node: no such key, did you mean 'procs_per_node'?",
        "job.yaml:4: env.A: must be one text or number",
        "job.yaml:5: env.MA_X: uses a reserved name "
        "(given 'MA_X'; all names with MA_ are reserved)",
        "job.yaml:6: grace_s: is not a number (given '1 s'; allowed 0 to 86400)",
        "job.yaml:7: process.pyton: no such key, did you mean 'python'? "
        "(allowed python, isolation, gpus, source_limit_mb)",
        "timeout_min: is not a number (given 'soon'; allowed 0 to 525600)",
        "secrets.T: is not set in your environment (allowed: set it, or name a @FILE)",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "job.yaml:1: must be a mapping of keys to values"),
        ("nodes", "job.yaml:1: must be a mapping of keys to values"),
        ("nodes: 1\nnodes: 2", "job.yaml:2: nodes: given twice (first on line 1)"),
        ("env:\n  A: 1\n  A: 2", "job.yaml:3: env.A: given twice (first on line 2)"),
        ("a: &a {A: x}\nenv:\n  <<: *a", "job.yaml:3: merge keys (<<) are not supported;"),
        ("modelarts: {body: {a: 1, a: 2}}", "modelarts.body.a: given twice (first on line 1)"),
        ("kubernetes: {pod: {<<: {a: 1}}}", "job.yaml:1: merge keys (<<) are not supported;"),
        ("kubernetes: {pod: {[a]: 1}}", "job.yaml:1: a key must be one plain word"),
        ('env: {"A\\n": x}', "job.yaml:1: a key must be one plain word"),
        ("? [a]\n: 1", "job.yaml:1: a key must be one plain word"),
        ("env: [A]", "job.yaml:1: env: must be a mapping, NAME: value"),
        ("args: --lr 3", "job.yaml:1: args: must be a list of texts"),
        ("args:\n- a\n- [b]", "job.yaml:3: args[1]: must be one text or number"),
        ("process: fast", "job.yaml:1: process: must be a mapping of keys to values"),
        ("nodes: {}", "job.yaml:1: nodes: must be one text or number"),
        ("nodes: 2.0", "job.yaml:1: nodes: is not a whole number (given '2.0'"),
        ("nodes: ''", "job.yaml:1: nodes: is not a whole number (given ''"),
        ("nodes: 1_0", "job.yaml:1: nodes: is not a whole number"),
        ("nodes: ٣", "job.yaml:1: nodes: is not a whole number"),
        ("nodes: true", "job.yaml:1: nodes: is not a whole number"),
        (f"nodes: {'9' * 5000}", "job.yaml:1: nodes: is not a whole number"),
        ("timeout_min: .nan", "job.yaml:1: timeout_min: is not a number (given '.nan'"),
        ("timeout_min: 1e999", "job.yaml:1: timeout_min: is out of range (given inf"),
        ("image: !!binary aGk=", "job.yaml:1: image: must be one text or number"),
        ("image: !mine x", "job.yaml:1: image: must be one text or number"),
        ("image: !!python/name:os.system ''", "job.yaml:1: image: must be one text or number"),
        ("env: &a {A: *a}", "job.yaml:1: env.A: must be one text or number"),
        ('env: {A: "\\0"}', "job.yaml:1: env.A: contains a NUL character"),
        ("secrets: TOKEN", "job.yaml:1: secrets: must be a mapping, or a list of names"),
        ("nomad: {engine: volcano}", "job.yaml:1: nomad: no such key"),
        ("sections: {}", "job.yaml:1: sections: no such key"),
        ("backend: dokcer", "job.yaml:1: backend: is not known, did you mean 'docker'?"),
        ("launcher: mpirum", "job.yaml:1: launcher: is not known, did you mean 'mpirun'?"),
        ("script: ../x.py", "script: lies outside the source folder"),
    ],
)
def test_a_bad_value_is_named_with_its_line(job, text, problem):
    """Each fault is reported once, with file, line and key."""
    flags = {"script": None} if text.startswith("script") else {}
    problems = [p for p in problems_of(job, text, flags) if not p.endswith("a: no such key")]

    assert len([p for p in problems if problem in p]) == 1, problems


# Ten lines whose aliases expand to a billion values.
ALIAS_BOMB = "modelarts:\n  body:\n    a0: &a0 [x]\n" + "".join(
    f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "position", "message", "hint"),
    [
        ("nodes: 1\n\tenv: 2", "2:1", "tab|token", "tabs"),
        ("env:\n  A: [1", "3:1|2:8|2:6", "", "spaces"),
        ("a: b: c", "1:5", "mapping values are not allowed", "': '"),
        ("nodes: 1\n---\nnodes: 2", "2:1", "another document", "YAML"),
        (b"name: \xff\n", "1:7", "not UTF-8 text", "UTF-8"),
        (b"\xff\xfen\0o\0", "1:1", "not UTF-8 text", "UTF-8"),
        ("name: x\nimage: a\0b", r"\d+:\d+", "control characters", ""),
        ("env: {A: *b}", "1:10", "undefined alias", ""),
        ("[" * 100_000, r"1:\d+", "nested more than 20 deep|maximum nesting depth", ""),
        ("{a: " * 100_000, r"1:\d+", "nested more than 20 deep", ""),
        ("modelarts: {body: &a {x: *a}}", r"1:\d+", "nested more than 20 deep", ""),
        (ALIAS_BOMB, r"\d+:\d+", "holds more than 20000 values, aliases expanded", ""),
        ("modelarts: {body: {a: !!int x}}", "1:23", "JSON has no such int; quote the value", ""),
        ("modelarts: {body: {a: !!bool x}}", "1:23", "JSON has no such bool", ""),
        ("modelarts: {body: {a: .nan}}", "1:23", "JSON has no such float", ""),
        (f"modelarts: {{body: [{'9' * 5000}]}}", "1:20", "JSON has no such int", ""),
    ],
)
def test_a_broken_file_is_reported_in_one_line(job, text, position, message, hint):
    with pytest.raises(UsageError) as caught:
        job(text)

    assert re.match(rf"reading job file: job\.yaml(:({position}))?: ", caught.value.message)
    assert re.search(message, caught.value.message)
    assert hint in caught.value.hint
    assert not isinstance(caught.value, SpecError)


@pytest.mark.parametrize("name", ["gone.yaml", "folder", "a\0b", "job.yaml/x", "/dev/zero"])
def test_a_file_that_cannot_be_read_is_reported_in_one_line(job, tmp_path, name):
    """A job file that is missing, a folder or endless is reported with a hint."""
    (tmp_path / "folder").mkdir()

    with pytest.raises(UsageError, match="reading job file: ") as caught:
        job("", job_file=name)
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_a_user_file_that_is_named_must_exist(job, tmp_path):
    """The file in CLOUDJOB_CONFIG must exist; the user's default file may be absent."""
    with pytest.raises(UsageError, match="reading user file"):
        job("", environ={"CLOUDJOB_CONFIG": str(tmp_path / "gone")})


def test_the_users_own_file_is_found(job, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert job("", environ={}).spec.retries == 0

    (tmp_path / "cloudjob").mkdir()
    (tmp_path / "cloudjob" / "config.yaml").write_text("retries: 3")
    assert job("", environ={}).spec.retries == 3


def test_a_project_file_that_is_a_folder_is_reported(job, tmp_path):
    (tmp_path / "cloudjob.yaml").mkdir()

    with pytest.raises(UsageError, match=r"reading project file: cloudjob\.yaml: "):
        job("")


YAML_FRAGMENTS = [
    "modelarts: ",
    "kubernetes: ",
    "body: ",
    "pod: ",
    "env: ",
    "secrets: ",
    "nodes: ",
    "args: ",
]
YAML_FRAGMENTS += [
    "&a ",
    "*a",
    "!!int x",
    "!!bool ",
    ".nan",
    "0b_",
    "1:30",
    "<<: ",
    "? ",
    '"\\ud800"',
    '"\\0"',
]
YAML_FRAGMENTS += ["{", "}", "[", "]", ", ", "- ", "\n", "  ", "~", "@f", "A", "9" * 5000]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.text("ab:-?[]{}&*!|>'\"%@ \t\n#~<1").map(str.encode)
    | st.lists(st.sampled_from(YAML_FRAGMENTS), max_size=16).map(
        lambda fragments: "".join(fragments).encode()
    )
)
def test_no_job_file_causes_a_traceback(job, data):
    with contextlib.suppress(UsageError):
        job(data)


# --- secrets


def test_a_secret_comes_from_the_environment_or_a_file(job, tmp_path, environ):
    """Names refer to variables; a file is read byte for byte, including its last newline."""
    (tmp_path / "token").write_bytes(b"t\xff\n")
    environ |= {"A": "a", "B": "b"}

    assert job("secrets: [A, B]").spec.secrets == {"A": "a", "B": "b"}
    assert job("secrets: {A: , T: '@token'}").spec.secrets == {"A": "a", "T": "t\udcff\n"}
    assert job("secrets: [A]", {"secrets": {"T": "@token"}}).spec.secrets == {
        "A": "a",
        "T": "t\udcff\n",
    }


def test_a_secret_is_never_written_down(job):
    """A literal value is refused without repeating it, in a file and as a flag."""
    problems = problems_of(job, "secrets: {A: hunter2}", {"secrets": {"B": "hunter2"}})

    assert [p.split(": a secret's")[0] for p in problems] == ["job.yaml:1: secrets.A", "secrets.B"]
    assert "hunter2" not in "".join(problems)


@pytest.mark.parametrize("flag", ["", "@gone", "@.", "@a\0b"])
def test_a_missing_secret_is_an_error(job, flag):
    """A missing variable or file is reported under the name of the secret."""
    (problem,) = problems_of(job, "", {"secrets": {"T": flag}})

    assert problem.startswith("secrets.T: ")


def test_a_name_in_both_env_and_secrets_is_an_error(job, environ):
    """The two may come from different layers."""
    environ["A"] = "hunter2"

    assert problems_of(job, "env: {A: x}", {"secrets": {"A": ""}}) == [
        "secrets.A: is also in env (allowed: each name once)"
    ]


def test_a_secret_file_that_never_ends_is_too_long(job):
    """No more is read than a variable can hold."""
    (problem,) = problems_of(job, "", {"secrets": {"T": "@/dev/urandom"}})

    assert "NUL" in problem or "too long" in problem


# --- show


def test_show_names_every_value_and_its_origin(job, environ):
    """The command `config show` prints a row for every key, with asterisks for secrets."""
    environ["T"] = "hunter2"
    rows = show(job("env: {A: x}\nargs: [a b, c]\nsecrets: [T]"))

    assert ("env.A", "x", "job.yaml:1") in rows
    assert ("args", "'a b' c", "job.yaml:2") in rows
    assert ("secrets.T", "***", "job.yaml:3") in rows
    assert ("nodes", "1", "default") in rows
    assert ("process.isolation", "auto", "default") in rows
    assert "hunter2" not in str(rows)


def test_show_needs_no_script(job):
    """A configuration can be shown without a script, but other faults are still reported."""
    loaded = job("nodes: 2", {"script": None}, needs_script=False)

    assert ("script", "", "default") in show(loaded)
    assert problems_of(job, "nodes: 0", {"script": None}, needs_script=False)


# --- schema, documentation, profiles


def accepts(value):
    """Return whether the schema accepts this job file, as an editor would check it."""
    return jsonschema.Draft202012Validator(json_schema()).is_valid(value)


def test_the_schema_is_valid_and_describes_every_key():
    """It also conforms to its draft of JSON Schema, and is plain JSON."""
    schema = json_schema()

    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert list(schema["properties"]) == list(JobSpec.KEYS)
    for model in (schema, *schema["$defs"].values()):
        assert all(
            "description" in key or "$ref" in str(key) for key in model["properties"].values()
        )
        assert model["description"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nodes: 2\nenv: {A: yes, B: 1, C: ~}\nsecrets: [T]\nargs: [1, a]",
        "secrets: {A: '@f', B: }\noutputs: {M: }\nprocess: {isolation: none}",
    ],
)
def test_the_schema_accepts_good_files(text):
    """An editor accepts what cloudjob accepts."""
    assert accepts(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "node: 2",
        "nodes: 0",
        "nodes: two",
        "env: {MA_X: 1}",
        "env: {1A: 1}",
        "env: [A]",
        "secrets: {A: x}",
        "backend: proces",
        "name: a b",
        "process: {isolation: full}",
        "process: {pyton: x}",
        "retries: 11",
        "retries: many",
        "retry: {on: [hangs]}",
    ],
)
def test_the_schema_refuses_bad_files(job, text):
    """An editor reports what cloudjob refuses."""
    assert not accepts(yaml.safe_load(text))
    assert problems_of(job, text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_profile_is_complete_and_good(job, backend):
    """configs/BACKEND.yaml shows each key of the backend, process.yaml all; it loads unchanged."""
    text = (ROOT / "configs" / f"{backend}.yaml").read_text()

    assert job(text).spec.backend == backend
    keys = re.findall(r"^#? ?([a-z0-9_]+):", text, re.MULTILINE)
    common = JobSpec.KEYS.keys() - SECTIONS.keys() if backend == "process" else set()
    assert set(keys) >= common | {backend, *STORE_SECTIONS}
    inner = re.findall(r"^#?  +([a-z_]+):", text, re.MULTILINE)
    sections = (SECTIONS[name] for name in (backend, "notify", *STORE_SECTIONS))
    assert set(inner) >= {key for section in sections for key in section.KEYS}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_profile_is_good_with_every_comment_opened(job, environ, backend):
    text = (ROOT / "configs" / f"{backend}.yaml").read_text()
    uncommented = re.sub(r"^# ?(?=( *[A-Za-z0-9_]+:| *- )( |$|[^ ]))", "", text, flags=re.MULTILINE)
    environ |= {"WANDB_API_KEY": "x"}

    assert job(uncommented).spec.launcher in ("auto", *LAUNCHERS)


MODELARTS = """
backend: modelarts
modelarts:
  region: cn-north-4
  parameters: {epochs: 3, lr.decay: 0.1}
  tags: {team/name: vision}
  ssh_keys: [mine, yours]
  preemptible: true
  volumes: [{nfs: {local_path: /d, read_only: true}}]
  body:
    spec: {notification: {events: [JobFailed], since: 2026-01-31}, gone: null, count: 2}
"""


def test_a_section_has_maps_lists_and_trees(job):
    """Values of maps are text, and YAML that is passed on unchanged keeps JSON's types."""
    loaded = job(MODELARTS)
    section = loaded.spec.sections["modelarts"]

    assert section["parameters"] == {"epochs": "3", "lr.decay": "0.1"}
    assert section["tags"] == {"team/name": "vision"}
    assert section["ssh_keys"] == ("mine", "yours")
    assert section["preemptible"] is True
    assert section["volumes"] == [{"nfs": {"local_path": "/d", "read_only": True}}]
    assert section["body"] == {
        "spec": {
            "notification": {"events": ["JobFailed"], "since": "2026-01-31"},
            "gone": None,
            "count": 2,
        }
    }
    rows = {key: (value, origin) for key, value, origin in show(loaded)}
    assert rows["modelarts.parameters.epochs"][0] == "3"
    assert accepts(yaml.safe_load(MODELARTS.replace("since: 2026-01-31", "since: x")))


@pytest.mark.parametrize(
    "text",
    [
        "modelarts: {volumes: {a: b}}",
        "modelarts: {body: [a]}",
        "modelarts: {body: text}",
        "modelarts: {priority: 4}",
        "modelarts: {affinity: rack}",
        "modelarts: {ssh_keys: mine}",
        "modelarts: {tags: [a]}",
    ],
)
def test_each_problem_of_a_section_is_reported(job, text):
    assert problems_of(job, text)[0].split(": ")[1].startswith("modelarts.")
    assert not accepts(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("user", "text", "flags", "expected"),
    [
        ("", "process: {source_limit_mb: 7}", {}, (7, "job.yaml:1")),
        ("", "process: {source_limit_mb: 7}\nsource_limit_mb: 9", {}, (7, "job.yaml:1")),
        ("", "docker: {source_limit_mb: 7}", {}, (100, "default")),
        ("", "docker: {source_limit_mb: 7}", {"backend": "docker"}, (7, "job.yaml:1")),
        ("process: {source_limit_mb: 7}", "source_limit_mb: 9", {}, (9, "job.yaml:1")),
        ("source_limit_mb: 9", "process: {source_limit_mb: 7}", {}, (7, "job.yaml:1")),
        ("", "process: {source_limit_mb: 7}", {"source_limit_mb": 9}, (9, "--source-limit-mb")),
        ("", "process: {source_limit_mb: 7}", {"source_limit_mb": 0}, (0, "--source-limit-mb")),
        ("process: {source_limit_mb: 7}", "process: {source_limit_mb: 0}", {}, (100, "default")),
        ("source_limit_mb: 9", "process: {source_limit_mb: 0}", {}, (9, "user.yaml:1")),
    ],
)
def test_a_backend_has_its_own_limit(job, tmp_path, user, text, flags, expected):
    """The nearest layer decides, and in it the backend's key; a copied job keeps the limit."""
    (tmp_path / "user.yaml").write_text(user)
    environ = {"CLOUDJOB_CONFIG": str(tmp_path / "user.yaml")}

    loaded = job(text, flags, environ=environ)

    origin = {key: source for key, _, source in show(loaded)}["source_limit_mb"]
    assert (loaded.spec.source_limit_mb, origin.rpartition("/")[2]) == expected
    copied = load(
        {},
        job_file=None,
        cwd=tmp_path,
        environ=environ,
        copied=Copied("job x", masked(loaded.spec)),
    )
    assert copied.spec == loaded.spec


def test_a_job_that_is_copied_is_the_same_job(job, tmp_path, environ):
    environ["TOKEN"] = "s3cret"
    first = job(
        MODELARTS + "script: t.py\nenv: {A: '1', B: x}\nsecrets: [TOKEN]\nargs: [a, b]"
    ).spec
    (tmp_path / "cloudjob.yaml").write_text("env: {NEW: x}")

    def copied(**flags):
        return load(
            flags,
            job_file=None,
            cwd=tmp_path,
            environ=environ,
            copied=Copied("job x", masked(first)),
        ).spec

    assert copied() == first
    assert copied(env={"A": "2"}).env == {"A": "2", "B": "x"}
    assert copied(args=("c",)).args == ("c",)
    environ.pop("TOKEN")
    with pytest.raises(SpecError) as caught:
        copied()
    assert caught.value.problems[0].startswith("job x: secrets.TOKEN: is not set")


def test_a_variable_that_is_recorded_masked_is_given_again_for_a_copy(job, tmp_path, environ):
    first = masked(job("script: t.py\nenv: {DB_PASSWORD: pw, HF_TOKEN: ''}").spec)

    def copied(**flags):
        return load(
            flags, job_file=None, cwd=tmp_path, environ=environ, copied=Copied("job x", first)
        ).spec

    again = copied(env={"DB_PASSWORD": "new"}).env
    assert again == {"DB_PASSWORD": "new", "HF_TOKEN": ""}
    with pytest.raises(SpecError) as caught:
        copied()
    assert "env.DB_PASSWORD: was recorded with ***" in caught.value.problems[0]


# --- env files


@pytest.fixture
def env_file(tmp_path):
    """Return a function that returns the variables of an env file with these bytes."""

    def read(data, environ=None):
        path = tmp_path / "job.env"
        path.write_bytes(data)
        return read_env_file(path, environ or {})

    return read


@pytest.mark.parametrize(
    ("data", "variables"),
    [
        (b"", {}),
        (b"A=1", {"A": "1"}),
        (b"\xef\xbb\xbfA=1\r\nB= 2 \r\n", {"A": "1", "B": " 2 "}),
        (b"# A=1\n\n  \n  B=2\n", {"B": "2"}),
        (b"A=x # y\nB==\nC=$A `b` \\n\n", {"A": "x # y", "B": "=", "C": "$A `b` \\n"}),
        (b"export A=1\nexport\tB=2", {"A": "1", "B": "2"}),
        (b"A=\nB=''\nC=\"\"", {"A": "", "B": "", "C": ""}),
        (b"A='a \\n $b \"c\"'", {"A": 'a \\n $b "c"'}),
        (b'A="a\\n\\t\\"\\\\\\$b\\x"', {"A": 'a\n\t"\\$b\\x'}),
        (b'A="one\ntwo=2\n# three"\nB=3', {"A": "one\ntwo=2\n# three", "B": "3"}),
        (b"A='\n'  \nB=3", {"A": "\n", "B": "3"}),
        (b'A="one\r\ntwo"\r\nB=1\r\n', {"A": "one\r\ntwo", "B": "1"}),
        (b"A='one\r\ntwo\r'\nB=1\n", {"A": "one\r\ntwo\r", "B": "1"}),
        (b"A=it's\nB=\"", None),
        (b"A=it's", {"A": "it's"}),
        (b"A=\xff\xfe", {"A": "\udcff\udcfe"}),
        (b"A=1\nA=2", {"A": "2"}),
        (b"A=\x0b\x0c\x85\xe2\x80\xa8", {"A": "\x0b\x0c\udc85\u2028"}),
    ],
)
def test_an_env_file_is_read_exactly(env_file, data, variables):
    """Values are literal and quotes are optional; Windows line endings belong to quoted values."""
    if variables is None:
        with pytest.raises(UsageError):
            env_file(data)
    else:
        assert env_file(data) == variables


def test_a_name_alone_is_taken_from_the_environment(env_file):
    assert env_file(b"A\nexport B \nC\n", {"A": "1", "B": "2"}) == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"A=1\n1B=2", 2),
        (b"A =1", 1),
        (b"=1", 1),
        (b"A=1\nnot a line", 2),
        (b"\n\nA='never\nclosed", 3),
        (b'A="x" y', 1),
        (b'A="x\ny" z', 1),
        (b"\xff=1", 1),
        (b"A-B", 1),
    ],
)
def test_a_bad_line_of_an_env_file_is_named(env_file, tmp_path, data, line):
    """The error names the file and the line where the fault begins."""
    with pytest.raises(UsageError) as caught:
        env_file(data)

    assert caught.value.message.startswith(f"reading env file: {tmp_path / 'job.env'}:{line}: ")
    assert caught.value.message.isprintable()
    assert caught.value.hint


@pytest.mark.parametrize("name", ["gone", ".", "a\0b", "/dev/zero"])
def test_an_env_file_that_cannot_be_read_is_reported_in_one_line(tmp_path, name):
    """A missing file, a folder and an endless file are usage errors."""
    with pytest.raises(UsageError, match="reading env file: "):
        read_env_file(tmp_path / name, {})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40) | st.text("A1=\"'\\ n$#\n\r\t").map(str.encode))
def test_no_env_file_causes_a_traceback(env_file, data):
    try:
        variables = env_file(data)
    except UsageError:
        return
    assert all(re.fullmatch(VARIABLE_RULE, name) for name in variables)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, st.binary(max_size=20).filter(lambda v: b"\r" not in v)))
def test_every_value_can_be_written_in_quotes(env_file, variables):
    lines = [
        name.encode() + b'="' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
        for name, value in variables.items()
    ]
    expected = {n: v.decode("utf-8", "surrogateescape") for n, v in variables.items()}

    assert env_file(b"\n".join(lines)) == expected


def test_retries_as_a_mapping_are_short_for_the_number_and_the_section(job):
    loaded = job("retries:\n  max: 3\n  on: [platform, hang]\n  backoff_s: 10\n")

    assert loaded.spec.retries == 3
    assert (loaded.spec.retry.on, loaded.spec.retry.backoff_s) == (("platform", "hang"), 10.0)
    assert loaded.origins["retries"].endswith("job.yaml:2")
    assert loaded.origins["retry.on"].endswith("job.yaml:3")


def test_the_parts_of_retries_come_from_several_layers(job):
    """The mapping of a file keeps the number of the command line, and the reverse."""
    assert job("retries: {on: [user]}", {"retries": "2"}).spec.retries == 2
    assert job("retries: {max: 1, on: [user]}", {"retries": "2"}).spec.retries == 2
    assert job("retries: {max: 1, on: [user]}", {"retries": "2"}).spec.retry.on == ("user",)


def test_errors_in_retries_name_their_lines(job):
    text = "retries:\n  max: many\n  on: [hangs]\n  often: 1\nretry: 3\n"
    problems = problems_of(job, text)

    assert [problem.partition(" (")[0] for problem in problems] == [
        "job.yaml:2: retries: is not a whole number",
        "job.yaml:5: retry: must be a mapping of keys to values",
    ]
