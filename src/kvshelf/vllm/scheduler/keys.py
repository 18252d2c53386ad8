"""The chunk keys of requests, with what enters them beside tokens: salts, adapters and images.

:meth:`ChunkKeys.chain` runs on lookup threads as well; everything else on the engine's step thread.
"""

from __future__ import annotations

from kvshelf.format.keys import KeyChain, MultimodalItem, salt_group_of
from kvshelf.paths import cache_dir
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.adapters import AdapterDigests, adapter_settings
from kvshelf.vllm.item_ids import ItemIds
from kvshelf.vllm.scheduler.drafts import DraftScheduler
from kvshelf.vllm.scheduler.engine import Engine
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.weights.fingerprints import FingerprintCache


class ChunkKeys:
    """Makes the chains of chunk keys.

    Parameters
    ----------
    engine : Engine
    item_ids : ItemIds
    drafts : DraftScheduler

    Attributes
    ----------
    adapters : AdapterDigests
    """

    def __init__(self, engine: Engine, item_ids: ItemIds, drafts: DraftScheduler) -> None:
        self._config, vllm_config = engine.config, engine.vllm_config
        self._item_ids = item_ids
        self._make = drafts.chain
        self.adapters = AdapterDigests(
            FingerprintCache(cache_dir() / "fingerprints.json"),
            settings=adapter_settings(vllm_config),
            prefix_caching=bool(getattr(vllm_config.cache_config, "enable_prefix_caching", True)),
        )

    def trusts(self, state: RequestState) -> bool:
        """Whether KV of a request's adapter may be stored and loaded."""
        return self.adapters.trusts(state.request.lora_request)

    def chain(self, state: RequestState, namespace: bytes, adapter: bytes = b"") -> KeyChain:
        """Return the chain of a request's keys in a namespace, without tokens.

        Parameters
        ----------
        state : RequestState
        namespace : bytes
            Its digest.
        adapter : bytes
            The digest of the request's LoRA adapter; empty without one.
        """
        request = state.request
        salt = request.cache_salt or ""
        return self._make(
            namespace,
            self._config.chunk_size,
            salt=salt,
            lora_digest=adapter,
            items=[
                MultimodalItem(
                    self._item_ids.in_key(feature, request.lora_request),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in request.mm_features
            ],
            salt_group=salt_group_of(salt) if self._config.group_by_salt else "_",
        )

    def for_stores(self, state: RequestState, lookup: Lookup, namespace: bytes) -> KeyChain | None:
        """Return the chain of a request whose chunks can be stored now; None if there is none yet.

        What is computed in the meantime is stored in a later step. But a prompt that is handed over
        often has only one, so its keys do not wait for the answer of a slow storage.
        """
        if lookup.done:
            return lookup.chain
        if state.promise is None or state.request.lora_request is not None:
            return None
        return self.chain(state, namespace)
