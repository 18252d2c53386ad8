"""Requests to a node server, on the client's side: splitting, answers, probes."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvshelf.backends.base import NOT_REGULAR, StatResult, StatResults
from kvshelf.errors import StorageError, TransientStorageError
from kvshelf.server import messages
from kvshelf.server.channel import Channel

_Reply = TypeVar("_Reply", bound=messages.Message)


def parts(items: Sequence[Any]) -> list[list[Any]]:
    """Split a list that is too long for one message; at least one part."""
    most = messages.MAX_NAMES
    return [list(items[begin : begin + most]) for begin in range(0, max(1, len(items)), most)]


def answer_to(future: Future[messages.Reply], kind: type[_Reply]) -> _Reply:
    """Wait for the answer to a request; raise the fault that came instead of it."""
    reply = future.result()
    if not isinstance(reply, kind):
        raise StorageError(errno.EPROTO, f"the node server answered {type(reply).__name__}")
    return reply


def probe(
    channel: Channel, names: Sequence[str], questions: Sequence[messages.Call | messages.Find]
) -> StatResults:
    """Probe these names, in several messages where one is too short for them.

    Answers as :meth:`kvshelf.backends.Backend.stat`.
    """
    answers: StatResults = []
    try:
        for future in [channel.request(question) for question in questions]:
            found = answer_to(future, messages.FoundSizes)
            unknown: Exception | None = None if found.fault is None else found.fault.error()
            if not isinstance(unknown, StorageError):
                unknown = TransientStorageError(errno.EIO, str(unknown), channel.url)
            answers += [_result(answer, unknown) for answer in found.answers]
    except StorageError as error:
        return [error] * len(names)
    return answers


def _result(answer: int, unknown: StorageError) -> StatResult:
    if answer >= 0:
        return answer
    if answer == messages.MISSING:
        return None
    return NOT_REGULAR if answer == messages.NOT_REGULAR else unknown
