"""Fingerprints of weights: what golden vectors and a second implementation say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError, KVShelfError, TransientStorageError
from kvshelf.weights import fingerprints
from kvshelf.weights.fingerprints import (
    FingerprintCache,
    FingerprintCancelledError,
    lora_digest,
    sampled_fingerprint,
    stamp_of,
    weight_files,
    weights_fingerprint,
)
from tests.format.golden_format import VECTORS, reference
from tests.support.threads import none_can_be_started


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def write_index(folder: Path, *files: str) -> None:
    weight_map = {f"weight{i}": file for i, file in enumerate(files)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(autouse=True)
def every_file_is_closed() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


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


#: Files, load format, patterns with which the model names its files itself, expected.
PATTERNS: list[tuple[list[str], str, list[str], list[str]]] = [
    (
        ["a.safetensors", "vae/v.safetensors", "transformer/t.safetensors", "vision_encoder/e.bin"],
        "auto",
        ["[tv]*er/*.safetensors"],
        ["transformer/t.safetensors"],
    ),
    (["a.safetensors", "head.safetensors"], "auto", ["head.safetensors"], ["head.safetensors"]),
    (["a.safetensors", "linear.pt"], "safetensors", ["no.pt", "linear.pt"], ["linear.pt"]),
    ([".t/a.safetensors", "t/a.safetensors"], "auto", ["*/*.safetensors"], ["t/a.safetensors"]),
]


@pytest.mark.parametrize(("files", "load_format", "patterns", "expected"), PATTERNS)
def test_weight_files_that_the_model_names_itself(
    tmp_path: Path, files: list[str], load_format: str, patterns: list[str], expected: list[str]
) -> None:
    touch(tmp_path, *files)
    # The index is that of other files.
    write_index(tmp_path, "a.safetensors")
    found = weight_files(tmp_path, load_format, patterns=patterns)
    assert [str(path.relative_to(tmp_path)) for path in found] == expected


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.filterwarnings("default")
def test_weight_files_are_those_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    models = [(files, index, load_format, None) for files, index, load_format, _ in MODELS]
    named = [(files, ["a.safetensors"], *more) for files, *more, _ in PATTERNS]
    for number, (files, index, load_format, patterns) in enumerate([*models, *named]):
        folder = tmp_path / str(number)
        touch(folder, *files)
        if index:
            write_index(folder, *index)
        loader = DefaultModelLoader(LoadConfig(load_format=load_format))
        _, theirs, _, _ = loader._prepare_weights(str(folder), None, None, True, patterns)
        found = weight_files(folder, load_format, patterns=patterns)
        assert found == sorted(map(Path, theirs))


def test_one_gguf_file_is_its_own_weights(tmp_path: Path) -> None:
    touch(tmp_path, "model.gguf", "other.gguf")
    assert weight_files(tmp_path / "model.gguf") == [tmp_path / "model.gguf"]
    assert len(weight_files(tmp_path, "gguf")) == 2


@pytest.mark.parametrize(
    ("files", "index", "load_format", "patterns", "problem"),
    [
        (["config.json"], None, "auto", None, r"contains no weight files .*set `weights`"),
        ([], None, "auto", None, "is not a local folder.*set `weights`"),
        *(
            (["a.safetensors"], None, load_format, patterns, f"{load_format}.*set `weights`")
            for load_format in ("dummy", "tensorizer", "my-plugin")
            for patterns in (None, ["a.safetensors"])
        ),
        (["a.safetensors"], None, "auto", ["gone.bin"], r"no weight files \(gone\.bin\)"),
        (["a.safetensors"], '{"weight_map": {"w": "gone"}}', "auto", None, "missing files: gone"),
        (["a.safetensors"], "[]", "auto", None, "is not an index"),
    ],
)
def test_model_without_weight_files_is_refused(
    tmp_path: Path,
    files: list[str],
    index: str | None,
    load_format: str,
    patterns: list[str] | None,
    problem: str,
) -> None:
    folder = tmp_path / "model"
    touch(folder, *files)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=problem):
        weight_files(folder, load_format, patterns=patterns)


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
    monkeypatch.setattr(fingerprints.time, "time_ns", lambda: now() + 60 * 10**9)


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
    sampled = sampled_fingerprint(files)
    for blob in blobs.iterdir():
        blob.write_bytes(b"nor sampled")
    assert sampled_fingerprint(files) == sampled


def test_links_that_are_no_hub_blobs_are_hashed(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    plain = weights_fingerprint([tmp_path / "a.safetensors"])
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked" / "a.safetensors"
    # No blob: by its name, by its folder, by its length, by its letters.
    for name in ("a", "0" * 64, "blobs/" + "0" * 40, "blobs/" + "0" * 65, "blobs/" + "A" * 64):
        touch(tmp_path, name)
        (tmp_path / name).write_bytes(b"a.safetensors")
        link.symlink_to(tmp_path / name)
        assert weights_fingerprint([link]) == plain
        link.unlink()
    link.symlink_to(tmp_path / "elsewhere" / "blobs" / ("0" * 64))
    with pytest.raises(FileNotFoundError):
        weights_fingerprint([link])


def test_files_of_folders_below_are_named_by_their_path(tmp_path: Path) -> None:
    """Two files of one name are told apart, and files at the top keep their names."""
    contents = {"model.safetensors": b"1", "encoder/model.safetensors": b"2"}

    def found(number: int, contents: dict[str, bytes]) -> list[str]:
        folder = tmp_path / str(number)
        for name, content in contents.items():
            touch(folder, name)
            (folder / name).write_bytes(content)
        files = [folder / name for name in contents]
        return [digest(files, root=folder) for digest in (weights_fingerprint, sampled_fingerprint)]

    swapped = dict(zip(contents, reversed(contents.values()), strict=True))
    (one, two), (three, four) = found(1, contents), found(2, swapped)
    assert one != three and two != four
    top = [tmp_path / "1" / "model.safetensors"]
    assert weights_fingerprint(top, root=tmp_path / "1") == weights_fingerprint(top)
    assert sampled_fingerprint(top, root=tmp_path / "1") == sampled_fingerprint(top)


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
        before = path.stat()
        # As many bytes, and the time of the change is set back, as rsync does.
        while path.stat().st_ctime_ns == before.st_ctime_ns:
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_fingerprint(model, cache=cache) == first
    assert cache.path.parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in cache.path.parent.iterdir()] == ["fingerprints.json"]


@pytest.mark.parametrize("written", ["now", "now, with an old time"])
def test_file_written_just_now_is_not_remembered(
    model: list[Path], cache: FingerprintCache, written: str
) -> None:
    if written != "now":
        for path in model:
            os.utime(path, (1e9, 1e9))
    weights_fingerprint(model, cache=cache)
    assert cache.path is not None
    assert not cache.path.exists()


@pytest.mark.parametrize("index", [1, 2, 6, 14, 15])
def test_stamp_tells_inodes_devices_sizes_and_times_apart(index: int) -> None:
    values = list(range(19))
    stamp = stamp_of(os.stat_result(values))
    values[index] += 1
    assert stamp_of(os.stat_result(values)) != stamp


@pytest.mark.usefixtures("later")
def test_file_that_is_replaced_once_it_is_hashed_is_hashed_again(
    model: list[Path], cache: FingerprintCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_fingerprint(model[:1])

    def replace(*_: int) -> bool:
        new = model[0].with_suffix(".new")
        new.write_bytes(b"other")
        new.replace(model[0])
        return True

    monkeypatch.setattr(fingerprints, "is_settled", replace)
    assert weights_fingerprint(model[:1], cache=cache) == first
    monkeypatch.undo()
    assert weights_fingerprint(model[:1], cache=cache) == weights_fingerprint(model[:1]) != first


@pytest.mark.usefixtures("later")
def test_newest_files_stay_in_a_full_cache(model: list[Path], cache: FingerprintCache) -> None:
    assert cache.path is not None
    cache.path.parent.mkdir(parents=True)
    full = {f"{n}": "0" * 32 for n in range(10_000)}
    cache.path.write_text(json.dumps({"xxh3-128": full}))
    weights_fingerprint(model, cache=cache)
    names = list(json.loads(cache.path.read_text())["xxh3-128"])
    assert len(names) < 10_000
    assert names[-3] == "9999" and "9999" not in names[-2:]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff", b"[]", b"{}", b'{"xxh3-128":[]}', b'{"xxh3-128":{"a":1}}', b"[" * 100_000],
)
def test_damaged_cache_only_costs_hashing_again(
    model: list[Path], cache: FingerprintCache, damage: bytes
) -> None:
    first = weights_fingerprint(model, cache=cache)
    assert cache.path is not None
    cache.path.write_bytes(damage)
    assert weights_fingerprint(model, cache=cache) == first
    assert len(json.loads(cache.path.read_text())["xxh3-128"]) == 2


@pytest.mark.usefixtures("later")
def test_cache_that_cannot_be_written_is_no_error(model: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fingerprint = weights_fingerprint(model)
    unwritable = FingerprintCache(tmp_path / "file" / "fingerprints.json")
    assert weights_fingerprint(model, cache=unwritable) == fingerprint


@pytest.mark.real
def test_several_processes_share_a_cache(tmp_path: Path, cache: FingerprintCache) -> None:
    code = (
        "import os, sys\n"
        "from kvshelf.weights.fingerprints import FingerprintCache\n"
        "cache = FingerprintCache(sys.argv[1])\n"
        "for path in sys.argv[2:]:\n"
        "    cache.put(os.stat(path), '0' * 32)\n"
    )
    touch(tmp_path, *(f"{n}" for n in range(24)))
    files = [str(tmp_path / f"{n}") for n in range(24)]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(cache.path), *files[n::3]])
        for n in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    # Those of a process may get lost, and none gets wrong.
    entries = {cache._name(os.stat(path)): "0" * 32 for path in files}
    assert cache._entries()
    assert cache._entries().items() <= entries.items()


def test_file_that_never_rests_is_an_error(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.readv
    number = iter(range(10**9))

    def readv(descriptor: int, buffers: Any) -> int:
        model[0].write_bytes(b"as many")
        os.utime(model[0], ns=(0, next(number)))
        return real(descriptor, buffers)

    monkeypatch.setattr(fingerprints.os, "readv", readv)
    with pytest.raises(TransientStorageError, match="keeps changing"):
        weights_fingerprint(model[:1])


def test_cancelling_does_not_wait_for_a_read_that_hangs(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    release = threading.Event()
    reads: list[threading.Thread] = []

    def readv(descriptor: int, buffers: Any) -> int:
        reads.append(threading.current_thread())
        reading.set()
        release.wait(60)
        return 1

    monkeypatch.setattr(fingerprints.os, "readv", readv)
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
    for thread in reads:
        thread.join(30)
    # No thread reads on, for an hour perhaps, once nobody needs the result.
    assert len(reads) == len(set(reads))


def test_hashing_on_other_processors_gives_the_same(model: list[Path]) -> None:
    own = os.sched_getaffinity(0)
    aside = weights_fingerprint(model, on_thread_start=lambda: os.sched_setaffinity(0, {min(own)}))
    assert aside == weights_fingerprint(model)
    # Only the hashing threads step aside.
    assert os.sched_getaffinity(0) == own


def test_where_no_thread_can_be_started_the_caller_hashes(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weights_fingerprint(model)
    with none_can_be_started(monkeypatch, "kvshelf-fingerprint"):
        assert weights_fingerprint(model, on_thread_start=pytest.fail) == found


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
    for size in (1_000_000, 1_000_001):
        path.write_bytes(bytes(size))
        seen.add(sampled_fingerprint([path]))
    assert len(seen) == 6


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
