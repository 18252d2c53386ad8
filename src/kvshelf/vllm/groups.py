"""The KV cache groups of an engine: their kinds, blocks and windows.

vLLM puts layers whose KV is kept in the same way into one *group*. A request has a table of blocks
in each group. Owns what kvshelf reads of the groups, which engines it refuses for them, and the
chunk size that follows from them. Both sides of the connector use it.

An engine is *hybrid* if it has several groups, or one with states. Hits of a hybrid engine end at
multiples of :attr:`CacheGroups.alignment`: only there all groups have whole blocks, and only there
vLLM keeps states.

The drafter of speculative decoding may have groups of its own. They make an engine hybrid, but
kinds and windows are those of the model's groups only. So do *scratch* groups, the
rings of layers that compress several tokens into one: such a ring holds the tokens of which a part
is still to come, and is empty where hits end.

Contracts
---------
* The KV of a model with one group and without states is of kind full, also with a sliding window:
  each of its chunks is one kind of object, and a hit needs all of them.
* Which groups are the drafter's follows from the names of the model's layers, which only workers
  know. Until :meth:`CacheGroups.narrow` is called with them, all groups count as the model's.
* All functions are pure. They read the specifications of ``vllm/v1/kv_cache_interface.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind
from kvshelf.vllm.namespace import manager_block_size
from kvshelf.vllm.speculation import METHODS_WITHOUT_KV, drafter_has_kv

#: The smallest chunk that is chosen for an engine with states. A chunk of several blocks loses the
#: state at the last block boundary of most prompts, so it is as small as objects may be.
_STATE_CHUNK = 128


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group.

    Attributes
    ----------
    index : int
        Its place in vLLM's list of groups, and in lists of block ids.
    kind : Kind
        The kind of the objects that its KV is in.
    block_size : int
        Tokens in a block of the cache manager.
    window : int
        Of kind window: the KV of so many tokens, less one, before a token is needed to compute it.
        0 for other kinds.
    layer_names : tuple of str
    """

    index: int
    kind: Kind
    block_size: int
    window: int
    layer_names: tuple[str, ...]


class CacheGroups:
    """All groups of an engine, in vLLM's order.

    Parameters
    ----------
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig or None
        None stands for one group with all layers.

    Attributes
    ----------
    hybrid : bool
        There are several groups, or one with states.
    kinds : tuple of Kind
        Those of the model's groups, in the order of :data:`~kvshelf.format.kinds.KINDS`.
    mixed : bool
        Of the model's groups there are several, or one with states: objects have kinds.
    drafts : tuple of CacheGroup
        The groups that only the drafter has.
    scratch : frozenset of int
        The indices of scratch groups. Their kind has no meaning, and nothing of them is stored or
        loaded.
    alignment : int
        Tokens: all hits of a hybrid engine end at multiples of it. The least common multiple of the
        block sizes of all groups.
    hash_block_size : int
        Tokens for each of vLLM's block hashes of a request.
    window : int
        The widest window of the model's groups; 0 without windows.

    Raises
    ------
    UnsupportedError
        For engines that kvshelf cannot serve because of their groups.
    """

    kinds: tuple[Kind, ...]
    mixed: bool
    drafts: tuple[CacheGroup, ...]
    scratch: frozenset[int]
    window: int

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        groups = getattr(kv_cache_config, "kv_cache_groups", None)
        self._specs: list[list[Any]] = []
        self.scratch = frozenset()
        if groups is None:
            groups_found = [CacheGroup(0, FULL, manager_block_size(vllm_config, None), 0, ())]
        else:
            self.scratch = _check_cacheable(groups, kv_cache_config)
            self._specs = [list(iter_layer_specs(group.kv_cache_spec)) for group in groups]
            sizes = [int(group.kv_cache_spec.block_size) for group in groups]
            if len(groups) == 1:
                sizes = [manager_block_size(vllm_config, kv_cache_config)]
            groups_found = [
                CacheGroup(index, FULL, size, 0, tuple(group.layer_names))
                for index, (group, size) in enumerate(zip(groups, sizes, strict=True))
            ]
        self._groups = tuple(groups_found)
        self.alignment = math.lcm(*(group.block_size for group in groups_found))
        # As resolve_kv_cache_block_sizes of vllm/v1/core/kv_cache_utils.py.
        unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
        several = len(groups_found) > 1
        cached_groups = [one for one in groups_found if one.index not in self.scratch]
        self.hash_block_size = (several and unit) or math.gcd(
            *(one.block_size for one in cached_groups)
        )
        self._divide([one.index for one in cached_groups])
        self.hybrid = several or STATE in self.kinds
        if self.hybrid:
            self._check(vllm_config)

    def narrow(self, layer_names: Iterable[str]) -> None:
        """Leave groups without any of the model's layers to the drafter.

        Parameters
        ----------
        layer_names : Iterable of str
            The layers of the model with a cache of their own, of all pipeline stages.
        """
        names = frozenset(layer_names)
        model_groups = [
            group.index
            for group in self._groups
            if group.index not in self.scratch and not names.isdisjoint(group.layer_names)
        ]
        if model_groups:
            self._divide(model_groups)

    def _divide(self, own: Collection[int]) -> None:
        """Find the kinds of all groups, of which some are the model's own."""
        if self._specs:
            single = len(own) == 1
            self._groups = tuple(
                group
                if group.index in self.scratch
                else self._of_kind(group, single=single and group.index in own)
                for group in self._groups
            )
        model = [group for group in self._groups if group.index in own]
        not_drafts = self.scratch.union(own)
        self.drafts = tuple(group for group in self._groups if group.index not in not_drafts)
        kinds = {group.kind for group in model}
        self.kinds = tuple(kind for kind in KINDS if kind in kinds)
        self.mixed = len(model) > 1 or STATE in kinds
        self.window = max(group.window for group in model)

    def _of_kind(self, group: CacheGroup, *, single: bool) -> CacheGroup:
        """Return a group with its kind and window; of one that is `single` windows do not count."""
        specs = self._specs[group.index]
        kind = _kind_of(specs, single=single)
        window = max(map(_window_of, specs)) if kind == WINDOW else 0
        return replace(group, kind=kind, window=window)

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def hit_rule(self, chunk_size: int) -> HitRule:
        """Return what hits of the model need, with chunks of so many tokens."""
        return HitRule.with_window(self.kinds, self.window, chunk_size)

    def of(self, kind: Kind) -> tuple[CacheGroup, ...]:
        """Return the model's groups of a kind."""
        hidden = self.scratch.union(group.index for group in self.drafts)
        return tuple(
            candidate
            for candidate in self._groups
            if candidate.kind == kind and candidate.index not in hidden
        )

    def _check(self, vllm_config: Any) -> None:
        """Refuse what a hybrid engine cannot be served with."""
        parallel = vllm_config.parallel_config
        context = ("decode_context_parallel_size", "prefill_context_parallel_size")
        for option in context:
            if int(getattr(parallel, option, 1)) > 1:
                raise UnsupportedError(
                    f"{option} is more than 1, and the model has {self._named}: set it to 1"
                    f"{self._or_one_group}"
                )
        if int(parallel.pipeline_parallel_size) == 1:
            return
        if STATE in self.kinds and getattr(vllm_config, "speculative_config", None) is not None:
            raise UnsupportedError(
                "with pipeline stages vLLM judges drafts in the last one, and the states of the"
                " others are complete only later: use tensor parallelism, or remove"
                " --speculative-config or --kv-transfer-config"
            )
        if drafter_has_kv(vllm_config):
            raise UnsupportedError(
                f"the drafter of speculative decoding has KV, the engine has {self._named} and"
                " pipeline stages, and no stage knows the groups of the drafter in another one:"
                " use tensor parallelism, or a method without KV"
                f" ({', '.join(sorted(METHODS_WITHOUT_KV))}){self._or_one_group}"
            )

    @property
    def _named(self) -> str:
        count = len(self._groups)
        return f"{count} KV cache groups" if count > 1 else "states in its KV cache"

    @property
    def _or_one_group(self) -> str:
        """The remedy for a model without states."""
        if STATE in self.kinds:
            return ", or remove --kv-transfer-config"
        return ", or start vLLM with --disable-hybrid-kv-cache-manager"


def _check_cacheable(groups: Sequence[Any], kv_cache_config: Any) -> frozenset[int]:
    """Return the scratch groups; refuse engines with other groups that hold no KV of prefixes.

    These are windows that vLLM computes anew behind a hit. Each hit would have to be reported as
    shorter by a window than it is.
    """
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    for index, group in enumerate(groups):
        specs = iter_layer_specs(group.kv_cache_spec)
        if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
            raise UnsupportedError(
                "vLLM keeps no states of prefixes while its prefix caching is off: start it with"
                " --enable-prefix-caching, or remove --kv-transfer-config"
            )
        if index not in cacheable and not _is_ring(group.kv_cache_spec):
            raise UnsupportedError(
                f"KV cache group {index} of this model ({type(group.kv_cache_spec).__name__}) holds"
                " no KV of prefixes: vLLM computes it anew behind a hit, which kvshelf does not"
                " support, though vLLM's own prefix caching may; remove --kv-transfer-config for"
                " this model"
            )
    scratch = frozenset(range(len(groups))).difference(cacheable)
    if len(scratch) == len(groups):
        raise UnsupportedError(
            "no KV cache group of this model holds KV of prefixes; remove --kv-transfer-config for"
            " this model"
        )
    return scratch


def _is_ring(spec: Any) -> bool:
    return all(isinstance(layer_spec, CircularBufferSpec) for layer_spec in iter_layer_specs(spec))


def _kind_of(specs: Iterable[Any], *, single: bool) -> Kind:
    """Return the kind of a group from the specifications of its layers.

    Subclasses are recognised by their base: MLA, R-SWA and sinks are full attention, and the
    sliding windows of MLA are windows.
    """
    kinds: set[Kind] = set()
    for spec in specs:
        if isinstance(spec, MambaSpec):
            kinds.add(STATE)
        elif single or isinstance(spec, FullAttentionSpec):
            kinds.add(FULL)
        elif isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
            kinds.add(WINDOW)
        else:
            raise UnsupportedError(
                f"kvshelf does not know how vLLM keeps KV of {type(spec).__name__}; remove"
                " --kv-transfer-config for this model"
            )
    if len(kinds) != 1:
        raise UnsupportedError(
            "layers of one KV cache group keep their KV in different ways"
            f" ({', '.join(sorted(kinds))}); remove --kv-transfer-config for this model"
        )
    return kinds.pop()


def _window_of(spec: Any) -> int:
    """Return the window of a layer, with the tokens that vLLM keeps in front of it."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def with_chunk_size(config: Config, groups: CacheGroups) -> Config:
    """Return the options with the chunk size that an engine uses.

    Parameters
    ----------
    config : Config
    groups : CacheGroups

    Raises
    ------
    ConfigError
        If the configured chunk size does not fit the groups.
    """
    if not groups.hybrid:
        return config
    least = int(Config.model_fields["chunk_size"].default)
    if STATE in groups.kinds:
        least = _STATE_CHUNK
    fitting = -(-least // groups.alignment) * groups.alignment
    if "chunk_size" not in config.model_fields_set:
        return config.model_copy(update={"chunk_size": fitting})
    if config.chunk_size % groups.alignment:
        blocks = ", ".join(map(str, sorted({group.block_size for group in groups})))
        raise ConfigError(
            f"chunk_size is {config.chunk_size}, but stored prefixes of this model can end only at"
            f" multiples of {groups.alignment} tokens (the blocks of its KV cache groups have"
            f" {blocks}): set chunk_size to {fitting} or another multiple of {groups.alignment}, or"
            f" leave it out, which means {fitting}"
        )
    return config
