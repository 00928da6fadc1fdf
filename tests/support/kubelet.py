"""What a kubelet derives from a pod before its container starts: variables, files, the command.

``$(NAME)`` is expanded as in ``third_party/forked/golang/expansion/expand.go``; of several
variables with the same name the last one counts; volumes become files with their modes.
"""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

Object = dict[str, Any]


class File(NamedTuple):
    """A file of a ConfigMap or a Secret."""

    data: bytes
    mode: int


class Objects:
    """ConfigMaps and Secrets by name; ``stringData`` is merged as by the API server."""

    def __init__(self, objects: list[Object]) -> None:
        self._data: dict[tuple[str, str], dict[str, bytes]] = {}
        for item in objects:
            if item["kind"] not in ("ConfigMap", "Secret"):
                continue
            data = {}
            for key, text in (item.get("data") or {}).items():
                is_secret = item["kind"] == "Secret"
                data[key] = base64.b64decode(text) if is_secret else text.encode()
            for key, text in (item.get("binaryData") or {}).items():
                data[key] = base64.b64decode(text)
            self._data[(item["kind"], item["metadata"]["name"])] = data

    def of(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the data of an object, which must exist: otherwise the pod would never start."""
        return self._data[(kind, name)]


@dataclass(frozen=True)
class Started:
    """A container as it is passed to the container runtime."""

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, File]
    empty: tuple[str, ...]
    binds: dict[str, str]
    user: str
    group: str
    folder: str
    host: str
    domain: str
    shm_bytes: int


def container(pod: Object, objects: Objects, *, ip: str) -> Started:
    """Return the container of a pod that has one."""
    spec = pod["spec"]
    (container_spec,) = spec["containers"]
    env: dict[str, str] = {}
    for item in container_spec.get("env") or ():
        env[item["name"]] = _value(item, pod, objects, env, ip)
    files, empty, binds, shm_bytes = _volumes(spec, container_spec, objects)
    security = spec.get("securityContext") or {}
    return Started(
        image=container_spec["image"],
        command=tuple(expanded(argument, env) for argument in container_spec.get("command") or ()),
        args=tuple(expanded(argument, env) for argument in container_spec.get("args") or ()),
        env=env,
        files=files,
        empty=tuple(empty),
        binds=binds,
        user=str(security.get("runAsUser", "")),
        group=str(security.get("runAsGroup", "")),
        folder=container_spec.get("workingDir", ""),
        host=spec.get("hostname") or pod["metadata"]["name"],
        domain=spec.get("subdomain", ""),
        shm_bytes=shm_bytes,
    )


def expanded(text: str, env: dict[str, str]) -> str:
    """Return text with ``$(NAME)`` expanded and ``$$`` replaced by ``$``."""

    def value_of(reference: re.Match[str]) -> str:
        if reference[0] == "$$":
            return "$"
        # A reference to an unset variable stays unchanged.
        return env.get(reference[1], reference[0]) if reference[1] is not None else reference[0]

    return re.sub(r"\$\$|\$\(([^)]*)\)|\$.", value_of, text, flags=re.DOTALL)


def shell_environment(started: Started) -> dict[str, str]:
    """Run the container's shell script, and return the variables that the entry gets."""
    if started.command[1:2] != ("-c",):
        return dict(started.env)
    import subprocess

    shell = started.command[2].replace("exec sh /opt/cloudjob/boot.sh", "exec env -0 true ")
    shell = re.sub(r'exec env -0 true\s+"\$@"', "exec env -0", shell)
    done = subprocess.run(
        ["sh", "-c", shell, *started.command[3:]],
        env={"PATH": os.environ["PATH"], **started.env},
        capture_output=True,
        check=True,
    )
    pairs = (item.partition("=") for item in os.fsdecode(done.stdout).split("\0") if item)
    return {name: value for name, _, value in pairs if name not in ("PATH", "PWD", "_", "SHLVL")}


def _value(item: Object, pod: Object, objects: Objects, env: dict[str, str], ip: str) -> str:
    if "valueFrom" not in item:
        return expanded(item.get("value", ""), env)
    ((kind, source),) = item["valueFrom"].items()
    if kind == "configMapKeyRef":
        return objects.of("ConfigMap", source["name"])[source["key"]].decode()
    assert kind == "fieldRef", kind
    annotations = pod["metadata"].get("annotations") or {}
    value_of = {
        "status.podIP": ip,
        "status.hostIP": "192.0.2.1",
        "metadata.name": pod["metadata"]["name"],
        **{f"metadata.annotations['{key}']": value for key, value in annotations.items()},
    }
    return value_of[source["fieldPath"]]


def _volumes(
    spec: Object, container_spec: Object, objects: Objects
) -> tuple[dict[str, File], list[str], dict[str, str], int]:
    volumes = {item["name"]: item for item in spec.get("volumes") or ()}
    files: dict[str, File] = {}
    empty: list[str] = []
    binds: dict[str, str] = {}
    shm_bytes = 0
    for mount in container_spec.get("volumeMounts") or ():
        volume, path = volumes[mount["name"]], mount["mountPath"]
        (kind,) = set(volume) - {"name"}
        source = volume[kind]
        if kind == "emptyDir" and source.get("medium") == "Memory":
            assert path == "/dev/shm"
            shm_bytes = _bytes(source["sizeLimit"])
        elif kind == "emptyDir":
            empty.append(path)
        elif kind == "hostPath":
            binds[path] = source["path"]
        else:
            for name, file in _files(kind, source, objects).items():
                files[f"{path}/{name}"] = file
    return files, empty, binds, shm_bytes


def _files(kind: str, source: Object, objects: Objects) -> dict[str, File]:
    is_secret = kind == "secret"
    assert is_secret or kind == "configMap", kind
    name = source["secretName"] if is_secret else source["name"]
    data = objects.of("Secret" if is_secret else "ConfigMap", name)
    mode = source.get("defaultMode", 0o644)
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    return {item["path"]: File(data[item["key"]], item.get("mode", mode)) for item in items}


def _bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << (30 if unit == "Gi" else 20)
