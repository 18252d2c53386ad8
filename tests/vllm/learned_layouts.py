"""Print the table of learned layouts in docs/layouts.md, as learned on this machine.

Run as ``python tests/vllm/learned_layouts.py`` from the repository, with vLLM installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.vllm.cpu_layers import FP8, cpu_layer, refusal
from tests.vllm.test_layout_discovery import choose, mla_layer, probe

ROUNDS = 9


def row(kernel: str, make: Callable[[], Any], shown: str, block_size: int, **options: Any) -> str:
    """Learn one layer and a second of its kind, some times over."""
    learned, confirmed = [], []
    for _ in range(ROUNDS):
        first, second = found = probe(make(), make(), block_size=block_size, **options)
        learned.append(first.seconds * 1e3)
        confirmed.append(second.seconds * 1e3)
    ids = {choose(found, option).ids[0] for option in ("auto", "canonical")}
    return (
        f"| {kernel} | {shown} | {block_size} | {first.learned.kind} | {first.learned.writes} |"
        f" {statistics.median(learned):.1f} | {statistics.median(confirmed):.1f} |"
        f" {', '.join(f'`{name}`' for name in sorted(ids, reverse=True))} |"
    )


def main() -> None:
    """Print the table, without the kernels that this processor does not have."""
    torch.set_num_threads(1)
    print("| kernel | dtype | block | learned as | writes | ms | next layer, ms | stored as |")
    print("|---|---|---:|---|---:|---:|---:|---|")
    for isa, head_size in (("vec", 64), ("vec", 128), ("vec16", 80), ("amx", 64), ("amx", 128)):
        for dtype in (torch.bfloat16, torch.float32):
            if refusal(isa, dtype, "auto", 128, head_size):
                continue
            print(
                row(
                    f"{isa}, 2 heads of {head_size}",
                    lambda isa=isa, size=head_size, dtype=dtype: cpu_layer(
                        isa, dtype=dtype, head_size=size
                    ),
                    str(dtype).removeprefix("torch."),
                    128,
                    dtype=dtype,
                )
            )
    for name in FP8:
        if refusal("vec", torch.bfloat16, name):
            continue
        print(
            row("vec, 2 heads of 64", lambda n=name: cpu_layer("vec", kv_cache_dtype=n), name, 128)
        )
    print(row("MLA, 512 + 64", lambda: mla_layer(512, 64), "bfloat16", 16))


if __name__ == "__main__":
    main()
