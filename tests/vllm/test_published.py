"""What an engine knows of the files that its model publishes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.model import ModelFacts, rope_text
from kvshelf.vllm import namespace, published
from kvshelf.vllm.metadata import BY_PARAMETERS
from kvshelf.vllm.namespace import WeightsIdentity
from kvshelf.vllm.published import (
    Published,
    config_folder,
    read_published,
)
from kvshelf.weights.configuration import published_lines
from tests.support.threads import none_can_be_started

CONFIG = {"architectures": ["Mini"], "rms_norm_eps": 1e-5}
LATER = 3600.0


def engine(model: Path | str, **fields: Any) -> Any:
    """An engine's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{"model": str(model), "hf_text_config": SimpleNamespace(), "revision": None} | fields
        ),
        load_config=SimpleNamespace(download_dir=None),
    )


def read(config: Any, began: float | None = None) -> Published:
    """What is read by a process of an engine that began then, by default later than now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("_KVSHELF_ENGINE_BEGAN", raising=False)
        if began is not None:
            patch.setenv("_KVSHELF_ENGINE_BEGAN", repr(began))
        return read_published(config, (), time.time() + LATER)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def snapshot(
    cache: Path, content: dict[str, Any], commit: str = "a" * 40, weights: bytes = b""
) -> Path:
    """A repository in a cache of Hugging Face, written just now."""
    root = cache / "models--org--m"
    folder = root / "snapshots" / commit
    for made in (root / "blobs", root / "refs", folder):
        made.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    blob = root / "blobs" / commit
    blob.write_text(json.dumps(content, indent=2))
    (folder / "config.json").symlink_to(f"../../blobs/{commit}")
    if weights:
        digest = hashlib.sha256(weights).hexdigest()
        (root / "blobs" / digest).write_bytes(weights)
        (folder / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    return folder


def test_folder_a_copy_and_a_hub_s_snapshot_are_one(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot(cache, CONFIG)
    # vLLM may pull a snapshot while it starts, and its files name their content.
    of_hub = engine("org/m")
    of_hub.load_config.download_dir = str(cache)
    found = read(of_hub, began=0.0)
    assert found == read(engine(model)) == Published(published_lines(CONFIG))
    facts = {"layers": 2, "kv_heads": 2, "head_size": 8, "dtype": "bfloat16", "fingerprint": "w"}
    by_program = ModelFacts(**facts, config=model)  # type: ignore[arg-type]
    by_engine = ModelFacts(**facts, config=found.config, code=found.code)  # type: ignore[arg-type]
    assert by_program.namespace() == by_engine.namespace()
    assert "config" in by_program.namespace().record
    with pytest.raises(ConfigError, match=r"expected a pathlib\.Path"):
        ModelFacts(**facts, config=str(model))  # type: ignore[arg-type]


def test_configuration_edited_beside_equal_weights_is_another_namespace(model: Path) -> None:
    facts = {"layers": 2, "kv_heads": 2, "head_size": 8, "dtype": "bfloat16", "fingerprint": "w"}

    def namespace_with(**changes: Any) -> bytes:
        (model / "config.json").write_text(json.dumps(CONFIG | changes))
        found, rope = read(engine(model)), rope_text(SimpleNamespace(**changes))
        made = ModelFacts(**facts, rope=rope, config=found.config, code=found.code)  # type: ignore[arg-type]
        return made.namespace().digest

    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    digests = {namespace_with(), namespace_with(rms_norm_eps=0.1)}
    digests |= {namespace_with(rope_parameters=scaled)}
    digests |= {namespace_with(rope_parameters=scaled | {"factor": 4.0})}
    assert len(digests) == 4
    # A value that decides nothing, and another version of the library that wrote the file.
    assert namespace_with(transformers_version="9.9", use_cache=False) == namespace_with()


@pytest.mark.parametrize("name", ["name:the weights", "content"])
def test_which_of_a_copy_a_hub_and_an_object_storage_are_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Weights and configuration together, as rank 0 tells them."""
    monkeypatch.setattr(namespace, "process_start_time", lambda: time.time() + LATER)
    monkeypatch.delenv("_KVSHELF_ENGINE_BEGAN", raising=False)
    (model / "model.safetensors").write_bytes(b"weights")
    copied = shutil.copytree(model, tmp_path / "a copy")
    written_anew = shutil.copytree(model, tmp_path / "written anew")
    content = CONFIG | {"transformers_version": "9", "use_cache": True, "dtype": "float16"}
    (written_anew / "config.json").write_text(json.dumps(content, indent=4))
    # vLLM pulls the configuration to a folder of its own, and streams the weights.
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    shutil.copy(model / "config.json", pulled)
    snapshot(tmp_path / "hub", CONFIG, weights=b"weights")
    hub = engine("org/m")
    hub.load_config.download_dir = str(tmp_path / "hub")

    def told(config: Any) -> tuple[str, Published]:
        found: list[tuple[str, Published]] = []
        problems: list[str] = []
        identity = WeightsIdentity(
            config,
            Config(weights=name),
            on_known=lambda weights, published: found.append((weights, published)),
            on_problem=problems.append,
        )
        # Then all of it is done in the call.
        with none_can_be_started(monkeypatch, "kvshelf-"):
            identity.start()
        assert problems == []
        return found[0]

    copies = {told(engine(folder)) for folder in (model, copied, written_anew)}
    others = [told(hub), told(engine(pulled, model_weights="s3://bucket/m"))]
    assert len(copies) == 1
    if name == "content":
        assert others[0] not in copies
        assert others[0][0].startswith("sha256:")
        assert others[1][0] == BY_PARAMETERS
    else:
        assert {*copies, *others} == {(f"user:{name[5:]}", Published(published_lines(CONFIG)))}


def test_weights_that_are_replaced_while_they_are_read_name_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has loaded those of before."""
    file = model / "model.safetensors"
    file.write_bytes(b"old")
    began = max(file.stat().st_mtime, file.stat().st_ctime)
    monkeypatch.setattr(namespace, "process_start_time", lambda: began)
    monkeypatch.setattr(namespace, "read_published", lambda *_: None)
    fingerprint = namespace.weights_fingerprint

    def replaced_before_it_is_read(*files: Any, **options: Any) -> str:
        while file.stat().st_mtime <= began:
            file.write_bytes(b"new")
        return fingerprint(*files, **options)

    monkeypatch.setattr(namespace, "weights_fingerprint", replaced_before_it_is_read)
    found: list[str] = []
    identity = WeightsIdentity(
        engine(model),
        Config(weights="content"),
        on_known=lambda weights, _: found.append(weights),
        on_problem=found.append,
    )
    with none_can_be_started(monkeypatch, "kvshelf-"):
        identity.start()
    assert found == [BY_PARAMETERS]


def test_of_a_hub_the_commit_counts_that_vllm_has_parsed(tmp_path: Path) -> None:
    snapshot(tmp_path, CONFIG, "a" * 40)
    snapshot(tmp_path, CONFIG | {"rms_norm_eps": 1.0}, "b" * 40)
    parsed = SimpleNamespace(_commit_hash="a" * 40)
    config = engine("org/m", hf_config=parsed)
    config.load_config.download_dir = str(tmp_path)
    assert read(config).config == published_lines(CONFIG)


@pytest.mark.parametrize("what", ["the file", "a link to the folder"])
def test_file_that_was_written_after_vllm_began_says_nothing(
    model: Path, tmp_path: Path, what: str
) -> None:
    place = model
    if what != "the file":
        for path in (model / "config.json", model):
            os.utime(path, (0, 0))
        place = tmp_path / "link"
        place.symlink_to(model)
    with pytest.raises(ConfigError, match="after the engine began to start"):
        read(engine(place), time.time() - LATER)
    read(engine(place), time.time() + LATER)
    # vLLM wrote it itself where it pulls models from an object storage.
    read(engine(place, model_weights="s3://bucket/m"), time.time() - LATER)


def test_configuration_that_is_not_at_hand(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="--hf-config-path"):
        read(engine("org/unknown"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read(engine(tmp_path))
    assert read(engine("org/unknown", hf_config_path=str(model))).config
    # A file of weights holds its own.
    (tmp_path / "m.gguf").touch()
    assert read(engine(tmp_path / "m.gguf")) == Published()


def test_of_modelscope_its_cache_is_asked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    module = SimpleNamespace(snapshot_download=lambda **given: asked.append(given) or str(model))
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError):
        config_folder(engine("org/m"))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert config_folder(engine("org/m")) == model
    assert [given["local_files_only"] for given in asked] == [True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.parametrize(
    ("architecture", "by_transformers", "counts"),
    [
        ("LlamaForCausalLM", False, False),
        ("LlamaForCausalLM", True, True),
        ("GlmForCausalLM", False, True),
    ],
)
def test_ids_of_special_tokens_count_where_a_class_may_read_them(
    model: Path, architecture: str, by_transformers: bool, counts: bool
) -> None:
    from vllm.model_executor.models import ModelRegistry

    def lines(token: int) -> tuple[str, ...]:
        content = CONFIG | {"architectures": [architecture], "eos_token_id": token}
        (model / "config.json").write_text(json.dumps(content))
        fields = {
            "architecture": architecture,
            "using_transformers_backend": lambda: by_transformers,
            "registry": ModelRegistry,
        }
        return read(engine(model, **fields)).config

    assert (lines(1) != lines(2)) is counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
def test_engine_s_processes_know_when_its_configuration_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    seen: list[float] = []
    monkeypatch.setenv("_KVSHELF_ENGINE_BEGAN", "0.0")
    monkeypatch.setattr(
        EngineArgs,
        "create_engine_config",
        lambda self: seen.append(float(os.environ["_KVSHELF_ENGINE_BEGAN"])),
    )
    published.note_begins.__wrapped__()
    before = time.time()
    EngineArgs.create_engine_config(SimpleNamespace(kv_transfer_config=None))  # type: ignore[arg-type]
    assert before <= seen[0] <= time.time()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
def test_llama_4_has_what_is_read() -> None:
    import inspect

    llama4 = pytest.importorskip("vllm.model_executor.models.llama4")
    source = inspect.getsource(llama4.Llama4Attention.__init__)
    for name in ("attn_temperature_tuning", "floor_scale", "attn_scale"):
        assert f"self.{name} = " in source
