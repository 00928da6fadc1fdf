"""Tests of the request to Slurm: scripts, variables and files; only the shell is run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob import config
from cloudjob.backends.slurm import cluster, errors, request, script
from cloudjob.backends.slurm.cluster import SlurmCluster, SlurmHost
from cloudjob.errors import SpecError
from cloudjob.model.job import JobSpec
from cloudjob.model.submission import StoredCode, Submission, submission_of
from cloudjob.model.validation import conflicts
from jobentry.contract import env, variables
from tests.support.polling import poll

GOLDEN = Path(__file__).parents[3] / "golden"
LOCAL_CLUSTER = SlurmCluster(
    host=SlurmHost(),
    folder="/home/me/.local/share/cloudjob/slurm",
    paths={"PATH": "/opt/venv/bin:/usr/bin", "LANG": "C.UTF-8"},
    python="/opt/venv/bin/python",
    entry_python="/opt/venv/bin/python",
    entry="/opt/venv/lib/cloudjob/jobentry.pyz",
)
REMOTE_CLUSTER = LOCAL_CLUSTER._replace(
    host=SlurmHost("login1"), folder="~/.cloudjob/slurm", paths={}, python="", entry_python=""
)
ALL_OPTIONS = {
    "partition": "gpu",
    "account": "lab",
    "qos": "normal",
    "reservation": "course",
    "constraint": "a100&ib",
    "nodelist": "n[1-4]",
    "exclude": "n3",
    "time_min": 90,
    "cpus_per_rank": 8,
    "memory_gib": 64.0,
    "gpus": 4,
    "gres": "nvme:1",
    "exclusive": "true",
    "requeue": "true",
    "warn_s": 300,
    "scratch": "/local",
    "setup": ("module load openmpi/4.1", "export UCX_TLS=rc"),
    "sbatch": ("--licenses=matlab:1", "--mail-type=END"),
}


def submission(**values: object) -> Submission:
    """Return a job of two nodes of four ranks."""
    values_of_spec = {
        "script": "train.py",
        "args": ("--name", "it's $HOME"),
        "nodes": 2,
        "procs_per_node": 4,
        "backend": "slurm",
        "env": {"SEED": "7"},
        "secrets": {"TOKEN": "s3cr3t"},
        "outputs": {"MODEL": "", "LOGS": "s3://b/logs"},
        **values,
    }
    spec = JobSpec(**values_of_spec)
    assert conflicts(spec) == []
    return submission_of(
        spec,
        "train-2k83xnf2",
        code=StoredCode(
            "file:///st%20ore/train-2k83xnf2/code.json", "sha256:00", ("file:///x/layers/a",)
        ),
        record_uri="file:///st%20ore/train-2k83xnf2/record/exit.json",
        outputs_uri="file:///st%20ore/train-2k83xnf2/outputs",
    )


def built(target: SlurmCluster = LOCAL_CLUSTER, **values: object) -> request.SlurmRequest:
    """Return the request for a job."""
    return request.build(submission(**values), target)


def golden(name: str, text: str) -> None:
    """Compare the beginning of a script, before the part that all jobs share, with its golden file.

    A missing file is written, to be checked by hand.
    """
    shared = Path(script.__file__).with_name(name)
    if shared.exists():
        assert text.endswith(shared.read_text())
        text = text.removesuffix(shared.read_text())
    path = GOLDEN / f"slurm-{name}"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"wrote {path}: look at it")
    assert text == path.read_text()


def test_the_script_of_a_plain_job_matches_the_golden_file():
    golden("job.sh", built().job_script)


@pytest.mark.parametrize(
    ("launcher", "mpi", "uses_ssh"),
    [("command", "ssh", 1), ("mpirun", "ssh", 0), ("mpirun", "pmix", 0)],
)
def test_only_a_job_that_uses_ssh_makes_an_ssh_key(launcher, mpi, uses_ssh):
    """Other jobs need only a shared secret, and no OpenSSH program."""
    text = built(launcher=launcher, procs_per_node=1, slurm={"mpi": mpi}).job_script

    assert f"\nuses_ssh={uses_ssh}\n" in text


def test_the_scripts_of_every_node():
    """The job's arguments are quoted for the shell; secrets are not among them."""
    scripts = built(slurm=ALL_OPTIONS).node_scripts

    assert set(scripts) == {"node.sh", "clean.sh", "setup.sh", "start.sh", "enter.sh"}
    for name, text in scripts.items():
        golden(name, text)


def test_every_key_becomes_one_option_in_the_script():
    lines = built(slurm=ALL_OPTIONS).job_script.splitlines()

    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=cloudjob-train-2k83xnf2",
        "#SBATCH --output=slurm.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=90",
        "#SBATCH --mem=65536M",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab",
        "#SBATCH --qos=normal",
        "#SBATCH --reservation=course",
        "#SBATCH --constraint=a100&ib",
        "#SBATCH --nodelist=n[1-4]",
        "#SBATCH --exclude=n3",
        "#SBATCH --gres=nvme:1",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --licenses=matlab:1",
        "#SBATCH --mail-type=END",
    ]


@pytest.mark.parametrize(
    ("values", "time", "warning"),
    [
        ({}, "", "B:USR1@40"),
        ({"timeout_min": 30.0, "grace_s": 120.0}, "--time=42", "B:USR1@150"),
        ({"timeout_min": 30.0, "slurm": {"time_min": 31}}, "--time=31", "B:USR1@40"),
        # A warning due before the job's start would terminate the job at once.
        ({"slurm": {"time_min": 1, "warn_s": 600}}, "--time=1", "B:USR1@30"),
        ({"grace_s": 86_400.0}, "", "B:USR1@65535"),
    ],
)
def test_slurms_time_limit_includes_staging_and_cleanup(values, time, warning):
    """The entry enforces the job's limit; Slurm's limit is the fallback."""
    text = built(**values).job_script

    assert (f"#SBATCH {time}\n" in text) if time else ("--time" not in text)
    assert f"#SBATCH --signal={warning}\n" in text


def test_variables_are_in_a_file_and_not_in_a_script():
    """The file has the variables that all nodes share; each node determines its own."""
    job_request = built()

    assert job_request.env["TOKEN"] == "s3cr3t"
    assert job_request.env["SEED"] == "7"
    assert job_request.env["MA_SCRIPT_INTERPRETER"] == "/opt/venv/bin/python"
    assert not {"VC_TASK_INDEX", "VC_WORKER_HOSTS", "SSHD_PORT", "HOME", "MA_HOME"} & set(
        job_request.env
    )
    assert "s3cr3t" not in "".join([job_request.job_script, *job_request.node_scripts.values()])
    description = json.dumps(request.show(job_request))
    assert "s3cr3t" not in description
    assert '"TOKEN": "***"' in description


def test_each_entry_gets_the_variables_of_its_node():
    """A dry run uses these variables to plan the launch."""
    nodes = [env.read(environ) for environ in built().environments]

    assert [node.node for node in nodes] == [0, 1]
    assert {node.nodes for node in nodes} == {2}
    assert {node.slots for node in nodes} == {4}
    assert {node.secret_names for node in nodes} == {("TOKEN",)}


def test_with_a_host_the_files_of_the_store_are_sent_with_the_job():
    """Code, record and default outputs are in the job's folder on that host; other URIs stay."""
    job_request = built(REMOTE_CLUSTER)
    environ = request.located(job_request, "/home/me there/.cloudjob/slurm/train-2k83xnf2")

    assert job_request.local == "/st ore"
    assert job_request.layers == ("/x/layers/a",)
    assert not {"CLOUDJOB_CODE_URI", "CLOUDJOB_RECORD_URI"} & set(environ)
    assert json.loads(environ["CLOUDJOB_OUTPUTS"]) == {
        "MODEL": "file:///home/me%20there/.cloudjob/slurm/train-2k83xnf2/outputs/MODEL",
        "LOGS": "s3://b/logs",
    }
    assert "keeps_record=1\n" in job_request.node_scripts["start.sh"]
    assert 'set -- sh "$cloudjob_here/boot.sh"' in job_request.node_scripts["start.sh"]
    assert "setup_shell='/bin/bash -l'\n" in job_request.node_scripts["node.sh"]


def test_lines_of_setup_run_in_a_login_shell():
    """The command ``module`` is a function that only a login shell defines."""
    scripts = built(slurm=ALL_OPTIONS).node_scripts

    assert "setup_shell='/bin/bash -l'\n" in scripts["node.sh"]
    assert "module load openmpi/4.1\nexport UCX_TLS=rc\n" in scripts["setup.sh"]
    assert "scratch=/local\nsuffix=2k83xnf2\n" in scripts["node.sh"]


@pytest.mark.parametrize(
    ("options", "interpreter"),
    [
        ({}, ""),
        ({"setup": ("conda activate x",)}, "/opt/venv/bin/python"),
        ({"setup": ("conda activate x",), "python": "/usr/bin/python3"}, ""),
    ],
)
def test_only_a_job_with_setup_selects_its_interpreter_on_the_nodes(options, interpreter):
    job_request = built(slurm=options)

    assert ("MA_SCRIPT_INTERPRETER" in job_request.env) is (interpreter == "")
    assert f"interpreter={interpreter or shlex.quote('')}\n" in job_request.node_scripts["start.sh"]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_with_pmix_the_head_starts_ranks_by_srun(launcher):
    options = {"mpi": "pmix", "cpus_per_rank": 3}
    job_request = built(launcher=launcher, slurm=options)

    assert job_request.env["CLOUDJOB_LAUNCHER"] == "srun"
    assert "cpus_per_rank=3\n" in job_request.node_scripts["start.sh"]


def test_site_defaults_reach_sbatch_only_where_the_job_sets_nothing():
    job_request = built(slurm={"partition": "gpu"})

    assert job_request.inherited == ("SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sbatch": ("--nodes=3",)}, "slurm.sbatch[0]: --nodes is set by cloudjob"),
        ({"sbatch": ("-N3",)}, "slurm.sbatch[0]: -N is set by cloudjob"),
        ({"sbatch": ("--export=ALL",)}, "slurm.sbatch[0]: --export is set by cloudjob"),
        ({"sbatch": ("-Jx",)}, "slurm.sbatch[0]: -J is set by cloudjob"),
        ({"sbatch": ("-D/tmp",)}, "slurm.sbatch[0]: -D is set by cloudjob"),
        ({"sbatch": ("-HkN3",)}, "slurm.sbatch[0]: -N is set by cloudjob"),
        ({"sbatch": ("--job-nam=x",)}, "slurm.sbatch[0]: --job-name is set by cloudjob"),
        ({"sbatch": ("--mail-type=END --arr 0-3",)}, "slurm.sbatch[0]: --array is set by cloudjob"),
        ({"sbatch": ("-p gpu '-n' 7",)}, "slurm.sbatch[0]: -n is set by cloudjob"),
        ({"sbatch": ("licenses=x",)}, "slurm.sbatch[0]: is not an option of sbatch"),
        ({"sbatch": ("--comment='x",)}, "slurm.sbatch[0]: is not an option of sbatch"),
        ({"sbatch": ("--x\n#SBATCH --y",)}, "slurm.sbatch[0]: is not an option of sbatch"),
        ({"partition": "a b"}, "slurm.partition: contains a space"),
        ({"gres": "gpu:1\n#SBATCH --y"}, "slurm.gres: contains a space"),
        ({"folder": "jobs"}, "slurm.folder: is not an absolute path"),
        ({"scratch": "tmp"}, "slurm.scratch: is not an absolute path"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_sent(options, message):
    with pytest.raises(SpecError, match="^" + message.replace("[", r"\[").replace("]", r"\]")):
        built(slurm=options)


@pytest.mark.parametrize(
    "option",
    ["--wait-all-nodes=1", "-w n1", "-wnode1", "--mem-per-gpu=4G", "-pJobs", "--comment='-J x'"],
)
def test_options_that_only_resemble_reserved_ones_are_allowed(option):
    assert f"#SBATCH {option}\n" in built(slurm={"sbatch": (option,)}).job_script


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_pmix_is_ignored_for_launchers_without_mpi(launcher):
    """``slurm.mpi`` has no effect on them, since a profile may set it for all jobs."""
    job_request = built(launcher=launcher, procs_per_node=1, slurm={"mpi": "pmix"})

    assert job_request.env["CLOUDJOB_LAUNCHER"] == launcher


def test_an_unknown_key_is_reported_with_the_nearest_one(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("backend: slurm\nscript: a.py\nslurm:\n  partion: gpu\n")

    with pytest.raises(SpecError, match=r"job\.yaml:4: slurm\.partion: .*did you mean 'partition'"):
        config.load({}, job_file=str(path), cwd=tmp_path, environ={})


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=4))
def test_script_arguments_survive_the_shell(arguments):
    """The shell that runs start.sh restores blanks, quotes and newlines."""
    values = script.NodeText(
        "j", "/tmp", (), "/bin/python", "e.pyz", ("a.py", *arguments), {"P": "x"}, False
    )
    text = script.node_scripts(values)["start.sh"]
    begin, end = 'e.pyz" \\\n', "\n# This script becomes"
    line = text[text.index(begin) + len(begin) : text.rindex(end)]

    assert shlex.split(line) == ["a.py", *arguments]


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS])
@pytest.mark.parametrize("target", [LOCAL_CLUSTER, REMOTE_CLUSTER], ids=["here", "far"])
def test_the_scripts_have_valid_shell_syntax(options, target, tmp_path):
    job_request = built(target, slurm=options)
    for name, text in {"job.sh": job_request.job_script, **job_request.node_scripts}.items():
        path = tmp_path / name
        path.write_text(text)
        done = subprocess.run(["sh", "-n", path], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_sbatch_gets_a_minimal_environment(monkeypatch):
    monkeypatch.setenv("STRAY", "x")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab of mine")
    done = SlurmHost().run(
        "/", cluster.with_clean_environment("env", ("SBATCH_ACCOUNT", "SBATCH_QOS"))
    )
    names = {line.partition("=")[0] for line in done.out.decode().splitlines()}

    assert "SBATCH_ACCOUNT=lab of mine" in done.out.decode().splitlines()
    assert names <= {"PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF", "SBATCH_ACCOUNT"}


@pytest.mark.parametrize(
    ("stderr", "message", "hint"),
    [
        (
            "sbatch: error: invalid partition specified: x; sbatch: error: Batch job submission "
            "failed: Invalid partition name specified",
            "submitting: invalid partition specified: x",
            "sinfo -s",
        ),
        ("sh: 1: sbatch: not found", "submitting: sh: 1: sbatch: not found", "slurm.host"),
        (
            "env: 'squeue': No such file or directory",
            "submitting: env: 'squeue': No such file or directory",
            "slurm.host",
        ),
        ("sbatch: error: something new", "submitting: something new", "--show-request"),
        (
            "sbatch: error: Batch job submission failed: Required partition not available (inactive"
            " or drain)",
            "submitting: Required partition not available (inactive or drain)",
            "sinfo -s",
        ),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit; sbatch: error: Batch job submission "
            "failed: Job violates accounting/QOS policy (job submit limit, user's size and/or "
            "time limits)",
            "submitting: QOSMaxSubmitJobPerUserLimit; Job violates accounting/QOS policy (job",
            "allows no more jobs at once",
        ),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            "submitting: Job violates accounting/QOS policy",
            "is at a limit",
        ),
        (
            "sbatch: error: If munged is up, restart with --num-threads=10; sbatch: error: Munge "
            'encode failed: Failed to access "/run/munge/munge.socket.2": No such file; sbatch: '
            "error: Protocol authentication error",
            'submitting: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No',
            "munged does not run",
        ),
        (
            "sbatch: error: fetch_config: DNS SRV lookup failed; sbatch: fatal: Could not "
            "establish a configuration source",
            "submitting: fetch_config: DNS SRV lookup failed",
            "slurm.host",
        ),
    ],
)
def test_a_refusal_has_a_hint(stderr, message, hint):
    """The error has Slurm's message without its prefix."""
    error = errors.command_error("submitting", stderr)

    assert error.message.startswith(message)
    assert hint in error.hint


def test_new_bytes_of_logs_are_read_unchanged(tmp_path):
    """Python and the shell script agree on any bytes, any offset, and logs that appear later."""
    (tmp_path / "node-0.log").write_bytes(b"abc\n\0\xff 1 2\n")
    (tmp_path / "node-11.log").write_bytes(b"5 6\nlast")
    (tmp_path / "node-2.log").write_bytes(b"")
    text = cluster.tails_text({0: 4, 1: 0})
    done = SlurmHost().run(str(tmp_path), text)

    expected = {0: b"\0\xff 1 2\n", 11: b"5 6\nlast"}
    assert SlurmHost().tails(str(tmp_path), {0: 4, 1: 0}) == expected
    assert cluster.read_tails(done.out) == expected


def test_variables_of_all_bytes_are_delivered():
    """Values may contain newlines, ``=`` and bytes that are not UTF-8."""
    values = {"A": "\udcff \n=", "B": ""}

    assert variables.load(variables.dump(values)) == values


@pytest.mark.parametrize(
    ("owner", "is_removed"),
    [("n1", True), ("n2", False), (None, True)],
    ids=["own", "other", "none"],
)
def test_a_node_removes_its_folder_even_if_it_was_killed_at_once(
    tmp_path: Path, owner: str | None, is_removed: bool
):
    """A node that was killed before it could write its name into the folder leaves nothing."""
    spec = script.NodeText("train-ab", str(tmp_path), (), "", "entry", (), {}, keeps_record=False)
    (tmp_path / "clean.sh").write_text(script.node_scripts(spec)["clean.sh"])
    work = tmp_path / "cloudjob-ab"
    (work / "home").mkdir(parents=True)
    if owner:
        (work / "host").write_text(f"{owner}\n")

    subprocess.run(
        ["sh", tmp_path / "clean.sh"],
        env={"SLURMD_NODENAME": "n1", "PATH": "/usr/bin:/bin"},
        check=True,
    )

    assert work.exists() is not is_removed


def test_a_node_removes_its_folder_although_slurm_ends_the_step_meanwhile(tmp_path: Path):
    """It waits for the name that a killed node has not written, and Slurm sends SIGTERM."""
    spec = script.NodeText("train-ab", str(tmp_path), (), "", "entry", (), {}, keeps_record=False)
    (tmp_path / "clean.sh").write_text(script.node_scripts(spec)["clean.sh"])
    work = tmp_path / "cloudjob-ab"
    work.mkdir()
    started = tmp_path / "started"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\n: >{started}\nexec /usr/bin/sleep 1\n")
    (tmp_path / "sleep").chmod(0o755)
    process = subprocess.Popen(
        ["sh", tmp_path / "clean.sh"],
        env={"SLURMD_NODENAME": "n1", "PATH": f"{tmp_path}:/usr/bin:/bin"},
        start_new_session=True,
    )
    poll(started.exists, "wait for the name of the node")

    os.killpg(process.pid, signal.SIGTERM)

    assert process.wait(60) == 0
    assert not work.exists()


@pytest.mark.parametrize(
    ("values", "final"),
    [
        ({}, "1 2 124"),
        ({"retry": {"on": ("user",)}}, 124),
        ({"retry": {"on": ("user", "hang")}}, 124),
        ({"retry": {"on": ("user", "hang")}, "hang": {"action": "stop"}}, ""),
    ],
)
def test_the_script_knows_the_exit_codes_after_which_a_job_is_not_tried_again(values, final):
    """124 is also the code of the time limit: repeated only if a hang may end the job."""
    text = built(retries=1, **values).job_script

    assert f"\nfinal={shlex.quote(str(final))}\n" in text
