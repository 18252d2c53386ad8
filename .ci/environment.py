"""Build and refresh the virtual environment in which tests, demo and benchmarks run.

Run by the Makefile with any Python >= 3.11; needs nothing but the standard library.

What it does, once:

1. downloads a CPU build of torch and kvshelf's runtime dependencies into
   ``.venv/wheelhouse`` (from which ``make test-all`` later fills an empty environment without
   network),
2. installs them, vLLM's CPU build and its dependencies, the test and documentation tools and
   what building kvshelf needs,
3. builds and installs kvshelf itself, editable.

Steps 1 and 2 are repeated only when the lists of dependencies change, step 3 only when the
build inputs (``cuda/``, the build sections of ``pyproject.toml``, the version) change; both are
recognised by content. A second run touches no network and takes a moment.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose wheels on PyPI are CUDA
builds that cannot be imported beside a CPU build of torch: they are left out. Only tests of engines
that see images need torchvision, so it lies in ``.venv/torchvision``, which these alone put on
their path, and registers nothing for its operators, whose library cannot be loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
#: The version that was made for that torch.
TORCHVISION = "torchvision==0.28.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


class StepFailedError(Exception):
    """A command of the set-up failed; the reason is on the screen."""


class Environment:
    """One virtual environment: its folder, its log, its stamps.

    Parameters
    ----------
    folder : Path
        Where the environment is or will be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.wheelhouse = folder / "wheelhouse"
        self.log = folder / "install.log"

    def fresh(self, name: str, digest: str) -> bool:
        """Tell whether the stamp `name` holds `digest`."""
        stamp = self.folder / f"{name}.stamp"
        return stamp.exists() and stamp.read_text() == digest

    def stamp(self, name: str, digest: str) -> None:
        """Note that the step `name` succeeded with inputs of this `digest`."""
        (self.folder / f"{name}.stamp").write_text(digest)

    def run(self, title: str, *command: str, required: bool = True) -> bool:
        """Run one command of the set-up, its output in the log, progress on the screen.

        Returns
        -------
        bool
            True when it succeeded.

        Raises
        ------
        StepFailedError
            If it failed and is `required`.
        """
        started = time.monotonic()
        print(f"  {title} ...", flush=True)
        with self.log.open("ab") as log:
            start = log.tell()
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(done, started, start), daemon=True)
        ticker.start()
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            done.set()
            ticker.join()
        outcome = "done" if code == 0 else "failed" if required else "not there"
        print(f"    {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
        if code and required:
            lines = self._lines_since(start)
            errors = [line for line in lines[:-15] if line.startswith("ERROR")]
            print("\n".join([*errors, *lines[-15:]]), file=sys.stderr)
            print(f"\nThe whole log: {self.log}", file=sys.stderr)
            raise StepFailedError(title)
        return code == 0

    def pip(self, title: str, *arguments: str, required: bool = True) -> bool:
        """Run pip in the environment."""
        return self.run(
            title,
            str(self.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
            required=required,
        )

    def ask(self, code: str, *arguments: str) -> str:
        """Return what a piece of Python prints in the environment."""
        return subprocess.run(
            [self.python, "-c", code, *arguments],
            cwd=ROOT,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout

    def _lines_since(self, start: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace").splitlines()

    def _tick(self, done: threading.Event, started: float, start: int) -> None:
        while not done.wait(15):
            now = ""
            for line in reversed(self._lines_since(start)):
                if match := re.match(r"(Collecting|Downloading|Installing|Building) ?(\S*)", line):
                    now = f", {match[0].lower().rsplit('/', 1)[-1]}"
                    break
            print(f"    {time.monotonic() - started:.0f} s{now}", flush=True)


def digest_of(*parts: object) -> str:
    """Return a digest of anything JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def build_inputs(project: dict[str, object]) -> str:
    """Return a digest of everything that decides the editable installation."""
    sources = sorted(path for path in (ROOT / "cuda").rglob("*") if path.is_file())
    sources.append(ROOT / "src/kvshelf/__init__.py")  # the version
    tool = project["tool"]
    assert isinstance(tool, dict)
    return digest_of(
        str(ROOT),
        project["build-system"],
        project["project"],
        tool["scikit-build"],
        [[str(p.relative_to(ROOT)), hashlib.sha256(p.read_bytes()).hexdigest()] for p in sources],
    )


def download_torch(env: Environment, runtime: list[str], index: str) -> str:
    """Fetch torch and the runtime dependencies; return torch's requirement as it was found."""
    fetch = ["download", "--dest", str(env.wheelhouse)]
    if platform.system() == "Linux":
        cpu = f"{TORCH}+cpu"
        if env.pip(
            "torch (CPU build) and kvshelf's dependencies, from your package index",
            *fetch,
            cpu,
            *runtime,
            required=False,
        ):
            return cpu
        if index and env.pip(
            f"the same, with {index}",
            *fetch,
            "--retries=1",
            "--extra-index-url",
            index,
            cpu,
            *runtime,
            required=False,
        ):
            return cpu
        print(
            f"  Note: {cpu} was found neither in your package index nor in {index or 'another'};\n"
            f"  taking {TORCH} as your index has it, which may be a CUDA build of several GB.\n"
            "  To choose another index: make ... TORCH_INDEX=https://host/simple",
            flush=True,
        )
    env.pip(f"{TORCH} and kvshelf's dependencies", *fetch, TORCH, *runtime)
    return TORCH


def install_torchvision(env: Environment) -> None:
    """Put torchvision into a folder of its own, or leave it out: the tests that need it say so."""
    folder = env.folder / "torchvision"
    wanted = digest_of(sys.version, TORCHVISION)
    if env.fresh("torchvision", wanted):
        return
    shutil.rmtree(folder, ignore_errors=True)
    options = ("--no-deps", "--target", str(folder))
    if env.pip(TORCHVISION, "install", *options, TORCHVISION, required=False):
        operators = folder / "torchvision" / "_meta_registrations.py"
        lines = operators.read_text().splitlines(keepends=True)
        registering = '@torch.library.register_fake("torchvision::'
        operators.write_text("".join(line for line in lines if not line.startswith(registering)))
    else:
        stamp = env.folder / "torchvision.stamp"
        print(f"  Note: tests of engines with images will be skipped; to try again, delete {stamp}")
    env.stamp("torchvision", wanted)


VLLM_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
left_out = set(sys.argv[2:])
for text in importlib.metadata.requires(sys.argv[1]):
    r = Requirement(text)
    if r.name not in left_out and (r.marker is None or r.marker.evaluate({"extra": ""})):
        r.marker = None
        print(r)
"""

BUILD_REQUIREMENTS = """
from scikit_build_core.build import get_requires_for_build_editable as e
from scikit_build_core.build import get_requires_for_build_wheel as w
print("\\n".join(sorted({*e({}), *w({})})))
"""


def prepare(env: Environment, index: str, extras: list[str]) -> None:
    """Bring the environment up to date, doing only what is needed.

    Parameters
    ----------
    env : Environment
    index : str
        Package index that has CPU builds of torch; asked when the user's own has none.
    extras : list of str
        Extras of kvshelf to install besides ``cpu``.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = project["project"]["dependencies"]
    optional = project["project"]["optional-dependencies"]
    vllm = optional["cpu"][0].split(";")[0]
    tools = [requirement for extra in extras for requirement in optional[extra]]
    build = project["build-system"]["requires"]

    wanted = digest_of(sys.version, str(env.folder), runtime, vllm, tools, build, TORCH)
    if not env.fresh("dependencies", wanted):
        print(f"Preparing {env.folder} with Python {platform.python_version()} (once, minutes)")
        if not env.python.exists() or not env.fresh("python", sys.version):
            venv.create(env.folder, clear=True, with_pip=True)
            env.stamp("python", sys.version)
        (env.folder / "dependencies.stamp").unlink(missing_ok=True)
        torch = download_torch(env, runtime, index)
        env.pip(f"{vllm} (vLLM's CPU build)", "install", "--no-deps", vllm)
        env.pip("what builds kvshelf", "install", *build)
        needed = [
            torch,
            *runtime,
            *tools,
            *env.ask(VLLM_REQUIREMENTS, vllm.split("==")[0], *LEFT_OUT).split("\n"),
            *build,
            *env.ask(BUILD_REQUIREMENTS).split("\n"),
        ]
        listed = env.folder / "requirements.txt"
        listed.write_text("\n".join(line for line in needed if line) + "\n")
        env.pip(
            "vLLM's dependencies, test and documentation tools",
            "install",
            "--find-links",
            str(env.wheelhouse),
            "--requirement",
            str(listed),
        )
        env.stamp("dependencies", wanted)
    install_torchvision(env)

    inputs = build_inputs(project)
    if not env.fresh("kvshelf", inputs):
        env.pip(
            "kvshelf itself",
            "install",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--editable",
            str(ROOT),
        )
        env.stamp("kvshelf", inputs)


def main() -> int:
    """Parse the command line and prepare the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-index", default="")
    parser.add_argument("--extra", action="append", default=[])
    options = parser.parse_args()
    try:
        prepare(Environment(options.folder.resolve()), options.torch_index, options.extra)
    except StepFailedError as failed:
        print(f"Set-up failed at: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
