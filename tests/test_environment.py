"""How the environment of tests is set up: with pip's settings, and without uv where it fails."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "environment.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_pip_reach_uv(script: ModuleType) -> None:
    listed = """\
:env:.cert='/proxy.pem'
:env:.disable-pip-version-check='1'
global.cert='/system.pem'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
global.index-url='https://mirror/simple'
global.trusted-host='one two:8443'
install.find-links='/wheels'
"""
    assert script.settings_for_uv(listed) == {
        "SSL_CERT_FILE": "/proxy.pem",
        "UV_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX_URL": "https://mirror/simple",
        "UV_INSECURE_HOST": "one two:8443",
    }


@pytest.mark.parametrize(
    ("failing", "installed_by"), [((), "uv"), (("bin/uv",), "pip"), (("install -q uv",), "pip")]
)
def test_set_up_where_uv_fails_goes_on_with_pip(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[str, ...],
    installed_by: str,
) -> None:
    done: list[str] = []

    def run(title: str, *command: object, **_: Any) -> bool:
        line = " ".join(map(str, command))
        if any(part in line for part in failing):
            return False
        done.append(line)
        return True

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script.os, "environ", {})
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: "")
    script.install(Path("/venv/bin/python"), "https://torch/cpu")
    packages, torchvision = [line for line in done if "torch" in line]
    by = {"uv": "/venv/bin/uv pip install", "pip": "/venv/bin/python -m pip"}[installed_by]
    assert packages.startswith(by) and torchvision.startswith(by)


def test_set_up_where_nothing_installs_ends_with_a_remedy(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "run", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="TORCH_INDEX=URL"):
        script.install(Path("/venv/bin/python"), "https://torch/cpu")
