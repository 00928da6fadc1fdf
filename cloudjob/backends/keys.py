"""The key that the nodes of a job speak ssh with."""

from __future__ import annotations


def new_key() -> bytes:
    """Return a fresh ed25519 private key in OpenSSH's own format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
