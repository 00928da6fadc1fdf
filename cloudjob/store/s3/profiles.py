"""AWS's variables and files, without a session of botocore where there are plain keys.

The session takes as long to import as all else of a short command. So its parser reads the files,
and only who has a role, single sign-on, a program or a service that makes keys needs it.
https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jobentry.contract.sigv4 import Keys

# In the order in which botocore asks for them.
_PROFILE = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")
_TOKEN = ("AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
_TOKEN_KEYS = ("aws_security_token", "aws_session_token")
# How the keys of a profile begin that make keys in another way, which goes before plain ones.
_MAKING = ("role_", "web_identity_", "sso_", "login_", "source_", "credential_")
_WEB_IDENTITY = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN")
# A file that is named by nobody is this one.
_CONFIG = ("AWS_CONFIG_FILE", "~/.aws/config")
_CREDENTIALS = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")


class Files(NamedTuple):
    """What the files say of the profile in use.

    Args:
        settings: Of both files.
        secrets: Of the file of keys alone.
        services: The sections that ``settings`` may name.
    """

    settings: Mapping[str, Any]
    secrets: Mapping[str, Any]
    services: Mapping[str, Any]


def read(named: str | None) -> Files:
    """Return what the files say.

    Args:
        named: The profile that somebody has named for this store.

    Raises:
        botocore.exceptions.BotoCoreError: A file cannot be read, or there is no such profile.
    """
    from botocore import configloader
    from botocore.exceptions import ConfigNotFound, ProfileNotFound

    def parsed(variable: str, path: str) -> dict[str, Any]:
        try:
            return dict(configloader.raw_config_parse(os.environ.get(variable, path)))
        except ConfigNotFound:
            return {}

    config = configloader.build_profile_map(parsed(*_CONFIG))
    secrets = parsed(*_CREDENTIALS)
    profile = _profile(named)
    if profile is not None and profile not in {*config["profiles"], *secrets}:
        raise ProfileNotFound(profile=profile)
    own = secrets.get(profile or "default", {})
    settings = {**config["profiles"].get(profile or "default", {}), **own}
    return Files(settings, own, config["services"])


def plain_keys(named: str | None) -> Keys | None:
    """Return keys that stand in variables or in a file and do not expire; None for any others.

    Raises:
        botocore.exceptions.BotoCoreError: As ``read`` does.
    """
    environ = os.environ
    files = read(named)
    # As in botocore, a profile that is named for the store goes before variables.
    if named is None and environ.get("AWS_ACCESS_KEY_ID"):
        if environ.get("AWS_CREDENTIAL_EXPIRATION"):
            return None
        token = next((environ[name] for name in _TOKEN if environ.get(name)), "")
        return _keys(environ["AWS_ACCESS_KEY_ID"], environ.get("AWS_SECRET_ACCESS_KEY"), token)
    if any(environ.get(name) for name in _WEB_IDENTITY):
        return None
    if any(name.startswith(_MAKING) for name in files.settings):
        return None
    secrets = files.secrets
    token = next((secrets[name] for name in _TOKEN_KEYS if name in secrets), "")
    return _keys(secrets.get("aws_access_key_id"), secrets.get("aws_secret_access_key"), token)


def session(named: str | None) -> Any:
    """Return a session of botocore, which knows every way to keys."""
    from botocore.session import Session

    return Session(profile=named)


def _keys(access_key: str | None, secret_key: str | None, token: str) -> Keys | None:
    return Keys(access_key, secret_key, token) if access_key and secret_key else None


def _profile(named: str | None) -> str | None:
    found = (os.environ[name] for name in _PROFILE if name in os.environ)
    return named if named is not None else next(found, None)
