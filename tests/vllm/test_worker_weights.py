"""What a worker knows of its weights: their fingerprint, and that they change in place."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from kvshelf.vllm.metadata import (
    BY_PARAMETERS,
    LoadOp,
    StepMetadata,
)
from kvshelf.vllm.worker import weight_changes
from kvshelf.weights.fingerprints import weights_fingerprint
from tests.sim.storage import FaultyStorage
from tests.support.threads import named
from tests.support.waiting import PATIENCE, until
from tests.vllm.replay import make_config
from tests.vllm.rig import next_number
from tests.vllm.worker_rig import WorkerRig, store_op

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
    make_worker: Callable[..., WorkerRig],
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
    make_worker: Callable[..., WorkerRig],
    backend: FaultyStorage,
    model: Path,
    kind: str,
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
    make_worker: Callable[..., WorkerRig], backend: FaultyStorage, model: Path
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


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("ends", ["before", "after", "after, failed"])
def test_the_fingerprint_of_earlier_caches_names_no_later_ones(
    make_worker: Callable[..., WorkerRig],
    backend: FaultyStorage,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    gates = [threading.Event(), threading.Event()]
    begun: list[str] = []

    def slow(*_: object, **__: object) -> str:
        number = len(begun)
        begun.append(f"sha256:{number:064x}")
        assert gates[number].wait(PATIENCE)
        if number == 0 and ends == "after, failed":
            raise RuntimeError("the files of the earlier caches")
        return begun[number]

    monkeypatch.setattr("kvshelf.vllm.namespace.weights_fingerprint", slow)
    rig = make_worker(config=with_model(backend, model), opened=False)
    try:
        until(lambda: len(begun) == 1)
        if ends == "before":
            gates[0].set()
            assert rig.reported("weights") == begun[0]
        rig.replace_caches()
        until(lambda: len(begun) == 2)
        gates[0].set()
        until(lambda: len(named("kvshelf-weights")) == 1)
        assert rig.disabled_reason() == ""
        assert rig.report().weights is None
        gates[1].set()
        assert rig.reported("weights") == begun[1]
    finally:
        for gate in gates:
            gate.set()


# ----------------------------------------------------------- weights that change in place


class FakeWorker:
    """The methods of vLLM's worker that concern weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))

    def reload_weights(self, *args: object, **kwargs: object) -> str:
        self.calls.append(("reload_weights", (args, kwargs)))
        return "reloaded"

    def start_weight_update(self) -> None:
        self.calls.append(("start_weight_update", None))

    def start_draft_weight_update(self) -> None:
        self.calls.append(("start_draft_weight_update", None))

    def update_weights(self, update_info: object) -> None:
        self.calls.append(("update_weights", update_info))

    def finish_weight_update(self) -> None:
        self.calls.append(("finish_weight_update", None))

    def reset_weights(self) -> None:
        self.calls.append(("reset_weights", None))


def test_the_methods_that_are_watched_are_vllm_s() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    for name in vars(FakeWorker):
        assert name.startswith("__") or callable(Worker.__dict__[name]), name
    assert list(signature(Worker.sleep).parameters)[:2] == ["self", "level"]
    assert list(signature(Worker.wake_up).parameters) == ["self", "tags"]
    assert list(signature(Worker.discard).parameters) == ["self", "tags"]


@pytest.mark.parametrize(
    ("use", "changes"),
    [
        (lambda worker: worker.sleep(), False),
        (lambda worker: worker.sleep(1), False),
        (lambda worker: worker.sleep(2), True),
        (lambda worker: worker.sleep(level=2), True),
        (lambda worker: worker.discard(("kv_cache",)), False),
        (lambda worker: worker.discard(tags=("weights", "kv_cache")), True),
        (lambda worker: worker.reload_weights(weights_path="/new"), True),
        (lambda worker: worker.start_weight_update(), True),
        (lambda worker: worker.start_draft_weight_update(), True),
        (lambda worker: worker.update_weights({"names": []}), True),
        (lambda worker: worker.finish_weight_update(), True),
        (lambda worker: worker.reset_weights(), True),
    ],
)
def test_ways_in_which_vllm_changes_weights_are_noticed(
    use: Callable[[FakeWorker], object], changes: bool
) -> None:
    heard: list[str] = []

    class Ear:
        def weights_changed(self, how: str) -> None:
            heard.append(how)
            raise RuntimeError("a bug must not keep vLLM from its work")

        def fall_asleep(self) -> None: ...

        def wake_up(self) -> None: ...

    kind = type("Fresh", (FakeWorker,), dict(FakeWorker.__dict__))
    ear = Ear()
    assert weight_changes.watch(ear, kind)
    assert weight_changes.watch(ear, kind)
    worker = kind()
    use(worker)
    assert len(worker.calls) == 1
    assert len(heard) == changes
    assert kind().reload_weights() == "reloaded"


class Loadable(torch.nn.Linear):
    """A model with vLLM's way to load weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loaded: list[object] = []

    def load_weights(self, weights: object) -> set[str]:
        self.loaded.append(weights)
        return {"weight"}


def test_weights_that_a_worker_extension_loads_are_noticed() -> None:
    heard: list[str] = []

    class Ear:
        def weights_changed(self, how: str) -> None:
            heard.append(how)

        def fall_asleep(self) -> None: ...

        def wake_up(self) -> None: ...

    class Loader:
        def __init__(self, model: object) -> None:
            self.model = model

        def load_weights(self, weights: object, *, mapper: object = None) -> object:
            return self.model, weights, mapper

    ear, model, other = Ear(), Loadable(), Loadable()
    for _ in range(2):
        weight_changes.watch_loading(ear, model, Loader)
    assert model.load_weights([1]) == {"weight"}
    assert model.loaded == [[1]]
    assert heard == ["load_weights()"]
    # Another model of the same class is not the engine's.
    other.load_weights([2])
    assert len(heard) == 1
    weight_changes.watch(ear, type("Fresh", (FakeWorker,), {}))
    assert Loader("m").load_weights("w", mapper=3) == ("m", "w", 3)
    assert len(heard) == 2


def test_vllm_s_loader_of_weights_is_watched() -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    assert AutoWeightsLoader.__module__ == "vllm.model_executor.models.utils"
    assert callable(AutoWeightsLoader.__dict__["load_weights"])


def test_weights_that_change_in_place_end_loads_and_stores_at_once(
    make_worker: Callable[..., WorkerRig],
) -> None:
    rig = make_worker()
    chunks = rig.chunks(3)
    rig.store(chunks[:2])
    rig.connector.weights_changed()
    rig.side.weights_changed("another reason")
    # The scheduler does not know yet: what it planned meanwhile is not done.
    rig.step(StepMetadata(stores=[store_op(chunks[2], [9, 10])]))
    rig.drain()
    assert rig.counts["stored_chunks"] == 2
    before = rig.rows(20)
    finished, bad, meta = rig.step(
        StepMetadata(loads=[LoadOp(next_number(), "r", 0, 16, chunks[:2], ([20, 21, 22, 23],))])
    )
    assert finished == {"r"}
    assert bad == {20, 21, 22, 23}
    assert all(torch.equal(a, b) for a, b in zip(before, rig.rows(20), strict=True))
    assert "weights_changed()" in rig.disabled_reason()
    # Also for caches that are registered anew.
    rig.register()
    _, _, meta = rig.step(StepMetadata())
    assert meta is not None and "changed in place" in meta.reports[0].disabled_reason


def test_a_worker_of_vllm_tells_the_connector(
    make_worker: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Fresh", (FakeWorker,), dict(FakeWorker.__dict__))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=kind))
    rig = make_worker()
    kind().sleep(1)
    assert not rig.disabled_reason()
    kind().sleep(level=2)
    assert "sleep()" in rig.disabled_reason()
    assert "restart the engine" in rig.disabled_reason()


def test_random_weights_are_of_use_to_nobody_else(
    make_worker: Callable[..., WorkerRig], backend: FaultyStorage, model: Path
) -> None:
    config = with_model(backend, model)
    config.load_config.load_format = "dummy"
    problem = make_worker(config=config, opened=False).reported("disabled_reason")
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
    make_worker: Callable[..., WorkerRig],
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
