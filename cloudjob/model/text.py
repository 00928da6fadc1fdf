"""Texts for messages: given values, suggestions, numbers with nouns, masked secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jobentry.contract.secret_values import is_secret_name, secret_forms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from typing import Any

MASK = "***"


def why_failed(code: int, stderr: bytes) -> str:
    """Return why a child process has failed: what it printed, or how it ended.

    Args:
        code: Its ``returncode``, which is negative if a signal has killed it.
    """
    printed = os.fsdecode(stderr).strip()
    if printed:
        return printed
    if code >= 0:
        return f"it ended with exit code {code} without a message"
    import signal

    from jobentry.contract.exits import MEMORY_GUESS

    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    often = MEMORY_GUESS if name == "SIGKILL" else ""
    return f"it was killed by {name}{often}"


def masked(values: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    """Return variables with ``***`` for the values of the named ones."""
    return {name: MASK if name in names else value for name, value in values.items()}


def secrets_masked(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables with ``***`` for values of those with a name such as ``WANDB_API_KEY``."""
    return {
        name: MASK if value and is_secret_name(name) else value for name, value in values.items()
    }


def secret_values(secrets: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Return the values of secrets and of the variables that ``secrets_masked`` masks."""
    masked_env = secrets_masked(env)
    return [*secrets.values(), *(value for name, value in env.items() if masked_env[name] != value)]


def secret_texts(values: Iterable[str]) -> list[str]:
    """Return the texts that ``hide`` masks for secrets: each line of a value, also encoded."""
    return [os.fsdecode(form) for form in secret_forms(map(os.fsencode, values))]


def hide(value: Any, secrets: Sequence[str]) -> Any:
    """Return plain values with ``***`` for each secret in any of their texts."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, Mapping):
        return {key: hide(item, secrets) for key, item in value.items()}
    return [hide(item, secrets) for item in value] if isinstance(value, (list, tuple)) else value


def nearest(text: str, allowed: Iterable[str]) -> str:
    """Return ``, did you mean 'x'?`` for the closest of ``allowed``; empty if none is close."""
    import difflib

    close = difflib.get_close_matches(text.lower().replace("-", "_"), list(allowed), n=1)
    return f", did you mean '{close[0]}'?" if close else ""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as ``1 file``, ``2 files`` or ``2 entries``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def size_text(size_bytes: int) -> str:
    """Return a readable size, such as ``1.5 GB``, in powers of 1000 as everywhere in cloudjob."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return counted(size_bytes, "byte") if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def different_sizes(size_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Return two sizes as texts that differ: in bytes if they would be rounded to the same."""
    texts = size_text(size_bytes), size_text(other_bytes)
    if texts[0] != texts[1]:
        return texts
    return f"{size_bytes:,} bytes", f"{other_bytes:,} bytes"


def short_path(file: str) -> str:
    """Return the path of a Python file without the folder of its packages."""
    for folder in ("site-packages/", "dist-packages/"):
        file = file.rpartition(folder)[2]
    return file


def given(value: object) -> str:
    """Return a value as a message shows it: on one line, and shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """Return ``text`` on one line, without characters that control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def csv_cell(text: str) -> str:
    """Return ``text`` for a CSV file: on one line, and no formula of a program for spreadsheets."""
    cell = one_line(text)
    return f"'{cell}" if cell.lstrip().startswith(("=", "+", "-", "@")) else cell
