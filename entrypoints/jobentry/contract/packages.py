"""The format of a code package: zip files with a manifest each, and a descriptor that lists them.

A package is a tree of files, folders and links. It consists of *layers*: zip files under
``layers/`` in the store, which jobs share. The last entry of a layer, ``manifest.json``, lists what
the layer adds to the layers below, what it changes and what it removes, with the SHA-256 of each
file and the zip entry that holds its content; a content without an entry is in a layer below. A
layer is named by the SHA-256 of its manifest. A *descriptor*, the object at ``code.uri``, lists the
layers from the oldest to the newest and has the digest of the whole tree.

Names are text in which bytes that are not UTF-8 are surrogate escapes, whatever the locale. The
name of a zip entry is for people: no reader uses it as a path.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Iterable, NamedTuple, NoReturn, Sequence

FORMAT = 2
LAYERS = "layers/"
# An object below it marks a layer that a node found damaged: no submit may reuse that layer.
DAMAGED = "damaged/"
MANIFEST = "manifest.json"
FILE, FOLDER, LINK = "file", "folder", "link"

# Enough for a million files.
MANIFEST_LIMIT_BYTES = 256 * 1024 * 1024
DESCRIPTOR_LIMIT_BYTES = 1024 * 1024
LAYERS_LIMIT = 64

_DIGEST = r"[0-9a-f]{64}"
_MODE = r"0[0-7]{3}"
_KEY = r"layers/([0-9a-f]{64})(?:\.[0-9a-z]{1,16})?"
_LIMIT = 1 << 62


class FormatError(Exception):
    """A layer or a descriptor does not have the format that ``cloudjob`` writes."""


class Entry(NamedTuple):
    """One file, folder or link of a tree.

    Args:
        mode: The permission bits; 0 for a link.
        digest: The SHA-256 of a file's content in hexadecimal.
        target: Where a link points.
    """

    name: str
    kind: str
    mode: int = 0
    size_bytes: int = 0
    digest: str = ""
    target: str = ""


class Manifest(NamedTuple):
    """The changes that one layer makes to those below it.

    Args:
        entries: What it adds or changes.
        contents: SHA-256 of a content in this layer -> name of the zip entry that holds it.
        removed: Names that it removes.
    """

    entries: Sequence[Entry]
    contents: dict[str, str]
    removed: Sequence[str] = ()


class Layer(NamedTuple):
    """A layer as a descriptor names it: its key in the store, and the SHA-256 of its manifest."""

    key: str
    digest: str
    size_bytes: int


class Descriptor(NamedTuple):
    """The contents of the object at ``code.uri``.

    Args:
        digest: ``sha256:`` and the digest of the tree.
        files: The number of files.
        size_bytes: Their total size.
        layers: From the oldest to the newest.
    """

    digest: str
    files: int
    size_bytes: int
    layers: Sequence[Layer]


def name_bytes(name: str) -> bytes:
    """Return the bytes of a name on the disk."""
    return name.encode("utf-8", "surrogateescape")


def zip_name(name: str, digest: str) -> str:
    """Return the name of the zip entry that holds the content of the file ``name``.

    Zip files have UTF-8 names only: the content of a file with another name is named by its digest.
    """
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "contents/" + digest
    return "files/" + name


def tree_digest(entries: Iterable[Entry]) -> str:
    """Return ``sha256:`` and the digest of a tree: the same for the same tree on any machine."""
    lines = []
    for entry in sorted(entries, key=lambda entry: name_bytes(entry.name)):
        name = name_bytes(entry.name)
        if entry.kind == FILE:
            facts = "file %o %d %s" % (entry.mode, entry.size_bytes, entry.digest)
            lines.append(b"%s\0%s\0" % (name, facts.encode("ascii")))
        elif entry.kind == FOLDER:
            lines.append(b"%s\0folder %o\0" % (name, entry.mode))
        else:
            lines.append(b"%s\0link %s\0" % (name, name_bytes(entry.target)))
    return "sha256:" + hashlib.sha256(b"cloudjob tree 1\n" + b"".join(lines)).hexdigest()


def merge(manifests: Iterable[Manifest]) -> dict[str, Entry]:
    """Return the tree that the layers form; the oldest layer comes first.

    Raises:
        FormatError: A layer contains a name twice.
    """
    tree = {}  # type: dict[str, Entry]
    for manifest in manifests:
        for name in manifest.removed:
            tree.pop(name, None)
        names = sorted(entry.name for entry in manifest.entries)
        for name, following in zip(names, names[1:]):
            if name == following:
                _refuse("%a is listed twice" % name)
        tree.update((entry.name, entry) for entry in manifest.entries)
    return tree


# ---- the manifest of a layer ---------------------------------------------------------------------


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; its SHA-256 is the digest of the layer."""
    files, folders, links = [], [], []
    for entry in manifest.entries:
        mode = "%04o" % entry.mode
        if entry.kind == FILE:
            row = {
                "path": entry.name, "mode": mode, "size": entry.size_bytes, "sha256": entry.digest,
            }  # fmt: skip
            if entry.digest in manifest.contents:
                row["entry"] = manifest.contents[entry.digest]
            files.append(row)
        elif entry.kind == FOLDER:
            folders.append({"path": entry.name, "mode": mode})
        else:
            links.append({"path": entry.name, "target": entry.target})
    value = {
        "format": FORMAT, "files": files, "folders": folders, "links": links,
        "removed": list(manifest.removed),
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def load_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``.

    Raises:
        FormatError: It is not a manifest, or has another format.
    """
    value = _load(data, "manifest")
    entries, contents = [], {}  # type: list[Entry], dict[str, str]
    for row in _rows(value, "files"):
        digest = row.get("sha256")
        if type(digest) is not str or not re.fullmatch(_DIGEST, digest):
            _refuse("a SHA-256 is missing")
        size_bytes, name = _number(row.get("size")), _text(row.get("path"))
        entries.append(Entry(name, FILE, _mode(row.get("mode")), size_bytes, digest))
        if "entry" in row and contents.setdefault(digest, row["entry"]) != row["entry"]:
            _refuse("a content is in two entries")
    for row in _rows(value, "folders"):
        entries.append(Entry(_text(row.get("path")), FOLDER, _mode(row.get("mode"))))
    for row in _rows(value, "links"):
        entries.append(Entry(_text(row.get("path")), LINK, target=_text(row.get("target"))))
    if len({_text(name) for name in contents.values()} - {MANIFEST}) != len(contents):
        _refuse("two contents are in one entry")
    return Manifest(entries, contents, [_text(name) for name in _list(value, "removed")])


# ---- the descriptor ------------------------------------------------------------------------------


def dump_descriptor(descriptor: Descriptor) -> bytes:
    """Return the descriptor as JSON."""
    value = {
        "format": FORMAT,
        "digest": descriptor.digest,
        "files": descriptor.files,
        "size_bytes": descriptor.size_bytes,
        "layers": [layer._asdict() for layer in descriptor.layers],
    }
    return json.dumps(value, indent=1).encode("ascii") + b"\n"


def load_descriptor(data: bytes) -> Descriptor:
    """Return the descriptor in ``data``.

    Raises:
        FormatError: It is not a descriptor, or has another format.
    """
    if len(data) > DESCRIPTOR_LIMIT_BYTES:
        _refuse("its descriptor is too long")
    value = _load(data, "descriptor")
    layers = tuple(_layer(row) for row in _rows(value, "layers"))
    if len(layers) > LAYERS_LIMIT:  # an empty folder has none
        _refuse("a package has at most %d layers" % LAYERS_LIMIT)
    if len({layer.key for layer in layers}) != len(layers):
        _refuse("a layer is listed twice")
    digest = _text(value.get("digest"))
    if not digest.startswith("sha256:") or not re.fullmatch(_DIGEST, digest[7:]):
        _refuse("it has no digest")
    return Descriptor(digest, _number(value.get("files")), _number(value.get("size_bytes")), layers)


def layer_uri(descriptor_uri: str, layer: Layer) -> str:
    """Return the URI of a layer, in the store of its descriptor ``STORE/JOB/code.json``."""
    return descriptor_uri.rsplit("/", 2)[0] + "/" + layer.key


def damage_key(layer_key: str) -> str:
    """Return the key of the object that marks a layer as damaged.

    Raises:
        FormatError: This is not the key of a layer.
    """
    if re.fullmatch(_KEY, layer_key) is None:
        _refuse("%a is not the key of a layer" % layer_key)
    return DAMAGED + layer_key[len(LAYERS) :]


def damage_uri(descriptor_uri: str, layer_key: str) -> str:
    """Return the URI of the object that marks a layer as damaged."""
    return descriptor_uri.rsplit("/", 2)[0] + "/" + damage_key(layer_key)


def _layer(row: dict[str, Any]) -> Layer:
    layer = Layer(_text(row.get("key")), _text(row.get("digest")), _number(row.get("size_bytes")))
    match = re.fullmatch(_KEY, layer.key)
    if match is None or match.group(1) != layer.digest:
        _refuse("%a is not the key of a layer" % layer.key)
    return layer


# ---- JSON from a store ---------------------------------------------------------------------------


def _load(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("ascii"), parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise FormatError("its %s cannot be read: %s" % (what, error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        _refuse("its %s is not of format %d: another version of cloudjob wrote it" % (what, FORMAT))
    return value


def _parse_int(text: str) -> int:
    # Python takes hours to parse a number of a million digits.
    if len(text) > 19:
        raise ValueError("a number is too long")
    return int(text)


def _list(value: dict[str, Any], key: str) -> list[Any]:
    rows = value.get(key)
    if not isinstance(rows, list):
        _refuse("%r is not a list" % key)
    return rows


def _rows(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = _list(value, key)
    if not all(isinstance(row, dict) for row in rows):
        _refuse("%r has a row that is not an object" % key)
    return rows


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse("a text is missing")
    if not value.isascii():
        try:
            name_bytes(value)
        except UnicodeEncodeError:
            _refuse("%a is not a name" % value)
    return value


def _mode(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch(_MODE, value):
        _refuse("a mode is missing")
    return int(value, 8)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LIMIT:
        _refuse("a number is missing")
    return int(value)


def _refuse(reason: str) -> NoReturn:
    raise FormatError(reason)
