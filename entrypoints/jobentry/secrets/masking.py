"""The values of secrets, which messages, records and shown logs must not contain.

The job's secrets are masked, and so are the keys of its store, the key with which its nodes
authenticate each other, and variables with a name such as ``WANDB_API_KEY``. Each is found in plain
text, line by line, and in base64 and percent encoding.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterator, Mapping

from jobentry.contract import names
from jobentry.contract.masks import MASK, Range
from jobentry.contract.secret_values import is_secret_name, secret_forms

# The shortest beginning of a secret that is masked at the end of an incomplete line.
_MIN_PART_BYTES = 4
_KEY_LIMIT_BYTES = 64 * 1024

_values: tuple[bytes, ...] = ()
_texts: tuple[str, ...] = ()


def mask_secrets_of(environ: Mapping[str, str]) -> None:
    """Mask the secrets of this environment from now on."""
    global _values, _texts
    _values = secret_forms(_secrets(environ))
    _texts = tuple(value.decode("utf-8", "surrogateescape") for value in _values)


def max_secret_bytes() -> int:
    """Return the length of the longest value; 0 if there are none."""
    return len(_values[0]) if _values else 0


def hide(text: str) -> str:
    """Return ``text`` with ``***`` for every secret."""
    for value in _texts:
        text = text.replace(value, MASK)
    return text


def hide_bytes(data: bytes) -> bytes:
    """Return ``data`` with ``***`` for every secret."""
    for value in _values:
        data = data.replace(value, MASK.encode())
    return data


def find(data: bytes, before: bytes = b"", *, is_part: bool = False) -> list[Range]:
    """Return where secrets are in ``data``, in order and without overlaps.

    Args:
        before: The end of the text already written to the same line, as far as a secret may reach.
        is_part: Whether more of the last line follows, so that a secret may begin at its end.
    """
    whole = before + data if before else data
    ranges_of_secrets = [
        each for value in _values if value in whole for each in _occurrences(whole, value)
    ]
    if is_part:
        ranges_of_secrets += _prefix_at_end(whole)
    merged: list[Range] = []
    for start, end in sorted(ranges_of_secrets):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    skipped = len(before)
    return [(max(0, s - skipped), e - skipped) for s, e in merged if e > skipped]


def _occurrences(data: bytes, value: bytes) -> Iterator[Range]:
    start = data.find(value)
    while start >= 0:
        yield start, start + len(value)
        start = data.find(value, start + len(value))


def _prefix_at_end(data: bytes) -> Iterator[Range]:
    """Yield the end of ``data`` if a secret may begin there."""
    for value in _values:
        for size in range(min(len(value) - 1, len(data)), _MIN_PART_BYTES - 1, -1):
            if data.endswith(value[:size]):
                yield len(data) - size, len(data)
                break


def _secrets(environ: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the values of secrets."""
    secret_names = (*environ.get(names.CLOUDJOB_SECRET_NAMES, "").split(), *names.STORE_KEYS)
    for name, value in environ.items():
        if name in secret_names or (is_secret_name(name) and not os.path.exists(value)):
            yield os.fsencode(value)
    key = environ.get(names.CLOUDJOB_SSH_KEY, "")
    if key:
        path = key[len("file://") :] if key.startswith("file://") else key
        with contextlib.suppress(OSError), open(path, "rb") as file:
            yield file.read(_KEY_LIMIT_BYTES)
