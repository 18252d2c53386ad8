"""What turns media into KV: the processor's files, and the options of an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.vllm import media
from kvshelf.vllm.media import EngineMedia, processor_digest
from tests.support.waiting import until

#: When a process began that was started after the files were written.
LATER = float("inf")
MEAN = {"image_mean": [0.5, 0.25], "image_processor_type": "A"}


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine start after files were written."""
    monkeypatch.setattr(media, "engine_start_time", lambda: LATER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "preprocessor_config.json").write_text(json.dumps(MEAN))
    return made


def model_of(folder: Path | str, **settings: Any) -> Any:
    return SimpleNamespace(
        **{
            "model": str(folder),
            "revision": None,
            "tokenizer": str(folder),
            "tokenizer_revision": None,
            "trust_remote_code": False,
            "skip_tokenizer_init": False,
        }
        | settings
    )


def digest_of(folder: Path, **settings: Any) -> str | None:
    return processor_digest(model_of(folder, **settings), LATER)


def write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content", "differs"),
    [
        ("preprocessor_config.json", MEAN | {"image_mean": [0.5, 0.5]}, True),
        ("preprocessor_config.json", dict(reversed(MEAN.items())), False),
        ("preprocessor_config.json", MEAN | {"auto_map": {}, "processor_class": "B"}, False),
        ("preprocessor_config.json", MEAN | {"size": {"chat_template": "", "height": 1}}, True),
        ("processor_config.json", {"patch_size": 14}, True),
        ("video_preprocessor_config.json", {"fps": 2}, True),
        ("audio_tokenizer_config.json", {"rate": 2}, True),
        ("audio/preprocessor_config.json", {"rate": 2}, True),
        (".cache/preprocessor_config.json", {"rate": 2}, False),
        ("tekken.json", {"image": {"image_patch_size": 16}, "vocab": ["a"]}, True),
        ("tekken.json", {"audio": {"sampling_rate": 16000}}, True),
        ("tekken.json", {"vocab": ["a"]}, False),
        ("tokenizer.model.v3m1", "", True),
        ("chat_template.json", {"chat_template": "x"}, False),
        ("config.json", {"rms_norm_eps": 1}, False),
        ("processing.py", "A = 1", False),
    ],
)
def test_settings_of_the_processor_decide(
    folder: Path, name: str, content: object, differs: bool
) -> None:
    before = digest_of(folder)
    write(folder / name, content)
    after = digest_of(folder)
    assert before is not None
    assert after is not None
    assert (before != after) == differs


def test_mistral_s_tokenizer_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = digest_of(folder)
    write(tmp_path / "other" / "tekken.json", {"image": {"max_image_size": 1024}})
    assert digest_of(folder, tokenizer=str(tmp_path / "other")) not in (before, None)
    assert digest_of(folder, tokenizer=str(tmp_path / "nowhere")) is None
    nowhere = {"tokenizer": str(tmp_path / "nowhere"), "skip_tokenizer_init": True}
    assert digest_of(folder, **nowhere) == before


@pytest.mark.parametrize("named_in", ["processor_config.json", "config.json"])
def test_code_of_a_processor_decides(folder: Path, named_in: str) -> None:
    write(folder / "processing.py", "MEAN = 1")
    plain = digest_of(folder)
    # The flag alone changes nothing.
    assert digest_of(folder, trust_remote_code=True) == plain
    write(folder / named_in, {"auto_map": {"AutoProcessor": "processing.P"}})
    named = digest_of(folder, trust_remote_code=True)
    write(folder / "processing.py", "MEAN = 2")
    assert len({plain, named, digest_of(folder, trust_remote_code=True)}) == 3
    write(folder / named_in, {"auto_map": {"AutoProcessor": "org/elsewhere--processing.P"}})
    assert digest_of(folder, trust_remote_code=True) is None


def test_nothing_is_known_of_files_that_changed_after_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(media, "_digests", {})
    model = model_of(folder)
    assert [media.processor_of(model, 0.0) for _ in range(2)] == [None, None]
    assert caplog.text.count("was written after the process began to start") == 1
    # vLLM copies files from object storage while it starts.
    copied = model_of(folder, model_weights="s3://a/model")
    assert processor_digest(copied, since=0.0) is not None


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_nothing_is_known_once_a_processor_may_be_made_of_changed_files(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "_digests", {})
    known, old = digest_of(folder), (folder / "preprocessor_config.json").read_text()

    def of(**request: bool) -> str | None:
        return media.processor_of(model_of(folder), LATER, **request)

    assert known == of(made_anew=True) == of()
    write(folder / name, {"image_mean": [0.5, 0.5]})
    # vLLM still has the processor that it made for requests without settings.
    assert of() == known
    assert of(made_anew=True) is None
    write(folder / "preprocessor_config.json", old)
    assert of() is None


# ------------------------------------------------------------------------- the engine's options


@pytest.fixture
def engine(folder: Path) -> Callable[..., EngineMedia]:
    """Make the engine's side, and wait until it knows the processor."""

    def make(*, prefix: bool = False, **settings: Any) -> EngineMedia:
        model = model_of(folder, is_mm_prefix_lm=prefix)
        model.multimodal_config = SimpleNamespace(media_io_kwargs={}, **settings)
        made = EngineMedia(SimpleNamespace(model_config=model))
        until(lambda: made.processor is not None)
        return made

    return make


def test_options_that_change_kv_of_media_differ(engine: Callable[..., EngineMedia]) -> None:
    assert engine().options == ""
    assert engine(mm_processor_kwargs={"device": "cuda"}, video_pruning_rate=0.0).options == ""
    found = [
        engine(mm_processor_kwargs={"do_normalize": False}).options,
        engine(video_pruning_method="evs", video_pruning_rate=0.5).options,
        engine(video_pruning_method="vidcom2", video_pruning_rate=0.5).options,
        # CPUs have no attention that goes both ways in images.
        engine(prefix=True).options,
    ]
    assert not {"", None} & set(found)
    assert len(set(found)) == len(found)


def test_longest_prompt_counts_where_images_are_fitted_into_it() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    assert set(media._FIT_INTO_PROMPT) == {
        name for name, (module, _) in _VLLM_MODELS.items() if module == "nano_nemotron_vl"
    }

    def digest(architecture: str, length: int) -> str:
        model = SimpleNamespace(architecture=architecture, max_model_len=length)
        return media.options_digest(media.media_options(SimpleNamespace(model_config=model)))

    for name in media._FIT_INTO_PROMPT:
        assert len({"", digest(name, 4096), digest(name, 8192)}) == 3
        assert digest(name, 4096) == digest(name, 4096)
    assert digest("LlavaForConditionalGeneration", 4096) == ""


def test_scales_of_an_encoder_count_by_content(
    engine: Callable[..., EngineMedia], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(content: str, name: str = "scales.json") -> str | None:
        file = tmp_path / name
        file.write_text(content)
        made = engine(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
        until(lambda: made.options is not None)
        return made.options

    assert scaled("1") == scaled("1", "a copy.json")
    assert len({scaled("1"), scaled("2"), ""}) == 3
    dynamic = engine(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=None)
    assert dynamic.options is None
    assert "depends on earlier ones" in caplog.text


def test_scales_that_changed_after_the_start_are_unknown(
    engine: Callable[..., EngineMedia],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "scales.json"
    file.write_text("1")
    os.utime(file, (2**32, 2**32))
    monkeypatch.setattr(media, "engine_start_time", lambda: 2.0**31)
    made = engine(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
    until(lambda: "is not known" in caplog.text)
    assert made.options is None
