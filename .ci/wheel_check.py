"""Build kvshelf's wheel and try it in an empty environment, without network.

Run by ``make test-all`` with the Python of ``.venv``. The empty environment is filled from
``.venv/wheelhouse``, which holds exactly the runtime dependencies that ``pyproject.toml``
declares: a dependency that is used but not declared fails here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = ("kvshelf/__init__.py", "kvshelf/backends/base.py", "kvshelf/py.typed")
#: A small shelf of a release, whose objects never change.
SHELF = ROOT / "tests/golden/v0.1.0/shelf"

# Gathers a chunk and scatters it elsewhere, compares each byte, and tells what did it.
TRY_OPS = """
import torch
from kvshelf import PagedLayout, ops
cache, other = torch.randn(2, 2, 8, 16, 4, 64).to(torch.bfloat16)
layout = PagedLayout.from_2bnhd(cache)
slots = torch.randperm(layout.num_slots)[:32]
out = torch.empty(layout.chunk_bytes(32), dtype=torch.uint8)
ops.gather_kv([cache], slots, out, layout)
ops.scatter_kv([other], slots, out, layout)
rows = [tensor[:, slots // 16, slots % 16] for tensor in (cache, other)]
assert torch.equal(out, rows[0].reshape(-1).view(torch.uint8))
assert torch.equal(*rows)
print(ops.implementation())
"""


@dataclass(frozen=True)
class Tried:
    """What an installed wheel told.

    Attributes
    ----------
    version : str
        What ``kvshelf --version`` prints.
    doctor : dict of str to str
        What ``kvshelf doctor SHELF`` found on a small shelf, by the name of the check; also its
        ``status``.
    ops : str
        What gathers and scatters on CPUs.
    """

    version: str
    doctor: dict[str, str]
    ops: str


def run(*command: object, cwd: Path = ROOT, alone: bool = False, **environment: str) -> str:
    """Run a command, return its output; on failure print it and leave.

    Parameters
    ----------
    *command : object
        The command.
    cwd : Path
        Where it runs.
    alone : bool
        Give it no variables but `environment`, as ``env -i`` does.
    **environment : str
        Changes of the environment's variables.

    Raises
    ------
    SystemExit
        If the command fails.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment if alone else os.environ | environment,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"wheel check failed ({done.returncode}): {' '.join(map(str, command))}")
    return done.stdout


def try_wheel(wheel: Path, folder: Path, *options: object) -> Tried:
    """Install a wheel into an empty environment that has no compiler, and use it there.

    Parameters
    ----------
    wheel : Path
        The wheel.
    folder : Path
        Where the environment is made.
    *options : object
        What pip is told about where packages come from, and further requirements.

    Raises
    ------
    SystemExit
        If it cannot be installed, does not work, has another version than its name says, or holds a
        native library that is not used.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = archive.namelist()
    for wanted in WANTED:
        if wanted not in content:
            raise SystemExit(f"wheel check failed: {wheel.name} holds no {wanted}")
    native = [entry for entry in content if entry.endswith((".so", ".dylib"))]

    venv.create(folder / "empty", with_pip=True)
    programs = folder / "empty" / "bin"
    python = programs / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    # Nothing else is in PATH: no compiler, and nothing of the environment that runs this.
    path = {"PATH": str(programs)}
    run(*pip, "install", "--no-compile", *options, wheel, cwd=folder, **path)

    def installed(*command: object) -> str:
        return run(*command, cwd=folder, alone=True, HOME=str(folder), **path)

    shelf = shutil.copytree(SHELF, folder / "shelf")
    doctor = json.loads(installed(programs / "kvshelf", "doctor", "--json", shelf))
    tried = Tried(
        installed(programs / "kvshelf", "--version").strip(),
        {check["name"]: check["found"] for check in doctor["checks"]}
        | {"status": doctor["status"]},
        installed(python, "-c", TRY_OPS).strip(),
    )
    if tried.version != f"kvshelf {wheel.name.split('-')[1]}":
        raise SystemExit(f"wheel check failed: {wheel.name} says that it is {tried.version}")
    if native and tried.ops != "cpp":
        raise SystemExit(f"wheel check failed: {native} is there, but ops uses {tried.ops}")
    run(*pip, "check", cwd=folder, **path)
    return tried


def main() -> None:
    """Build, install, try."""
    started = time.monotonic()
    wheelhouse = (ROOT / sys.argv[1] / "wheelhouse").resolve()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="kvshelf-wheel-") as name:
        folder = Path(name)
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, ROOT)
        (wheel,) = folder.glob("kvshelf-*.whl")
        tried = try_wheel(wheel, folder, "--no-index", "--find-links", wheelhouse)
    print(
        f"wheel: {wheel.name}, {tried.version}, ops {tried.ops}, "
        f"doctor {tried.doctor['status']} ({time.monotonic() - started:.0f} s)"
    )


if __name__ == "__main__":
    for variable in ("PYTHONPATH", "KVSHELF_OPS"):
        os.environ.pop(variable, None)
    main()
