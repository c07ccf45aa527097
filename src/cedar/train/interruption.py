"""Ending a run from outside without losing a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Turns the first SIGINT or SIGTERM into a request; the next one acts as usual."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # Python delivers signals to the main thread only, and only there can handlers be set.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in self.SIGNALS}
            for number in self.SIGNALS:
                signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
