"""The entry, its start script and a key for ssh, for platforms and images that need a copy."""

from __future__ import annotations

from cloudjob import installation
from jobentry.contract.paths import ENTRY

BOOT = "boot.sh"


def files() -> dict[str, bytes]:
    """Return the files of this cloudjob's entry and its start script, by name."""
    boot = installation.FOLDER / BOOT
    if not boot.exists():
        boot = installation.FOLDER.parent / "entrypoints" / BOOT
    return {ENTRY: installation.ENTRY.read_bytes(), BOOT: boot.read_bytes()}


def new_ssh_key() -> bytes:
    """Return a fresh ed25519 private key in OpenSSH's own format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
