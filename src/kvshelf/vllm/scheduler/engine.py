"""What all parts of the scheduler side are given: the engine's configuration and counters.

Owns nothing: the fields are set once, before the parts are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from kvshelf.capacity.uses import Uses
from kvshelf.config import Config
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.speculation import draft_engine


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Attributes
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    groups : CacheGroups
        The engine's KV cache groups.
    ranks : int
        Number of workers that must report before the namespace is known.
    may_store : bool
        Whether the engine's ``kv_role`` allows to store; all roles load.
    hands_over : bool
        Whether requests may hand their KV over to other engines.
    counters : Counters
    uses : Uses, optional
        Records what hits use; the caller closes it. Nothing is recorded without it.
    others_transfer : bool
        Whether another connector transfers the prompts of requests with ``do_remote_prefill``.
    is_consumer : bool
        Whether other engines prefill the prompts of requests that do not say so.
    failed : FailedKeys
        Kind keys of chunks that could not be loaded, of any request.
    """

    vllm_config: Any
    config: Config
    shelf: Callable[[], AnyShelf | None]
    groups: CacheGroups
    _: KW_ONLY
    ranks: int = 1
    may_store: bool = True
    hands_over: bool = True
    counters: Counters = field(default_factory=Counters)
    uses: Uses | None = None
    others_transfer: bool = False
    is_consumer: bool = False
    failed: FailedKeys = field(default_factory=FailedKeys)

    @property
    def drafter(self) -> Any:
        """The drafter's configuration, if the engine has a drafter whose KV is stored."""
        return draft_engine(self.vllm_config)
