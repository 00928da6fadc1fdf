"""Hold requests to a store until the test releases them, to stop a job at one stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.servers import Fault, FaultProxy, Request

LIMIT_S = 120.0


class Gate:
    """Holds matching requests until it is opened."""

    def __init__(self, proxy: FaultProxy, method: str, *texts: str) -> None:
        """Hold requests with this method and one of these texts in their target."""
        self._method = method
        self._waiting = dict.fromkeys(texts, False)
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._fault: Fault | None = None
        self._is_broken = False
        proxy.choose = self._choose

    def inject(self, fault: Fault) -> None:
        """Apply this fault to all matching requests instead of holding them."""
        self._fault = fault

    def await_all(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a request for each of the texts is held, or until ``is_over`` is true."""
        deadline = time.monotonic() + LIMIT_S
        while not self._reached.wait(0.2):
            is_late = is_over() or time.monotonic() > deadline
            assert not is_late or self._reached.is_set(), f"held so far: {self._waiting}"

    def open(self) -> None:
        """Release all held requests and hold no more."""
        self._opened.set()

    def _choose(self, request: Request) -> Fault | None:
        if self._is_broken:
            return self._fault
        text = next((text for text in self._waiting if text in request.target), None)
        if text is None or request.method != self._method or self._opened.is_set():
            return None
        self._waiting[text] = True
        self._is_broken = self._fault is not None
        if self._is_broken or all(self._waiting.values()):
            self._reached.set()
        return self._fault or Fault(held=self._opened)
