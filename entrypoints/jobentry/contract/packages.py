"""The form of a code package: ``dump`` on the laptop, ``load`` in the container. No I/O.

A package is a tree of files, folders and links. Its bytes lie in *layers*: immutable objects under
``layers/`` in the store, each named by the digest of its index. A layer is

    the contents of files, one after another | the index, as JSON | the footer

and its index says which entries of the tree the layer adds or changes, which names it removes, and
where each content lies. A *descriptor*, the object that ``code.uri`` names, lists the layers from
the oldest to the newest, and the digest of the whole tree.

Names are text in which bytes that are no UTF-8 stand as surrogate escapes, whatever the locale.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
import zlib
from typing import Any, Iterable, NamedTuple, NoReturn, Sequence

FORMAT = 1
LAYERS = "layers/"
# An object below it marks a layer whose contents a node found damaged: nobody may reuse that layer.
DAMAGED = "damaged/"
FILE, FOLDER, LINK = "file", "folder", "link"
RAW, ZLIB = "raw", "zlib"
# The offset of a content that a lower layer holds.
BELOW = -1

MAGIC = b"cloudjob layer\n\0"
_FOOTER = struct.Struct(">16sHH4xQQQ")
FOOTER_BYTES = _FOOTER.size
# A million files; what is longer is no index of ours.
INDEX_LIMIT_BYTES = 256 * 1024 * 1024
DESCRIPTOR_LIMIT_BYTES = 1024 * 1024
LAYERS_LIMIT = 64

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"layers/([0-9a-f]{64})(?:\.[0-9a-z]{1,16})?")
_MOST = 1 << 62


class FormatError(Exception):
    """A layer or a descriptor is not what ``cloudjob`` writes."""


class Entry(NamedTuple):
    """One file, folder or link of a tree.

    Args:
        mode: The permission bits; of no meaning for a link.
        digest: The SHA-256 of a file's content in hexadecimal.
        target: Where a link leads.
    """

    name: str
    kind: str
    mode: int = 0
    size_bytes: int = 0
    digest: str = ""
    target: str = ""


class Content(NamedTuple):
    """Where the content of files lies in a layer.

    Args:
        offset: From the layer's beginning, or ``BELOW``.
        stored_bytes: How long it is there.
        encoding: ``RAW`` or ``ZLIB``.
    """

    digest: str
    size_bytes: int
    offset: int
    stored_bytes: int
    encoding: str


class Index(NamedTuple):
    """What one layer adds to those below it."""

    entries: tuple[Entry, ...]
    contents: tuple[Content, ...]
    removed: tuple[str, ...] = ()


class Footer(NamedTuple):
    """Where the index lies in a layer; ``size_bytes`` is its length as JSON."""

    encoding: str
    offset: int
    stored_bytes: int
    size_bytes: int


class Layer(NamedTuple):
    """One layer as a descriptor names it: its key in the store, the digest of its index."""

    key: str
    digest: str
    size_bytes: int


class Descriptor(NamedTuple):
    """What ``code.uri`` holds.

    Args:
        digest: ``sha256:`` and the digest of the tree.
        files: How many files it has.
        size_bytes: How long they are together.
        layers: From the oldest to the newest.
    """

    digest: str
    files: int
    size_bytes: int
    layers: tuple[Layer, ...]


def name_bytes(name: str) -> bytes:
    """Return the bytes of a name on the disk."""
    return name.encode("utf-8", "surrogateescape")


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


# ---- the index ---------------------------------------------------------------------------------


def dump_index(index: Index) -> bytes:
    """Return the index as JSON; its SHA-256 is the digest of the layer."""
    number = {content.digest: place for place, content in enumerate(index.contents)}
    files, folders, links = [], [], []
    for entry in index.entries:
        if entry.kind == FILE:
            files.append((entry.name, entry.mode, number[entry.digest]))
        elif entry.kind == FOLDER:
            folders.append((entry.name, entry.mode))
        else:
            links.append((entry.name, entry.target))
    value = {
        "format": FORMAT,
        "files": files,
        "folders": folders,
        "links": links,
        "contents": index.contents,
        "removed": index.removed,
    }
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def load_index(data: bytes) -> Index:
    """Return the index in ``data``.

    Raises:
        FormatError: It is none, or one of another format.
    """
    value = _load(data, "index")
    contents = tuple([_content(*row) for row in _rows(value, "contents", 5)])
    entries = []
    for name, mode, number in _rows(value, "files", 3):
        if not _is_number(number, len(contents) - 1):
            _refuse("a file's content is not listed")
        digest, size_bytes, _, _, _ = contents[number]
        entries.append(Entry(_text(name), FILE, _mode(mode), size_bytes, digest))
    entries += [
        Entry(_text(name), FOLDER, _mode(mode)) for name, mode in _rows(value, "folders", 2)
    ]
    entries += [
        Entry(_text(name), LINK, target=_text(target)) for name, target in _rows(value, "links", 2)
    ]
    removed = value.get("removed")
    if not isinstance(removed, list):
        _refuse("'removed' is no list")
    return Index(tuple(entries), contents, tuple(_text(name) for name in removed))


def merge(indices: Sequence[Index]) -> dict[str, Entry]:
    """Return the tree that layers make, the oldest first.

    Raises:
        FormatError: A name is there twice in one layer.
    """
    tree = {}  # type: dict[str, Entry]
    for index in indices:
        for name in index.removed:
            tree.pop(name, None)
        added = {entry.name: entry for entry in index.entries}
        if len(added) != len(index.entries):
            _refuse("%a is there twice" % _first_twice(entry.name for entry in index.entries))
        tree.update(added)
    return tree


def _first_twice(names: Iterable[str]) -> str:
    seen = set()  # type: set[str]
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise ValueError("no name is there twice")


def encode_index(data: bytes, encoding: str, offset: int) -> bytes:
    """Return what ends a layer whose contents end at ``offset``: the index and the footer."""
    stored = zlib.compress(data, 6) if encoding == ZLIB else data
    code = 1 if encoding == ZLIB else 0
    return stored + _FOOTER.pack(MAGIC, FORMAT, code, offset, len(stored), len(data))


def load_footer(data: bytes, layer_bytes: int) -> Footer:
    """Return the footer in the last bytes of a layer that is ``layer_bytes`` long.

    Raises:
        FormatError: It is none, or the index would lie elsewhere than between contents and footer.
    """
    if len(data) != FOOTER_BYTES:
        _refuse("shorter than a layer can be")
    magic, form, code, offset, stored_bytes, size_bytes = _FOOTER.unpack(data)
    if magic != MAGIC:
        _refuse("no layer of a package")
    if form != FORMAT or code > 1:
        _refuse("format %d, and this cloudjob reads format %d" % (form, FORMAT))
    if offset + stored_bytes + FOOTER_BYTES != layer_bytes:
        _refuse("its index does not lie where its footer says")
    if max(stored_bytes, size_bytes) > INDEX_LIMIT_BYTES or (
        code == 0 and stored_bytes != size_bytes
    ):
        _refuse("its index cannot be so long")
    return Footer(ZLIB if code else RAW, offset, stored_bytes, size_bytes)


def decode_index(stored: bytes, footer: Footer) -> bytes:
    """Return the index as JSON, inflated by no more than its footer says.

    Raises:
        FormatError: It is not as long as the footer says, or cannot be inflated.
    """
    data = stored if footer.encoding == RAW else inflate(stored, footer.size_bytes)
    if len(stored) != footer.stored_bytes or len(data) != footer.size_bytes:
        _refuse("its index is not as long as its footer says")
    return data


def inflate(stored: bytes | memoryview, size_bytes: int) -> bytes:
    """Return ``size_bytes`` bytes, never more.

    Raises:
        FormatError: ``stored`` is something else.
    """
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(stored, size_bytes + 1)
    except zlib.error as error:
        raise FormatError("cannot be inflated: %s" % error) from error
    if len(data) != size_bytes or not inflater.eof or inflater.unused_data:
        _refuse("inflated it is not %d bytes long" % size_bytes)
    return data


# ---- the descriptor ----------------------------------------------------------------------------


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
        FormatError: It is none, or one of another format.
    """
    if len(data) > DESCRIPTOR_LIMIT_BYTES:
        _refuse("no descriptor is so long")
    value = _load(data, "descriptor")
    rows = value.get("layers")
    if not isinstance(rows, list) or not 0 < len(rows) <= LAYERS_LIMIT:
        _refuse("a package has 1 to %d layers" % LAYERS_LIMIT)
    layers = tuple(_layer(row) for row in rows)
    if len({layer.key for layer in layers}) != len(layers):
        _refuse("a layer is there twice")
    digest = _text(value.get("digest"))
    if not digest.startswith("sha256:") or not _DIGEST.fullmatch(digest[7:]):
        _refuse("its digest is none")
    return Descriptor(digest, _number(value.get("files")), _number(value.get("size_bytes")), layers)


def layer_uri(descriptor_uri: str, layer: Layer) -> str:
    """Return the URI of a layer: its store is that of the descriptor, ``STORE/JOB/code.json``."""
    return descriptor_uri.rsplit("/", 2)[0] + "/" + layer.key


def damage_key(layer_key: str) -> str:
    """Return the key of the object that marks a layer as damaged.

    Raises:
        FormatError: This is not the key of a layer.
    """
    if _KEY.fullmatch(layer_key) is None:
        _refuse("%a is not the key of a layer" % layer_key)
    return DAMAGED + layer_key[len(LAYERS) :]


def damage_uri(descriptor_uri: str, layer_key: str) -> str:
    """Return the URI of the object that marks a layer as damaged."""
    return descriptor_uri.rsplit("/", 2)[0] + "/" + damage_key(layer_key)


def _layer(row: Any) -> Layer:
    if not isinstance(row, dict):
        _refuse("a layer is no object")
    layer = Layer(_text(row.get("key")), _text(row.get("digest")), _number(row.get("size_bytes")))
    match = _KEY.fullmatch(layer.key)
    if match is None or match.group(1) != layer.digest:
        _refuse("%a is not the key of a layer" % layer.key)
    return layer


# ---- what is read of JSON ----------------------------------------------------------------------


def _load(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(
            data.decode("ascii"),
            # Where Python itself refuses long numbers, its own way of reading them is quicker.
            parse_int=None if getattr(sys, "get_int_max_str_digits", int)() else _parse_int,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError("its %s cannot be read: %s" % (what, error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        _refuse("its %s is not one of format %d" % (what, FORMAT))
    return value


def _parse_int(text: str) -> int:
    # Numbers of a million digits take Python hours.
    if len(text) > 19:
        raise ValueError("a number is too long")
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError("%.20s is no whole number" % text)


def _rows(value: dict[str, Any], key: str, width: int) -> list[list[Any]]:
    rows = value.get(key)
    if not isinstance(rows, list):
        _refuse("%r is no list" % key)
    for row in rows:
        if not isinstance(row, list) or len(row) != width:
            _refuse("a row of %r has not %d fields" % (key, width))
    return rows


def _content(
    digest: Any, size_bytes: Any, offset: Any, stored_bytes: Any, encoding: Any
) -> Content:
    if type(digest) is not str or not _DIGEST.fullmatch(digest):
        _refuse("the digest of a content is none")
    for value in (size_bytes, stored_bytes, 0 if offset == BELOW else offset):
        # As in _number: a call for each of them took half of the time.
        if type(value) is not int or not 0 <= value <= _MOST:
            _refuse("what should be a number is none")
    if encoding == RAW:
        if stored_bytes != size_bytes and offset != BELOW:
            _refuse("a raw content is not as long as it says")
    elif encoding != ZLIB:
        _refuse("an encoding is neither raw nor zlib")
    return Content(digest, size_bytes, offset, stored_bytes, encoding)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse("what should be text is none")
    if value.isascii():
        return value
    try:
        name_bytes(value)
    except UnicodeEncodeError:
        _refuse("%a is no name" % value)
    return value


def _mode(value: Any) -> int:
    if not _is_number(value, 0o777):
        _refuse("a mode is none")
    return int(value)


def _number(value: Any) -> int:
    if not _is_number(value, _MOST):
        _refuse("what should be a number is none")
    return int(value)


def _is_number(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _refuse(fault: str) -> NoReturn:
    raise FormatError(fault)
