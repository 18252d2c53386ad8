"""What a worker knows of its weights: their fingerprint, and that they change in place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from kvshelf.vllm.metadata import BY_PARAMETERS, LoadOp, PrefetchOp, StepMetadata
from kvshelf.vllm.namespace import build_namespace
from kvshelf.weights.fingerprints import weights_fingerprint
from tests.sim.engine_caches import make_config
from tests.sim.engine_sides import LoneWorker, MakeWorker, next_number, store_op
from tests.sim.storage import FaultyStorage
from tests.support.waiting import until

# ------------------------------------------------------------------------- weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process started after all files were written."""
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: 2e12)


def with_model(backend: FaultyStorage, model: Path, **options: Any) -> SimpleNamespace:
    config = make_config(backend.url, weights="content", **options)
    config.model_config.model = str(model)
    config.model_config.revision = config.load_config.download_dir = None
    return config


def test_weights_written_while_the_engine_started_are_not_trusted(
    make_worker: MakeWorker,
    backend: FaultyStorage,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    started = (model / "model.safetensors").stat().st_mtime + 5
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: started)
    rig = make_worker(config=with_model(backend, model), opened=False)
    assert rig.reported("weights")
    # A file that was moved into place keeps its times, but not that of its last change.
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: started - 10)
    os.utime(model / "model.safetensors", (0, 0))
    rig = make_worker(config=with_model(backend, model), opened=False)
    assert rig.reported("weights") == BY_PARAMETERS
    assert "was written after the engine began to start" in caplog.text


class MiMoAudioTokenizer(torch.nn.Module):
    """Named as the class of vLLM that reads a folder when it is built."""


def loaded_model(model: Path, kind: str) -> torch.nn.Module:
    """A model as vLLM loads it, which reads weights beside the files at the top of its folder."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def source(place: str = str(model), **options: Any) -> DefaultModelLoader.Source:
        return DefaultModelLoader.Source(place, None, **options)

    loaded: Any = torch.nn.Module()
    if kind == "subfolder":
        loaded.secondary_weights = [source(subfolder="encoder")]
    elif kind == "patterns":
        loaded.secondary_weights = [source(allow_patterns_overrides=["encoder/model.safetensors"])]
    elif kind == "own patterns":
        loaded.allow_patterns_overrides = ["[er]*er/*.safetensors"]
    elif kind == "another":
        loaded.secondary_weights = [source("org/encoder")]
    elif kind == "built":
        loaded.audio = MiMoAudioTokenizer()
    return loaded  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", ["subfolder", "patterns", "own patterns", "built"])
def test_weights_below_the_folder_are_named_by_their_content(
    make_worker: MakeWorker, backend: FaultyStorage, model: Path, kind: str
) -> None:
    encoder = model / ("audio_tokenizer" if kind == "built" else "encoder")
    encoder.mkdir()
    config = with_model(backend, model)

    def name() -> str:
        rig = make_worker(config=config, opened=False, model=loaded_model(model, kind))
        return rig.reported("weights")

    # Files that are missing name nothing.
    assert name() == BY_PARAMETERS
    names = []
    for content in (b"encoder", b"encoder", b"other"):
        (encoder / "model.safetensors").write_bytes(content)
        names.append(name())
    assert names[0] == names[1] != names[2]
    assert all(one.startswith("sha256:") for one in names)
    (encoder / "config.json").write_text("{}")
    assert (name() != names[2]) is (kind in ("subfolder", "built"))
    (encoder / "model.safetensors").unlink()
    assert name() == BY_PARAMETERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.usefixtures("old_files")
def test_weights_of_a_model_without_folders_below_keep_their_name(
    make_worker: MakeWorker, backend: FaultyStorage, model: Path
) -> None:
    names = []
    for kind in ("plain", "another"):
        (model / "encoder").mkdir(exist_ok=True)
        (model / "encoder" / "model.safetensors").write_bytes(kind.encode())
        rig = make_worker(
            config=with_model(backend, model), opened=False, model=loaded_model(model, kind)
        )
        names.append(rig.reported("weights"))
    assert names == [weights_fingerprint([model / "model.safetensors"]), BY_PARAMETERS]


# ----------------------------------------------------------- weights that change in place


def test_weights_that_change_in_place_end_loads_and_stores_at_once(make_worker: MakeWorker) -> None:
    rig = make_worker(memory=4 << 20)
    chunks = rig.chunks(3)
    rig.store(chunks[:2])
    rig.connector.weights_changed()
    rig.side.weights_changed("another reason")
    # The scheduler does not know yet: what it planned meanwhile is not done.
    named = rig.namespace()
    stores, prefetches = [store_op(chunks[2], [9, 10])], [PrefetchOp("r", chunks[:2])]
    rig.step(StepMetadata(stores=stores, prefetches=prefetches, namespace=named))
    rig.drain()
    assert not any(ahead._requests for ahead in rig.side.registration.ahead.values())
    assert rig.counts["stored_chunks"] == 2
    before = rig.rows(20)
    finished, bad, meta = rig.step(
        StepMetadata(loads=[LoadOp(next_number(), "r", 0, 16, chunks[:2], ([20, 21, 22, 23],))])
    )
    assert finished == {"r"}
    assert bad == {20, 21, 22, 23}
    assert all(torch.equal(a, b) for a, b in zip(before, rig.rows(20), strict=True))
    assert meta is not None
    assert meta.weights[0].changed
    assert not rig.disabled_reason()


def test_stores_of_earlier_weights_are_published_beside_those_of_new_ones(
    rig: LoneWorker, backend: FaultyStorage
) -> None:
    gate = backend.hang("write", "*.safetensors")
    (early,) = rig.chunks(1)
    paths = [rig.path(early)]
    rig.step(StepMetadata(stores=[store_op(early, [1, 2])]))
    rig.connector.weights_changed()
    named = rig.namespace("user:new")
    model, meta = rig.side.registration.model, StepMetadata(namespace=named, weights_round=1)
    until(lambda: bool(rig.step(meta) and model.namespace and model.namespace.encoded == named[0]))
    (late,) = rig.chunks(1)
    paths.append(rig.path(late))
    assert paths[0].parent != paths[1].parent
    rig.step(StepMetadata(stores=[store_op(late, [3, 4], round=1)], weights_round=1))
    assert not any(path.exists() for path in paths)
    gate.set()
    rig.drain()
    assert all(path.exists() for path in paths)
    assert rig.counts.get("dropped_chunks_weights_changed", 0) == 0


def test_namespace_with_objects_of_other_sizes_disables_the_worker(rig: LoneWorker) -> None:
    config = rig.connector.config
    larger = config.model_copy(update={"chunk_size": 2 * config.chunk_size})
    other = build_namespace(rig.config, larger, [rig.report()], "user:new")
    rig.connector.weights_changed()
    model = rig.side.registration.model
    meta = StepMetadata(namespace=(other.encoded, other.slug), weights_round=1)
    until(lambda: bool(rig.step(meta) and model.disabled_reason))
    assert "other sizes than those for which memory was taken" in model.disabled_reason
    assert rig.side.registration.serving is None


def test_random_weights_are_of_use_to_nobody_else(
    make_worker: MakeWorker, backend: FaultyStorage, model: Path
) -> None:
    config = with_model(backend, model)
    config.load_config.load_format = "dummy"
    rig = make_worker(config=config, opened=False)
    until(lambda: bool(rig.disabled_reason()))
    problem = rig.disabled_reason()
    assert "random weights" in problem
    assert "Set `weights`" in problem


@pytest.mark.real
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config.model_config, "model", "/nowhere/at/all"), "nowhere"),
        (lambda config: setattr(config.model_config, "model", "qwen/Qwen2"), "cache of Hugging"),
        (lambda config: setattr(config.load_config, "load_format", "tensorizer"), "tensorizer"),
        (
            lambda config: setattr(config.model_config, "model_weights", "s3://a-bucket/model"),
            "come from s3://a-bucket/model",
        ),
    ],
)
def test_weights_from_elsewhere_are_named_by_the_loaded_parameters(
    make_worker: MakeWorker,
    backend: FaultyStorage,
    model: Path,
    change: Callable[[SimpleNamespace], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = with_model(backend, model)
    change(config)
    assert make_worker(config=config, opened=False).reported("weights") == BY_PARAMETERS
    assert message in caplog.text
