"""Lines of ``slurm.setup``: what they change, and what happens if one ends the shell."""

from __future__ import annotations

import json

import pytest

from tests.e2e_slurm.test_jobs import PRELUDE

# A site's `module`, which fails for an unknown name as Lmod does.
MODULE = 'module() { echo "Lmod has detected the following error: unknown: $2" >&2; return 1; }'


def only_on(node: str, line: str) -> str:
    return f"if [ $SLURMD_NODENAME = {node} ]; then {line}; fi"


@pytest.mark.parametrize("node", ["n1", "n2"])
@pytest.mark.parametrize(
    ("lines", "command", "said"),
    [
        (["set -e", MODULE, "{module load nosuch}"], "module load nosuch", "unknown: nosuch"),
        (["{exit 0}"], "exit 0", ""),
        (["echo before", "{exec true}"], "exec true", "before"),
    ],
    ids=["set -e", "exit", "exec"],
)
def test_a_line_of_setup_that_ends_the_shell_ends_the_job_and_is_named(
    cloud, node, lines, command, said
):
    """At once, with the line's output, on the head and on a worker; no folder stays there."""
    lines = [only_on(node, line[1:-1]) if line.startswith("{") else line for line in lines]
    # A job that loses a node starts again, but not this one.
    cloud.write("job.yaml", f"slurm: {{requeue: true, setup: {json.dumps(lines)}}}\n")
    cloud.write("train.py", "print('never')\n")
    done = cloud.submit("--config", "job.yaml", "--nodes", "2", "train.py", limit_s=60)
    message = cloud.status(done.job)["failure"]["message"]

    assert done.code == 125, done
    index = int(node == "n2")
    code = int(command.startswith("module"))
    expected = (
        f'node {index} ({node}): slurm.setup: "{command}" ended the shell with exit code {code}'
    )
    assert message.startswith(expected)
    assert message.endswith(said)
    assert b"never" not in done.out


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("exec 0<&- >&- 2>&-", 0, "it runs"),
        ("PATH=/nonexistent", 127, "not found on PATH (/nonexistent)"),
        ("if true", 125, "slurm.setup: a syntax error ended the shell with exit code 2: "),
    ],
)
def test_a_line_of_setup_that_spoils_the_shell_hides_nothing(cloud, line, code, said):
    cloud.write("job.yaml", f"slurm: {{setup: [echo before, {json.dumps(line)}]}}\n")
    cloud.write("train.py", "print('it runs')\n")
    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == code, done
    assert said in str(done)
    assert code == 125 or "slurm.setup" not in str(done), done


def test_a_profile_that_replaces_the_login_shell_is_named(cloud):
    """Some users start another shell in their profile."""
    (cloud.folder / ".bash_profile").write_text("exec dash\n")
    cloud.write("job.yaml", "slurm: {setup: [echo never]}\n")
    cloud.write("train.py", "print('never')\n")
    done = cloud.submit("--config", "job.yaml", "train.py", limit_s=60)

    assert done.code == 125, done
    assert (
        "before slurm.setup, a profile (/etc/profile, ~/.bash_profile) ended the login"
        in (cloud.status(done.job)["failure"]["message"])
    )


def test_the_script_runs_with_the_python_that_setup_puts_first_on_the_path(cloud):
    """As conda and modules do; the log reports it, and ``slurm.python`` has precedence."""
    python = cloud.folder / "conda" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/python3")
    cloud.write(
        "train.py", PRELUDE + "write_result(f'rank-{rank}-' + sys.argv[1], sys.executable)\n"
    )
    line = f"export PATH={python.parent}:$PATH"
    done = []
    for name, options in {"conda": "", "same": "", "named": "python: /usr/bin/python3"}.items():
        lines = json.dumps(["export A=1" if name == "same" else line])
        cloud.write("job.yaml", f"slurm: {{setup: {lines}, {options}}}\n")
        size = ("--nodes", "2")
        done.append(cloud.submit("--config", "job.yaml", *size, "train.py", name))

    assert [each.code for each in done] == [0, 0, 0], done
    texts = {path.name: path.read_text() for path in cloud.results.iterdir()}
    assert texts["rank-0-conda"] == texts["rank-1-conda"] == str(python)
    assert texts["rank-0-named"] == texts["rank-1-named"] == "/usr/bin/python3"
    assert texts["rank-0-same"].startswith(str(cloud.home.parents[0].anchor))
    assert "conda" not in texts["rank-0-same"]
    text = f"slurm.setup selects {python}, which runs the script instead of"
    assert [done[0].err.count(text), done[1].err.count(text), done[2].err.count(text)] == [1, 0, 0]
