"""Layered YAML and flags -> JobSpec.

Flags win over the job file, that over the project's, that over the user's, that over defaults.
Every layer is a flat table of dotted keys (``nodes``, ``env.A``, ``process.python``), so that
nearer layers win key by key and each value still knows where it was written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudjob.errors import SpecError, UsageError
from cloudjob.spec import (
    FIELDS,
    FRAMEWORK_SECTIONS,
    MASK,
    MAX_WORD_BYTES,
    NAME_RULE,
    RESERVED_PREFIXES,
    SECTIONS,
    SOURCE_LIMIT_MB,
    STORE_SECTIONS,
    VARIABLE_FIELDS,
    VARIABLE_RULE,
    Field,
    JobSpec,
    faults,
    given,
    nearest,
    number_range,
    one_line,
    section,
)

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

CLOUDJOB_CONFIG = "CLOUDJOB_CONFIG"
PROJECT_FILE = "cloudjob.yaml"

# A job description is a few pages; the limit is for a path that never ends, such as /dev/zero.
MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 20

_MAPS = ("map", "secrets")
_YAML_HINT = (
    "YAML indents with spaces; quote text that holds ': ' or begins with a special character"
)
_TAB_HINT = "YAML indents with spaces, never with tabs"
_TEXT_TAGS = tuple(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)
_TAGS = (None, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_JSON_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))
_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"
# Narrower than int() and float(), which also take '1_0', ' 1 ', other scripts' digits and 'nan'.
_NUMBERS = {
    "int": (re.compile(r"[+-]?[0-9]{1,18}"), int, "a whole number"),
    "float": (re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"), float, "a number"),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A job and where each of its values was written.

    Args:
        origins: Dotted key -> ``--nodes``, ``job.yaml:3`` or ``default``.
    """

    spec: JobSpec
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Value:
    """One value of one layer; ``place`` is what a message about it begins with."""

    value: Any
    origin: str
    folder: Path
    place: str = ""


@dataclass(frozen=True, slots=True)
class _File:
    """A file that may hold a layer; ``what`` and ``shown`` are its kind and name in messages."""

    path: Path
    what: str
    shown: str
    must_exist: bool = False


_Layer = dict[str, _Value]


def load(
    flags: Mapping[str, object],
    *,
    job_file: str | None,
    cwd: Path,
    environ: Mapping[str, str],
    needs_script: bool = True,
    copied: tuple[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Return the job that flags and files describe together.

    Args:
        flags: What the user gave and nothing else, by field name (or ``process.python``);
            text is read as in YAML, secrets are names with ``""`` or ``@FILE``.
        job_file: What ``--config`` names.
        cwd: The folder that relative flags mean.
        environ: Where secrets and ``$CLOUDJOB_CONFIG`` come from.
        copied: What stands in the place of the files: where it comes from, and another job as
            ``spec.masked`` shows it. Its secrets are taken from ``environ`` by their names.
        needs_script: False for ``config show``, which makes sense before there is a script.

    Raises:
        UsageError: a file cannot be read.
        SpecError: with everything that is wrong in all files, flags and the job they make.
    """
    problems: list[str] = []
    flag_layer = _flag_layer(flags, cwd, problems)
    source = flag_layer.get("source")
    files = _files(job_file, cwd, Path(source.value) if source else cwd, environ)
    if copied is not None:
        files = [file for file in files if file.must_exist and file.what == "job file"]
    layers = [_file_layer(file, problems) for file in files]
    if copied is not None:
        layers.insert(0, _copied_layer(*copied, cwd, problems))
    layers.append(flag_layer)
    values = {key: value for layer in layers for key, value in layer.items()}
    values.update(_source_limit(layers, values))
    spec = _spec(_with_secrets(values, environ, problems), cwd)
    for key, what in faults(spec):
        if needs_script or key != "script" or spec.script:
            problems.append(_placed(key, what, values))
    if problems:
        raise SpecError(problems)
    return Loaded(spec, MappingProxyType(_origins(values)))


def show(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return each key with its value, secrets as ``***``, and its origin, for ``config show``."""
    rows: list[tuple[str, str]] = []
    for field in FIELDS:
        value = getattr(loaded.spec, field.name)
        if field.kind in _MAPS:
            secret = field.kind == "secrets"
            rows += [(f"{field.name}.{k}", MASK if secret else v) for k, v in value.items()]
        else:
            rows.append((field.name, shlex.join(value) if field.kind == "list" else str(value)))
    for name in SECTIONS:
        for key, value in section(loaded.spec, name).items():
            rows += _section_rows(f"{name}.{key}", value)
    return [(key, value, loaded.origins.get(key, "default")) for key, value in rows]


def _section_rows(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(f"{key}.{name}", str(item)) for name, item in value.items()]
    return [(key, shlex.join(value) if isinstance(value, tuple) else str(value))]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    keys = {field.name: _schema(field) for field in FIELDS}
    for name, fields in SECTIONS.items():
        keys[name] = {
            "description": f"Settings of {_owner(name)}.",
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {field.name: _schema(field) for field in fields},
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cloudjob job file",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": keys,
    }


def read_env_file(path: str | Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file of ``NAME=VALUE`` lines, values taken literally.

    A value in single quotes is what stands between them; in double quotes a backslash before
    n, r, t, ", $ and backslash is an escape; either may span lines.
    ``NAME`` alone takes its value from ``environ`` and is left out where it has none.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        data = _read(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"reading env file: {one_line(str(path))}: {_reason(error)}", hint="is the path right?"
        ) from error
    # Values are bytes to the job, so bytes that are no UTF-8 travel as surrogate escapes.
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    variables: dict[str, str] = {}
    number = 0
    while number < len(lines):
        first = number
        try:
            name, value, number = _assignment(lines, first)
        except ValueError as error:
            raise UsageError(
                f"reading env file: {one_line(str(path))}:{first + 1}: {error}",
                hint="each line is NAME=VALUE, NAME, or a comment that begins with #",
            ) from None
        if value is None:
            value = environ.get(name)
        if name and value is not None:
            variables[name] = value
    return variables


# --- layers


def _flag_layer(flags: Mapping[str, object], cwd: Path, problems: list[str]) -> _Layer:
    layer: _Layer = {}
    for key, value in flags.items():
        field = _field(key)
        origin = field.flag or "command line"
        for dotted, item in _flattened(key, field, value):
            _put(layer, dotted, field, _Value(item, origin, cwd), problems)
    return layer


def _copied_layer(
    origin: str, described: Mapping[str, Any], cwd: Path, problems: list[str]
) -> _Layer:
    """Return a job as a layer; what an older cloudjob knew and we do not is left out."""
    layer: _Layer = {}
    flat = {field.name: described.get(field.name) for field in FIELDS}
    flat["secrets"] = dict.fromkeys(flat["secrets"] or (), "")
    for name, fields in SECTIONS.items():
        values = described.get(name) or {}
        flat.update({f"{name}.{f.name}": values[f.name] for f in fields if f.name in values})
    for key, value in flat.items():
        field = _field(key)
        for dotted, item in _flattened(key, field, value):
            _put(layer, dotted, field, _Value(item, origin, cwd, f"{origin}: "), problems)
    return layer


def _field(key: str) -> Field:
    name, _, inner = key.partition(".")
    fields = SECTIONS[name] if inner else FIELDS
    return next(field for field in fields if field.name == (inner or name))


def _flattened(key: str, field: Field, value: Any) -> Iterator[tuple[str, object]]:
    if value is None:
        return
    if field.kind in _MAPS:
        yield from ((f"{key}.{name}", item) for name, item in value.items())
    elif field.kind == "list":
        yield key, tuple(value)
    else:
        yield key, value if field.kind == "tree" else str(value)


def _files(
    job_file: str | None, cwd: Path, source: Path, environ: Mapping[str, str]
) -> list[_File]:
    """Return the files that may hold a layer, the farthest first."""
    project = source / PROJECT_FILE
    shown = PROJECT_FILE if source == cwd else str(project)
    files = [_user_file(environ), _File(project, "project file", shown)]
    if job_file is not None:
        job_path = cwd / job_file
        if job_path.absolute() == project.absolute():
            files.pop()  # The same file once more would only report its problems twice.
        files.append(_File(job_path, "job file", job_file, must_exist=True))
    return files


def _user_file(environ: Mapping[str, str]) -> _File:
    named = environ.get(CLOUDJOB_CONFIG, "")
    if named:
        return _File(Path(named), "user file", named, must_exist=True)
    import platformdirs

    path = Path(platformdirs.user_config_dir("cloudjob"), "config.yaml")
    return _File(path, "user file", str(path))


def _file_layer(file: _File, problems: list[str]) -> _Layer:
    text = _text(file)
    root = _composed(text, file) if text.strip() else None
    layer: _Layer = {}
    if root is None or _is_null(root):
        return layer
    if _shape(root) != "mapping":
        problems.append(f"{_place(file, root)}must be a mapping of keys to values")
        return layer
    for key, node, value in _entries(root, "", file, problems):
        _read_key(key, node, value, _Reader(file, layer, problems))
    return layer


@dataclass(frozen=True, slots=True)
class _Reader:
    """Where one file's values and problems go."""

    file: _File
    layer: _Layer
    problems: list[str]

    def problem(self, node: Node, key: str, what: str) -> None:
        self.problems.append(f"{_place(self.file, node)}{one_line(key)}: {what}")

    def put(self, key: str, field: Field, node: Node, item: object) -> None:
        origin = f"{one_line(self.file.shown)}:{node.start_mark.line + 1}"
        value = _Value(item, origin, self.file.path.parent, f"{origin}: ")
        _put(self.layer, key, field, value, self.problems)


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
    if _is_null(node):
        return
    if _shape(node) != "mapping":
        reader.problem(node, name, "must be a mapping of keys to values")
        return
    known = {field.name: field for field in SECTIONS[name]}
    for key, key_node, value in _entries(node, f"{name}.", reader.file, reader.problems):
        if key in known:
            _read_field(f"{name}.{key}", known[key], value, reader)
        else:
            what = f"no such key{nearest(key, known)} (allowed {', '.join(known)})"
            reader.problem(key_node, f"{name}.{key}", what)


def _read_field(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if _is_null(node):
        return
    if field.kind == "list":
        _read_list(key, field, node, reader)
    elif field.kind == "secrets" and _shape(node) == "sequence":
        _read_names(key, field, node, reader)
    elif field.kind in _MAPS:
        _read_map(key, field, node, reader)
    else:
        text = _tree(node) if field.kind == "tree" else _scalar(node, key, reader)
        if text is not None:
            reader.put(key, field, node, text)


def _read_names(key: str, field: Field, node: Node, reader: _Reader) -> None:
    for item in node.value:
        name = _scalar(item, key, reader)
        if name is not None:
            reader.put(f"{key}.{name}", field, item, "")


def _read_list(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if _shape(node) != "sequence":
        reader.problem(node, key, "must be a list, one argument an item")
        return
    texts = [_scalar(item, f"{key}[{index}]", reader) for index, item in enumerate(node.value)]
    reader.put(key, field, node, tuple(text for text in texts if text is not None))


def _read_map(key: str, field: Field, node: Node, reader: _Reader) -> None:
    if _shape(node) != "mapping":
        also = "or a list of names" if field.kind == "secrets" else "NAME: value"
        reader.problem(node, key, f"must be a mapping, {also}")
        return
    for name, _, value in _entries(node, f"{key}.", reader.file, reader.problems):
        if _is_null(value) and field.name == "env":
            continue  # as though the line were not there
        text = "" if _is_null(value) else _scalar(value, f"{key}.{name}", reader)
        if text is not None:
            reader.put(f"{key}.{name}", field, value, text)


def _tree(node: Node) -> object:
    """Return what JSON can hold of a YAML tree; a word of another type, a date, stays a word."""
    if _shape(node) == "mapping":
        return {str(key.value): _tree(value) for key, value in node.value}
    if _shape(node) == "sequence":
        return [_tree(item) for item in node.value]
    if node.tag not in _JSON_TAGS:
        return str(node.value)
    from yaml.constructor import SafeConstructor

    return SafeConstructor().construct_document(node)


def _put(layer: _Layer, key: str, field: Field, value: _Value, problems: list[str]) -> None:
    """Put a value into its layer in the field's own type, or say why that cannot be."""
    try:
        typed = _typed(field, value)
    except ValueError as error:
        problems.append(f"{value.place}{one_line(key)}: {error}")
    else:
        layer[key] = _Value(typed, value.origin, value.folder, value.place)


def _typed(field: Field, value: _Value) -> object:
    if field.kind in _NUMBERS:
        rule, convert, wanted = _NUMBERS[field.kind]
        if not rule.fullmatch(value.value):
            allowed = number_range(field)
            raise ValueError(f"is not {wanted} (given {given(value.value)}; allowed {allowed})")
        return convert(value.value)
    if field.kind == "secrets" and value.value and not value.value.startswith("@"):
        raise ValueError(
            "a secret's value must not be written down where others can read it "
            f"(given {MASK}; allowed the name alone, taken from your environment, or @FILE)"
        )
    if field.name == "source":
        return str(value.folder / value.value)
    return value.value


# --- what the layers make


def _with_secrets(values: _Layer, environ: Mapping[str, str], problems: list[str]) -> _Layer:
    """Return the values with each secret's own in the place of where to find it."""
    found: _Layer = {}
    for key, value in values.items():
        field, _, name = key.partition(".")
        if field != "secrets":
            found[key] = value
            continue
        try:
            text = _secret(name, value, environ)
        except ValueError as error:
            problems.append(f"{value.place}{one_line(key)}: {error}")
        else:
            found[key] = _Value(text, value.origin, value.folder, value.place)
    return found


def _secret(name: str, value: _Value, environ: Mapping[str, str]) -> str:
    if not value.value:
        if name not in environ:
            raise ValueError("is not set in your environment (allowed: set it, or name a @FILE)")
        return environ[name]
    path = value.folder / value.value[1:]
    try:
        # One byte more than fits, so that the check of its size has something to say.
        with path.open("rb") as file:
            data: bytes = file.read(MAX_WORD_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {one_line(str(path))}: {_reason(error)}") from error
    return data.decode("utf-8", "surrogateescape")


def _spec(values: _Layer, cwd: Path) -> JobSpec:
    words: dict[str, Any] = {"script": "", "source": str(cwd)}
    maps: dict[str, Any] = {}
    for key, value in values.items():
        field, dot, name = key.partition(".")
        if dot:
            maps.setdefault(field, {})[name] = value.value
        else:
            words[field] = value.value
    sections = {name: _section(name, maps.pop(name)) for name in SECTIONS if name in maps}
    return JobSpec(**words, **maps, sections=sections)


def _source_limit(layers: Sequence[_Layer], values: _Layer) -> _Layer:
    """Return the limit of the source, when the backend has one of its own.

    The nearest layer that speaks of either wins, and in one layer the backend's own.
    """
    backend = values["backend"].value if "backend" in values else _field("backend").default
    own = f"{backend}.{SOURCE_LIMIT_MB}"
    if own not in values or values[own].value <= 0:
        return {}
    nearest_of = [layer[key] for layer in layers for key in (SOURCE_LIMIT_MB, own) if key in layer]
    # Both say the same from here on: a copy of the job has this limit, whatever comes of layers.
    return dict.fromkeys((SOURCE_LIMIT_MB, own), nearest_of[-1])


def _section(name: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return a section's values by field; what stands in one of its maps has a dot in its key."""
    maps = {field.name for field in SECTIONS[name] if field.kind in _MAPS}
    made: dict[str, Any] = {}
    for key, value in values.items():
        field, _, inner = key.partition(".")
        if field in maps:
            made.setdefault(field, {})[inner] = value
        else:
            made[key] = value
    return made


def _placed(key: str, what: str, values: _Layer) -> str:
    """Return a problem with the file and line that its value came from, if it came from one."""
    value = values.get(key) or values.get(key.partition("[")[0])
    return f"{value.place if value else ''}{one_line(key)}: {what}"


def _origins(values: _Layer) -> dict[str, str]:
    plain = [field.name for field in FIELDS if field.kind not in _MAPS]
    inner = [f"{name}.{field.name}" for name, fields in SECTIONS.items() for field in fields]
    defaults = dict.fromkeys([*plain, *inner], "default")
    return {**defaults, **{key: value.origin for key, value in values.items()}}


# --- files


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes")
    return data


def _text(file: _File) -> str:
    """Return what a file holds, or nothing when it may be and is absent."""
    try:
        data = _read(file.path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not file.must_exist:
            return ""
        raise _unreadable(file, "", _reason(error), hint="is the path right?") from error
    except (OSError, ValueError) as error:
        raise _unreadable(file, "", _reason(error), hint="it must be a YAML file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = _position(data, error.start)
        hint = "save the file as UTF-8"
        raise _unreadable(file, where, "not UTF-8 text", hint=hint) from error


def _composed(text: str, file: _File) -> Node | None:
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
        raise _unreadable(file, where, error.problem or str(error), hint=hint) from error
    except yaml.reader.ReaderError as error:
        where = _position(text.encode(), error.position)
        raise _unreadable(file, where, error.reason, hint=_YAML_HINT) from error
    except yaml.YAMLError as error:
        raise _unreadable(file, "", one_line(str(error)), hint=_YAML_HINT) from error
    return tree


def _check_depth(events: Iterator[Any], file: _File) -> None:
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
            raise _unreadable(file, where, f"nested more than {MAX_DEPTH} deep", hint=_YAML_HINT)
        if isinstance(event, CollectionStartEvent) and event.tag not in _TAGS:
            what = one_line(f"the tag {event.tag} means nothing here")
            raise _unreadable(file, where, what, hint=_YAML_HINT)


def _unreadable(file: _File, where: str, what: str, *, hint: str) -> UsageError:
    return UsageError(f"reading {file.what}: {one_line(file.shown)}{where}: {what}", hint=hint)


def _position(data: bytes, offset: int) -> str:
    before = data[:offset]
    return f":{before.count(10) + 1}:{offset - before.rfind(10)}"


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _place(file: _File, node: Node) -> str:
    return f"{one_line(file.shown)}:{node.start_mark.line + 1}: "


def _shape(node: Any) -> str:
    """Return ``scalar``, ``sequence`` or ``mapping``."""
    return str(node.id)


def _is_null(node: Node) -> bool:
    return bool(node.tag == _NULL_TAG)


def _scalar(node: Node, key: str, reader: _Reader) -> str | None:
    """Return the text of one word exactly as written, or report that it is none."""
    if _shape(node) != "scalar" or node.tag not in _TEXT_TAGS:
        reader.problem(node, key, "must be one text or number")
        return None
    return str(node.value)


def _entries(
    node: Node, prefix: str, file: _File, problems: list[str]
) -> Iterator[tuple[str, Node, Node]]:
    """Yield the keys of a mapping with their nodes and values, and report the unusable ones."""
    lines: dict[str, int] = {}
    mapping: MappingNode = node  # type: ignore[assignment]
    for key, value in mapping.value:
        name = str(key.value)
        what = _unusable_key(key, lines.get(name, 0))
        if what:
            problems.append(f"{_place(file, key)}{what.format(one_line(prefix + name))}")
            continue
        lines[name] = key.start_mark.line + 1
        yield name, key, value


def _unusable_key(key: Node, first_line: int) -> str:
    if _shape(key) != "scalar" or key.tag not in _TEXT_TAGS:
        return "a key must be one plain word"
    if key.tag == _MERGE_TAG:
        return "merge keys (<<) are not supported; write the keys out"
    if first_line:
        return f"{{}}: given twice (first on line {first_line})"
    return ""


# --- schema


def _owner(section_name: str) -> str:
    if section_name in FRAMEWORK_SECTIONS:
        return "scripts for MindSpore"
    is_store = section_name in STORE_SECTIONS
    return f"stores {section_name}://" if is_store else f"the {section_name} backend"


def _schema(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": field.help}
    if field.kind == "tree":
        return {**schema, "type": ["array" if field.default == () else "object", "null"]}
    if field.kind in _MAPS or field.kind == "list":
        shape = _SHAPES[field.kind]
        # Only names of variables have a rule.
        is_free = field.kind == "map" and field.name not in VARIABLE_FIELDS
        left_out = "propertyNames" if is_free else ""
        return {**schema, **{key: value for key, value in shape.items() if key != left_out}}
    if field.kind == "str":
        schema["type"] = list(_TEXT_TYPES)
    else:
        schema["type"] = ["integer" if field.kind == "int" else "number", "null"]
    limits = {"minimum": field.least, "maximum": field.most, "default": field.default}
    schema.update((k, v) for k, v in limits.items() if v is not None and v != "")
    if field.allowed:
        schema["enum"] = [*(_as_written(word) for word in field.allowed), None]
    if field.name == "name":
        schema["pattern"] = f"^{NAME_RULE}$"
    return schema


def _as_written(word: str) -> object:
    """An editor reads ``true`` as a truth, as YAML does; we take the word."""
    return {"true": True, "false": False}.get(word, word)


# YAML types words by their look; every one of these is taken as the text that was written.
_TEXT_TYPES = ("string", "number", "boolean", "null")
_TEXT = {"type": list(_TEXT_TYPES)}
_VARIABLE = {"pattern": f"^(?!{'|'.join(RESERVED_PREFIXES)}){VARIABLE_RULE}$"}
_SHAPES: dict[str, dict[str, Any]] = {
    "list": {"type": ["array", "null"], "items": {"type": ["string", "number", "boolean"]}},
    "map": {
        "type": ["object", "null"],
        "propertyNames": _VARIABLE,
        "additionalProperties": _TEXT,
    },
    "secrets": {
        "anyOf": [
            {"type": "null"},
            {"type": "array", "items": {"type": "string", **_VARIABLE}},
            {
                "type": "object",
                "propertyNames": _VARIABLE,
                "additionalProperties": {"type": ["string", "null"], "pattern": "^(@|$)"},
            },
        ]
    },
}


# --- env files

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "$": "$", "\\": "\\"}


def _assignment(lines: Sequence[str], number: int) -> tuple[str, str | None, int]:
    """Return the name and value that begin on a line, and the number of the line after them."""
    line = lines[number].lstrip(" \t")
    if not line or line.startswith("#"):
        return "", None, number + 1
    name, equals, rest = re.sub(r"^export[ \t]+", "", line).partition("=")
    if not equals:
        name = name.rstrip(" \t")
    if not re.fullmatch(VARIABLE_RULE, name):
        raise ValueError(f"{given(name)} is not a variable's name")
    if not equals or rest[:1] not in ("'", '"'):
        return name, rest if equals else None, number + 1
    for end in range(number + 1, len(lines) + 1):
        last = rest[1:] if end == number + 1 else lines[end - 1]
        # Only a line with a quote can close one; trying every line takes time squared.
        value = _unquoted("\n".join([rest, *lines[number + 1 : end]])) if rest[0] in last else None
        if value is not None:
            return name, value, end
    raise ValueError(f"the quote {rest[0]} is never closed")


def _unquoted(text: str) -> str | None:
    """Return what stands in the quotes that text begins with; None when they are not closed."""
    rule = r"'([^']*)'" if text[0] == "'" else r'"((?:[^"\\]|\\.)*)"'
    match = re.match(rule, text, re.DOTALL)
    if not match:
        return None
    if text[match.end() :].strip(" \t"):
        raise ValueError(f"text after the closing quote {text[0]}")
    if text[0] == "'":
        return match[1]
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), match[1], flags=re.DOTALL)
