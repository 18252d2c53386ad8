"""Make and refresh the virtual environment in which tests, demo and benchmarks run.

Run by the Makefile with any Python >= 3.11; needs nothing but the standard library. uv, which is
installed into the environment, installs the versions of ``tests/versions.txt``; pip does where uv
fails. pip's own settings (its files and ``PIP_*``) say where packages come from, and which
certificates and hosts are trusted; where no index there has a CPU build of torch, the index given
with ``--torch-index`` is asked as well.

The packages are installed again only when their lists change, and kvshelf itself, editable, when
what it is built from changes: ``cuda/``, ``pyproject.toml``, the version. Other runs need no
network and take a moment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tests/versions.txt"
EXTRAS = ("cpu", "server", "s3", "sftp", "test", "docs")
#: Only tests of engines that see images have it on their path, see tests/vllm/tiny_llava.py: its
#: wheels cannot be imported beside a CPU build of torch without a change.
TORCHVISION = "torchvision==0.28.0"
#: uv's variables for pip's settings.
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_INDEX_URL",
    "trusted-host": "UV_INSECURE_HOST",
}
SOURCES = ("pyproject.toml", "src/kvshelf/__init__.py", "cuda")


def digest_of(folder: Path, *names: str) -> str:
    """Return a digest of files and folders of the repository, of this Python and of `folder`."""
    found = hashlib.sha256(f"{sys.version} {folder}".encode())
    for path in sorted(path for name in names for path in (ROOT / name, *(ROOT / name).rglob("*"))):
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def run(title: str, *command: object, required: bool = True) -> bool:
    """Run a step; return whether it succeeded. One that fails and is `required` ends the run."""
    started = time.monotonic()
    print(f"  {title} ...", flush=True)
    code = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    print(f"    {'failed' if code else 'done'} ({time.monotonic() - started:.0f} s)", flush=True)
    if code and required:
        raise SystemExit(f"set-up failed at: {title}")
    return code == 0


def settings_for_uv(listed: str) -> dict[str, str]:
    """Return uv's variables for what ``pip config list`` prints."""
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does
    for key, value in re.findall(r"^\S+\.([a-z-]+)='(.*)'$", listed, re.MULTILINE):
        if key in UV_VARIABLES:
            # A variable comes before the files, and counts.
            settings.setdefault(UV_VARIABLES[key], " ".join(value.split("\\n")))
    return settings


def install(python: Path, torch_index: str) -> None:
    """Install all packages but kvshelf: by uv, or by pip where uv fails."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    alone: list[object] = ["--no-deps", "--target", python.parents[1] / "torchvision", TORCHVISION]
    installers: list[tuple[list[object], list[object], list[object]]] = []
    if run("uv", *pip, "install", "-q", "uv", required=False):
        listed = subprocess.check_output([*pip, "config", "list"], text=True)
        os.environ.update(settings_for_uv(listed) | os.environ)
        extras = [part for extra in EXTRAS for part in ("--extra", extra)]
        uv: list[object] = [python.with_name("uv"), "pip", "install", "-q", "--python", python]
        what = ["--constraints", LOCK, "--requirements", "pyproject.toml", "--group", "build"]
        # --no-config: the project's own leaves torchvision out.
        installers.append((uv, [*what, *extras], [*alone, "--no-config"]))
    installers.append(([*pip, "install", "-q"], ["--no-deps", "--requirement", LOCK], alone))
    torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    sources = [f"{torch}+cpu"], ["--extra-index-url", torch_index, f"{torch}+cpu"], [torch]
    for command, what, torchvision in installers:
        for source in sources:
            if run(f"packages, with {source[-1]}", *command, *what, *source, required=False):
                if not run(TORCHVISION, *command, *torchvision, required=False):
                    print("  Note: tests of engines that see images will be skipped")
                return
    raise SystemExit("set-up failed: see above; make ... TORCH_INDEX=URL names torch's index")


def install_kvshelf(python: Path) -> None:
    """Build kvshelf and install it, editable."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index")
    alone = ("--no-deps", "--no-build-isolation")
    run("kvshelf itself", *pip, *alone, "--editable", ROOT)


def main() -> None:
    """Parse the command line and prepare the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Preparing {folder} with Python {sys.version.split()[0]} (once)", flush=True)
        venv.create(folder, with_pip=True)
    for stamp, step, sources in (
        ("packages", lambda: install(python, options.torch_index), ("pyproject.toml", str(LOCK))),
        ("kvshelf", lambda: install_kvshelf(python), SOURCES),
    ):
        file, digest = folder / f"{stamp}.stamp", digest_of(folder, *sources)
        if not file.exists() or file.read_text() != digest:
            step()
            file.write_text(digest)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
