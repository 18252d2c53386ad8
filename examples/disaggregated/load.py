"""The load of the example: clients of the OpenAI completions API that stream, and their times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from openai import AsyncOpenAI

#: Tokens of a document, of which several requests ask something, and of the shortest question.
DOCUMENT, QUESTION = 1024, 20
VOCABULARY = range(10, 250)


@dataclass(frozen=True)
class Measured:
    """The answer to one request, the seconds to its first token, and from one to the next."""

    text: str
    first: float
    gap: float


def make_prompts(documents: int, questions: int, seed: int = 0) -> list[list[int]]:
    """Return prompts, as token ids: several for each document, in an order without a pattern."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(documents):
        document = generator.choices(VOCABULARY, k=DOCUMENT)
        for _ in range(questions):
            length = QUESTION + generator.randrange(200)
            prompts.append(document + generator.choices(VOCABULARY, k=length))
    generator.shuffle(prompts)
    return prompts


def run_load(
    url: str, prompts: Sequence[list[int]], *, clients: int, tokens: int
) -> list[Measured]:
    """Have clients send the prompts, each the next one when it has its answer of some tokens."""
    return asyncio.run(_run_load(url, prompts, clients, tokens))


async def _run_load(
    url: str, prompts: Sequence[list[int]], clients: int, tokens: int
) -> list[Measured]:
    # Nothing is repeated: that would be measured as one slow answer.
    http = httpx.AsyncClient(timeout=120, trust_env=False)
    measured: dict[int, Measured] = {}
    left = iter(enumerate(prompts))
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:

        async def send_all() -> None:
            for number, prompt in left:
                measured[number] = await _ask(client, prompt, tokens)

        await asyncio.gather(*(send_all() for _ in range(clients)))
    return [measured[number] for number in range(len(prompts))]


async def _ask(client: AsyncOpenAI, prompt: list[int], tokens: int) -> Measured:
    sent = time.perf_counter()
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, times = "", []
    async for event in answer:
        text += event.choices[0].text
        times.append(time.perf_counter())
    # Several tokens may come in one event.
    return Measured(text, times[0] - sent, (times[-1] - times[0]) / (tokens - 1))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
