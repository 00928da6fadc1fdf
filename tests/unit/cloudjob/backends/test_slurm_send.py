"""The folder of a job that may have been submitted to Slurm is kept, so the job can be found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cloudjob
from cloudjob.backends.slurm import request, shells, state
from cloudjob.backends.slurm.backend import SlurmBackend
from cloudjob.errors import BackendError, Unanswered, Unreachable
from tests.unit.cloudjob.backends.test_slurm_build import LOCAL_CLUSTER, submission


@pytest.mark.parametrize(
    ("message", "kind", "is_kept"),
    [
        ("invalid partition specified: gpu", BackendError, False),
        ("Socket timed out on send/recv operation", Unanswered, True),
    ],
)
def test_the_folder_is_kept_if_sbatch_may_have_submitted_the_job(
    message: str,
    kind: type[BackendError],
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {message}' >&2\nexit 1\n")
    (tools / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    backend = SlurmBackend(tmp_path, {})
    backend._found = LOCAL_CLUSTER._replace(
        folder=str(tmp_path / "slurm"),
        entry=str(Path(cloudjob.__file__).with_name("jobentry.pyz")),
    )
    job_request = request.build(submission(), backend._found)

    with pytest.raises(BackendError) as caught:
        backend.send(job_request)

    assert type(caught.value) is kind
    assert Path(job_request.folder).exists() is is_kept


def test_fresh_keys_are_a_file_that_only_its_owner_reads(tmp_path: Path):
    backend = SlurmBackend(tmp_path, {})
    backend._found = LOCAL_CLUSTER._replace(folder=str(tmp_path / "slurm"))
    job_request = request.build(submission(), backend._found)
    handle = backend.handle(job_request)
    with pytest.raises(BackendError, match="No such file or directory"):
        backend.refresh(handle, {"A": "old"})

    Path(job_request.folder).mkdir(parents=True)
    backend.refresh(handle, {"A": "old"})
    backend.refresh(handle, {"A": "new\n"})

    (path,) = Path(job_request.folder).iterdir()
    assert path.name == "store-keys"
    assert path.read_bytes() == b"A=new\n\0"
    assert path.stat().st_mode & 0o777 == 0o600


# Runs the command of ssh in a login shell, as sshd does, after what that shell prints.
SSH = """\
#!/bin/sh
for command in "$@"; do :; done
case " $* " in *" silent "*) exit 255 ;; esac
cat noise 2>/dev/null
exec sh -c "$command"
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmBackend:
    """A backend whose ssh runs commands on this machine, where Slurm has no job."""
    for name, text in {"ssh": SSH, "squeue": "#!/bin/sh\n", "sacct": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return SlurmBackend(tmp_path, {"host": "login"})


@pytest.mark.parametrize("host", ["login", ""])
def test_a_folder_that_cannot_be_read_hides_no_other_job(host: str, far, tmp_path: Path):
    """Its files may be pipes that nobody writes, or endless, or its handle may be damaged."""
    for name in ("good", "pipe", "endless", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "state").write_text("begin 7 0 n1 1795258477\nend 0 1795258490\n")
    (tmp_path / "good" / "id").write_text("7\n")
    os.mkfifo(tmp_path / "pipe" / "state")
    os.mkfifo(tmp_path / "pipe" / "id")
    (tmp_path / "endless" / "state").symlink_to("/dev/zero")
    (tmp_path / "odd" / "state").write_bytes(os.urandom(3 << 20))
    (tmp_path / "odd" / "node-x.log").write_text("x\n")
    names = ["pipe", "endless", "odd", "a%0Ab", "gone", "good"]
    handles = [f"slurm://{host}{tmp_path}/{name}" for name in names]
    status_of = far.statuses([*handles, "nonsense"])

    assert status_of[handles[4]] is None
    assert set(status_of) == {handles[4]}
    assert far.status(handles[5]).state == "SUCCEEDED"
    for handle in handles[:3]:
        assert far.status(handle).state != "SUCCEEDED"
        assert list(far.logs(handle, None, follow=False)) == []


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (b"y\n" * (1 << 20), "the login shell printed more than 1 MiB: y"),
        (b"\x00\xff\n" * 9, ""),
    ],
)
def test_noise_before_an_answer_is_limited_and_ignored(noise: bytes, said: str, far, tmp_path):
    (tmp_path / "noise").write_bytes(noise)
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "state").write_text("begin 7 0 n1 1795258477\nend 0 1795258490\n")
    handle = f"slurm://login{tmp_path}/good"
    if said:
        with pytest.raises(Unreachable, match=f"^asking Slurm on login: {said}$"):
            far.status(handle)
    else:
        assert far.status(handle).state == "SUCCEEDED"


def test_a_program_and_its_data_may_be_any_bytes(far, tmp_path: Path):
    """The program has several lines and quotes; it reads exactly the data that follow it."""
    data = os.urandom(3_000_000)
    text = "x='a  \\ !b'\nprintf '%s\\n' \"$x\" >&2\ncat\nexit 7\n"
    done = shells.run_there("login", text, data, is_reading=False, limit_bytes=1 << 23)

    assert (done.code, done.out == data, done.err) == (7, True, b"a  \\ !b\n")


def test_an_unreachable_host_is_not_asked_twice_for_a_change(far):
    with pytest.raises(Unreachable, match=r"^connecting to silent with ssh: no message$"):
        shells.run_there("silent", "true", b"", is_reading=False, limit_bytes=1)


def test_a_message_has_each_line_once_and_both_ends():
    err = (
        b"the cause\n"
        + b"again\n" * 500
        + b"".join(b"%d: x\n" % n for n in range(500))
        + b"the end"
    )
    message = shells.CommandResult(1, b"", err).message

    assert message.startswith("the cause; again; 0: x; 1: x")
    assert message.endswith("499: x; the end")
    assert len(message) < 700
    assert shells.CommandResult(3, b"", b"").message == "exit code 3 without a message"


@pytest.mark.parametrize("host", ["login", ""])
def test_defaults_of_the_user_change_no_question_to_slurm(host: str, far, tmp_path, monkeypatch):
    """Sbatch does not see them either, so with them, squeue would ask another cluster."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "id").write_text("7\n")
    for name in ("squeue", "sacct"):
        (tmp_path / name).write_text(f"#!/bin/sh\nenv >>{tmp_path}/environment\n")
    for name in ("SLURM_CLUSTERS", "SQUEUE_PARTITION", "SQUEUE_USERS", "SACCT_PARTITION"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/our.conf")
    far.statuses([f"slurm://{host}{tmp_path}/train"])
    far.status(f"slurm://{host}{tmp_path}/train")
    environment = (tmp_path / "environment").read_text()

    assert environment.count("\nSLURM_TIME_FORMAT=%s\n") == 3
    assert environment.count("SLURM_CONF=/etc/our.conf\n") == 3
    assert "=other\n" not in environment


@pytest.mark.parametrize("host", ["login", ""])
@pytest.mark.parametrize(
    "printed",
    [
        "7\n",
        "7;cluster\n",
        "Verification: ***PASSED*** 3 of 3\nSubmitted batch job 7 on cluster hpc\n",
        "Account: lab\n\n7\n",
    ],
)
def test_sbatch_may_be_a_script_of_the_site(printed: str, host: str, far, tmp_path: Path):
    """The job is found by its number, whatever else the script prints."""
    (tmp_path / "train-2k83xnf2").mkdir()
    (tmp_path / "train-2k83xnf2" / "id").write_text(printed)
    (tmp_path / "squeue").write_text(
        '#!/bin/sh\ncase "$*" in *"-j 7") ;; *) exit 1 ;; esac\n'
        "echo '7|RUNNING|1795258477|N/A|cloudjob-train-2k83xnf2||n1|None'\n"
    )

    assert far.status(f"slurm://{host}{tmp_path}/train-2k83xnf2").state == "RUNNING"


@pytest.mark.parametrize(
    "name", ["renamed", "cloudjob-train-2k83xnf2-lab", "train-2k83xnf2", "a|b"]
)
@pytest.mark.parametrize(("folder", "is_ours"), [("train-2k83xnf2", True), ("of-others", False)])
def test_a_renamed_job_is_known_by_its_number_and_folder(
    folder, is_ours, name, far, tmp_path: Path
):
    """A plug-in of the site may rename it; a number without the folder is another job's."""
    (tmp_path / "train-2k83xnf2").mkdir()
    (tmp_path / "train-2k83xnf2" / "id").write_text("7\n")
    (tmp_path / "squeue").write_text(
        f'#!/bin/sh\ncase "$*" in *-a*%Z*) echo /jobs/{folder} ;;\n'
        f"*) echo '7|RUNNING|1795258477|N/A|{name}||n1|None' ;; esac\n"
    )
    status = far.status(f"slurm://login{tmp_path}/train-2k83xnf2")

    assert (status.state == "RUNNING") is is_ours


def test_a_damaged_number_is_none():
    assert [state.read_number(text) for text in ("", "x\n", "7x", "\0")] == [""] * 4
