"""The policy of docs/storage.md: what kvshelf asks of S3, and no more.

Whether a policy allows a request is decided here, by action, resource and condition; the prefix of
a request about one object is its key, as S3 has it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from typer.testing import CliRunner

from kvshelf import ChunkCache
from kvshelf.cli.app import app
from kvshelf.kv.sources import BlobKV
from kvshelf.shelf.shelf import open_shelf
from tests.sim.s3 import BUCKET, ScriptedS3
from tests.support.filled import CHUNK, namespace, prompt

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"
URL = f"s3://{BUCKET}/kv"
CHUNKS = 24


def policy(rights: int) -> dict[str, Any]:
    """The policy with the first of its rights: two to load, three to store, four to delete."""
    found = re.search(r"### Rights\n.*?```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    content = json.loads(found[1].replace(":::BUCKET", f":::{BUCKET}"))
    return {"Statement": content["Statement"][:rights]}


def allows(of: dict[str, Any], method: str, place: str) -> bool:
    """Whether a policy allows a request, and tells a miss from a mistake where it probes."""
    parts = urlsplit(place)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    if method == "POST" and "delete" in query:
        # The body names the objects.
        return any(_matches(s, "s3:DeleteObject", f"{arn}/kv/x", "") for s in of["Statement"])
    if not key:
        listing = method == "GET" and "list-type" in query
        asked = [("s3:ListBucket" if listing else method, arn, query.get("prefix", [""])[0])]
    elif method == "HEAD":
        # Without the right to list, S3 answers 403 instead of 404.
        asked = [("s3:GetObject", f"{arn}/{key}", key), ("s3:ListBucket", arn, key)]
    else:
        action = {"GET": "s3:GetObject", "PUT": "s3:PutObject"}.get(method, method)
        asked = [(action, f"{arn}/{key}", key)]
    return all(any(_matches(s, *one) for s in of["Statement"]) for one in asked)


def _matches(statement: dict[str, Any], action: str, resource: str, prefix: str) -> bool:
    assert statement["Effect"] == "Allow"
    patterns = statement.get("Condition", {"StringLike": {"s3:prefix": ["*"]}})
    assert list(patterns) == ["StringLike"] and list(patterns["StringLike"]) == ["s3:prefix"]
    return (
        statement["Action"] == action
        and fnmatchcase(resource, statement["Resource"])
        and any(fnmatchcase(prefix, one) for one in patterns["StringLike"]["s3:prefix"])
    )


def taken(store: ScriptedS3) -> list[tuple[str, str]]:
    """Return method and path with query of each request since the last look."""
    requests = [(request.method, request.url) for request in store.requests]
    store.requests.clear()
    return requests


def blob(tokens: Sequence[int]) -> BlobKV:
    return BlobKV(torch.ones(2, 2, len(tokens), 64, dtype=torch.bfloat16))


def test_policies_allow_exactly_what_is_asked_for(store: ScriptedS3, tmp_path: Path) -> None:
    """Store, look up, load, repair, list and copy: all that engines and people do."""
    tokens, options = prompt(0, 3), store.options()
    with (
        open_shelf(URL, storage_options=options) as shelf,
        ChunkCache(shelf, namespace()) as cache,
    ):
        assert cache.store(tokens, kv=blob(tokens)).complete
        assert cache.store(tokens, kv=blob(tokens)).complete
        assert cache.lookup(tokens + prompt(1, 2)) == 3 * CHUNK
        [bad] = [row.name for row in shelf.objects() if "-1-0of2" in row.name]
        body, changed = store.objects[f"{BUCKET}/kv/{bad}"]
        store.objects[f"{BUCKET}/kv/{bad}"] = body[:-1] + bytes([body[-1] ^ 1]), changed
        assert int(cache.retrieve(tokens, kv=blob(tokens)).sum()) == CHUNK
        assert cache.store(tokens, kv=blob(tokens)).complete
    with (
        open_shelf(URL, storage_options=options) as shelf,
        ChunkCache(shelf, namespace()) as cache,
    ):
        assert int(cache.retrieve(tokens, kv=blob(tokens)).sum()) == 3 * CHUNK
    for arguments in (
        ["ls", URL],
        ["verify", URL, f"{URL}/{bad}", "--long"],
        ["copy", URL, str(tmp_path / "copied")],
        ["copy", str(tmp_path / "copied"), URL],
    ):
        result = CliRunner().invoke(
            app, arguments, env={"KVSHELF_STORAGE_OPTIONS": json.dumps(options)}
        )
        assert result.exit_code == 0, result.output
    # A process that stores asks once whether it may delete, and does without it.
    requests = [one for one in taken(store) if one[1] != f"/{BUCKET}?delete"]
    storing, loading = policy(3), policy(2)
    refused = [(m, p) for m, p in requests if not allows(storing, m, p)]
    assert refused == []
    # None of it can be left out, and engines that only load need all but the right to store.
    for statement in storing["Statement"]:
        rest = [other for other in storing["Statement"] if other is not statement]
        assert not all(allows({"Statement": rest}, m, p) for m, p in requests), statement
    assert {m for m, p in requests if not allows(loading, m, p)} == {"PUT"}
    # Another prefix of the bucket is out of reach.
    assert not allows(storing, "GET", f"/{BUCKET}/other/x")
    assert not allows(storing, "GET", f"/{BUCKET}?list-type=2&prefix=other%2F")


def test_deleting_takes_one_more_right(store: ScriptedS3) -> None:
    url = f"{URL}-swept"
    with (
        open_shelf(url, storage_options=store.options()) as shelf,
        ChunkCache(shelf, namespace()) as cache,
    ):
        assert cache.store(prompt(0, 3), kv=blob(prompt(0, 3))).complete
    taken(store)
    asked = {}
    for arguments in (["gc", url], ["gc", url, "--yes"]):
        result = CliRunner().invoke(
            app,
            [*arguments, "--max-bytes", "1B"],
            env={"KVSHELF_STORAGE_OPTIONS": json.dumps(store.options())},
        )
        assert result.exit_code == 0, result.output
        asked[arguments[-1]] = [(m, p.replace("kv-swept", "kv")) for m, p in taken(store)]
    loading, storing, sweeping = map(policy, (2, 3, 4))
    assert all(allows(loading, *request) for request in asked[url])
    assert [request for request in asked["--yes"] if not allows(sweeping, *request)] == []
    refused = [request for request in asked["--yes"] if not allows(storing, *request)]
    # One deletes all objects, three what was made to learn the storage's time and conditions. No
    # object is looked at: the listing is seconds old.
    assert [method for method, _ in refused] == ["POST"] * 4
    assert not [place for method, place in asked["--yes"] if method == "HEAD" and "-0of" in place]


def test_requests_of_a_look_up_and_a_load(store: ScriptedS3) -> None:
    """The figures of the documentation."""
    tokens = prompt(5, CHUNKS)
    shards = 2
    with (
        open_shelf(URL, storage_options=store.options()) as shelf,
        ChunkCache(shelf, namespace()) as cache,
    ):
        shelf.view(cache.fmt).probe([])
        taken(store)
        assert cache.store(tokens, kv=blob(tokens)).complete
        # The description is written more than once, by some threads at once and to learn what
        # is heeded; no object is.
        puts = [place for method, place in taken(store) if method == "PUT"]
        assert sum(place.endswith(".safetensors") for place in puts) == CHUNKS * shards
        more = prompt(7, CHUNKS)
        assert cache.store(more, kv=blob(more)).complete
        requests = Counter((method, place) for method, place in taken(store))
        assert sum(method == "PUT" for method, _ in requests) == CHUNKS * shards
        # The look-up that store() begins with asks once at most.
        assert max(requests.values()) == 1
    for found in (tokens, prompt(6, CHUNKS)):
        with (
            open_shelf(URL, storage_options=store.options()) as shelf,
            ChunkCache(shelf, namespace()) as cache,
        ):
            taken(store)
            hit = cache.lookup(found)
            looked = Counter(method for method, _ in taken(store))
            assert looked["HEAD"] <= 100
            assert looked["GET"] <= 1  # the folders of the shelf, once a minute
            if hit:
                cache.retrieve(found, kv=blob(found))
                loaded = [(method, place) for method, place in taken(store)]
                objects = [one for one in loaded if one[1].endswith(".safetensors")]
                gets = [place for method, place in objects if method == "GET"]
                assert len(gets) == hit // CHUNK * shards
