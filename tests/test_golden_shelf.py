"""Shelves that earlier releases wrote are read by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import KeyChain, object_name
from kvshelf.shelf import open_shelf

RELEASES = sorted(Path(__file__).parent.joinpath("golden").glob("v*"))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_every_object_of_a_release_is_found_and_verified(release: Path) -> None:
    prompt = json.loads((release / "prompt.json").read_text())
    with open_shelf(str(release / "shelf"), read_only=True) as shelf:
        objects = 0
        for info in shelf.namespaces():
            assert info.folder in prompt["machines"]
            assert info.namespace is not None
            fmt = ObjectFormat(info.namespace)
            chain = KeyChain(info.namespace.digest, fmt.chunk_size)
            chunks = chain.extend(prompt["tokens"])
            assert len(chunks) == prompt["chunks"] > 0
            assert all(shelf.present(fmt, chunks))
            for chunk in chunks:
                for shard in range(fmt.shards):
                    image = bytearray(fmt.object_size(shard))
                    shelf.load(fmt, chunk, shard, memoryview(image))
                    path = release / "shelf" / info.folder / object_name(chunk, shard, fmt.shards)
                    assert bytes(image) == path.read_bytes()
                    with safe_open(path, framework="pt") as file:
                        names = [spec.name for spec in fmt.tensors(shard)]
                        assert list(file.keys()) == names
                    objects += 1
        assert sum(1 for _ in shelf.objects()) == objects > 0
