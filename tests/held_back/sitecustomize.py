"""Make torch, and vLLM through torch, see a lesser processor than this machine has.

Python imports this module at its start in every process whose ``PYTHONPATH`` holds this folder,
the processes of engines included; ``run.py`` beside it sets that up. vLLM chooses its kernels by
``torch.cpu.get_capabilities``, which no environment variable holds back, so its answer is changed
as soon as ``torch.cpu`` is imported. ``CPU_LIKE`` names the processor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import Any

#: Beginnings of the names of capabilities that a processor of this kind does not have.
MISSING = {
    "avx2": ("avx512", "avx10", "avx_", "amx"),
    "avx512": ("avx512_bf16", "avx512_fp16", "avx10", "amx"),
}


class _HoldBack(importlib.abc.MetaPathFinder):
    """Finds ``torch.cpu`` as others do, and changes what it says once it is imported."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        self._missing = missing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            real = module.get_capabilities()
            held_back = MappingProxyType(
                {
                    name: False if name.startswith(self._missing) else value
                    for name, value in real.items()
                }
            )
            module.get_capabilities = lambda: held_back

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _like := os.environ.get("CPU_LIKE"):
    sys.meta_path.insert(0, _HoldBack(MISSING[_like]))
