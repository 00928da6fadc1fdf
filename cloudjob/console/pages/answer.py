"""What the endpoints answer."""

from __future__ import annotations

import json
from typing import Any, Protocol

from fastapi import Response


class Values(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def answer(values: Values) -> Response:
    """Return values as JSON of ASCII, as texts of jobs may hold what is not UTF-8."""
    return Response(json.dumps(values._asdict()), media_type="application/json")
