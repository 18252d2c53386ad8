"""Configuration: three sources, strict keys, and the messages a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvshelf
from kvshelf.backends import open_backend
from kvshelf.config import Config, default_shelf_path
from kvshelf.errors import ConfigError
from kvshelf.urls import cache_dir


def load(extra: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> Config:
    return Config.load(extra, environ or {})


def problem(extra: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(extra, environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvshelf.yaml"


def test_first_source_counts_and_mappings_are_merged_key_by_key(file: Path) -> None:
    file.write_text(
        "chunk_size: 1\nlayout: canonical\nversion: file\n"
        "capacity: {max_bytes: 1GiB, max_age: 7d}\n"
        "storage_options: {a: file, b: file, c: file, deep: {x: file, y: file, z: file}}\n"
    )
    environ = {
        "KVSHELF_CHUNK_SIZE": "2",
        "KVSHELF_VERSION": "variable",
        "KVSHELF_STORAGE_OPTIONS": '{"a": "variable", "b": "variable", "deep": {"y": "variable"}}',
    }
    extra = {
        "config_file": str(file),
        "chunk_size": 3,
        "capacity": {"max_bytes": "2GiB"},
        "storage_options": {"a": "extra", "deep": {"x": "extra"}},
    }
    config = load(extra, environ)
    assert (config.chunk_size, config.version, config.layout) == (3, "variable", "canonical")
    assert (config.capacity.max_bytes, config.capacity.max_age) == (2 << 30, 7 * 86400.0)
    assert config.storage_options == {
        "a": "extra",
        "b": "variable",
        "c": "file",
        "deep": {"x": "extra", "y": "variable", "z": "file"},
    }


def test_file_is_that_of_the_engine_or_of_the_command_or_of_the_variable(tmp_path: Path) -> None:
    for name in ("extra", "command", "variable"):
        (tmp_path / name).write_text(f"version: {name}\n")
    extra, command, variable = (str(tmp_path / name) for name in ("extra", "command", "variable"))
    environ = {"KVSHELF_CONFIG": variable}
    assert Config.load({"config_file": extra}, environ, file=command).version == "extra"
    assert Config.load({}, environ, file=command).version == "command"
    assert Config.load({}, environ).version == "variable"


def test_wrong_value_is_named_with_the_source_that_gives_it(file: Path) -> None:
    file.write_text("capacity: {max_age: 3M}\ndisk_tier: {path: nvme}\n")
    environ = {"KVSHELF_CAPACITY": '{"group_max_bytes": 7}', "KVSHELF_MEMORY": "20"}
    text = problem({"config_file": str(file), "capacity": {"max_byte": 1, "max_bytes": 1}}, environ)
    extra, variable = "kv_connector_extra_config", "variable KVSHELF_{} in the environment"
    for told in (
        f"max_byte of capacity in {extra}: the value 1 cannot be used: no such key",
        f"max_bytes of capacity in {extra}: found 1",
        f"group_max_bytes of {variable.format('CAPACITY')}: found 7",
        f"max_age of capacity in the file {file}: found '3M'",
        f"path of disk_tier in the file {file}: the value 'nvme' cannot be used",
        f"max_bytes of disk_tier in the file {file}: found {{'path': 'nvme'}}; expected a mapping",
        f"{variable.format('MEMORY')}: found '20'",
    ):
        assert f"\n  - {told}" in text
    assert text.count("\n") == 7
    # A key that is missing because it is misspelt is told once.
    text = problem({"disk_tier": {"path": "/nvme/kv", "size": "1GiB"}})
    assert "size of disk_tier" in text and "\n" not in text


def test_paths_become_absolute_and_urls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load({"shared_storage_path": "~/kv"}).shared_storage_path == "/home/someone/kv"
    assert load({"shared_storage_path": Path("/mnt/kv")}).shared_storage_path == "/mnt/kv"
    for url in ("s3://bucket/a//b", "memory://x", "simplecache::s3://bucket"):
        assert load({"shared_storage_path": url}).shared_storage_path == url


@pytest.mark.parametrize("address", ["//nas/kv", "s3:/bucket/kv", "None", "/mnt/kv\n"])
def test_address_that_was_written_by_mistake_is_refused_by_each_reader(address: str) -> None:
    """:mod:`tests.test_inputs` has what is said of them."""
    problem({"shared_storage_path": address})
    problem({"disk_tier": {"path": address, "max_bytes": "1GiB"}})
    with pytest.raises(ConfigError):
        open_backend(address)


def test_address_of_a_node_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load({"server": "ipc:///run/kv.sock"}).server == "ipc:///run/kv.sock"
    assert load({}, {"KVSHELF_SERVER": "ipc://~/kv.sock"}).server == "ipc:///home/someone/kv.sock"
    assert load({"server": "ipc://kv.sock"}).server == f"ipc://{Path.cwd()}/kv.sock"
    for value in ("/run/kv.sock", "tcp://127.0.0.1:5555", "ipc://", "ipc:/run/kv.sock"):
        assert "expected ipc:// and the path of its socket" in problem({"server": value})
    text = problem({"server": "ipc:///" + 99 * "x"})
    assert "has a path of 100 bytes; the system allows 99" in text
    load({"server": "ipc:///" + 98 * "x"})


@pytest.mark.parametrize(
    "option",
    [
        {"shared_storage_path": "/kv"},
        {"storage_options": {"create": False}},
        {"disk_tier": {"path": "/nvme/kv", "max_bytes": "1GiB"}},
        {"memory": "1GiB"},
        {"capacity": {"max_bytes": "1TiB"}},
    ],
)
def test_engine_with_a_node_server_has_no_shelf_of_its_own(option: dict[str, object]) -> None:
    (name,) = option
    text = problem({"server": "ipc:///run/kv.sock", **option})
    assert f"{name} is set too" in text
    assert "give these options to `kvshelf serve`" in text


def test_variables_of_a_kubernetes_service_are_no_options() -> None:
    own = "KVSHELF_PROXY_PORT_80_TCP"
    ends = ("_SERVICE_HOST", "_SERVICE_PORT", "_SERVICE_PORT_HTTP", "_PORT")
    names = [
        *(f"{service}{end}" for service in ("KVSHELF", "KVSHELF_PROXY") for end in ends),
        *(own + end for end in ("", "_PROTO", "_PORT", "_ADDR")),
    ]
    environ = dict.fromkeys(names, "tcp://10.0.0.1:80")
    assert load({}, environ) == load()
    assert "KVSHELF_PROXY_HOST" in problem({}, {**environ, "KVSHELF_PROXY_HOST": "x"})


def test_constructor_explains_as_load_does() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'local_cpu' in the arguments of Config"):
        Config(local_cpu=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"chunk_size in the arguments of Config: found 0"):
        Config(chunk_size=0)
    with pytest.raises(ConfigError, match="read_only and save_decode are both true"):
        Config(read_only=True, save_decode=True)
    with pytest.raises(ConfigError, match=r"memory in the arguments of Config: found 1; expected"):
        Config(memory=1)
    with pytest.raises(ConfigError) as found:
        Config(storage_options="secret")  # type: ignore[arg-type]
    assert "secret" not in str(found.value)


def test_wrong_keys_and_wrong_values_are_named_together(file: Path) -> None:
    file.write_text("versoin: a\nmemory: 0\n")
    text = problem(
        {"chunk_siz": 1, "layuot": 2, "read_only": "x", "config_file": str(file)},
        {"KVSHELF_SAVE_DECODE": "perhaps", "KVSHELF_CAPACITY": "2TiB"},
    )
    for told in ("did you mean chunk_size?", "did you mean layout?", "did you mean version?"):
        assert told in text
    for option in ("read_only", "KVSHELF_SAVE_DECODE", "memory in the file", "KVSHELF_CAPACITY"):
        assert option in text
    assert text.count("\n  - ") == 7


def test_read_ahead_needs_the_option_memory_or_far_storage_and_no_node_server() -> None:
    config, without = load({}, {"KVSHELF_MEMORY": "1GiB"}), load({})
    assert (config.memory_bytes, without.memory_bytes) == (1 << 30, 0)
    assert config.reads_ahead(0.0) and config.reads_ahead(1.0)
    assert without.reads_ahead(1e-3) and not without.reads_ahead(0.9e-3)
    assert not load({"server": "ipc:///run/kvshelf.sock"}).reads_ahead(1.0)


def test_disk_tier_is_not_where_the_private_shelf_is(tmp_path: Path) -> None:
    environ = {"KVSHELF_CACHE_DIR": str(tmp_path)}
    for path in (tmp_path, tmp_path / "shelf", tmp_path / "shelf" / "near"):
        text = problem({"disk_tier": {"path": str(path), "max_bytes": "1B"}}, environ)
        assert "one is inside the other" in text
    load({"disk_tier": {"path": str(tmp_path / "tier"), "max_bytes": "1B"}}, environ)


def test_no_message_and_no_configuration_shows_a_secret(file: Path) -> None:
    file.write_text("storage_options: hunter2\n")
    texts = [
        problem({"config_file": str(file)}),
        problem({}, {"KVSHELF_STORAGE_OPTIONS": "{hunter2"}),
        problem({}, {"KVSHELF_STORAGE_OPTIONS": '"hunter2"'}),
        problem({"storage_options": {"secret": "hunter2"}, "chunk_size": 0}),
        repr(load({"storage_options": {"secret": "hunter2"}})),
        str(load({"storage_options": {"secret": "hunter2"}})),
        repr(
            load({"shared_storage_path": "sftp://u:hunter2@host/kv", "storage_options": {"a": 1}})
        ),
    ]
    assert "sftp://host/kv" in texts[-1]
    assert not [text for text in texts if "hunter2" in text]


# ------------------------------------------------------------------------ the private shelf


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir({"KVSHELF_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/kvshelf")
    home = Path.home() / ".cache" / "kvshelf"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == home
    assert cache_dir({}) == home
    # A user without a home gets no folder named "~".
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_dir({}) == Path("/.cache/kvshelf")


@pytest.mark.parametrize("level", ["kvshelf", "kvshelf/shelf"])
@pytest.mark.parametrize("trouble", ["group", "world", "link", "file"])
def test_unsafe_private_shelf_is_refused(tmp_path: Path, level: str, trouble: str) -> None:
    path = tmp_path / level
    path.parent.mkdir(exist_ok=True, mode=0o700)
    if trouble == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif trouble == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o770 if trouble == "group" else 0o703)
    with pytest.raises(ConfigError, match="shared_storage_path"):
        default_shelf_path({"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_private_shelf_of_another_user_is_refused(tmp_path: Path) -> None:
    path = default_shelf_path({"XDG_CACHE_HOME": str(tmp_path)})
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        default_shelf_path({"XDG_CACHE_HOME": str(tmp_path)})


# ----------------------------------------------------------------------------- light imports

WITHOUT = """
import sys
for name in ("torch", "vllm", "s3fs", "fsspec", "numpy", "tvm_ffi"):
    sys.modules[name] = None
"""


@pytest.mark.real
def test_configuration_needs_no_engine_and_no_storage() -> None:
    code = "import kvshelf; print(kvshelf.__version__, kvshelf.Config.load().chunk_size)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT + code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kvshelf.__version__, "256"]
