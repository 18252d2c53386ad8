"""Makes kvshelf usable on a machine with a GPU, from a copy of this repository, without network.

Owns the folders ``site-…`` from which the groups import kvshelf: the Python files of the working
tree, the packages that ``gpu_pack.py`` collected, and a library with the kernels: that of release
wheels, or that of nvcc, which is built anew if it was built from other sources or does not load.
Imports neither torch nor kvshelf.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
LIBRARY: Final = "libkvshelf_ops.so"
#: The library of release wheels, which users have, and what nvcc makes of the sources.
SHIPPED: Final = "wheel"
BUILT: Final = "nvcc"
#: Beside a packed library: the digest of the sources that it was built from.
BUILT_FROM: Final = "library.txt"
#: A module of vLLM in the pack, which groups find beside kvshelf.
PEER: Final = "vllm_swap_blocks.py"
LEAST_TORCH: Final = (2, 11)
#: The first import of torch on a machine that reads its disk for the first time.
COLD_SECONDS: Final = 180

_PROBE: Final = """
import json, sys
found = {"python": sys.version.split()[0]}
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        bus = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        found |= {"gpu": p.name, "capability": [p.major, p.minor], "memory": p.total_memory,
                  "processors": p.multi_processor_count, "bus": bus}
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

_SERVED: Final = """
import json, torch
from gpu_groups import served_by
from kvshelf.kv import ops
served, problem = served_by(torch.device("cuda", 0))
build = None if problem else ops.kernel_build()
built = None if build is None else [build.toolkit, build.architectures]
print(json.dumps({"served": served, "problem": problem, "build": built}))
"""


def _files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        paths = folder.rglob("*") if folder.is_dir() else [folder]
        yield from sorted(
            path for path in paths if path.is_file() and path.suffix not in (".pyc", ".so")
        )


def digest(*folders: Path) -> str:
    """Return a digest of the names and bytes of all files in folders of the repository."""
    found = hashlib.sha256()
    for path in _files(*folders):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def library_sources() -> str:
    """Return the digest of what the library is built from."""
    cuda = ROOT / "cuda"
    return digest(cuda / "CMakeLists.txt", cuda / "cmake", cuda / "include", cuda / "src")


def all_sources() -> str:
    """Return the digest of all that is tested and of all that tests it."""
    return digest(ROOT / "src", ROOT / "backends", ROOT / "cuda")


def run(
    command: Sequence[object], seconds: float, env: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command for at most `seconds`; return its exit status and all it printed."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=env,
            timeout=max(1.0, seconds),
            check=False,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return None, f"{text}\nnot finished after {seconds:.0f} s"
    except OSError as error:
        return None, str(error)
    return done.returncode, done.stdout


def last_lines(text: str, lines: int = 3) -> str:
    """Return the end of an output, on one line."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(kept[-lines:])[-600:]


def _json(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"error": last_lines(text)}


class Box:
    """One machine.

    Parameters
    ----------
    python : str
        A Python with torch for the GPU.
    work : Path
        Folder for the site and for builds.
    pack : Path
        Filled by ``gpu_pack.py``; may be absent.
    """

    def __init__(self, python: str, work: Path, pack: Path) -> None:
        self.python = python
        self.work = work
        self.pack = pack

    def site(self, library: str) -> Path:
        """Return the folder from which groups import kvshelf with one of its libraries."""
        return self.work / f"site-{library}"

    def environment(self, library: str) -> dict[str, str]:
        """Environment of the groups: kvshelf and its packages first, no settings of the user."""
        kept = {name: value for name, value in os.environ.items() if "KVSHELF" not in name}
        paths = [str(self.site(library)), str(HERE), kept.get("PYTHONPATH", "")]
        return kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "KVSHELF_OPS": "cuda",
        }

    def machine(self) -> dict[str, Any]:
        """Return what this machine is."""
        found = _json(run([self.python, "-c", _PROBE], COLD_SECONDS)[1])
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        code, told = run(asked, 20)
        found["driver"] = told.strip() if code == 0 else None
        node = Path("/sys/bus/pci/devices", str(found.pop("bus", "")), "numa_node")
        found["numa_node"] = int(node.read_text()) if node.is_file() else None
        huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        found["huge_pages"] = huge.read_text().strip() if huge.is_file() else None
        return found | {"cpus": os.cpu_count()}

    def prepare(self, library: str, machine: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Make kvshelf importable with a library; return how, with ``served`` or ``problem``."""
        ends = time.monotonic() + seconds
        site, pack = self.site(library), self.pack / library
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir(parents=True)
        found: dict[str, Any] = {"wheels": self._unpack(site, str(machine["python"]))}
        package = site / "kvshelf"
        shutil.copytree(ROOT / "src" / "kvshelf", package, dirs_exist_ok=True)
        shutil.copytree(ROOT / "backends", package / "backends", dirs_exist_ok=True)
        if (self.pack / PEER).is_file():
            shutil.copy(self.pack / PEER, site / PEER)
        target, built_before = package / LIBRARY, self.work / library_sources() / LIBRARY
        packed, origin = pack / LIBRARY, pack / BUILT_FROM
        target.unlink(missing_ok=True)
        if library == BUILT and built_before.is_file():
            shutil.copy(built_before, target)
            found["library"] = "built here before"
        elif packed.is_file() and origin.is_file():
            if origin.read_text().strip() == library_sources():
                shutil.copy(packed, target)
                found["library"] = "packed"
            else:
                found["library"] = "none: the packed one is of other sources"
        else:
            found["library"] = "none packed"
        if target.is_file():
            found |= self._served(library, ends)
            if found["served"] == "cuda":
                return found
        if library != BUILT:
            # What makes it needs a network.
            return {"served": "nothing", "problem": found["library"]} | found
        if "problem" in found:
            found["rebuilt_because"] = found["problem"]
        problem = self._build(target, machine, ends)
        if problem:
            return found | {"served": "nothing", "problem": problem}
        return found | {"library": "built here"} | self._served(library, ends)

    def _served(self, library: str, ends: float) -> dict[str, Any]:
        env = self.environment(library)
        code, told = run([self.python, "-c", _SERVED], ends - time.monotonic(), env)
        if code != 0:
            return {"served": "nothing", "problem": f"kvshelf cannot be used: {last_lines(told)}"}
        return _json(told)

    def _unpack(self, site: Path, python: str) -> list[str]:
        """Unpack the wheels that fit this Python; return their names."""
        names = []
        tag = "cp" + "".join(python.split(".")[:2])
        for wheel in sorted(self.pack.glob("*.whl")):
            interpreter, abi = wheel.stem.split("-")[-3:-1]
            if interpreter.startswith("cp") and tag not in interpreter and abi != "abi3":
                continue
            with zipfile.ZipFile(wheel) as content:
                content.extractall(site)
            names.append(wheel.name)
        return names

    def _build(self, library: Path, machine: dict[str, Any], ends: float) -> str:
        """Compile the library for this machine's GPU; return why that failed."""
        if "capability" not in machine:
            return "there is no GPU to build for"
        folder = self.work / library_sources()
        major, minor = machine["capability"]
        problem = build_library(
            self.python,
            folder,
            f"{major}{minor}-real",
            min(100.0, ends - time.monotonic()),
            self.environment(BUILT),
        )
        if not problem:
            shutil.copy(folder / LIBRARY, library)
        return problem


def cuda_compiler(env: Mapping[str, str], places: Path = Path("/usr/local")) -> str | None:
    """Return the CUDA compiler that the user names, or that is found, or the newest installed."""

    def version(compiler: Path) -> list[int]:
        return [int(number) for number in re.findall(r"[0-9]+", compiler.parts[-3])]

    installed = max(places.glob("cuda*/bin/nvcc"), key=version, default=None)
    return (
        env.get("CUDACXX")
        or shutil.which("nvcc", path=env.get("PATH"))
        or (str(installed) if installed else None)
    )


def build_library(
    python: str, folder: Path, architectures: str, seconds: float, env: dict[str, str]
) -> str:
    """Compile the library with kernels into a folder; return why that failed."""
    cmake = shutil.which("cmake", path=env.get("PATH"))
    if cmake is None:
        return "there is no cmake to build the library with"
    ends = time.monotonic() + seconds
    options = [f"-DPython_EXECUTABLE={python}", "-DKVSHELF_CUDA=ON", "-DKVSHELF_DESIGN=ON"]
    if architectures:
        options.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
    if shutil.which("ninja", path=env.get("PATH")):
        # CMake's default is make, which such machines may lack.
        options += ["-G", "Ninja"]
    compiler = cuda_compiler(env)
    if compiler:
        env = env | {"CUDACXX": compiler}
    for command in (
        (cmake, "-S", ROOT / "cuda", "-B", folder, *options),
        (cmake, "--build", folder, "--parallel"),
    ):
        code, told = run(command, ends - time.monotonic(), env)
        if code != 0:
            return f"the library cannot be built: {last_lines(told)}"
    return "" if (folder / LIBRARY).is_file() else "cmake built no library"
