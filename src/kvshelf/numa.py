"""Memory near a device, on machines with several memory nodes.

Linux takes a page from the node of the processor that touches it first. A GPU reads and writes
page-locked memory of its own node fastest; across the connection of two sockets it loses a fifth of
its bandwidth or more. So such memory is touched first by a thread that runs on the processors near
the GPU: containers may do that, other than set a memory policy. Reads ``/sys``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def processors_near(pci_address: str) -> set[int]:
    """Return the processors of this process on the node of a PCI device.

    Parameters
    ----------
    pci_address : str
        Domain, bus, device and function: ``0000:1b:00.0``.

    Returns
    -------
    set of int
        Empty where all processors are equally near, or it is not known which are.
    """
    try:
        text = (_PCI_DEVICES / pci_address.lower() / "local_cpulist").read_text()
        allowed = os.sched_getaffinity(0)
        near = set[int]()
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            near.update(range(int(first), int(last or first) + 1))
    except (AttributeError, OSError, ValueError):
        return set()
    near &= allowed
    return set() if near == allowed else near


def run_on(processors: set[int], work: Callable[[], Result]) -> Result:
    """Call `work` on a thread that runs on some processors, and wait for it.

    Parameters
    ----------
    processors : set of int
        Empty: anywhere. The thread runs anywhere as well where the system does not allow these.
    work : Callable

    Raises
    ------
    BaseException
        What `work` raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            try:
                os.sched_setaffinity(0, processors)
            except OSError:
                pass
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    if not processors:
        return work()
    thread = threading.Thread(target=call, name="kvshelf-numa")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
