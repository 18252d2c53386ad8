"""The wheel where nothing is but what it asks for: no torch, no numpy, no compiler, no vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: A small shelf of a release, whose objects never change.
SHELF = ROOT / "tests/golden/v0.1.0/shelf"

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel; return the folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("installed")
    build = ("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index")
    subprocess.run([sys.executable, *build, "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("kvshelf-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kvshelf/__init__.py", "kvshelf/backends/base.py", "kvshelf/py.typed"} <= set(names)
    venv.create(folder / "empty", with_pip=True)
    found = folder / "empty" / "bin"
    pip = (found / "python", "-m", "pip", "install", "-q", wheel)
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    if "Could not find a version" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    subprocess.run([found / "python", "-m", "pip", "check"], check=True)
    return found


def run(programs: Path, *command: object, code: int = 0) -> str:
    """Run a program with nothing else in PATH; return what it printed."""
    program, *arguments = map(str, command)
    done = subprocess.run(
        [programs / program, *arguments],
        env={"PATH": str(programs), "HOME": str(programs)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_commands_need_neither_torch_nor_numpy(programs: Path, tmp_path: Path) -> None:
    assert not [*programs.parent.rglob("torch"), *programs.parent.rglob("numpy")]
    shelf = shutil.copytree(SHELF, tmp_path / "shelf")
    assert run(programs, "kvshelf", "ls", shelf).count("tiny-") == 3
    assert "verified 12 of 12 objects" in run(programs, "kvshelf", "verify", shelf)
    assert "copied 12 objects" in run(programs, "kvshelf", "copy", shelf, tmp_path / "other")
    assert "pip install torch" in run(programs, "kvshelf", "doctor", shelf)
    assert "would delete" in run(programs, "kvshelf", "gc", shelf, "--max-bytes", "1KB")
    folders = [option for path in shelf.glob("tiny-*") for option in ("-n", path.name)]
    assert "pin all: all of" in run(programs, "kvshelf", "pin", shelf, "all", *folders[:2])
    assert "unpin all" in run(programs, "kvshelf", "pin", shelf, "all", "--remove")
    assert "deleted" in run(programs, "kvshelf", "rm", shelf, *folders, "--yes")
    assert not list(shelf.rglob("*.safetensors"))


def test_disk_tier_needs_neither_torch_nor_numpy(programs: Path, tmp_path: Path) -> None:
    code = "from kvshelf import DiskTier; DiskTier(sys.argv[1], 1 << 30).close(); print('opened')"
    assert "opened" in run(programs, "python", "-c", f"import sys; {code}", tmp_path / "tier")


def test_what_needs_torch_says_what_installs_it(programs: Path) -> None:
    told = run(programs, "python", "-c", "import kvshelf; kvshelf.ChunkCache", code=1)
    assert "ChunkCache needs torch, which is not installed: pip install torch" in told
    assert told.count("Traceback") == 1


def test_size_of_what_is_installed(programs: Path) -> None:
    files = [path for path in programs.parent.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files if "/pip" not in str(path))
    assert size < 80e6, f"{size / 1e6:.0f} MB; docs/quick-start.md says 59"
