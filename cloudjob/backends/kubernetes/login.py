"""How a site is reached and logged in to: what the kubeconfig says, as kubectl reads it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from cloudjob.backends.kubernetes import site as sites
from cloudjob.backends.kubernetes.site import IN_CLUSTER, Site
from cloudjob.errors import BackendError, NotAuthorised

# More streams than a person watches; each takes a connection.
_CONNECTIONS = 256
_HINT = "does `kubectl get pods` work?"


class Login(NamedTuple):
    """A way to one API server.

    Args:
        pool: Connections of urllib3.
        configuration: Of the client library, which knows how to log in, and when again.
        acts_as: Headers by which the user acts as somebody else.
    """

    pool: Any
    configuration: Any
    acts_as: tuple[tuple[str, str], ...]

    @property
    def host(self) -> str:
        """The URL of the server."""
        return str(self.configuration.host).rstrip("/")

    def headers(self, doing: str) -> Iterator[tuple[str, str]]:
        """Yield the headers that say who we are; a plugin may be asked for it.

        Raises:
            NotAuthorised: The plugin fails.
        """
        with _logged_in(f"{doing}: logging in"):
            settings = self.configuration.auth_settings()
        for item in settings.values():
            if item.get("in") == "header" and item.get("value"):
                yield str(item["key"]), str(item["value"])
        yield from self.acts_as


def opened(site: Site) -> Login:
    """Return the way to the API server of a site.

    Of the client library we take what is hard to do right: kubeconfig, plugins, certificates. The
    requests are our own: its models know no operator, and its calls differ between its versions.

    Raises:
        NotAuthorised: The kubeconfig does not say how.
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
    if not site.context:
        raise NotAuthorised(
            "looking for a cluster: there is no kubeconfig",
            hint="set KUBECONFIG, or kubernetes.kubeconfig in the job file",
        )
    doing = f"reading how to reach the cluster ({site.context})"
    user: Mapping[str, Any] = {}
    with _logged_in(doing):
        if site.context == IN_CLUSTER and not site.kubeconfig:
            config.load_incluster_config(client_configuration=configuration)
        else:
            user = _user(site, doing)
            config.load_kube_config(
                config_file=site.kubeconfig,
                context=site.context,
                client_configuration=configuration,
                persist_config=False,
            )
        pool = rest.RESTClientObject(configuration).pool_manager
    return Login(pool, configuration, tuple(_acting_as(user, doing)))


def _user(site: Site, doing: str) -> Mapping[str, Any]:
    """Return what the kubeconfig says of the context's user; it may name none."""
    context = sites.entries(site.kubeconfig, "contexts").get(site.context) or {}
    name = context.get("user")
    if not name:
        return {}
    users = sites.entries(site.kubeconfig, "users")
    if name not in users:
        raise NotAuthorised(
            f"{doing}: the context has the user {name}, and the kubeconfig has no such user",
            hint="`kubectl config view` shows users and contexts",
        )
    found: Mapping[str, Any] = users[name] or {}
    return found


def _acting_as(user: Mapping[str, Any], doing: str) -> Iterator[tuple[str, str]]:
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


class _Heard(logging.Handler):
    """Keeps what is logged on the root logger, as the client library does with plugins' errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "root":
            self.said.append(record.getMessage())


@contextlib.contextmanager
def _logged_in(doing: str) -> Iterator[None]:
    """Raise what the client library raises, or only logs, as one error.

    Else a plugin that fails would be a request of ``system:anonymous``.
    """
    import kubernetes.config

    heard = _Heard()
    root = logging.getLogger()
    root.addHandler(heard)
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
        said = " ".join(str(error).split()) or type(error).__name__
        raise NotAuthorised(f"{doing}: {said}", hint=_HINT) from error
    finally:
        root.removeHandler(heard)
    if heard.said:
        raise NotAuthorised(f"{doing}: {' '.join(heard.said[0].split())}", hint=_HINT)
