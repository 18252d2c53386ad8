"""The objects of hybrid models on a shelf, looked at and damaged from outside.

A chunk has an object for each kind of KV: ``full``, ``window`` and ``state``, see
``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash
from safetensors import safe_open

from tests.support.engines import ShelfFiles, wait_files
from tests.support.waiting import until


class HybridFiles(ShelfFiles):
    """A shelf with one namespace of a hybrid model, and perhaps one of its drafter."""

    def namespaces(self) -> list[Path]:
        """Return the namespace folders of models."""
        return [folder for folder in super().namespaces() if not _is_of_drafter(folder)]

    def remove_drafts(self) -> None:
        """Remove the objects of drafters."""
        for path in self.objects():
            if _is_of_drafter(self.root / path.relative_to(self.root).parts[0]):
                path.unlink()

    @property
    def kinds(self) -> set[str]:
        """The kinds of KV that the model has."""
        return set(self.record["kinds"])

    def wait_hit(self, prompt: Sequence[int], hit: int) -> None:
        """Wait until the shelf holds all that a hit of `hit` tokens needs."""
        until(lambda: bool(self.namespaces()), "a namespace on the shelf")
        assert hit % self.chunk == 0
        end = hit // self.chunk
        chunks = self.of(prompt)[:end]
        if "window" in self.kinds:
            reach = max(self.record["sliding_windows"])
            chunks += self.of(prompt, "window")[max(0, hit - reach + 1) // self.chunk : end]
        if "state" in self.kinds:
            chunks += self.of(prompt, "state")[end - 1 : end]
        wait_files([*itertools.chain(*chunks)])

    def wait_quiet(self) -> None:
        """Wait until no object is being written. What was set aside is open nowhere."""

        def is_quiet() -> bool:
            begun = {str(path.resolve()) for path in self.temporaries()}
            for descriptor in Path("/proc").glob("[0-9]*/fd/*") if begun else ():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in begun:
                        return False
            return begun == {str(path.resolve()) for path in self.temporaries()}

        until(is_quiet, "no object being written")


def _is_of_drafter(folder: Path) -> bool:
    return b'"version":"drafter of ' in (folder / "namespace.json").read_bytes()


def forge(path: Path, part: str) -> None:
    """Flip the sign of the largest element of a state's `part` and make the hash good again.

    Nothing but the model's output can tell that such an object is wrong.
    """
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    hashes = header.pop("__metadata__")["xxh3"].split(",")
    names = list(header)
    number = next(number for number, name in enumerate(names) if name.endswith(f".{part}"))
    tensor = header[names[number]]
    start, end = (8 + length + offset for offset in tensor["data_offsets"])
    width = (end - start) // max(1, math.prod(tensor["shape"]))
    with safe_open(path, "pt") as file:
        largest = int(file.get_tensor(names[number]).float().abs().flatten().argmax())
    # Little-endian: the sign is in an element's last byte.
    data[start + (largest + 1) * width - 1] ^= 0x80
    good = xxhash.xxh3_128_hexdigest(bytes(data[start:end]))
    text = bytes(data[8 : 8 + length])
    assert text.count(hashes[number].encode()) == 1
    data[8 : 8 + length] = text.replace(hashes[number].encode(), good.encode())
    path.write_bytes(data)
