"""Certificates of private authorities: the file that names them here, and their text for nodes."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import StoreError
from cloudjob.store import files
from jobentry.contract import names

# In this order; boto3 knows the first two, OpenSSL the third.
VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_CERTIFICATE = r"(?s)-----BEGIN ((?:TRUSTED |X509 )?CERTIFICATE)-----.*?-----END \1-----"
_MAX_FILE_BYTES = 16_000_000
# A variable may have 131071 bytes. Above the first limit, nodes get only those that are not public.
_SMALL_BYTES, _MAX_BYTES = 32_000, 100_000
# Lists of Mozilla's authorities: those of Debian and Alpine, Arch, RHEL, SUSE, and of packages.
_PUBLIC_FILES = {
    "/usr/share/ca-certificates/mozilla": "*.crt",
    "/usr/share/ca-certificates/trust-source": "*.p11-kit",
    "/usr/share/pki/ca-trust-source": "*.p11-kit",
    "/usr/share/pki/trust": "*.p11-kit",
}
_PUBLIC_PACKAGES = ("botocore", "certifi")


class Bundle(NamedTuple):
    """A file of certificates, and who named it."""

    path: str
    origin: str


def bundle(environ: Mapping[str, str], profiles: str = "") -> Bundle | None:
    """Return the file with the authorities to trust; None for the usual ones.

    Args:
        profiles: ``ca_bundle`` in the profile of AWS, which is preferred to all but the first.
    """
    named = {name: environ.get(name, "") for name in VARIABLES}
    origins = {VARIABLES[0]: named.pop(VARIABLES[0]), "ca_bundle of the AWS profile": profiles}
    for origin, path in {**origins, **named}.items():
        # Other programs, such as conda, leave the last one behind; OpenSSL ignores a missing file.
        if path and (origin != VARIABLES[-1] or Path(path).is_file()):
            return Bundle(path, origin)
    return None


def access(trusted: Bundle | None) -> dict[str, str]:
    """Return the variable that gives the certificates of a bundle to nodes, which trust them, too.

    Raises:
        StoreError: The file cannot be read, or is too large.
    """
    text = _for_nodes(trusted, _version(trusted.path)) if trusted else ""
    return {names.CLOUDJOB_CA_CERTIFICATES: text} if text else {}


def check(trusted: Bundle) -> None:
    """Check that a bundle can be read, as the libraries' own messages do not name it.

    Raises:
        StoreError: It cannot be read, or has no certificate.
    """
    _certificates(trusted)


def _certificates(trusted: Bundle) -> list[str]:
    import ssl

    doing = f"reading certificates: {trusted.origin}={trusted.path}"
    path = Path(trusted.path)
    try:
        members = sorted(path.iterdir()) if path.is_dir() else [path]
        texts = [_read(member) for member in members if member.is_file() or not path.is_dir()]
        certificates = _split("\n".join(texts))
        if certificates:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata="\n".join(certificates))
    except ssl.SSLError as error:
        raise StoreError(f"{doing}: a certificate is damaged", hint=_HINT) from error
    except OSError as error:
        raise StoreError(f"{doing}: {files.text(error)}", hint=_HINT) from error
    except ValueError as error:
        raise StoreError(f"{doing}: not a path", hint=_HINT) from error
    if not certificates:
        raise StoreError(f"{doing}: it contains no certificate", hint=_HINT)
    return certificates


_HINT = "it must be a file of certificates in PEM format (-----BEGIN CERTIFICATE-----)"


def _read(path: Path) -> str:
    if not path.is_file():
        raise OSError(0, "not a file" if path.exists() else "no such file")
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES).decode("ascii", "replace")


def _version(path: str) -> tuple[int, ...]:
    """Return what changes with a file."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


# A submit asks more than once, and the lists of all public authorities are long.
@functools.lru_cache(maxsize=4)
def _for_nodes(anchors: Bundle, _: tuple[int, ...]) -> str:
    certificates = _certificates(anchors)
    if sum(map(len, certificates)) > _SMALL_BYTES:
        public = _public()
        certificates = [text for text in certificates if _content(text) not in public]
    text = "\n".join(certificates)
    if len(text) > _MAX_BYTES:
        raise StoreError(
            f"reading certificates: {anchors.origin}={anchors.path}: {len(certificates)}"
            f" certificates of private authorities are too many for the nodes ({len(text)} bytes;"
            f" allowed: {_MAX_BYTES})",
            hint="name a file with the authority of your store only",
        )
    return text + "\n" if text else ""


def _public() -> frozenset[str]:
    """Return the certificates of public authorities, which images have in ca-certificates.

    Those that the administrator of this machine has added to its store are not among them.
    """
    bundle_files = [
        path for folder, pattern in _PUBLIC_FILES.items() for path in Path(folder).glob(pattern)
    ]
    for package in _PUBLIC_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            bundle_files.append(Path(spec.origin).with_name("cacert.pem"))
    texts = (text for path in bundle_files if path.is_file() for text in _split(_read(path)))
    return frozenset(map(_content, texts))


def _split(text: str) -> list[str]:
    """Return the certificates in a text, each once; a private key in it is left out."""
    return list(dict.fromkeys(match[0] for match in re.finditer(_CERTIFICATE, text)))


def _content(text: str) -> str:
    """Return the base64 text of a certificate, however its lines are broken."""
    return "".join(re.sub("-----[^-]+-----", "", text).split())
