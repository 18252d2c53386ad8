"""Shelves that earlier releases wrote are read by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from kvshelf.format.keys import KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.support.formats import present

RELEASES = sorted(Path(__file__).parents[1].joinpath("golden").glob("v[0-9]*"))


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
            assert all(present(shelf.view(fmt), chunks))
            for chunk in chunks:
                for shard in range(fmt.shards):
                    image = bytearray(fmt.object_size(shard))
                    shelf.view(fmt).load(ObjectRef(chunk, shard), memoryview(image))
                    path = release / "shelf" / info.folder / object_name(chunk, shard, fmt.shards)
                    assert bytes(image) == path.read_bytes()
                    with safe_open(path, framework="pt") as file:
                        names = [spec.name for spec in fmt.tensors(shard)]
                        assert list(file.keys()) == names
                    objects += 1
        assert sum(1 for _ in shelf.objects()) == objects > 0
