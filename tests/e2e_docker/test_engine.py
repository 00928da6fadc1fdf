"""Errors before a job starts in containers, leftovers of jobs, images, and engine restarts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloudjob.backends.docker.engine import host as engine_host
from cloudjob.machine import images
from tests.support.dockerd import Dockerd
from tests.support.engine import EngineProxy
from tests.support.polling import Followed

pytestmark = pytest.mark.docker

# See conftest.py.
LIMIT_S = 240.0


def objects_of_jobs(cloud):
    """Return the objects in the store except layers, which jobs share and `store gc` removes."""
    objects = (cloud.home / "store").glob("*/*")
    return [path for path in objects if path.parent.name != "layers"]


def test_a_missing_engine_is_reported_before_anything_is_sent(cloud):
    cloud.environ["DOCKER_HOST"] = f"unix://{cloud.folder}/nobody.sock"
    cloud.script("print(1)")

    done = cloud.submit()

    assert done.code == 5, done
    assert "there is no engine" in done.err
    assert "hint: is it running?" in done.err
    assert not (cloud.home / "store").exists()
    assert "Traceback" not in done.err


def test_the_socket_of_the_engine_may_lack_its_first_slash(cloud):
    """The programs of Docker accept it, too."""
    cloud.environ["DOCKER_HOST"] = engine_host().replace("unix:///", "unix://")
    cloud.script("print('ran')")

    done = cloud.submit()

    assert (done.code, done.out) == (0, b"[0] ran\n"), done


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("cloudjob/bse:1", "cloudjob image build bse"),
        ("example.invalid/none:1", "docker pull example.invalid/none:1"),
        ("debian:bookworm-slim", "cloudjob doctor --image"),
        ("Not A Reference", ""),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(cloud, image, hint):
    """A missing image, or one without an entry, is refused before anything is sent."""
    cloud.script("print(1)")

    done = cloud.submit("--image", image)

    assert done.code == 5, done
    assert hint in done.err
    assert not (cloud.home / "store").exists()
    assert json.loads(cloud.run("list", "--json").out) == []


def test_a_start_that_fails_leaves_nothing(cloud):
    """When the engine refuses to start a node, the network and the other nodes are removed."""
    cloud.script("print(1)")
    (cloud.source / "cloudjob.yaml").write_text("docker: {gpus: 1}\n")

    done = cloud.submit("--nodes", "3")

    assert done.code == 5, done
    assert "no GPUs" in done.err
    assert cloud.containers() == []
    assert cloud.networks() == []
    assert not objects_of_jobs(cloud)


def test_unsupported_options_are_refused_by_name(cloud):
    cloud.script("print(1)")

    done = cloud.submit("--retries", "2")

    assert done.code == 2, done
    assert "retries: the docker backend does not start a job again" in done.err


def test_rm_removes_everything_of_an_ended_job(cloud):
    """`rm` deletes the log, record and package of an ended job and refuses a running job."""
    cloud.script("import time; time.sleep(600)")
    job = cloud.detach()
    refused = cloud.run("rm", job)
    cloud.run("cancel", job)

    done = cloud.run("rm", job)

    assert (refused.code, done.code) == (2, 0), (refused, done)
    assert json.loads(cloud.run("list", "--json").out) == []
    assert not (cloud.home / "docker" / job).exists()
    assert not objects_of_jobs(cloud)


def test_orphans_are_removed_but_running_jobs_stay(cloud, base_image):
    cloud.script("import time; time.sleep(600)")
    job = cloud.detach()
    name = f"{job}-lost"
    labels = {"cloudjob.job": "lost-1", "cloudjob.node": "0", "cloudjob.owner": cloud.owner}
    labels["cloudjob.container"] = name
    others = {**labels, "cloudjob.job": "lost-2", "cloudjob.owner": "somebody"}
    network = cloud.engine.create_network("cloudjob-lost-1", labels=labels)["Id"]
    # The third one is made from an image of the first one, by its user.
    ids = [
        cloud.engine.create_container(base_image, "x", labels=each, name=called)["Id"]
        for each, called in ((labels, name), (others, None), (labels, f"{name}-copy"))
    ]
    try:
        done = cloud.run("rm", "--orphans")

        assert done.code == 0, done
        assert "1 orphan" in done.err
        remaining = {item["Id"] for item in cloud.engine.containers(all=True)}
        assert ids[0] not in remaining
        assert set(ids[1:]) <= remaining
        assert network not in {item["Id"] for item in cloud.engine.networks()}
        assert cloud.status(job)["state"] == "RUNNING"
    finally:
        for each in ids[1:]:
            cloud.engine.remove_container(each)
        cloud.run("cancel", "--now", job)


def test_this_versions_entry_runs_in_any_image(cloud, engine, base_image, tmp_path):
    """Our entry replaces that of the image, so that both halves of a job have the same version."""
    dockerfile = (
        f'FROM {base_image}\nUSER 0\nRUN printf "raise SystemExit(9)" '
        ">/opt/cloudjob/jobentry.pyz\nLABEL cloudjob.entry=old\nUSER 1000:100\n"
    )
    for _ in engine.build(
        fileobj=io.BytesIO(dockerfile.encode()), tag="cloudjob-test/old", rm=True
    ):
        pass
    cloud.script("print('ran')")
    try:
        done = cloud.submit("--image", "cloudjob-test/old")
    finally:
        engine.remove_image("cloudjob-test/old", force=True)

    assert done.out == b"[0] ran\n", done


def test_the_image_runs_a_job_without_cloudjob(engine, base_image, tmp_path):
    """`docker run IMAGE SCRIPT` is a job of one node: the image's ENTRYPOINT needs no cloudjob."""
    container_id = engine.create_container(
        base_image, ["--dry-run", "--json", "python", "-c", "pass"]
    )["Id"]
    try:
        engine.start(container_id)
        code = engine.wait(container_id)["StatusCode"]
        plan = json.loads(engine.logs(container_id, stdout=True, stderr=False))
    finally:
        engine.remove_container(container_id, force=True)

    assert code == 0
    assert plan["role"] == "head"


def test_doctor_reports_what_an_image_lacks(cloud, base_image):
    """The base image has everything; for a bare Debian, doctor lists what to install."""
    complete = cloud.run("doctor", "--image", base_image)
    bare = cloud.run("doctor", "--image", "debian:bookworm-slim")

    assert complete.code == 0, complete
    assert b"MISSING" not in complete.out
    assert bare.code == 1, bare
    for hint in (b"openssh-server", b"openmpi-bin", b"python3", b"useradd --uid 1000"):
        assert hint in bare.out


def test_doctor_reports_a_shell_that_prints_text_or_runs_nothing(cloud, derive):
    """Text that a shell prints would precede the output of every command over ssh."""
    loud = "#!/bin/sh\necho 'Welcome to this node'\nexec /bin/sh \"$@\"\n"
    lines = "COPY loud /bin/loud\nRUN usermod --shell /bin/loud ma-user"
    image = derive("loud-shell", lines, loud=loud)
    mute = derive("no-shell", "RUN usermod --shell /usr/sbin/nologin ma-user")

    assert b"/bin/loud prints 'Welcome to this node'" in cloud.run("doctor", "--image", image).out
    assert b"/usr/sbin/nologin runs no commands" in cloud.run("doctor", "--image", mute).out


def test_doctor_checks_this_machine(cloud):
    """Without options, doctor checks this host; an engine or mpirun is enough to pass."""
    done = cloud.run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.out)}

    assert done.code == 0, done
    assert checks["container engine"]["is_ok"]
    assert checks["CLOUDJOB_HOME"]["is_ok"]


def test_an_image_is_built_once(cloud, base_image):
    """A second build of the same inputs builds nothing and returns the same tag."""
    done = cloud.run("image", "build", "base")

    assert (done.code, done.out.decode().strip()) == (0, base_image), done
    assert "already built" in done.err


def test_an_image_on_another_base_gets_its_own_tag(cloud, engine, base_image, derive):
    """The tag `latest` of the image stays unchanged."""
    other = derive("other-base", "RUN true")
    latest = engine.inspect_image("cloudjob/base:latest")["Id"]
    tag = f"cloudjob/base:on-{other.replace('/', '-')}"
    built = cloud.run("image", "build", "base", "--base", other)
    try:
        assert built.code == 0, built
        assert engine.inspect_image("cloudjob/base:latest")["Id"] == latest
        assert (
            engine.inspect_image(tag)["Id"]
            == engine.inspect_image(built.out.decode().strip())["Id"]
        )
    finally:
        for name in (tag, built.out.decode().strip()):
            engine.remove_image(name, force=True)


def test_images_have_no_host_keys_and_do_not_run_as_root(engine, base_image):
    container_id = engine.create_container(base_image, ["x"])["Id"]
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(engine.export(container_id)))) as files:
            names = files.getnames()
    finally:
        engine.remove_container(container_id)

    assert not [name for name in names if "ssh_host" in name]
    assert not [name for name in names if name.startswith("var/lib/apt/lists/")]
    assert engine.inspect_image(base_image)["Config"]["User"] == "1000:100"


RECIPE = """\
ARG BASE
FROM ${BASE} AS packages
ARG STAGE=packages
LABEL cloudjob.stage=${STAGE}
USER 0
COPY images/pip.conf* /build/
RUN rm /build/pip.conf; sleep 0.2
RUN sleep 0.2
FROM ${BASE}
COPY --from=packages /build /opt/build
"""


def test_an_image_on_our_base_keeps_the_latest_tags_of_both(
    engine, base_image, tmp_path, monkeypatch
):
    # Not the repository of the real images, whose `latest` a job of another test may be using.
    repository = f"cloudjob-test-{os.urandom(4).hex()}"
    monkeypatch.setattr(images, "REPOSITORY", repository)
    monkeypatch.setattr(images, "_folder", lambda: tmp_path)
    (tmp_path / "pip-install.sh").write_text("#!/bin/sh\n")
    for name, base in (("base", base_image), ("examples", f"{repository}/base:latest")):
        text = f"ARG BASE={base}\nFROM ${{BASE}}\nLABEL name={name}\n"
        (tmp_path / f"{name}.Dockerfile").write_text(text)

    try:
        built = images.build("examples")

        inner, outer = (
            engine.inspect_image(f"{repository}/{name}:latest") for name in ("base", "examples")
        )
        assert outer["Id"] == built.id
        assert inner["Config"]["Labels"]["name"] == "base"
        assert (
            outer["RootFS"]["Layers"][: len(inner["RootFS"]["Layers"])] == inner["RootFS"]["Layers"]
        )
    finally:
        for name in ("examples", "base"):
            for image in engine.images(f"{repository}/{name}"):
                engine.remove_image(image["Id"], force=True)


def test_concurrent_builds_do_not_interfere(engine, base_image, tmp_path, monkeypatch):
    """No build removes the stage of another build or fails to remove its own."""
    names = [f"test-{number}-{os.urandom(4).hex()}" for number in range(8)]
    config = tmp_path / "pip.conf"
    config.write_text("[global]\n")
    (tmp_path / "pip-install.sh").write_text("#!/bin/sh\n")
    for name in names:
        (tmp_path / f"{name}.Dockerfile").write_text(f"{RECIPE}LABEL name={name}\n")
    monkeypatch.setattr(images, "_folder", lambda: tmp_path)
    # The engine may have stages of builds that were killed.
    stages_before = own_stages(engine)

    def build(name):
        return images.build(name, base=base_image, pip_config=str(config)).tag

    try:
        with ThreadPoolExecutor(len(names)) as pool:
            tags = list(pool.map(build, names))

        assert [tag.partition(":")[0] for tag in tags] == [f"cloudjob/{name}" for name in names]
        assert own_stages(engine) <= stages_before
    finally:
        for name in names:
            for image in engine.images(f"cloudjob/{name}"):
                engine.remove_image(image["Id"], force=True)


@pytest.fixture
def own_engine(cloud, engine, base_image) -> Iterator[Dockerd]:
    """A separate engine with our image, on which the test's jobs run and which can be restarted."""
    if os.geteuid():
        pytest.skip("only root may start an engine")
    dockerd = Dockerd()
    try:
        dockerd.start()
        dockerd.client.load_image(engine.get_image(base_image))
        cloud.environ["DOCKER_HOST"] = dockerd.host
        cloud.image = base_image
        yield dockerd
    finally:
        dockerd.close()


@pytest.mark.long
def test_a_restart_of_the_engine_ends_jobs_unless_it_restores_containers(
    cloud, own_engine, tmp_path
):
    cloud.script(TICKS)
    with (tmp_path / "submit").open("wb") as file:
        submit = cloud.start("submit", "--backend", "docker", "train.py", out=file)
    with Followed(submit, Path(file.name)) as followed:
        followed.await_all(b"[0] up", limit_s=LIMIT_S)
        own_engine.stop()
        own_engine.start()
        for path in ("/tmp/go", "/tmp/end"):
            touch(own_engine.client, job_of(followed.path), path)
        assert submit.wait(LIMIT_S) == 0, followed.path.read_bytes()[-2000:]
    assert b"[0] end\n" in followed.path.read_bytes()

    job = cloud.detach()
    cloud.await_log(job, b"[0] up")
    own_engine.keep_containers(False)
    own_engine.stop()
    own_engine.start()

    assert cloud.run("wait", job).code != 0
    status = cloud.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 0, status


def own_stages(engine):
    """Return the ids of the leftover build stages that contain files of a user."""
    stages = engine.images(all=True, filters={"label": "cloudjob.stage"})
    return {each["Id"] for each in stages if each["Labels"]["cloudjob.stage"] != "packages"}


def test_pip_files_leave_no_trace_and_open_mpi_5_runs(cloud, build, engine, tmp_path):
    """No image contains the CA bundle or pip configuration of its build, and the image runs."""
    token = f"token-{os.urandom(8).hex()}"
    stages_before = own_stages(engine)
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\n# {token}\n")
    bundle = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    tag = build("openmpi5", "--ca-bundle", bundle, "--pip-config", str(config))

    history = json.dumps(engine.history(tag))
    saved = subprocess.run(
        ["grep", "-c", "-a", token], input=b"".join(engine.get_image(tag)), check=False
    )
    assert saved.returncode == 1
    assert token not in history
    assert "images/pip" not in history
    assert own_stages(engine) <= stages_before

    cloud.script("""\
        from mpi4py import MPI
        print(MPI.Get_library_version().split(",")[0], MPI.COMM_WORLD.allreduce(1))
        """)
    done = cloud.submit("--nodes", "2", "--image", tag)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[%d] Open MPI v5.0.11 2" % rank for rank in (0, 1)]


TICKS = """\
import os, time
print("up", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
print("x" * 100_000, flush=True)
while not os.path.exists("/tmp/end"):
    time.sleep(0.05)
print("end")
"""


def job_of(path):
    """Return the id of the job that ``submit`` printed to this file."""
    match = re.search(rb"docker://local/([a-z0-9-]+)", path.read_bytes())
    assert match
    return match[1].decode()


def touch(engine, job, path):
    """Create a file in each container of a job."""
    for item in engine.containers(filters={"label": f"cloudjob.job={job}"}):
        call = engine.exec_create(item["Id"], ["touch", path])["Id"]
        engine.exec_start(call)


def test_followers_outlast_an_engine_that_does_not_answer(cloud, tmp_path):
    """Connections break and are then refused for a while; no line is lost or shown twice."""
    cloud.script(TICKS)
    proxy = EngineProxy(tmp_path / "engine.sock", engine_host())
    cloud.environ["DOCKER_HOST"] = proxy.host
    job = cloud.detach("--nodes", "2")
    commands = [("logs", "--follow", job), ("wait", job)]
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context((tmp_path / arguments[0]).open("wb")) for arguments in commands
        ]
        logs, wait = (
            stack.enter_context(Followed(cloud.start(*arguments, out=file), Path(file.name)))
            for arguments, file in zip(commands, files, strict=True)
        )
        logs.await_all(b"[0] up", b"[1] up", limit_s=LIMIT_S)
        proxy.stop()
        touch(cloud.engine, job, "/tmp/go")
        for followed in (logs, wait):
            followed.await_all(b"the job continues", limit_s=LIMIT_S)
        proxy.start()
        touch(cloud.engine, job, "/tmp/end")
        codes = [followed.process.wait(LIMIT_S) for followed in (logs, wait)]
    proxy.stop()

    output = logs.path.read_bytes()
    assert codes == [0, 0], (output, wait.path.read_bytes())
    for rank in (b"[0] ", b"[1] "):
        lines = [line for line in output.splitlines() if line.startswith(rank)]
        assert lines == [rank + b"up", rank + b"x" * 100_000, rank + b"end"]
