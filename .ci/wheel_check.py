"""Build kvshelf's wheel and try it in an empty environment, without network.

Run by ``make test`` with the Python of ``.venv``. The empty environment is filled from
``.venv/wheelhouse``, which holds exactly the runtime dependencies that ``pyproject.toml``
declares: a dependency that is used but not declared fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TRY_OPS = """
import torch
from kvshelf import PagedLayout, ops
print(ops.implementation())
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command, return its output; on failure print it and leave.

    Raises
    ------
    SystemExit
        If the command fails.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"wheel check failed ({done.returncode}): {' '.join(map(str, command))}")
    return done.stdout


def main() -> None:
    """Build, install, try."""
    started = time.monotonic()
    wheelhouse = (ROOT / sys.argv[1] / "wheelhouse").resolve()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="kvshelf-wheel-") as name:
        folder = Path(name)
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, ROOT)
        (wheel,) = folder.glob("kvshelf-*.whl")
        content = zipfile.ZipFile(wheel).namelist()
        for wanted in ("kvshelf/__init__.py", "kvshelf/backends/base.py", "kvshelf/py.typed"):
            if wanted not in content:
                raise SystemExit(f"wheel check failed: {wheel.name} holds no {wanted}")
        native = [entry for entry in content if entry.endswith((".so", ".dylib"))]

        venv.create(folder / "empty", with_pip=True)
        python = folder / "empty" / "bin" / "python"
        run(
            python,
            *pip[1:],
            "install",
            "--no-index",
            "--no-compile",
            "--find-links",
            wheelhouse,
            wheel,
            cwd=folder,
        )
        command = folder / "empty" / "bin" / "kvshelf"
        version = run(command, "--version", cwd=folder).strip()
        doctor = json.loads(run(command, "doctor", "--json", cwd=folder))
        ops = run(python, "-c", TRY_OPS, cwd=folder).strip()
        if native and ops != "cpp":
            raise SystemExit(f"wheel check failed: {native} is there, but ops uses {ops}")
        run(python, "-m", "pip", "check", cwd=folder)
    print(
        f"wheel: {wheel.name} ({len(content)} files), {version}, ops {ops}, "
        f"doctor {doctor['status']} ({time.monotonic() - started:.0f} s)"
    )


if __name__ == "__main__":
    for variable in ("PYTHONPATH", "KVSHELF_OPS"):
        os.environ.pop(variable, None)
    main()
