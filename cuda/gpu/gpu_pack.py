"""Makes the folder that is carried to a machine with a GPU, but without network.

``gpu_pack.py --into FOLDER`` (default: build/gpu-run) copies what is tested and what tests it, and
adds in FOLDER/build/gpu-pack two libraries with kernels for several generations of GPUs, that of
release wheels and that of nvcc; wheels of the packages that kvshelf needs beside torch, for one
version of Python; and the kernel with which the installed vLLM copies blocks, to be measured beside
ours. There, one command runs a part: ``python3 FOLDER/cuda/gpu/first_light.py --part PART``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from gpu_box import (
    BUILT,
    BUILT_FROM,
    LIBRARY,
    PEER,
    ROOT,
    SHIPPED,
    build_library,
    last_lines,
    library_sources,
    run,
)

#: Beside torch, numpy and typing-extensions, which torch brings.
PACKAGES: Final = (
    "apache-tvm-ffi>=0.1.6,<0.2",
    "xxhash>=3.4",
    "safetensors>=0.5",
    "fsspec>=2024.6",
)
#: What is copied of the repository: the rest is of no use there.
COPIED: Final = ("src", "backends", "cuda")
#: What may travel at all, in bytes; the working tree, which may travel as well, counts too.
MOST_BYTES: Final = 64 << 20
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(folder: Path, python: str, package: str) -> None:
    """Download one wheel without its dependencies.

    Raises
    ------
    subprocess.CalledProcessError
        If there is none.
    """
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [*platforms, "--dest", str(folder), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree(*folders: str) -> list[Path]:
    """Return the files of the working tree, or of some folders: what git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders],  # noqa: S607
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def library_of_wheels(target: Path) -> str:
    """Build the library that release wheels hold; return why that failed."""
    command = [sys.executable, ROOT / ".ci" / "wheels.py", "--library", target]
    code, told = run(command, 900)
    return "" if code == 0 else f"the library of wheels cannot be built: {last_lines(told)}"


def library_of_nvcc(target: Path) -> str:
    """Build the library with the CUDA compiler of this machine; return why that failed."""
    built = ROOT / "build" / "gpu-library"
    problem = build_library(sys.executable, built, "", 900, dict(os.environ))
    if not problem:
        shutil.copy(built / LIBRARY, target)
    return problem


def triton_copy_of_vllm() -> str:
    """Return the module with which vLLM 0.32 copies small blocks, for machines without vLLM.

    Raises
    ------
    FileNotFoundError
        If the installed vLLM has none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("vLLM is not installed; its copy of blocks is measured beside ours")
    place = Path(spec.submodule_search_locations[0], "v1/kv_offload/cpu/swap_blocks_triton.py")
    text = place.read_text()
    for old, new in (
        (
            "from vllm import _custom_ops as ops",
            "ops = None  # for few blocks, which are not copied",
        ),
        ("from vllm.triton_utils import tl, triton", "import triton\nimport triton.language as tl"),
    ):
        if old not in text:
            raise FileNotFoundError(f"{place} is of another release of vLLM: it lacks {old!r}")
        text = text.replace(old, new)
    return text


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-run", metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="of the machine; default: 3.12")
    options = parser.parse_args()
    into: Path = options.into
    shutil.rmtree(into, ignore_errors=True)
    pack = into / "build" / "gpu-pack"
    pack.mkdir(parents=True)
    for path in tree(*COPIED):
        target = into / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name, build in ((SHIPPED, library_of_wheels), (BUILT, library_of_nvcc)):
        print(f"the library, with kernels: {name}")
        (pack / name).mkdir()
        problem = build(pack / name / LIBRARY)
        if problem:
            print(problem, file=sys.stderr)
            return 1
        (pack / name / BUILT_FROM).write_text(library_sources())
    (pack / PEER).write_text(triton_copy_of_vllm())
    for package in PACKAGES:
        print(package)
        download(pack, options.python, package)
    total = size_of(into) + sum(path.stat().st_size for path in tree())
    print(f"{into}: {size_of(into) / 2**20:.1f} MiB, {total / 2**20:.1f} with the tree")
    if total > MOST_BYTES:
        print(f"more than {MOST_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
