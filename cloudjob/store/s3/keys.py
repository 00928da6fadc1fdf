"""The keys that requests are signed with: from variables, files, or whatever botocore knows."""

from __future__ import annotations

import configparser
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudjob.errors import StoreError
from cloudjob.store.s3 import profiles
from cloudjob.store.s3.place import KEYS_HINTS, Place, obsutil
from jobentry.contract.sigv4 import Keys

# Each cloud's own words for the same three things.
_OBS_VARIABLES = (
    ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN"),
    ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN"),
    ("HW_ACCESS_KEY", "HW_SECRET_KEY", "HW_SECURITY_TOKEN"),
)


class KeyRing:
    """The keys of one store; looks for them when they are first needed, and again when told to.

    Args:
        profile: The profile of AWS's files that the URI names, else empty.
    """

    def __init__(self, place: Place, environ: Mapping[str, str], home: Path) -> None:
        self._place = place
        self._environ = environ
        self._home = home
        self._lock = threading.Lock()
        # Those that do not end by themselves, or what botocore makes them of.
        self._found: Keys | Any = None

    def current(self) -> Keys:
        """Return keys that are valid now, as far as one can know here.

        Raises:
            StoreError: There are none.
        """
        with self._lock:
            if self._found is None:
                self._found = self._find()
            found = self._found
        if isinstance(found, Keys):
            return found
        # Not under the lock: botocore may ask a service for fresh ones, and has a lock of its own.
        with _translated(self._place):
            made = found.get_frozen_credentials()
        return Keys(made.access_key, made.secret_key, made.token or "")

    def renew(self, refused: Keys) -> bool:
        """Look for keys again, and say whether there are others than those that were refused."""
        with self._lock:
            self._found = self._find()
        return self.current() != refused

    def _find(self) -> Keys | Any:
        for keys in self._of_obs():
            return keys
        named = self._place.options.get("profile")
        with _translated(self._place):
            found = profiles.plain_keys(named) or profiles.session(named).get_credentials()
        if found is None:
            raise StoreError(
                f"open store {self._place.root}: no keys: not in the environment, "
                "nor in a profile file",
                hint=KEYS_HINTS[self._place.scheme],
            )
        return found

    def _of_obs(self) -> Iterator[Keys]:
        """Yield what the files and variables of OBS's own tools say, the nearest first."""
        if not self._place.is_obs or "profile" in self._place.options:
            return
        for names in _OBS_VARIABLES:
            yield from _complete(*(self._environ.get(name, "") for name in names))
        said = obsutil(self._home)
        yield from _complete(said.get("ak", ""), said.get("sk", ""), said.get("token", ""))
        yield from self._of_sdk_file()

    def _of_sdk_file(self) -> Iterator[Keys]:
        """Yield the keys of the file that Huawei's SDKs read."""
        named = self._environ.get("HUAWEICLOUD_SDK_CREDENTIALS_FILE")
        path = Path(named) if named else self._home / ".huaweicloud" / "credentials"
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
            section = parser["basic"]
        except (OSError, UnicodeDecodeError, configparser.Error, KeyError):
            return
        yield from _complete(
            section.get("ak", ""), section.get("sk", ""), section.get("security_token", "")
        )


def _complete(access_key: str, secret_key: str, token: str) -> Iterator[Keys]:
    if access_key and secret_key:
        yield Keys(access_key, secret_key, token)


def profile(place: Place) -> dict[str, str]:
    """Return ``endpoint``, ``region`` and ``addressing`` of AWS's files, as far as they say.

    Raises:
        StoreError: There is no such profile, or the files cannot be read.
    """
    if place.is_obs and "profile" not in place.options:
        return {}
    with _translated(place):
        files = profiles.read(place.options.get("profile"))
    values = files.settings
    services = files.services.get(values.get("services", ""), {})
    s3 = {**_mapping(values.get("s3")), **_mapping(services.get("s3"))}
    addressing = s3.get("addressing_style", "")
    return {
        "endpoint": s3.get("endpoint_url") or values.get("endpoint_url", ""),
        "region": values.get("region", ""),
        "addressing": addressing if addressing in ("path", "virtual") else "",
    }


def _mapping(value: object) -> dict[str, str]:
    return value if isinstance(value, dict) else {}


@contextmanager
def _translated(place: Place) -> Iterator[None]:
    """Turn what botocore says of keys and profiles into a ``StoreError``."""
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except BotoCoreError as error:
        words = str(error).strip().rstrip(".")
        raise StoreError(
            f"open store {place.root}: looking for keys: {words}", hint=KEYS_HINTS[place.scheme]
        ) from error
