"""What tests/native/test_triton.py runs in a process without vLLM.

``compare`` executes the Triton kernel by Triton's interpreter (``TRITON_INTERPRET=1``) and compares
it with the C++ twin; ``compile`` compiles it for GPUs that are not there. Each prints one line of
JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import choice, dispatch, triton_strided
from tests.native.paged import Buffers, Case, cases
from tests.support.paged import DTYPES, FORMS, make_paged

CPU = torch.device("cpu")


def by_triton() -> Any:
    """Tensors in host memory are served by Triton."""
    return mock.patch.multiple(
        dispatch,
        run_compiled=mock.Mock(return_value=False),
        triton_copy=mock.Mock(return_value=triton_strided.run_triton),
    )


def compare() -> dict[str, int]:
    """Compare gathers and scatters of random calls, and of sizes that need several programs."""
    assert choice.implementation() == "cpp"
    counts = {"gathers": 0, "scatters": 0, "calls refused": 0}

    def compare_case(case: Case, lead: int = 0, gap: int = 0, *, outside: bool = False) -> None:
        paged = case.paged
        original = [memory.clone() for memory in paged.memory]
        arguments = (paged.layout, case.first_head, case.heads)
        pair = [Buffers.of(case, lead, gap, shards_outside=outside) for _ in range(2)]
        expected, found = pair
        ops.gather_kv(paged.caches, case.mapping, expected.view, *arguments)
        with by_triton():
            ops.gather_kv(paged.caches, case.mapping, found.view, *arguments)
        assert torch.equal(found.memory, expected.memory)  # with the gaps around the buffers
        counts["gathers"] += 1

        incoming = case.random_buffers()
        for buffers in pair:
            buffers.view.copy_(incoming)
        ops.scatter_kv(paged.caches, case.mapping, expected.view, *arguments)
        after = [memory.clone() for memory in paged.memory]
        for memory, old in zip(paged.memory, original, strict=True):
            memory[...] = old
        with by_triton():
            ops.scatter_kv(paged.caches, case.mapping, found.view, *arguments)
        for memory, wanted in zip(paged.memory, after, strict=True):
            np.testing.assert_array_equal(memory, wanted)
        counts["scatters"] += 1

        if case.slots:
            before = found.memory.clone()
            for bad in (-2, paged.layout.num_slots):
                mapping = case.mapping
                mapping.view(-1)[-1] = bad
                for copy in (ops.gather_kv, ops.scatter_kv):
                    with by_triton(), pytest.raises(ValueError, match=f"is {bad}; expected"):
                        copy(paged.caches, mapping, found.view, *arguments)
            assert torch.equal(found.memory, before)
            for memory, wanted in zip(paged.memory, after, strict=True):
                np.testing.assert_array_equal(memory, wanted)
            counts["calls refused"] += 4

    @given(
        case=cases(),
        lead=st.integers(0, 9),
        gap=st.integers(0, 9),
        outside=st.booleans(),
    )
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def compare_random(case: Case, lead: int, gap: int, outside: bool) -> None:
        compare_case(case, lead, gap, outside=outside)

    compare_random()
    for form in FORMS:
        for dtype, head_size in zip(DTYPES, itertools.cycle((33, 48)), strict=False):
            paged = make_paged(form, dtype, blocks=12, heads=3, head_size=head_size)
            order = np.random.default_rng(7).permutation(paged.layout.num_slots)
            slots, whole = order[:20].tolist(), paged.layout.heads
            compare_case(Case(paged, slots, 2, 1, 0, 1), 8, 8)
            compare_case(Case(paged, slots, 1, whole, 0, 1))
            compare_case(Case(paged, slots, 1, 1, 0, whole))
    triton_strided.compile_kernels(CPU)
    empty = torch.empty(0, 4, 8)
    layout = PagedLayout.from_mla(empty)
    out = torch.full((2 * layout.row_bytes,), 9, dtype=torch.uint8)
    with by_triton():
        ops.scatter_kv([empty], torch.tensor([-1, -1]), out, layout)
        ops.gather_kv([empty], torch.tensor([-1, -1]), out, layout)
    assert not out.any()
    return counts


def compile_for_gpus() -> dict[str, int]:
    """Compile for GPUs; count the kernels that many different calls take."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = triton_strided._copy
    constants = {"tokens_at_once": 16, "lanes_at_once": 128}
    done = {}
    for backend, arch, warp, assembly, load in (
        ("cuda", 80, 32, "ptx", "ld.global.b64"),
        ("cuda", 90, 32, "ptx", "ld.global.b64"),
        ("hip", "gfx942", 64, "amdgcn", "global_load_dwordx2"),
    ):
        for gather in (True, False):
            source = ASTSource(
                fn=kernel,
                signature={"plan": "*i64"}
                | dict.fromkeys(("gather", "word", *constants), "constexpr"),
                constexprs={"gather": gather, "word": triton_strided._TYPES[8], **constants},
                attrs={(0,): [["tt.divisibility", 16]]},
            )
            text = triton.compile(source, target=GPUTarget(backend, arch, warp)).asm[assembly]
            done[f"{backend} {arch} {'gather' if gather else 'scatter'}"] = text.count(load)

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

    class Compiled:
        """Compiles what is launched, and launches nothing."""

        kinds: set[tuple[bool, str]] = set()  # noqa: RUF012

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(plan: torch.Tensor, **options: Any) -> None:
                self.kinds.add((options["gather"], str(options["word"])))
                kernel.warmup(plan, grid=grid, **options)

            return launch

    triton.runtime.driver.set_active(Driver())

    def launch(case: Case, lead: int = 0) -> None:
        paged, buffers = case.paged, Buffers.of(case, lead).view
        for copy in (ops.gather_kv, ops.scatter_kv):
            heads = case.first_head, case.heads
            copy(paged.caches, case.mapping, buffers, paged.layout, *heads)

    @given(case=cases(), lead=st.integers(0, 9))
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def launch_random(case: Case, lead: int) -> None:
        launch(case, lead)

    with by_triton(), mock.patch.object(triton_strided, "_copy", Compiled()):
        for width in (8, 4, 2, 1):
            paged = make_paged("2bnhd", torch.uint8, head_size=width)
            launch(Case(paged, [0, 5, -1], 1, 1, 0, 1))
        launch_random()
    ((kernels, *_),) = kernel.device_caches.values()
    done["kinds"], done["kernels"] = len(Compiled.kinds), len(kernels)
    return done


if __name__ == "__main__":
    result = {"compare": compare, "compile": compile_for_gpus}[sys.argv[1]]()
    # Triton beside vLLM can change what vLLM does, and vLLM what Triton does.
    assert "vllm" not in sys.modules
    sys.stdout.write(json.dumps(result) + "\n")
