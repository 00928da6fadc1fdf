"""Which cluster, and which namespace in it: the job file, the kubeconfig, or the pod we are in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudjob.errors import UsageError
from cloudjob.model.text import nearest

# The context of a cloudjob that itself runs in a pod.
IN_CLUSTER = "in-cluster"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECONFIG = "KUBECONFIG"
_DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster and a namespace.

    Args:
        kubeconfig: The files that say how to reach it, joined as in ``$KUBECONFIG``; empty within
            a pod, and when there is none.
        is_named: Whether the files are others than kubectl would use with an empty environment.
        context: The name of the context in them; empty when there is none.
    """

    kubeconfig: str
    context: str
    namespace: str
    is_named: bool = False


def find(options: Mapping[str, object], environ: Mapping[str, str], user_home: Path) -> Site:
    """Return where jobs go; nothing is asked.

    Raises:
        UsageError: The kubeconfig cannot be read, or has no such context.
    """
    named = _absolute(str(options.get("kubeconfig") or "") or environ.get(_KUBECONFIG, ""))
    wanted = str(options.get("context") or "")
    namespace = str(options.get("namespace") or "")
    default = str(user_home / ".kube" / "config")
    files = named or (default if Path(default).exists() else "")
    if wanted == IN_CLUSTER or (not files and (_SERVICE_ACCOUNT / "token").exists()):
        return Site("", IN_CLUSTER, namespace or _own_namespace())
    contexts = entries(files, "contexts")
    currents = (str(loaded.get("current-context") or "") for loaded in _loaded(files))
    context = wanted or next(filter(None, currents), "")
    if context and context not in contexts:
        guess = nearest(context, contexts)
        raise UsageError(
            f"looking for the context {context} in {files or 'a kubeconfig'}: there is none{guess}",
            hint=f"it has {', '.join(sorted(contexts))}" if contexts else "is the file right?",
        )
    own = str((contexts.get(context) or {}).get("namespace") or "")
    return Site(files, context, namespace or own or _DEFAULT_NAMESPACE, is_named=bool(named))


def _absolute(files: str) -> str:
    """Return files that mean the same from any folder: they stand in the job's handle."""
    paths = filter(None, files.split(os.pathsep))
    return os.pathsep.join(str(Path(path).expanduser().absolute()) for path in paths)


def entries(files: str, kind: str) -> dict[str, Any]:
    """Return ``contexts`` or ``users`` of a kubeconfig by name; the first file that has one wins.

    Raises:
        UsageError: A file cannot be read, or is no kubeconfig.
    """
    found: dict[str, Any] = {}
    for loaded in _loaded(files):
        own = {item["name"]: item.get(kind[:-1]) or {} for item in loaded.get(kind) or ()}
        found = {**own, **found}
    return found


def _loaded(files: str) -> Iterator[dict[str, Any]]:
    import yaml

    for path in filter(None, files.split(os.pathsep)):
        try:
            loaded = yaml.safe_load(Path(path).read_bytes()) or {}
            for kind in ("contexts", "users"):
                _ = [item["name"] for item in loaded.get(kind) or ()]
        except FileNotFoundError:
            # As kubectl: a file of the list that is not there yet.
            continue
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "this is no kubeconfig"
            raise UsageError(
                f"reading the kubeconfig {path}: {why}", hint="`kubectl config view` reads it, too"
            ) from error
        yield loaded


def _own_namespace() -> str:
    try:
        return (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return _DEFAULT_NAMESPACE
