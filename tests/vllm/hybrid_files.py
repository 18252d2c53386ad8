"""The objects of hybrid models on a shelf, looked at and damaged from outside.

A chunk has an object for each kind of KV: ``full``, ``window`` and ``state``, see
``docs/format.md``. As in :mod:`shelf_files`, only chunk keys and names are computed by kvshelf.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from kvshelf.format.kinds import Kind
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles


class HybridFiles(ShelfFiles):
    """A shelf with one namespace, that of a hybrid model."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of KV that the model has."""
        return set(self.record["kinds"])

    def of_kind(
        self, prompt: Sequence[int], kind: Kind, *, salt: str = ""
    ) -> list[tuple[Path, ...]]:
        """Return the objects of one kind that a prompt's chunks have or would have."""
        return [
            tuple(self.objects_of(chunk, kind)) for chunk in self.chain(prompt, salt=salt).chunks
        ]

    def boundaries(self, prompt: Sequence[int]) -> list[int]:
        """Return the numbers of tokens of a prompt after which a state is stored."""
        return [
            self.chunk * (index + 1)
            for index, paths in enumerate(self.of_kind(prompt, "state"))
            if all(path.is_file() for path in paths)
        ]

    def needed(self, prompt: Sequence[int], hit: int) -> list[Path]:
        """Return the objects that a hit of `hit` tokens needs."""
        chunks, record = hit // self.chunk, self.record
        assert hit == chunks * self.chunk
        paths: list[Path] = []
        if "full" in self.kinds:
            paths += sum(self.of_kind(prompt, "full")[:chunks], ())
        if "window" in self.kinds:
            reach = max(record["sliding_windows"])
            first = max(0, hit - reach + 1) // self.chunk
            paths += sum(self.of_kind(prompt, "window")[first:chunks], ())
        if "state" in self.kinds:
            paths += self.of_kind(prompt, "state")[chunks - 1]
        return paths

    def wait_hit(self, prompt: Sequence[int], hit: int) -> None:
        """Wait until the shelf holds all that a hit of `hit` tokens needs."""
        until(lambda: bool(self.namespaces()), "a namespace on the shelf")
        paths = self.needed(prompt, hit)

        def complete() -> bool:
            return all(path.is_file() for path in paths)

        try:
            until(complete, f"a hit of {hit} tokens on the shelf")
        except AssertionError as error:
            missing = [path.name for path in paths if not path.is_file()]
            raise AssertionError(f"{error}; missing: {missing}") from None

    def wait_quiet(self) -> None:
        """Wait until no object is being written. What was set aside is open nowhere."""

        def is_quiet() -> bool:
            found = {str(path.resolve()) for path in self.temporaries()}
            for descriptor in Path("/proc").glob("[0-9]*/fd/*") if found else ():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in found:
                        return False
            return found == {str(path.resolve()) for path in self.temporaries()}

        until(is_quiet, "no object being written")

    def bytes_of_kinds(self) -> dict[str, int]:
        """Return the bytes of all objects, by kind."""
        sizes = dict.fromkeys(("full", "window", "state"), 0)
        for path in self.objects():
            kind = next((kind for kind in ("window", "state") if f"-{kind}-" in path.name), "full")
            sizes[kind] += path.stat().st_size
        return sizes


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read an object with the safetensors library."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def forge(path: Path, part: str) -> None:
    """Flip the sign of the largest element of a state's `part` and make the hash good again.

    Nothing but the model's output can tell that such an object is wrong.
    """
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    hashes = metadata["xxh3"].split(",")
    number, name = next(
        (number, name) for number, name in enumerate(header) if name.endswith(f".{part}")
    )
    start, end = (8 + length + offset for offset in header[name]["data_offsets"])
    size = end - start
    width = size // max(1, math.prod(header[name]["shape"]))
    content = read_state(path)[name].float().abs().flatten()
    # Little-endian: the sign is in an element's last byte.
    data[start + (int(content.argmax()) + 1) * width - 1] ^= 0x80
    good = xxhash.xxh3_128_hexdigest(bytes(data[start:end]))
    text = bytes(data[8 : 8 + length])
    old = ",".join(hashes).encode()
    assert text.count(old) == 1
    new = ",".join([*hashes[:number], good, *hashes[number + 1 :]]).encode()
    assert len(new) == len(old)
    assert new != old
    data[8 : 8 + length] = text.replace(old, new)
    path.write_bytes(data)
