"""The kernels that hash objects in a load buffer, run for every block and thread on the host."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from gpu_digests import Digests
from gpu_groups import Context
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvshelf.format.keys import KeyChain
from kvshelf.format.kinds import STATE
from tests.native.emulation import Emulation, emulation
from tests.support.formats import make_format

pytestmark = pytest.mark.real

CTX = Context(torch.device("cpu"), emulated=True)
KIB = 1024


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Emulation]:
    found = emulation()
    with found.in_use():
        yield found


class Case:
    """Objects of random bytes in a buffer, with gaps between them."""

    def __init__(self, sizes: Sequence[int], shards: int = 1, gap: int = 0, skew: int = 0) -> None:
        size = sum(sizes)
        whole = np.random.default_rng(size).integers(
            0, 256, skew + shards * (size + gap), dtype=np.uint8
        )
        self.memory = torch.zeros(len(whole) + 16, dtype=torch.uint8)
        self.memory[: len(whole)] = torch.from_numpy(whole)
        self.payloads = self.memory[skew : len(whole)].view(shards, -1)[:, :size]
        self.sizes = list(sizes)
        self.digests = Digests(CTX, sizes, shards)

    def found(self, blocks: int = 8) -> list[list[str]]:
        """The digests of each shard by the kernels."""
        self.digests.found.fill_(0)
        self.digests.enqueue(self.payloads, blocks)
        return [[bytes(one.tolist()).hex() for one in row] for row in self.digests.found]

    def check(self, blocks: int = 8) -> None:
        self.found(blocks)
        torch.testing.assert_close(self.digests.found, self.digests.expected(self.payloads))


sizes_of_tensors = st.one_of(
    st.integers(0, 300),
    st.integers(0, 5 * KIB),
    st.integers(0, 160).map(lambda n: 16 * n),
    st.sampled_from([128 * KIB, 128 * KIB + 1, 128 * KIB + 16, 129 * KIB, 260 * KIB + 48]),
)


@given(
    sizes=st.lists(sizes_of_tensors, min_size=1, max_size=6),
    aligned=st.booleans(),
    shards=st.integers(1, 3),
    gap=st.sampled_from([0, 16, 48, 5]),
    skew=st.sampled_from([0, 16, 1]),
    blocks=st.integers(1, 20),
)
@settings(max_examples=60)
def test_digests_are_those_of_xxhash(
    sizes: list[int], aligned: bool, shards: int, gap: int, skew: int, blocks: int
) -> None:
    found = emulation()
    found.unwatch()
    if aligned:
        sizes, gap, skew = [size // 16 * 16 for size in sizes], gap // 16 * 16, skew // 16 * 16
    assume(sum(sizes))
    case = Case(sizes, shards, gap, skew)
    of_payloads = found.watch(case.memory)
    of_digests = found.watch(case.digests.found)
    found.watch(case.digests._sums)
    case.check(blocks)
    assert found.violations == 0
    assert found.width == 16 or not aligned
    # Every byte of a payload counts; nothing beside them is touched.
    loads = torch.from_numpy(of_payloads.loads).bool()
    inside = torch.zeros_like(loads)
    inside[skew : skew + case.payloads.numel() + (shards - 1) * gap].as_strided(
        tuple(case.payloads.shape), (case.payloads.stride(0), 1), skew
    ).fill_(True)
    assert torch.equal(loads, inside)
    assert not of_payloads.stores.any()
    assert (of_digests.stores == 1).all()
    found.unwatch()


@given(data=st.data(), sizes=st.lists(sizes_of_tensors, min_size=1, max_size=4))
@settings(max_examples=40)
def test_one_bit_anywhere_is_found(data: st.DataObject, sizes: list[int]) -> None:
    size = sum(sizes)
    assume(size)
    case = Case(sizes, 2)
    before = case.found()
    shard = data.draw(st.integers(0, 1))
    byte = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 7))
    case.payloads[shard, byte] ^= 1 << bit
    after = case.found()
    ends = list(itertools.accumulate(sizes))
    tensor = next(number for number, end in enumerate(ends) if byte < end)
    changed = [
        (row, number)
        for row, digests in enumerate(before)
        for number, digest in enumerate(digests)
        if digest != after[row][number]
    ]
    assert changed == [(shard, tensor)]
    case.check()


@pytest.mark.long
@pytest.mark.parametrize("skew", [0, 1])
def test_all_sizes_up_to_two_blocks(skew: int) -> None:
    Case(range(2 * KIB + 130), skew=skew).check()
    Case(range(0, 12 * KIB, 16), skew=skew).check(3)


@pytest.mark.parametrize("size", [KIB * KIB - 1, KIB * KIB, KIB * KIB + 16, 3 * KIB * KIB])
def test_large_tensors(size: int) -> None:
    Case([size, size], 2).check(16)


# --- objects of the format ---------------------------------------------------------


FORMATS = {
    "K and V": {"shape": "2,*,4,64"},
    "many layers": {"layers": 260, "dtype": "F8_E4M3"},
    "MLA": {"shape": "*,576", "shards": 1},
    "opaque": {"layout": "opaque-0123456789abcdef", "shape": "2,4099", "dtype": "U8"},
    "packed": {"shape": "2,*,4,8", "native": True},
    "states": {
        "layers": 2,
        "kinds": ["state", "full"],
        "state_shards": 2,
        "layouts": ["state", "canonical"],
        "layer_shapes": ["conv_q:3,8/;conv_v:3,1030/;ssm:4/,32,33", "2,*,2,8"],
        "layer_dtypes": ["BF16;BF16;F32", "BF16"],
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_list_of_an_object(name: str) -> None:
    fmt = make_format(**{"chunk_size": 16, "native": False, **FORMATS[name]})
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(range(fmt.chunk_size + 5))
    tail = chain.tail() if fmt.tails else None
    for of_kind in map(fmt.of, fmt.kinds):
        for chunk in (*chain.chunks, *([tail] if tail and of_kind.kind != STATE else [])):
            images = []
            for shard in range(of_kind.shards):
                image = bytearray(os.urandom(of_kind.object_size(shard, chunk.tokens)))
                of_kind.seal(memoryview(image), chunk, shard)
                images.append(image)
            sizes = [spec.nbytes for spec in of_kind.tensors(0, chunk.tokens)]
            case = Case(sizes, of_kind.shards)
            for payload, image in zip(case.payloads, images, strict=True):
                payload.copy_(torch.frombuffer(image[of_kind.data_offset :], dtype=torch.uint8))
            listed = [
                json.loads(image[8 : of_kind.data_offset])["__metadata__"]["xxh3"]
                for image in images
            ]
            assert [",".join(digests) for digests in case.found()] == listed
