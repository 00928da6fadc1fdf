"""Finds Huawei Cloud's credentials, for its API and OBS: in variables, then in the SDKs' file."""

from __future__ import annotations

import configparser
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from cloudjob.errors import UsageError
from jobentry.contract.sigv4 import Keys


class Service(Enum):
    """A service with variables of its own, which come before those of the other."""

    API = ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN")
    OBS = ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN")


_OF_TOOLS = ("HW_ACCESS_KEY", "HW_SECRET_KEY", "HW_SECURITY_TOKEN")
FILE_VARIABLE = "HUAWEICLOUD_SDK_CREDENTIALS_FILE"
_OTHERS = 0o077


def keys_in_variables(service: Service, environ: Mapping[str, str]) -> Keys | None:
    """Return the first complete keys in the variables; None if there are none."""
    others = (each for each in Service if each is not service)
    for names in (service.value, *(each.value for each in others), _OF_TOOLS):
        keys = Keys(*(environ.get(name, "") for name in names))
        if keys.access_key and keys.secret_key:
            return keys
    return None


def file_of(environ: Mapping[str, str], user_home: Path) -> Path:
    """Return the path of the SDKs' credentials file, whether or not it exists."""
    return Path(environ.get(FILE_VARIABLE) or user_home / ".huaweicloud" / "credentials")


def read_file(path: Path) -> dict[str, str]:
    """Return the values in the credentials file of the SDKs; empty if there is no file.

    Raises:
        UsageError: The file cannot be read, or other users can read it.
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
        what = getattr(error, "strerror", None) or "it is not a credentials file of Huawei's SDKs"
        raise UsageError(
            f"reading credentials: {path}: {what}",
            hint="it needs a section [basic] with the lines ak = ..., sk = ..., project_id = ...",
        ) from error
    if mode & _OTHERS:
        raise UsageError(
            f"reading credentials: {path}: other users may read it (mode {mode:04o})",
            hint=f"chmod 600 {path}",
        )
    return section


def keys_in(section: Mapping[str, str]) -> Keys | None:
    """Return the keys in the values of a credentials file; None if it has none."""
    if not (section.get("ak") and section.get("sk")):
        return None
    return Keys(section["ak"], section["sk"], section.get("security_token", ""))
