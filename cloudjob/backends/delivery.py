"""The entry, its start script and a key for ssh, for platforms and images that need a copy."""

from __future__ import annotations

from cloudjob import installation
from cloudjob.errors import BackendError
from jobentry.contract.paths import ENTRY

BOOT = "boot.sh"


def files() -> dict[str, bytes]:
    """Return the files of this cloudjob's entry and its start script, by name.

    Raises:
        BackendError: The entry cannot be read.
    """
    boot = installation.FOLDER / BOOT
    if not boot.exists():
        boot = installation.FOLDER.parent / "entrypoints" / BOOT
    return {ENTRY: entry(), BOOT: boot.read_bytes()}


def entry() -> bytes:
    """Return the entry of this cloudjob.

    Raises:
        BackendError: It cannot be read, as in a checkout in which it was not built yet.
    """
    try:
        return installation.ENTRY.read_bytes()
    except OSError as error:
        builder = installation.FOLDER.parent / "scripts" / "build_zipapp.py"
        raise BackendError(
            f"reading the entry of the nodes: {installation.ENTRY}: {error.strerror}",
            hint=f"build it: python {builder}" if builder.exists() else "install cloudjob again",
        ) from error


def new_ssh_key() -> bytes:
    """Return a fresh ed25519 private key in OpenSSH's own format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
