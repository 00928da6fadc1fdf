"""Objects that are folders: the same rule on every server, for inputs and for outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudjob.store import open_store
from cloudjob.tracking import outputs
from cloudjob.tracking.outputs import OutputLocation
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.staging import inputs
from tests.support.servers import Server, boto3_client

# Objects by their keys, the input's URI in the bucket, and the files that a node gets.
LAYOUTS: dict[str, tuple[dict[str, bytes], str, dict[str, bytes]]] = {
    "empty object beside a prefix": ({"data": b"", "data/x": b"1"}, "data", {"x": b"1"}),
    "with a slash": ({"data/": b"", "data/x": b"1"}, "data", {"x": b"1"}),
    "asked for with a slash": ({"data": b"", "data/x": b"1"}, "data/", {"x": b"1"}),
    "inside": (
        {"data/a": b"", "data/a/b": b"1", "data/a-b": b"2"},
        "data",
        {"a/b": b"1", "a-b": b"2"},
    ),
    "inside with a slash": ({"data/a/": b"", "data/a/b/c": b"1"}, "data", {"a/b/c": b"1"}),
    "empty files stay": ({"data/a": b"", "data/b": b"1"}, "data", {"a": b"", "b": b"1"}),
    "an empty file alone": ({"data": b"", "data-2/x": b"1"}, "data", {"": b""}),
}


def fetched(tmp_path: Path, uri: str) -> dict[str, bytes]:
    """Return the files of an input."""
    paths = NodePaths(*(str(tmp_path / name) for name in ("", "job", "mount", "log", "node")))
    inputs.stage(NodeEnv(hosts=("a",), inputs=(("DATA", uri),)), paths, {})
    top = Path(paths.input("DATA"))
    if top.is_file():
        return {"": top.read_bytes()}
    return {
        path.relative_to(top).as_posix(): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file()
    }


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    s3_server: Server = request.getfixturevalue(request.param)
    return s3_server


@pytest.fixture
def bucket(
    server: Server, new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Any]:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return new_bucket(server), boto3_client(server.endpoint)


def put(bucket: tuple[str, Any], objects: dict[str, bytes]) -> None:
    name, client = bucket
    for key, data in objects.items():
        client.put_object(Bucket=name, Key=key, Body=data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_object_with_others_below_it_is_a_folder(bucket, tmp_path, layout):
    objects, name, expected = LAYOUTS[layout]
    put(bucket, objects)

    assert fetched(tmp_path, f"s3://{bucket[0]}/{name}") == expected


def test_an_object_with_contents_in_the_place_of_a_folder_is_an_error(bucket, tmp_path):
    put(bucket, {"data/a": b"precious", "data/a/b": b"1"})

    with pytest.raises(EntryError, match=r"data/a: it has contents, but its name is that of a fol"):
        fetched(tmp_path, f"s3://{bucket[0]}/data")


def test_outputs_that_a_platform_has_stored_follow_the_same_rule(bucket, tmp_path):
    put(bucket, {"out/a": b"", "out/a/b": b"1", "out/c/": b"", "out/d": b""})
    store = open_store(f"s3://{bucket[0]}")
    location = OutputLocation("MODEL", store, "out/", is_listed=True)

    outputs.fetch(location, tmp_path)

    files = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert files == {"MODEL/a/b", "MODEL/d"}
