"""``kvshelf seed`` up to the engine: lines, what is skipped, batches, what was not stored."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvshelf.cli import seed as seeding
from kvshelf.cli.progress import Display
from kvshelf.cli.seed import SeedReport, seed_shelf
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.keys import salt_group_of
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import SourcePrompt, TokenPrompt, parse_prompts, read_prompts
from kvshelf.shelf.shelf import open_shelf
from tests.support import commands
from tests.support.filled import CHUNK, fill, namespace, prompt, store

FORMAT = ObjectFormat(namespace())


class Engine:
    """Stores the chunks of prompts, but drops those that a test says."""

    def __init__(self, root: Path, drops: Sequence[int] = ()) -> None:
        self.root = root
        self.calls: list[list[int]] = []
        self._drops = list(drops)

    def compute(self, prompts: Sequence[TokenPrompt]) -> None:
        self.calls.append([prompt.line for prompt in prompts])
        with open_shelf(self.root) as shelf:
            for one in prompts:
                if one.line in self._drops:
                    self._drops.remove(one.line)
                    store(shelf, namespace(), one.tokens[: len(one.tokens) - CHUNK], one.salt)
                else:
                    store(shelf, namespace(), one.tokens, one.salt)


def seed(
    root: Path,
    prompts: Sequence[TokenPrompt],
    engine: Engine,
    batch_chunks: int = 100,
    group_by_salt: bool = True,
) -> tuple[SeedReport, list[int]]:
    display = Display("seeding")
    with open_shelf(root) as shelf:
        report = seed_shelf(
            shelf,
            FORMAT,
            prompts,
            engine,
            batch_chunks=batch_chunks,
            group_by_salt=group_by_salt,
            display=display,
        )
    assert report.done == report.prompts
    return report, [problem["line"] for problem in display.problems]


def test_what_is_on_the_shelf_is_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "_PROBE_BATCH", 2)
    fill(tmp_path, namespace(), prompt(0, 3))
    with open_shelf(tmp_path) as shelf:
        store(shelf, namespace(), prompt(5, 2), salt="tenant")
    prompts = [
        TokenPrompt(1, prompt(0, 3)),
        TokenPrompt(2, prompt(0, 3)[: 2 * CHUNK + 7]),
        TokenPrompt(3, prompt(0, 3) + prompt(1, 2)),
        TokenPrompt(4, prompt(2, 1)[:-1]),
        TokenPrompt(5, prompt(5, 2), "tenant"),
        TokenPrompt(6, prompt(5, 2), "another"),
    ]
    engine = Engine(tmp_path)
    report, problems = seed(tmp_path, prompts, engine)
    assert engine.calls == [[3, 6]]
    assert not problems
    assert (report.existed, report.short, report.stored, report.chunks) == (3, 1, 2, 4)
    assert report.tokens == 7 * CHUNK
    assert (tmp_path / namespace().folder / salt_group_of("another")).is_dir()
    # Started again, it goes on: there is nothing left to do.
    again, _ = seed(tmp_path, prompts, engine)
    assert len(engine.calls) == 1
    assert (again.existed, again.short, again.chunks) == (5, 1, 0)
    # A chunk without one of its shards is missing.
    next(tmp_path.rglob("*-1of2.*")).unlink()
    assert seed(tmp_path, prompts, engine)[0].chunks == 1


@pytest.mark.parametrize(
    ("chunks", "batch_chunks", "sizes"),
    [
        # Two prompts fit into staging; one that does not is computed alone.
        ([2, 2, 2, 5, 1], 4, [2, 1, 1, 1]),
        ([1] * 65, 1000, [64, 1]),
    ],
)
def test_prompts_are_computed_in_batches_that_staging_can_hold(
    tmp_path: Path, chunks: list[int], batch_chunks: int, sizes: list[int]
) -> None:
    prompts = [TokenPrompt(line, prompt(line, count)) for line, count in enumerate(chunks, 1)]
    engine = Engine(tmp_path)
    report, _ = seed(tmp_path, prompts, engine, batch_chunks)
    assert [len(call) for call in engine.calls] == sizes
    assert (report.stored, report.chunks) == (len(chunks), sum(chunks))


def test_salted_prompts_are_looked_for_where_the_engine_stores_them(tmp_path: Path) -> None:
    with open_shelf(tmp_path) as shelf:
        store(shelf, namespace(), prompt(5, 2), salt="tenant")
    prompts, engine = [TokenPrompt(1, prompt(5, 2), "tenant")], Engine(tmp_path)
    assert seed(tmp_path, prompts, engine)[0].existed == 1
    assert seed(tmp_path, prompts, engine, group_by_salt=False)[0].existed == 0


# -------------------------------------------------------------------------------- lines


def test_every_form_of_a_line(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    tool = [{"type": "function", "function": {"name": "f"}}]
    file = tmp_path / "prompts.jsonl"
    lines = [
        "text",
        [1, 2, 3],
        chat,
        {"prompt": "text", "id": "x"},
        {"tokens": [4, 5]},
        {"prompt": "text", "cache_salt": "s"},
        {"tokens": [6]},
        {"tokens": [7], "cache_salt": None},
        {"messages": chat, "tools": tool, "chat_template_kwargs": {"thinking": False}},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_prompts(file)
    assert [one.line for one in found] == list(range(1, 10))
    assert [one.text for one in found if one.text] == ["text"] * 3
    assert [list(one.tokens) for one in found if one.tokens] == [[1, 2, 3], [4, 5], [6], [7]]
    assert [one.messages for one in found if one.messages] == [chat, chat]
    assert [one.salt for one in found] == ["", "", "", "", "", "s", "", "", ""]
    assert found[-1].chat == {"tools": tool, "chat_template_kwargs": {"thinking": False}}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("7", "expected a string"),
        ('""', "prompt is ''"),
        ("[1, 4294967296]", "tokens 1 is 4294967296"),
        ('[{"role": "user"}, {"content": "x"}]', "messages 1 role"),
        ("{}", "expected one of prompt"),
        ('{"prompt": "a", "messages": []}', "found prompt and messages"),
        ('{"prompt": "a", "lora": "b"}', "unknown field 'lora'"),
        ('{"tokens": [1], "tools": []}', "unknown field 'tools'"),
    ],
)
def test_bad_lines(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"file: 1 bad line\n  line 2: ") as error:
        parse_prompts(["[1]", line, "[2]"], "file")
    assert told in str(error.value)


def test_many_bad_lines_are_told_together() -> None:
    with pytest.raises(ConfigError, match="30 bad lines") as error:
        parse_prompts(["nothing"] * 30, "file")
    assert "line 20: " in str(error.value)
    assert "and 10 more" in str(error.value)
    with pytest.raises(ConfigError, match="no prompts"):
        parse_prompts(["", " \n"], "file")


# -------------------------------------------------------------------------------- command line


run = functools.partial(commands.run, "seed")


@pytest.mark.parametrize("interrupted", [False, True])
def test_command_reports_what_it_did_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    class Offline(Engine):
        """An engine that stores all prompts but the second, or is interrupted."""

        config = Config()

        def __init__(self, _: str, url: str, __: object) -> None:
            super().__init__(Path(url), [2] * 9)

        def __enter__(self) -> Offline:
            return self

        def __exit__(self, *_: object) -> None: ...

        def render(self, sources: Sequence[SourcePrompt]) -> list[TokenPrompt]:
            return [TokenPrompt(source.line, list(source.tokens or ())) for source in sources]

        def namespace(self) -> Namespace:
            return namespace()

        def batch_chunks(self, _: object) -> int:
            return 2

        def compute(self, prompts: Sequence[TokenPrompt]) -> None:
            if interrupted and prompts[0].line > 1:
                raise KeyboardInterrupt
            super().compute(prompts)

    monkeypatch.setattr("kvshelf.vllm.seeding.OfflineEngine", Offline)
    # The command sets it for the engine's processes.
    monkeypatch.setenv("KVSHELF_STORAGE_OPTIONS", "{}")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(prompt(number, 2)) for number in range(2)))
    result = run(tmp_path, file, "--model", "m", "--json")
    row = json.loads(result.stdout)
    assert (row["stored"], row["interrupted"]) == (1, interrupted)
    assert [problem["line"] for problem in row["problems"]] == ([] if interrupted else [2])
    assert result.exit_code == (130 if interrupted else 1)
