"""Digests of parameters: every bit, its place and its tensor count; slices change nothing."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.weights import parameters
from kvshelf.weights.parameters import ParameterDigest

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int64]

tensors = st.builds(
    lambda seed, shape, dtype: (
        torch.randint(
            0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed)
        )
        .to(torch.uint8)
        .view(dtype)
        .squeeze(-1)
    ),
    st.integers(0, 1 << 20),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)
models = st.dictionaries(st.text(max_size=8), tensors, min_size=1, max_size=4)


def digest(model: dict[str, torch.Tensor]) -> str:
    made = ParameterDigest(model.items())
    made.advance()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found = made.result()
    assert found is not None
    return found


@given(models, st.data())
@settings(deadline=None)
def test_every_bit_counts(model: dict[str, torch.Tensor], data: st.DataObject) -> None:
    before = digest(model)
    tensor = data.draw(st.sampled_from(list(model.values())))
    content = tensor.view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, content.numel() - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    content[place] ^= bit
    assert digest(model) != before
    content[place] ^= bit
    assert digest(model) == before


@given(tensors, st.data())
@settings(deadline=None)
def test_elements_that_change_places(tensor: torch.Tensor, data: st.DataObject) -> None:
    before = digest({"weight": tensor})
    flat = tensor.view(-1)
    places = st.integers(0, flat.numel() - 1)
    one, other = data.draw(places), data.draw(places)
    width = tensor.dtype.itemsize
    content = flat.view(torch.uint8).view(-1, width)
    same = torch.equal(content[one], content[other])
    content[[one, other]] = content[[other, one]]
    assert (digest({"weight": tensor}) == before) is same


@given(models)
@settings(deadline=None)
def test_names_dtypes_and_shapes_count(model: dict[str, torch.Tensor]) -> None:
    before = digest(model)
    name, tensor = next(iter(model.items()))
    others = {key: value for key, value in model.items() if key != name}
    assert digest({**others, name + "!": tensor}) != before
    assert digest({**others, name: tensor.unsqueeze(0)}) != before
    signed = {torch.int8: torch.uint8, torch.uint8: torch.int8, torch.int64: torch.float64}
    other = tensor.view(signed.get(tensor.dtype, torch.uint8))
    assert digest({**others, name: other}) != before


def test_where_a_tensor_lies_in_memory_does_not_count() -> None:
    weight = torch.randn(300, 200)
    assert digest({"w": weight.t()}) == digest({"w": weight.clone().t()})
    assert digest({"w": weight.t()}) != digest({"w": weight.t().contiguous()})
    assert digest({"w": weight[::2, ::3]}) == digest({"w": weight[::2, ::3].contiguous()})
    assert digest({"w": weight[:1].expand(5, 200)}) == digest({"w": weight[:1].repeat(5, 1)})
    padded = torch.zeros(60001, dtype=torch.uint8)
    padded[1:] = torch.arange(60000) % 251
    assert digest({"w": padded[1:]}) == digest({"w": padded[1:].clone()})
    assert digest({"a": weight, "b": padded}) == digest({"b": padded, "a": weight})


@pytest.mark.long
def test_slices_give_the_same_digest() -> None:
    model = {str(i): torch.randn(700, 1000) for i in range(3)}
    model["empty"] = torch.empty(0)
    model["number"] = torch.tensor(1.5)
    slices = ParameterDigest(model.items())
    count = 1
    while slices.result() is None:
        slices.advance(0.0)
        count += 1
    assert count > 3
    assert slices.result() == digest(model)


def test_digest_is_what_the_module_says() -> None:
    count = 2 * parameters._PIECE_WORDS
    weight = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, count - 3))
    weight = weight.to(torch.int32)
    words = [*weight.tolist(), 0, 0, 0]
    mask = (1 << 64) - 1

    def key(number: int) -> int:
        state = (parameters._KEY_SEED + (number + 1) * 0x9E3779B97F4A7C15) & mask
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return (state ^ (state >> 31)) | 1

    expected = hashlib.sha256(f"1 w torch.int32 ({count - 3},) (1,)\n".encode())
    for piece in range(2):
        part = words[piece * parameters._PIECE_WORDS : (piece + 1) * parameters._PIECE_WORDS]
        for lane in range(parameters._LANES):
            first = lane * parameters._PIECE_WORDS
            total = sum(key(first + i) * word for i, word in enumerate(part))
            expected.update(struct.pack("<Q", total & mask))
    assert digest({"w": weight}) == expected.hexdigest()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_gives_the_same_digest() -> None:
    model = {str(i): torch.randn(700, 1000).bfloat16() for i in range(3)}
    assert digest({name: tensor.cuda() for name, tensor in model.items()}) == digest(model)
