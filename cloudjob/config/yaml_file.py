"""Read a YAML file as plain data with the line of each value.

PyYAML composes the file's tree. Scalars keep the text that was written, so that YAML's own types
(``on``, ``1:30``, ``0123``) change no value; only keys that hold YAML for a platform get JSON's
types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudjob.config.files import ConfigFile, position, text_of, unreadable
from cloudjob.config.layer import Layer
from cloudjob.model.job import SECTIONS
from cloudjob.model.kinds import dotted
from cloudjob.model.text import one_line

if TYPE_CHECKING:
    from yaml.nodes import Node

    from cloudjob.model.kinds import Location

MAX_DEPTH = 20
# Nested aliases multiply: nine lines of nine aliases each expand to 387 million values. A rank
# table may have a line for each of 10,000 nodes.
MAX_VALUES = 20_000
# The deepest location of a key: a name in a mapping in a section.
_DEEPEST = 3
_YAML_HINT = (
    "YAML indents with spaces; quote text that holds ': ' or begins with a special character"
)
_TAB_HINT = "YAML indents with spaces, never with tabs"
_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = tuple(
    _TAG + kind
    for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)  # fmt: skip
_COLLECTION_TAGS = (None, _TAG + "seq", _TAG + "map")
_JSON_TAGS = tuple(_TAG + kind for kind in ("int", "float", "bool", "null"))
_TREES = {
    (name, key)
    for name, model in SECTIONS.items()
    for key, item in model.KEYS.items()
    if item.kind.is_tree
}


def layer_of_file(file: ConfigFile) -> Layer:
    """Return the values of a file; duplicate and unusable keys are in ``problems``.

    Raises:
        UsageError: The file is not YAML, or nests or expands beyond the limits.
    """
    text = text_of(file)
    root = _compose(text, file) if text.strip() else None
    layer = Layer(values={}, folder=file.path.parent)
    if root is None or root.tag == _TAG + "null":
        return layer
    reader = _Reader(file, layer)
    if _shape(root) == "mapping":
        layer.values.update(reader.mapping(root, ()))
    else:
        layer.problems.append(f"{reader.line(root)}: must be a mapping of keys to values")
    return layer


class _Reader:
    """Turns the YAML nodes of one file into plain data, and notes the line of each."""

    def __init__(self, file: ConfigFile, layer: Layer) -> None:
        self._file = file
        self._layer = layer
        self._values = 0

    def line(self, node: Node) -> str:
        return f"{one_line(self._file.shown)}:{node.start_mark.line + 1}"

    def mapping(self, node: Node, location: Location) -> dict[str, Any]:
        values = {}
        for name, key, value in self._entries(node, location):
            inner = (*location, name)
            if value.tag == _TAG + "null":
                if len(inner) == 1 or location[0] == "env" or location in _SECTIONS:
                    continue  # as if the line were not there
                values[name] = ""
            else:
                values[name] = self._value(value, inner)
            self._layer.origins[dotted(inner)] = self.line(key)
        return values

    def _value(self, node: Node, location: Location) -> Any:
        """Return a value; None for a scalar with a custom tag, which is invalid for every key."""
        self._count(node)
        if location in _TREES:
            return self._plain(node, location)
        if _shape(node) == "scalar":
            return str(node.value) if node.tag in _TEXT_TAGS else None
        if len(location) > _DEEPEST:
            return []
        if _shape(node) == "mapping":
            return self.mapping(node, location)
        values = []
        for index, item in enumerate(node.value):
            inner = (*location, index)
            self._layer.origins[dotted(inner)] = self.line(item)
            values.append(self._value(item, inner))
        return values

    def _plain(self, node: Node, location: Location) -> object:
        """Return a tree with the types of JSON; scalars of other types (dates) stay text."""
        self._count(node)
        if len(location) > MAX_DEPTH:
            raise self._refusal(node, f"nested more than {MAX_DEPTH} deep")
        if _shape(node) == "mapping":
            return {
                name: self._plain(value, (*location, name))
                for name, _, value in self._entries(node, location)
            }
        if _shape(node) == "sequence":
            return [self._plain(item, (*location, i)) for i, item in enumerate(node.value)]
        if node.tag not in _JSON_TAGS:
            return str(node.value)
        from yaml.constructor import SafeConstructor

        try:
            value: object = SafeConstructor().construct_document(node)
            json.dumps(value, allow_nan=False)
        except (ValueError, KeyError):
            kind = node.tag.removeprefix(_TAG)
            raise self._refusal(node, f"JSON has no such {kind}; quote the value") from None
        return value

    def _entries(self, node: Node, location: Location) -> Iterator[tuple[str, Node, Node]]:
        """Yield the keys of a mapping with their nodes and values, and report the unusable ones."""
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            key_title = one_line(dotted((*location, name)))
            what = ""
            is_text = _shape(key) == "scalar" and key.tag in _TEXT_TAGS
            if not (is_text and name.isprintable()):
                what = "a key must be one plain word"
            elif key.tag == _TAG + "merge":
                what = "merge keys (<<) are not supported; write the keys out"
            elif name in lines:
                what = f"{key_title}: given twice (first on line {lines[name]})"
            if what:
                self._layer.problems.append(f"{self.line(key)}: {what}")
                continue
            lines[name] = key.start_mark.line + 1
            yield name, key, value

    def _count(self, node: Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._refusal(node, f"holds more than {MAX_VALUES} values, aliases expanded")

    def _refusal(self, node: Node, what: str) -> Exception:
        mark = node.start_mark
        where = f":{mark.line + 1}:{mark.column + 1}"
        return unreadable(self._file, where, what, hint=_YAML_HINT)


_SECTIONS = {(name,) for name in SECTIONS}


def _shape(node: Any) -> str:
    """Return ``scalar``, ``sequence`` or ``mapping``."""
    return str(node.id)


def _compose(text: str, file: ConfigFile) -> Node | None:
    """Return the YAML tree of a file; its scalars are still the text that the user wrote."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(yaml.parse(text, Loader=loader), file)
        tree: Node | None = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = text.split("\n")[mark.line : mark.line + 1] if mark else []
        hint = _TAB_HINT if line and "\t" in line[0] else _YAML_HINT
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise unreadable(file, where, error.problem or str(error), hint=hint) from error
    except yaml.reader.ReaderError as error:
        where = position(text.encode(), error.position)
        raise unreadable(file, where, error.reason, hint=_YAML_HINT) from error
    except yaml.YAMLError as error:
        raise unreadable(file, "", one_line(str(error)), hint=_YAML_HINT) from error
    return tree


def _check_depth(events: Iterator[Any], file: ConfigFile) -> None:
    """Refuse a file that nests deeper than any job file does.

    PyYAML's C code composes recursively: 100,000 brackets end the process with a segmentation
    fault (PyYAML 6.0.3). This check reads the events one by one, before the tree is composed.
    """
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        where = f":{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        if depth > MAX_DEPTH:
            raise unreadable(file, where, f"nested more than {MAX_DEPTH} deep", hint=_YAML_HINT)
        if isinstance(event, CollectionStartEvent) and event.tag not in _COLLECTION_TAGS:
            what = one_line(f"the tag {event.tag} means nothing here")
            raise unreadable(file, where, what, hint=_YAML_HINT)
