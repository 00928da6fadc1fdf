"""AWS's variables and files as we read them, judged by a session of botocore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError
from botocore.session import Session

from cloudjob.store.s3 import profiles
from jobentry.contract.sigv4 import Keys

CONFIG = """\
[default]
region = d-1
s3 =
  addressing_style = path
[profile lab]
region = lab-1
endpoint_url = https://lab
services = own
[profile "two words"]
aws_access_key_id = config-a
aws_secret_access_key = config-s
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = default
[profile both]
credential_process = /bin/false
[services own]
s3 =
  endpoint_url = https://own
"""
CREDENTIALS = """\
[default]
aws_access_key_id = file-a
aws_secret_access_key = file-s
[lab]
aws_access_key_id = lab-a
aws_secret_access_key = lab-s
aws_session_token = lab-t
region = lab-2
[old]
aws_access_key_id = old-a
aws_secret_access_key = old-s
aws_security_token =
aws_session_token = not this
[both]
aws_access_key_id = both-a
aws_secret_access_key = both-s
[half]
aws_access_key_id = half-a
"""
VARIABLES = {
    "nothing": {},
    "keys": {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"},
    "half": {"AWS_ACCESS_KEY_ID": "a"},
    "empty": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "s"},
    "tokens": {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SECURITY_TOKEN": "",
        "AWS_SESSION_TOKEN": "t",
    },
    "old token": {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SECURITY_TOKEN": "o",
        "AWS_SESSION_TOKEN": "t",
    },
    "profile": {"AWS_PROFILE": "lab"},
    "two profiles": {"AWS_DEFAULT_PROFILE": "old", "AWS_PROFILE": "lab"},
    "no such profile": {"AWS_PROFILE": "nope"},
    "an empty profile": {"AWS_PROFILE": ""},
    "profile and keys": {
        "AWS_PROFILE": "lab",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
    },
}
NAMED = [None, "default", "lab", "two words", "old", "both", "half", "absent", ""]
FILES = [("config", "credentials"), ("config", "-"), ("-", "credentials"), ("-", "-")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both files, and no variable or service that knows of keys."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "credentials").write_text(CREDENTIALS)
    return tmp_path


def settings_of(named: str | None) -> object:
    """What botocore says of the profile, and the services' sections."""
    session = Session(profile=named)
    try:
        return session.get_scoped_config(), session.full_config.get("services", {})
    except BotoCoreError as error:
        return type(error)


def keys_of(named: str | None) -> object:
    """The keys that botocore finds."""
    try:
        found = Session(profile=named).get_credentials()
    except BotoCoreError as error:
        return type(error)
    if found is None:
        return None
    frozen = found.get_frozen_credentials()
    return Keys(frozen.access_key, frozen.secret_key, frozen.token or "")


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("variables", VARIABLES)
def test_they_are_read_as_botocore_reads_them(folder, monkeypatch, files, variables):
    """Settings are the same, and keys where we take any: else botocore is asked."""
    for variable, file in zip(
        ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), files, strict=True
    ):
        monkeypatch.setenv(variable, str(folder / file))
    for name, value in VARIABLES[variables].items():
        monkeypatch.setenv(name, value)
    taken = 0
    for named in NAMED:
        try:
            found = profiles.read(named)
            said: object = (found.settings, found.services)
        except BotoCoreError as error:
            said = type(error)
        try:
            keys: object = profiles.plain_keys(named)
        except BotoCoreError as error:
            keys = type(error)

        assert said == settings_of(named), named
        if isinstance(keys, Keys):
            taken += 1
            assert keys == keys_of(named), named

    # It would be easy to agree by taking none.
    if "credentials" in files or variables == "keys":
        assert taken


@pytest.mark.parametrize(
    ("profile", "variables"),
    [
        ("role", {}),
        ("both", {}),
        ("two words", {}),
        (None, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token", "AWS_ROLE_ARN": "arn"}),
        (
            None,
            {
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_CREDENTIAL_EXPIRATION": "2099-01-01T00:00:00Z",
            },
        ),
    ],
)
def test_keys_that_somebody_makes_are_left_to_botocore(folder, monkeypatch, profile, variables):
    """Roles, programs, single sign-on and keys that expire."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert profiles.plain_keys(profile) is None


@pytest.mark.parametrize("broken", ["config", "credentials"])
def test_a_broken_file_is_said(folder, monkeypatch, broken):
    """In the words of botocore, whichever it is."""
    (folder / broken).write_text("[default\n")
    for variable, file in (
        ("AWS_CONFIG_FILE", "config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    ):
        monkeypatch.setenv(variable, str(folder / file))

    with pytest.raises(BotoCoreError, match=broken):
        profiles.read(None)


@pytest.mark.parametrize("where", ["variables", "file"])
def test_plain_keys_start_no_session(folder, where):
    """It would take longer than all else."""
    environ = {**os.environ, "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials")}
    if where == "variables":
        environ.update(VARIABLES["keys"], AWS_SHARED_CREDENTIALS_FILE="/dev/null")
    code = (
        "import sys, pathlib\n"
        "from cloudjob.store.s3 import keys, place\n"
        "there = place.read('s3://bucket')\n"
        "keys.profile(there)\n"
        "print(keys.KeyRing(there, {}, pathlib.Path('/')).current().access_key)\n"
        "print([name for name in sys.modules if name in ('botocore.session', 'botocore.client')])\n"
    )

    done = subprocess.run([sys.executable, "-c", code], env=environ, check=True, stdout=-1)

    expected = {"variables": "a", "file": "file-a"}[where]
    assert done.stdout.decode().split("\n") == [expected, "[]", ""]
