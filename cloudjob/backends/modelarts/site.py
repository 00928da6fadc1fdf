"""Where the service is and who we are there: options, environment, the vendor's own files."""

from __future__ import annotations

import configparser
import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudjob.errors import NotAuthorised, UsageError
from jobentry.contract.sigv4 import Keys

# What `cloudjob emulator up` leaves for the other commands, below the folder of cloudjob's state.
EMULATOR_FILE = "emulator/address.json"
# What a job runs in there that says nothing of it.
_LOCAL = {"bucket": "cloudjob", "image": "cloudjob/base:latest", "flavor": "modelarts.vm.cpu.2u"}
# Given as the endpoint: the emulator, whatever else is said.
EMULATOR = "emulator"

_KEY_VARIABLES = (
    ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN"),
    ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN"),
    ("HW_ACCESS_KEY", "HW_SECRET_KEY", "HW_SECURITY_TOKEN"),
)
_FILE_VARIABLE = "HUAWEICLOUD_SDK_CREDENTIALS_FILE"
_VARIABLES = {
    "endpoint": ("CLOUDJOB_MODELARTS_ENDPOINT",),
    "iam_endpoint": ("HUAWEICLOUD_SDK_IAM_ENDPOINT",),
    "region": ("HW_REGION_NAME",),
    "project_id": ("HUAWEICLOUD_SDK_PROJECT_ID", "HW_PROJECT_ID"),
    "registry": ("CLOUDJOB_SWR_ENDPOINT",),
}
_REGION_IN_HOST = re.compile(r"(?:modelarts|iam|obs)[.-]([a-z]{2,}(?:-[a-z0-9]+)+)\.")
KEYS_HINT = (
    "set HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK, or write them to ~/.huaweicloud/credentials; "
    "without an account: cloudjob emulator up"
)


@dataclass(frozen=True, slots=True)
class Login:
    """A user's name and password, for a token."""

    user: str
    domain: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Site:
    """Where the service is and who we are there.

    Args:
        endpoint: ``https://host`` or ``http://host:port`` of ModelArts.
        iam_endpoint: The same of IAM.
        project_id: Empty when it has to be asked for.
        keys: None where a token is asked for with ``login``.
        wants_token: Whether the keys are used to ask for a token, too, and sign nothing else.
        file: Where the keys were read, to read them again when they are over.
        store_uri: Where code and outputs are kept when no store is named.
        default_image: The image of a job that names none; only an emulator has one.
        default_flavor: The same of the flavor.
        registry: ``https://host`` of the service that keeps images; empty when nobody knows.
    """

    endpoint: str
    iam_endpoint: str
    region: str
    project_id: str
    keys: Keys | None
    login: Login | None = None
    file: Path | None = None
    store_uri: str = ""
    default_image: str = ""
    default_flavor: str = ""
    registry: str = ""
    wants_token: bool = False
    origin: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        host = urlsplit(self.endpoint).hostname or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")


def find(
    options: Mapping[str, Any], environ: Mapping[str, str], state: Path, user_home: Path
) -> Site:
    """Return where the service is and who we are there.

    The job file's section wins over variables, these over the vendor's files, these over an
    emulator that runs on this machine, which counts only where nothing else is said at all.

    Args:
        options: The section ``modelarts`` of the job file.
        state: The folder of cloudjob's state.

    Raises:
        NotAuthorised: Nothing says who we are.
        UsageError: Nothing says where the service is, or a file cannot be read.
    """
    said = {name: str(options.get(name) or "") for name in _VARIABLES}
    for name, variables in _VARIABLES.items():
        said[name] = said[name] or next((environ[v] for v in variables if environ.get(v)), "")
    site = _found(options, said, environ, state, user_home)
    if options.get("auth") == "token" and site.keys is not None and site.keys.token:
        raise UsageError(
            "modelarts.auth: token: IAM gives none for temporary keys", hint="leave it at sign"
        )
    return replace(site, wants_token=options.get("auth") == "token" and site.keys is not None)


def _found(
    options: Mapping[str, Any],
    said: dict[str, str],
    environ: Mapping[str, str],
    state: Path,
    user_home: Path,
) -> Site:
    emulator = _emulator(state)
    if emulator and said["endpoint"] in (EMULATOR, emulator["endpoint"]):
        return _local(emulator, said, environ)
    keys, login = _keys_of(environ), _login(environ)
    path = _vendors_file(environ, user_home)
    written = _read_file(path) if keys is None and login is None else {}
    if keys is None and login is None and not written:
        if emulator and not said["endpoint"]:
            return _local(emulator, said, environ)
        raise NotAuthorised("opening the backend modelarts: no credentials", hint=KEYS_HINT)
    for name in ("iam_endpoint", "region", "project_id"):
        said[name] = said[name] or written.get(name, "")
    if written:
        return _remote(said, _keys_in(written), None, path, str(options.get("bucket") or ""))
    return _remote(said, keys, login, None, str(options.get("bucket") or ""))


def _remote(
    said: Mapping[str, str], keys: Keys | None, login: Login | None, file: Path | None, bucket: str
) -> Site:
    in_host = _REGION_IN_HOST.match(urlsplit(_url(said["endpoint"])).hostname or "")
    region = said["region"] or (in_host[1] if in_host else "")
    if not (said["endpoint"] or region):
        raise UsageError(
            "opening the backend modelarts: nothing says in which region it is",
            hint="set HW_REGION_NAME, or modelarts.region in the job file, to cn-north-4 for "
            "example",
        )
    # Another endpoint may be another cloud, whose registry nobody knows.
    is_known = bool(region and not said["endpoint"])
    domain = "myhuaweicloud.eu" if region.startswith("eu-") else "myhuaweicloud.com"
    return Site(
        endpoint=_url(said["endpoint"] or f"modelarts.{region}.{domain}"),
        iam_endpoint=_url(said["iam_endpoint"] or f"iam.{region}.{domain}"),
        region=region,
        project_id=said["project_id"],
        keys=keys,
        login=login,
        file=file,
        store_uri=f"obs://{bucket}" + (f"?region={region}" if region else "") if bucket else "",
        registry=_url(said["registry"] or f"swr-api.{region}.{domain}" * is_known),
        origin=str(file) if file else "environment",
    )


def _local(
    emulator: Mapping[str, str], said: Mapping[str, str], environ: Mapping[str, str]
) -> Site:
    return Site(
        endpoint=_url(emulator["endpoint"]),
        iam_endpoint=emulator["iam_endpoint"],
        region=said["region"] or emulator.get("region", ""),
        project_id=said["project_id"] or emulator["project_id"],
        keys=_keys_of(environ) or Keys(emulator["access_key"], emulator["secret_key"]),
        store_uri=f"obs://{emulator['bucket']}?endpoint={emulator['s3_endpoint']}"
        f"&region={emulator.get('region') or 'local'}&addressing=path",
        default_image=emulator["image"],
        default_flavor=emulator["flavor"],
        registry=_url(emulator["endpoint"]),
        origin="emulator",
    )


def renewed(site: Site) -> Keys | None:
    """Return the keys that the file of ``site`` holds now, None where it has no file."""
    return _keys_in(_read_file(site.file)) if site.file else None


def _url(text: str) -> str:
    if text and "://" not in text:
        text = f"https://{text}"
    return text.rstrip("/")


def _keys_of(environ: Mapping[str, str]) -> Keys | None:
    for access, secret, token in _KEY_VARIABLES:
        if environ.get(access) and environ.get(secret):
            return Keys(environ[access], environ[secret], environ.get(token, ""))
    return None


def _login(environ: Mapping[str, str]) -> Login | None:
    """Return the user of OpenStack's variables, which Huawei's tools read, too."""
    user, password = environ.get("OS_USERNAME", ""), environ.get("OS_PASSWORD", "")
    if not (user and password):
        return None
    return Login(user, environ.get("OS_DOMAIN_NAME") or user, password)


def _vendors_file(environ: Mapping[str, str], user_home: Path) -> Path:
    named = environ.get(_FILE_VARIABLE)
    return Path(named) if named else user_home / ".huaweicloud" / "credentials"


def _read_file(path: Path) -> dict[str, str]:
    """Return what the file of Huawei's SDKs says; nothing where there is none.

    Raises:
        UsageError: It cannot be read, or others can.
    """
    parser = configparser.RawConfigParser()
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            parser.read_file(file)
        section = dict(parser["basic"])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError) as error:
        what = getattr(error, "strerror", None) or "it is not what Huawei's SDKs write"
        raise UsageError(
            f"reading credentials: {path}: {what}",
            hint="[basic], and below it lines: ak = ..., sk = ..., project_id = ...",
        ) from error
    if mode & 0o077:
        raise UsageError(
            f"reading credentials: {path}: others may read it (mode {mode:04o})",
            hint=f"chmod 600 {path}",
        )
    return section


def _keys_in(section: Mapping[str, str]) -> Keys:
    if not (section.get("ak") and section.get("sk")):
        raise NotAuthorised(
            "opening the backend modelarts: the file has no ak and sk", hint=KEYS_HINT
        )
    return Keys(section["ak"], section["sk"], section.get("security_token", ""))


def _emulator(state: Path) -> dict[str, str]:
    """Return what a running emulator has left."""
    path = state / EMULATOR_FILE
    try:
        said = json.loads(path.read_bytes())
        return {**_LOCAL, **{name: str(value) for name, value in _needed(said)}}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}


def _needed(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("endpoint", "iam_endpoint", "s3_endpoint", "access_key", "secret_key"):
        yield name, said[name]
    yield "project_id", said["project_id"]
    yield from (
        (name, said[name]) for name in ("region", "bucket", "image", "flavor") if name in said
    )
