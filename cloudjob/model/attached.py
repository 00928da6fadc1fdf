"""What a copy takes from the description of a job that others have submitted.

Whoever may write to a store may write any description into it, so a copy takes only what can do no
harm here, the keys that are declared as harmless: how large the job is and how long it may take,
and which file of the reader's own source runs with which arguments. Programs, paths, variables,
images, hosts and credentials are the reader's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cloudjob.model.job import SECTIONS, JobSpec
from cloudjob.model.keys import Key
from cloudjob.model.text import MASK
from jobentry.contract.launchers import AUTO, LAUNCHERS


class Described(NamedTuple):
    """A description of a job, as ``masked`` returns it, in two parts.

    Args:
        taken: What a copy takes.
        chosen: The dotted keys of those that differ from the default.
        left_out: Every other value that differs from the default, by its dotted key.
    """

    taken: Mapping[str, Any]
    left_out: Mapping[str, Any]
    chosen: Sequence[str] = ()


def split(described: Mapping[str, Any]) -> Described:
    """Return which values of a description a copy takes, and which it leaves out."""
    taken: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    chosen: list[str] = []
    for section, name, value, declared in _values(described):
        key = f"{section}.{name}" if section else name
        default = _plain(declared.default)
        # Earlier versions described a flag as text.
        text_default = str(default).lower() if isinstance(default, bool) else default
        is_chosen = _plain(value) not in (None, default, text_default, [], {}, "")
        if key == "outputs" and isinstance(value, Mapping):
            # The names of the folders; where they are stored is up to the reader.
            taken[key] = dict.fromkeys(value, "")
            left_out.update({f"{key}.{output}": uri for output, uri in value.items() if uri})
        elif declared.is_harmless and _is_harmless(key, value):
            (taken.setdefault(section, {}) if section else taken)[name] = value
            chosen += [key] * is_chosen
        elif is_chosen:
            left_out[key] = value
    return Described(taken, left_out, chosen)


def _values(described: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Key]]:
    """Yield section, name, value and declaration of each key that this version knows."""
    for name, value in described.items():
        model = SECTIONS.get(name)
        if model is None and name in JobSpec.KEYS:
            yield "", name, value, JobSpec.KEYS[name]
        elif model is not None and isinstance(value, Mapping):
            for key, item in value.items():
                if key in model.KEYS:
                    yield name, key, item, model.KEYS[key]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _is_harmless(key: str, value: Any) -> bool:
    if key == "script":
        # A file of the reader's source: neither another path nor an option of an interpreter.
        is_text = isinstance(value, str) and not value.startswith(("/", "-", "~"))
        return is_text and ".." not in value.split("/")
    if key == "launcher":
        # With these, the script may be any command.
        launcher = LAUNCHERS.get(value) if isinstance(value, str) else None
        return value == AUTO or (launcher is not None and not launcher.takes_command)
    # The values of secrets were masked, and the reader's may differ.
    return key != "args" or MASK not in str(value)
