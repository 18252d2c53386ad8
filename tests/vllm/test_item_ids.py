"""Ids of images through vLLM's own code: made, marked, sent to the engine's process, judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import mm_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvshelf.metrics import Counters
from kvshelf.vllm import item_ids, media, register
from kvshelf.vllm.item_ids import CLIENT, CONTENT, ItemIds

register()
ALGORITHM = "blake3"
#: Stands for the digest of the processor's files.
PROCESSOR = "1" * 64
CAT, DOG = (Image.new("RGB", (8, 8), colour) for colour in ("black", "brown"))
#: Texts that clients may send, among them marks.
TEXTS = st.text(st.characters(codec="utf-8")) | st.sampled_from([CLIENT, CONTENT]).flatmap(
    lambda mark: st.text("abc-:").map(lambda text: mark + text)
)


def hashes(
    *images: Image.Image | None,
    uuids: list[str | None] | None = None,
    arguments: Mapping[str, object] | None = None,
    marked: bool = True,
    processor: str | None = PROCESSOR,
    shared: bool = False,
) -> list[str]:
    """The ids that vLLM makes of images, with kvshelf's marks or as without kvshelf.

    Without the marks `processor` is the model's name.
    """
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=MultiModalDataItems({"image": ImageProcessorItems(list(images))}),
        mm_uuid_items=None if uuids is None else {"image": uuids},
        hf_processor_mm_kwargs=arguments or {},
    )
    if marked:
        name = item_ids._ModelName("a model")
        name.model, name.is_shared = object(), shared
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                item_ids,
                "processor_of",
                lambda *_, made_anew: processor if made_anew == bool(arguments) else None,
            )
            return inputs.get_mm_hashes(name, ALGORITHM)["image"]
    hashing: Any = MultiModalHasher.hash_kwargs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MultiModalHasher, "hash_kwargs", classmethod(hashing.__func__.__wrapped__.__func__)
        )
        making: Any = ProcessorInputs.get_mm_hashes
        found: list[str] = making.__wrapped__(inputs, processor, ALGORITHM)["image"]
        return found


def unmarked(name: str) -> str:
    return name.removeprefix(f"{CLIENT}{PROCESSOR}-").removeprefix(CONTENT)


def ids(
    trust: bool = False,
    shared: bool = False,
    processor: str | None = PROCESSOR,
    options: str | None = "",
    adapts_encoder: bool = False,
) -> ItemIds:
    """The scheduler side of an engine with these digests."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        ec_transfer_config=object() if shared else None,
        lora_config=SimpleNamespace(enable_tower_connector_lora=adapts_encoder),
    )
    made = ItemIds(config, trust, Counters())
    made._media.processor, made._media.options = processor, options
    return made


def judge(
    *features: Any, salt: str | None = None, lora: LoRARequest | None = None, **engine: Any
) -> bool:
    """Whether the scheduler side would load and store a request with these items."""
    request = SimpleNamespace(mm_features=features, cache_salt=salt, lora_request=lora)
    return ids(**engine).may_enter_keys(request)


# ------------------------------------------------------------------------- made and marked


@pytest.mark.parametrize("arguments", [{}, {"size": 4}])
def test_ids_are_those_of_vllm_behind_their_marks(arguments: dict[str, object]) -> None:
    uuids = ["one", None, "two"]
    made = hashes(CAT, DOG, None, uuids=uuids, arguments=arguments)
    assert [unmarked(name) for name in made] == hashes(
        CAT, DOG, None, uuids=uuids, arguments=arguments, marked=False
    )
    assert [name.startswith(f"{CLIENT}{PROCESSOR}-") for name in made] == [True, False, True]
    assert [name.startswith(CONTENT) for name in made] == [False, True, False]


# ------------------------------------------------------------------------- sent


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> VllmConfig:
    arguments = EngineArgs(
        model=str(tiny_model), skip_tokenizer_init=True, max_model_len=128, enforce_eager=True
    )
    return arguments.create_engine_config()


@pytest.fixture
def processor(config: VllmConfig) -> InputProcessor:
    made = InputProcessor(config)
    # As for a model that takes images.
    made.mm_encoder_cache_size = 100
    return made


def sent(
    processor: InputProcessor, names: list[str], lora: LoRARequest | None = None
) -> list[MultiModalFeatureSpec]:
    """Images under these ids as they arrive in the engine's process."""
    ranges = [PlaceholderRange(offset=4 * index, length=4) for index in range(len(names))]
    prepared = mm_input(
        prompt_token_ids=[1] * 4 * len(names),
        mm_kwargs={"image": [None] * len(names)},  # type: ignore[arg-type]
        mm_hashes={"image": names},
        mm_placeholders={"image": ranges},
    )
    request = processor.process_inputs(
        "a request",
        prepared,
        SamplingParams(max_tokens=1, detokenize=False),
        ("generate",),
        lora_request=lora,
    )
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    features = arrived.mm_features
    assert features is not None
    return list(features)


def test_engine_s_process_gets_content_ids_as_without_kvshelf(
    processor: InputProcessor,
) -> None:
    made = hashes(CAT, DOG, uuids=[None, "dog"])
    cat, dog = sent(processor, made)
    assert [cat.identifier] == hashes(CAT, marked=False)
    assert dog.identifier == f"{CLIENT}{PROCESSOR}-dog"
    # The processed item is cached under this name on both sides.
    assert [cat.mm_hash, dog.mm_hash] == made
    assert judge(cat)
    assert not judge(cat, dog)
    assert judge(cat, dog, trust=True)
    assert not judge(cat, shared=True)


@pytest.fixture
def adapting(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    """Of an engine whose adapters change its encoder."""
    settings = SimpleNamespace(enable_tower_connector_lora=True)
    monkeypatch.setattr(processor, "lora_config", settings)
    monkeypatch.setattr(processor, "_validate_lora", lambda _: None)
    return processor


@pytest.mark.parametrize("uuid", [None, "cat"])
@pytest.mark.parametrize("options", ["", "3" * 64])
def test_adapter_s_name_is_not_in_keys(
    adapting: InputProcessor, uuid: str | None, options: str
) -> None:
    """Its content is."""
    engine = ids(options=options, adapts_encoder=True)
    names = set()
    for lora in (LoRARequest("one", 1, "/a"), LoRARequest("two", 7, "/a"), None):
        (feature,) = sent(adapting, hashes(CAT, uuids=[uuid]), lora)
        names.add(engine.in_key(feature, lora))
    assert len(names) == 1


@pytest.mark.parametrize("name", ["1:cat", "cat", f"{CONTENT}cat", f"1:{CLIENT}cat"])
def test_without_the_number_of_their_adapter_items_are_left_out(
    adapting: InputProcessor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever id a client chose."""
    lora = LoRARequest("an adapter", 1, "/a/path")
    # A process without kvshelf, and one whose ids name outputs of encoders among engines.
    unmarked_feature = SimpleNamespace(identifier=f"an adapter:{name}", mm_hash=name)
    monkeypatch.setattr(adapting.vllm_config, "ec_transfer_config", object())
    (shared,) = sent(adapting, hashes(CAT, uuids=[name], shared=True), lora)
    assert shared.identifier == f"an adapter:{item_ids._unmarked(name)}"
    for feature, more in ((unmarked_feature, {}), (shared, {"shared": True})):
        for adapts in (False, True):
            engine = more | {"trust": True, "adapts_encoder": adapts, "lora": lora}
            assert judge(feature, **engine) is not adapts
            assert judge(feature, **engine | {"lora": None})


# ------------------------------------------------------------------------- judged


@given(name=TEXTS, adapter=TEXTS.map(lambda text: f"{text}:") | st.just(""))
def test_no_client_makes_an_id_that_is_trusted(name: str, adapter: str) -> None:
    # A process without kvshelf: both names are the client's.
    assert not judge(SimpleNamespace(identifier=adapter + name, mm_hash=name))
    # A process with kvshelf.
    (cat,) = hashes(CAT)
    for given_name in (name, *hashes(DOG, uuids=[name])):
        feature = SimpleNamespace(identifier=adapter + given_name, mm_hash=given_name, data=None)
        item_ids._mark(feature, False, LoRARequest("an adapter", 1, "/a/path"))
        assert not judge(feature)
        assert feature.identifier != adapter + unmarked(cat)
        assert feature.mm_hash != cat


# ------------------------------------------------------------------------- in keys


def test_name_in_a_key_says_by_which_processor(processor: InputProcessor) -> None:
    other = "2" * 64
    for uuids in (None, ["cat"]):
        (one,) = sent(processor, hashes(CAT, uuids=uuids))
        (two,) = sent(processor, hashes(CAT, uuids=uuids, processor=other))
        # What the engine's own process found does not matter then.
        for trust in (False, True):
            assert ids(trust).in_key(one) == ids(trust, processor=None).in_key(one)
            assert ids(trust).in_key(one) != ids(trust).in_key(two)
    (feature,) = sent(processor, ["a name"])
    for engine in ({"trust": True}, {"shared": True, "trust": True}, {}):
        assert ids(**engine).in_key(feature) != ids(**engine, processor=other).in_key(feature)
        assert not judge(feature, salt="salt", **engine, processor=None)
        assert judge(feature, salt="salt", **engine)


def test_trusted_uuid_has_one_name_with_and_without_marks(processor: InputProcessor) -> None:
    (marked,) = sent(processor, hashes(CAT, uuids=["cat"]))
    plain = SimpleNamespace(identifier="cat", mm_hash="cat")
    assert ids(trust=True).in_key(marked) == ids(trust=True).in_key(plain)
    assert ids().in_key(marked) != ids().in_key(plain)


def test_items_of_an_unknown_processor_are_left_out(processor: InputProcessor) -> None:
    made = hashes(CAT, DOG, uuids=[None, "dog"], processor=None)
    derived = [MultiModalHasher.hash_kwargs(ALGORITHM, mm_hash=name, size=2) for name in made]
    for feature in sent(processor, [*made, *derived]):
        assert not judge(feature)
        assert not judge(feature, trust=True)
        assert not judge(feature, salt="salt")


def test_vllm_asks_by_the_name_that_tells_the_processor(
    processor: InputProcessor, config: VllmConfig
) -> None:
    from vllm.multimodal.processing.context import BaseProcessingInfo, InputProcessingContext

    info = BaseProcessingInfo(InputProcessingContext(config.model_config, None))
    assert info.model_id == config.model_config.model
    model = info.model_id.model  # type: ignore[attr-defined]
    found = media.processor_digest(model, float("inf"))
    inputs = ProcessorInputs([], MultiModalDataItems({"image": ImageProcessorItems([CAT])}))
    assert found is not None
    assert inputs.get_mm_hashes(info.model_id, ALGORITHM)["image"] == hashes(CAT, processor=found)
