"""Prompts become token ids without an engine, as vLLM makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.models.make_model import make_model
from kvshelf.errors import ConfigError
from kvshelf.prompts import TokenPrompt, parse_prompts

pytest.importorskip("vllm")
# Importing the parts of vLLM warns.
pytestmark = pytest.mark.filterwarnings("ignore")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("rendering") / "model", "tiny", tokenizer=True)


def render(model: Path, *lines: object) -> list[TokenPrompt]:
    from kvshelf.vllm.seeding import PromptRenderer

    prompts = parse_prompts(map(json.dumps, lines), "prompts")
    return PromptRenderer.of_model(str(model)).render(prompts)


def test_all_forms_of_prompts_become_token_ids(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    said = "Tell me."
    made = render(
        model,
        [5, 6, 7],
        "A long text.",
        {"prompt": "A long text.", "cache_salt": "tenant"},
        {"messages": [{"role": "user", "content": said}], "chat_template": TEMPLATE},
    )
    assert [prompt.line for prompt in made] == [1, 2, 3, 4]
    assert list(made[0].tokens) == [5, 6, 7]
    assert list(made[1].tokens) == list(made[2].tokens) == tokenizer("A long text.").input_ids
    assert list(made[3].tokens) == tokenizer(said, add_special_tokens=False).input_ids
    assert [prompt.salt for prompt in made] == ["", "", "tenant", ""]


def test_all_lines_that_the_model_refuses_are_named(model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{% no end"}
    with pytest.raises(ConfigError, match="2 bad lines") as caught:
        render(model, [5], [2**31], chat)
    assert "line 2: token 2147483648 is not in the vocabulary" in str(caught.value)
    assert "line 3" in str(caught.value)


def test_model_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be read as those of"):
        render(tmp_path / "empty", "text")
