"""Strategic merge patches of the user's job file for manifests. No I/O."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Lists whose items have a name -> the key of that name: from the API's own types (patchMergeKey in
# k8s.io/api/core/v1), plus Volcano's tasks, whose type does not declare it.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "tasks": "name",
}
_DIRECTIVE, _RETAINED = "$patch", "$retainKeys"
_PATCHES = ("delete", "merge", "replace")


def merged(manifest: Any, patch: Any, key: str = "") -> Any:
    """Return ``manifest`` with a strategic merge patch over it.

    None removes a key. In a list of named items, an item is merged into the one of the same name,
    or else appended; ``$patch: delete`` removes that item, ``$patch: replace`` replaces it. Any
    other list is replaced as a whole. ``$retainKeys`` lists the only keys that stay.

    Args:
        key: Its key in the manifest.
    """
    if isinstance(manifest, Mapping) and isinstance(patch, Mapping):
        return _merged_mapping(manifest, patch)
    if key in _KEYS and _is_list(manifest) and _is_list(patch):
        return _merged_list(manifest, patch, _KEYS[key])
    return _without_directives(patch)


def _merged_mapping(manifest: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    if patch.get(_DIRECTIVE) == "replace":
        return dict(_without_directives(patch))
    result = dict(manifest)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif key not in (_DIRECTIVE, _RETAINED):
            result[key] = merged(result.get(key), value, key)
    retained = patch.get(_RETAINED, result)
    return {key: value for key, value in result.items() if key in retained}


def unknown_directives(patch: Any, where: str = "") -> Iterator[str]:
    """Yield the place of each directive that ``merged`` does not know and would send unchanged."""
    if isinstance(patch, Mapping):
        for key, value in patch.items():
            if str(key).startswith("$") and not _is_known(key, value):
                yield f"{where}.{key}"
            yield from unknown_directives(value, f"{where}.{key}")
    elif _is_list(patch):
        for index, item in enumerate(patch):
            yield from unknown_directives(item, f"{where}[{index}]")


def _is_known(key: str, value: Any) -> bool:
    if key == _RETAINED:
        return _is_list(value)
    return key == _DIRECTIVE and value in _PATCHES


def _merged_list(items: Sequence[Any], patch: Sequence[Any], name: str) -> list[Any]:
    result = list(items)
    for change in patch:
        at = next((i for i, item in enumerate(result) if _named(item, change, name)), None)
        is_gone = isinstance(change, Mapping) and change.get(_DIRECTIVE) == "delete"
        if at is None:
            result += [] if is_gone else [_without_directives(change)]
        elif is_gone:
            del result[at]
        else:
            result[at] = merged(result[at], change)
    return result


def _named(item: Any, change: Any, name: str) -> bool:
    both = isinstance(item, Mapping) and isinstance(change, Mapping)
    return both and name in change and item.get(name) == change[name]


def _without_directives(value: Any) -> Any:
    """Return the result of applying a patch to nothing."""
    if isinstance(value, Mapping):
        return {
            key: _without_directives(item)
            for key, item in value.items()
            if key not in (_DIRECTIVE, _RETAINED) and item is not None
        }
    if _is_list(value):
        return [_without_directives(item) for item in value]
    return copy.copy(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
