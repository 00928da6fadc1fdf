"""Which variables hold secrets, and which byte strings of their values are masked."""

from __future__ import annotations

# ``cloudjob --help`` imports this module; typing would be a tenth of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

# A shorter value occurs by chance too often.
_MIN_SECRET_BYTES = 8
# A shorter value of letters in one case is an ordinary word: "password", "production".
_MAX_WORD_LENGTH = 16
_NAME_ENDS = (
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
    "API_KEY",
    "APIKEY",
    "ACCESS_KEY",
    "ACCESS_KEY_ID",
    "SECRET_KEY",
    "PRIVATE_KEY",
    "SSH_KEY",
)


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name usually holds a secret."""
    return name.upper().endswith(_NAME_ENDS)


def secret_forms(values: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the byte strings to mask for these values, line by line; the longest is first.

    With this order, a value inside another one is not replaced before it.
    """
    lines = {line.strip() for value in values for line in value.split(b"\n")}
    forms = {form for line in lines if _is_secret(line) for form in _forms(line)}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _is_secret(line: bytes) -> bool:
    """Whether a line is long enough, and neither an ordinary word nor the header of a key."""
    is_word = line.isalpha() and len(line) < _MAX_WORD_LENGTH
    is_word = is_word and (line.islower() or line.isupper() or line.istitle())
    return len(line) >= _MIN_SECRET_BYTES and not is_word and not line.startswith(b"-----")


def _forms(value: bytes) -> set[bytes]:
    """Return a value as it is, in base64, in percent encoding, and escaped as in JSON."""
    from base64 import b64encode
    from json import dumps
    from urllib.parse import quote, quote_plus

    escaped = dumps(value.decode("utf-8", "surrogateescape"))[1:-1].encode()
    return {
        value,
        b64encode(value).rstrip(b"="),
        quote(value, safe="").encode(),
        quote_plus(value).encode(),
        escaped,
    }
