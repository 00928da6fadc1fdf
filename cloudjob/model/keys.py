"""Declares the keys of a job file, and holds their values.

A model such as ``JobSpec`` is a class with a ``key`` for each of its values. Its values are read
when it is made, and cannot be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from cloudjob.errors import SpecError
from cloudjob.model.kinds import Fault, Kind, ValueFaults, dotted, faults_of
from cloudjob.model.text import MASK, nearest, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_settings: Any) -> Any:
        """Return a decorator that does nothing: the real one is only for type checkers."""
        return lambda model: model


class Heading(Enum):
    """The groups of options on a help page, in their order, each with its title."""

    PLACE = "where it runs"
    VARIABLES = "variables and inputs"
    OUTPUTS = "outputs and metrics"
    LIMITS = "limits"
    SWEEPS = "sweeps"
    FILES = "name, source and job file"


class Option(NamedTuple):
    """The option that sets a key on the command line.

    Args:
        group: Its group on a help page.
        const: The value that the option sets, if it takes no argument.
    """

    group: Heading
    flag: str
    metavar: str = ""
    short: str = ""
    const: str = ""


class Key(NamedTuple):
    """The declaration of a key; its option, its checks, the schema and the reference follow.

    Args:
        is_harmless: Whether a copy takes the value from a description that a stranger may have
            written.
        implied: Returns the value that an empty one means, from those of the keys before it.
    """

    kind: Kind
    description: str
    default: Any
    option: Option | None
    is_harmless: bool
    implied: Callable[[Mapping[str, Any]], Any] | None


def key(
    kind: Kind,
    description: str,
    default: Any = "",
    option: Option | None = None,
    *,
    is_harmless: bool = False,
    implied: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Any:
    """Declare a key of a model; ``Key`` describes the arguments."""
    default = MappingProxyType(default) if kind.is_map else default
    return Key(kind, description, default, option, is_harmless, implied)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Values:
    """Base of all models.

    Raises:
        SpecError: With every value that is wrong by itself.
    """

    KEYS: ClassVar[Mapping[str, Key]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        declared = {name: item for name, item in vars(cls).items() if isinstance(item, Key)}
        cls.KEYS = MappingProxyType(declared)

    def __init__(self, **values: Any) -> None:
        try:
            vars(self).update(vars(self.read(values)))
        except ValueFaults as error:
            problems = [f"{one_line(dotted(where))}: {what}" for where, what in error.faults]
            raise SpecError(problems) from None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return a model of these values, as a file or Python has them.

        Raises:
            ValueFaults: With every value that is wrong by itself.
        """
        new, faults = cls.read_given(values)
        if faults:
            raise ValueFaults(faults)
        for name, item in cls.KEYS.items():
            if name not in new:
                new[name] = item.default
                # A value that can be changed is no other job's.
                if item.kind.has_trees:
                    new[name] = item.kind.read(item.default)
            if item.implied and not new[name]:
                new[name] = item.implied(new)
        return cls._of(new, tuple(values))

    @classmethod
    def read_given(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        """Return the values as a model has them, without defaults, and what is wrong with them."""
        new: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, item in cls.KEYS.items():
            if name in values:
                try:
                    new[name] = item.kind.read(values[name])
                except ValueError as error:
                    faults += faults_of(error, name)
        for name in values:
            if name not in cls.KEYS:
                faults.append(((name,), _unknown(name, cls.KEYS)))
        return new, faults

    @classmethod
    def _of(cls, values: Mapping[str, Any], chosen: Sequence[str]) -> Self:
        model = cls.__new__(cls)
        vars(model).update(values, _chosen=chosen)
        return model

    def with_values(self, **values: Any) -> Self:
        """Return a copy with other values, which are those of a valid job."""
        chosen = (*vars(self)["_chosen"], *values)
        return self._of({**dict(self.items()), **values}, chosen)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield each key with its value."""
        return ((name, getattr(self, name)) for name in self.KEYS)

    def chosen(self) -> Mapping[str, Any]:
        """Return the values that are not left at their defaults."""
        values, chosen = vars(self), vars(self)["_chosen"]
        return MappingProxyType({name: values[name] for name in self.KEYS if name in chosen})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]  # Mappings cannot be hashed.

    def __repr__(self) -> str:
        values = (f"{name}={self._shown(name)}" for name in self.KEYS)
        return f"{type(self).__name__}({', '.join(values)})"

    def _shown(self, name: str) -> str:
        return MASK if self.KEYS[name].kind.is_secret else repr(getattr(self, name))


def _unknown(name: object, keys: Mapping[str, Key]) -> str:
    guess = f"no such key{nearest(str(name), keys)}"
    has_sections = any(isinstance(item.kind, Section) for item in keys.values())
    return guess if has_sections else f"{guess} (allowed {', '.join(keys)})"


class Section(Kind):
    """The keys of a section."""

    def __init__(self, model: type[Values]) -> None:
        self.model = model
        self.has_trees = any(item.kind.has_trees for item in model.KEYS.values())

    def read(self, value: Any) -> Values:
        """Return the values of the section; see ``Values.read``."""
        if isinstance(value, self.model):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("must be a mapping of keys to values")
        return self.model.read(value)

    def schema(self) -> dict[str, Any]:
        """Return a reference to the schema of the model."""
        return {"$ref": f"#/$defs/{self.model.__name__}"}


def section(model: type[Values], description: str = "") -> Any:
    """Declare a section."""
    kind = Section(model)
    return key(kind, description, {} if kind.has_trees else model())
