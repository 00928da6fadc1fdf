"""The types of values in a job file.

Values arrive as the text that the user wrote, so numbers are parsed here. The patterns are narrower
than ``int()`` and ``float()``, which also accept ``1_0``, `` 1 ``, other scripts' digits and
``nan``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, get_origin

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, core_schema

from cloudjob.model import grid
from cloudjob.model.patterns import Pattern
from cloudjob.model.rules import (
    AUTO_RANKS,
    MAX_ARG_BYTES,
    RESERVED_PREFIXES,
    VARIABLE_RULE,
)
from cloudjob.model.text import MASK, given, nearest
from jobentry.contract.retry_kinds import WORDS
from jobentry.contract.stores import SCHEMES, STORE_SCHEMES


class Values(BaseModel):
    """Base of all models: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    def given(self) -> Mapping[str, Any]:
        """Return the values that are not left at their defaults."""
        keys = self.model_fields_set
        return MappingProxyType({key: value for key, value in self if key in keys})


@dataclass(frozen=True, slots=True)
class Option:
    """The option that sets a key on the command line.

    Args:
        const: The value that the option sets, if it takes no argument.
    """

    flag: str
    metavar: str = ""
    short: str = ""
    const: str = ""


class OneOf:
    """Restricts a text to these choices."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __get_pydantic_core_schema__(
        self, _source: object, _handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.choices))

    def __get_pydantic_json_schema__(
        self, _schema: core_schema.CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.choices)}


def key(description: str, default: Any = "", **limits: Any) -> Any:
    """Return the field of a key: its description, default and limits."""
    return Field(default=default, description=description, **limits)


def shown(field: FieldInfo, value: object) -> object:
    """Return a value as a user writes it: ``auto`` for a number that is chosen later."""
    extra = field.json_schema_extra
    return (
        extra["default"]
        if value == field.default and isinstance(extra, dict) and "default" in extra
        else value
    )


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the choices that a field allows; empty if it allows any text."""
    if field.annotation is bool:
        return tuple(_FLAGS)
    return next((item.choices for item in field.metadata if isinstance(item, OneOf)), ())


def number_range(field: FieldInfo) -> str:
    """Return the range of a number as messages show it."""
    least = next(item.ge for item in field.metadata if isinstance(item, Ge))
    most = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    return f"{least:g} or more" if most is None else f"{least:g} to {most:.0f}"


def is_tree(field: FieldInfo) -> bool:
    """Whether a field holds YAML for the platform."""
    return "tree" in field.metadata


def is_map(field: FieldInfo) -> bool:
    """Whether a field maps names to texts."""
    return get_origin(field.annotation) is Mapping and not is_tree(field)


def _whole(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", value):
        raise PydanticKnownError("int_parsing")
    return int(value)


def _number(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value):
        raise PydanticKnownError("float_parsing")
    return float(value)


_FLAGS = {"false": False, "true": True}


def _flag(value: object) -> object:
    return _FLAGS.get(value, value) if isinstance(value, str) else value


def as_text(value: object) -> object:
    """Return a Python value for a key of texts: numbers and booleans as a job file has them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, Mapping):
        return {name: as_text(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [as_text(item) for item in value]
    return value


def from_python(values: Mapping[str, Any], model: type[Values]) -> dict[str, Any]:
    """Return Python values by key, with text where the key has texts; others keep their types."""
    return {key: _from_python(value, model.model_fields.get(key)) for key, value in values.items()}


def _from_python(value: Any, field: FieldInfo | None) -> Any:
    if field is None or field.annotation in (bool, int, float) or is_tree(field):
        return value
    if isinstance(field.annotation, type) and issubclass(field.annotation, Values):
        return from_python(value, field.annotation) if isinstance(value, Mapping) else value
    return as_text(value)


def check_text(value: str, shown: str = "") -> str:
    """Return ``value`` if Linux can pass it to a program.

    Args:
        shown: How errors show the text.

    Raises:
        ValueError: Linux cannot pass it.
    """
    shown = shown or given(value)
    if "\0" in value:
        raise ValueError(f"contains a NUL character (given {shown}; allowed any text without it)")
    try:
        size_bytes = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise ValueError(
            f"contains half a surrogate pair, which cannot be encoded (given {shown})"
        ) from None
    check_size(size_bytes)
    return value


def check_size(size_bytes: int) -> None:
    """Raise ``ValueError`` for more bytes than Linux accepts as one argument or variable."""
    if size_bytes > MAX_ARG_BYTES:
        raise ValueError(
            f"is too long (given {size_bytes} bytes; allowed {MAX_ARG_BYTES}, Linux's limit)"
        )


def _check_variable(name: str) -> str:
    if not re.fullmatch(VARIABLE_RULE, name):
        allowed = "letters, digits and '_', not a digit first"
        raise ValueError(f"is not a variable's name (given {given(name)}; allowed {allowed})")
    for prefix in RESERVED_PREFIXES:
        if name.startswith(prefix):
            raise ValueError(
                f"uses a reserved name (given {given(name)}; all names with {prefix} are reserved)"
            )
    return name


def _check_input(uri: str) -> str:
    return _check_uri(uri, tuple(SCHEMES))


def _check_output(uri: str) -> str:
    # An empty URI means the job's own folder in the store.
    return _check_uri(uri, STORE_SCHEMES) if uri else uri


def _check_uri(uri: str, schemes: tuple[str, ...]) -> str:
    scheme, mark, _ = uri.partition("://")
    if not mark or scheme not in schemes:
        allowed = ", ".join(f"{scheme}://" for scheme in schemes)
        # A query may hold a signature.
        shown = given(uri.partition("?")[0])
        if mark:
            raise ValueError(f"has an unsupported scheme (given {shown}; allowed {allowed})")
        folder = "a folder of this machine is file:///its/path"
        raise ValueError(f"is not a URI (given {shown}; allowed {allowed}; {folder})")
    return uri


def check_pattern(text: str) -> str:
    """Return ``text`` if it is a regular expression with a group; else raise ``ValueError``."""
    if not Pattern(text).groups:
        raise ValueError(
            f"has no group for the value (given {given(text)}; for example 'loss ([0-9.]+)')"
        )
    return text


EVENTS = ("end", "failure", "hang")


def _check_events(events: tuple[str, ...]) -> tuple[str, ...]:
    return _check_words(events, EVENTS, "an event")


def _check_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return _check_words(kinds, WORDS, "a kind of failure")


def _check_words(words: tuple[str, ...], allowed: tuple[str, ...], what: str) -> tuple[str, ...]:
    for word in words:
        if word not in allowed:
            raise ValueError(
                f"lists a word that is not {what}{nearest(word, allowed)}"
                f" (given {given(word)}; allowed {', '.join(allowed)})"
            )
    return words


def _check_webhook(text: str) -> str:
    if text and not text.startswith("@") and not re.fullmatch(VARIABLE_RULE, text):
        raise ValueError(
            "is a secret, which must not be written down where others can read it"
            f" (given {MASK}; allowed the name of a variable of your environment, or @FILE)"
        )
    return text


# YAML gives types to unquoted words; cloudjob reads each as the text that was written.
_TEXT = {"type": ["string", "number", "boolean"]}
_TEXT_OR_NULL = {"type": ["string", "number", "boolean", "null"]}
_NAME = {"pattern": f"^(?!{'|'.join(RESERVED_PREFIXES)}){VARIABLE_RULE}$"}
_FILE = {"type": ["string", "null"], "pattern": "^(@|$)"}


def _ranks(value: object, check: ValidatorFunctionWrapHandler) -> int:
    return AUTO_RANKS if value == "auto" else check(value)


Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True), BeforeValidator(_flag)]
# An integer, or ``auto``.
Ranks = Annotated[
    Whole,
    WrapValidator(_ranks),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 1, "maximum": 1024,
                    "pattern": "^auto$"}),
]  # fmt: skip
Text = Annotated[str, AfterValidator(check_text), WithJsonSchema(_TEXT)]
Texts = tuple[Text, ...]
Events = Annotated[Texts, AfterValidator(_check_events)]
RetryKinds = Annotated[Texts, AfterValidator(_check_kinds)]
Webhook = Annotated[
    Text,
    AfterValidator(_check_webhook),
    WithJsonSchema({"type": "string", "pattern": f"^(@.*|{VARIABLE_RULE})?$"}),
]
# A mapping of any names to texts.
Labels = Annotated[
    Mapping[Text, Text],
    AfterValidator(MappingProxyType),
    WithJsonSchema({"type": "object", "additionalProperties": _TEXT_OR_NULL}),
]
_VariableName = Annotated[str, AfterValidator(_check_variable)]
_VARIABLES = WithJsonSchema(
    {"type": "object", "propertyNames": _NAME, "additionalProperties": _TEXT_OR_NULL}
)
Variables = Annotated[Mapping[_VariableName, Text], AfterValidator(MappingProxyType), _VARIABLES]
Inputs = Annotated[
    Mapping[_VariableName, Annotated[Text, AfterValidator(_check_input)]],
    AfterValidator(MappingProxyType),
    _VARIABLES,
]
Outputs = Annotated[
    Mapping[_VariableName, Annotated[Text, AfterValidator(_check_output)]],
    AfterValidator(MappingProxyType),
    _VARIABLES,
]
# The values of secrets; a job file has only their names, or the files that contain them.
Secrets = Annotated[
    Mapping[_VariableName, Annotated[str, AfterValidator(lambda text: check_text(text, MASK))]],
    AfterValidator(MappingProxyType),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {"type": "array", "items": {"type": "string", **_NAME}},
                {"type": "object", "propertyNames": _NAME, "additionalProperties": _FILE},
            ]
        }
    ),
]
# A mapping of metric names to regular expressions with a group.
Patterns = Annotated[
    Mapping[Text, Annotated[Text, AfterValidator(check_pattern)]],
    AfterValidator(MappingProxyType),
    WithJsonSchema({"type": "object", "additionalProperties": _TEXT}),
]
# A mapping of names to their values in a sweep.
SweepValues = Annotated[
    Mapping[
        Annotated[str, AfterValidator(grid.check_name)],
        Annotated[Texts, BeforeValidator(grid.values_of)],
    ],
    AfterValidator(MappingProxyType),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{grid.NAME_RULE}$"},
            "additionalProperties": {
                "type": ["string", "number", "boolean", "array"],
                "items": _TEXT,
                "minItems": 1,
            },
        }
    ),
]
Tree = Annotated[Mapping[str, Any], "tree"]
TreeList = Annotated[list[Any], "tree"]
