"""The YAML tree of a file, whose words are still as the user wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloudjob.config.files import File, position, unreadable
from cloudjob.spec import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

MAX_DEPTH = 20
_YAML_HINT = (
    "YAML indents with spaces; quote text that holds ': ' or begins with a special character"
)
_TAB_HINT = "YAML indents with spaces, never with tabs"
TEXT_TAGS = tuple(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)
_TAGS = (None, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_JSON_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))
_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"


def plain(node: Node) -> object:
    """Return what JSON can hold of a YAML tree; a word of another type, a date, stays a word."""
    if shape(node) == "mapping":
        return {str(key.value): plain(value) for key, value in node.value}
    if shape(node) == "sequence":
        return [plain(item) for item in node.value]
    if node.tag not in _JSON_TAGS:
        return str(node.value)
    from yaml.constructor import SafeConstructor

    return SafeConstructor().construct_document(node)


def composed(text: str, file: File) -> Node | None:
    """Return the YAML tree of a file; its scalars are still the words that the user wrote."""
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


def _check_depth(events: Iterator[Any], file: File) -> None:
    """Refuse what nests deeper than any job file does.

    PyYAML's C half composes recursively: 100,000 brackets end the process with a segmentation
    fault (PyYAML 6.0.3). Its events come one by one, so this stops in time.
    """
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        where = f":{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        if depth > MAX_DEPTH:
            raise unreadable(file, where, f"nested more than {MAX_DEPTH} deep", hint=_YAML_HINT)
        if isinstance(event, CollectionStartEvent) and event.tag not in _TAGS:
            what = one_line(f"the tag {event.tag} means nothing here")
            raise unreadable(file, where, what, hint=_YAML_HINT)


def place_of(file: File, node: Node) -> str:
    """Return what a message about a node of a file begins with."""
    return f"{one_line(file.shown)}:{node.start_mark.line + 1}: "


def shape(node: Any) -> str:
    """Return ``scalar``, ``sequence`` or ``mapping``."""
    return str(node.id)


def is_null(node: Node) -> bool:
    """Return whether a node is null, as if it were not there."""
    return bool(node.tag == _NULL_TAG)


def entries(
    node: Node, prefix: str, file: File, problems: list[str]
) -> Iterator[tuple[str, Node, Node]]:
    """Yield the keys of a mapping with their nodes and values, and report the unusable ones."""
    lines: dict[str, int] = {}
    mapping: MappingNode = node  # type: ignore[assignment]
    for key, value in mapping.value:
        name = str(key.value)
        what = _unusable_key(key, lines.get(name, 0))
        if what:
            problems.append(f"{place_of(file, key)}{what.format(one_line(prefix + name))}")
            continue
        lines[name] = key.start_mark.line + 1
        yield name, key, value


def _unusable_key(key: Node, first_line: int) -> str:
    if shape(key) != "scalar" or key.tag not in TEXT_TAGS:
        return "a key must be one plain word"
    if key.tag == _MERGE_TAG:
        return "merge keys (<<) are not supported; write the keys out"
    if first_line:
        return f"{{}}: given twice (first on line {first_line})"
    return ""
