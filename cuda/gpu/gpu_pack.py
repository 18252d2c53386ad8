"""Collects what a machine with a GPU, but without network, needs for ``first_light.py``.

Into one folder (default: build/gpu-pack): the library with kernels for several generations of
GPUs, and wheels of the packages that kvshelf needs beside torch, for one version of Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_box import BUILT_FROM, LIBRARY, ROOT, build_library, library_sources

#: Beside torch, numpy and typing-extensions, which torch brings.
PACKAGES = ("apache-tvm-ffi>=0.1.6,<0.2", "xxhash>=3.4", "safetensors>=0.5", "fsspec>=2024.6")
#: What may travel at all, in bytes; the working tree counts as well.
MOST_BYTES = 64 << 20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


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
    return sum(path.stat().st_size for path in folder.iterdir())


def tree_bytes() -> int:
    """Return the bytes of the working tree: what git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--python", default="3.12", help="of the machine; default: 3.12")
    options = parser.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print("the library, with kernels")
    built = ROOT / "build" / "gpu-library"
    problem = build_library(sys.executable, built, "", 900, dict(os.environ))
    if problem:
        print(problem, file=sys.stderr)
        return 1
    shutil.copy(built / LIBRARY, folder / LIBRARY)
    (folder / BUILT_FROM).write_text(library_sources())
    for package in PACKAGES:
        print(package)
        download(folder, options.python, package)
    total = size_of(folder) + tree_bytes()
    print(f"{folder}: {size_of(folder) / 2**20:.1f} MiB, {total / 2**20:.1f} with the tree")
    if total > MOST_BYTES:
        print(f"more than {MOST_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
