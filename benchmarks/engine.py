"""Rows ``engine/*`` and ``startup/*``: real vLLM engines with kvshelf and with an inert connector.

Owns the comparison of engines without mutual disturbance, see :func:`bench_engine`. Each engine is
a child process; this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bucket import RawLoads, bucket
from benchmarks.child import Child, ChildError, MissingEngineError, require_engine
from benchmarks.least_bytes import bytes_row, with_bytes
from benchmarks.measure import Goal, Row
from benchmarks.samples import BLOCK_TOKENS, CHUNK_TOKENS, make_prompt
from benchmarks.servers import BUCKET, MissingServerError
from benchmarks.settings import Settings

_CHUNKS = 16
HIT_TOKENS = _CHUNKS * CHUNK_TOKENS
#: Tokens of a prompt behind its last whole chunk: they are computed in a hit, too.
REST_TOKENS = 32
PROMPT_TOKENS = HIT_TOKENS + REST_TOKENS
_BURST = 3
#: Size of an engine's KV cache, in prompts: small, so that prompts are soon evicted.
_PROMPTS_IN_CACHE = 6
#: vLLM's workers poll for a second after their last step before they sleep. During this time an
#: idle engine uses a core that the measured engine needs.
QUIET_SECONDS = 1.3
_STORE_SECONDS = 60.0


#: ``kv_transfer_config`` of connectors for comparison: does nothing; only holds requests.
INERT: Mapping[str, Any] = {
    "kv_connector": "InertConnector",
    "kv_connector_module_path": "benchmarks.inert",
}
HOLDING: Mapping[str, Any] = {
    "kv_connector": "HoldingConnector",
    "kv_connector_module_path": "benchmarks.holding",
}


def kvshelf_connector(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``kv_transfer_config`` of kvshelf with these options, to load every hit."""
    return {
        "kv_connector": "KVShelfConnector",
        "kv_connector_module_path": "kvshelf.vllm.connector",
        "kv_connector_extra_config": {"admission": "always", **options},
    }


class EngineRun:
    """Starts engines on one model and one shelf, and waits for their stores.

    Attributes
    ----------
    shelf : Path
    seed : int
        Number of the prompt that :meth:`prompt` returned last.
    """

    def __init__(self, settings: Settings, model: Path, name: str) -> None:
        self.shelf = settings.folder(f"{name}-shelf")
        self._logs = settings.folder(f"{name}-logs")
        self._cache = settings.folder(f"{name}-cache")
        self._model = model
        self.seed = 0

    @property
    def _config(self) -> dict[str, Any]:
        """The Hugging Face configuration; the model may be another one for each engine."""
        config: dict[str, Any] = json.loads((self._model / "config.json").read_text())
        return config

    def engine(
        self,
        name: str,
        *,
        connector: Mapping[str, Any] | None = None,
        mode: str = "engine",
        cache: str = "",
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Child:
        """Start an engine; it is ready when it replies to its first command.

        `connector` is the ``kv_transfer_config`` of another connector than kvshelf, `mode` the kind
        of child. `options` are kvshelf's options; the path of the shelf when absent. `env` are
        further variables.
        """
        if connector is None:
            connector = kvshelf_connector(options or {"shared_storage_path": str(self.shelf)})
        settings: dict[str, Any] = {
            "model": str(self._model),
            # By itself vLLM runs a float32 checkpoint in bf16.
            "dtype": self._config.get("dtype", "auto"),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": _PROMPTS_IN_CACHE * self.prompt_bytes(),
            "gpu_memory_utilization": 0.1,
            "max_num_seqs": 16,
            "seed": 0,
            "disable_log_stats": False,
            **arguments,
        }
        return Child(
            mode,
            self._logs / f"{name}.txt",
            env={"KVSHELF_CACHE_DIR": str(self._cache / cache), **(env or {})},
            kv_transfer_config={"kv_role": "kv_both", **connector},
            **settings,
        )

    def prompt_bytes(self, tokens: int = PROMPT_TOKENS) -> int:
        """Return the bytes of the KV of a prompt of `tokens` tokens, in whole blocks."""
        config = self._config
        heads = config["num_attention_heads"]
        row = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        itemsize = 4 if config.get("dtype") == "float32" else 2
        token = 2 * itemsize * config["num_hidden_layers"] * kv_heads * row
        return int(token * (tokens + BLOCK_TOKENS))

    def prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Return a prompt of `tokens` tokens that shares no prefix with earlier ones."""
        self.seed += 1
        return make_prompt(tokens, self.seed, self._config["vocab_size"])

    def objects(self) -> list[Path]:
        """Return all objects on the shelf."""
        return list(self.shelf.glob("*/*/*/*.safetensors"))

    def wait_stored(self, least: int) -> float:
        """Wait until `least` objects are on the shelf and none is being written.

        Returns
        -------
        float
            Duration in seconds.

        Raises
        ------
        ChildError
            After one minute.
        """
        begin = time.monotonic()
        while len(self.objects()) < least or list(self.shelf.glob("*/*/*/.*.tmp")):
            if time.monotonic() - begin > _STORE_SECONDS:
                raise ChildError(f"{len(self.objects())} of {least} objects were stored")
            time.sleep(0.02)
        return time.monotonic() - begin

    def empty(self) -> None:
        """Delete all objects."""
        for path in self.objects():
            path.unlink()


def find_model(settings: Settings) -> Path:
    """Return the model to measure with; create the demo model if necessary.

    Raises
    ------
    MissingEngineError
        If there is no model.
    """
    if settings.model is not None:
        return settings.model
    checkout = Path(__file__).resolve().parents[1]
    script = checkout / "examples" / "models" / "make_model.py"
    if not script.exists():
        raise MissingEngineError("no demo model here: give a checkpoint with --model")
    folder = checkout / "build" / "models" / "demo"
    settings.progress("making the demo model")
    subprocess.run(  # noqa: S603  our own script
        [sys.executable, str(script), str(folder), "--recipe", "demo", "--replace"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


_SINGLE = Row(
    "engine/cold",
    f"cold TTFT, {PROMPT_TOKENS} tokens, request by request",
    "inert connector",
    goal=Goal(1.03),
    note="stores end, and 1.3 s pass, before the other engine's request",
)
_BURSTS = Row(
    "engine/cold-burst",
    f"{_BURST} cold prompts back to back, each waits for the one before",
    "inert connector",
    goal=Goal(1.03),
    note="first submission to last first token: holds the stores of all but the last prompt",
)
_WARM = Row(
    "engine/warm",
    f"warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from the shelf, fresh process",
    "vLLM's in-memory prefix cache",
    goal=Goal(1.25),
)


_WARM_BYTES = bytes_row(_WARM, "engine/warm-bytes", 1.1, read=True)
_DELAY_SECONDS = 20e-3
_STORED_SECONDS = 10.0
#: Objects that a load reads concurrently.
_RAW_THREADS = 16
_FAR = Row(
    "engine/warm-s3",
    f"warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from S3 at {1e3 * _DELAY_SECONDS:g} ms",
    "from a local shelf, + 4 round trips + 1.15 × the raw client's time for the bytes",
    goal=Goal(1.0),
)


def bench_engine(settings: Settings) -> Iterator[Row]:
    """Measure the time to the first token, cold and warm.

    Cold: two engines, one with kvshelf and one with an inert connector, run at the same time and
    get distinct prompts in turn, so one of them is always idle (the processor time of idle engines
    is measured and reported). kvshelf's work after the first token counts in the row of bursts,
    where the same engine gets its next prompt at once. It does not affect the other engine's
    figure, because the next request is sent after all stores have ended.

    Warm: a new process on the same shelf. Each prompt is sent twice to the same engine: first its
    KV comes from the shelf, then from vLLM's own prefix cache. One prompt's first request is next
    to another prompt's second.
    """
    yield from guarded(settings, [_SINGLE, _BURSTS, _WARM, _WARM_BYTES, _FAR], _engine_rows)


def guarded(
    settings: Settings, rows: Sequence[Row], measure: Callable[[Settings], Iterator[Row]]
) -> Iterator[Row]:
    """Yield the measured rows, and a skipped row with the reason for each of the others."""
    left = {row.name: row for row in rows}
    reason = "not with --quick"
    if not settings.quick:
        try:
            require_engine()
            for row in measure(settings):
                left.pop(row.name)
                yield row
        except MissingEngineError as error:
            reason = str(error)
        except (ChildError, OSError, subprocess.CalledProcessError) as error:
            reason = f"failed: {error}"
    for row in left.values():
        yield replace(row, skipped=reason)


def _engine_rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "engine")
    yield from _cold_rows(settings, run)
    row = warm_row(settings, run, _WARM)
    yield row
    yield with_bytes(_WARM_BYTES, row, run.objects(), _CHUNKS, read=True)
    try:
        yield _far_row(settings, run)
    except MissingServerError as error:
        yield replace(_FAR, skipped=str(error))


def warm_up(engine: Child, run: EngineRun) -> None:
    """Run what is not to be timed."""
    # Triggers one-time compilation, and touches all memory of the KV cache.
    engine.call("generate", prompts=[run.prompt()[:600]])
    engine.call("generate", prompts=[run.prompt() for _ in range(_PROMPTS_IN_CACHE + 1)])


def cold(
    engine: Child, run: EngineRun, prompts: int, tokens: int = PROMPT_TOKENS
) -> dict[str, Any]:
    """Run prompts of `tokens` tokens that no cache holds, one after another."""
    reply = engine.call("generate", prompts=[run.prompt(tokens) for _ in range(prompts)])
    if any(reply["cached"]):
        raise ChildError(f"cold prompts were cached: {reply['cached']} tokens")
    return reply


def _cold_rows(settings: Settings, run: EngineRun) -> Iterator[Row]:
    settings.progress("starting two engines")
    with run.engine("kvshelf") as ours, run.engine("inert", connector=INERT) as floor:
        ready = [engine.wait_ready() for engine in (ours, floor)]
        settings.progress("warming up")
        for engine in (ours, floor):
            warm_up(engine, run)
        objects = _learn_objects(ours, run)
        idle = _idle_share([ours, floor])
        extra: dict[str, object] = {
            "start_seconds": [reply["wall_seconds"] for reply in ready],
            "idle_engines_processor_share": idle,
            "objects_for_a_prompt": objects,
        }
        for row, prompts, pairs in (
            (_SINGLE, 1, settings.pairs(21)),
            (_BURSTS, _BURST, settings.pairs(15)),
        ):
            times: tuple[list[float], list[float]] = ([], [])
            stores: list[float] = []
            for pair in range(pairs):
                settings.progress(f"{row.work}: pair {pair + 1} of {pairs}")
                for side in (0, 1) if pair % 2 else (1, 0):
                    reply = cold((ours, floor)[side], run, prompts)
                    times[side].append(reply["seconds"])
                    if side == 0:
                        stores.append(run.wait_stored(prompts * objects))
                        run.empty()
                    time.sleep(QUIET_SECONDS)
            yield replace(
                row,
                ours=times[0],
                floors=times[1],
                extra={**extra, "store_seconds_after_answer": stores},
            )
        store_for_warm_row(settings, run, ours, objects)


_WARM_SEED = 1_000_000
#: Pairs that are not counted.
WARM_UP_PAIRS = 2
_WARM_PAIRS = 31


def store_for_warm_row(settings: Settings, run: EngineRun, engine: Child, objects: int) -> None:
    """Store the prompts of :func:`warm_row`, of `objects` objects each, on an empty shelf."""
    settings.progress("storing prompts for the warm engine")
    run.seed = _WARM_SEED
    for number in range(settings.pairs(_WARM_PAIRS) + WARM_UP_PAIRS + 1):
        cold(engine, run, 1)
        run.wait_stored((number + 1) * objects)


def _learn_objects(engine: Child, run: EngineRun) -> int:
    """Return the number of objects of one prompt."""
    time.sleep(2 * QUIET_SECONDS)
    run.wait_stored(1)
    run.empty()
    cold(engine, run, 1)
    run.wait_stored(_CHUNKS)
    time.sleep(2 * QUIET_SECONDS)
    count = len(run.objects())
    run.empty()
    if count % _CHUNKS:
        raise ChildError(f"{_CHUNKS} chunks made {count} objects")
    return count


def _idle_share(engines: list[Child], seconds: float = 2.0) -> float:
    """Return the number of processors that idle engines use together."""
    before = sum(engine.cpu_seconds() for engine in engines)
    time.sleep(seconds)
    return (sum(engine.cpu_seconds() for engine in engines) - before) / seconds


def warm_row(settings: Settings, run: EngineRun, row: Row, **arguments: Any) -> Row:
    """Measure prompts of :func:`store_for_warm_row`: from the shelf, and from vLLM's memory."""
    settings.progress("starting a fresh engine")
    pairs = settings.pairs(_WARM_PAIRS)
    with run.engine("warm", **arguments) as engine:
        engine.wait_ready()
        run.seed = 2 * _WARM_SEED
        warm_up(engine, run)
        run.seed = _WARM_SEED
        before = run.prompt()
        first = warm(engine, before, HIT_TOKENS)
        measured = hits_beside_memory(settings, run, engine, row, before, pairs)
    return replace(measured, extra={"first_hit_seconds": first})


def hits_beside_memory(
    settings: Settings,
    run: EngineRun,
    engine: Child,
    row: Row,
    before: list[int],
    pairs: int,
    pause: Callable[[], object] | None = None,
) -> Row:
    """Fill a row with hits of the next prompts, each beside one in vLLM's own prefix cache.

    Parameters
    ----------
    settings, run, engine, row
    before : list of int
        The prompt that is in vLLM's cache at first.
    pairs : int
        Those that count; :data:`WARM_UP_PAIRS` come before.
    pause : Callable, optional
        Called before each request.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-WARM_UP_PAIRS, pairs):
        settings.progress(f"{row.work}: pair {pair + 1} of {pairs}")
        prompt = run.prompt()
        # The previous prompt is always in memory, so the order does not matter.
        turns = [(0, prompt, HIT_TOKENS), (1, before, 0)]
        for side, tokens, shelf in turns if pair % 2 else turns[::-1]:
            if pause is not None:
                pause()
            seconds = warm(engine, tokens, shelf)
            if pair >= 0:
                times[side].append(seconds)
        before = prompt
    return replace(row, ours=times[0], floors=times[1])


def _far_row(settings: Settings, run: EngineRun) -> Row:
    """Compare an engine on a bucket with one on the directory that the bucket copies."""
    pairs = settings.pairs(31)
    ours, floors, locals_, raws = [], [], [], []
    with bucket(settings.folder("engine-bucket")) as place:
        shutil.copytree(run.shelf, place.folder / "kv", copy_function=os.link)
        files = sorted(place.folder.glob("kv/*/*/*/*.safetensors"))
        share = files[: len(files) // (settings.pairs(31) + WARM_UP_PAIRS + 1)]
        names = [str(file.relative_to(place.folder)) for file in share]
        buffers = [memoryview(bytearray(file.stat().st_size)) for file in share]
        place.proxy.delay(_DELAY_SECONDS)
        far = {"shared_storage_path": f"s3://{BUCKET}/kv", "storage_options": place.options()}
        settings.progress("starting an engine on a bucket and one on its copy")
        with (
            run.engine("far", options=far) as engine,
            run.engine("near") as local,
            closing(RawLoads(place, names, buffers, _RAW_THREADS)) as raw,
        ):
            for each in (engine, local):
                each.wait_ready()
            run.seed = 3 * _WARM_SEED
            for each in (engine, local):
                warm_up(each, run)
            # Wait until the warm-up's stores have reached the bucket.
            time.sleep(_STORED_SECONDS)
            run.seed = _WARM_SEED
            for pair in range(-WARM_UP_PAIRS, pairs):
                settings.progress(f"{_FAR.work}: pair {pair + 1} of {pairs}")
                prompt = run.prompt()
                seconds: dict[int, float] = {}
                for side in (0, 1) if pair % 2 else (1, 0):
                    seconds[side] = warm((engine, local)[side], prompt, HIT_TOKENS)
                    time.sleep(QUIET_SECONDS)
                begin = time.perf_counter()
                raw.run()
                raw_seconds = time.perf_counter() - begin
                if pair >= 0:
                    ours.append(seconds[0])
                    locals_.append(seconds[1])
                    raws.append(raw_seconds)
                    floors.append(seconds[1] + 4 * _DELAY_SECONDS + 1.15 * raw_seconds)
            client = raw.client
    return replace(
        _FAR,
        ours=ours,
        floors=floors,
        extra={
            "local_seconds": locals_,
            "raw_seconds": raws,
            "raw_client": client,
            "bytes": sum(map(len, buffers)),
        },
    )


def warm(engine: Child, prompt: list[int], shelf: int) -> float:
    """Run a prompt that is cached but for its last 32 tokens; `shelf` of them on the shelf."""
    reply = engine.call("generate", prompts=[prompt])
    hit = len(prompt) - REST_TOKENS
    if reply["cached"] != [hit] or reply["shelf"] != shelf:
        raise ChildError(
            f"expected {hit} cached tokens, {shelf} of them from the shelf; found "
            f"{reply['cached']} and {reply['shelf']}"
        )
    return float(reply["seconds"])


# ------------------------------------------------------------------------------------- startup

_CHECKPOINT_GIB = 2.5
_STARTUP = Row(
    "startup",
    f"start of an engine, checkpoint of {_CHECKPOINT_GIB:g} GiB not seen before",
    "inert connector",
    goal=Goal(1.01),
    note="from the start of the process until it takes requests",
)


def bench_startup(settings: Settings) -> Iterator[Row]:
    """Measure whether naming the weights by their content delays the start of an engine."""
    yield from guarded(settings, [_STARTUP], _startup_rows)


def _startup_rows(settings: Settings) -> Iterator[Row]:
    model = settings.model or _make_checkpoint(settings)
    run = EngineRun(settings, model, "startup")
    pairs = settings.pairs(7)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-1, pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            settings.progress(f"{_STARTUP.work}: pair {pair + 1} of {pairs}")
            # A separate cache: fingerprints cached by one start would speed up the next.
            name = f"{pair}-{side}"
            with run.engine(name, connector=INERT if side else None, cache=name) as engine:
                seconds = engine.wait_ready()["wall_seconds"]
            if pair >= 0:
                times[side].append(seconds)
    size = sum(file.stat().st_size for file in model.iterdir())
    yield replace(_STARTUP, ours=times[0], floors=times[1], extra={"checkpoint_bytes": size})


def _make_checkpoint(settings: Settings) -> Path:
    """Write a Llama-shaped checkpoint of random weights, of some GiB in a few files."""
    import torch
    from safetensors.torch import save_file

    folder = settings.folder("startup-model")
    need = int(_CHECKPOINT_GIB * 2**30)
    if shutil.disk_usage(folder).free < 2 * need:
        raise OSError(f"{folder} has no room for a checkpoint of {need} bytes")
    settings.progress("writing a large checkpoint")
    hidden, intermediate, heads, vocabulary = 2048, 8192, 16, 32000
    layer = 4 * hidden * hidden + 3 * hidden * intermediate
    layers = max(1, round((need / 2 - 2 * vocabulary * hidden) / layer))
    # One draw is enough: repetitions do not affect hashing and loading.
    noise = (torch.randn(vocabulary * hidden) * 0.02).to(torch.bfloat16)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return noise[: rows * columns].view(rows, columns).clone()

    ends = {
        "model.embed_tokens.weight": weight(vocabulary, hidden),
        "lm_head.weight": weight(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    save_file(ends, folder / "model-00000.safetensors", metadata={"format": "pt"})
    for number in range(layers):
        name = f"model.layers.{number}."
        tensors = {
            f"{name}self_attn.{part}_proj.weight": weight(hidden, hidden)
            for part in ("q", "k", "v", "o")
        }
        tensors |= {
            f"{name}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{name}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{name}mlp.down_proj.weight": weight(hidden, intermediate),
            f"{name}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
        save_file(
            tensors, folder / f"model-{number + 1:05d}.safetensors", metadata={"format": "pt"}
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    os.sync()
    return folder
