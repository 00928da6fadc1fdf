"""A request to the emulator whose body has been read, as the API's operations get it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import M, parse
from cloudjob.emulator.state import User

_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose body has been read.

    Args:
        target: Path and query as in the request line.
        headers: The headers by name in lower case.
        user: The sender, once the request is authenticated.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    content: bytes
    id: str
    path_params: Mapping[str, str]
    user: User | None = None

    @property
    def path(self) -> str:
        """The path, unquoted."""
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        """The query parameters; a repeated name has its last value."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    def parsed_query(self, model: type[M]) -> M:
        """Return the query as a model.

        Raises:
            ServiceRefusal: A value breaks a rule.
        """
        return parse(model, {key: value for key, value in self.query.items() if value})

    def body(self, model: type[M]) -> M:
        """Return the body as a model.

        Raises:
            ServiceRefusal: It is not a JSON object, or a value breaks a rule.
        """
        return parse(model, self.json())

    def json(self) -> dict[str, Any]:
        """Return the body; its strings are valid Unicode and its numbers are finite.

        Raises:
            ServiceRefusal: It is not a JSON object.
        """
        try:
            value = json.loads(self.content or b"{}")
            # Python also accepts invalid JSON: NaN, Infinity, 1e999 and lone surrogates.
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise ServiceRefusal("ModelArts.2787", type(error).__name__) from error
        if not isinstance(value, dict):
            raise ServiceRefusal("ModelArts.2787", "must be a JSON object")
        if not _is_flat(value, _DEPTH):
            raise ServiceRefusal("ModelArts.2787", f"nested more than {_DEPTH} levels deep")
        return value


def _is_flat(value: Any, depth: int) -> bool:
    """Whether a value has at most ``depth`` levels, because later code recurses into it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_flat(item, depth - 1) for item in inner)
