"""Hand-overs between real engines: what tests send to producers and consumers, and what they count.

Only keys are computed by kvshelf (they are tested against golden vectors elsewhere); params are
written out here, as any client could write them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.engines import Engine, ShelfFiles
from tests.support.waiting import until

#: What vLLM's own proxies send to the engine that prefills.
ASKED: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: What a producer answers, and nothing else.
FIELDS = {
    "kvshelf_version",
    "kvshelf_namespace",
    "kvshelf_tokens",
    "kvshelf_key",
    "kvshelf_tail",
    "kvshelf_attempt",
}


def prefill(producer: Engine, tokens: Sequence[int], **options: Any) -> dict[str, Any]:
    """Let a producer prefill a prompt for a hand-over; returns the params that it answers."""
    answer = producer.generate(tokens, max_tokens=1, kv_transfer_params=ASKED, **options)
    params = answer.kv_transfer_params
    assert params is not None, "the producer promised nothing"
    assert params.keys() == FIELDS
    # An API server sends them as JSON.
    assert json.loads(json.dumps(params)) == params
    return params


class Promises:
    """The hand-overs of one namespace of a shelf, named from outside.

    Parameters
    ----------
    shelf : ShelfFiles
    """

    def __init__(self, shelf: ShelfFiles) -> None:
        self.shelf = shelf

    def params(self, tokens: Sequence[int], **changed: Any) -> dict[str, Any]:
        """What a producer would answer for a prompt, under an attempt of its own."""
        chain = self.shelf.chain(tokens)
        last = chain.tail() or chain.chunks[-1]
        return {
            "kvshelf_version": 1,
            "kvshelf_namespace": self.shelf.namespace.digest.hex(),
            "kvshelf_tokens": len(tokens),
            "kvshelf_key": last.key.hex(),
            "kvshelf_tail": len(tokens) % self.shelf.chunk,
            "kvshelf_attempt": secrets.token_hex(16),
            **changed,
        }

    def marker(self, attempt: str) -> Path:
        """Where a producer says that it gave up."""
        return self.shelf.folder / ".kvshelf" / "gave-up" / attempt


class Counted:
    """What an engine has counted since this was made.

    vLLM collects counters at the end of a step with output, so each look runs a short request.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._now()

    def __call__(self, name: str) -> float:
        return self._now().get(name, 0) - self._before.get(name, 0)

    def wait(self, **expected: float) -> None:
        """Wait until counters have grown by what is expected."""
        seen: dict[str, float] = {}

        def reached() -> bool:
            now = self._now()
            seen.update({name: now.get(name, 0) - self._before.get(name, 0) for name in expected})
            return seen == expected

        try:
            until(reached, f"counters {expected}")
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen: {seen}") from None

    def _now(self) -> dict[str, float]:
        self._engine.generate([2, 3, 4], max_tokens=2)
        return self._engine.counters()
