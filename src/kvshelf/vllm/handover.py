"""Hand-overs: the fields that the producer of a prompt's KV and its consumer exchange in requests.

Owns the fields of vLLM's ``kv_transfer_params`` that are kvshelf's own, in both directions. A
request asks a producer for a hand-over with ``do_remote_decode`` or ``kvshelf_handover``; the
answer of the producer is a :class:`Handover`; the request to the consumer brings it. A *bare*
hand-over brings none: the request only says that another engine prefills its prompt.

Contracts
---------
* Every answered field begins with ``kvshelf_``: inside MultiConnector, vLLM ends the engine where
  two connectors answer the same field.
* Params may come from any API client. The type and the size of every field are checked, before
  anything else uses it. Messages quote a field shortened, with everything but printable ASCII
  escaped.
* Pure functions: neither torch nor storage. Safe to call from any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

#: Version of the fields; a consumer refuses others.
VERSION: Final = 1

_VERSION: Final = "kvshelf_version"
_NAMESPACE: Final = "kvshelf_namespace"
_TOKENS: Final = "kvshelf_tokens"
_KEY: Final = "kvshelf_key"
_TAIL: Final = "kvshelf_tail"
_ATTEMPT: Final = "kvshelf_attempt"
_WAIT: Final = "kvshelf_wait_s"
_REQUIRED: Final = (_VERSION, _NAMESPACE, _TOKENS, _KEY, _TAIL, _ATTEMPT)
_ASKING: Final = ("do_remote_decode", "kvshelf_handover")
#: Says of a request that another engine prefills its prompt.
_BARE: Final = "do_remote_prefill"
#: What other connectors name the blocks by that they fetch.
_FOREIGN: Final = ("remote_block_ids", "remote_engine_id", "transfer_id")

_DIGITS: Final = re.compile(r"[0-9a-f]+", re.ASCII)
#: Tokens: more than any prompt has.
_MOST_TOKENS: Final = 1 << 40
#: Seconds: longer than any engine waits.
_LONGEST: Final = 1_000_000
#: Characters of a text that a message shows.
_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class Handover:
    """What a producer promises of one prompt; of a bare one namespace, key and attempt are empty.

    Attributes
    ----------
    namespace : bytes
        Digest of the producer's namespace, 32 bytes.
    tokens : int
        Number of leading tokens of the prompt whose KV is promised.
    key : bytes
        32 bytes: the key of the tail, or without one of the last chunk.
    tail : int
        Tokens of the tail; 0 without one.
    attempt : str
        Random id of this try of the producer, 32 hex digits.
    wait_s : float, optional
        Longest wait of the consumer, in seconds from its request's arrival; the engine's own
        maximum holds as well.
    """

    namespace: bytes
    tokens: int
    key: bytes
    tail: int
    attempt: str
    wait_s: float | None = None

    def params(self) -> dict[str, Any]:
        """Return the fields of ``kv_transfer_params``, as plain data."""
        params: dict[str, Any] = {
            _VERSION: VERSION,
            _NAMESPACE: self.namespace.hex(),
            _TOKENS: self.tokens,
            _KEY: self.key.hex(),
            _TAIL: self.tail,
            _ATTEMPT: self.attempt,
        }
        if self.wait_s is not None:
            params[_WAIT] = self.wait_s
        return params


def no_handover() -> dict[str, Any]:
    """Return the fields of ``kv_transfer_params`` by which a producer promises nothing."""
    return {_VERSION: VERSION, _TOKENS: 0}


def asks_for_handover(params: object) -> bool:
    """Whether a request asks this engine to prefill its prompt for another one.

    Parameters
    ----------
    params : object
        ``Request.kv_transfer_params`` (``vllm/v1/request.py``), which is not checked by vLLM.
    """
    return isinstance(params, Mapping) and any(params.get(field) is True for field in _ASKING)


def read_handover(params: object) -> Handover | None:
    """Return the hand-over that a request brings; None if it brings none, or promises nothing.

    Parameters
    ----------
    params : object
        ``Request.kv_transfer_params`` (``vllm/v1/request.py``), which is not checked by vLLM.
        Other fields than those of kvshelf mean nothing here.

    Raises
    ------
    ValueError
        If a field is missing or is not what it must be. The message says which.
    """
    if not _has_fields(params):
        return None
    version = _integer(params, _VERSION, 1, _MOST_TOKENS)
    if version != VERSION:
        raise ValueError(
            f"{_VERSION}: found {version}, expected {VERSION}; run the same release of kvshelf on"
            " both engines"
        )
    tokens = _integer(params, _TOKENS, 0, _MOST_TOKENS)
    if not tokens:
        return None
    return Handover(
        namespace=bytes.fromhex(_hex(params, _NAMESPACE, 64)),
        tokens=tokens,
        key=bytes.fromhex(_hex(params, _KEY, 64)),
        tail=_integer(params, _TAIL, 0, tokens),
        attempt=_hex(params, _ATTEMPT, 32),
        wait_s=_wait(params),
    )


def read_bare(params: object, *, expected: bool) -> float | None:
    """Return how long a request may wait that brings a bare hand-over; None if it brings none.

    Parameters
    ----------
    params : object
        ``Request.kv_transfer_params`` (``vllm/v1/request.py``), which is not checked by vLLM.
    expected : bool
        Whether a request brings one that does not say.

    Returns
    -------
    float or None
        Seconds, infinite where the request sets no bound.

    Raises
    ------
    ValueError
        If the bound is none.
    """
    params = {} if params is None else params
    if not isinstance(params, Mapping) or _has_fields(params) or asks_for_handover(params):
        return None
    if params.get(_BARE, expected) is not True:
        return None
    seconds = _wait(params)
    return math.inf if seconds is None else seconds


def is_foreign(params: object) -> bool:
    """Whether a request names blocks of another engine that another connector is to fetch."""
    return (
        isinstance(params, Mapping)
        and params.get(_BARE) is True
        and any(params.get(field) is not None for field in _FOREIGN)
    )


def _has_fields(params: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(params, Mapping) and any(field in params for field in _REQUIRED)


def _integer(params: Mapping[Any, Any], field: str, least: int, most: int) -> int:
    value = params.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{field}: found {_shown(value)}, expected an integer, {least} to {most}")
    return value


def _hex(params: Mapping[Any, Any], field: str, digits: int) -> str:
    value = params.get(field)
    if not isinstance(value, str) or len(value) != digits or not _DIGITS.fullmatch(value):
        raise ValueError(
            f"{field}: found {_shown(value)}, expected {digits} lowercase hexadecimal digits"
        )
    return value


def _wait(params: Mapping[Any, Any]) -> float | None:
    value = params.get(_WAIT)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST:
        return float(value)
    raise ValueError(f"{_WAIT}: found {_shown(value)}, expected seconds, 0 to {_LONGEST}")


def _shown(value: object) -> str:
    """Return a short ASCII text for what was found; cheap for values of any size."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = ascii(value[:_SHOWN])
        return text if len(value) <= _SHOWN else f"{text} and {len(value) - _SHOWN} more characters"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float):
        return repr(value)
    return f"a {ascii(type(value).__name__)[1:-1][:_SHOWN]}"
