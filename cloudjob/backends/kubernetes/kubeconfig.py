"""Finds the cluster and namespace for jobs, and logs in there as kubectl does.

The settings come from the job file, the kubeconfig, or the pod that cloudjob runs in.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from cloudjob.errors import BackendError, NotAuthorised, UsageError
from cloudjob.model.text import nearest

# The context of a cloudjob that itself runs in a pod.
IN_CLUSTER = "in-cluster"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECONFIG = "KUBECONFIG"
_DEFAULT_NAMESPACE = "default"
# Each stream takes a connection; this is more than a person follows.
_CONNECTIONS = 256
_HINT = "does `kubectl get pods` work?"


@dataclass(frozen=True, slots=True)
class Cluster:
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


def find(options: Mapping[str, object], environ: Mapping[str, str], user_home: Path) -> Cluster:
    """Return the cluster for jobs without sending a request.

    Raises:
        UsageError: The kubeconfig cannot be read, or has no such context.
    """
    named = _absolute(str(options.get("kubeconfig") or "") or environ.get(_KUBECONFIG, ""))
    requested = str(options.get("context") or "")
    namespace = str(options.get("namespace") or "")
    default = str(user_home / ".kube" / "config")
    files = named or (default if Path(default).exists() else "")
    if requested == IN_CLUSTER or (not files and (_SERVICE_ACCOUNT / "token").exists()):
        return Cluster("", IN_CLUSTER, namespace or _own_namespace())
    contexts = entries(files, "contexts")
    currents = (str(loaded.get("current-context") or "") for loaded in _loaded(files))
    context = requested or next(filter(None, currents), "")
    if context and context not in contexts:
        guess = nearest(context, contexts)
        raise UsageError(
            f"looking for the context {context} in {files or 'a kubeconfig'}: there is none{guess}",
            hint=f"it has {', '.join(sorted(contexts))}" if contexts else "is the file right?",
        )
    its_namespace = str((contexts.get(context) or {}).get("namespace") or "")
    return Cluster(
        files, context, namespace or its_namespace or _DEFAULT_NAMESPACE, is_named=bool(named)
    )


def kubectl(program: str, cluster: Cluster) -> list[str]:
    """Return the beginning of a command of kubectl for a cluster and a namespace."""
    # Not --kubeconfig, which takes one file only.
    files = ["env", f"{_KUBECONFIG}={cluster.kubeconfig}"] if cluster.kubeconfig else []
    is_named = cluster.context not in ("", IN_CLUSTER)
    context = [f"--context={cluster.context}"] if is_named else []
    return [*files, program, *context, f"--namespace={cluster.namespace}"]


def _absolute(files: str) -> str:
    """Return absolute paths, as the job's handle contains them."""
    paths = filter(None, files.split(os.pathsep))
    return os.pathsep.join(str(Path(path).expanduser().absolute()) for path in paths)


def entries(files: str, kind: str) -> dict[str, Any]:
    """Return ``contexts`` or ``users`` of a kubeconfig by name; the first file that has one wins.

    Raises:
        UsageError: A file cannot be read, or is not a kubeconfig.
    """
    by_name: dict[str, Any] = {}
    for loaded in _loaded(files):
        of_file = {item["name"]: item.get(kind[:-1]) or {} for item in loaded.get(kind) or ()}
        by_name = {**of_file, **by_name}
    return by_name


def _loaded(files: str) -> Iterator[dict[str, Any]]:
    import yaml

    for path in filter(None, files.split(os.pathsep)):
        try:
            loaded = yaml.safe_load(Path(path).read_bytes()) or {}
            for kind in ("contexts", "users"):
                _ = [item["name"] for item in loaded.get(kind) or ()]
        except FileNotFoundError:
            # As in kubectl, a file of the list may be missing.
            continue
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "this is not a kubeconfig"
            raise UsageError(
                f"reading the kubeconfig {path}: {why}",
                hint="`kubectl config view` must be able to read it",
            ) from error
        yield loaded


def _own_namespace() -> str:
    try:
        return (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return _DEFAULT_NAMESPACE


class Login(NamedTuple):
    """Access to one API server.

    Args:
        pool: Connections of urllib3.
        configuration: The client library's, which knows how to log in, and when to do it again.
        impersonation_headers: Headers with which the user impersonates another one.
    """

    pool: Any
    configuration: Any
    impersonation_headers: tuple[tuple[str, str], ...]

    @property
    def host(self) -> str:
        """The URL of the server."""
        return str(self.configuration.host).rstrip("/")

    def headers(self, doing: str) -> Iterator[tuple[str, str]]:
        """Yield the headers that authenticate us; a plugin may be run for them.

        Raises:
            NotAuthorised: The plugin fails.
        """
        with _translate_login_errors(f"{doing}: logging in"):
            settings = self.configuration.auth_settings()
        for item in settings.values():
            if item.get("in") == "header" and item.get("value"):
                yield str(item["key"]), str(item["value"])
        yield from self.impersonation_headers


def open_login(cluster: Cluster) -> Login:
    """Return the access to the API server of a cluster.

    From the client library, cloudjob uses only what is hard to get right: kubeconfig, plugins,
    certificates. It sends the requests itself, as the library has no models for the operators, and
    its calls differ between versions.

    Raises:
        NotAuthorised: The kubeconfig does not say how to log in.
    """
    try:
        from kubernetes import client, config
        from kubernetes.client import rest
    except ImportError as error:
        raise BackendError(
            "opening the kubernetes backend: the Kubernetes client is not installed",
            hint="pip install 'cloudjob[kubernetes]'",
        ) from error
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    if not cluster.context:
        raise NotAuthorised(
            "looking for a cluster: there is no kubeconfig",
            hint="set KUBECONFIG, or kubernetes.kubeconfig in the job file",
        )
    doing = f"reading how to reach the cluster ({cluster.context})"
    user: Mapping[str, Any] = {}
    with _translate_login_errors(doing):
        if cluster.context == IN_CLUSTER and not cluster.kubeconfig:
            config.load_incluster_config(client_configuration=configuration)
        else:
            user = _user(cluster, doing)
            config.load_kube_config(
                config_file=cluster.kubeconfig,
                context=cluster.context,
                client_configuration=configuration,
                persist_config=False,
            )
        pool = rest.RESTClientObject(configuration).pool_manager
    return Login(pool, configuration, tuple(_impersonation_headers(user, doing)))


def _user(cluster: Cluster, doing: str) -> Mapping[str, Any]:
    """Return the context's user in the kubeconfig; empty if it names none."""
    context = entries(cluster.kubeconfig, "contexts").get(cluster.context) or {}
    name = context.get("user")
    if not name:
        return {}
    users = entries(cluster.kubeconfig, "users")
    if name not in users:
        raise NotAuthorised(
            f"{doing}: the context names the user {name}, which the kubeconfig lacks",
            hint="`kubectl config view` shows users and contexts",
        )
    user: Mapping[str, Any] = users[name] or {}
    return user


def _impersonation_headers(user: Mapping[str, Any], doing: str) -> Iterator[tuple[str, str]]:
    """Yield the headers for ``as`` and its companions, which the client library does not know."""
    others = [key for key in ("as-uid", "as-groups", "as-user-extra") if user.get(key)]
    if others and not user.get("as"):
        raise NotAuthorised(
            f"{doing}: the user has {', '.join(others)} without `as`", hint="add `as` to the user"
        )
    if user.get("as"):
        yield "Impersonate-User", str(user["as"])
    if user.get("as-uid"):
        yield "Impersonate-Uid", str(user["as-uid"])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values or ():
            yield f"Impersonate-Extra-{quote(str(key).lower(), safe='')}", str(value)


class _RootErrors(logging.Handler):
    """Keeps what is logged on the root logger, as the client library does with plugins' errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "root":
            self.messages.append(record.getMessage())


@contextlib.contextmanager
def _translate_login_errors(doing: str) -> Iterator[None]:
    """Turn the errors that the client library raises or only logs into one error.

    Otherwise, after a plugin has failed, requests would be sent as ``system:anonymous``.
    """
    import kubernetes.config

    errors = _RootErrors()
    root = logging.getLogger()
    root.addHandler(errors)
    try:
        yield
    except (
        kubernetes.config.ConfigException,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise NotAuthorised(f"{doing}: {message}", hint=_HINT) from error
    finally:
        root.removeHandler(errors)
    if errors.messages:
        raise NotAuthorised(f"{doing}: {' '.join(errors.messages[0].split())}", hint=_HINT)
