"""A connector for real engines on CPUs that takes their caches for those of a device.

Its copies are made by the compiled library, on the emulated device, where a compiler is at hand.
"""

from __future__ import annotations

import torch

from tests.native.emulation import emulation, library_path
from tests.native.simulated_device import SimulatedStreams
from tests.support.connector import SharedStorageConnector


class ConnectorBesideADevice(SharedStorageConnector):
    """The connector, told that copies run on streams beside the engine's."""

    _simulated: SimulatedStreams | None = None

    def _streams_of(self, device: torch.device) -> SimulatedStreams:
        if self._simulated is None:
            if library_path() is not None:
                # As long as the engine lives.
                self._emulated = emulation().in_use()
                self._emulated.__enter__()
            self._simulated = SimulatedStreams(engine_at_once=True)
        return self._simulated
