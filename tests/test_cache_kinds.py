"""ChunkCache over hybrid models: KV of each kind, states, and the hit that an engine would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshelf import ChunkCache, ModelFacts, Shelf, empty_tuples
from kvshelf.cli.seed import SeedReport, seed_shelf
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import STATE
from kvshelf.kv.state_tensors import empty_state
from kvshelf.prompts import TokenPrompt
from tests.sim.storage import posix
from tests.support.waiting import PATIENCE

CHUNK = 16
WINDOW = 24
#: Full, window and state layers, mixed; the second stage has no window.
NAMES = ("a.attn", "b.attn", "c.mixer", "d.mixer", "e.attn", "f.mixer")
STATE_SHAPE = "conv_q:3,8/;conv_k:3,8/;conv_v:3,16/;ssm:4/,6,5"
STATE_DTYPE = "BF16;BF16;BF16;F32"
TOKENS = list(range(100, 100 + 5 * CHUNK))


def facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {
        "layers": 6,
        "kv_heads": (4, 2, 0, 0, 4, 0),
        "head_size": (8, 16, 0, 0, 8, 0),
        "dtype": "bfloat16",
        "weights": "name:test",
        "name": "hybrid",
        "kinds": ("full", "window", "state", "state", "full", "state"),
        "sliding_windows": (-1, WINDOW, -1, -1, -1, -1),
        "attention": ("full", "sliding", "gdn_attn", "gdn_attn", "full", "gdn_attn"),
        "layer_names": NAMES,
        "layer_shapes": ("2,*,4,8", "2,*,2,16", *[STATE_SHAPE] * 2, "2,*,4,8", STATE_SHAPE),
        "layer_dtypes": ("BF16", "BF16", *[STATE_DTYPE] * 2, "BF16", STATE_DTYPE),
        "stages": (4, 2),
        "window_shards": 2,
        "state_shards": 4,
    }
    return ModelFacts(**{**given, **changes})


Make = Callable[..., ChunkCache]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(**changes: Any) -> ChunkCache:
            namespace = facts(**changes).namespace(chunk_size=CHUNK, shards=4)
            shelf = Shelf(posix(tmp_path / "shelf"))
            options: dict[str, Any] = {"timeout_s": PATIENCE, "memory_bytes": 1 << 20}
            return stack.enter_context(ChunkCache(shelf, namespace, **options, drain_s=PATIENCE))

        yield made


@pytest.fixture
def cache(make: Make) -> ChunkCache:
    return make()


def random_kv(cache: ChunkCache, tokens: int = len(TOKENS)) -> list[tuple[Tensor, Tensor]]:
    """KV of the layers of a cache's kind."""
    return [(torch.randn_like(k), torch.randn_like(v)) for k, v in empty_tuples(cache.fmt, tokens)]


def random_state(cache: ChunkCache) -> dict[str, Tensor]:
    return {name: torch.randn_like(part) for name, part in empty_state(cache.fmt).items()}


def same(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> bool:
    return found is not None and all(torch.equal(found[name], expected[name]) for name in expected)


def fill(cache: ChunkCache, full: int, windows: int, states: tuple[int, ...]) -> None:
    """Store full and window objects of the leading chunks, and states after some chunks."""
    for kind, chunks in (("full", full), ("window", windows)):
        of_kind = cache.of(kind)  # type: ignore[arg-type]
        assert of_kind.store(TOKENS[: chunks * CHUNK], kv=random_kv(of_kind)).complete
    for chunks in states:
        assert cache.store_state(TOKENS[: chunks * CHUNK], random_state(cache)).complete


def test_states_of_ranks_that_are_not_divided_have_a_dimension_for_the_ranks(make: Make) -> None:
    undivided = "conv:3,7;ssm:3,5"
    layouts = ("canonical", "canonical", "state-tp2", "state-tp2", "canonical", "state-tp2")
    shapes = ("2,*,4,8", "2,*,2,16", undivided, undivided, "2,*,4,8", undivided)
    dtypes = ("BF16", "BF16", "BF16;F32", "BF16;F32", "BF16", "BF16;F32")
    cache = make(layouts=layouts, layer_shapes=shapes, layer_dtypes=dtypes)
    state = random_state(cache)
    assert state["d.mixer.conv"].shape == (2, 3, 7)

    assert cache.retrieve_state(TOKENS) is None
    assert cache.store_state(TOKENS, state).complete

    assert same(cache.retrieve_state(TOKENS), state)


@pytest.mark.parametrize(
    ("full", "windows", "states", "hit"),
    [
        (5, 5, (2, 4), 4),
        (5, 5, (2, 5), 2),  # the last token is left to compute
        (3, 5, (2, 4), 2),  # full chunks are missing
        (5, 3, (2, 4), 2),  # the window before 4 chunks is missing
        (5, 5, (), 0),
        (5, 0, (4,), 0),
    ],
)
def test_hit_needs_all_kinds(
    cache: ChunkCache, full: int, windows: int, states: tuple[int, ...], hit: int
) -> None:
    fill(cache, full, windows, states)
    assert cache.find_hit(TOKENS) == hit * CHUNK
    assert cache.of(STATE).find_hit(TOKENS) == hit * CHUNK


def test_model_of_one_kind_has_the_hit_that_its_lookup_has(make: Make) -> None:
    names = ("sliding_windows", "layer_names", "layer_shapes", "layer_dtypes", "stages", "kinds")
    absent = dict.fromkeys([*names, "attention", "window_shards", "state_shards"])
    one = make(**absent, layers=1, kv_heads=4, head_size=8)
    assert one.of("full") is one
    assert one.store(TOKENS, kv=random_kv(one)).complete
    assert (one.lookup(TOKENS), one.find_hit(TOKENS)) == (5 * CHUNK, 4 * CHUNK)
    with pytest.raises(ConfigError, match="state"):
        one.retrieve_state(TOKENS)


def test_states_that_do_not_fit_are_refused(cache: ChunkCache) -> None:
    state = random_state(cache)
    prompt = TOKENS[:CHUNK]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"c.mixer.ssm": state["c.mixer.ssm"].to(torch.bfloat16)}, "bfloat16"),
        ({"c.mixer.ssm": state["c.mixer.ssm"][:2]}, r"\[2, 6, 5\]; expected .* \[4, 6, 5\]"),
        ({"g.mixer.ssm": state["c.mixer.ssm"]}, "has 'g.mixer.ssm'"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            cache.store_state(prompt, state | change)
    with pytest.raises(ValueError, match=r"lacks 'c\.mixer\.ssm'"):
        cache.store_state(prompt, {n: t for n, t in state.items() if n != "c.mixer.ssm"})
    with pytest.raises(UnsupportedError, match="on the CPU"):
        cache.store_state(prompt, {name: part.to("meta") for name, part in state.items()})
    with pytest.raises(ValueError, match="state, which is missing"):
        cache.store_state(prompt)
    for tokens in ([], TOKENS[:-1]):
        with pytest.raises(ValueError, match="multiple of the chunk size 16"):
            cache.retrieve_state(tokens)


def test_cache_of_states_has_no_kv_of_tokens(cache: ChunkCache) -> None:
    states = cache.of(STATE)
    for call in (states.store, states.retrieve, states.prefetch):
        with pytest.raises(ValueError, match="this cache is of kind state: use store_state"):
            call(TOKENS)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no layers of kind"):
        cache.of("another")  # type: ignore[arg-type]


@pytest.mark.parametrize("closed", ["full", "state"])
def test_kinds_are_closed_together(make: Make, closed: Any) -> None:
    cache = make()
    states = cache.of(STATE)
    handle = cache.submit_store(TOKENS, kv=random_kv(cache))

    cache.of(closed).close()

    assert handle.result().complete
    for each in (cache, states):
        with pytest.raises(ValueError, match="closed"):
            each.lookup(TOKENS)
    with pytest.raises(ValueError, match="closed"):
        cache.of("window")


class Engine:
    """Stores of a prompt what an engine does, but loses the first state."""

    def __init__(self, cache: ChunkCache) -> None:
        self.cache = cache
        self.calls: list[list[int]] = []

    def compute(self, prompts: Sequence[TokenPrompt]) -> None:
        self.calls.append([prompt.line for prompt in prompts])
        for prompt in prompts:
            for kind in ("full", "window"):
                of_kind = self.cache.of(kind)  # type: ignore[arg-type]
                kv = random_kv(of_kind, len(prompt.tokens))
                assert of_kind.store(prompt.tokens, kv=kv).complete
            last = (len(prompt.tokens) - 1) // CHUNK * CHUNK
            if len(self.calls) > 1:
                self.cache.store_state(prompt.tokens[:last], random_state(self.cache))


def test_seeding_stores_what_the_longest_hit_needs(cache: ChunkCache) -> None:
    engine = Engine(cache)
    # The second is a part of the first, whose state is elsewhere.
    prompts = [TokenPrompt(1, TOKENS), TokenPrompt(2, TOKENS[: 3 * CHUNK])]

    def seed() -> SeedReport:
        return seed_shelf(cache.shelf, cache.fmt, prompts, engine, batch_chunks=4)

    report = seed()

    assert (report.stored, report.failed, report.chunks) == (2, 0, 5)
    assert engine.calls == [[1], [1], [2]]
    for prompt in prompts:
        assert cache.find_hit(prompt.tokens) == (len(prompt.tokens) - 1) // CHUNK * CHUNK
    assert seed().existed == 2
    assert len(engine.calls) == 3
