"""Prompts as vLLM reads them, and an offline vLLM that fills a shelf with them.

Owns the conversion of prompts to token ids by vLLM's own code, so that chunks get the same keys as
those of a server's requests; it needs a model's tokenizer and configuration, but no engine, no
weights and no GPU. And the engine behind ``kvshelf seed``: its start, and the wait until stores are
done. Its core runs in this process, which can therefore read the namespace and wait for stores;
workers of further ranks have processes of their own.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from kvshelf.config import DEFAULT_MEMORY, Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import SourcePrompt, TokenPrompt, raise_bad_lines
from kvshelf.vllm import check_vllm_version
from kvshelf.vllm.options import CONNECTOR_NAME

_OURS: Final = ("model", "kv_transfer_config")
#: Options that seeding overrides. With a disk tier, chunks that only the tier has would not be
#: stored on the shelf; `read_only` is meant for engines on a shelf that a seeder fills.
_SEEDER_OPTIONS: Final = types.MappingProxyType({"disk_tier": None, "read_only": False})
_IDENTITY_PAUSE: Final = 0.05
#: Seconds for the workers to fingerprint the weights: enough for a large model on a slow disk.
_IDENTITY_SECONDS: Final = 1800.0
#: Seconds for the stores of one batch.
_DRAIN_SECONDS: Final = 600.0


class PromptRenderer:
    """Converts prompts as vLLM's server does (vllm/entrypoints/common/offline.py).

    Parameters
    ----------
    inference : vllm.LLM or another OfflineInferenceMixin
        Only its renderer, its ``model_config`` and its ``chat_template`` are used.
    """

    def __init__(self, inference: Any) -> None:
        self._inference = inference

    @classmethod
    def of_model(cls, model: str, engine_args: Mapping[str, Any] | None = None) -> PromptRenderer:
        """Return the renderer of a model, as vLLM's render server makes one.

        Parameters
        ----------
        model : str
            As for ``vllm serve``.
        engine_args : Mapping, optional
            Further arguments of vLLM's engine that decide tokens, such as ``tokenizer``.

        Raises
        ------
        ConfigError
            If there is no such model, or the arguments cannot be used.
        UnsupportedError
            If vLLM is missing, or kvshelf does not support its version.
        """
        _check_vllm()
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.entrypoints.common.offline import OfflineInferenceMixin
        from vllm.renderers import renderer_from_config

        try:
            model_config = EngineArgs(model=model, **(engine_args or {})).create_model_config()
            # No weights are loaded, so this machine need not support their quantization.
            model_config.quantization = None
            inference = OfflineInferenceMixin()
            inference.model_config = model_config
            inference.renderer = renderer_from_config(VllmConfig(model_config=model_config))
            inference.chat_template = None
        except (TypeError, ValueError, OSError) as error:
            raise ConfigError(f"prompts cannot be read as those of {model}: {error}") from error
        return cls(inference)

    def render(self, prompts: Sequence[SourcePrompt]) -> list[TokenPrompt]:
        """Convert prompts to token ids.

        Raises
        ------
        ConfigError
            If the model does not accept some prompts; the message names all their lines.
        """
        rendered: list[TokenPrompt] = []
        problems: list[tuple[int, str]] = []
        for prompt in prompts:
            try:
                rendered.append(self._render(prompt))
            except Exception as error:  # noqa: BLE001  whatever tokenizers and templates raise
                problems.append((prompt.line, str(error) or type(error).__name__))
        raise_bad_lines(problems)
        return rendered

    def _render(self, prompt: SourcePrompt) -> TokenPrompt:
        tokens: Sequence[int]
        if prompt.tokens is not None:
            tokens = prompt.tokens
        else:
            if prompt.messages is not None:
                made = self._inference._preprocess_chat_one(list(prompt.messages), **prompt.chat)
            else:
                made = self._inference._preprocess_cmpl_one(prompt.text)
            if made.get("type") != "token":
                raise ValueError(f"it holds more than text ({made.get('type')})")
            tokens = made["prompt_token_ids"]
        config = self._inference.model_config
        if len(tokens) >= config.max_model_len:
            raise ValueError(
                f"{len(tokens)} tokens, expected less than max_model_len, {config.max_model_len}"
            )
        if max(tokens) >= config.get_vocab_size():
            raise ValueError(
                f"token {max(tokens)} is not in the vocabulary of {config.get_vocab_size()}"
            )
        return TokenPrompt(prompt.line, tokens, prompt.salt)


def _check_vllm() -> None:
    """Import vLLM, whose log is quiet then; UnsupportedError without one that is supported."""
    # vLLM reads these when it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        import vllm
    except ImportError as error:
        raise UnsupportedError(
            f"vLLM cannot be imported ({error}): install vLLM 0.32 or 0.33 in this environment"
        ) from error
    check_vllm_version(vllm.__version__)


class OfflineEngine:
    """One vLLM engine with the connector, on one shelf.

    Parameters
    ----------
    model : str
        As for ``vllm serve``.
    url : str
        The shelf.
    engine_args : Mapping
        Further arguments of ``vllm.LLM``.

    Raises
    ------
    ConfigError
        If the engine cannot be started with these arguments.
    UnsupportedError
        If vLLM is missing, or kvshelf does not support its version.
    """

    def __init__(self, model: str, url: str, engine_args: Mapping[str, Any]) -> None:
        for name in _OURS:
            if name in engine_args:
                raise ConfigError(f"{name} is not an engine argument here: kvshelf seed sets it")
        # vLLM reads this when the engine starts.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        _check_vllm()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        try:
            self._llm: Any = LLM(
                model=model,
                kv_transfer_config=KVTransferConfig(
                    kv_connector=CONNECTOR_NAME,
                    kv_connector_module_path="kvshelf.vllm.connector",
                    kv_role="kv_both",
                    kv_connector_extra_config={"shared_storage_path": url, **_SEEDER_OPTIONS},
                ),
                **engine_args,
            )
        except (TypeError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the engine does not start: {error}") from error
        core = self._llm.llm_engine.engine_core.engine_core
        self._connector: Any = core.scheduler.connector
        #: What LLM.collective_rpc calls may change weights, so it begins a comparison of them.
        self._executor: Any = core.model_executor

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def config(self) -> Config:
        """The connector's configuration."""
        config: Config = self._connector.config
        return config

    def namespace(self) -> Namespace:
        """Return the engine's namespace; waits until the weights are fingerprinted.

        Raises
        ------
        ConfigError
            If the engine is disabled (the log says why), or after half an hour.
        """
        begin = time.monotonic()
        while True:
            namespace: Namespace | None = self._connector.namespace
            if namespace is not None:
                return namespace
            if self._connector.disabled:
                raise ConfigError("the engine cannot store on the shelf; the line above says why")
            if time.monotonic() - begin >= _IDENTITY_SECONDS:
                raise ConfigError(
                    "the engine's workers have not reported their weights and layout within "
                    f"{_IDENTITY_SECONDS:.0f} s: see the log, or have less hashed by the option "
                    "weights"
                )
            # Workers report in steps only.
            self._generate([TokenPrompt(0, [1])])
            time.sleep(_IDENTITY_PAUSE)

    def batch_chunks(self, fmt: ObjectFormat) -> int:
        """Return how many chunks, with all kinds, fit into the stores' half of the memory."""
        ranks = int(self._llm.llm_engine.vllm_config.parallel_config.world_size)
        kinds = [fmt.of(kind) for kind in fmt.kinds]
        chunk = sum(each.object_size(shard) for each in kinds for shard in range(each.shards))
        return max(1, DEFAULT_MEMORY * ranks // 2 // chunk)

    def render(self, prompts: Sequence[SourcePrompt]) -> list[TokenPrompt]:
        """Convert prompts to token ids, as vLLM's server does.

        Raises
        ------
        ConfigError
            If the model does not accept some prompts; the message names all their lines.
        """
        return PromptRenderer(self._llm).render(prompts)

    def compute(self, prompts: Sequence[TokenPrompt]) -> None:
        """Compute prompts, and wait until their chunks are stored."""
        self._generate(prompts)
        self._executor.collective_rpc(_drain, args=(_DRAIN_SECONDS,))

    def _generate(self, prompts: Sequence[TokenPrompt]) -> None:
        from vllm import SamplingParams

        inputs: list[dict[str, Any]] = []
        for prompt in prompts:
            given: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)}
            if prompt.salt:
                given["cache_salt"] = prompt.salt
            inputs.append(given)
        parameters = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._llm.generate(inputs, parameters, use_tqdm=False)


def _drain(worker: object, seconds: float) -> int:
    """Run in each worker: wait for its stores; return how many chunks are not stored."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    pending_chunks: int = connector.drain(seconds)
    return pending_chunks
