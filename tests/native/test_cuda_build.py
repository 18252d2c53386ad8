"""What the CUDA compiler makes of the kernels, and that no GPU is needed to load it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvshelf.kv import ops
from kvshelf.kv.ops import library as library_module
from tests.support.paged import make_paged

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "cuda"
NVCC = shutil.which(os.environ.get("CUDACXX") or "nvcc")

pytest.importorskip("scikit_build_core")

pytestmark = pytest.mark.real
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")


def run(*command: object, **environment: str) -> str:
    """Run a command with the Python of the tests first in PATH; return all it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PATH": path} | environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


@dataclass(frozen=True)
class Build:
    library: Path
    output: str


def build(folder: Path, *options: str, **environment: str) -> Build:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    output = run(
        *(cmake, "-S", CUDA, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"),
        *("-DCMAKE_BUILD_TYPE=Release", *options),
        **environment,
    )
    output += run(cmake, "--build", folder, "--parallel", "2", "--verbose")
    return Build(folder / "libkvshelf_ops.so", output)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """All architectures, with the compiler's report on each kernel."""
    return build(
        tmp_path_factory.mktemp("full"),
        "-DKVSHELF_CUDA=ON",
        "-DCMAKE_CUDA_FLAGS=--resource-usage",
    )


@pytest.fixture(scope="module")
def disassembled(full: Build) -> dict[tuple[str, str], list[str]]:
    """Instructions of each kernel, by architecture and mangled name."""
    places = [Path(str(shutil.which("nvcc"))).resolve().parent]
    places += [Path(entry) / "triton/backends/nvidia/bin" for entry in sys.path]
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, places)))
    found = found or shutil.which("cuobjdump")
    if found is None:
        pytest.skip("no cuobjdump to disassemble with")
    kernels: dict[tuple[str, str], list[str]] = {}
    architecture = ""
    text = run(found, "-sass", full.library)
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.search(r"Function : (\w+)", line):
            current = kernels[architecture, match[1]] = []
        elif match := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line):
            current.append(match[1])
    return kernels


@pytest.fixture(scope="module")
def sass(
    disassembled: dict[tuple[str, str], list[str]],
) -> dict[tuple[str, str, bool], list[str]]:
    """Those of gather and scatter, by architecture, type of vector (mangled), is it a gather."""
    return {
        (architecture, match[1], match[2] == "1"): instructions
        for (architecture, name), instructions in disassembled.items()
        if (match := re.search(r"copy_kernelI(5uint4|5uint2|[jh])Lb([01])E", name))
    }


@pytest.mark.slow
@needs_nvcc
def test_no_kernel_spills_registers(full: Build) -> None:
    reports = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", full.output)
    assert len(reports) == 4 * 8
    assert {numbers for report in reports for numbers in report} == {"0"}
    found = re.findall(r"entry function '(\w+)'(?s:.*?)Used (\d+) registers", full.output)
    assert len(found) == len(reports)
    # 64 registers leave room for four blocks of 256 threads on each multiprocessor.
    for name, registers in found:
        assert int(registers) <= 64, name


@pytest.mark.slow
@needs_nvcc
def test_the_compiler_warns_of_nothing(full: Build) -> None:
    """A call of a function for the host in a kernel, for one, is a warning, and undefined."""
    assert not re.findall(r".*\bwarning\b.*", full.output)


@pytest.mark.slow
@needs_nvcc
def test_each_width_has_its_own_instructions_and_four_loads_are_under_way(
    sass: dict[tuple[str, str, bool], list[str]],
) -> None:
    assert {kernel[0] for kernel in sass} == {"sm_75", "sm_80", "sm_90", "sm_100"}
    suffixes = {"5uint4": ".128", "5uint2": ".64", "j": "", "h": ".U8"}
    assert len(sass) == 4 * 2 * len(suffixes)
    for (architecture, vector, _), instructions in sass.items():
        suffix = suffixes[vector]
        moves = [
            word.removesuffix(".SYS")  # as sm_75 names what is the default later
            for line in instructions
            for word in line.split()
            # A call that returns needs a RET; a CALL without one is a jump.
            if re.match(r"(LDG|STG|LDL|STL|LDS|STS|RET)\b", word)
        ]
        loads = [move for move in moves if move.startswith("LDG")]
        stores = [move for move in moves if move.startswith("STG")]
        where = (architecture, vector)
        # Slots are arguments of the launch, in constant memory: no load of theirs is to be seen.
        assert [len(loads), len(stores)] == [4, 4], where
        assert len(moves) == 8, where
        assert all(load == f"LDG.E.EF{suffix}" for load in loads), (where, loads)
        assert all(store == f"STG.E{suffix}" for store in stores), (where, stores)
        # All four are issued before the first is waited for by its store.
        kinds = "".join(
            "L" if re.search(r"\bLDG\.E\.EF", line) else "S"
            for line in instructions
            if re.search(r"\b(LDG\.E\.EF|STG)\b", line)
        )
        assert kinds == "LLLLSSSS", (where, kinds)


@pytest.mark.slow
@needs_nvcc
def test_the_library_loads_and_copies_without_cuda(full: Build) -> None:
    if readelf := shutil.which("readelf"):
        needed = re.findall(r"NEEDED.*\[(.*)\]", run(readelf, "-d", full.library))
        assert not [name for name in needed if "cuda" in name or "nvidia" in name]
    library = library_module._load_library(full.library)
    assert library.device is not None
    assert library.device.architectures() == "75-real 80-real 90-real 100"
    paged = make_paged("bhnc-nhd", torch.bfloat16)
    slots = torch.tensor([1, -1, 7])
    out = torch.empty(2 * paged.layout.chunk_bytes(3), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_module, "compiled_library", lambda: library)
        ops.gather_kv(paged.caches, slots, out, paged.layout)
    assert torch.equal(out, paged.gathered(slots.view(1, -1), 0, 2).view(-1))


@pytest.mark.slow
@needs_nvcc
def test_architectures_can_be_chosen(tmp_path: Path) -> None:
    made = build(tmp_path, "-DCMAKE_CUDA_ARCHITECTURES=86-real")
    library = library_module._load_library(made.library)
    assert library.device is not None
    assert library.device.architectures() == "86-real"


def wheel(folder: Path, *settings: str, **environment: str) -> tuple[str, Path]:
    """Build a wheel with both libraries; return what was printed, and the one that copies."""
    output = run(
        *(sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"),
        *("--no-index", "--wheel-dir", folder, ROOT),
        *(f"--config-settings=cmake.define.{setting}" for setting in settings),
        **environment,
    )
    (made,) = folder.glob("kvshelf-*.whl")
    with zipfile.ZipFile(made) as content:
        names = [name for name in content.namelist() if name.endswith(".so")]
        content.extractall(folder, names)
    assert sorted(names) == ["kvshelf/libkvshelf_ops.so", "kvshelf/libkvshelf_read.so"]
    return output, folder / "kvshelf/libkvshelf_ops.so"


@pytest.mark.slow
@needs_nvcc
def test_a_wheel_with_kernels(tmp_path: Path) -> None:
    _, path = wheel(tmp_path, "KVSHELF_CUDA=ON", "CMAKE_CUDA_ARCHITECTURES=90")
    assert library_module._load_library(path).device is not None


@pytest.mark.slow
def test_a_wheel_for_cpus_only(tmp_path: Path) -> None:
    output, path = wheel(tmp_path, "KVSHELF_CUDA=OFF")
    assert library_module._load_library(path).device is None
    assert "CUDA compiler" not in output


@pytest.mark.slow
def test_a_cuda_compiler_that_does_not_work_is_named_once(tmp_path: Path) -> None:
    output, path = wheel(tmp_path, CUDACXX="/nonexistent/nvcc")
    assert library_module._load_library(path).device is None
    assert output.count("no working CUDA compiler was found") == 1
    with pytest.raises(RuntimeError, match="KVSHELF_CUDA is ON, but no working CUDA compiler"):
        wheel(tmp_path / "second", "KVSHELF_CUDA=ON", CUDACXX="/nonexistent/nvcc")
