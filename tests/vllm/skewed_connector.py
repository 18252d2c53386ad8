"""Connectors for real engines on machines whose clocks are wrong.

They replace the wall clock of the engine's processes. The monotonic clock goes on as it is.
"""

from __future__ import annotations

import time
from typing import Any

from kvshelf.vllm.connector import SharedStorageConnector

DAY = 86400
_right, _right_ns = time.time, time.time_ns


class ConnectorADayAhead(SharedStorageConnector):
    """The connector of an engine whose clock is a day ahead."""

    seconds = DAY

    def __init__(self, *arguments: Any, **named: Any) -> None:
        seconds = self.seconds
        time.time = lambda: _right() + seconds
        time.time_ns = lambda: _right_ns() + seconds * 10**9
        super().__init__(*arguments, **named)


class ConnectorADayBehind(ConnectorADayAhead):
    """The connector of an engine whose clock is a day behind."""

    seconds = -DAY
