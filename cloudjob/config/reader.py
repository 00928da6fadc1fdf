"""The layer that a file holds, key by key."""

from __future__ import annotations

from dataclasses import dataclass

from cloudjob.config.files import File, text_of
from cloudjob.config.layer import MAPS, Layer, Value, put
from cloudjob.config.tree import TEXT_TAGS, composed, entries, is_null, place_of, plain, shape
from cloudjob.spec import FIELDS, SECTIONS, Field, nearest, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from yaml.nodes import Node


def layer_of_file(file: File, problems: list[str]) -> Layer:
    """Return what a file says as a layer; what is wrong with it goes to ``problems``."""
    text = text_of(file)
    root = composed(text, file) if text.strip() else None
    layer: Layer = {}
    if root is None or is_null(root):
        return layer
    if shape(root) != "mapping":
        problems.append(f"{place_of(file, root)}must be a mapping of keys to values")
        return layer
    for key, node, value in entries(root, "", file, problems):
        _read_key(key, node, value, _Reader(file, layer, problems))
    return layer


@dataclass(frozen=True, slots=True)
class _Reader:
    """Where one file's values and problems go."""

    file: File
    layer: Layer
    problems: list[str]

    def problem(self, node: Node, key: str, what: str) -> None:
        self.problems.append(f"{place_of(self.file, node)}{one_line(key)}: {what}")

    def put(self, key: str, field: Field, node: Node, item: object) -> None:
        origin = f"{one_line(self.file.shown)}:{node.start_mark.line + 1}"
        value = Value(item, origin, self.file.path.parent, f"{origin}: ")
        put(self.layer, key, field, value, self.problems)


def _read_key(key: str, node: Node, value: Node, reader: _Reader) -> None:
    """Read one top-level key of a file, a field or a backend's section."""
    known = {field.name: field for field in FIELDS}
    if key in known:
        _read_field(key, known[key], value, reader)
    elif key in SECTIONS:
        _read_section(key, value, reader)
    else:
        reader.problem(node, key, f"no such key{nearest(key, [*known, *SECTIONS])}")


def _read_section(name: str, node: Node, reader: _Reader) -> None:
    if is_null(node):
        return
    if shape(node) != "mapping":
        reader.problem(node, name, "must be a mapping of keys to values")
        return
    known = {field.name: field for field in SECTIONS[name]}
    for key, key_node, value in entries(node, f"{name}.", reader.file, reader.problems):
        if key in known:
            _read_field(f"{name}.{key}", known[key], value, reader)
        else:
            what = f"no such key{nearest(key, known)} (allowed {', '.join(known)})"
            reader.problem(key_node, f"{name}.{key}", what)


def _read_field(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if is_null(node):
        return
    if field.kind == "list":
        _read_list(key, field, node, reader)
    elif field.kind == "secrets" and shape(node) == "sequence":
        _read_names(key, field, node, reader)
    elif field.kind in MAPS:
        _read_map(key, field, node, reader)
    else:
        text = plain(node) if field.kind == "tree" else _scalar(node, key, reader)
        if text is not None:
            reader.put(key, field, node, text)


def _read_names(key: str, field: Field, node: Node, reader: _Reader) -> None:
    for item in node.value:
        name = _scalar(item, key, reader)
        if name is not None:
            reader.put(f"{key}.{name}", field, item, "")


def _read_list(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if shape(node) != "sequence":
        reader.problem(node, key, "must be a list, one argument an item")
        return
    texts = [_scalar(item, f"{key}[{index}]", reader) for index, item in enumerate(node.value)]
    reader.put(key, field, node, tuple(text for text in texts if text is not None))


def _read_map(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if shape(node) != "mapping":
        also = "or a list of names" if field.kind == "secrets" else "NAME: value"
        reader.problem(node, key, f"must be a mapping, {also}")
        return
    for name, _, value in entries(node, f"{key}.", reader.file, reader.problems):
        if is_null(value) and field.name == "env":
            continue  # as though the line were not there
        text = "" if is_null(value) else _scalar(value, f"{key}.{name}", reader)
        if text is not None:
            reader.put(f"{key}.{name}", field, value, text)


def _scalar(node: Node, key: str, reader: _Reader) -> str | None:
    """Return the text of one word exactly as written, or report that it is none."""
    if shape(node) != "scalar" or node.tag not in TEXT_TAGS:
        reader.problem(node, key, "must be one text or number")
        return None
    return str(node.value)
