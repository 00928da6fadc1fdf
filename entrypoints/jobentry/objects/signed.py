"""Objects of a store whose keys this job has not: it has an address for each, signed for a time."""

from __future__ import annotations

import json
import re
from typing import Callable, Mapping, TypeVar

from jobentry import private_environ
from jobentry.contract import names
from jobentry.objects import http, web
from jobentry.objects.base import ObjectError, Tell, quiet

Result = TypeVar("Result")


def knows(uri: str) -> bool:
    """Whether there is an address for this object."""
    return uri in _addresses()


def check(uri: str) -> None:
    """Do nothing: the address is known."""


def fetch(uri: str, path: str, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole or not at all."""
    _at(uri, lambda address: http.fetch(address, path, sha256, tell))


def read(uri: str) -> bytes:
    """Return the object's bytes."""
    return _at(uri, http.read)


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return ``length`` of the object's bytes, fewer where it ends before."""
    return _at(uri, lambda address: http.read_range(address, offset, length))


def write(data: bytes, uri: str) -> None:
    """Store ``data`` as the object."""
    _at(uri, lambda address: http.write(data, address))


def _at(uri: str, act: Callable[[str], Result]) -> Result:
    address = _addresses()[uri]
    try:
        return act(address)
    except web.Refused as error:
        if error.answer.status not in (400, 401, 403):
            raise
        found = re.search(r"X-Amz-Date=(\w+).*X-Amz-Expires=(\d+)", address)
        when = " at %s for %s seconds" % found.groups() if found else ""
        hint = (
            f"the submit signed this address{when}: has that time passed? Submit again, with more "
            "of presigned_h or with none"
        )
        raise ObjectError(str(error), hint) from error


def _addresses() -> Mapping[str, str]:
    text = private_environ.environ().get(names.CLOUDJOB_SIGNED_URIS, "")
    found: Mapping[str, str] = json.loads(text) if text else {}
    return found
