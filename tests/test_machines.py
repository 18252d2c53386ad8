"""The manifests, units and the Containerfile of ``examples/`` name only what there is.

Every file is read as it is, with PyYAML. What kustomize makes of the overlays is looked at where
there is a kubectl, and units by systemd where there is a systemd-analyze.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from pydantic import ByteSize, TypeAdapter

from kvshelf.cli.app import app
from kvshelf.cli.common import address
from kvshelf.cli.values import bounds, size
from kvshelf.config import PROCESS_VARIABLES, Config, variable_of
from kvshelf.proxy.settings import engine_url

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "examples" / "kubernetes"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
UNITS = ROOT / "examples" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
ENGINE = ["-m", "vllm.entrypoints.openai.api_server"]
#: Programs of the images that are not ours.
OTHERS = {"install", "sleep"}
KNOWN_VARIABLES = {*map(variable_of, Config.model_fields), *PROCESS_VARIABLES}
#: Seconds that a process takes to end, beside those that it is given.
RESERVE = 5


def size_of(text: object) -> int:
    """Bytes of a size, also as Kubernetes and systemd write it."""
    return int(TypeAdapter(ByteSize).validate_python(re.sub(r"([KMGT])i?$", r"\1iB", str(text))))


# ------------------------------------------------------------------------------- command lines


def parsed(command: list[str]) -> dict[str, Any]:
    """What the parser of `kvshelf` makes of a command line; it raises where there is an error."""
    program, name, *arguments = command
    assert Path(program).name == "kvshelf"
    commands: Mapping[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    found: dict[str, Any] = commands[name].make_context(name, arguments).params
    check_values(found)
    return found


def check_values(found: Mapping[str, Any]) -> None:
    """Check what the commands themselves check of the parser's values."""
    if found.get("memory"):
        size(found["memory"], "--memory")
    for option in ("http", "admin"):
        if found.get(option):
            address(option, found[option])
    for url in (*(found.get("prefill") or ()), *(found.get("decode") or ())):
        engine_url(url)
    if found.get("socket"):
        Config(server=found["socket"])
    bounds(**{name: found.get(name) for name in ("max_bytes", "max_age")})


def check_command(command: list[str], environment: Mapping[str, str]) -> None:
    """Check the command of a container or a unit, and its variables."""
    ours = {name: value for name, value in environment.items() if name.startswith("KVSHELF_")}
    assert set(ours) <= KNOWN_VARIABLES
    without_file = {name: value for name, value in ours.items() if name != "KVSHELF_CONFIG"}
    if Path(command[0]).name == "kvshelf":
        parsed(command)
        Config.load({}, without_file)
    elif command[1:3] == ENGINE:
        Config.load(connector_of(command).get("kv_connector_extra_config"), without_file)
    else:
        assert command[0] in OTHERS


def vllm_options(command: list[str]) -> dict[str, str]:
    """The options of an engine, written as ``--name=value`` or as ``--name value``."""
    words = [part for word in command[3:] for part in word.split("=", 1)]
    assert len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
    return dict(zip(words[::2], words[1::2], strict=True))


def connector_of(command: list[str]) -> dict[str, Any]:
    """The connector of an engine."""
    found: dict[str, Any] = json.loads(vllm_options(command)["--kv-transfer-config"])
    assert set(found) <= {"kv_connector", "kv_role", "kv_connector_extra_config"}
    assert found["kv_connector"] == "KVShelfConnector"
    assert found["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
def test_vllm_takes_the_options_of_engines() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--port", type=int)
    commands = [one.command for one in containers_of_files() if one.command[1:3] == ENGINE]
    commands += [unit_of(name).command for name in SERVICES if "engine" in name]
    assert len(commands) == 4
    for command in commands:
        found = parser.parse_args(command[3:])
        assert found.kv_transfer_config.kv_connector == "KVShelfConnector"
        assert found.shutdown_timeout == 30


# ------------------------------------------------------------------------------------ manifests


@dataclass(frozen=True)
class Container:
    """A container, of a whole pod or of a patch."""

    name: str
    command: list[str]
    environment: dict[str, str]
    spec: dict[str, Any]


def mappings(value: object) -> Iterator[dict[str, Any]]:
    """All mappings in what was read from YAML."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from mappings(item)


def documents(path: Path) -> list[Any]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found is not None]


def environment_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Variables with a value, as a container sees them."""
    found: dict[str, str] = {}
    for variable in spec.get("env", ()):
        if "$patch" in variable:
            continue
        value = variable.get("value", "node-a")
        assert set(re.findall(r"\$\((\w+)\)", value)) <= set(found), "defined later"
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


def containers_in(value: object, commands: Mapping[str, list[str]]) -> list[Container]:
    found = []
    for parent in mappings(value):
        for spec in (*parent.get("initContainers", ()), *parent.get("containers", ())):
            name = spec["name"]
            command = [*spec.get("command", commands.get(name, ())), *spec.get("args", ())]
            found.append(Container(name, command, environment_of(spec), spec))
    return found


@cache
def containers_of_files() -> list[Container]:
    """All containers of the files; those of patches have the command of the pod's."""
    found = [one for path in sorted(MANIFESTS.rglob("*.yaml")) for one in documents(path)]
    commands: dict[str, list[str]] = {}
    for parent in mappings(found):
        commands |= {
            spec["name"]: spec["command"]
            for spec in parent.get("containers", ())
            if "command" in spec
        }
    return [
        one for one in containers_in(found, commands) if "args" in one.spec or "command" in one.spec
    ]


def test_commands_and_variables_of_containers_exist() -> None:
    found = containers_of_files()
    assert {one.name for one in found} >= {"engine", "seed", "gc", "server", "proxy"}
    for one in found:
        check_command(one.command, one.environment)


def test_files_of_options_can_be_used() -> None:
    files = [*MANIFESTS.rglob("options.yaml"), UNITS / "options.yaml"]
    assert len(files) == 3
    for file in files:
        config = Config.load({}, {"KVSHELF_CONFIG": str(file)})
        assert config.shared_storage_path is not None


def test_kustomizations_name_files_that_exist() -> None:
    for path in MANIFESTS.rglob("kustomization.yaml"):
        [found] = documents(path)
        named = [*found.get("resources", ())]
        named += [patch["path"] for patch in found.get("patches", ()) if "path" in patch]
        named += [file for made in found.get("configMapGenerator", ()) for file in made["files"]]
        for name in named:
            assert (path.parent / name).exists(), f"{path}: {name}"
        beside = {file.name for file in path.parent.iterdir() if file.is_file()}
        assert beside <= {*named, path.name}, "a file that nothing names"


def test_the_prompts_can_be_read() -> None:
    from kvshelf.tools.prompts import read_prompts

    assert len(read_prompts(MANIFESTS / "base" / "prompts.jsonl")) == 2


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        [kubectl, "kustomize", str(MANIFESTS / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def pods_of(overlay: str) -> list[SimpleNamespace]:
    """The pods of an overlay: the object's kind and name, labels, the pod, its containers."""
    found = []
    for one in rendered(overlay):
        spec = one.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            found.append(
                SimpleNamespace(
                    object=one,
                    labels=template["metadata"]["labels"],
                    spec=template["spec"],
                    containers=containers_in(template["spec"], {}),
                )
            )
    return found


def named(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in rendered(overlay) if one["kind"] == kind}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for one in rendered(overlay):
        validate.validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_whole(overlay: str) -> None:
    """All that a pod names is there: commands, options, volumes, ports."""
    options = {name: one["data"] for name, one in named(overlay, "ConfigMap").items()}
    for pod in pods_of(overlay):
        volumes = {one["name"]: one for one in pod.spec.get("volumes", ())}
        mounted = set()
        for one in pod.containers:
            check_command(one.command, one.environment)
            assert one.spec["securityContext"]["readOnlyRootFilesystem"]
            mounts = {
                mount["mountPath"]: mount["name"] for mount in one.spec.get("volumeMounts", ())
            }
            mounted |= set(mounts.values())
            for name, value in one.environment.items():
                if name in ("KVSHELF_CACHE_DIR", "KVSHELF_HISTORY_PATH"):
                    assert place_in(value, mounts) in volumes
            file = one.environment.get("KVSHELF_CONFIG")
            if file is not None:
                config = config_in(file, volumes[place_in(file, mounts)], options)
                shelf = str(config.shared_storage_path)
                assert "://" in shelf or place_in(shelf, mounts) in volumes
                assert "://" not in shelf or one.spec["envFrom"], "no credentials"
                if config.disk_tier is not None and one.name == "engine":
                    volume = volumes[place_in(config.disk_tier.path, mounts)]
                    assert config.disk_tier.max_bytes < size_of(volume["emptyDir"]["sizeLimit"])
            ports = {port["name"] for port in one.spec.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for how in ("httpGet", "tcpSocket"):
                    asked = one.spec.get(probe, {}).get(how)
                    assert asked is None or asked["port"] in ports
        assert mounted == set(volumes)
        claims = {
            one["persistentVolumeClaim"]["claimName"]
            for one in volumes.values()
            if "persistentVolumeClaim" in one
        }
        assert claims <= set(named(overlay, "PersistentVolumeClaim"))


def place_in(path: str, mounts: Mapping[str, str]) -> str:
    """The volume in which a path lies."""
    for parent in (Path(path), *Path(path).parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    raise AssertionError(f"{path} is on no volume: {mounts}")


def config_in(
    file: str, volume: Mapping[str, Any], options: Mapping[str, Mapping[str, str]]
) -> Config:
    sources = [volume, *volume.get("projected", {}).get("sources", ())]
    maps = [source["configMap"] for source in sources if "configMap" in source]
    names = [one["name"] for one in maps]
    [text] = [options[name][Path(file).name] for name in names if Path(file).name in options[name]]
    return Config.load(yaml.safe_load(text), {})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_commands(overlay: str) -> None:
    for one in (one for pod in pods_of(overlay) for one in pod.containers):
        ports = {port["name"]: port["containerPort"] for port in one.spec.get("ports", ())}
        if one.command[1:3] == ENGINE:
            assert ports == {"http": int(vllm_options(one.command)["--port"])}
        elif one.name == "server":
            assert ("0.0.0.0", ports["http"]) == address("--http", parsed(one.command)["http"])
        elif one.name == "proxy":
            found = parsed(one.command)
            assert ("0.0.0.0", ports["admin"]) == address("--admin", found["admin"])
            assert ("0.0.0.0", ports["http"]) == (found["host"], found["port"])
        else:
            assert not ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_lead_to_pods_and_make_no_variables_of_ours(overlay: str) -> None:
    pods = pods_of(overlay)
    for name, service in named(overlay, "Service").items():
        assert not name.upper().startswith("KVSHELF")
        meant = [pod for pod in pods if service["spec"]["selector"].items() <= pod.labels.items()]
        [pod] = meant
        ports = [port["name"] for one in pod.containers for port in one.spec.get("ports", ())]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            assert port["targetPort"] != "admin", "names of engines are not for all"
    assert not [pod for pod in pods if pod.spec["enableServiceLinks"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_pods_with_a_shelf_or_a_socket_run_as_one_user(overlay: str) -> None:
    users = set()
    for pod in pods_of(overlay):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"]
        users.add((context["runAsUser"], context["runAsGroup"]))
        if any("persistentVolumeClaim" in one for one in pod.spec.get("volumes", ())):
            assert context["fsGroup"] == context["runAsGroup"]
            assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    [(user, group)] = users
    text = (MANIFESTS / "Containerfile").read_text()
    assert f"USER {user}:{group}\n" in text
    assert f"useradd --uid {user} --gid {group} " in text


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_grace_periods_are_longer_than_what_they_are_for(overlay: str) -> None:
    for pod in pods_of(overlay):
        given = pod.spec.get("terminationGracePeriodSeconds", 30)
        for one in pod.containers:
            hook = one.spec.get("lifecycle", {}).get("preStop", {"exec": {"command": ["", "0"]}})
            needed = int(hook["exec"]["command"][1]) + RESERVE
            if one.command[1:3] == ENGINE:
                needed += int(vllm_options(one.command)["--shutdown-timeout"])
            if one.name == "proxy":
                needed += parsed(one.command)["drain"]
            else:
                needed += Config().shutdown_drain_s
            assert given >= needed


def test_engines_and_the_node_server_meet_at_a_socket() -> None:
    pods = pods_of("node-server")
    [server] = [one for pod in pods for one in pod.containers if one.name == "server"]
    [engine] = [one for pod in pods for one in pod.containers if one.name == "engine"]
    [folder] = [one for pod in pods for one in pod.containers if one.name == "folder"]
    options = parsed(server.command)
    assert engine.environment["KVSHELF_SERVER"] == options["socket"]
    assert folder.command[-1] == str(Path(options["socket"].removeprefix("ipc://")).parent)
    assert folder.command[:4] == ["install", "-d", "-m", "0700"]
    # Kubernetes makes the folder of the host for root: the socket must lie in one below it.
    places = {
        volume["hostPath"]["path"]
        for pod in pods
        for volume in pod.spec["volumes"]
        if "hostPath" in volume
    }
    assert places == {str(Path(folder.command[-1]).parent)}
    for one in (server, engine, folder):
        mounts = {mount["mountPath"]: mount["name"] for mount in one.spec["volumeMounts"]}
        assert mounts[places.copy().pop()] == "run"
    memory = size_of(options["memory"])
    assert size_of(server.spec["resources"]["limits"]["memory"]) >= memory * 17 // 16 + (1 << 30)
    assert server.spec["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server.spec["livenessProbe"]["httpGet"]["path"] == "/health"


def test_the_proxy_names_all_engines() -> None:
    pods = pods_of("prefill-decode")
    [proxy] = [one for pod in pods for one in pod.containers if one.name == "proxy"]
    options = parsed(proxy.command)
    sets = named("prefill-decode", "StatefulSet")
    services = named("prefill-decode", "Service")
    for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        engines = sets[f"{side}-engine"]["spec"]
        service = engines["serviceName"]
        assert services[service]["spec"]["clusterIP"] == "None"
        assert options[side] == [
            f"http://{side}-engine-{number}.{service}:8000" for number in range(engines["replicas"])
        ]
        [command] = [
            one.command
            for pod in pods
            if pod.object["metadata"]["name"] == f"{side}-engine"
            for one in pod.containers
        ]
        assert connector_of(command)["kv_role"] == role
    assert services["llm"]["spec"]["selector"] == {"app": "kv-proxy"}
    assert proxy.spec["readinessProbe"]["httpGet"] == {"path": "/health", "port": "admin"}
    # Bodies take three times --max-bodies.
    limit = size_of(proxy.spec["resources"]["limits"]["memory"])
    assert limit >= 3 * (options["max_bodies"] << 20) + (256 << 20)


# ---------------------------------------------------------------------------------------- units


def settings_of(name: str) -> dict[str, list[str]]:
    """The settings of a unit, each as often as it is there."""
    found: dict[str, list[str]] = {}
    text = (UNITS / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def unit_of(name: str) -> SimpleNamespace:
    settings = settings_of(name)
    [command] = settings["ExecStart"]
    words = [word for line in settings["Environment"] for word in shlex.split(line)]
    environment = dict(word.split("=", 1) for word in words)
    return SimpleNamespace(settings=settings, command=shlex.split(command), environment=environment)


@pytest.mark.parametrize("name", SERVICES)
def test_commands_and_variables_of_units_exist(name: str) -> None:
    unit = unit_of(name)
    check_command(unit.command, unit.environment)
    folders = {"State": "/var/lib", "Cache": "/var/cache", "Runtime": "/run"}
    made = {
        f"{top}/{folder}"
        for kind, top in folders.items()
        for folder in unit.settings.get(f"{kind}Directory", ())
    }
    for variable in ("KVSHELF_HISTORY_PATH", "KVSHELF_CACHE_DIR", "XDG_CACHE_HOME"):
        path = unit.environment.get(variable)
        assert path is None or {path, str(Path(path).parent)} & made, variable


def test_the_engine_and_the_node_server_of_a_machine_meet() -> None:
    server, engine = unit_of("kvshelf-node.service"), unit_of("kvshelf-engine.service")
    options = parsed(server.command)
    assert engine.environment["KVSHELF_SERVER"] == options["socket"]
    assert engine.settings["User"] == server.settings["User"]
    [folder] = server.settings["RuntimeDirectory"]
    assert str(Path(options["socket"].removeprefix("ipc://")).parent) == f"/run/{folder}"
    assert server.settings["RuntimeDirectoryMode"] == ["0700"]
    memory = size_of(options["memory"])
    assert size_of(server.settings["MemoryMax"][0]) >= memory * 17 // 16 + (1 << 30)
    drain = Config().shutdown_drain_s + RESERVE
    assert int(server.settings["TimeoutStopSec"][0]) >= drain
    running = int(vllm_options(engine.command)["--shutdown-timeout"])
    assert int(engine.settings["TimeoutStopSec"][0]) >= drain + running


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.timer")):
        # It looks for the programs.
        text = re.sub(r"/opt/\w+/bin/\w+", shutil.which("true") or "", path.read_text())
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------- image


def test_the_image_is_built_of_what_there_is() -> None:
    text = (MANIFESTS / "Containerfile").read_text()
    package = importlib.metadata.metadata("kvshelf")
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert set(arguments["EXTRAS"].split(",")) <= set(package.get_all("Provides-Extra", ()))
    assert arguments["WHEEL"].startswith(f"{package['Name']}-")
    for name in re.findall(r"--build-arg (\w+)=", text):
        assert name in arguments
