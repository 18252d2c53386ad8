"""Collect what a machine with a GPU, but without network, needs for ``make gpu``.

Into one folder (default: build/gpu-pack): a wheel of kvshelf with kernels for several generations
of GPUs, and wheels of the packages that it needs beside torch, for one version of Python. What is
already on that machine is not used in their place, except torch and what torch needs.

compute-sanitizer is taken along if it fits and a wheel brings the program itself, which some hold
only the libraries of: most machines with a CUDA toolkit have their own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Beside torch, numpy and typing-extensions, which torch brings.
PACKAGES = ("apache-tvm-ffi>=0.1.6,<0.2", "xxhash>=3.4", "safetensors>=0.5", "fsspec>=2024.6")
SANITIZERS = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu12")
#: What may travel at all, in bytes; the working tree counts as well.
MOST_BYTES = 64 << 20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pip(*arguments: object) -> None:
    """Run pip.

    Raises
    ------
    subprocess.CalledProcessError
        If it fails.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def download(folder: Path, python: str, package: str) -> None:
    """Download one wheel without its dependencies."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    pip(
        *("download", "--no-deps", "--only-binary=:all:", "--python-version", python),
        *("--implementation", "cp", *platforms, "--dest", folder, package),
    )


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


def add_sanitizer(folder: Path, python: str, package: str, room: int) -> str | None:
    """Add a wheel with compute-sanitizer to the folder; return why not, or None."""
    extra = folder / "extra"
    try:
        download(extra, python, package)
        (wheel,) = extra.glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            if not any(name.endswith("/compute-sanitizer") for name in content.namelist()):
                return "the program is not in the wheel"
        if wheel.stat().st_size > room:
            return f"{wheel.stat().st_size} bytes, room for {room}"
        wheel.rename(folder / wheel.name)
    except subprocess.CalledProcessError:
        return "no wheel found"
    finally:
        shutil.rmtree(extra, ignore_errors=True)
    return None


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--python", default="3.12", help="of the machine; default: 3.12")
    options = parser.parse_args()
    folder: Path = options.folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)

    print("kvshelf, with kernels")
    pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT),
        "--config-settings=cmake.define.KVSHELF_CUDA=ON",
    )
    for package in PACKAGES:
        print(package)
        download(folder, options.python, package)
    room = MOST_BYTES - tree_bytes() - size_of(folder)
    for package in SANITIZERS:
        problem = add_sanitizer(folder, options.python, package, room)
        print(package if problem is None else f"{package} left out: {problem}")
        if problem is None:
            break
    total = size_of(folder) + tree_bytes()
    print(f"{folder}: {size_of(folder) / 2**20:.1f} MiB, {total / 2**20:.1f} with the tree")
    if total > MOST_BYTES:
        print(f"more than {MOST_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
