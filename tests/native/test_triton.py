"""The Triton kernel, and where it serves.

What needs Triton itself runs in processes without vLLM, see triton_child.py.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.kv import ops
from kvshelf.kv.ops import choice as choice_module
from kvshelf.kv.ops import library as library_module

pytestmark = pytest.mark.real

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)


def child(work: str, tmp_path: Path, **environment: str) -> dict[str, int]:
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        [sys.executable, "-W", "ignore", here / "triton_child.py", work],
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(
                map(str, (here.parents[1], here.parents[1] / "cuda" / "gpu"))
            ),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return counts


@pytest.mark.slow
@needs_triton
def test_the_interpreted_kernel_copies_what_the_compiled_twin_copies(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if ops.implementation() != "cpp":
        pytest.skip("the native library is not used: there is nothing to compare with")
    counts = child("compare", tmp_path, TRITON_INTERPRET="1")
    record_property("comparisons", json.dumps(counts))
    assert min(counts["gathers"], counts["scatters"]) >= 100


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_once_for_each_direction_and_width(tmp_path: Path) -> None:
    counts = child("compile", tmp_path)
    kinds, kernels = counts.pop("kinds"), counts.pop("kernels")
    assert kinds == kernels == 8
    # Loads of whole words: some of the plan, and in each thread those of several tokens at once.
    assert len(counts) == 6 and min(counts.values()) >= 8


# --- where it serves ---------------------------------------------------------------


@pytest.fixture
def gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``cuda:0`` is not served by kvshelf's kernels, and Triton is not installed."""

    def forget() -> None:
        for remembered in (
            library_module.compiled_library,
            library_module._load_kernels,
            choice_module.triton_copy,
        ):
            remembered.cache_clear()
        library_module._kernel_problems.clear()

    monkeypatch.delenv("KVSHELF_OPS", raising=False)
    monkeypatch.setattr(library_module, "_library_paths", list)
    install(monkeypatch, None)
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def install(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    name = "kvshelf.kv.ops.triton_strided"
    monkeypatch.delattr("kvshelf.kv.ops.triton_strided", raising=False)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def triton(problem: Exception | None = None) -> SimpleNamespace:
    return SimpleNamespace(compile_kernels=mock.Mock(side_effect=problem), run_triton=mock.Mock())


def test_triton_serves_a_gpu_that_the_kernels_do_not(
    gpu_without_kernels: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = triton()
    install(gpu_without_kernels, installed)
    with caplog.at_level(logging.INFO, logger="kvshelf.kv.ops"):
        for device in ("cuda:0", "xpu:0", "cuda:0"):
            assert ops.implementation(device) == "triton"
    # Once for each device, when its caches are registered.
    assert [call.args for call in installed.compile_kernels.call_args_list] == [
        (torch.device("cuda:0"),),
        (torch.device("xpu:0"),),
    ]
    assert "gather and scatter on cuda:0: triton" in caplog.messages
    assert ops.implementation("cpu") == "torch"  # caches in host memory need no Triton
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize(
    ("module", "text"),
    [(None, "ModuleNotFoundError"), (triton(RuntimeError("no driver\nat all")), "no driver")],
    ids=["missing", "broken"],
)
def test_plain_torch_on_a_gpu_warns_once(
    module: object,
    text: str,
    gpu_without_kernels: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(gpu_without_kernels, module)
    for _ in range(2):
        assert ops.implementation("cuda:0") == "torch"
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "plain torch" in line and "compiled library is not used" in line
    assert text in line and "at all" not in line


def test_engines_on_a_gpu_have_plain_torch_on_request_only(
    gpu_without_kernels: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda:0")
    ops.check_served(torch.device("cpu"))
    install(gpu_without_kernels, None)
    with pytest.raises(UnsupportedError, match=r"cuda:0.*KVSHELF_OPS=torch"):
        ops.check_served(gpu)
    gpu_without_kernels.setenv("KVSHELF_OPS", "torch")
    ops.check_served(gpu)
    gpu_without_kernels.delenv("KVSHELF_OPS")
    choice_module.triton_copy.cache_clear()
    install(gpu_without_kernels, triton())
    ops.check_served(gpu)
    gpu_without_kernels.setenv("KVSHELF_OPS", "torch")
    assert ops.implementation("cuda:1") == "torch"


def test_triton_on_request(gpu_without_kernels: pytest.MonkeyPatch) -> None:
    gpu_without_kernels.setenv("KVSHELF_OPS", "triton")
    library = mock.Mock()
    gpu_without_kernels.setattr(library_module, "compiled_library", lambda: library)
    with pytest.raises(ConfigError, match=r"requires Triton.*ModuleNotFoundError.*unset"):
        ops.implementation("cuda:0")
    install(gpu_without_kernels, triton())
    assert ops.implementation("cuda:0") == "triton"  # though the library has kernels
    assert ops.implementation("cpu") == "cpp"
