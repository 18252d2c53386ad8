"""Run a command as if on a lesser processor: ``run.py avx2 python -m pytest tests/vllm``.

``avx2`` is a processor without AVX-512, ``avx512`` one without bfloat16 instructions and AMX. What
torch, oneDNN and MKL offer for it is set in the environment, and ``sitecustomize.py`` beside this
file holds back what vLLM asks torch. Instructions are held back by consent: a library that asks the
processor itself still finds them. kvshelf's own library is one, so its tests are not run this way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}


def main() -> None:
    """Replace this process by the command."""
    like, *command = sys.argv[1:]
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    held_back = {"CPU_LIKE": like, "PYTHONPATH": os.pathsep.join(paths), **ENVIRONMENT[like]}
    os.execvpe(command[0], command, os.environ | held_back)


if __name__ == "__main__":
    main()
