"""A shelf copied by ``cp``, ``rsync``, ``rclone`` and ``aws s3 sync`` is a shelf, whole or not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvshelf import BlobKV, ChunkCache, Shelf
from kvshelf.capacity.uses import Uses
from kvshelf.format.keys import KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import open_shelf
from tests.backends.copy_tools import Aws, Cp, Rclone, Rsync, Tool
from tests.support.filled import CHUNK, contents, fill, namespace, prompt, times
from tests.support.servers import BUCKET, S3Server, moto_s3, rclone_s3

pytestmark = [pytest.mark.real, pytest.mark.slow]

SHARED, OTHER = namespace(), namespace("Org/Other", weights="user:other")
LONG = prompt(0, 8)
PROMPTS = [LONG, prompt(1, 3), LONG[: 5 * CHUNK] + prompt(2, 2)]
#: Objects of PROMPTS in a namespace: 8 + 3 + 2 chunks of two shards.
OBJECTS = 2 * (8 + 3 + 2)


@pytest.fixture(scope="module")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("bucket")) as server:
        yield server


@pytest.fixture(scope="module")
def moto_server() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="moto is missing: pip install 'moto[server]'")
    with moto_s3() as server:
        yield server


@pytest.fixture(
    params=["cp", "rsync", "rclone", "aws rclone", "rclone rclone", "aws moto", "rclone moto"]
)
def tool(request: pytest.FixtureRequest) -> Tool:
    """A program, and the server that it copies to, if any."""
    makers: dict[str, Callable[[], Tool]] = {
        "cp": Cp,
        "rsync": Rsync,
        "rclone": Rclone,
        "aws rclone": lambda: Aws(request.getfixturevalue("rclone_server")),
        "aws moto": lambda: Aws(request.getfixturevalue("moto_server")),
        "rclone rclone": lambda: Rclone(request.getfixturevalue("rclone_server")),
        "rclone moto": lambda: Rclone(request.getfixturevalue("moto_server")),
    }
    if request.param != "cp":
        Rclone()  # without it there is no server, nor a reason to go on
    return makers[request.param]()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    fill(root, SHARED, *PROMPTS)
    fill(root, OTHER, *PROMPTS)
    # Files of a moment ago would hide a tool that looks at times.
    for name in contents(root):
        old = (root / name).stat().st_mtime - 1000
        os.utime(root / name, (old, old))
    return root


def elsewhere(tool: Tool, tmp_path: Path, name: str) -> Path | str:
    """A place at the other end of a tool."""
    return tmp_path / name if tool.server is None else f"s3:{tmp_path.name}/{name}"


def open_place(tool: Tool, place: Path | str) -> Shelf:
    if isinstance(place, Path):
        return open_shelf(place)
    assert tool.server is not None
    return open_shelf(f"s3://{BUCKET}/{place[3:]}", storage_options=tool.server.options())


def hit(shelf: Shelf, tokens: Sequence[int]) -> int:
    """Chunks that a look-up finds and that a load brings; no use is recorded."""
    with ChunkCache(shelf, SHARED, uses=Uses(Counters(), off=True)) as cache:
        found = cache.lookup(tokens)
        blob = torch.zeros(2, 2, len(tokens), 64, dtype=torch.bfloat16)
        loaded = int(cache.retrieve(tokens, kv=BlobKV(blob)).sum())
    assert loaded == found
    return found // CHUNK


def store(shelf: Shelf, tokens: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    blob = torch.randn(2, 2, len(tokens), 64, generator=generator).bfloat16()
    with ChunkCache(shelf, SHARED) as cache:
        assert cache.store(tokens, kv=BlobKV(blob)).complete


def names_of(tokens: Sequence[int]) -> list[str]:
    fmt = ObjectFormat(SHARED)
    return [
        f"{SHARED.folder}/{object_name(chunk, shard, fmt.shards)}"
        for chunk in KeyChain(SHARED.digest, CHUNK).extend(tokens)
        for shard in range(fmt.shards)
    ]


def test_whole_shelf_there_and_back(tool: Tool, source: Path, tmp_path: Path) -> None:
    before = contents(source), times(source)
    there, back = elsewhere(tool, tmp_path, "there"), tmp_path / "back"
    assert len(tool.copy(source, there)) == 2 * (OBJECTS + 1)
    with open_place(tool, there) as shelf:
        assert [hit(shelf, tokens) for tokens in PROMPTS] == [8, 3, 7]
    assert len(tool.copy(there, back)) == 2 * (OBJECTS + 1)
    assert contents(back) == before[0]
    # Nothing is copied a second time, in no direction, although all were used meanwhile.
    with open_shelf(source) as shelf:
        assert hit(shelf, LONG) == 8
    assert tool.copy(source, there) == []
    assert tool.copy(there, back) == []
    assert tool.copy(back, there) == []
    assert (contents(source), times(source)) == before


def test_what_was_stored_since_is_all_that_a_second_copy_brings(
    tool: Tool, source: Path, tmp_path: Path
) -> None:
    there = elsewhere(tool, tmp_path, "there")
    tool.copy(source, there)
    before = times(source)
    more = LONG + prompt(3, 2)
    with open_shelf(source) as shelf:
        store(shelf, more)
    for name in names_of(more)[16:]:
        # S3 knows whole seconds, and what seems newer than its copy there is fetched again.
        os.utime(source / name, (time.time() - 60,) * 2)
    assert {name: times(source)[name] for name in before} == before
    assert sorted(tool.copy(source, there)) == sorted(names_of(more)[16:])
    # And what is stored there comes back.
    other = prompt(4, 2)
    with open_place(tool, there) as shelf:
        assert hit(shelf, more) == 10
        store(shelf, other)
    assert sorted(tool.copy(there, source)) == sorted(names_of(other))
    with open_shelf(source) as shelf:
        assert hit(shelf, other) == 2


def test_some_prefixes(tool: Tool, source: Path, tmp_path: Path) -> None:
    there = elsewhere(tool, tmp_path, "there")
    names = names_of(LONG[: 3 * CHUNK])
    assert sorted(tool.copy_names(source, there, names, tmp_path)) == sorted(names)
    with open_place(tool, there) as shelf:
        assert [hit(shelf, tokens) for tokens in PROMPTS] == [3, 0, 3]
        # Without a description it is a shelf all the same, and a store adds that.
        store(shelf, PROMPTS[1])
        assert [info.problem for info in shelf.namespaces()] == [None]
    tool.copy(there, tmp_path / "back")
    back = contents(tmp_path / "back")
    assert {name: back[name] for name in names} == {
        name: (source / name).read_bytes() for name in names
    }
