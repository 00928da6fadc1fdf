"""What a node has kept of an output: ``dump`` in the container, ``load`` on the laptop and there.

A manifest is written when every object that it names is there, so what it lists is whole. Each
node writes its own, in a folder beside the outputs that also holds what no plain name can have:
the new version of a file whose plain name still holds the one that a reader is told of.
"""

from __future__ import annotations

import json
import re
from typing import Iterable, NamedTuple

FOLDER = ".cloudjob-outputs"
_FORMAT = 1
_MOST = 1 << 62


class ManifestError(Exception):
    """The bytes are no manifest that we can read."""


class Kept(NamedTuple):
    """One file of an output.

    Args:
        name: Its path, relative to the output's folder.
        key: Where its bytes are, relative to the output's URI.
        sha256: Their digest in hexadecimal.
        modified_ns: When it was last written, nanoseconds since 1970.
        is_incomplete: Whether it may lack its end: it is, or was at the end of a failed job, being
            written.
    """

    name: str
    key: str
    size_bytes: int
    sha256: str
    modified_ns: int
    is_incomplete: bool = False


class Manifest(NamedTuple):
    """What one node has kept of one output: a set of files that were there together."""

    job: str = ""
    node: int = 0
    files: tuple[Kept, ...] = ()


def key(node: int) -> str:
    """Return where the manifest of a node is, relative to the output's URI."""
    return f"{FOLDER}/node-{node}.json"


def node_of(name: str) -> int:
    """Return the node whose manifest is called so below the folder, -1 for another thing."""
    found = re.match(r"node-(0|[1-9][0-9]{0,8})\.json\Z", name, re.ASCII)
    return int(found.group(1)) if found else -1


def version_key(node: int, sha256: str) -> str:
    """Return where a node keeps a file while its plain name is taken."""
    return f"{FOLDER}/node-{node}/{sha256}"


def is_name(text: str) -> bool:
    """Whether this can name a file below a folder."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    segments = text.split("/")
    return not any(segment in ("", ".", "..") for segment in segments) and "\0" not in text


def dump(manifest: Manifest) -> bytes:
    """Return the bytes from which ``load`` makes ``manifest`` again."""
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
        ManifestError: It is none, or of another format.
    """
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise ManifestError(f"its format is {value['format']!r}, and we know only {_FORMAT}")
        manifest = Manifest(
            job=str(value["job"]),
            node=int(value["node"]),
            files=tuple(_kept(file) for file in value["files"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ManifestError(f"it cannot be read: {type(error).__name__}: {error}") from error
    return manifest


def _kept(value: dict[str, object]) -> Kept:
    kept = Kept(
        name=str(value["name"]),
        key=str(value["key"]),
        size_bytes=int(str(value["size_bytes"])),
        sha256=str(value["sha256"]),
        modified_ns=int(str(value["modified_ns"])),
        is_incomplete=value.get("is_incomplete", False) is True,
    )
    is_digest = re.match(r"[0-9a-f]{64}\Z", kept.sha256, re.ASCII) is not None
    is_size = 0 <= kept.size_bytes <= _MOST and abs(kept.modified_ns) <= _MOST
    if not (is_name(kept.name) and is_name(kept.key) and is_digest and is_size):
        raise ValueError(f"{kept.name!r} is not a file that a node keeps")
    return kept


def clashes(manifests: Iterable[Manifest]) -> dict[str, list[int]]:
    """Return the names under which several nodes have kept files that differ, with the nodes."""
    found: dict[str, dict[str, list[int]]] = {}
    for manifest in manifests:
        for file in manifest.files:
            found.setdefault(file.name, {}).setdefault(file.sha256, []).append(manifest.node)
    return {
        name: sorted(node for nodes in versions.values() for node in nodes)
        for name, versions in sorted(found.items())
        if len(versions) > 1
    }
