"""The bodies of requests: what a client may send, which way its request takes, what engines get.

Owns the *routes*: which requests are handed over from a prefill to a decode engine, and which are
answered by one engine. Pure functions of bytes; safe to call from any thread. Prompts are in these
bodies: nothing here logs, and no message holds a value.

What is large is passed on as the bytes that came (:data:`_LARGE`): to parse 8 MiB of small lists
takes seconds, in which no other thread of the process runs. All other fields have a largest size
together. They are parsed, and what engines get is encoded from that: of a field that a client sends
twice they get the one that was checked.

The routes
----------
* Usually a prefill engine gets the body with ``max_tokens`` 1 and without what only makes its
  answer larger. Its token is thrown away, for the decode engine computes the same one. Fields that
  can change the prompt (tools, templates, documents, ``response_format``) stay as they are: the
  keys of both engines must be equal.
* A client that wants at most one token wants a prefill and nothing else: a prefill engine answers
  it, whatever ``n`` and ``logprobs`` are. A hand-over would compute the same token twice. With
  ``durable`` there are two legs, because only the first one's params name the KV.
* No first leg where its KV could not be used: vLLM computes the whole prompt for
  ``prompt_logprobs``, answers one set of params for a list of prompts, gives the requests inside a
  beam search none, and embeddings have no token ids to make keys from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec

#: Field of vLLM's OpenAI API for messages between the connectors of two engines.
PARAMS: Final = "kv_transfer_params"
_PROMPT: Final = "prompt"
#: Fields that may be large, and which the proxy does not read.
_LARGE: Final = (
    _PROMPT,
    "prompt_embeds",
    "suffix",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "allowed_token_ids",
    "logit_bias",
    "response_format",
    "structured_outputs",
)
#: Most bytes of the names of all fields and of the values of the others.
_MOST_SMALL: Final = 256 << 10
#: Field of the proxy: the answer ends when the prompt's KV is on the store.
DURABLE: Final = "durable"

#: What would make a first leg's answer larger, or contradict its ``max_tokens``.
_NOT_FOR_PREFILL: Final = (
    "echo",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "stream",
    "stream_options",
    "top_logprobs",
)


#: Reads these fields and builds nothing of others.
_Large: Final = msgspec.defstruct(
    "_Large", [(name, msgspec.Raw, msgspec.Raw()) for name in _LARGE], gc=False
)


class RefusedError(ValueError):
    """A client's request is not forwarded; the message and the fields are for the client.

    Parameters
    ----------
    message : str
    status : int
        HTTP status of the answer.
    param : str, optional
        The field that is wrong.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Route(Enum):
    """The engines that a request is sent to."""

    HAND_OVER = "hand over"
    PREFILL_ONLY = "prefill only"
    DECODE_ONLY = "decode only"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request for tokens.

    Attributes
    ----------
    fields : dict
        The JSON object, without :data:`DURABLE`; what may be large as bytes.
    chat : bool
        Whether it is for chat completions.
    durable : bool
        Whether the client asked to be notified when its prompt's KV is on the store.
    route : Route
    """

    fields: dict[str, Any]
    chat: bool
    durable: bool
    route: Route

    @property
    def cache_salt(self) -> str:
        """The client's cache salt, empty without one."""
        salt = self.fields.get("cache_salt")
        return salt if isinstance(salt, str) else ""

    def prefill_body(self) -> bytes:
        """Return the body for the first of two legs."""
        fields = {name: at for name, at in self.fields.items() if name not in _NOT_FOR_PREFILL}
        fields |= {"stream": False, "n": 1, "max_tokens": 1, PARAMS: {"do_remote_decode": True}}
        if self.chat:
            fields["max_completion_tokens"] = 1
        return _encode(fields)

    def body(self, params: dict[str, Any] | None) -> bytes:
        """Return the body for the engine whose answer the client gets.

        Parameters
        ----------
        params : dict or None
            What the prefill engine answered; None without a hand-over.
        """
        return _encode(self.fields if params is None else self.fields | {PARAMS: params})


def read_request(raw: bytes, *, chat: bool) -> ClientRequest:
    """Parse and check the body of a client's request.

    Parameters
    ----------
    raw : bytes
    chat : bool
        Whether it came to ``/v1/chat/completions``, else to ``/v1/completions``.

    Raises
    ------
    RefusedError
        If it is not a JSON object, or has fields that clients must not have. All other fields are
        for the engines to check.
    """
    try:
        if len(raw) > _MOST_SMALL:
            _check_small(raw)
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields: dict[str, Any] = {
            name: part if name in _LARGE else msgspec.json.decode(part)
            for name, part in parts.items()
        }
    except RefusedError:
        raise
    except msgspec.ValidationError:
        raise RefusedError("The body is JSON of another type; expected an object.") from None
    except (ValueError, RecursionError):
        raise RefusedError("The body is not JSON; expected a JSON object in UTF-8.") from None
    # vLLM puts the extra arguments of a request in the place where it looks for params.
    more = fields.get("vllm_xargs")
    if fields.get(PARAMS) is not None or (isinstance(more, dict) and PARAMS in more):
        raise RefusedError(
            f"`{PARAMS}` is between the engines; leave it out, the proxy fills it in.",
            param=PARAMS,
        )
    durable = fields.pop(DURABLE, False)
    if not isinstance(durable, bool):
        raise RefusedError(f"`{DURABLE}` must be true or false.", param=DURABLE)
    return ClientRequest(fields, chat, durable, _route(fields, chat, durable))


def _check_small(raw: bytes) -> None:
    """Refuse a body of which too much would have to be parsed.

    Raises
    ------
    RefusedError
    ValueError
        If it is not JSON.
    """
    large = msgspec.json.decode(raw, type=_Large)
    small = len(raw) - sum([len(memoryview(getattr(large, name))) for name in _LARGE])
    if small > _MOST_SMALL:
        raise RefusedError(
            f"All fields but {', '.join(_LARGE)} may have {_MOST_SMALL} bytes together.", 413
        )


def _route(fields: dict[str, Any], chat: bool, durable: bool) -> Route:
    longest = fields.get("max_tokens")
    if chat and fields.get("max_completion_tokens") is not None:
        longest = fields["max_completion_tokens"]
    if isinstance(longest, int) and longest <= 1 and not durable:
        return Route.PREFILL_ONLY
    scores = fields.get("prompt_logprobs") is not None or (
        not chat and bool(fields.get("echo")) and fields.get("logprobs") is not None
    )
    several = not chat and _PROMPT in fields and _are_several(fields[_PROMPT])
    embedded = fields.get("prompt_embeds", msgspec.Raw(b"null")) != msgspec.Raw(b"null")
    if scores or several or embedded or fields.get("use_beam_search"):
        return Route.DECODE_ONLY
    return Route.HAND_OVER


def _are_several(prompt: msgspec.Raw) -> bool:
    """Whether a prompt is a list of prompts, with more than one."""
    start = bytes(memoryview(prompt)[:64])
    first = start[1:].lstrip()[:1]
    if start[:1] != b"[" or first.isdigit() or first == b"-":
        # A text, or token ids.
        return False
    try:
        # Ends at the second one, however many there are.
        msgspec.json.decode(prompt, type=tuple[msgspec.Raw])
    except msgspec.ValidationError:
        return True
    except (ValueError, RecursionError):
        # For the engine to refuse.
        pass
    return False


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except RecursionError:
        raise RefusedError("The body is nested too deeply.") from None
