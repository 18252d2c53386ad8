"""``kvshelf copy``: what arrives, what is left out, and that it goes on where it ended."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.base import ObjectInfo, StatResults
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.cli import copy as copying
from kvshelf.cli.copy import CopyReport, copy_shelf
from kvshelf.cli.progress import Display
from kvshelf.errors import StorageError
from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.sim.storage import Fault, FaultyStorage
from tests.support import commands
from tests.support.filled import CHUNK, contents, fill, namespace, prompt, store, times
from tests.support.formats import sealed
from tests.support.servers import BUCKET, S3Server
from tests.support.waiting import LONG, until

OTHER = namespace("Org/Other", weights="user:other")
FOLDER = namespace().folder


run = functools.partial(commands.done, "copy")


report = functools.partial(commands.report, "copy")


def objects(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    fill(root, namespace(), prompt(0, 3), prompt(1, 2))
    fill(root, OTHER, prompt(0, 2))
    return root


# -------------------------------------------------------------------------------- what arrives


def test_tails_are_copied_with_the_chunks_before_them(source: Path, tmp_path: Path) -> None:
    fmt = ObjectFormat(namespace())
    chain = KeyChain(namespace().digest, CHUNK)
    chain.extend(prompt(0, 1)[:-3])
    tail = chain.tail()
    assert tail is not None
    with open_shelf(source) as shelf:
        for shard in range(fmt.shards):
            shelf.view(fmt).publish(ObjectRef(tail, shard), sealed(fmt, tail, shard))
    target = tmp_path / "target"
    run(source, target)
    assert contents(target) == contents(source)


def test_only_what_is_missing_or_of_wrong_size_is_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    run(source, target)
    gone, short, link = objects(target)[::5]
    gone.unlink()
    os.truncate(short, 1000)
    link.unlink()
    link.symlink_to("/etc/hostname")
    again = report(source, target)
    assert (again["copied"], again["repaired"], again["existed"]) == (3, 2, 11)
    good = {name: data for name, data in contents(target).items() if "/.kvshelf/" not in name}
    assert good == contents(source)


@pytest.mark.parametrize("damage", ["payload", "short", "foreign", "kind"])
def test_bad_object_is_left_out_named_and_keeps_nothing_else(
    source: Path, tmp_path: Path, damage: str
) -> None:
    bad = objects(source)[4]
    data = bytearray(bad.read_bytes())
    if damage == "payload":
        data[-1] ^= 1
    elif damage == "short":
        del data[-1:]
    elif damage == "foreign":
        data[:] = objects(source)[5].read_bytes()
    elif damage == "kind":
        # Its namespace has no layer of this kind.
        bad = bad.rename(bad.with_name(re.sub("-([01]of2)", r"-state-\1", bad.name)))
    bad.write_bytes(data)
    found = report(source, tmp_path / "target", code=1)
    name = str(bad.relative_to(source))
    assert (found["bad"], found["copied"]) == (1, 13)
    assert [row["name"] for row in found["problems"]] == [name]
    arrived = contents(tmp_path / "target")
    assert name not in arrived
    assert arrived == {key: value for key, value in contents(source).items() if key != name}
    # Without --json the name is on standard error.
    assert name in run(source, tmp_path / "target", code=1).stderr


@pytest.mark.parametrize(("most", "large"), [(1 << 30, 1000), (1000, 100)])
def test_large_objects_are_copied_one_at_a_time_and_huge_ones_not(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, large: int
) -> None:
    """A copy holds objects in memory, and a forged namespace may demand any size."""
    monkeypatch.setattr(copying, "_MAX_BYTES", most)
    monkeypatch.setattr(copying, "_LARGE_BYTES", large)
    at_once: list[int] = []
    held = 0
    real = copying._copy_object

    def counted(*arguments: Any) -> None:
        nonlocal held
        held += 1
        at_once.append(held)
        real(*arguments)
        held -= 1

    monkeypatch.setattr(copying, "_copy_object", counted)
    found = report(source, tmp_path / "target", code=1 if most == 1000 else 0)
    if most == 1000:
        assert (found["failed"], found["copied"]) == (14, 0)
        assert "more than 1000" in found["problems"][0]["problem"]
        assert report(source, tmp_path / "other", "--dry-run", code=1)["failed"] == 14
    else:
        assert (found["failed"], found["copied"]) == (0, 14)
        assert max(at_once) == 1


# -------------------------------------------------------------------------------- selections


def test_chosen_namespaces_go_to_the_folders_that_the_target_has(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    fill(target, namespace("renamed"), prompt(9, 1))
    assert report(source, target, "-n", FOLDER[-16:])["copied"] == 10
    assert [path.name for path in target.iterdir()] == [namespace("renamed").folder]
    assert report(target, source, "--dry-run")["existed"] == 10
    assert report(source, tmp_path / "both", "-n", FOLDER, "-n", OTHER.folder)["copied"] == 14
    assert FOLDER in run(source, tmp_path / "none", "-n", "0" * 16, code=2).stderr


def test_prefixes_of_some_prompts(source: Path, tmp_path: Path) -> None:
    with open_shelf(source) as shelf:
        store(shelf, namespace(), prompt(7, 2), salt="tenant")
    lines = [
        # The same beginning twice, and more than is stored.
        json.dumps(prompt(0, 3)[: 2 * CHUNK + 5]),
        json.dumps({"tokens": prompt(0, 3)[:CHUNK] + prompt(5, 4)}),
        "",
        json.dumps({"tokens": prompt(7, 2), "cache_salt": "tenant"}),
        json.dumps({"tokens": prompt(1, 2)[: CHUNK - 1]}),
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    found = report(source, tmp_path / "target", "--prompts", file)
    # Two chunks of the first, for each of the namespaces; two of the salted one.
    assert found["copied"] == 2 * (2 + 2 + 2)
    assert contents(tmp_path / "target").items() <= contents(source).items()
    salted = f"{FOLDER}/{salt_group_of('tenant')}"
    assert len(objects(tmp_path / "target" / salted)) == 4


# -------------------------------------------------------------------------------- places


def test_to_s3_and_back(
    source: Path, tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = json.dumps(server.options())
    assert server.folder is not None
    bucket = f"s3://{BUCKET}/copied"
    file = tmp_path / "options.json"
    file.write_text(options + "\n")
    there = report(source, bucket, "--target-options", file)
    assert there["copied"] == 14
    assert report(bucket, tmp_path / "by-file", "--source-options", file)["copied"] == 14
    for wrong in ("{", "[]"):
        file.write_text(wrong)
        assert "JSON" in run(source, bucket, "--target-options", file, code=2).stderr
    assert contents(server.folder / BUCKET / "copied") == contents(source)
    # What is configured belongs to the side that is a URL.
    monkeypatch.setenv("KVSHELF_STORAGE_OPTIONS", options)
    assert report(source, bucket)["existed"] == 14
    assert report(bucket, tmp_path / "back")["copied"] == 14
    assert contents(tmp_path / "back") == contents(source)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt(0, 1)))
    assert report(bucket, tmp_path / "one", "--prompts", file)["copied"] == 4


def test_to_any_filesystem_of_fsspec(source: Path) -> None:
    with open_shelf(source, read_only=True) as here, open_shelf("memory://copied") as there:
        assert copy_shelf(here, there).copied == 14
        assert copy_shelf(here, there).existed == 14
        with open_shelf(source.parent / "back") as back:
            assert copy_shelf(there, back).copied == 14
    assert contents(source.parent / "back") == contents(source)


# -------------------------------------------------------------------------------- trouble


def large(root: Path, chunks: int) -> int:
    """Fill a shelf with objects of 1 MiB, so that copying takes a while."""
    of = namespace(layer_shapes=["2,*,4,2048"] * 2, head_sizes=[2048, 2048])
    fill(root, of, prompt(0, chunks))
    return 2 * chunks


#: ``kvshelf`` whose writes take so long that a copy does not end before a signal comes.
SLOWLY = """
import sys, time
from kvshelf.backends.posix import PosixBackend
write = PosixBackend.write
def slow(self, *args, **options):
    time.sleep(0.1)
    return write(self, *args, **options)
PosixBackend.write = slow
sys.argv[0] = "kvshelf"
from kvshelf.cli import main
main()
"""


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_copy_that_is_broken_off_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    count = large(source, 100)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "copy", source, target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells have what they start in the background ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    until(lambda: process.poll() is not None or bool(target.exists() and objects(target)))
    assert process.poll() is None, process.communicate()
    process.send_signal(how)
    output, errors = process.communicate(timeout=LONG)
    arrived = {path.relative_to(target): path.read_bytes() for path in objects(target)}
    assert 0 < len(arrived) < count
    assert all((source / name).read_bytes() == data for name, data in arrived.items())
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "start it again" in errors
        assert output.startswith(f"copied {len(arrived)} objects")
    before = times(target)
    again = report(source, target)
    assert (again["existed"], again["copied"]) == (len(arrived), count - len(arrived))
    after = times(target)
    assert all(after[name] == mtime for name, mtime in before.items() if name in after)
    for name, data in contents(source).items():
        assert (target / name).read_bytes() == data


def test_chosen_namespace_that_vanished_is_a_failure(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="vanished"):
        copied(source, open_backend(tmp_path / "target"), folders=["gone-0123456789abcdef"])


def copied(source: Path, target: Backend, **options: Any) -> CopyReport:
    """Copy a shelf to a storage."""
    with open_shelf(source, read_only=True) as here, Shelf(target) as there:
        return copy_shelf(here, there, **options)


def troubled(url: str, trouble: Callable[[int], Exception | None]) -> FaultyStorage:
    """Open a storage whose writes fail as a test says, by their number."""
    numbers = itertools.count()
    return FaultyStorage(open_backend(url), Fault("write", error=lambda: trouble(next(numbers))))


def test_folder_in_the_place_of_an_object_is_no_fault_of_the_source(
    source: Path, tmp_path: Path
) -> None:
    class Stuck(WrappedBackend):
        """Moves no folder."""

        def set_aside(self, name: str) -> bool:
            return False

    name = objects(source)[2].relative_to(source)
    place = tmp_path / "target" / name
    (place / "inside").mkdir(parents=True)
    display = Display("copying")
    found = copied(source, Stuck(open_backend(tmp_path / "target")), display=display)
    assert (found.bad, found.failed, found.copied) == (0, 1, 13)
    assert not found.complete
    [problem] = display.problems
    text = problem["problem"]
    assert (
        problem["name"] == str(name)
        and "found a folder where an object" in text
        and str(place) in text
    )


def test_source_that_vanishes_while_it_is_read_is_a_failure(source: Path, tmp_path: Path) -> None:
    """As with a mount that ends: every object is missing, and so is its namespace."""

    def trouble(number: int) -> Exception | None:
        if number == 3:
            source.rename(tmp_path / "elsewhere")
            source.mkdir()
        return None

    with pytest.raises(StorageError, match="vanished"):
        copied(source, troubled(str(tmp_path / "target"), trouble))


@pytest.mark.parametrize("of_prompts", [False, True])
def test_source_that_vanishes_while_it_is_listed_is_a_failure(
    source: Path, tmp_path: Path, of_prompts: bool
) -> None:
    class Vanishing(WrappedBackend):
        """Ends as a mount does, before the first look at what a namespace has."""

        def _vanish(self) -> None:
            if not (tmp_path / "elsewhere").exists():
                source.rename(tmp_path / "elsewhere")
                source.mkdir()

        def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
            self._vanish()
            return super().list(prefix, **options)

        def stat(self, names: Sequence[str]) -> StatResults:
            self._vanish()
            return super().stat(names)

    prompts = [TokenPrompt(1, prompt(0, 3))] if of_prompts else None
    with (
        Shelf(Vanishing(open_backend(source, read_only=True))) as here,
        open_shelf(tmp_path / "target") as there,
        pytest.raises(StorageError, match="vanished"),
    ):
        copy_shelf(here, there, prompts=prompts)
