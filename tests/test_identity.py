"""Identity: what the golden vectors and a second implementation say, and what users notice."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import unicodedata
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf import identity
from kvshelf.errors import ConfigError, KVShelfError, ObjectNameError, TransientStorageError
from kvshelf.identity import (
    FIELDS,
    Chunk,
    FingerprintCache,
    FingerprintCancelledError,
    KeyChain,
    MultimodalItem,
    Namespace,
    ParsedName,
    group_of_salt,
    lora_digest,
    object_name,
    parse_namespace_folder,
    parse_object_name,
    parse_path,
    sampled_fingerprint,
    slugify,
    weight_files,
    weights_fingerprint,
)

GOLDEN = Path(__file__).parent / "golden" / "format"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "vectors.json").read_text())


def load_reference() -> Any:
    spec = importlib.util.spec_from_file_location("kvshelf_reference", GOLDEN / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
VALUES = {
    "int": INTEGERS,
    "str": TEXT,
    "list[int]": st.lists(INTEGERS, max_size=4),
    "list[str]": st.lists(TEXT, max_size=4),
}
RECORDS = st.fixed_dictionaries(
    {"format": st.just("kvshelf/1")},
    optional={name: VALUES[kind] for name, kind in FIELDS.items() if name != "format"},
)
TOKENS = st.integers(0, 2**32 - 1)
ITEMS = st.lists(st.tuples(TEXT, st.integers(0, 60), st.integers(1, 50)), max_size=5)


# --------------------------------------------------------------------------- namespace


@pytest.mark.parametrize("name", VECTORS["namespaces"])
def test_golden_namespaces(name: str) -> None:
    vector = VECTORS["namespaces"][name]
    namespace = Namespace(vector["record"], slug="org/Some Model")
    assert namespace.encoded == vector["encoded"].encode()
    assert namespace.digest.hex() == vector["digest"]
    assert namespace.folder == "some-model-" + vector["digest"][:16]
    assert Namespace.from_bytes(namespace.encoded) == namespace


@given(RECORDS)
def test_namespaces_as_the_second_implementation_writes_them(record: dict[str, Any]) -> None:
    namespace = Namespace(record)
    assert namespace.encoded == reference.canonical(record)
    assert namespace.digest == reference.digest(record)
    again = Namespace.from_bytes(namespace.encoded)
    assert again == namespace
    assert hash(again) == hash(namespace)
    assert again.record == namespace.record


def test_the_documented_fields_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "format.md").read_text()
    table = text.split("### Fields")[1].split("### Fingerprint")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w\[\]]+) \|", table, re.MULTILINE)
    assert dict(rows) == dict(FIELDS)
    assert len(rows) == len(FIELDS)


@given(RECORDS, st.randoms())
def test_order_and_normal_form_of_the_input_do_not_matter(record: dict[str, Any], rng: Any) -> None:
    def decompose(value: Any) -> Any:
        if isinstance(value, str):
            return unicodedata.normalize("NFD", value)
        return [decompose(item) for item in value] if isinstance(value, list) else value

    fields = [(name, decompose(value)) for name, value in record.items()]
    rng.shuffle(fields)
    assert Namespace(dict(fields)) == Namespace(record)


@pytest.mark.parametrize(
    "field",
    [
        {"layers": True},
        {"layers": 1.5},
        {"layers": None},
        {"layers": 2**53},
        {"layers": "1"},
        {"weights": 1},
        {"weights": "\ud800"},
        {"stages": 1},
        {"stages": "1"},
        {"stages": [1.0]},
        {"stages": [[1]]},
        {"layouts": ["canonical", 1]},
        {"model": "/models/x"},
        {"format": "kvshelf/2"},
    ],
)
def test_records_that_cannot_be_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        Namespace({"format": "kvshelf/1", **field})
    with pytest.raises(ConfigError, match="format"):
        Namespace({})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b'{"format": "kvshelf/1"}',
        b'{"format":"kvshelf/1"}\n',
        b'{"format":"kvshelf/1","format":"kvshelf/1"}',
        b'{"format":"kvshelf\\/1"}',
        b'{"format":"kvshelf/1","chunk_size":1}',
        b'{"chunk_size":1e2,"format":"kvshelf/1"}',
        b'{"chunk_size":NaN,"format":"kvshelf/1"}',
        b'{"chunk_size":' + b"9" * 5000 + b',"format":"kvshelf/1"}',
        b'{"format":"kvshelf/1","version":"e\xcc\x81"}',
        b'{"format":"kvshelf/1","version":"\\u00e9"}',
        b'{"format":"kvshelf/1","version":"\\ud800"}',
        b'{"format":"kvshelf/1","version":null}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bytes_that_are_not_canonical_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        Namespace.from_bytes(data)


def test_messages_about_forged_bytes_are_short() -> None:
    with pytest.raises(ConfigError) as caught:
        Namespace.from_bytes(b'{"format":"' + b"x" * 100_000 + b'"}')
    assert len(str(caught.value)) <= 400


def test_namespaces_are_immutable_and_copy() -> None:
    namespace = Namespace({"format": "kvshelf/1", "stages": [1, 2]}, "m")
    with pytest.raises(AttributeError):
        namespace.digest = b""
    with pytest.raises(AttributeError):
        del namespace.slug
    stages = namespace.record["stages"]
    assert isinstance(stages, list)
    stages.clear()
    assert namespace.record["stages"] == [1, 2]
    assert copy.deepcopy(namespace) == namespace
    assert namespace != namespace.encoded
    assert namespace.folder in repr(namespace)


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("/models/Qwen 3_32b/", "qwen-3_32b"),
        ("Ä" * 50, "-" * 40),
        ("", "model"),
        ("/", "model"),
    ],
)
def test_slugs(model: str, slug: str) -> None:
    assert slugify(model) == slug


# --------------------------------------------------------------------------- chunk keys


@pytest.mark.parametrize("vector", VECTORS["keys"])
def test_golden_keys(vector: dict[str, Any]) -> None:
    chain = KeyChain(
        bytes.fromhex(vector["namespace_digest"]),
        vector["chunk_size"],
        salt=vector.get("salt", ""),
        lora_digest=bytes.fromhex(vector.get("lora", "")),
        items=[MultimodalItem(*item) for item in vector.get("items", [])],
    )
    chain.extend(vector["tokens"])
    tail = chain.tail()
    assert chain.root.hex() == vector["root"]
    assert [chunk.key.hex() for chunk in chain.chunks] == vector["keys"]
    assert (tail.key.hex() if tail else None) == vector["tail"]


@given(
    tokens=st.lists(TOKENS, max_size=60),
    chunk_size=st.integers(1, 9),
    salt=TEXT,
    lora=st.sampled_from([b"", bytes(32), bytes(range(32))]),
    items=ITEMS,
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_keys_as_the_second_implementation_makes_them(
    tokens: list[int],
    chunk_size: int,
    salt: str,
    lora: bytes,
    items: list[tuple[str, int, int]],
    cuts: list[int],
) -> None:
    digest = hashlib.sha256(b"namespace").digest()
    root, keys, tail_key = reference.chain(digest, chunk_size, tokens, salt, lora, items)
    chain = KeyChain(
        digest,
        chunk_size,
        salt=salt,
        lora_digest=lora,
        items=[MultimodalItem(*item) for item in items],
        group="0123456789abcdef",
    )
    completed = []
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(places):
        completed += chain.extend(tokens[start:end])
        chain.tail()
        assert chain.tokens == end
    assert completed == chain.chunks
    assert [chunk.key for chunk in chain.chunks] == keys
    assert [chunk.parent for chunk in chain.chunks] == [root, *keys][: len(keys)]
    assert [chunk.index for chunk in chain.chunks] == list(range(len(keys)))
    assert all(c.tokens == chunk_size and not c.tail for c in chain.chunks)
    tail = chain.tail()
    if tail_key is None:
        assert tail is None
    else:
        parent = [root, *keys][len(keys)]
        count = len(tokens) % chunk_size
        assert tail == Chunk(tail_key, parent, len(keys), count, True, "0123456789abcdef")


@pytest.mark.parametrize(
    "other",
    [
        {"digest": bytes(31) + b"\1"},
        {"salt": "t"},
        {"lora_digest": bytes(32)},
        {"items": [MultimodalItem("h", 7, 1)]},
        {"items": [MultimodalItem("h", 0, 1)]},
        {"tokens": [0, 1, 2, 3, 4, 5, 6, 8]},
        {"tokens": [1, 1, 2, 3, 4, 5, 6, 7]},
    ],
)
def test_whatever_decides_kv_values_changes_the_key(other: dict[str, Any]) -> None:
    def last(tokens: list[int], digest: bytes = bytes(32), **options: Any) -> bytes:
        chain = KeyChain(digest, 4, **options)
        return chain.extend(tokens)[-1].key

    base: dict[str, Any] = {"tokens": [0, 1, 2, 3, 4, 5, 6, 7]}
    assert last(**base) != last(**{**base, **other})


def test_the_group_does_not_change_keys_and_later_items_not_earlier_keys() -> None:
    digest = bytes(32)
    tokens = list(range(8))
    plain = KeyChain(digest, 4)
    grouped = KeyChain(digest, 4, group=group_of_salt("tenant"))
    imaged = KeyChain(digest, 4, items=[MultimodalItem("h", 4, 2)])
    for chain in (plain, grouped, imaged):
        chain.extend(tokens)
    assert [c.key for c in plain.chunks] == [c.key for c in grouped.chunks]
    assert {c.group for c in grouped.chunks} == {hashlib.sha256(b"tenant").hexdigest()[:16]}
    assert plain.chunks[0].key == imaged.chunks[0].key
    assert plain.chunks[1].key != imaged.chunks[1].key
    assert group_of_salt(None) == group_of_salt("") == "_"


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None, 10**30])
def test_tokens_out_of_range_are_named_and_change_nothing(token: Any) -> None:
    chain = KeyChain(bytes(32), 4)
    chain.extend([1, 2, 3, 4, 5])
    before = [*chain.chunks]
    with pytest.raises(ValueError, match=r"token 11 is "):
        chain.extend([6, 7, 8, 9, 10, 11, token])
    assert chain.chunks == before
    assert chain.tokens == 5
    chain.extend([6, 7, 8])
    whole = KeyChain(bytes(32), 4)
    whole.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.chunks == whole.chunks


def test_any_sequence_of_tokens_will_do() -> None:
    tokens = list(range(100, 109))
    chains = [KeyChain(bytes(32), 4) for _ in range(3)]
    for chain, form in zip(chains, (tokens, tuple(tokens), array("I", tokens)), strict=True):
        chain.extend(form)
    assert chains[0].chunks == chains[1].chunks == chains[2].chunks
    assert chains[0].tail() == chains[1].tail() == chains[2].tail()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"namespace_digest": b"short"}, ValueError),
        ({"lora_digest": b"short"}, ValueError),
        ({"chunk_size": 0}, ConfigError),
        ({"chunk_size": 2**32}, ConfigError),
        ({"chunk_size": "256"}, ConfigError),
        ({"group": "tenant"}, ObjectNameError),
        ({"items": [MultimodalItem("h", -1, 4)]}, ValueError),
        ({"items": [MultimodalItem("h", 0, -4)]}, ValueError),
    ],
)
def test_chains_that_cannot_be_are_refused(arguments: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        KeyChain(**{"namespace_digest": bytes(32), "chunk_size": 4, **arguments})


# --------------------------------------------------------------------------- names

KEYS = st.binary(min_size=32, max_size=32)
GROUPS = st.one_of(st.just("_"), st.binary(min_size=8, max_size=8).map(bytes.hex))


@pytest.mark.parametrize("vector", VECTORS["names"])
def test_golden_names(vector: dict[str, Any]) -> None:
    tail = vector["tail"]
    chunk = Chunk(
        bytes.fromhex(vector["key"]),
        bytes(32),
        vector["index"],
        tail or 256,
        tail is not None,
        vector["group"],
    )
    assert object_name(chunk, vector["shard"], vector["shards"]) == vector["name"]


@given(KEYS, st.integers(0, 2**32 - 1), st.none() | st.integers(1, 2**32 - 1), GROUPS, st.data())
def test_names_and_their_inverse(
    key: bytes, index: int, tail: int | None, group: str, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, 2**32 - 1))
    shard = data.draw(st.integers(0, shards - 1))
    chunk = Chunk(key, bytes(32), index, tail or 256, tail is not None, group)
    name = object_name(chunk, shard, shards)
    assert name == reference.object_name(group, key, index, tail, shard, shards)
    assert parse_object_name(name) == ParsedName(key, index, shard, shards, tail, group)
    folder = f"llama-3.1-8b-{key.hex()[:16]}"
    assert parse_path(f"{folder}/{name}") == ParsedName(
        key, index, shard, shards, tail, group, folder
    )
    assert parse_path(name) is None
    assert parse_object_name(f"{folder}/{name}") is None


KEY = "ab" * 32
GOOD = f"_/ab/{KEY}-12t7-0of8.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "",
        GOOD + "\n",
        " " + GOOD,
        "/" + GOOD,
        GOOD.replace("ab", "AB"),
        GOOD.replace("/ab/", "/ac/"),
        GOOD.replace("_/", ""),
        GOOD.replace("_/", "__/"),
        GOOD.replace("_/", "0123456789ABCDEF/"),
        GOOD.replace("-12", "-012"),
        GOOD.replace("-12", "-"),
        GOOD.replace("-12", "-+12"),
        GOOD.replace("-12", "-1_2"),
        GOOD.replace("-12", "-١٢"),
        GOOD.replace("-12", "-4294967296"),
        GOOD.replace("t7", "t0"),
        GOOD.replace("t7", "t07"),
        GOOD.replace("t7", "t"),
        GOOD.replace("t7", "t4294967296"),
        GOOD.replace("t7", "T7"),
        GOOD.replace("0of8", "8of8"),
        GOOD.replace("0of8", "0of0"),
        GOOD.replace("0of8", "00of8"),
        GOOD.replace("0of8", "0of08"),
        GOOD.replace(".safetensors", ".safetensor"),
        GOOD + ".tmp",
        f"_/ab/.{KEY}-12-0of8.safetensors.0123456789abcdef.tmp",
        "namespace.json",
        ".kvshelf/bad/x",
    ],
)
def test_foreign_names_are_not_objects(name: str) -> None:
    assert parse_object_name(GOOD) is not None
    assert parse_object_name(name) is None


@given(st.text(max_size=40) | st.from_regex(r"_/ab/(ab){32}-[0-9t]{1,4}-[0-9]of[0-9]\.safetensors"))
def test_a_name_that_parses_is_spelled_as_we_spell_it(name: str) -> None:
    parsed = parse_object_name(name)
    if parsed is not None:
        tail = parsed.tail_tokens
        chunk = Chunk(parsed.key, bytes(32), parsed.index, tail or 1, bool(tail), parsed.group)
        assert object_name(chunk, parsed.shard, parsed.shards) == name


@pytest.mark.parametrize(
    ("chunk", "shard", "shards"),
    [
        (Chunk(bytes(32), bytes(32), 0, 4), 1, 1),
        (Chunk(bytes(32), bytes(32), 0, 4), -1, 1),
        (Chunk(bytes(32), bytes(32), 0, 4), 0, 2**32),
        (Chunk(bytes(31), bytes(32), 0, 4), 0, 1),
        (Chunk(bytes(32), bytes(32), 2**32, 4), 0, 1),
        (Chunk(bytes(32), bytes(32), 0, 0, True), 0, 1),
        (Chunk(bytes(32), bytes(32), 0, 4, False, "../../etc"), 0, 1),
    ],
)
def test_names_that_cannot_be_are_refused(chunk: Chunk, shard: int, shards: int) -> None:
    with pytest.raises(ObjectNameError):
        object_name(chunk, shard, shards)


def test_namespace_folders() -> None:
    namespace = Namespace({"format": "kvshelf/1"}, "A b")
    assert parse_namespace_folder(namespace.folder) == namespace.digest.hex()[:16]
    for name in ("", ".kvshelf", "_", "model", f"-{KEY[:16]}", f"A-{KEY[:16]}", f"a-{KEY[:15]}"):
        assert parse_namespace_folder(name) is None
    assert parse_path(f"not a folder/{GOOD}") is None
    assert parse_path(f"m-{KEY[:16]}/namespace.json") is None


# --------------------------------------------------------------------------- weights


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def write_index(folder: Path, *files: str, name: str = "model.safetensors.index.json") -> None:
    weight_map = {f"weight{i}": file for i, file in enumerate(files)}
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


MODELS: list[tuple[list[str], list[str], str, list[str]]] = [
    # files, files of the index, load format, expected
    (["model.safetensors"], [], "auto", ["model.safetensors"]),
    (["b.safetensors", "a.safetensors"], [], "auto", ["a.safetensors", "b.safetensors"]),
    (["a.safetensors", "b.safetensors"], ["a.safetensors"], "auto", ["a.safetensors"]),
    (["a.safetensors", "pytorch_model.bin"], [], "auto", ["a.safetensors"]),
    (["model.safetensors", "consolidated.safetensors"], [], "auto", ["consolidated.safetensors"]),
    (
        ["model.safetensors", "consolidated.safetensors"],
        [],
        "mistral",
        ["consolidated.safetensors"],
    ),
    (
        ["model.safetensors", "consolidated.safetensors"],
        ["model.safetensors"],
        "hf",
        ["model.safetensors"],
    ),
    (["a.bin", "b.bin", "training_args.bin", "optimizer.bin"], [], "auto", ["a.bin", "b.bin"]),
    (["a.bin", "b.pt"], [], "auto", ["a.bin"]),
    (["b.pt", "scheduler.pt"], [], "auto", ["b.pt"]),
    (["a.bin", "b.pt"], [], "pt", ["b.pt"]),
    (["a.bin", "b.safetensors"], [], "npcache", ["a.bin"]),
    (["a.bin", "b.safetensors"], [], "safetensors", ["b.safetensors"]),
    ([".hidden.safetensors", "a.safetensors"], [], "auto", ["a.safetensors"]),
    (["a.safetensors", "sub/b.safetensors"], [], "auto", ["a.safetensors"]),
]


@pytest.mark.parametrize(("files", "index", "load_format", "expected"), MODELS)
def test_weight_files(
    tmp_path: Path, files: list[str], index: list[str], load_format: str, expected: list[str]
) -> None:
    touch(tmp_path, "config.json", *files)
    if index:
        write_index(tmp_path, *index)
    assert [path.name for path in weight_files(tmp_path, load_format)] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weight_files_are_those_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    for number, (files, index, load_format, _) in enumerate(MODELS):
        folder = tmp_path / str(number)
        touch(folder, "config.json", *files)
        if index:
            write_index(folder, *index)
        loader = DefaultModelLoader(LoadConfig(load_format=load_format))
        _, theirs, _, _ = loader._prepare_weights(str(folder), None, None, True, None)
        assert weight_files(folder, load_format) == sorted(map(Path, theirs))


def test_one_gguf_file_is_its_own_weights(tmp_path: Path) -> None:
    touch(tmp_path, "model.gguf", "other.gguf")
    assert weight_files(tmp_path / "model.gguf") == [tmp_path / "model.gguf"]
    assert len(weight_files(tmp_path, "gguf")) == 2


def test_models_without_weight_files_say_what_to_set(tmp_path: Path) -> None:
    touch(tmp_path, "config.json")
    with pytest.raises(ConfigError, match="weights"):
        weight_files(tmp_path)
    with pytest.raises(ConfigError, match="weights"):
        weight_files(tmp_path / "absent")
    touch(tmp_path, "a.safetensors")
    for load_format in ("dummy", "tensorizer", "my-plugin"):
        with pytest.raises(ConfigError, match="weights"):
            weight_files(tmp_path, load_format)
    write_index(tmp_path, "a.safetensors", "gone.safetensors")
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="index"):
        weight_files(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Two weight files whose content is their name."""
    folder = tmp_path / "model"
    touch(folder, "model-1.safetensors", "model-2.safetensors")
    return weight_files(folder)


@pytest.fixture
def cache(tmp_path: Path) -> FingerprintCache:
    return FingerprintCache(tmp_path / "cache" / "kvshelf" / "fingerprints.json")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of the test be a minute old."""
    now = time.time_ns
    monkeypatch.setattr(identity.time, "time_ns", lambda: now() + 60 * 10**9)


def test_golden_fingerprint(tmp_path: Path) -> None:
    vector = VECTORS["weights"]
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, value in vector["files"].items():
        algorithm, digest = value.split(":")
        if algorithm == "sha256":
            (blobs / digest).write_bytes(b"not even read")
            (snapshot / name).symlink_to(Path("../../blobs") / digest)
        else:
            (snapshot / name).write_bytes(b"file")
    files = weight_files(snapshot)
    assert weights_fingerprint(files, cache=FingerprintCache(None)) == vector["fingerprint"]
    assert weights_fingerprint(list(reversed(files))) == vector["fingerprint"]


def test_links_that_are_no_hub_blobs_are_hashed(tmp_path: Path) -> None:
    touch(tmp_path, "model/a.safetensors", "elsewhere/blobs/" + "z" * 64)
    plain = weights_fingerprint(weight_files(tmp_path / "model"))
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked" / "a.safetensors"
    link.symlink_to(tmp_path / "model" / "a.safetensors")
    assert weights_fingerprint([link]) == plain
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere" / "blobs" / ("0" * 64))
    with pytest.raises(FileNotFoundError):
        weights_fingerprint([link])


def test_content_and_names_decide_and_nothing_else(model: list[Path], tmp_path: Path) -> None:
    first = weights_fingerprint(model)
    copied = [tmp_path / path.name for path in model]
    for path, other in zip(model, copied, strict=True):
        other.write_bytes(path.read_bytes())
    assert weights_fingerprint(copied) == first
    renamed = copied[0].rename(tmp_path / "renamed.safetensors")
    assert weights_fingerprint([renamed, copied[1]]) != first
    model[1].write_bytes(model[1].read_bytes()[:-1] + b"X")
    assert weights_fingerprint(model) != first


@pytest.mark.usefixtures("later")
def test_hashes_are_remembered_until_the_file_changes(
    model: list[Path], cache: FingerprintCache
) -> None:
    assert cache.path is not None
    first = weights_fingerprint(model, cache=cache)
    content = json.loads(cache.path.read_text())
    assert len(content["xxh3-128"]) == 2
    # Proof that the memory is used: a false memory gives a false fingerprint.
    lies = dict.fromkeys(content["xxh3-128"], "0" * 32)
    cache.path.write_text(json.dumps({"xxh3-128": lies}))
    false = weights_fingerprint(model, cache=cache)
    assert false != first
    for path in model:
        path.write_bytes(path.read_bytes())
    assert weights_fingerprint(model, cache=cache) == first


def test_a_file_written_just_now_is_not_remembered(
    model: list[Path], cache: FingerprintCache
) -> None:
    weights_fingerprint(model, cache=cache)
    assert cache.path is not None
    assert not cache.path.exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff", b"[]", b"{}", b'{"xxh3-128":[]}', b'{"xxh3-128":{"a":1}}', b"[" * 100_000],
)
def test_a_damaged_cache_only_costs_hashing_again(
    model: list[Path], cache: FingerprintCache, damage: bytes
) -> None:
    first = weights_fingerprint(model, cache=cache)
    assert cache.path is not None
    cache.path.write_bytes(damage)
    assert weights_fingerprint(model, cache=cache) == first
    assert len(json.loads(cache.path.read_text())["xxh3-128"]) == 2


@pytest.mark.usefixtures("later")
def test_a_cache_that_cannot_be_written_is_no_error(model: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fingerprint = weights_fingerprint(model)
    unwritable = FingerprintCache(tmp_path / "file" / "fingerprints.json")
    assert weights_fingerprint(model, cache=unwritable) == fingerprint


@pytest.mark.usefixtures("later")
def test_the_cache_is_private(model: list[Path], cache: FingerprintCache) -> None:
    weights_fingerprint(model, cache=cache)
    assert cache.path is not None
    assert cache.path.parent.stat().st_mode & 0o077 == 0
    assert {path.name for path in cache.path.parent.iterdir()} == {
        "fingerprints.json",
        "fingerprints.json.lock",
    }


def test_several_processes_share_a_cache(tmp_path: Path, cache: FingerprintCache) -> None:
    code = (
        "import os, sys\n"
        "from kvshelf.identity import FingerprintCache\n"
        "cache = FingerprintCache(sys.argv[1])\n"
        "for path in sys.argv[2:]:\n"
        "    cache.put([(os.stat(path), '0' * 32)])\n"
    )
    touch(tmp_path, *(f"{n}" for n in range(24)))
    files = [str(tmp_path / f"{n}") for n in range(24)]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(cache.path), *files[n::3]])
        for n in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert all(cache.get(os.stat(path)) == "0" * 32 for path in files)


def test_where_the_cache_usually_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert FingerprintCache.default_path() == Path("/x/kvshelf/fingerprints.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    usual = Path("/home/somebody/.cache/kvshelf/fingerprints.json")
    assert FingerprintCache.default_path() == usual
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert FingerprintCache.default_path() == usual


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.readv
    changes = iter([b"first change", b"second change"])
    ends = []

    def readv(descriptor: int, buffers: Any) -> int:
        count = real(descriptor, buffers)
        change = next(changes, None)
        if change is not None:
            model[0].write_bytes(change)
            ends.append(change)
        return count

    monkeypatch.setattr(identity.os, "readv", readv)
    found = weights_fingerprint(model, threads=1)
    monkeypatch.undo()
    assert ends == [b"first change", b"second change"]
    assert found == weights_fingerprint(model)


def test_a_file_that_never_rests_is_an_error(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.readv
    number = iter(range(10**9))

    def readv(descriptor: int, buffers: Any) -> int:
        model[0].write_bytes(b"x" * (1 + next(number) % 7))
        return real(descriptor, buffers)

    monkeypatch.setattr(identity.os, "readv", readv)
    with pytest.raises(TransientStorageError, match="keeps changing"):
        weights_fingerprint(model[:1])


def test_cancelling_does_not_wait_for_a_read_that_hangs(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    release = threading.Event()

    def readv(descriptor: int, buffers: Any) -> int:
        reading.set()
        release.wait(60)
        return 0

    monkeypatch.setattr(identity.os, "readv", readv)
    cancel = threading.Event()
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            weights_fingerprint(model, cancel=cancel)
        except KVShelfError as error:
            outcome.append(error)

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    assert reading.wait(60)
    cancel.set()
    caller.join(30)
    try:
        assert not caller.is_alive()
        assert isinstance(outcome[0], FingerprintCancelledError)
    finally:
        release.set()


def test_hashing_on_other_processors_gives_the_same(model: list[Path]) -> None:
    own = os.sched_getaffinity(0)
    aside = weights_fingerprint(
        model, threads=2, on_thread_start=lambda: os.sched_setaffinity(0, {min(own)})
    )
    assert aside == weights_fingerprint(model)
    # Only the hashing threads step aside.
    assert os.sched_getaffinity(0) == own


def test_files_larger_than_the_read_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(os.urandom(100_000))
    whole = weights_fingerprint([path])
    monkeypatch.setattr(identity, "_READ_BYTES", 4096)
    assert weights_fingerprint([path]) == whole


def test_what_cannot_be_fingerprinted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight files"):
        weights_fingerprint([])
    with pytest.raises(ConfigError, match="no weight files"):
        sampled_fingerprint([])
    with pytest.raises(FileNotFoundError):
        weights_fingerprint([tmp_path / "gone.safetensors"])
    fifo = tmp_path / "pipe.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="regular file"):
        weights_fingerprint([fifo])
    touch(tmp_path, "a\nb.safetensors")
    with pytest.raises(ConfigError, match="line break"):
        weights_fingerprint([tmp_path / "a\nb.safetensors"])


def test_samples_see_size_start_and_end(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    content = bytearray(os.urandom(2_000_000))
    path.write_bytes(content)
    first = sampled_fingerprint([path])
    assert first.startswith("sampled:")
    assert sampled_fingerprint([path]) == first
    seen = {first}
    for place in (0, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        seen.add(sampled_fingerprint([path]))
    path.write_bytes(content + b"\0")
    seen.add(sampled_fingerprint([path]))
    assert len(seen) == 4


def test_lora_adapters_by_content(tmp_path: Path) -> None:
    for name in ("one", "two"):
        touch(tmp_path / name, "adapter_config.json", "adapter_model.safetensors", "README.md")
    first = lora_digest(tmp_path / "one")
    assert len(first) == 32
    assert lora_digest(tmp_path / "two") == first
    (tmp_path / "two" / "README.md").write_text("other")
    touch(tmp_path / "two", "adapter_model.bin")
    assert lora_digest(tmp_path / "two") == first
    (tmp_path / "two" / "adapter_config.json").write_text("{}")
    assert lora_digest(tmp_path / "two") != first
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"")
    assert lora_digest(tmp_path / "one") != first
    (tmp_path / "one" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="adapter_config"):
        lora_digest(tmp_path / "one")


@settings(max_examples=20)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}\.bin", fullmatch=True), st.binary(), min_size=1))
def test_fingerprints_as_the_second_implementation_makes_them(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    digests = {
        name: "xxh3-128:" + reference.xxhash.xxh3_128(content).hexdigest()
        for name, content in contents.items()
    }
    files = [folder / name for name in contents]
    assert weights_fingerprint(files) == reference.fingerprint(digests)
