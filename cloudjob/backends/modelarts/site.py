"""Finds the service and the credentials in the job file, variables and the vendor's files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudjob import huawei
from cloudjob.errors import NotAuthorised, UsageError
from jobentry.contract.sigv4 import Keys

# Written by `cloudjob emulator up` for other commands, below the folder of cloudjob's state.
EMULATOR_FILE = "emulator/address.json"
# This endpoint selects the emulator on this machine, even if there are credentials.
_EMULATOR = "emulator"
_EMULATOR_NEEDS = (
    "endpoint",
    "iam_endpoint",
    "s3_endpoint",
    "access_key",
    "secret_key",
    "project_id",
)
# Optional keys of the emulator's file.
_EMULATOR_DEFAULTS = {
    "region": "",
    "bucket": "cloudjob",
    "image": "cloudjob/base:latest",
    "flavor": "modelarts.vm.cpu.2u",
}

# Setting -> the variables that set it if the job file does not.
_VARIABLES = {
    "endpoint": ("CLOUDJOB_MODELARTS_ENDPOINT",),
    "iam_endpoint": ("HUAWEICLOUD_SDK_IAM_ENDPOINT",),
    "region": ("HW_REGION_NAME",),
    "project_id": ("HUAWEICLOUD_SDK_PROJECT_ID", "HW_PROJECT_ID"),
    "registry": ("CLOUDJOB_SWR_ENDPOINT",),
}
_REGION_IN_HOST = re.compile(r"(?:modelarts|iam|obs)[.-]([a-z]{2,}(?:-[a-z0-9]+)+)\.")
_KEYS_HINT = (
    "set HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK, or write them to ~/.huaweicloud/credentials; "
    "without an account: cloudjob emulator up"
)


@dataclass(frozen=True, slots=True)
class UserLogin:
    """A user's name and password, which IAM exchanges for a token."""

    user: str
    domain: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Site:
    """The service's endpoints and the user's credentials.

    Args:
        endpoint: ``https://host`` or ``http://host:port`` of ModelArts.
        iam_endpoint: The same for IAM.
        project_id: Empty if IAM must be asked for it.
        keys: None if ``login`` is used to get a token.
        wants_token: Whether the keys are only used to get a token.
        file: The file with the keys, which is read again when they have expired.
        store_uri: The store of jobs that name none; empty if there is none.
        default_image: The image of jobs that name none; only an emulator has one.
        default_flavor: The same for the flavor.
        registry: ``https://host`` of SWR, the registry of images; empty if it is not known.
        origin: The source of the credentials: variables, a file or the emulator.
    """

    endpoint: str
    iam_endpoint: str
    region: str
    project_id: str
    keys: Keys | None
    login: UserLogin | None = None
    file: Path | None = None
    store_uri: str = ""
    default_image: str = ""
    default_flavor: str = ""
    registry: str = ""
    wants_token: bool = False
    origin: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the service runs on this machine."""
        host = urlsplit(self.endpoint).hostname or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")


def find(
    options: Mapping[str, Any], environ: Mapping[str, str], state: Path, user_home: Path
) -> Site:
    """Return the service's endpoints and the user's credentials.

    The job file's section takes precedence over variables, these over the vendor's files, and
    these over an emulator on this machine, which is used only if nothing else is set.

    Args:
        options: The section ``modelarts`` of the job file.
        state: The folder of cloudjob's state.

    Raises:
        NotAuthorised: There are no credentials.
        UsageError: Nothing names the service, or a file cannot be read.
    """
    settings = {
        name: str(options.get(name) or "")
        or next((environ[variable] for variable in variables if environ.get(variable)), "")
        for name, variables in _VARIABLES.items()
    }
    site = _find_site(options, settings, environ, state, user_home)
    if options.get("auth") != "token" or site.keys is None:
        return site
    if site.keys.token:
        raise UsageError(
            "modelarts.auth: token: IAM issues none for temporary keys", hint="set it to sign"
        )
    return replace(site, wants_token=True)


def _find_site(
    options: Mapping[str, Any],
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    state: Path,
    user_home: Path,
) -> Site:
    emulator = _emulator(state)
    if emulator and settings["endpoint"] in (_EMULATOR, emulator["endpoint"]):
        return _local(emulator, settings, environ)
    bucket = str(options.get("bucket") or "")
    keys, login = huawei.keys_in_variables(huawei.Service.API, environ), _login(environ)
    if keys or login:
        site = _remote(settings, bucket)
        return replace(site, keys=keys, login=login, origin="environment")
    file = huawei.file_of(environ, user_home)
    section = huawei.read_file(file)
    if section:
        names = ("iam_endpoint", "region", "project_id")
        in_file = {name: settings[name] or section.get(name, "") for name in names}
        site = _remote({**settings, **in_file}, bucket)
        return replace(site, keys=_keys_in(section), file=file, origin=str(file))
    if emulator and not settings["endpoint"]:
        return _local(emulator, settings, environ)
    raise NotAuthorised("opening the backend modelarts: no credentials", hint=_KEYS_HINT)


def _remote(settings: Mapping[str, str], bucket: str) -> Site:
    """Return the site of a region, or of an endpoint, which may belong to another cloud."""
    endpoint = _url(settings["endpoint"])
    in_host = _REGION_IN_HOST.match(urlsplit(endpoint).hostname or "")
    region = settings["region"] or (in_host[1] if in_host else "")
    if not (endpoint or region):
        raise UsageError(
            "opening the backend modelarts: no region is set",
            hint="set HW_REGION_NAME, or modelarts.region in the job file, to cn-north-4 for "
            "example",
        )
    domain = "myhuaweicloud.eu" if region.startswith("eu-") else "myhuaweicloud.com"
    # The registry of another cloud is unknown.
    registry = settings["registry"] or ("" if endpoint else f"swr-api.{region}.{domain}")
    return Site(
        endpoint=endpoint or f"https://modelarts.{region}.{domain}",
        iam_endpoint=_url(settings["iam_endpoint"] or f"iam.{region}.{domain}"),
        region=region,
        project_id=settings["project_id"],
        keys=None,
        store_uri=f"obs://{bucket}" + (f"?region={region}" if region else "") if bucket else "",
        registry=_url(registry),
    )


def _local(
    emulator: Mapping[str, str], settings: Mapping[str, str], environ: Mapping[str, str]
) -> Site:
    own_keys = Keys(emulator["access_key"], emulator["secret_key"])
    return Site(
        endpoint=_url(emulator["endpoint"]),
        iam_endpoint=emulator["iam_endpoint"],
        region=settings["region"] or emulator["region"],
        project_id=settings["project_id"] or emulator["project_id"],
        keys=huawei.keys_in_variables(huawei.Service.API, environ) or own_keys,
        store_uri=f"obs://{emulator['bucket']}?endpoint={emulator['s3_endpoint']}"
        f"&region={emulator['region'] or 'local'}&addressing=path",
        default_image=emulator["image"],
        default_flavor=emulator["flavor"],
        registry=_url(emulator["endpoint"]),
        origin=_EMULATOR,
    )


def renewed_keys(site: Site) -> Keys | None:
    """Read the keys of ``site`` again from its file; None if it has no file."""
    return _keys_in(huawei.read_file(site.file)) if site.file else None


def _url(text: str) -> str:
    if text and "://" not in text:
        text = f"https://{text}"
    return text.rstrip("/")


def _login(environ: Mapping[str, str]) -> UserLogin | None:
    """Return the user that OpenStack's variables name, which Huawei's tools also read."""
    user, password = environ.get("OS_USERNAME", ""), environ.get("OS_PASSWORD", "")
    if not (user and password):
        return None
    return UserLogin(user, environ.get("OS_DOMAIN_NAME") or user, password)


def _keys_in(section: Mapping[str, str]) -> Keys:
    keys = huawei.keys_in(section)
    if keys is None:
        raise NotAuthorised(
            "opening the backend modelarts: the file has no ak and sk", hint=_KEYS_HINT
        )
    return keys


def _emulator(state: Path) -> dict[str, str]:
    """Return the addresses of the emulator on this machine; empty if there is none."""
    try:
        written = json.loads((state / EMULATOR_FILE).read_bytes())
        needed = {name: str(written[name]) for name in _EMULATOR_NEEDS}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {
        **needed,
        **{name: str(written.get(name, value)) for name, value in _EMULATOR_DEFAULTS.items()},
    }
