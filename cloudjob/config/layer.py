"""One layer of a job: the values of the options, of a file, or of a job that is copied."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudjob.backends.encoding import file_uri
from cloudjob.model.job import OPTIONS, SECTIONS, JobSpec
from cloudjob.model.keys import Values
from cloudjob.model.kinds import as_text, dotted
from cloudjob.model.text import MASK, one_line
from cloudjob.model.validation import valid_part


class Layer:
    """The values of one layer by key, in the form of a job file.

    Args:
        folder: The folder to which paths are relative.
        origins: Where each value was written, by its dotted key: ``--nodes``, ``job.yaml:3``.
        invalid: The keys that had an invalid value.
        is_named: Whether errors name the origin; for an option, the key is enough.
    """

    def __init__(self, values: dict[str, Any], folder: Path, *, is_named: bool = True) -> None:
        self.values, self.folder, self.is_named = values, folder, is_named
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.invalid: set[str] = set()

    def problem(self, key: str, what: str) -> str:
        """Return an error with the file and line that the value came from."""
        # List items may have no origin of their own.
        origin = self.origins.get(key) or self.origins.get(key.partition("[")[0], "")
        place = f"{origin}: " if origin and self.is_named else ""
        return f"{place}{one_line(key)}: {what}"


def layer_of_options(options: Mapping[str, Any], cwd: Path) -> Layer:
    """Return the options of the command line as a layer."""
    values = {key: value for key, value in options.items() if value is not None}
    layer = Layer(values, cwd, is_named=False)
    for key, value in values.items():
        origin = OPTIONS[key].flag if key in OPTIONS else "command line"
        names = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) else [key]
        layer.origins.update(dict.fromkeys(names, origin))
    return layer


def layer_of_job(origin: str, described: Mapping[str, Any], cwd: Path) -> Layer:
    """Return an existing job as a layer, without keys that only older versions knew."""
    values = _without_unknown_keys(described, JobSpec)
    for name in SECTIONS.keys() & values.keys():
        values[name] = _without_unknown_keys(values[name], SECTIONS[name])
    values["secrets"] = dict.fromkeys(values.get("secrets", ()), "")
    layer = Layer(values, cwd)
    layer.origins.update(dict.fromkeys(_keys(values), origin))
    return layer


def _without_unknown_keys(values: Mapping[str, Any], model: type[Values]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k in model.KEYS and v is not None}


def _keys(values: Mapping[str, Any], *location: str) -> Iterable[str]:
    """Return the dotted key of each value, and of those in maps and sections."""
    for name, value in values.items():
        yield dotted((*location, name))
        if isinstance(value, Mapping):
            yield from _keys(value, *location, name)


def check(layer: Layer) -> Layer:
    """Reduce a layer to its valid values, add its errors, and resolve its paths."""
    values = {**_with_plain_retries(layer), **_local_inputs(layer)}
    names = values.get("secrets")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        for index, name in enumerate(names):
            layer.origins[f"secrets.{name}"] = layer.origins[f"secrets[{index}]"]
        values["secrets"] = dict.fromkeys(names, "")
    # Report errors in the order of the file, which is that of the origins.
    order = {key: number for number, key in enumerate(layer.origins)}
    values, wrong = valid_part(values)
    wrong.sort(key=lambda error: order.get(dotted(error[0]), len(order)))
    layer.problems += [layer.problem(dotted(location), what) for location, what in wrong]
    layer.invalid.update(str(location[0]) for location, _ in wrong)
    if "source" in values:
        values["source"] = str(layer.folder / values["source"])
    webhook = as_text(values.get("notify", {}).get("webhook", ""))
    if webhook.startswith("@"):
        values["notify"] = {**values["notify"], "webhook": f"@{layer.folder / webhook[1:]}"}
    if "secrets" in values:
        values["secrets"] = dict(_places_of_secrets(layer, values["secrets"]))
    layer.values = values
    return layer


def _with_plain_retries(layer: Layer) -> dict[str, Any]:
    """Return the values with ``retries`` as a number, and its other keys in the section ``retry``.

    ``retries: {max: 3, on: [hang]}`` is short for ``retries: 3`` and ``retry: {on: [hang]}``.
    """
    values = dict(layer.values)
    retries = values.get("retries")
    if not isinstance(retries, Mapping):
        return values
    del values["retries"]
    for key, value in retries.items():
        name = "retries" if key == "max" else f"retry.{key}"
        layer.origins[name] = layer.origins.get(f"retries.{key}", "")
        if key == "max":
            values["retries"] = value
        elif isinstance(values.setdefault("retry", {}), Mapping):
            values["retry"] = {**values["retry"], key: value}
    return values


def _local_inputs(layer: Layer) -> dict[str, dict[str, Any]]:
    """Return the inputs of a layer, those that are paths of this machine as URIs."""
    inputs = layer.values.get("inputs")
    if not isinstance(inputs, Mapping):
        return {}

    def uri(place: object) -> object:
        is_path = isinstance(place, str) and place.startswith(("/", "./", "../"))
        if not is_path and place not in (".", ".."):
            return place
        path = os.path.normpath(layer.folder / str(place))
        try:
            # A sweep replaces {NAME} later.
            return file_uri(path, kept="{}")
        except UnicodeEncodeError:
            return place

    return {"inputs": {name: uri(place) for name, place in inputs.items()}}


def _places_of_secrets(layer: Layer, secrets: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in ((name, as_text(value)) for name, value in secrets.items()):
        if value and not value.startswith("@"):
            what = (
                "a secret's value must not be written down where others can read it"
                f" (given {MASK}; allowed the name alone, taken from your environment, or @FILE)"
            )
            layer.problems.append(layer.problem(f"secrets.{name}", what))
        else:
            yield name, f"@{layer.folder / value[1:]}" if value else ""


def merged(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the values of all layers; for each key, the last layer that has it wins.

    Sections and mappings are merged name by name.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        _merge(values, layer.values, JobSpec)
    return values


def _merge(into: dict[str, Any], values: Mapping[str, Any], model: type[Values] | None) -> None:
    for key, value in values.items():
        declared = model.KEYS.get(key) if model else None
        if isinstance(value, Mapping) and not (declared and declared.kind.is_tree):
            _merge(into.setdefault(key, {}), value, SECTIONS.get(key) if model is JobSpec else None)
        else:
            into[key] = value
