"""KV that holds NaN or infinity is found, whatever its dtype, and not stored."""

from __future__ import annotations

import pytest
import torch

from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import DTYPE_BYTES
from kvshelf.kv.finite import _CHECKS, FiniteCheck
from tests.support.formats import BLOCK, make_format

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


def test_layers_of_unknown_layout_are_not_looked_at() -> None:
    fmt = make_format(shape="2,512", dtype="U8", layout="opaque-" + "0" * 16, shards=1)
    payload = torch.full((fmt.payload_size(0),), 0xFF, dtype=torch.uint8)
    assert FiniteCheck(fmt).first_bad(0, payload) is None
