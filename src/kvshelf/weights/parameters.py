"""Digests of a model's parameters and buffers, computed where they are.

Owns :class:`ParameterDigest`, a digest of named tensors that is computed in slices. Reading a
whole model takes from milliseconds to seconds, so the caller decides how long each slice may take.

The digest
----------
1. The bytes of a tensor, in the order of memory, are cut into pieces of 256 KiB, and each
   piece into 32-bit words; zeros fill up the last piece.
2. Each piece is reduced to two sums ``Σ key[lane][i] · word[i]`` modulo 2^64. The keys are fixed
   pseudo-random odd numbers, another one for each position and lane.
3. SHA-256 covers name, dtype, shape, strides and all sums of every tensor.

Only integers are added and multiplied modulo 2^64, so the order of additions does not matter, and
the digest of the same bytes is the same on every device.

What it can and cannot distinguish
---------------------------------
* A change of one word of a piece always changes its sums: odd keys have inverses modulo 2^64.
* For any other change inside a piece that is chosen without looking at the keys, a lane misses it
  with probability 2^-32 at most (if all differing words differ in their highest bit only), 2^-63
  usually; both lanes miss it together with 2^-64 at most. Changes in several pieces are missed
  only if every one of these pieces is missed.
* Bytes that move between pieces, tensors or names meet SHA-256.
* The keys are public: an attacker that chooses the weights can make two models collide. The digest
  protects against mistakes, not against the authors of the weights.

Threads
-------
No thread of its own and no locks: one thread makes all calls, the one that owns the tensors. A
digest whose tensors change between two slices is not valid; the caller must discard it.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch

_WORD_BYTES: Final = 4
_PIECE_WORDS: Final = 1 << 16
_LANES: Final = 2
#: Bytes that are read without a look at the clock, on CPUs and on devices: about 2 ms, and 40 MiB
#: of temporary memory.
_SLICE_BYTES: Final = {True: 2 << 20, False: 8 << 20}
#: What a small tensor costs, as bytes.
_TENSOR_BYTES: Final = 64 << 10
_KEY_SEED: Final = 0x6B767368656C66


@functools.cache
def _host_keys() -> torch.Tensor:
    """Return the keys, int64 ``[lanes, words]``: SplitMix64 of a fixed seed, made odd."""
    count = _LANES * _PIECE_WORDS
    with np.errstate(over="ignore"):
        state = np.uint64(_KEY_SEED) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).view(_LANES, _PIECE_WORDS)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of one with gaps or overlaps."""
    return tensor.detach() if _is_dense(tensor) else tensor.detach().contiguous()


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of :func:`_dense`, without a copy."""
    if _is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in the order of memory: uint8, one dimension."""
    dense = _dense(tensor)
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _sums_of(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sums of pieces, int32 ``[pieces, words]``, as int64 ``[pieces, lanes]``.

    Words that are not there count as zeros.
    """
    wide = words.to(torch.int64)
    return torch.stack([(wide * lane).sum(1) for lane in keys[:, : words.shape[1]]], dim=1)


class ParameterDigest:
    """The digest of some tensors, computed in slices.

    Parameters
    ----------
    tensors : Iterable of (str, Tensor)
        Any dtypes, shapes, strides and devices. Tensors that share memory are read once for each
        name.

    Notes
    -----
    A tensor with gaps or overlaps between its elements is copied as a whole while it is read.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = sorted(tensors, key=lambda entry: entry[0])
        self._keys: dict[torch.device, torch.Tensor] = {}
        #: The sums of each tensor: on its device, then in host memory.
        self._sums: list[list[torch.Tensor]] = [[] for _ in self._tensors]
        self._work = self._slices()
        self._copied: list[torch.Event] = []
        self._read = False

    def advance(self, seconds: float = float("inf")) -> None:
        """Read on for about `seconds`.

        At least 2 MiB are read. On a device the work is enqueued on the current stream, and
        nothing waits for it.
        """
        end = time.monotonic() + seconds
        while not self._read:
            if next(self._work, None) is None:
                self._fetch()
                self._read = True
            elif time.monotonic() >= end:
                break

    def result(self) -> str | None:
        """Return the digest, 64 hex digits; None while it is not known. Never waits."""
        if not self._read or not all(event.query() for event in self._copied):
            return None
        digest = hashlib.sha256()
        for (name, tensor), sums in zip(self._tensors, self._sums, strict=True):
            about = f"{len(name.encode())} {name} {tensor.dtype} {tuple(tensor.shape)}"
            about += f" {_strides_of(tensor)}\n"
            digest.update(about.encode())
            for part in sums:
                digest.update(part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def _slices(self) -> Iterator[bool]:
        """Read all tensors, a bounded number of bytes between two yields."""
        cost = 0
        for (_, tensor), sums in zip(self._tensors, self._sums, strict=True):
            content = _bytes_of(tensor)
            slice_bytes = _SLICE_BYTES[content.device.type == "cpu"]
            for start in range(0, content.numel(), slice_bytes):
                part = content[start : start + slice_bytes]
                sums.append(self._reduce(part))
                cost += max(part.numel(), _TENSOR_BYTES)
                if cost >= slice_bytes:
                    cost = 0
                    yield True

    def _reduce(self, content: torch.Tensor) -> torch.Tensor:
        """Return the sums of some bytes, int64 ``[pieces, lanes]`` on their device."""
        padding = -content.numel() % _WORD_BYTES
        if padding or content.data_ptr() % _WORD_BYTES or content.storage_offset() % _WORD_BYTES:
            content = torch.nn.functional.pad(content, (0, padding))
        words, keys = content.view(torch.int32), self._keys_on(content.device)
        if content.device.type == "cpu":
            # One piece at a time stays in the processor's cache.
            parts = [
                words[start : start + _PIECE_WORDS].unsqueeze(0)
                for start in range(0, words.numel(), _PIECE_WORDS)
            ]
        else:
            whole_words = words.numel() // _PIECE_WORDS * _PIECE_WORDS
            parts = [words[:whole_words].view(-1, _PIECE_WORDS), words[whole_words:].unsqueeze(0)]
        return torch.cat([_sums_of(part, keys) for part in parts if part.numel()])

    def _keys_on(self, device: torch.device) -> torch.Tensor:
        keys = self._keys.get(device)
        if keys is None:
            keys = self._keys[device] = _host_keys().to(device)
        return keys

    def _fetch(self) -> None:
        """Begin to copy the sums to host memory."""
        devices: set[torch.device] = set()
        for sums in self._sums:
            for number, part in enumerate(sums):
                if part.device.type != "cpu":
                    devices.add(part.device)
                    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                    sums[number] = host.copy_(part, non_blocking=True)
        for device in devices:
            event = torch.Event(device)
            event.record()
            self._copied.append(event)
        self._keys.clear()
