"""A connector for real engines on CPUs that takes their caches for those of a device."""

from __future__ import annotations

import torch
from simulated_device import SimulatedStreams

from kvshelf.vllm.connector import SharedStorageConnector


class ConnectorBesideADevice(SharedStorageConnector):
    """The connector, told that copies run on streams beside the engine's."""

    _simulated: SimulatedStreams | None = None

    def _streams_of(self, device: torch.device) -> SimulatedStreams:
        if self._simulated is None:
            self._simulated = SimulatedStreams(engine_at_once=True)
        return self._simulated
