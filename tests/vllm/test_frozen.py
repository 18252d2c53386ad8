"""What engines write stays as it was recorded: names, headers, sizes, and KV.

Each conversation is held with one engine on an empty shelf and compared with its file in
``tests/golden/frozen``:

* The namespace, and names, sizes and headers of objects, but for the hashes in headers, are the
  same on every machine. So weights have a name here, adapters are drawn exactly, and no layout is
  one that depends on the processor.
* KV is the same to the bit where this kind of processor, torch and vLLM recorded it. Otherwise
  some values of each tensor are the same up to rounding.

What was recorded is loaded, and so is what earlier releases wrote.

These files change only with the format, or with what engines are to store. To record them, or to
add the bits of this machine's processor to files that hold otherwise::

    RECORD_FROZEN=1 python -m pytest tests/vllm/test_frozen.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch

from examples.models.make_model import make_model
from kvshelf.format.differences import differing_fields
from kvshelf.format.namespace import Namespace
from tests.support.engines import (
    NEAR_TIE,
    Ask,
    Engine,
    Engines,
    ShelfFiles,
    assert_same,
    read_object,
)
from tests.support.make_hybrid_model import make_hybrid_model
from tests.support.waiting import until
from tests.vllm.adapter_files import RANK, attention_shapes, make_adapter
from tests.vllm.handing_over import ASKED
from tests.vllm.tiny_llava import engine_arguments, make_llava, prompt_with_images

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "frozen"
RECORD: Final = bool(os.environ.get("RECORD_FROZEN"))
TEXT: Final = [random.Random(number).randrange(3, 4095) for number in range(1200)]
#: Values are of the size of one. Those of kernels without AVX differ by up to 0.001 and 0.03.
TOLERANCES: Final = {"float32": 0.01, "bfloat16": 0.1}
#: Of elements. Blocks as vLLM packs them hold float32 here.
_TYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.float32}

RELEASES: Final = sorted(GOLDEN.parent.glob("v[0-9]*"))


class Conversation(NamedTuple):
    """What is asked of an engine.

    Attributes
    ----------
    options : dict
        Of the connector.
    arguments : dict
        Of the engine.
    requests : list of dict
    hits : list of (dict, int)
        Later requests, and how many tokens come from the shelf.
    """

    options: dict[str, Any]
    arguments: dict[str, Any]
    requests: list[dict[str, Any]]
    hits: list[tuple[dict[str, Any], int]]


def full(root: Path) -> Conversation:
    """Full attention as vLLM packs it on all x86: a tail, a salt, an adapter, a second turn."""
    if platform.machine() != "x86_64":
        pytest.skip("stored on x86: this machine's attention kernel packs KV differently")
    adapter = make_adapter(root / "adapter", 1, attention_shapes())
    lora = {"lora_name": "one", "lora_int_id": 1, "lora_path": str(adapter)}
    arguments = {"model": make_model(root / "tiny", "tiny"), "dtype": "float32"}
    return Conversation(
        {},
        arguments | {"enable_lora": True, "max_lora_rank": RANK},
        [
            {"prompt": TEXT[:600], "kv_transfer_params": ASKED},
            {"prompt": TEXT[:600], "cache_salt": "a tenant"},
            # Loads the adapter, so that its digest is known when there is something to store.
            {"prompt": TEXT[:20], "lora": lora},
            {"prompt": TEXT[:600], "lora": lora},
            {"prompt": TEXT[:800]},
        ],
        [],
    )


def windows(root: Path) -> Conversation:
    """Sliding windows: a hand-over, another end of its prompt, and a salt with a folder."""
    model = make_hybrid_model(root / "gemma3", "gemma3")
    return Conversation(
        {"layout": "canonical", "group_by_salt": True},
        {"model": model, "dtype": "float32"},
        [
            {"prompt": TEXT[:900], "kv_transfer_params": ASKED},
            {"prompt": TEXT[:600] + TEXT[700:1000]},
            {"prompt": TEXT[:600], "cache_salt": "a tenant"},
        ],
        [
            ({"prompt": TEXT[:900]}, 768),
            ({"prompt": TEXT[:600], "cache_salt": "a tenant"}, 512),
            ({"prompt": TEXT[:600], "cache_salt": "another"}, 0),
        ],
    )


def states(root: Path) -> Conversation:
    """States: a hand-over, and a second turn."""
    model = make_hybrid_model(root / "qwen3-next", "qwen3-next")
    return Conversation(
        {"layout": "canonical"},
        {"model": model, "mamba_ssm_cache_dtype": "float32"},
        [
            {"prompt": TEXT[:300], "kv_transfer_params": ASKED},
            {"prompt": TEXT[:600]},
        ],
        [({"prompt": TEXT[:600]}, 512)],
    )


def images(root: Path) -> Conversation:
    """Two images in a text of six chunks: in its second and third, and its fourth and fifth."""
    arguments = engine_arguments() | {"model": make_llava(root / "llava"), "dtype": "float32"}
    prompt = prompt_with_images(1)
    return Conversation(
        {"layout": "canonical"},
        arguments,
        [{"prompt": prompt, "images": [1, 2]}],
        [
            ({"prompt": prompt, "images": images}, 256 * chunks)
            for images, chunks in (([1, 2], 6), ([1, 3], 3), ([4, 2], 1))
        ],
    )


CONVERSATIONS: Final = [
    full,
    *(pytest.param(one, marks=pytest.mark.slow) for one in (windows, states, images)),
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_engines_write_what_is_recorded(
    conversation: Callable[[Path], Conversation], engines: Engines, tmp_path: Path
) -> None:
    file = GOLDEN / f"{conversation.__name__}.json"
    recorded = json.loads(file.read_text()) if file.exists() else None
    assert RECORD or recorded is not None, f"{file} is missing"
    shelf = ShelfFiles(tmp_path / "shelf")
    options, arguments, requests, hits = conversation(tmp_path)
    options |= {"weights": "name:frozen"}
    arguments |= {"core": 0, "max_num_batched_tokens": 2048}
    turns: dict[Path, int] = {}
    with engines.start(
        f"frozen {file.stem}", shelf.root, extra_config=options, **arguments
    ) as engine:
        for turn, request in enumerate(requests):
            engine.generate(**request, max_tokens=1)
            # What a turn stores may depend on what is stored already.
            wait_stored(shelf, None if RECORD else recorded, turn)
            turns |= dict.fromkeys(shelf.objects() - turns.keys(), turn)
        engine.reset_connector()
        turns |= dict.fromkeys(shelf.objects() - turns.keys(), len(requests))
        check_hits(engine, hits)
    found = describe(shelf, turns)
    differing = ["everything"] if recorded is None else differences(recorded, found)
    if not RECORD:
        assert not differing, "\n".join(differing)
        return
    if not differing:
        found = recorded | {"bits": recorded["bits"] | found["bits"]}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


def check_hits(engine: Engine, hits: list[tuple[dict[str, Any], int]]) -> None:
    """Assert what is loaded, and compare answers behind it with what the engine computes."""
    for request, hit in hits:
        engine.reset_prefix_cache()
        answer = engine.generate(**request)
        assert answer.shelf_tokens == hit
        # Log probabilities of a prompt are asked for: nothing comes from a cache.
        computed = engine.generate(**request, prompt_logprobs=0)
        assert computed.cached_tokens == 0
        assert_same(answer, computed, NEAR_TIE)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_shelf_of_a_release_is_loaded_on_every_processor(
    engines: Engines, ask: Ask, release: Path
) -> None:
    """By an engine whose namespace has no more fields than that release's."""
    stored = json.loads((release / "prompt.json").read_text())
    shelf = ShelfFiles(engines.root / f"shelf of {release.name}")
    with engines.start(
        f"reads {release.name}",
        shelf.root,
        connector=("ConnectorWithoutConfiguration", "tests.vllm.earlier_connector"),
        extra_config={"layout": "canonical"},
        block_size=64,
    ) as engine:
        # So that the engine's namespace is there.
        shelf.fill(engine, [3] * 300)
        folder = shelf.folder
        shutil.copytree(release / "shelf" / folder.name, folder, dirs_exist_ok=True)
        ask(engine, stored["tokens"], stored["chunks"] * 256, tolerance=NEAR_TIE)


def wait_stored(shelf: ShelfFiles, recorded: dict[str, Any] | None, turn: int) -> None:
    """Wait for as many objects as were recorded; without a record, until no more are stored."""
    if recorded is not None:
        count = sum(one["turn"] <= turn for one in recorded["objects"].values())
        # What is missing is told by name at the end.
        with contextlib.suppress(AssertionError):
            until(lambda: len(shelf.objects()) >= count)
        return
    before = -1
    while before != (before := len(shelf.objects())):
        time.sleep(5)


def processor() -> str:
    """Return a name for what decides how KV is rounded here."""
    import vllm

    facts = {k: v for k, v in torch.cpu.get_capabilities().items() if not k.startswith("num_")}
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    kernels = torch.backends.cpu.get_cpu_capability()
    versions = f"torch {torch.__version__}, vLLM {vllm.__version__}"
    return f"{facts.get('cpu_name')} {digest}, {kernels}, {versions}"


def describe(shelf: ShelfFiles, turns: dict[Path, int]) -> dict[str, Any]:
    """Return what lies on a shelf, in the form of the golden files."""
    objects: dict[str, Any] = {}
    tensors: list[dict[str, Any]] = []
    bits = []
    for path in sorted(turns):
        read_object(path)
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        compact = json.dumps(header, separators=(",", ":")).encode()
        assert data[8:start] == compact.ljust(start - 8), f"{path}: a header of another form"
        metadata = header.pop("__metadata__")
        del metadata["xxh3"]
        if header not in tensors:
            tensors.append(header)
        objects[str(path.relative_to(shelf.root))] = {
            "turn": turns[path],
            "size": len(data),
            "metadata": metadata,
            "tensors": tensors.index(header),
            "values": {name: sample(data[start:], one) for name, one in header.items()},
        }
        bits.append(hashlib.sha256(data).hexdigest()[:16])
    return {
        "namespace": shelf.record,
        "tensors": tensors,
        "objects": objects,
        "bits": {processor(): bits},
    }


def sample(payload: bytes, tensor: dict[str, Any]) -> list[float]:
    """Return four values of a tensor."""
    begin, end = tensor["data_offsets"]
    values = torch.frombuffer(bytearray(payload[begin:end]), dtype=_TYPES[tensor["dtype"]])
    places = [index * (len(values) - 1) // 3 for index in range(4)]
    return [float(f"{values[place]:.4g}") for place in places]


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each difference; names and hashes follow from the namespace."""

    def told(what: str, old: Any, new: Any) -> str:
        return f"{what}: recorded {old!r}, found {new!r}"

    old, new = recorded["namespace"], found["namespace"]
    if fields := differing_fields(Namespace(old), Namespace(new)):
        return [told(f"namespace, {field}", old.get(field), new.get(field)) for field in fields]
    tolerance = TOLERANCES[old["compute_dtype"]]
    old, new = recorded["objects"], found["objects"]
    lines = [f"{name}: not written" for name in old.keys() - new.keys()]
    lines += [f"{name}: not recorded" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        for part in ("turn", "size", "metadata"):
            if old[name][part] != new[name][part]:
                lines.append(told(f"{name}, {part}", old[name][part], new[name][part]))
        tensors = [one["tensors"][one["objects"][name]["tensors"]] for one in (recorded, found)]
        if list(tensors[0].items()) != list(tensors[1].items()):
            lines.append(told(f"{name}, tensors", *tensors))
            continue
        for tensor, values in old[name]["values"].items():
            if new[name]["values"][tensor] != pytest.approx(values, tolerance, tolerance):
                lines.append(told(f"{name}, {tensor}", values, new[name]["values"][tensor]))
                break
    here = processor()
    if not lines and here in recorded["bits"]:
        pairs = zip(sorted(old), recorded["bits"][here], found["bits"][here], strict=True)
        lines = [
            told(f"{name}, bits on {here}", *bits) for name, *bits in pairs if bits[0] != bits[1]
        ]
    return sorted(lines)
