"""The manifests, the compose file and the index of ``examples/`` name only what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshelf.config import PROCESS_VARIABLES, Config, variable_of
from kvshelf.vllm import check_vllm_version

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
CONTAINERFILES = sorted(KUBERNETES.glob("Containerfile*"))
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]
VARIABLES = {*map(variable_of, Config.model_fields), *PROCESS_VARIABLES}


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    """What kustomize makes of an overlay."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def mappings(value: object) -> Iterator[dict[str, Any]]:
    """All mappings in what was read from YAML."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from mappings(item)


def check_command(command: list[str], variables: dict[str, str]) -> None:
    """The connector and the variables of an engine are ones that exist."""
    (connector,) = (word for word in command if word.startswith("--kv-transfer-config="))
    found = json.loads(connector.partition("=")[2])
    assert found["kv_connector"] == "KVShelfConnector"
    assert found["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    assert {name for name in variables if name.startswith("KVSHELF_")} <= VARIABLES


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    for one in rendered(overlay):
        validate.validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_whole(overlay: str) -> None:
    """Volumes, ports, options and Services are there, and no two names collide."""
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(overlay)]
    assert len(set(names)) == len(names)
    sets = [one for one in rendered(overlay) if one["kind"] == "StatefulSet"]
    assert len(sets) == (2 if "pd" in overlay else 1)
    for one in sets:
        pod = one["spec"]["template"]
        (engine,) = pod["spec"]["containers"]
        check_command(engine["args"], {each["name"]: "" for each in engine["env"]})
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        volumes |= {each["metadata"]["name"] for each in one["spec"]["volumeClaimTemplates"]}
        assert {mount["name"] for mount in engine["volumeMounts"]} == volumes
        (options,) = (each["configMap"] for each in pod["spec"]["volumes"] if "configMap" in each)
        assert ("ConfigMap", options["name"]) in names
        assert ("Service", one["spec"]["serviceName"]) in names
        on_gpus = "nvidia.com/gpu" in engine["resources"]["limits"]
        assert on_gpus is overlay.endswith("gpu")
        assert on_gpus is not any("kv-cache-memory-bytes" in word for word in engine["args"])
        balancing = [
            service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
            for service in rendered(overlay)
            if service["kind"] == "Service" and "clusterIP" not in service["spec"]
        ]
        assert balancing.count(True) == 1
        assert one["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    for one in (one for one in rendered(overlay) if one["kind"] == "ConfigMap"):
        config = Config.load(yaml.safe_load(one["data"]["options.yaml"]), {})
        assert ("://" in str(config.shared_storage_path)) == ("s3" in overlay)
        assert config.capacity.max_bytes


def test_pods_run_as_the_user_of_the_image() -> None:
    for one in mappings(rendered("base")):
        if "runAsUser" in one:
            user = f"{one['runAsUser']}:{one['runAsGroup']}"
            assert all(f"USER {user}\n" in file.read_text() for file in CONTAINERFILES)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: make test")
@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_containerfiles_have_no_fault_that_hadolint_knows(file: Path) -> None:
    done = subprocess.run([str(HADOLINT), file], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_image_of_engines_is_made_of_a_version_that_kvshelf_supports() -> None:
    lines = (KUBERNETES / "Containerfile.engine").read_text()
    versions = re.findall(r"VLLM=v([\d.]+)", lines)
    assert len(versions) == 2
    for version in versions:
        check_vllm_version(version)


def test_compose_file() -> None:
    found = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    engine = found["services"]["engine"]
    check_command(engine["command"], engine["environment"])
    assert "max_bytes" in json.loads(engine["environment"]["KVSHELF_CAPACITY"])
    for volume in (volume for one in mappings(found) for volume in one.get("volumes", ())):
        file = str(volume).partition(":")[0]
        assert not file.startswith(".") or (EXAMPLES / file).exists()
    context, file = EXAMPLES / engine["build"]["context"], engine["build"]["dockerfile"]
    assert (context / file).resolve() == KUBERNETES / "Containerfile.engine"


def test_index_names_every_example_and_leads_to_files() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for program in EXAMPLES.glob("*.py"):
        assert f"`python examples/{program.name}" in index or program.name == "demo.py"
    for path in re.findall(r"\b(examples/[\w/]+\.py)", index):
        assert (EXAMPLES.parent / path).is_file(), path
    for link in re.findall(r"\]\(([^)#]+)", index):
        assert (EXAMPLES / link).is_file(), link
