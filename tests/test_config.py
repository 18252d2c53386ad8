"""Configuration: three sources, strict keys, and the messages a user sees."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ByteSize, ValidationError

import kvshelf
from kvshelf.backends import Deadlines
from kvshelf.config import (
    PROCESS_VARIABLES,
    CapacityConfig,
    Config,
    _note_services,
    cache_dir,
    default_shelf_path,
)
from kvshelf.errors import ConfigError, KVShelfError
from kvshelf.shelf.shelf import open_shelf


def load(extra: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> Config:
    return Config.load(extra, environ or {})


def problem(extra: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(extra, environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvshelf.yaml"


def test_defaults_need_nothing() -> None:
    config = load()
    assert config.shared_storage_path is None
    assert config.chunk_size == 256
    assert config.staging_bytes is None
    assert config.least_staging == 1 << 30
    assert config.admission == "auto"
    assert config.shutdown_drain_s == 4.0
    assert not config.read_only
    assert not config.save_decode


def test_the_first_source_wins(file: Path) -> None:
    file.write_text("chunk_size: 1\nshards: 2\nio_threads: 3\n")
    environ = {"KVSHELF_CONFIG": str(file), "KVSHELF_CHUNK_SIZE": "4", "KVSHELF_SHARDS": "5"}
    config = load({"chunk_size": 6}, environ)
    assert (config.chunk_size, config.shards, config.io_threads) == (6, 5, 3)


def test_config_file_key_wins_over_the_variable(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("shards: 1\n")
    file.write_text("shards: 2\n")
    environ = {"KVSHELF_CONFIG": str(other)}
    assert load({}, environ).shards == 1
    assert load({"config_file": str(file)}, environ).shards == 2


def test_an_empty_file_and_an_empty_variable_count_as_absent(file: Path) -> None:
    file.write_text("# nothing yet\n")
    environ = {"KVSHELF_CONFIG": str(file), "KVSHELF_SHARDS": "", "KVSHELF_VERSION": ""}
    assert load({}, environ) == load()


def test_values_in_the_environment_are_read_by_type() -> None:
    environ = {
        "KVSHELF_READ_ONLY": "true",
        "KVSHELF_STAGING_BYTES": "512MiB",
        "KVSHELF_LOOKUP_WAIT_S": "0.5",
        "KVSHELF_STORAGE_OPTIONS": '{"anon": true}',
        "KVSHELF_LAYOUT": "canonical",
    }
    config = load({}, environ)
    assert config.read_only
    assert config.staging_bytes == 512 << 20
    assert config.lookup_wait_s == 0.5
    assert config.storage_options == {"anon": True}
    assert config.layout == "canonical"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_CHUNK_SIZE", "64")
    assert Config.load().chunk_size == 64
    assert Config().chunk_size == 256, "constructing a Config directly takes no environment"


@pytest.mark.parametrize(
    ("size", "count"),
    [(1048576, 1 << 20), ("1MiB", 1 << 20), ("1.5 GiB", 3 << 29), ("2MB", 2 * 10**6)],
)
def test_sizes(size: object, count: int) -> None:
    assert load({"staging_bytes": size}).staging_bytes == count


def test_deadlines_that_are_not_set_are_those_of_the_storage() -> None:
    assert Config().deadlines == {}
    found = Config.load({"read_deadline_s": 2, "deadline_bandwidth": "10MB"}, {})
    assert found.deadlines == {"read": 2.0, "bytes_per_second": 10e6}
    with open_shelf("memory://deadlines", deadlines=found.deadlines) as shelf:
        assert shelf.backend.deadlines == Deadlines(read=2.0, bytes_per_second=10e6)
    with pytest.raises(ConfigError, match="write_deadline_s"):
        Config.load({"write_deadline_s": 0}, {})


def test_storage_options_are_merged_so_that_secrets_can_stay_in_the_environment(
    file: Path,
) -> None:
    file.write_text("storage_options: {endpoint_url: 'http://here', key: file}\n")
    environ = {"KVSHELF_STORAGE_OPTIONS": '{"key": "env", "secret": "s"}'}
    config = load({"config_file": str(file), "shared_storage_path": "s3://b"}, environ)
    assert config.storage_options == {"endpoint_url": "http://here", "key": "env", "secret": "s"}


def test_paths_become_absolute_and_urls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load({"shared_storage_path": "~/kv"}).shared_storage_path == "/home/someone/kv"
    assert load({"shared_storage_path": "kv"}).shared_storage_path == f"{Path.cwd()}/kv"
    assert load({"shared_storage_path": Path("/mnt/kv")}).shared_storage_path == "/mnt/kv"
    for url in ("s3://bucket/a//b", "memory://x", "simplecache::s3://bucket"):
        assert load({"shared_storage_path": url}).shared_storage_path == url


def test_the_address_of_a_node_server(monkeypatch: pytest.MonkeyPatch) -> None:
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
        {"memory_tier": {"max_bytes": "1GiB"}},
        {"capacity": {"max_bytes": "1TiB"}},
    ],
)
def test_an_engine_with_a_node_server_has_no_shelf_of_its_own(option: dict[str, object]) -> None:
    (name,) = option
    text = problem({"server": "ipc:///run/kv.sock", **option})
    assert f"{name} is set too" in text
    assert "give these options to `kvshelf serve`" in text


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load().chunk_size = 1  # type: ignore[misc]


def test_every_unknown_key_is_named_with_its_source_and_the_nearest_one(file: Path) -> None:
    file.write_text("shard: 3\n")
    text = problem(
        {"config_file": str(file), "chunksize": 1, "zzz": 2},
        {"KVSHELF_SHARDSS": "1", "HOME": "/", "OTHER_KVSHELF_X": "1"},
    )
    assert "'chunksize' in kv_connector_extra_config; did you mean chunk_size?" in text
    assert "'zzz' in kv_connector_extra_config; known: admission, cache_tails, capacity" in text
    assert "variable KVSHELF_SHARDSS in the environment; did you mean KVSHELF_SHARDS?" in text
    assert f"'shard' in the file {file}; did you mean shards?" in text
    assert "OTHER_KVSHELF_X" not in text


def test_process_variables_are_known() -> None:
    environ = dict.fromkeys(PROCESS_VARIABLES, "") | {"KVSHELF_OPS": "torch"}
    assert load({}, environ) == load()


@pytest.mark.parametrize(
    "name",
    [
        "KVSHELF_PORT",
        "KVSHELF_SERVICE_HOST",
        "KVSHELF_PORT_80_TCP_ADDR",
        "KVSHELF_A_SERVICE_PORT_HTTP",
    ],
)
def test_variables_of_a_kubernetes_service_are_explained(name: str) -> None:
    assert "enableServiceLinks" in problem({}, {name: "tcp://10.0.0.1:80"})


def service(prefix: str, *ports: int, names: Sequence[str] = ()) -> dict[str, str]:
    """The variables that Kubernetes makes for a Service."""
    environ = {
        f"{prefix}_SERVICE_HOST": "10.0.0.1",
        f"{prefix}_SERVICE_PORT": str(ports[0]),
        f"{prefix}_PORT": f"tcp://10.0.0.1:{ports[0]}",
    }
    environ |= {f"{prefix}_SERVICE_PORT_{name}": str(ports[0]) for name in names}
    for port in ports:
        own = f"{prefix}_PORT_{port}_TCP"
        environ |= {
            own: f"tcp://10.0.0.1:{port}",
            f"{own}_PROTO": "tcp",
            f"{own}_PORT": str(port),
            f"{own}_ADDR": "10.0.0.1",
        }
    return environ


def test_the_variables_of_kubernetes_services_stop_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _note_services.cache_clear()
    environ = {
        **service("KVSHELF", 8000, 9000, names=["HTTP", "METRICS_HTTP"]),
        **service("KVSHELF_PROXY", 80, names=["HTTP"]),
        **service("KVSHELF_SERVICE", 80),
        "KVSHELF_CHUNK_SIZE": "512",
    }
    with caplog.at_level("INFO"):
        assert load({}, environ).chunk_size == 512
        assert load({}, environ).chunk_size == 512
    assert ["Kubernetes" in record.message for record in caplog.records] == [True]


def test_a_service_that_misses_a_variable_is_explained() -> None:
    whole = service("KVSHELF_PROXY", 80, names=["HTTP"])
    for missing in whole:
        if missing.endswith("_PORT_HTTP"):
            continue
        environ = {name: value for name, value in whole.items() if name != missing}
        assert "enableServiceLinks" in problem({}, environ), missing
    assert "KVSHELF_PROXY_HOST" in problem({}, {**whole, "KVSHELF_PROXY_HOST": "x"})


@pytest.mark.parametrize("text", ["/models/llama", "./llama", "../llama", "~/llama"])
def test_weights_that_name_a_path_are_refused(text: str) -> None:
    found = problem({"weights": text})
    assert "weights in kv_connector_extra_config" in found
    assert "names a path" in found
    assert "variable KVSHELF_WEIGHTS in the environment" in problem({}, {"KVSHELF_WEIGHTS": text})


def test_weights_that_exist_as_a_path_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "content", "sampled"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert "names a path" in problem({"weights": "llama"})
    for name in ("content", "sampled", "llama-2", "org/llama"):
        assert load({"weights": name}).weights == name


def test_the_constructor_explains_as_load_does() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'local_cpu' in the arguments of Config"):
        Config(local_cpu=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"chunk_size in the arguments of Config: the value 0"):
        Config(chunk_size=0)
    with pytest.raises(ConfigError, match="read_only and save_decode are both true"):
        Config(read_only=True, save_decode=True)
    with pytest.raises(ConfigError) as found:
        Config(storage_options="secret")  # type: ignore[arg-type]
    assert "secret" not in str(found.value)


def test_keys_of_lmcache_lead_to_the_page_about_them(file: Path) -> None:
    assert "docs/migrating.md" in problem({"lmcache.local_cpu": True})
    file.write_text("local_cpu: false\nremote_url: fs://host:0/mnt/kv\n")
    assert problem({"config_file": str(file)}).count("docs/migrating.md") == 1


def test_every_bad_value_is_named_with_its_source(file: Path) -> None:
    file.write_text("chunk_size: 0\n")
    text = problem(
        {"config_file": str(file), "layout": "other", "staging_bytes": "1 elephant"},
        {"KVSHELF_IO_THREADS": "many", "KVSHELF_LOOKUP_WAIT_S": "inf"},
    )
    assert f"chunk_size in the file {file}: the value 0" in text
    assert "layout in kv_connector_extra_config: the value 'other'" in text
    assert "staging_bytes in kv_connector_extra_config: the value '1 elephant'" in text
    assert "variable KVSHELF_IO_THREADS in the environment: the value 'many'" in text
    assert "variable KVSHELF_LOOKUP_WAIT_S in the environment: the value 'inf'" in text


@pytest.mark.parametrize(
    "extra",
    [
        {"chunk_size": 0},
        {"chunk_size": True},
        {"chunk_size": 1.5},
        {"shards": -1},
        {"staging_bytes": 0},
        {"io_threads": 0},
        {"lookup_wait_s": -1},
        {"lookup_wait_s": "nan"},
        {"weights": ""},
        {"version": ""},
        {"shared_storage_path": ""},
        {"shared_storage_path": 3},
        {"storage_options": "anon"},
        {"read_only": "perhaps"},
        {"disk_tier": "/nvme"},
        {"disk_tier": {"path": "/nvme"}},
        {"disk_tier": {"path": "", "max_bytes": 1}},
        {"disk_tier": {"path": "s3://bucket", "max_bytes": 1}},
        {"disk_tier": {"path": "/nvme", "max_bytes": 0}},
        {"disk_tier": {"path": "/nvme", "max_bytes": True}},
        {"disk_tier": {"path": "/nvme", "max_bytes": 1, "max_byte": 2}},
        {"memory_tier": "20GiB"},
        {"memory_tier": {}},
        {"memory_tier": {"max_bytes": 0}},
        {"memory_tier": {"max_bytes": "1GiB", "path": "/nvme"}},
        {"capacity": "1TiB"},
        {"capacity": None},
        {"capacity": {"max_bytes": 0}},
        {"capacity": {"max_byte": 1}},
        {"capacity": {"max_age": "1m"}},
        {"capacity": {"max_age": "1 fortnight"}},
        {"capacity": {"max_age": "nand"}},
        {"capacity": {"max_age": True}},
        {"capacity": {"min_free": -1}},
        {"capacity": {"uses": "atime"}},
        {"_env_file": "/etc/passwd"},
        {"config_file": 3},
    ],
)
def test_values_that_cannot_be_used(extra: dict[str, object]) -> None:
    (key,) = extra
    assert key in problem(extra)


def test_without_a_memory_tier_only_far_storage_is_read_ahead() -> None:
    config, without = load({}, {"KVSHELF_MEMORY_TIER": '{"max_bytes": "1GiB"}'}), load({})
    assert config.memory_bytes == 1 << 30
    assert config.prefetch_budget(0.0) == config.prefetch_budget(1.0) == 1 << 29
    assert (without.prefetch_budget(0.0), without.memory_bytes) == (0, 0)
    assert without.prefetch_budget(1.0) > 0


def test_a_disk_tier_is_a_place_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    given = {"path": "nvme/kv", "max_bytes": "2GiB"}
    for config in (
        load({"disk_tier": given}),
        load({}, {"KVSHELF_DISK_TIER": json.dumps(given)}),
        load({"disk_tier": {"path": "/nvme/kv"}}, {"KVSHELF_DISK_TIER": '{"max_bytes": "2GiB"}'}),
    ):
        assert config.disk_tier is not None
        assert (config.disk_tier.path, config.disk_tier.max_bytes) == ("/nvme/kv", 2 << 30)
    assert load({}).disk_tier is None


def test_messages_about_a_disk_tier_name_what_is_wrong() -> None:
    text = problem({"disk_tier": {"path": "/nvme", "max_bytes": "many"}})
    assert "disk_tier in kv_connector_extra_config" in text
    assert "'many' cannot be used: max_bytes: " in text
    text = problem({}, {"KVSHELF_DISK_TIER": "/nvme"})
    assert "variable KVSHELF_DISK_TIER in the environment" in text
    assert 'expected {"path": …, "max_bytes": …}' in text


@pytest.mark.parametrize(
    ("shelf", "tier"),
    [
        ("/kv", "/kv"),
        ("/kv", "/kv/near"),
        ("/kv/far", "/kv"),
        ("file:///kv", "/kv"),
        ("file://localhost/k%76/", "/kv/near"),
        ("local:///kv/x/../far", "/kv"),
    ],
)
def test_a_disk_tier_has_a_directory_of_its_own(shelf: str, tier: str) -> None:
    options = {"shared_storage_path": shelf, "disk_tier": {"path": tier, "max_bytes": 1}}
    assert "one is inside the other" in problem(options)
    load({**options, "shared_storage_path": "s3://kv"})


def test_a_disk_tier_is_not_where_the_private_shelf_is(tmp_path: Path) -> None:
    environ = {"KVSHELF_CACHE_DIR": str(tmp_path)}
    for path in (tmp_path, tmp_path / "shelf", tmp_path / "shelf" / "near"):
        text = problem({"disk_tier": {"path": str(path), "max_bytes": 1}}, environ)
        assert "one is inside the other" in text
    load({"disk_tier": {"path": str(tmp_path / "tier"), "max_bytes": 1}}, environ)


def test_capacity_has_sizes_and_times_with_units() -> None:
    config = load(
        {"capacity": {"max_bytes": "2TiB", "min_free": 0}},
        {"KVSHELF_CAPACITY": '{"max_age": "1.5d", "uses": "marks"}'},
    )
    assert config.capacity == CapacityConfig(
        max_bytes=ByteSize(2 << 40), max_age=129600.0, min_free=ByteSize(0), uses="marks"
    )
    for text, seconds in {"120": 120, "120s": 120, "3 m": 180, "12h": 43200, "7D": 604800}.items():
        assert load({"capacity": {"max_age": text}}).capacity.max_age == seconds
    nothing = load().capacity
    assert (nothing.max_bytes, nothing.max_age, nothing.min_free) == (None, None, None)


def test_a_bound_of_salt_groups_needs_salt_groups() -> None:
    bound = {"capacity": {"group_max_bytes": "1GiB"}}
    assert "set group_by_salt to true, or remove group_max_bytes" in problem(bound)
    assert load({**bound, "group_by_salt": True}).capacity.group_max_bytes == 1 << 30


def test_a_variable_that_is_not_json_is_named() -> None:
    text = problem({}, {"KVSHELF_CAPACITY": "2TiB", "KVSHELF_STORAGE_OPTIONS": "{}"})
    assert "variable KVSHELF_CAPACITY in the environment is not JSON; expected an object" in text
    assert "STORAGE_OPTIONS" not in text


@pytest.mark.parametrize("content", ["a: [", "- a\n- b\n", "\x00", "just text"])
def test_a_file_that_is_no_mapping(file: Path, content: str) -> None:
    file.write_text(content)
    text = problem({}, {"KVSHELF_CONFIG": str(file)})
    assert str(file) in text
    assert "KVSHELF_CONFIG" in text


def test_a_file_that_is_missing(file: Path) -> None:
    assert str(file) in problem({"config_file": str(file)})


def test_no_message_holds_a_secret(file: Path) -> None:
    file.write_text("storage_options: hunter2\n")
    texts = [
        problem({"config_file": str(file)}),
        problem({}, {"KVSHELF_STORAGE_OPTIONS": "{hunter2"}),
        problem({}, {"KVSHELF_STORAGE_OPTIONS": '"hunter2"'}),
        problem({"storage_options": {"secret": "hunter2"}, "chunk_size": 0}),
        repr(load({"storage_options": {"secret": "hunter2"}})),
        str(load({"storage_options": {"secret": "hunter2"}})),
    ]
    assert not [text for text in texts if "hunter2" in text]


def test_errors_can_be_caught_as_builtins() -> None:
    with pytest.raises(ValueError, match="shards"):
        load({"shards": "x"})
    with pytest.raises(KVShelfError):
        load({"shards": "x"})


# ------------------------------------------------------------------------ the private shelf


def test_cache_dir_follows_the_environment(tmp_path: Path) -> None:
    assert cache_dir({"KVSHELF_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/kvshelf")
    home = Path.home() / ".cache" / "kvshelf"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == home
    assert cache_dir({}) == home


def test_the_private_shelf_is_private(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = os.umask(0)
    try:
        path = default_shelf_path(environ)
    finally:
        os.umask(before)
    assert path == tmp_path / "cache" / "kvshelf" / "shelf"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert default_shelf_path(environ) == path, "a second engine uses the same"


@pytest.mark.parametrize("level", ["kvshelf", "kvshelf/shelf"])
@pytest.mark.parametrize("trouble", ["group", "world", "link", "file"])
def test_an_unsafe_private_shelf_is_refused(tmp_path: Path, level: str, trouble: str) -> None:
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
def test_a_private_shelf_of_another_user_is_refused(tmp_path: Path) -> None:
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


def without_heavy_packages(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT + code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.real
def test_configuration_needs_no_engine_and_no_storage() -> None:
    code = "import kvshelf; print(kvshelf.__version__, kvshelf.Config.load().chunk_size)"
    assert without_heavy_packages(code).split() == [kvshelf.__version__, "256"]


@pytest.mark.real
def test_a_directory_can_be_read_without_torch(tmp_path: Path) -> None:
    code = f"import kvshelf\nprint(list(kvshelf.open_shelf({str(tmp_path)!r}).objects()))"
    assert without_heavy_packages(code).strip() == "[]"
