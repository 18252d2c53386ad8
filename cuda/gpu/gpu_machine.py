"""What decides on this machine how fast copies can be, beside what its name says."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from typing import Final

import torch
from gpu_box import run
from gpu_groups import Context, NotRun

#: Numbers of cudaDeviceAttr.
_ATTRIBUTES: Final = {
    "copies use host pointers of registered memory": 91,
    "registers memory": 99,
    "registers read-only memory": 113,
    "copy engines": 40,
}
_ASKED: Final = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm"


def machine(ctx: Context) -> None:
    """Attributes of the device, the link under load, and how fast a waiting thread wakes up."""
    ctx.needs_gpu("an emulated device is no machine")
    wake_up(ctx)
    link_under_load(ctx)
    attributes(ctx)


def attributes(ctx: Context) -> None:
    """What the driver says of memory that is registered."""
    try:
        ask = ctypes.CDLL("libcudart.so.13").cudaDeviceGetAttribute
    except (OSError, AttributeError) as error:
        raise NotRun(f"no runtime of CUDA 13: {error}") from None
    found: dict[str, int] = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int(-1)
        code = ask(ctypes.byref(value), number, ctx.device.index)
        found[name] = -1 if code else value.value
    ctx.fact("attributes", found, f"attributes: {found}")


def link_under_load(ctx: Context) -> None:
    """Generation and lanes of PCIe while it is used: idle links are slowed down."""
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=ctx.device)
    ends, used = threading.Event(), threading.Event()

    def load() -> None:
        with torch.cuda.stream(torch.cuda.Stream(ctx.device)):
            while not ends.is_set():
                device.copy_(host, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                used.set()

    thread = threading.Thread(target=load)
    thread.start()
    used.wait(10)
    code, told = run(["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"], 20)
    ends.set()
    thread.join()
    told = told.strip() if code == 0 else "nvidia-smi does not say"
    ctx.fact(
        "PCIe under load: generation, most, lanes, clock",
        told,
        f"PCIe and clock under load: {told}",
    )


def wake_up(ctx: Context) -> None:
    """How much later than a thread that spins one is awake that sleeps until an event."""
    found = {}
    for blocking in (True, False):
        times = []
        for _ in range(60):
            event = torch.cuda.Event(blocking=blocking)
            torch.cuda._sleep(2_000_000)
            event.record()
            began = time.perf_counter()
            event.synchronize()
            times.append(time.perf_counter() - began)
        # The first ones are those of a device that was idle.
        found[blocking] = statistics.median(times[10:])
    later = found[True] - found[False]
    ctx.fact("seconds to wake up", later, f"a thread wakes up {later * 1e6:.0f} µs after an event")
