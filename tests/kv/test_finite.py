"""KV that holds NaN or infinity is found, whatever its dtype, and not stored."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import DTYPE_BYTES
from kvshelf.kv.finite import _CHECKS, FiniteCheck
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import posix
from tests.support.formats import BLOCK, HEADS, make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NATIVE = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}


def formats(dtype: str, native: bool) -> ObjectFormat:
    layout = f"cpu-vec-{NATIVE[dtype]}-b{BLOCK}" if native else "canonical"
    return make_format(dtype=dtype, layout=layout)


def numbers(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every bit pattern of a dtype (of F32: all exponents), and whether it is finite."""
    if dtype == "F32":
        exponents = torch.arange(256, dtype=torch.int64) << 23
        patterns = (exponents[:, None] | torch.tensor([0, 1, 0x400000, 0x7FFFFF])).flatten()
        patterns = torch.cat([patterns, patterns | 1 << 31]).to(torch.int32)
    elif DTYPE_BYTES[dtype] == 2:
        patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    else:
        patterns = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)
    return patterns, torch.isfinite(patterns.view(TORCH[dtype]).float())


@pytest.mark.parametrize("native", [False, True], ids=["canonical", "native"])
@pytest.mark.parametrize("dtype", TORCH)
def test_every_number_that_is_not_finite_is_found(dtype: str, native: bool) -> None:
    fmt = formats(dtype, native)
    check = FiniteCheck(fmt)
    patterns, finite = numbers(dtype)
    assert 0 < finite.sum() < len(finite)
    payload = torch.zeros(fmt.payload_size(1), dtype=torch.uint8)
    elements = payload.view(patterns.dtype)
    good = patterns[finite]
    for start in range(0, len(good), len(elements)):
        part = good[start : start + len(elements)]
        elements[: len(part)] = part
        assert check.first_bad(1, payload) is None
    specs = fmt.tensors(1)
    bad = patterns[~finite]
    for number, pattern in enumerate(bad[:: max(1, len(bad) // 200)]):
        spec = specs[number % len(specs)]
        at = (spec.offset + number * 7 % spec.nbytes) // elements.element_size()
        kept, elements[at] = elements[at].clone(), pattern
        assert check.first_bad(1, payload) == spec.name
        elements[at] = kept


def test_every_dtype_of_floats_is_known() -> None:
    assert set(_CHECKS) == set(DTYPE_BYTES) - {"U8"} == set(TORCH)


def test_large_layers_are_looked_at_to_their_end() -> None:
    fmt = make_format(native=False, chunk_size=8192)
    payload = torch.zeros(fmt.payload_size(0), dtype=torch.uint8)
    last = fmt.tensors(0)[-1]
    payload.view(torch.bfloat16)[(last.offset + last.nbytes) // 2 - 1] = float("-inf")
    assert FiniteCheck(fmt).first_bad(0, payload) == last.name


def test_layers_of_unknown_layout_are_not_looked_at() -> None:
    fmt = make_format(shape="2,512", dtype="U8", layout="opaque-" + "0" * 16, shards=1)
    payload = torch.full((fmt.payload_size(0),), 0xFF, dtype=torch.uint8)
    assert FiniteCheck(fmt).first_bad(0, payload) is None


@pytest.mark.parametrize("native", [False, True], ids=["canonical", "native"])
def test_kv_that_is_not_finite_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, native: bool
) -> None:
    options = {"check_finite": True}
    fmt = make_format(native=native)
    with closing(Rig(posix(tmp_path / "shelf"), fmt, native=native, options=options)) as rig:
        chunks = make_chunks(rig.fmt, 3)
        items = rig.items(chunks, 0)
        ended: list[str] = []
        for number, item in enumerate(items):
            for cache in rig.caches:
                cache[rig.block_ids(item)] = 0x3F80
            if number:
                # The first number of the last head of the last layer.
                rig.caches[-1][rig.block_ids(item)[-1], HEADS - 1, 0, 0] = 0x7FC0
            rig.stores.store(item, on_done=lambda _, result: ended.append(result.value))
        assert rig.transfer.drain(PATIENCE) == 0
        assert sorted(ended) == ["failed", "failed", "published"]
        assert rig.count("dropped_chunks_not_finite") == 2
        assert rig.count("dropped_chunks_error") == 0
        assert rig.shelf.view(rig.fmt).present(chunks) == [True, False, False]
        said = [r for r in caplog.records if "NaN or infinity" in r.getMessage()]
        assert len(said) == 1 and said[0].levelno == logging.WARNING
        # The chunk is not taken for stored: once it is good, it is.
        for cache in rig.caches:
            cache[rig.block_ids(items[1])] = 0x3F80
        assert rig.stores.store(items[1]) == StoreOutcome.QUEUED
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.shelf.view(rig.fmt).present(chunks) == [True, True, False]
        assert rig.staging.in_use == 0


def test_without_the_option_everything_is_stored(tmp_path: Path) -> None:
    with closing(Rig(posix(tmp_path / "shelf"))) as rig:
        (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
        for cache in rig.caches:
            cache[rig.block_ids(item)] = 0x7FC0
        rig.stores.store(item)
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.count("stored_chunks") == 1
