"""From prompts to token ids, by vLLM's own code.

Owns the conversion, so that chunks get the same keys as those of a server's requests. It needs a
model's tokenizer and configuration; no engine, no weights and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.tools.prompts import Prompt, TokenPrompt, raise_bad_lines
from kvshelf.vllm import check_vllm_version


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
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
            from vllm.config import VllmConfig
            from vllm.engine.arg_utils import EngineArgs
            from vllm.entrypoints.common.offline import OfflineInferenceMixin
            from vllm.renderers import renderer_from_config
        except ImportError as error:
            raise missing_vllm(error) from error
        check_vllm_version(vllm.__version__)
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

    def render(self, prompts: Sequence[Prompt]) -> list[TokenPrompt]:
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

    def _render(self, prompt: Prompt) -> TokenPrompt:
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


def missing_vllm(error: ImportError) -> UnsupportedError:
    """Return the error for a vLLM that cannot be imported."""
    return UnsupportedError(
        f"vLLM cannot be imported ({error}): install vLLM 0.32 or 0.33 in this environment"
    )
