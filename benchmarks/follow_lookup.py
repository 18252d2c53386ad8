"""Shows what one lookup passes through: ``python -m benchmarks.follow_lookup [CHUNKS]``.

Counts the modules of kvshelf, their functions and the calls of these, from
:meth:`~kvshelf.shelf.lookup.LookupService.submit` until the answer is there, on both threads.
Nested functions and comprehensions belong to the function around them. All chunks, 4 of 2 shards
by default, are in a local directory. A lookup goes before, so that nothing is done for the first
time.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.samples import TINY, make_chunks, make_format, make_hollow_objects, make_prompt
from kvshelf.backends import open_backend
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf


def follow(chunks: int) -> Counter[tuple[str, str]]:
    """Return how often each function, by module and name, is called in one lookup."""
    calls: Counter[tuple[str, str]] = Counter()
    follows = False

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and follows and not frame.f_code.co_name.startswith("<"):
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith("kvshelf"):
                function = frame.f_code.co_qualname.partition(".<locals>")[0]
                calls[module, function] += 1

    fmt = make_format(TINY, 2)
    prompt = make_prompt(chunks * fmt.chunk_size)
    with tempfile.TemporaryDirectory() as root:
        make_hollow_objects(Path(root), fmt, make_chunks(fmt, chunks))
        threading.setprofile(note)
        try:
            with Shelf(open_backend(root)) as shelf:
                service = LookupService(shelf.view(fmt), failed=FailedKeys(), counters=Counters())
                _look_up(service, fmt, prompt, note)
                follows = True
                _look_up(service, fmt, prompt, note)
                follows = False
                service.close()
        finally:
            threading.setprofile(None)
    return calls


def _look_up(
    service: LookupService,
    fmt: ObjectFormat,
    prompt: Sequence[int],
    note: Callable[[FrameType, str, object], None],
) -> None:
    sys.setprofile(note)
    lookup = service.submit(prompt, lambda: KeyChain(fmt.namespace.digest, fmt.chunk_size))
    sys.setprofile(None)
    if not lookup.wait(60.0) or not lookup.hit_chunks:
        raise RuntimeError("the lookup found nothing")


def main() -> None:
    """Print the calls of each function, by module, and the sums."""
    calls = follow(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
    for (module, function), count in sorted(calls.items()):
        sys.stdout.write(f"{count:5d}  {module}.{function}\n")
    modules = {module for module, _ in calls}
    sys.stdout.write(f"{len(modules)} modules, {len(calls)} functions, {calls.total()} calls\n")


if __name__ == "__main__":
    main()
