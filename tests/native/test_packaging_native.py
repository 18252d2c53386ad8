"""What is built where there is no compiler, and what travels in the source archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvshelf.kv.ops.library import compiled_library

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("scikit_build_core")

pytestmark = pytest.mark.real


def test_without_a_compiler_the_wheel_is_pure_python_and_says_so_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"),
            *("--no-index", "--wheel-dir", tmp_path, ROOT),
        ],
        env=os.environ | {"CXX": "/nonexistent/c++"},
        cwd=tmp_path,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("no working C++ compiler was found") == 1
    (wheel,) = tmp_path.glob("kvshelf-*.whl")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert names.count("kvshelf/kv/ops/dispatch.py") == 1
    assert names.count("kvshelf/kv/ops/kernel.cu") == 1
    backends = [name for name in names if "backends/" in name]
    assert sorted(backends) == [f"kvshelf/{name}" for name in files_of_backends()]


def files_of_backends() -> list[str]:
    return sorted(f"backends/{path.name}" for path in (ROOT / "backends").glob("*.py"))


def test_editors_find_backends_in_the_package() -> None:
    assert (ROOT / "src" / "kvshelf" / "backends").readlink() == Path("../../backends")


@pytest.mark.slow
def test_source_archive_holds_what_a_build_needs(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})",
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (archive,) = tmp_path.glob("kvshelf-*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
        backends = [member for member in content.getmembers() if "backends/" in member.name]
    assert all(member.isfile() for member in backends)
    held = sorted(member.name.partition("/")[2] for member in backends)
    assert held == [
        *(f"src/kvshelf/{name}" for name in files_of_backends()),
        *(name for name in held if name.startswith("tests/backends/")),
    ]
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "src/kvshelf/kv/ops/dispatch.py",
        "src/kvshelf/kv/ops/kernel.cu",
        "cuda/CMakeLists.txt",
        "cuda/cmake/check_headers.cc",
        "cuda/cmake/exports.map",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "cuda/include").rglob("*.h")),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "cuda/src").iterdir()),
    } <= names
    outside = {name for name in names if name.startswith((".ci", ".git/", "build", ".venv"))}
    assert not outside


def test_library_exports_nothing_but_its_functions() -> None:
    # A C++ runtime that is linked in must not replace, or be replaced by, that of others.
    library = compiled_library()
    if library is None:
        pytest.skip("no C++ compiler built the library")
    if shutil.which("nm") is None:
        pytest.skip("no nm in PATH")
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library.path],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout
    names = {line.split()[2] for line in listed.splitlines()}
    assert "__tvm_ffi_gather" in names
    assert not {name for name in names if not name.startswith("__tvm_ffi_")}


@pytest.mark.slow
def test_wheel_holds_the_libraries_and_the_kernels_source(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
            *("--no-index", "--wheel-dir", tmp_path, ROOT),
        ],
        # Nothing of CUDA is looked for.
        env=os.environ | {"CUDACXX": "/nonexistent/nvcc"},
        check=True,
    )
    (wheel,) = tmp_path.glob("kvshelf-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        source = content.read("kvshelf/kv/ops/kernel.cu")
    assert sorted(name for name in names if name.endswith(".so")) == [
        "kvshelf/libkvshelf_ops.so",
        "kvshelf/libkvshelf_read.so",
    ]
    assert source == (ROOT / "src/kvshelf/kv/ops/kernel.cu").read_bytes()


def test_make_gpu_needs_torch_numpy_and_pytest_alone() -> None:
    program = """
import sys
from importlib.abc import MetaPathFinder
class Bare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in MISSING:
            raise ModuleNotFoundError(name)
MISSING = {'pydantic', 'fsspec', 'tvm_ffi', 'safetensors', 'yaml', 'rich'}
MISSING |= {'typer', 'watchdog', 'hypothesis', 'obstore', 'msgspec', 'zmq', 'transformers'}
sys.meta_path.insert(0, Bare())
sys.modules['xxhash'] = type(sys)('xxhash')
import benchmarks.gpu, tests.gpu.test_gpu, kvshelf.kv.ops, kvshelf.memory.chunk_memory
"""
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, check=True
    )
