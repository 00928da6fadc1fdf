"""The kinds of values in a job file: how each is read, and its JSON Schema.

Values arrive as the text that the user wrote, or as Python values. The patterns of numbers are
narrower than ``int()`` and ``float()``, which also accept ``1_0``, `` 1 ``, other scripts' digits
and ``nan``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from cloudjob.model import grid
from cloudjob.model.rules import (
    AUTO_RANKS,
    EVENT_WORDS,
    MAX_ARG_BYTES,
    NAME_RULE,
    RESERVED_PREFIXES,
    VARIABLE_RULE,
    VOLUME_SCHEMES,
)
from cloudjob.model.text import MASK, given, nearest
from jobentry.contract import retry_kinds
from jobentry.contract.stores import SCHEMES, STORE_SCHEMES

# The path of a value in a job: ("nodes",), ("env", "A"), ("args", 0), ("slurm", "mpi").
Location = tuple[str | int, ...]
# Where a value is wrong, and why.
Fault = tuple[Location, str]

# YAML gives types to unquoted words; cloudjob reads each as the text that was written.
_TEXT = {"type": ["string", "number", "boolean"]}
_TEXT_OR_NULL = {"type": ["string", "number", "boolean", "null"]}
_VARIABLE = {"pattern": f"^(?!{'|'.join(RESERVED_PREFIXES)}){VARIABLE_RULE}$"}
_SHAPE = "must be one text or number"


class ValueFaults(ValueError):
    """Parts of a value are wrong.

    Args:
        faults: Each with its location within the value.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(what for _, what in faults))
        self.faults = faults


def faults_of(error: ValueError, *location: str | int) -> list[Fault]:
    """Return the faults of a value at this location that ``Kind.read`` has refused."""
    if isinstance(error, ValueFaults):
        return [((*location, *inner), what) for inner, what in error.faults]
    return [(location, str(error))]


def dotted(location: Location) -> str:
    """Return a location as messages show it: ``env.A``, ``args[0]``."""
    return "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in location
    ).removeprefix(".")


class Kind:
    """What the values of a key are.

    Args:
        title: Its name in the reference.
        has_trees: Whether a value can be changed, so that each job needs a default of its own.
        is_secret: Whether values are never shown.
        choices: The texts that are allowed; empty if others are, too.
    """

    title = "text"
    is_map = False
    is_tree = False
    has_trees = False
    is_secret = False
    choices: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """Return a value as a job has it; reading that again returns the same.

        Raises:
            ValueError: It is wrong; ``faults_of`` returns where, and why.
        """
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values in a file."""
        raise NotImplementedError

    def shown(self, value: Any) -> Any:
        """Return a value as a user writes it."""
        return value


class Text(Kind):
    """A text that Linux can pass to a program.

    Args:
        check: Returns the text, or raises ``ValueError``.
        quoted: How errors show the text, if not as it is.
        schema: What the JSON Schema has instead of or beside the types of a text.
    """

    def __init__(
        self, check: Callable[[str], str] | None = None, *, quoted: str = "", **schema: Any
    ) -> None:
        self._check = check
        self._quoted = quoted
        self._schema = {**_TEXT, **schema}

    def read(self, value: Any) -> str:
        text = check_text(as_text(value), self._quoted)
        return self._check(text) if self._check else text

    def schema(self) -> dict[str, Any]:
        return self._schema


class OneOf(Kind):
    """One of these texts."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def read(self, value: Any) -> str:
        text = as_text(value)
        if text not in self.choices:
            raise ValueError(_unknown(text, self.choices))
        return text

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


def _unknown(value: object, choices: Sequence[str]) -> str:
    allowed = ", ".join(each or repr(each) for each in choices)
    guess = nearest(str(value), choices)
    return f"is not known{guess} (given {given(value)}; allowed {allowed})"


class Number(Kind):
    """A number in a range, whose last is infinite if it is not given."""

    title = "number"
    _noun, _json = "a number", "number"
    _pattern = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    _accepted: tuple[type, ...] = (int, float)

    def __init__(self, least: float, most: float | None = None) -> None:
        self._least = least
        self._most = most
        self._greatest = sys.float_info.max if most is None else most

    def read(self, value: Any) -> Any:
        if not isinstance(value, (str, int, float)):
            raise ValueError(_SHAPE)
        is_number = isinstance(value, self._accepted) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, str) and re.fullmatch(self._pattern, value)):
            raise ValueError(f"is not {self._noun} (given {given(value)}; allowed {self.range})")
        number = self._converted(value)
        # False for nan, too.
        if not self._least <= number <= self._greatest:
            number = number if isinstance(value, str) else value
            raise ValueError(f"is out of range (given {given(number)}; allowed {self.range})")
        return number

    def _converted(self, value: Any) -> float:
        try:
            return float(value)
        except OverflowError:
            return math.inf

    @property
    def range(self) -> str:
        """The range as messages show it."""
        if self._most is None:
            return f"{self._least:g} or more"
        return f"{self._least:g} to {self._most:.0f}"

    def schema(self) -> dict[str, Any]:
        limits = {"minimum": self._least, "maximum": self._most}
        return {"type": self._json, **{k: v for k, v in limits.items() if v is not None}}


class Whole(Number):
    """A whole number in a range."""

    title = "whole number"
    _noun, _json = "a whole number", "integer"
    _pattern = r"[+-]?[0-9]{1,18}"
    _accepted = (int,)

    def _converted(self, value: Any) -> int:
        return int(value)


class RankCount(Whole):
    """A number of ranks, or ``auto``."""

    title = "whole number or `auto`"

    def read(self, value: Any) -> Any:
        return AUTO_RANKS if value == "auto" else super().read(value)

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "type": ["integer", "string"], "pattern": "^auto$"}

    def shown(self, value: Any) -> Any:
        return "auto" if value == AUTO_RANKS else value


class RetryCount(Whole):
    """A number of retries; in a file also a mapping, of which ``config`` makes two keys."""

    title = "whole number, or a mapping"

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "type": ["integer", "object"]}


_FLAGS = {"false": False, "true": True}


class Flag(Kind):
    """``true`` or ``false``."""

    title = "boolean"
    choices = tuple(_FLAGS)

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if not isinstance(value, (str, int, float)):
            raise ValueError(_SHAPE)
        if not isinstance(value, str) or value not in _FLAGS:
            raise ValueError(_unknown(value, self.choices))
        return _FLAGS[value]

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Texts(Kind):
    """A list of texts.

    Args:
        check: Raises ``ValueError`` for a list that is wrong as a whole.
    """

    title = "list of texts"

    def __init__(self, check: Callable[[tuple[str, ...]], object] | None = None) -> None:
        self._check = check
        self._item = Text()

    def read(self, value: Any) -> tuple[str, ...]:
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        if not is_list:
            raise ValueError("must be a list of texts")
        texts, faults = [], []
        for index, item in enumerate(value):
            try:
                texts.append(self._item.read(item))
            except ValueError as error:
                faults += faults_of(error, index)
        if faults:
            raise ValueFaults(faults)
        if self._check:
            self._check(tuple(texts))
        return tuple(texts)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": _TEXT}


class NameMap(Kind):
    """A mapping of names to values.

    Args:
        values: The kind of the values.
        check_name: Raises ``ValueError`` for a wrong name.
        schema: What the JSON Schema of a mapping has, too.
    """

    title = "names to texts"
    is_map = True

    def __init__(
        self,
        values: Kind | None = None,
        check_name: Callable[[str], object] | None = None,
        schema: Mapping[str, Any] = MappingProxyType({"additionalProperties": _TEXT_OR_NULL}),
    ) -> None:
        self._values = values or Text()
        self._check_name = check_name or Text().read
        self._schema = schema

    def read(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError("must be a mapping, NAME: value")
        values: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, item in value.items():
            try:
                if not isinstance(name, str):
                    raise ValueError(_SHAPE)
                self._check_name(name)
                values[name] = self._values.read(item)
            except ValueError as error:
                faults += faults_of(error, name)
        if faults:
            raise ValueFaults(faults)
        return MappingProxyType(values)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", **self._schema}


class Secrets(NameMap):
    """The values of secrets by name; a job file has the names, or the files with the values."""

    title = "list of names, or names to `@FILE`"
    is_secret = True

    def read(self, value: Any) -> Mapping[str, str]:
        if not isinstance(value, Mapping):
            raise ValueError("must be a mapping, or a list of names")
        return super().read(value)

    def schema(self) -> dict[str, Any]:
        files = {"type": ["string", "null"], "pattern": "^(@|$)"}
        names = {"type": "array", "items": {"type": "string", **_VARIABLE}}
        mapping = {"type": "object", "propertyNames": _VARIABLE, "additionalProperties": files}
        return {"anyOf": [{"type": "null"}, names, mapping]}


class _SweepValues(Texts):
    def read(self, value: Any) -> tuple[str, ...]:
        return super().read(grid.split(value) if isinstance(value, str) else value)


class Yaml(Kind):
    """A mapping or a list in YAML for the platform."""

    title = "YAML"
    is_tree = has_trees = True

    def __init__(self, *, is_list: bool = False) -> None:
        self._is_list = is_list

    def read(self, value: Any) -> Mapping[str, Any] | list[Any]:
        if self._is_list and isinstance(value, (list, tuple)):
            return list(value)
        if not self._is_list and isinstance(value, Mapping):
            return dict(value)
        raise ValueError("must be a list" if self._is_list else "must be a mapping, NAME: value")

    def schema(self) -> dict[str, Any]:
        if self._is_list:
            return {"type": "array", "items": {}}
        return {"type": "object", "additionalProperties": True}


def as_text(value: object) -> str:
    """Return a text, a number or a boolean of Python as a job file has it.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise ValueError(_SHAPE)
    return value if isinstance(value, str) else str(value)


def check_text(value: str, quoted: str = "") -> str:
    """Return ``value`` if Linux can pass it to a program.

    Args:
        quoted: How errors show the text.

    Raises:
        ValueError: Linux cannot pass it.
    """
    if "\0" in value:
        quoted = quoted or given(value)
        raise ValueError(f"contains a NUL character (given {quoted}; allowed any text without it)")
    try:
        size_bytes = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        quoted = quoted or given(value)
        raise ValueError(
            f"contains half a surrogate pair, which cannot be encoded (given {quoted})"
        ) from None
    check_size(size_bytes)
    return value


def check_size(size_bytes: int) -> None:
    """Raise ``ValueError`` for more bytes than Linux accepts as one argument or variable."""
    if size_bytes > MAX_ARG_BYTES:
        raise ValueError(
            f"is too long (given {size_bytes} bytes; allowed {MAX_ARG_BYTES}, Linux's limit)"
        )


def check_variable(name: str) -> str:
    """Return ``name`` if a job may have a variable of that name; else raise ``ValueError``."""
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
    return _check_uri(uri, (*SCHEMES, *VOLUME_SCHEMES))


def _check_output(uri: str) -> str:
    # An empty URI means the job's own folder in the store.
    return _check_uri(uri, (*STORE_SCHEMES, VOLUME_SCHEMES[0])) if uri else uri


def _check_uri(uri: str, schemes: tuple[str, ...]) -> str:
    scheme, mark, _ = uri.partition("://")
    if not mark or scheme not in schemes:
        allowed = ", ".join(f"{scheme}://" for scheme in schemes)
        # A query may hold a signature.
        quoted = given(uri.partition("?")[0])
        if mark:
            raise ValueError(f"has an unsupported scheme (given {quoted}; allowed {allowed})")
        folder = "a folder of this machine is file:///its/path"
        raise ValueError(f"is not a URI (given {quoted}; allowed {allowed}; {folder})")
    return uri


def check_pattern(text: str) -> str:
    """Return ``text`` if it is a regular expression with a group; else raise ``ValueError``."""
    from cloudjob.model.patterns import Pattern

    if not Pattern(text).groups:
        raise ValueError(
            f"has no group for the value (given {given(text)}; for example 'loss ([0-9.]+)')"
        )
    return text


def _check_words(allowed: Sequence[str], what: str, words: Sequence[str]) -> None:
    for word in words:
        if word not in allowed:
            raise ValueError(
                f"lists a word that is not {what}{nearest(word, allowed)}"
                f" (given {given(word)}; allowed {', '.join(allowed)})"
            )


def _check_webhook(text: str) -> str:
    if text and not text.startswith("@") and not re.fullmatch(VARIABLE_RULE, text):
        raise ValueError(
            "is a secret, which must not be written down where others can read it"
            f" (given {MASK}; allowed the name of a variable of your environment, or @FILE)"
        )
    return text


def _check_job_name(name: str) -> str:
    if name and not re.fullmatch(NAME_RULE, name):
        allowed = "letters, digits, '_' and '-', 1 to 64 of them"
        raise ValueError(
            f"is not a name every platform accepts (given {given(name)}; allowed {allowed})"
        )
    return name


_VARIABLES = {"propertyNames": _VARIABLE, "additionalProperties": _TEXT_OR_NULL}

JOB_NAME = Text(_check_job_name, pattern=f"^{NAME_RULE}$")
TEXT = Text()
TEXTS = Texts()
EVENTS = Texts(partial(_check_words, EVENT_WORDS, "an event"))
RETRY_KINDS = Texts(partial(_check_words, retry_kinds.WORDS, "a kind of failure"))
RETRIES = RetryCount(0, 10)
WEBHOOK = Text(_check_webhook, type="string", pattern=f"^(@.*|{VARIABLE_RULE})?$")
FLAG = Flag()
TREE = Yaml()
TREE_LIST = Yaml(is_list=True)
# A mapping of any names to texts.
LABELS = NameMap()
VARIABLES = NameMap(TEXT, check_variable, _VARIABLES)
INPUTS = NameMap(Text(_check_input), check_variable, _VARIABLES)
OUTPUTS = NameMap(Text(_check_output), check_variable, _VARIABLES)
SECRETS = Secrets(Text(quoted=MASK), check_variable)
# A mapping of metric names to regular expressions with a group.
PATTERNS = NameMap(Text(check_pattern), schema={"additionalProperties": _TEXT})
# A mapping of names to their values in a sweep.
SWEEP = NameMap(
    _SweepValues(grid.check_values),
    grid.check_name,
    {
        "propertyNames": {"pattern": f"^{grid.NAME_RULE}$"},
        "additionalProperties": {
            "type": ["string", "number", "boolean", "array"],
            "items": _TEXT,
            "minItems": 1,
        },
    },
)
