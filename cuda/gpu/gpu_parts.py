"""The parts of a run on a GPU, and their groups. Imports neither torch nor kvshelf.

A part is one call of ``first_light.py`` of at most seven minutes. A group is one function of a
module beside this one; it succeeds or fails as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_box import BUILT, SHIPPED


@dataclass(frozen=True)
class Group:
    """One function that runs on the GPU, in a process that it may share with others.

    Attributes
    ----------
    name : str
        Its name in the report.
    where : str
        ``module.function``.
    seconds : int
        The process is ended if the group takes longer.
    small : bool
        Fewer and smaller cases.
    serves : str
        What has to carry out all gathers and scatters: the value of ``KVSHELF_OPS``.
    tool : str
        The program under which it runs; a machine may refuse it.
    optional : bool
        A machine may lack what it needs.
    library : str
        The library with the kernels: ``wheel``, of release wheels, or ``nvcc``.
    lags : bool
        The engine's stream is busy whenever it gathers or records a fence.
    """

    name: str
    where: str
    seconds: int = 60
    small: bool = False
    serves: str = "cuda"
    tool: str = ""
    optional: bool = False
    library: str = SHIPPED
    lags: bool = False


def _checks(*names: str, **options: int | bool | str) -> tuple[Group, ...]:
    return tuple(
        Group(name, f"gpu_checks.{name}", lags=True, **options)  # type: ignore[arg-type]
        for name in names
    )


PARTS: Final[dict[str, tuple[Group, ...]]] = {
    # What has to be right.
    "correctness": (
        Group("machine", "gpu_machine.machine", optional=True),
        *_checks("kernel_attributes", seconds=40),
        *_checks("forms_dtypes_widths", seconds=120),
        *_checks("chunks_shards_heads", "sizes_of_models", "deep_models"),
        *_checks("bad_slots_are_refused", "graphs", "streams_and_threads"),
        *_checks("states", "overwritten_blocks", "loads_behind_the_engine"),
        *_checks("the_way_to_staging", "tails", "captures_beside_copies", "rates_are_learned"),
        *_checks("blocks_that_hold_all_layers", "registered_memory"),
        *_checks("made_in_inference_mode", "layouts_learned_from_torch"),
        *_checks("layouts_learned_from_triton", seconds=120, optional=True),
        *_checks("far_offsets", optional=True),
        Group("nvcc", "gpu_checks.nvcc", small=True, library=BUILT, lags=True),
        Group(
            "fallback_triton",
            "gpu_checks.fallback",
            120,
            small=True,
            serves="triton",
            optional=True,
        ),
        Group("fallback_torch", "gpu_checks.fallback", small=True, serves="torch"),
        Group("memcheck", "gpu_checks.under_memcheck", 150, small=True, tool="memcheck"),
    ),
    # What users gain, the most wanted first.
    "headline": (
        Group("store_and_load", "gpu_figures.store_and_load", 90),
        Group("one_head", "gpu_peers.one_head", 90),
        Group("from_files", "gpu_figures.from_files", 90),
        Group("steps", "gpu_design.steps", 120),
        Group("on_the_device", "gpu_figures.on_the_device", 90),
        Group("on_the_host", "gpu_figures.on_the_host"),
        Group("mla", "gpu_figures.mla", 90),
    ),
    # What decides between ways of moving KV.
    "design": (
        Group("copies_by_piece", "gpu_design.copies_by_piece", 90),
        Group("direct_loads", "gpu_design.direct_loads", 90),
        Group("loads_beside_products", "gpu_design.loads_beside_products", 60),
        Group("ways_of_loading", "gpu_design.ways_of_loading", 90),
        Group("fallback_cuda", "gpu_design.step_of_stores", 60),
        Group("fallback_triton", "gpu_design.step_of_stores", 90, serves="triton", optional=True),
        Group("registered_memory", "gpu_design.registered_memory", 60),
        Group("digests", "gpu_digests.digests", 60, library=BUILT),
        Group("ncu", "gpu_figures.under_ncu", 120, tool="ncu"),
    ),
}

#: Seconds that a part takes at most, with all that it prepares.
SECONDS: Final = {"correctness": 410, "headline": 350, "design": 290}
