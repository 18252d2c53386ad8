"""The bodies that engines get, and which way a request takes."""

from __future__ import annotations

import gc
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.proxy import bodies
from kvshelf.proxy.bodies import PARAMS, ClientRequest, RefusedError, Route, read_request
from kvshelf.proxy.durable import LastEvent
from kvshelf.proxy.legs import forwarded
from kvshelf.proxy.settings import engine_url


def read(chat: bool = False, **fields: Any) -> ClientRequest:
    return read_request(json.dumps(fields).encode(), chat=chat)


def test_the_first_leg_asks_for_one_token_and_for_nothing_that_costs() -> None:
    request = read(
        prompt="p",
        max_tokens=50,
        min_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        logprobs=2,
        return_token_ids=True,
        temperature=0.5,
        cache_salt="s",
        response_format={"type": "text"},
    )
    assert json.loads(request.prefill_body()) == {
        "prompt": "p",
        "temperature": 0.5,
        "cache_salt": "s",
        "response_format": {"type": "text"},
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    chat = read(chat=True, messages=[], max_completion_tokens=9, tools=[{"a": 1}], top_logprobs=3)
    assert json.loads(chat.prefill_body()) == {
        "messages": [],
        "tools": [{"a": 1}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }


def test_the_second_leg_is_the_clients_own_request() -> None:
    fields = {"prompt": [1, 2], "max_tokens": 50, "stream": True, "logprobs": 1, "unknown": None}
    request = read(**fields, durable=False)
    assert json.loads(request.body(None)) == fields
    assert json.loads(request.body({"a": 1})) == fields | {"kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize(
    ("chat", "fields", "route"),
    [
        (False, {"prompt": "p"}, Route.HAND_OVER),
        (False, {"prompt": "p", "kv_transfer_params": None}, Route.HAND_OVER),
        (False, {"prompt": "p", "prompt_embeds": None}, Route.HAND_OVER),
        (False, {"prompt": "p", "max_tokens": 1, "n": 4, "logprobs": 5}, Route.PREFILL_ONLY),
        (False, {"prompt": "p", "max_tokens": 0, "echo": True}, Route.PREFILL_ONLY),
        (False, {"prompt": "p", "max_tokens": 1, "prompt_logprobs": 0}, Route.PREFILL_ONLY),
        (False, {"prompt": "p", "max_tokens": 1, "durable": True}, Route.HAND_OVER),
        (False, {"prompt": "p", "max_completion_tokens": 1}, Route.HAND_OVER),
        (True, {"max_completion_tokens": 1}, Route.PREFILL_ONLY),
        (True, {"max_tokens": 1}, Route.PREFILL_ONLY),
        (True, {"max_tokens": 1, "max_completion_tokens": 8}, Route.HAND_OVER),
        (True, {"echo": True, "logprobs": True}, Route.HAND_OVER),
        (False, {"prompt": "p", "echo": True}, Route.HAND_OVER),
        (False, {"prompt": "p", "echo": True, "logprobs": 0}, Route.DECODE_ONLY),
        (False, {"prompt": "p", "prompt_logprobs": 1}, Route.DECODE_ONLY),
        (False, {"prompt_embeds": "AAAA"}, Route.DECODE_ONLY),
        (False, {"prompt_embeds": [], "prompt": "p"}, Route.DECODE_ONLY),
        (True, {"use_beam_search": True}, Route.DECODE_ONLY),
    ],
)
def test_routes(chat: bool, fields: dict[str, Any], route: Route) -> None:
    assert read(chat, **fields).route is route


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"kv_transfer_params": {"do_remote_prefill": true}}', "kv_transfer_params"),
        (b'{"vllm_xargs": {"kv_transfer_params": "x"}}', "kv_transfer_params"),
        (b'{"durable": 1}', "durable"),
    ],
)
def test_what_is_refused(raw: bytes, param: str | None) -> None:
    with pytest.raises(RefusedError) as refused:
        read_request(raw, chat=False)
    assert (refused.value.status, refused.value.param) == (400, param)


_EVENTS = st.lists(
    st.sampled_from(
        [b"data: 1\n\n", b"data: [D]\n\n", b": comment\n\n", b'data: {"t":"data: [DONE]"}\n\n']
    ),
    max_size=5,
)


@given(_EVENTS, st.booleans(), st.lists(st.integers(0, 200), max_size=8))
def test_only_the_last_event_is_withheld(
    events: list[bytes], complete: bool, cuts: list[int]
) -> None:
    before = b"".join(events)
    stream = before + (b"data: [DONE]\n\n" if complete else b"")
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    last = LastEvent()
    passed = b"".join(last.feed(stream[start:end]) for start, end in pairwise(edges))
    assert passed == before
    assert passed + last.withheld == stream


def test_headers_of_a_client_go_on_but_for_those_of_its_connection() -> None:
    headers = [
        (b"Authorization", b"Bearer x"),
        (b"x-request-id", b"7"),
        (b"Connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"host", b"proxy"),
        (b"Proxy-Authorization", b"secret"),
        (b"content-length", b"3"),
    ]
    assert forwarded(headers) == [(b"authorization", b"Bearer x"), (b"x-request-id", b"7")]


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_urls_of_engines(url: str) -> None:
    assert engine_url(url) == "http://h:1"


@pytest.mark.parametrize(
    "url", ["h:1", "ftp://h", "http://", "http://user:secret@h:1", "http://h?q"]
)
def test_urls_that_name_no_engine(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_url(url)
    assert "secret" not in str(error.value)


def test_a_prompt_is_passed_on_as_it_came() -> None:
    raw = b'{"prompt" : [1 ,2,  3], "model":"m", "model": "n", "temperature": 1.50}'
    body = read_request(raw, chat=False).body({"a": 1})
    assert b'"prompt":[1 ,2,  3]' in body
    # Nothing that was not looked at passes: of a field that is there twice the last counts.
    assert body.count(b'"model"') == 1
    assert json.loads(body) == {
        "prompt": [1, 2, 3],
        "model": "n",
        "temperature": 1.5,
        PARAMS: {"a": 1},
    }


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params": null, "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"vllm_xargs": {}, "vllm_xargs": {"a": 1, "kv_transfer_params": {}}}',
    ],
)
def test_no_second_key_hides_what_clients_must_not_send(raw: bytes) -> None:
    with pytest.raises(RefusedError):
        read_request(raw, chat=False)


def test_inner_keys_that_are_there_twice_pass_once() -> None:
    raw = (
        b'{"vllm_xargs": {"kv_transfer_params": {"x": 1}, "kv_transfer_params": null}, "prompt": 1}'
    )
    try:
        body = read_request(raw, chat=False).body(None)
    except RefusedError:
        return
    assert b'"x"' not in body


@pytest.mark.parametrize("prompt", [b"[1,,2]", b"[1", b'"a', b"[1 2]", b"{]", b"nul", b"01"])
def test_a_prompt_that_is_no_json_is_refused(prompt: bytes) -> None:
    with pytest.raises(RefusedError, match="not JSON"):
        read_request(b'{"prompt": ' + prompt + b', "model": "m"}', chat=False)


@pytest.mark.parametrize(
    ("prompt", "route"),
    [
        (b'"a text"', Route.HAND_OVER),
        (b"[1, 2]", Route.HAND_OVER),
        (b" [ 1,2]", Route.HAND_OVER),
        (b'["one"]', Route.HAND_OVER),
        (b'["one", "two"]', Route.DECODE_ONLY),
        (b"[[1, 2], [3]]", Route.DECODE_ONLY),
        (b"[[1, 2]]", Route.HAND_OVER),
        (b"[[1]" + b", []" * 100_000 + b"]", Route.DECODE_ONLY),
    ],
)
def test_the_route_of_each_form_of_a_prompt(prompt: bytes, route: Route) -> None:
    assert read_request(b'{"prompt":' + prompt + b"}", chat=False).route is route


@pytest.mark.parametrize("name", bodies._LARGE)
def test_what_may_be_large_is_passed_on_as_it_came(name: str) -> None:
    raw = b'{"%s": {"a" : [1.50, {}],  "a":2}, "model": "m"}' % name.encode()
    request = read_request(raw, chat=True)
    for body in (request.body(None), request.prefill_body()):
        assert b'{"a" : [1.50, {}],  "a":2}' in body
        assert json.loads(body)["model"] == "m"


def test_large_bodies_are_made_into_few_objects() -> None:
    empty = b",".join([b"[]"] * 100_000)
    for name in bodies._LARGE:
        before = len(gc.get_objects())
        request = read_request(b'{"%s": [%s]}' % (name.encode(), empty), chat=False)
        assert len(gc.get_objects()) < before + 1000
        assert len(request.body(None)) > len(empty)


@pytest.mark.parametrize(
    "small",
    [
        b'"x": [' + b"[]," * 100_000 + b"[]]",
        b",".join(b'"%d": 1' % number for number in range(40_000)),
        b",".join([b'"prompt": []'] * 40_000),
        b'"user": "' + b"x" * bodies._MOST_SMALL + b'"',
    ],
    ids=["lists", "fields", "one field many times", "text"],
)
def test_all_other_fields_have_a_largest_size_together(small: bytes) -> None:
    with pytest.raises(RefusedError, match="bytes together") as error:
        read_request(b"{" + small + b"}", chat=False)
    assert error.value.status == 413
