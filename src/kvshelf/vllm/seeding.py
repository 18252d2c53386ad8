"""An offline vLLM that fills a shelf: the engine behind ``kvshelf seed``.

Owns the engine's start, and the wait until stores are done.

The engine core runs in this process, which can therefore read the namespace and wait for stores;
workers of further ranks have processes of their own.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from kvshelf.config import LEAST_STAGING, Config
from kvshelf.errors import ConfigError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.tools.prompts import Prompt, TokenPrompt
from kvshelf.vllm import CONNECTOR_NAME, check_vllm_version
from kvshelf.vllm.rendering import PromptRenderer, missing_vllm

_OURS: Final = ("model", "kv_transfer_config")
#: Options that seeding overrides. With a disk tier, chunks that only the tier has would not be
#: stored on the shelf; `read_only` is meant for engines on a shelf that a seeder fills.
_SEEDER_OPTIONS: Final = types.MappingProxyType({"disk_tier": None, "read_only": False})
_IDENTITY_PAUSE: Final = 0.05
#: Seconds for the workers to fingerprint the weights: enough for a large model on a slow disk.
_IDENTITY_SECONDS: Final = 1800.0
#: Seconds for the stores of one batch.
_DRAIN_SECONDS: Final = 600.0


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
        # vLLM reads these when it is imported or when the engine starts.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
            from vllm import LLM
            from vllm.config import KVTransferConfig
        except ImportError as error:
            raise missing_vllm(error) from error
        check_vllm_version(vllm.__version__)
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
            found: Namespace | None = self._connector.namespace
            if found is not None:
                return found
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
        """Return how many chunks, with all kinds, fit into half of the staging of all ranks."""
        ranks = int(self._llm.llm_engine.vllm_config.parallel_config.world_size)
        kinds = [fmt.of(kind) for kind in fmt.kinds]
        chunk = sum(each.object_size(shard) for each in kinds for shard in range(each.shards))
        return max(1, LEAST_STAGING * ranks // 2 // chunk)

    def render(self, prompts: Sequence[Prompt]) -> list[TokenPrompt]:
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
        self._llm.collective_rpc(_drain, args=(_DRAIN_SECONDS,))

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
    left: int = connector.drain(seconds)
    return left
