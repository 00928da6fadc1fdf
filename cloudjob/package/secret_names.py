"""Leaves out files with names that usually hold secrets, such as ``.env`` and ssh keys."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDERS = frozenset({".aws", ".ssh", ".kube"})
_FILES = re.compile(
    r"\.env|\.env\.(?!(?:.*\.)?(?:example|sample|template)$).*|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|[._]netrc|\.pypirc|\.git-credentials|\.obsutilconfig|credentials\.csv"
    r"|kubeconfig(?:\.ya?ml)?|.*\.kubeconfig",
    re.DOTALL,
)
# No other name can match the above, and this is faster.
_BEGINNINGS = (".env", "id_", ".netrc", "_netrc", ".pypirc", ".git-", ".obs", "cred", "kubec")
_KEY_SUFFIXES = (".pem", ".key")
_KEY_LIMIT_BYTES = 1024 * 1024
_KEY_HEADER = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")


def reason(name: str, is_folder: bool) -> str:
    """Return why a path with this last segment is left out, or ""."""
    if is_folder:
        return f"may hold secrets: {name}/" if name in _FOLDERS else ""
    if name.startswith(_BEGINNINGS) or name.endswith(".kubeconfig"):
        return "may hold secrets: its name" if _FILES.fullmatch(name) else ""
    return ""


def may_be_key(name: str) -> bool:
    """Whether a file's name is typical of keys; certificates and other files share it."""
    return name.endswith(_KEY_SUFFIXES)


def key_reason(path: str, size_bytes: int) -> str:
    """Return why a file with a key's name is left out, or "".

    Raises:
        OSError: It cannot be read.
    """
    if size_bytes > _KEY_LIMIT_BYTES:
        return ""
    return "may hold secrets: a private key" if _KEY_HEADER.search(Path(path).read_bytes()) else ""
