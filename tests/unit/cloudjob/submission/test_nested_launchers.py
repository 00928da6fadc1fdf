"""Launchers that scripts start themselves; the tests write real files but run none."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.errors import SpecError
from cloudjob.model.job import JobSpec
from cloudjob.submission import checks, launcher_choice, scripts
from cloudjob.submission.checks import read_script as read
from cloudjob.submission.launcher_choice import Nested


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty source folder."""
    return tmp_path


def write(source: Path, text: str, name: str = "run.sh") -> None:
    """Write a script into the source."""
    (source / name).write_text(textwrap.dedent(text))


def find(source: Path, script: str) -> Nested | None:
    """Return the launcher that a script starts itself."""
    return read(JobSpec(script=script, source=str(source))).nested


def check(spec: JobSpec) -> None:
    """Refuse a script that its launcher must not repeat."""
    launcher_choice.check_nested(spec, read(spec).nested)


def chosen(spec: JobSpec) -> launcher_choice.Choice:
    """Return the launcher of a job that names none."""
    script = read(spec)
    return launcher_choice.choose(spec, script.files, script.nested)


def ignored_exit_code(spec: JobSpec) -> str:
    """Return what a submit says of an exit code that the script ignores."""
    return launcher_choice.ignored_exit_code(spec, read(spec).nested)


PYTHON = [
    ("import os\nos.system('torchrun --nproc_per_node=4 train.py')", 2, "torchrun", True),
    (
        "import subprocess, sys\ncmd = [sys.executable, '-m', 'torch.distributed.launch']\n"
        "cmd += ['--nproc_per_node', '2', 'train.py']\nsubprocess.check_call(cmd)",
        4,
        "torch.distributed.launch",
        False,
    ),
    (
        "import subprocess\ncmd = []\ncmd.append('torchrun')\n"
        "cmd.extend(['--nproc_per_node', '2'])\ncmd.append('train.py')\nsubprocess.check_call(cmd)",
        6,
        "torchrun",
        False,
    ),
    (
        "import os\nfor host in hosts:\n    line = 'mpirun -np {} python t.py'.format(len(hosts))\n"
        "    code = os.system(line)\n    sys.exit(code)",
        4,
        "mpirun",
        False,
    ),
    (
        "import os\ndef main():\n    os.system(f'cd {folder} && horovodrun -np {n} python t.py')",
        3,
        "horovodrun",
        True,
    ),
    (
        "from subprocess import Popen\np = Popen(' '.join(['msrun', '--worker_num=8', script]))\n",
        2,
        "msrun",
        False,
    ),
    ("import os\nos.system('bash run.sh')", 1, "torchrun", False),
]


@pytest.mark.parametrize(("text", "line", "program", "is_failure_ignored"), PYTHON)
def test_a_launcher_that_a_python_script_starts_runs_once_on_each_node(
    source: Path, text: str, line: int, program: str, is_failure_ignored: bool
):
    write(source, text, "start.py")
    write(source, "torchrun train.py")
    spec = JobSpec(script="start.py", source=str(source))
    name = "run.sh" if "bash" in text else "start.py"

    choice = chosen(spec)

    assert choice == ("python", f"{name} line {line} starts {program} itself")
    warning = f"{name} line {line} starts {program} itself and ignores its exit code"
    assert ignored_exit_code(spec).startswith(warning) is is_failure_ignored
    assert not ignored_exit_code(spec.with_values(strict="true"))


NO_REPLACEMENT = ""
COMMANDS = {
    "accelerate launch --num_processes 4 train.py": "torchrun",
    "accelerate --debug launch train.py": "torchrun",
    "python -m accelerate.commands.launch train.py": "torchrun",
    "deepspeed --num_gpus=8 train.py --deepspeed": "torchrun",
    "ray start --head": NO_REPLACEMENT,
    "ray job submit -- python train.py": NO_REPLACEMENT,
    "colossalai run --nproc_per_node 4 train.py": "torchrun",
    "srun --ntasks-per-node=8 python train.py": "srun",
    "python davincirun.py train.py": "rank-table",
    "python3 -u /opt/tools/davincirun.py train.py": "rank-table",
    "/usr/bin/prterun -n 4 python train.py": "mpirun",
    "mpiexec.hydra -n 4 python train.py": "mpirun",
    "jsrun -n 6 python train.py": "mpirun",
    "aprun -n 24 python train.py": "mpirun",
    "flux run -n 4 python train.py": "mpirun",
    "composer -n 8 train.py": "torchrun",
    "lightning run model --devices=4 train.py": "torchrun",
    "fabric run --devices=4 train.py": "torchrun",
    "tune run --nproc_per_node 4 full_finetune_distributed": "torchrun",
    "python -m paddle.distributed.launch train.py": NO_REPLACEMENT,
    "python -m bagua.distributed.launch train.py": "torchrun",
    "llamafactory-cli train config.yaml": NO_REPLACEMENT,
    "timeout 3600 torchrun train.py": "torchrun",
    "numactl --cpunodebind=0 torchrun train.py": "torchrun",
    "conda run -n env torchrun train.py": "torchrun",
    "uv run --frozen accelerate launch train.py": "torchrun",
    "singularity exec --nv image.sif torchrun train.py": "torchrun",
    "xargs -n 1 torchrun": "torchrun",
    "bash -c 'cd x && torchrun train.py'": "torchrun",
    "bash -c '\ncd x # it is there\ntorchrun train.py'": "torchrun",
    "[ $# -gt 1 ] && torchrun train.py": "torchrun",
    "bash -lc 'source env.sh; deepspeed train.py'": "torchrun",
    "eval torchrun train.py": "torchrun",
}


@pytest.mark.parametrize(("command", "launcher"), COMMANDS.items())
@pytest.mark.parametrize("script", ["run.sh", "start.py"])
def test_every_launcher_of_the_field_is_recognised(
    source: Path, command: str, launcher: str, script: str
):
    text = f"set -e\n{command}\n" if script == "run.sh" else f"import os\nos.system({command!r})\n"
    write(source, text, script)
    spec = JobSpec(script=script, source=str(source))

    choice = chosen(spec)
    nested = find(source, script)

    assert choice.launcher == "python"
    assert choice.why.startswith(f"{script} line 2 starts ")
    assert nested is not None
    assert nested.replacement.startswith(f"--launcher {launcher} " if launcher else "")
    if script == "run.sh":
        with pytest.raises(SpecError, match="would run it once for each rank") as caught:
            check(spec.with_values(launcher="mpirun"))
        assert "--launcher python run.sh runs once on each node" in caught.value.hint
    else:
        repeated = spec.with_values(launcher="mpirun")
        warnings = [each.found for each in checks.script_checks(repeated, read(repeated))]
        assert any("cloudjob runs it once for each rank" in warning for warning in warnings)


@pytest.mark.parametrize(
    "text",
    [
        "from subprocess import run\nrun(['deepspeed', 'train.py'])",
        "import subprocess as sp\nsp.run(['accelerate', 'launch', 'train.py'])",
        "from os import system\nsystem('torchrun train.py')",
        "import os\nos.execvp('torchrun', ['torchrun', 'train.py'])",
        "import os\nos.execlp('torchrun', 'torchrun', 'train.py')",
        "import os\nos.spawnvp(os.P_WAIT, 'torchrun', ['torchrun', 'train.py'])",
        "import asyncio\nasyncio.create_subprocess_exec('torchrun', 'train.py')",
        "import runpy\nrunpy.run_module('torch.distributed.run', run_name='__main__')",
        "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=8)",
        "from torch.multiprocessing import spawn\nspawn(main, nprocs=8)",
        "import torch\ntorch.multiprocessing.spawn(main, nprocs=8)",
        "from accelerate import notebook_launcher\nnotebook_launcher(main, num_processes=8)",
        "from torch.distributed.run import main\nmain(['train.py'])",
    ],
)
def test_every_way_to_start_a_launcher_from_python_is_recognised(source: Path, text: str):
    write(source, text, "start.py")

    assert chosen(JobSpec(script="start.py", source=str(source))).launcher == "python"


@pytest.mark.parametrize(
    "command",
    [
        "ray stop",
        "accelerate config default",
        "accelerate test --help",
        "pip install ray deepspeed composer",
        "lightning --version",
        "tune ls",
        "flux keygen",
        "python train.py --launcher torchrun",
        "python tool.py srun",
        "echo torchrun",
        "timeout 10 python train.py",
        "uv " * 100 + "python train.py",
        "python train.py  # don't torchrun\ntrue",
        "x=$((1<<2)) python train.py",
        'python -c "\ntorchrun = 1\nprint(torchrun)\n"',
        "bash -c 'echo done'",
    ],
)
def test_a_command_that_only_names_a_launcher_is_none(source: Path, command: str):
    write(source, command)

    assert find(source, "run.sh") is None


def test_a_script_that_spawns_only_without_a_launcher_is_started_by_one(source: Path):
    text = "import os, torch.multiprocessing as mp\n"
    text += "main() if 'LOCAL_RANK' in os.environ else mp.spawn(main, nprocs=8)\n"
    write(source, text, "train.py")

    assert find(source, "train.py") is None


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ("accelerate", "launch", "train.py"),
            "cloudjob submit --launcher torchrun train.py starts the ranks itself; "
            "cloudjob submit --launcher command accelerate launch train.py "
            "runs it once on each node",
        ),
        (
            ("ray", "start", "--head"),
            "cloudjob submit --launcher command ray start --head runs it once on each node",
        ),
        (
            ("python3", "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"),
            "cloudjob submit --launcher torchrun --procs-per-node 2 train.py starts the ranks "
            "itself; cloudjob submit --launcher command python3 -m torch.distributed.run "
            "--nproc_per_node=2 train.py runs it once on each node",
        ),
        (("ls", "-l"), "cloudjob submit --launcher command ls -l runs it once on each node"),
    ],
)
def test_a_program_in_place_of_the_script_is_refused_with_the_command_to_use(
    source: Path, words: tuple[str, ...], hint: str
):
    spec = JobSpec(script=words[0], args=words[1:], source=str(source))

    with pytest.raises(SpecError, match=f"{words[0]} is a program, not a file") as caught:
        checks.check_script(spec)

    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed, os\nos.system('nvidia-smi')",
        "import subprocess\nsubprocess.run(['mpirun', '--version'])",
        "print('torchrun train.py')",
        "import os\nos.system(open('x').read())",
        "def broken(:",
        "import os\n" + "a = a + a + b\nb = a + b\n" * 50 + "os.system(a)",
        "import os\nos.system(" + "-" * 50_000 + "1)",
    ],
)
def test_no_launcher_is_found_in_a_python_script_that_starts_none(source: Path, text: str):
    write(source, text, "train.py")

    assert find(source, "train.py") is None


@pytest.mark.parametrize(
    ("text", "is_failure_ignored"),
    [
        ("torchrun a.py", False),
        ("torchrun a.py\necho done", True),
        ("set -e\ntorchrun a.py\necho done", False),
        ("torchrun a.py\ncode=$?\nexit $code", False),
        ("torchrun a.py || exit 1\necho done", False),
        ("torchrun a.py | tee log", True),
        ("set -eo pipefail\ntorchrun a.py | tee log", False),
    ],
)
def test_a_shell_script_that_ignores_the_exit_code_of_a_launcher_is_noticed(
    source: Path, text: str, is_failure_ignored: bool
):
    write(source, text)

    spec = JobSpec(script="run.sh", source=str(source))

    assert bool(ignored_exit_code(spec)) is is_failure_ignored
    assert chosen(spec).launcher == "python"


def test_a_launcher_that_the_script_leaves_behind_is_still_refused(source: Path):
    write(source, "mpirun -n 2 python a.py &")

    assert chosen(JobSpec(script="run.sh", source=str(source))).launcher == "mpirun"


@pytest.mark.parametrize(
    ("text", "line", "problem", "replacement"),
    [
        (
            "mpirun -n 8 --allow-run-as-root python ./train.py > log 2>&1 &",
            1,
            "starts mpirun itself",
            "--launcher mpirun --procs-per-node 8 train.py",
        ),
        (
            "set -e\nHOROVOD_X=1 nohup horovodrun -np 4 \\\n  python train.py",
            2,
            "starts horovodrun itself",
            "--launcher horovod --procs-per-node 4 train.py",
        ),
        (
            "torchrun --nproc_per_node=$GPUS train.py",
            1,
            "starts torchrun itself",
            "--launcher torchrun train.py",
        ),
        (
            "if true; then\n(cd x && /opt/bin/msrun --worker_num=8 a.py)\nfi",
            2,
            "starts msrun itself",
            "--launcher msrun --procs-per-node 8 a.py",
        ),
        (
            "python3 -m torch.distributed.launch --nproc_per_node 2 train.py",
            1,
            "starts torch.distributed.launch itself",
            "--launcher torchrun --procs-per-node 2 train.py",
        ),
        (
            "for ((i=0; i<8; i++)); do\n  export RANK_ID=$i\n  python train.py >log$i 2>&1 &\ndone",
            3,
            "starts processes in a loop and does not wait for them",
            "--procs-per-node N train.py",
        ),
    ],
)
def test_a_launcher_in_a_script_is_refused_with_what_to_submit_instead(
    source: Path, text: str, line: int, problem: str, replacement: str
):
    write(source, text)

    with pytest.raises(SpecError) as caught:
        check(JobSpec(script="run.sh", source=str(source), launcher="mpirun"))

    assert caught.value.message == (
        f"script: run.sh line {line} {problem}, and cloudjob would run it once for each rank"
    )
    assert f"cloudjob submit {replacement}; with --launcher python" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "python train.py",
        "# don't call mpirun\npython train.py",
        "echo 'mpirun -n 8' \"$(which mpirun)\"; mpirun --version; command -v mpirun",
        "cat <<EOF >hosts\nmpirun -n 2 x\nEOF\npython train.py",
        "tensorboard --logdir . &\npython train.py",
        "for i in 1 2; do python train.py $i & done\nwait",
        "for i in 1 2; do\n  python train.py $i\ndone",
        "bash gone.sh; ./train.py",
        "",
    ],
)
def test_shell_scripts_that_start_no_ranks_are_accepted(source: Path, text: str):
    write(source, text)

    assert find(source, "run.sh") is None


def test_scripts_that_a_script_runs_are_read(source: Path):
    write(source, "source ./env.sh\nbash -x scripts/go.sh a")
    (source / "scripts").mkdir()
    write(source, "mpirun -n 2 x.py", "scripts/go.sh")
    write(source, "bash run.sh", "env.sh")

    nested = find(source, "run.sh")

    assert nested is not None
    assert nested.where == "scripts/go.sh line 1"


def test_a_script_without_a_suffix_is_known_by_its_first_line(source: Path):
    write(source, "#!/usr/bin/env bash\nmpirun -n 2 x.py", "run")

    assert find(source, "run") is not None


@pytest.mark.parametrize("launcher", ["python", "command"])
def test_a_launcher_that_runs_a_script_once_on_each_node_takes_any_script(
    source: Path, launcher: str
):
    write(source, "torchrun --nnodes $MA_NUM_HOSTS train.py")

    check(JobSpec(script="run.sh", source=str(source), launcher=launcher))


@given(st.text(alphabet=st.sampled_from("a&;|()<>'\"\\\n #${}=do ")))
def test_any_text_is_read(text: str):
    scripts.of_shell(text)
