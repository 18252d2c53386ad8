"""The paged caches of an engine's worker, as its operations name them: by blocks.

Owns the caches that are registered with a worker's adapter, and where the tokens of blocks lie in
them. Copies are made by :mod:`kvshelf.kv.caches`.

Contracts
---------
* The caches have exactly the layers of the worker's namespace and shards, and the layout is the
  caller's: none is guessed.
* Nothing outside of the caches' blocks is read or written.

Threads
-------
Any thread may call all methods, and use :attr:`EngineCaches.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvshelf.errors import ConfigError
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import native_block_size, required_field
from kvshelf.kv.caches import KVCache, LayerRun
from kvshelf.kv.layout import PagedLayout, PermutedLayout, slots_of
from kvshelf.kv.sources import count_slots, open_paged, with_slots
from kvshelf.kv.topology import ShardPlan

_Layout: TypeAlias = "PagedLayout | PermutedLayout"


class EngineCaches:
    """The caches of one worker.

    Parameters
    ----------
    fmt : ObjectFormat
    plan : ShardPlan
        The shards that the worker holds.
    block_size : int
        Tokens of a block.
    kv_caches : Mapping[str, Tensor]
        The cache of each layer.
    layout : PagedLayout or PermutedLayout, or a mapping of them by layer
        How a block lies in the caches.

    Attributes
    ----------
    memory : KVCache
        Gathers and scatters chunks.
    device : torch.device

    Raises
    ------
    ConfigError
        If the caches do not fit the namespace.
    """

    def __init__(
        self,
        fmt: ObjectFormat,
        plan: ShardPlan,
        block_size: int,
        kv_caches: Mapping[str, Tensor],
        layout: _Layout | Mapping[str, _Layout],
    ) -> None:
        shard = plan.shards[0]
        names = [spec.name for spec in fmt.tensors(shard)]
        different = sorted(set(names) ^ set(kv_caches))
        if different:
            raise ConfigError(
                f"{', '.join(different[:4])}: expected the caches of exactly the layers that this"
                f" worker has in the namespace, {names[0]} … {names[-1]}"
            )
        layouts = layout if isinstance(layout, Mapping) else dict.fromkeys(names, layout)
        stored = required_field(fmt.namespace.record, "layouts")
        native = native_block_size(stored[fmt.layer_numbers(shard)[0]]) is not None
        runs: list[LayerRun] = []
        for number, name in enumerate(names):
            own = layouts[name]
            if native and isinstance(own, PermutedLayout):
                own = own.as_blocks()
            if runs and runs[-1].layout == own:
                runs[-1].caches.append(kv_caches[name])
            else:
                runs.append(LayerRun(number, [kv_caches[name]], own))
        self._fmt = fmt
        self._block_size = block_size
        self._num_slots = min(count_slots(fmt, run.layout) for run in runs)
        self.memory: KVCache = open_paged(fmt, runs, plan)
        self.device: torch.device = runs[0].caches[0].device

    def slots(
        self, block_ids: Sequence[int], tokens: int, *, skipped: int = 0
    ) -> Callable[[int, int], Tensor]:
        """Return a function that gives the slots of tokens [start, end) of blocks.

        Parameters
        ----------
        block_ids : Sequence of int
        tokens : int
            All that lie in them.
        skipped : int
            So many first tokens have no slots.

        Raises
        ------
        ValueError
            If the caches do not have these blocks.
        """
        mapping = slots_of(block_ids, self._block_size, 0, tokens)
        mapping[:skipped] = -1
        return with_slots(self._fmt, self.memory, mapping, self._num_slots).slots
