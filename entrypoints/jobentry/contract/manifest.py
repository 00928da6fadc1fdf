"""The manifest of an output: lists the files that a node has stored. Both halves read it.

A node writes its manifest once all listed objects are complete. Manifests are in a folder beside
the outputs. The same folder holds a new version of a file while the object with its plain name is
still the version in the current manifest.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Any, Callable, Iterable, Mapping, NamedTuple

from jobentry.contract.malformed import MALFORMED

FOLDER = ".cloudjob-outputs"
_FORMAT = 1
_MAX_INT = 1 << 62
# Any time that a file system can store, in nanoseconds before or after 1970.
_MAX_NS = 1 << 90
_MODE_BITS = 0o777
# No system makes a link with a longer target.
_TARGET_CHARS = 4096
# Why something in an output's folder is not in the store as it is, in words for people.
SPECIAL, OUTSIDE, RESERVED, COPIED = "special", "outside", "reserved", "copied"
REASONS = {
    SPECIAL: "not a file, a folder or a link",
    OUTSIDE: "a link that leads out of the output, but not to a file",
    RESERVED: "cloudjob uses names of this kind",
    COPIED: "a link that leads out of the output; the file to which it leads is stored instead",
}


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


class Others(NamedTuple):
    """What an output has besides the contents of files.

    Args:
        links: Links, with where they lead to, relative to their folder. A link to a file is stored
            as a file, too.
        modes: The permission bits of files.
        folders: All folders, with their permission bits.
        left_out: What is not stored, or not as it is, with the reason.
    """

    links: Mapping[str, str] = MappingProxyType({})
    modes: Mapping[str, int] = MappingProxyType({})
    folders: Mapping[str, int] = MappingProxyType({})
    left_out: Mapping[str, str] = MappingProxyType({})


NOTHING = Others()


class Manifest(NamedTuple):
    """The files of one output on one node, as they were at one time."""

    job: str = ""
    node: int = 0
    files: tuple[StoredFile, ...] = ()


class Contents(NamedTuple):
    """A manifest as it was read.

    Args:
        refused: Entries that are not valid, as text for people.
    """

    manifest: Manifest = Manifest()
    others: Others = Others()
    refused: tuple[str, ...] = ()


def key(node: int) -> str:
    """Return the key of a node's manifest, relative to the output's URI."""
    return f"{FOLDER}/node-{node}.json"


def node_of(name: str) -> int:
    """Return the node whose manifest has this file name, -1 if it is not a manifest."""
    match = re.match(r"node-(0|[1-9][0-9]{0,8})\.json\Z", name, re.ASCII)
    return int(match.group(1)) if match else -1


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


def is_link(name: str, target: str) -> bool:
    """Whether a link of this name leads to a place in the output, whatever other links there are.

    A ``..`` after the name of a link would lead to the folder above that link's target.
    """
    if len(target) > _TARGET_CHARS:
        return False
    segments = target.split("/")
    up = len([segment for segment in segments if segment == ".."])
    rest = segments[up:]
    is_plain = segments[:up] == [".."] * up and (is_name("/".join(rest)) or not rest)
    return target == "." or (is_plain and up <= name.count("/"))


def dump(manifest: Manifest, others: Others = NOTHING) -> bytes:
    """Serialise a manifest for ``load`` and ``load_valid``."""
    value = {
        "format": _FORMAT,
        "job": manifest.job,
        "node": manifest.node,
        "files": [file._asdict() for file in manifest.files],
        **{name: dict(entries) for name, entries in others._asdict().items() if entries},
    }
    return json.dumps(value, indent=0).encode("ascii")


def load(data: bytes) -> Manifest:
    """Return the manifest that ``dump`` wrote.

    Raises:
        ManifestError: The bytes are not a manifest of a known format, or an entry is not valid.
    """
    loaded = load_valid(data)
    if loaded.refused:
        raise ManifestError(f"it cannot be read: {loaded.refused[0]}")
    return loaded.manifest


def load_valid(data: bytes) -> Contents:
    """Return what ``dump`` wrote; an entry that is not valid does not hide the others.

    Raises:
        ManifestError: The bytes are not a manifest of a known format.
    """
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise ManifestError(f"its format is {value['format']!r}; only {_FORMAT} is supported")
        refused: list[str] = []
        files = [_stored_file(file, refused) for file in value["files"]]
        manifest = Manifest(
            job=str(value["job"]),
            node=int(value["node"]),
            files=tuple(file for file in files if file is not None),
        )
        others = _others(value, refused)
    except MALFORMED as error:
        raise ManifestError(f"it cannot be read: {type(error).__name__}: {error}") from error
    return Contents(manifest, others, tuple(refused))


def _stored_file(value: object, refused: list[str]) -> StoredFile | None:
    """Return a file; None for an entry that is not valid, which does not hide the others."""
    try:
        if isinstance(value, dict):
            return _checked_file(value)
        reason = "it is not an object"
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
    refused.append(f"the entry {ascii(value)[:200]} is not valid: {reason}")
    return None


def _others(value: dict[str, object], refused: list[str]) -> Others:
    def entries(kind: str, is_valid: Callable[[str, object], bool]) -> dict[str, Any]:
        section = value.get(kind, {})
        if not isinstance(section, dict):
            refused.append(f"the entry {kind} is not valid")
            return {}
        valid = {k: item for k, item in section.items() if is_name(k) and is_valid(k, item)}
        bad = (name for name in section if name not in valid)
        refused.extend(f"the entry for {ascii(name)[:200]} is not valid" for name in bad)
        return valid

    return Others(
        entries("links", lambda name, target: isinstance(target, str) and is_link(name, target)),
        entries("modes", lambda _, mode: _is_mode(mode)),
        entries("folders", lambda _, mode: _is_mode(mode)),
        entries("left_out", lambda _, why: isinstance(why, str) and why in REASONS),
    )


def _is_mode(value: object) -> bool:
    return isinstance(value, int) and value == value & _MODE_BITS


def _checked_file(value: dict[str, object]) -> StoredFile:
    file = StoredFile(
        name=str(value["name"]),
        key=str(value["key"]),
        size_bytes=int(str(value["size_bytes"])),
        sha256=str(value["sha256"]),
        modified_ns=int(str(value["modified_ns"])),
        is_incomplete=value.get("is_incomplete", False) is True,
    )
    is_digest = re.match(r"[0-9a-f]{64}\Z", file.sha256, re.ASCII) is not None
    is_size = 0 <= file.size_bytes <= _MAX_INT and abs(file.modified_ns) <= _MAX_NS
    if not (is_name(file.name) and is_name(file.key) and is_digest and is_size):
        raise ValueError(f"the entry for {file.name!r} is not valid")
    return file


def clashes(manifests: Iterable[Manifest]) -> dict[str, list[int]]:
    """Return the names for which nodes have stored different files, with those nodes."""
    digests_of: dict[str, dict[str, list[int]]] = {}
    for manifest in manifests:
        for file in manifest.files:
            digests_of.setdefault(file.name, {}).setdefault(file.sha256, []).append(manifest.node)
    return {
        name: sorted(node for nodes in versions.values() for node in nodes)
        for name, versions in sorted(digests_of.items())
        if len(versions) > 1
    }
