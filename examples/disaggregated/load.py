"""The load of the example: clients of the OpenAI completions API that stream, and their times."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

#: Tokens of a document, of which several requests ask something, and of the shortest question.
DOCUMENT, QUESTION = 1024, 20
VOCABULARY = range(10, 250)


@dataclass(frozen=True)
class Measured:
    """What one request got.

    Attributes
    ----------
    text : str
    first : float
        Seconds from the request to the first token.
    gap : float
        Seconds from one token to the next, on average: several may come in one event.
    """

    text: str
    first: float
    gap: float


def make_prompts(documents: int, questions: int, seed: int = 0) -> list[list[int]]:
    """Return prompts, as token ids: several for each document, in an order without a pattern."""
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.choice(VOCABULARY) for _ in range(count)]

    texts = [tokens(DOCUMENT) for _ in range(documents)]
    prompts = [
        text + tokens(QUESTION + generator.randrange(200))
        for text in texts
        for _ in range(questions)
    ]
    generator.shuffle(prompts)
    return prompts


def run_load(
    url: str, prompts: Sequence[Sequence[int]], *, clients: int, tokens: int
) -> list[Measured]:
    """Have clients send the prompts, each the next one when it has its answer.

    Parameters
    ----------
    url : str
    prompts : Sequence of sequences of int
    clients : int
    tokens : int
        Length of each answer.

    Returns
    -------
    list of Measured
        In the order of the prompts.
    """
    return asyncio.run(_run_load(url, prompts, clients, tokens))


async def _run_load(
    url: str, prompts: Sequence[Sequence[int]], clients: int, tokens: int
) -> list[Measured]:
    measured: dict[int, Measured] = {}
    left = iter(enumerate(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def send_all() -> None:
            for number, prompt in left:
                measured[number] = await _ask(client, prompt, tokens)

        await asyncio.gather(*(send_all() for _ in range(clients)))
    return [measured[number] for number in range(len(prompts))]


async def _ask(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> Measured:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, times = "", [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"an engine failed: {event['error']}")
            if event["choices"]:
                text += event["choices"][0]["text"]
                times.append(time.perf_counter())
        else:
            raise SystemExit("an answer broke off")
    sent, first, last = times[0], times[1], times[-1]
    return Measured(text, first - sent, (last - first) / (tokens - 1))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
