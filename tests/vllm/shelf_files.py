"""The files of a shelf, looked at and damaged from outside, without kvshelf's storage code.

Only names are computed by kvshelf (they are tested against golden vectors elsewhere); files are
found, waited for, checked and spoilt with the operating system's own calls.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, SHARDS_FIELDS, Kind
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from tests.support.engines import Engine
from tests.support.waiting import LONG, until

CHUNK = 256


class ShelfFiles:
    """A shelf in a local directory, and the one namespace on it that prompts are looked for in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder: Path | None = None
        self._namespace: Namespace | None = None

    @property
    def folder(self) -> Path:
        """The folder of the namespace."""
        if self._folder is None:
            [self._folder] = self.namespaces()
        return self._folder

    @property
    def namespace(self) -> Namespace:
        """The namespace."""
        if self._namespace is None:
            # A server that replaces the file may show none for a moment.
            file = self.folder / "namespace.json"
            until(lambda: file.exists() and file.stat().st_size > 0, "the namespace's record")
            self._namespace = Namespace.from_bytes(file.read_bytes())
        return self._namespace

    @property
    def record(self) -> dict[str, Any]:
        """The namespace record."""
        return dict(self.namespace.record)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return int(self.record["chunk_size"])

    def chain(self, prompt: Sequence[int], *, salt: str = "") -> KeyChain:
        """Return the keys of a prompt's chunks."""
        chain = KeyChain(self.namespace.digest, self.chunk, salt=salt)
        chain.extend(prompt)
        return chain

    def namespaces(self) -> list[Path]:
        """Return the namespace folders."""
        if not self.root.exists():
            return []
        return [path for path in sorted(self.root.iterdir()) if (path / "namespace.json").exists()]

    def delete(self) -> None:
        """Delete the shelf, also while an engine stores into its folders."""

        def deleted() -> bool:
            try:
                shutil.rmtree(self.root)
            except OSError:
                return not self.root.exists()
            return True

        until(deleted, "the shelf deleted")

    def objects(self) -> set[Path]:
        """Return all objects of the shelf."""
        return {
            path
            for path in self.root.rglob("*.safetensors")
            if ".kvshelf" not in path.parts and not path.name.startswith(".")
        }

    def temporaries(self) -> set[Path]:
        """Return files that were begun and not published."""
        return set(self.root.rglob(".*.tmp"))

    def of(self, prompt: Sequence[int], *, salt: str = "") -> list[list[Path]]:
        """Return the objects that a prompt's chunks have or would have: a list for each chunk."""
        return [self.objects_of(chunk) for chunk in self.chain(prompt, salt=salt).chunks]

    def objects_of(self, chunk: Chunk, kind: Kind = FULL) -> list[Path]:
        """Return the objects that a chunk has or would have."""
        shards = int(self.record[SHARDS_FIELDS[kind]])
        return [self.folder / object_name(chunk, shard, shards, kind) for shard in range(shards)]

    def fill(
        self, engine: Engine, prompt: Sequence[int], *, salt: str = "", **options: Any
    ) -> list[list[Path]]:
        """Have an engine store a prompt, and empty its own cache; return the prompt's objects."""
        engine.generate(prompt, cache_salt=salt or None, **options)
        chunks = self.wait_stored(prompt, salt=salt)
        engine.reset_prefix_cache()
        return chunks

    def stores(self, prompt: Sequence[int]) -> bool:
        """Return whether all chunks of a prompt are on the shelf."""
        return all(path.is_file() for chunk in self.of(prompt) for path in chunk)

    def wait_stored(
        self, prompt: Sequence[int], *, salt: str = "", timeout: float = LONG
    ) -> list[list[Path]]:
        """Wait until all chunks of a prompt are on the shelf, and return their objects."""
        if len(prompt) < CHUNK:
            return []
        until(lambda: bool(self.namespaces()), "a namespace on the shelf", timeout)
        chunks = self.of(prompt, salt=salt)

        def missing() -> list[str]:
            return [path.name for chunk in chunks for path in chunk if not path.is_file()]

        try:
            until(lambda: not missing(), f"{len(chunks)} chunks on the shelf", timeout)
        except AssertionError as error:
            error.add_note(f"missing: {missing()} of {[[p.name for p in c] for c in chunks]}")
            raise
        return chunks

    def wait_objects(self, count: int) -> None:
        """Wait until the shelf holds `count` objects."""
        until(lambda: len(self.objects()) == count, f"{count} objects on the shelf")

    def check_all(self) -> int:
        """Check every object against its own header; returns how many there are."""
        objects = self.objects()
        for path in objects:
            check_object(path)
        return len(objects)


def check_object(path: Path) -> None:
    """Assert that a file is a safetensors file whose tensors have the hashes in its header."""
    try:
        _parse(path.read_bytes())
    except (AssertionError, LookupError, ValueError) as error:
        raise AssertionError(f"{path}: {error!r}") from error


def _parse(data: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return an object's metadata without hashes, and the bytes of its tensors, which must fit."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    payload = memoryview(data)[8 + length :]
    hashes = metadata.pop("xxh3").split(",")
    tensors, end = {}, 0
    for (name, tensor), expected in zip(header.items(), hashes, strict=True):
        start, end = tensor["data_offsets"]
        assert xxhash.xxh3_128_hexdigest(payload[start:end]) == expected, name
        tensors[name] = torch.frombuffer(bytearray(payload[start:end]), dtype=torch.uint8)
    assert end == len(payload)
    return metadata, tensors


def is_repaired(path: Path, good: bytes) -> bool:
    """Whether an object that was damaged can be relied on again.

    It is a file whose hashes are right, it says of itself what it said before, and holds the same
    KV up to rounding. The bytes may be others: KV that is computed behind a hit goes through
    matrices of other shapes than KV that is computed from the first token on.
    """
    if path.is_symlink() or not path.is_file():
        return False
    try:
        metadata, tensors = _parse(path.read_bytes())
    except (AssertionError, LookupError, OSError, ValueError):
        return False
    expected, content = _parse(good)
    if metadata != expected:
        return False
    assert_close(tensors, content)
    return True


# Elements of KV are of the size of one. bfloat16 has 8 bits: where sums are made in another order,
# as by other batches or other ranks, elements move by a few of their last bits.
TOLERANCE = 0.1
MEAN_TOLERANCE = 0.01


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two objects hold the same KV up to rounding."""
    for name, tensor in one.items():
        a = tensor.view(torch.bfloat16).float()
        b = other[name].view(torch.bfloat16).float()
        assert a.abs().max() > 0.1, "there is no KV"
        assert (a - b).abs().max() <= TOLERANCE, name
        assert (a - b).abs().mean() <= MEAN_TOLERANCE, name


def _edit_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length])
    assert len(header) == length and header != data[8 : 8 + length]
    path.write_bytes(data[:8] + header + data[8 + length :])


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _age(path: Path) -> None:
    """Make a file look old: what changed a moment ago may still be copied to its place."""
    old = time.time() - 3600
    os.utime(path, (old, old), follow_symlinks=False)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
    _age(path)


def _empty(path: Path) -> None:
    os.truncate(path, 0)
    _age(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")
    _age(path)


def _other_namespace(path: Path) -> None:
    def change(header: bytes) -> bytes:
        at = header.index(b'"namespace":"') + len(b'"namespace":"')
        return header[:at] + bytes(reversed(header[at : at + 64])) + header[at + 64 :]

    _edit_header(path, change)


def _other_chunk(path: Path) -> None:
    others = sorted(
        other
        for other in path.parents[1].rglob("*.safetensors")
        if other != path and other.stat().st_size == path.stat().st_size
    )
    shutil.copyfile(others[0], path)


def _huge_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 100_000_000_000))


def _overlap(path: Path) -> None:
    def change(header: bytes) -> bytes:
        tensors = [name for name in json.loads(header) if name != "__metadata__"]
        first = json.dumps(json.loads(header)[tensors[0]]["data_offsets"], separators=(",", ":"))
        second = json.dumps(json.loads(header)[tensors[1]]["data_offsets"], separators=(",", ":"))
        at = header.rindex(second.encode())
        return header[:at] + first.encode().ljust(len(second)) + header[at + len(second) :]

    _edit_header(path, change)


def _symlink(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


#: Ways to spoil an object in place, by name.
DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped byte of the payload": lambda path: _flip(path, -1000),
    "flipped byte of the header": lambda path: _flip(path, 60),
    "truncated": _truncate,
    "empty": _empty,
    "one byte too long": _append,
    "of another namespace": _other_namespace,
    "of another chunk": _other_chunk,
    "100 GB header": _huge_header,
    "overlapping tensors": _overlap,
    "directory": lambda path: _replace(path, Path.mkdir),
    "FIFO": lambda path: _replace(path, os.mkfifo),
    "symbolic link": _symlink,
}

#: Those that a look-up already notices, by size or kind.
SEEN_BY_LOOKUP = {
    "truncated",
    "empty",
    "one byte too long",
    "directory",
    "FIFO",
    "symbolic link",
}
