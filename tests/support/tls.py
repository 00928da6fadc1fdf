"""A certificate authority of one's own, and a server whose certificate it has signed."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """An authority that nobody knows; ``bundle`` is the file with its certificate."""

    def __init__(self, folder: Path, name: str = "Example Ltd private authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = folder / "authority.pem"
        self.bundle.write_bytes(built.public_bytes(serialization.Encoding.PEM))

    def context(self, host: str = "127.0.0.1") -> ssl.SSLContext:
        """Return the context of a server at an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName("localhost")]
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
        built = (
            _builder(subject, self._name, key)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path = self._folder / f"server-{host}.pem"
        path.write_bytes(
            built.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


class Front:
    """Accepts TLS connections and passes what is in them to a server of this machine."""

    def __init__(self, authority: Authority, upstream_port: int, host: str = "127.0.0.1") -> None:
        self._context = authority.context(host)
        self._upstream_port = upstream_port
        self._listener = socket.create_server((host, 0), backlog=128)
        self.endpoint = f"https://{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            upstream = socket.create_connection(("127.0.0.1", self._upstream_port))
            # Two threads may not use a TLS connection at the same time, so a pair joins them.
            with upstream, self._context.wrap_socket(client, server_side=True) as plain:
                _join(plain, upstream)


def _join(tls: ssl.SSLSocket, plain: socket.socket) -> None:
    """Copy both ways until one side ends, in one thread."""
    import select

    tls.setblocking(False)
    while True:
        ready = [tls] if tls.pending() else select.select([tls, plain], [], [])[0]
        for source, target in ((tls, plain), (plain, tls)):
            if source not in ready:
                continue
            try:
                data = source.recv(65536)
            except ssl.SSLWantReadError:
                continue
            if not data:
                return
            if target is tls:
                tls.setblocking(True)
                tls.sendall(data)
                tls.setblocking(False)
            else:
                target.sendall(data)


@contextlib.contextmanager
def front(authority: Authority, upstream_port: int, host: str = "127.0.0.1") -> Iterator[Front]:
    """A server that is closed at the end."""
    new_front = Front(authority, upstream_port, host)
    try:
        yield new_front
    finally:
        new_front.close()
