"""Uses of chunks in a bucket: marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshelf.backends import open_backend
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.uses import Uses
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef
from tests.sim.storage import FaultyStorage
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.servers import BUCKET, S3Server, command, moto_s3, rclone_s3
from tests.support.waiting import PATIENCE

pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format(native=False)
HOT, COLD = make_chunks(FMT, 3, seed=1), make_chunks(FMT, 3, seed=2)


@pytest.fixture(scope="module", params=["moto", "rclone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = {"moto": "moto_server", "rclone": "rclone"}[request.param]
    if command(program) is None:
        pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("s3")
    with moto_s3() if request.param == "moto" else rclone_s3(folder) as server:
        yield server


class Bucket:
    """A shelf on a real server, with two prompts."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.backend = open_backend(f"s3://{BUCKET}/{prefix}", storage_options=server.options())
        self.counting = FaultyStorage(self.backend)
        self.shelf = Shelf(self.counting)
        self.view: NamespaceView = self.shelf.view(FMT)
        for chunk in [*HOT, *COLD]:
            for shard in range(FMT.shards):
                self.view.publish(ObjectRef(chunk, shard), sealed(FMT, chunk, shard))

    def modified(self, chunks: Sequence[Chunk]) -> list[float]:
        """When the objects of chunks were modified, past the code under test."""
        client = self.server.client()
        keys = [
            f"{self.prefix}/{self.view.name(ObjectRef(chunk, shard))}"
            for chunk in chunks
            for shard in range(FMT.shards)
        ]
        heads = [client.head_object(Bucket=BUCKET, Key=key) for key in keys]
        return [head["LastModified"].timestamp() for head in heads]

    def close(self) -> None:
        self.shelf.close()


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    with closing(Bucket(server, tmp_path.name)) as bucket:
        yield bucket


def test_a_bucket_gets_marks_in_one_request(bucket: Bucket) -> None:
    before = bucket.modified([*HOT, *COLD])
    with closing(Uses(Counters())) as uses:
        bucket.counting.counts.clear()
        uses.note(bucket.view, HOT)
        assert uses.flush(PATIENCE)
        assert bucket.counting.counts["write"] == 1
    keys = np.frombuffer(b"".join(c.key for c in [*HOT, *COLD]), np.uint8).reshape(-1, 32)
    times = Marks.read(bucket.shelf.backend).used(bucket.view.folder(), keys)
    assert (times[:3] >= max(before) - 1).all() and not times[3:].any()
    assert bucket.modified([*HOT, *COLD]) == before
    # What the shelf has is the same as before.
    assert len(list(bucket.shelf.objects())) == 6 * FMT.shards
    assert all(name.startswith(f"{MARKS}/") for name in names(bucket) if ".kvshelf" in name)


def names(bucket: Bucket) -> list[str]:
    return [row.name for row in bucket.backend.list(hidden=True)]
