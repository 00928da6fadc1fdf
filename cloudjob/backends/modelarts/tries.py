"""How often a request is sent, and how long is waited between two tries."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cloudjob.waits import Waits


@dataclass(frozen=True, slots=True)
class Patience:
    """How long what goes wrong may go wrong.

    Args:
        total_s: After this a request is given up.
        first_s: About how long the first pause is; each one is twice as long as the last.
        most_s: No pause is longer, unless the service asks for it.
        answer_s: How long one answer may take.
    """

    total_s: float = 90.0
    first_s: float = 0.5
    most_s: float = 10.0
    answer_s: float = 30.0


class Tries:
    """Counts the tries of one request, and pauses between them."""

    def __init__(
        self,
        patience: Patience,
        clock: Callable[[], float],
        pause: Callable[[float], object],
        waits: Waits,
    ) -> None:
        self._patience = patience
        self._clock = clock
        self._pause = pause
        self._waits = waits
        self._begun_s = clock()
        self._done = 0

    def again(
        self,
        found: str,
        headers: Mapping[str, str] | None = None,
        *,
        is_there: bool = True,
    ) -> bool:
        """Pause, and say whether to try once more.

        Args:
            found: What came back, in words.
            headers: Of the refusal, which may say how long to wait.
            is_there: Whether somebody listened; who does not listen gets three more chances.
        """
        self._done += 1
        pause_s = self._asked_s(headers or {})
        if pause_s is None:
            top_s = min(self._patience.most_s, self._patience.first_s * 2 ** (self._done - 1))
            # All of those that were refused together would come back together.
            pause_s = random.uniform(top_s / 2, top_s)
        end_s = self._begun_s + self._patience.total_s
        if self._clock() + pause_s > end_s or (not is_there and self._done > 3):
            return False
        self._waits.tell(self._begun_s, found)
        self._pause(pause_s)
        return True

    def _asked_s(self, headers: Mapping[str, str]) -> float | None:
        text = headers.get("Retry-After", "").strip()
        if text.isdecimal():
            return float(text)
        said = email.utils.parsedate_tz(text) if text else None
        return max(0.0, email.utils.mktime_tz(said) - self._clock()) if said else None
