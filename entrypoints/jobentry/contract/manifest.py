"""The manifest of an output: lists the files that a node has stored. Both halves read it.

A node writes its manifest once all listed objects are complete. Manifests are in a folder beside
the outputs. The same folder holds a new version of a file while the object with its plain name is
still the version in the current manifest.
"""

from __future__ import annotations

import json
import re
from typing import Iterable, NamedTuple

FOLDER = ".cloudjob-outputs"
_FORMAT = 1
_MAX_INT = 1 << 62


class ManifestError(Exception):
    """The bytes are not a manifest of a known format."""


class StoredFile(NamedTuple):
    """One file of an output.

    Args:
        name: Its path, relative to the output's folder.
        key: The key of its object, relative to the output's URI.
        sha256: Its digest in hexadecimal.
        modified_ns: When it was last written, in nanoseconds since 1970.
        is_incomplete: Whether its end may be missing, as it is still being written or was at the
            end of a failed job.
    """

    name: str
    key: str
    size_bytes: int
    sha256: str
    modified_ns: int
    is_incomplete: bool = False


class Manifest(NamedTuple):
    """The files of one output on one node, as they were at one time."""

    job: str = ""
    node: int = 0
    files: tuple[StoredFile, ...] = ()


def key(node: int) -> str:
    """Return the key of a node's manifest, relative to the output's URI."""
    return f"{FOLDER}/node-{node}.json"


def node_of(name: str) -> int:
    """Return the node whose manifest has this file name, -1 if it is not a manifest."""
    found = re.match(r"node-(0|[1-9][0-9]{0,8})\.json\Z", name, re.ASCII)
    return int(found.group(1)) if found else -1


def version_key(node: int, sha256: str) -> str:
    """Return the key for a version of a file while its plain name is in use."""
    return f"{FOLDER}/node-{node}/{sha256}"


def is_name(text: str) -> bool:
    """Whether ``text`` is a valid relative path of a file."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    segments = text.split("/")
    return not any(segment in ("", ".", "..") for segment in segments) and "\0" not in text


def dump(manifest: Manifest) -> bytes:
    """Serialise ``manifest`` for ``load``."""
    value = {
        "format": _FORMAT,
        "job": manifest.job,
        "node": manifest.node,
        "files": [file._asdict() for file in manifest.files],
    }
    return json.dumps(value, indent=0).encode("ascii")


def load(data: bytes) -> Manifest:
    """Return the manifest that ``dump`` wrote.

    Raises:
        ManifestError: The bytes are not a manifest of a known format.
    """
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise ManifestError(f"its format is {value['format']!r}; only {_FORMAT} is supported")
        manifest = Manifest(
            job=str(value["job"]),
            node=int(value["node"]),
            files=tuple(_stored_file(file) for file in value["files"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ManifestError(f"it cannot be read: {type(error).__name__}: {error}") from error
    return manifest


def _stored_file(value: dict[str, object]) -> StoredFile:
    file = StoredFile(
        name=str(value["name"]),
        key=str(value["key"]),
        size_bytes=int(str(value["size_bytes"])),
        sha256=str(value["sha256"]),
        modified_ns=int(str(value["modified_ns"])),
        is_incomplete=value.get("is_incomplete", False) is True,
    )
    is_digest = re.match(r"[0-9a-f]{64}\Z", file.sha256, re.ASCII) is not None
    is_size = 0 <= file.size_bytes <= _MAX_INT and abs(file.modified_ns) <= _MAX_INT
    if not (is_name(file.name) and is_name(file.key) and is_digest and is_size):
        raise ValueError(f"the entry for {file.name!r} is not valid")
    return file


def clashes(manifests: Iterable[Manifest]) -> dict[str, list[int]]:
    """Return the names for which nodes have stored different files, with those nodes."""
    found: dict[str, dict[str, list[int]]] = {}
    for manifest in manifests:
        for file in manifest.files:
            found.setdefault(file.name, {}).setdefault(file.sha256, []).append(manifest.node)
    return {
        name: sorted(node for nodes in versions.values() for node in nodes)
        for name, versions in sorted(found.items())
        if len(versions) > 1
    }
