"""A client of the container engine, and images for tests."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import docker
import pytest

ROOT = Path(__file__).parents[2]
# Seconds for one request of a test: a busy engine takes minutes to load an image.
REQUEST_S = 600


def connect() -> docker.APIClient:
    """Return a client of this machine's engine; skip the test if there is none."""
    try:
        environ = docker.utils.kwargs_from_env()
        return docker.APIClient(**environ, version="auto", timeout=REQUEST_S)
    except docker.errors.DockerException as error:
        if os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
            raise
        pytest.skip(f"no container engine here: {error}")


def build_on(
    engine: docker.APIClient, image: str, tag: str, lines: str, files: Mapping[str, bytes]
) -> None:
    """Build an image from another, some lines of a Dockerfile and the files that they name."""
    recipe = f"FROM {image}\nUSER 0\n{lines}\nUSER 1000:100\n"
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        for path, content in {"Dockerfile": recipe.encode(), **files}.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755
            members.addfile(member, io.BytesIO(content))
    data.seek(0)
    output = list(engine.build(fileobj=data, custom_context=True, tag=tag, rm=True, decode=True))
    assert not [line for line in output if "error" in line], output


def remove(engine: docker.APIClient, tag: str) -> None:
    """Remove an image of the tests.

    The engine fails now and then while another process removes one with the same layers.
    """
    try:
        engine.remove_image(tag, force=True)
    except docker.errors.APIError as error:
        if not error.is_server_error():
            raise


def add_entry(engine: docker.APIClient, image: str) -> str:
    """Add the current entry to an image, as images/base.Dockerfile does."""
    recipe = (ROOT / "images" / "base.Dockerfile").read_text()
    begin = recipe.index("COPY cloudjob/jobentry.pyz")
    lines = recipe[begin : recipe.index("USER 1000:100", begin)]
    names = "cloudjob/jobentry.pyz", "entrypoints/boot.sh"
    tag = f"cloudjob-test/{image.partition('/')[2].replace(':', '-')}-{os.getpid()}"
    build_on(engine, image, tag, lines, {name: (ROOT / name).read_bytes() for name in names})
    return tag
