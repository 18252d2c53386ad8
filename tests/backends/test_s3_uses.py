"""Uses of chunks in a bucket: marks, and objects written anew for a rule that deletes by age."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshelf.backends import open_backend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.uses import Uses
from kvshelf.errors import ObjectMissingError
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef, Presence
from tests.sim.storage import FaultyStorage
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.servers import (
    BUCKET,
    RCLONE_CACHE_SECONDS,
    S3Server,
    command,
    moto_s3,
    rclone_s3,
)
from tests.support.waiting import PATIENCE, until

pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format(native=False)
HOT, COLD = make_chunks(FMT, 3, seed=1), make_chunks(FMT, 3, seed=2)
DAY = 86400.0
PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"


def documented_rules() -> dict[str, Any]:
    """The lifecycle rules of the documentation."""
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (rules for rules in map(json.loads, blocks) if "Rules" in rules)
    return found


@pytest.fixture(scope="module", params=["moto", "rclone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = {"moto": "moto_server", "rclone": "rclone"}[request.param]
    if command(program) is None:
        pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("s3")
    with moto_s3() if request.param == "moto" else rclone_s3(folder) as server:
        yield server


class Later(WrappedBackend):
    """A storage whose clock a test can set forward."""

    ahead = 0.0

    def now(self) -> float | None:
        now = self.inner.now()
        return None if now is None else now + self.ahead


class Bucket:
    """A shelf on a real server, with two prompts; the time passes as the test says."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.backend = open_backend(f"s3://{BUCKET}/{prefix}", storage_options=server.options())
        self.later = Later(self.backend)
        self.counting = FaultyStorage(self.later)
        self.shelf = Shelf(self.counting)
        self.view: NamespaceView = self.shelf.view(FMT)
        self.counters = Counters()
        for chunk in [*HOT, *COLD]:
            for shard in range(FMT.shards):
                self.view.publish(ObjectRef(chunk, shard), sealed(FMT, chunk, shard))

    def uses(self, **options: Any) -> Uses:
        return Uses(self.counters, clock=lambda: time.monotonic() + self.later.ahead, **options)

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

    def load(self, chunk: Chunk, shard: int) -> None:
        found = memoryview(bytearray(FMT.object_size(shard)))
        self.view.load(ObjectRef(chunk, shard), found)
        assert found == sealed(FMT, chunk, shard)

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
    with closing(bucket.uses()) as uses:
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


def test_readers_of_what_is_written_anew_read_the_same(bucket: Bucket) -> None:
    over, loads, failures = threading.Event(), [0], list[BaseException]()

    def read() -> None:
        while not over.is_set():
            for chunk in HOT:
                for shard in range(FMT.shards):
                    try:
                        bucket.load(chunk, shard)
                        loads[0] += 1
                    except BaseException as error:  # noqa: BLE001 - the test asks for it
                        failures.append(error)

    with bucket.backend.open(bucket.view.name(ObjectRef(HOT[0], 0))) as opened:
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for number in range(1, 6):
                bucket.later.ahead = number * 2 * DAY
                with closing(bucket.uses(how="rewrite", max_age=1.0)) as uses:
                    uses.note(bucket.view, HOT)
                    assert uses.flush(PATIENCE)
            seen = loads[0]
            until(lambda: loads[0] > seen + 5)
        finally:
            over.set()
            for reader in readers:
                reader.join(PATIENCE)
        # One that was opened before reads on.
        data = bytearray(opened.size)
        assert opened.read_into(memoryview(data), 0) == opened.size
    assert data == sealed(FMT, HOT[0], 0)
    # With rclone an object that is replaced is missing for a moment, which is a miss.
    misses = ObjectMissingError if bucket.server.folder is not None else ()
    assert [error for error in failures if not isinstance(error, misses)] == []
    assert loads[0] > 0
    assert bucket.counters.snapshot()["rewritten_objects"] == 5 * 3 * FMT.shards


def test_a_rule_of_the_bucket_deletes_what_is_not_used(bucket: Bucket) -> None:
    """The rule is carried out here, on the times that the server says."""
    folder = bucket.server.folder
    if folder is None:
        pytest.skip("the times of moto's objects cannot be changed")
    (rule,) = documented_rules()["Rules"]
    days = rule["Expiration"]["Days"]
    root = folder / BUCKET / bucket.prefix

    def pass_days(count: float) -> None:
        for path in root.rglob("*"):
            then = path.stat().st_mtime - count * DAY
            os.utime(path, (then, then))
        time.sleep(10 * RCLONE_CACHE_SECONDS)

    def expire() -> None:
        for row in bucket.backend.list():
            if time.time() - row.mtime > days * DAY:
                bucket.server.client().delete_object(
                    Bucket=BUCKET, Key=f"{bucket.prefix}/{row.name}"
                )

    for _ in range(5):
        # A prompt that is sent every second day, by engines that are restarted now and then.
        pass_days(2)
        with closing(bucket.uses(how="rewrite", max_age=days * DAY)) as uses:
            uses.note(bucket.view, HOT)
            assert uses.flush(PATIENCE)
        expire()
    refs = [ObjectRef(chunk, shard) for chunk in HOT for shard in range(FMT.shards)]
    assert set(bucket.view.probe(refs)) == {Presence.PRESENT}
    gone = [ObjectRef(chunk, shard) for chunk in COLD for shard in range(FMT.shards)]
    assert set(bucket.view.probe(gone)) == {Presence.MISSING}
    # Of ten days, at most each half of seven saw a PUT.
    assert bucket.counters.snapshot()["rewritten_objects"] <= 2 * len(refs)


def test_the_rule_can_be_set(server: S3Server) -> None:
    if server.folder is not None:
        pytest.skip("rclone has no rules")
    rules = documented_rules()
    client = server.client()
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    (found,) = client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert found["Expiration"]["Days"] == 7
    client.delete_bucket_lifecycle(Bucket=BUCKET)
