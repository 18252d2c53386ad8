"""Python as on a machine that has torch and a few packages, but neither vLLM nor pydantic.

``sitecustomize`` of a folder that is first in ``PYTHONPATH`` hides all other packages.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Whatever these need is there as well.
PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "xxhash",
    "safetensors",
    "fsspec",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
)

_HIDES = """
import sys


class Hidden:
    names = {names!r}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in cls.names:
            raise ModuleNotFoundError(f"a bare machine has no module {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden)
"""


def there(packages: tuple[str, ...]) -> set[str]:
    """The names of packages, and of all that they need."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in found or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hide_packages(folder: Path, carried: tuple[str, ...]) -> Path:
    """Fill a folder for ``PYTHONPATH``; `carried` are packages that are brought along."""
    # kvshelf's own modules are found, those that it needs only where they are carried.
    kept = there(PACKAGES + carried) | {"kvshelf"}
    hidden = {
        module
        for module, of in importlib.metadata.packages_distributions().items()
        if not any(canonicalize_name(name) in kept for name in of)
    }
    assert {"pydantic", "vllm", "aiohttp"} & hidden
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HIDES.format(names=hidden))
    return folder
