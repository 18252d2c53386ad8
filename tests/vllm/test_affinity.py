"""Which processors threads beside an engine may use."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.real

# A rank as vLLM's CPU backend makes it, with a sibling, and a thread of ours in it.
_RANK = textwrap.dedent("""
    import os, sys, threading
    from kvshelf.vllm.affinity import widen_cpu_affinity

    os.sched_setaffinity(0, {int(sys.argv[1])})
    found = []

    def work():
        widen_cpu_affinity()
        found.extend(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(*found, "main", *os.sched_getaffinity(0))
""")

_ENGINE = textwrap.dedent("""
    import os, subprocess, sys

    rank, own, bound = sys.argv[1], sys.argv[2], sys.argv[3]
    sibling = None
    if bound:
        sibling = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(sibling.pid, {int(bound)})
    try:
        sys.exit(subprocess.run([sys.executable, "-c", rank, own]).returncode)
    finally:
        if sibling is not None:
            sibling.communicate("\\n")
""")


def _processors_of_a_thread(own: int, sibling: int | None) -> str:
    return subprocess.run(
        [sys.executable, "-c", _ENGINE, _RANK, str(own), "" if sibling is None else str(sibling)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()


@pytest.fixture
def two_cpus() -> list[int]:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor only")
    return sorted(os.sched_getaffinity(0))


def test_thread_may_run_beside_the_rank_that_started_it(two_cpus: list[int]) -> None:
    first = two_cpus[0]
    everywhere = " ".join(map(str, two_cpus))
    assert _processors_of_a_thread(first, None) == f"{everywhere} main {first}"


def test_thread_leaves_the_processors_of_other_ranks_alone(two_cpus: list[int]) -> None:
    first, second, *free = two_cpus
    expected = " ".join(map(str, [first, *free]))
    assert _processors_of_a_thread(first, second) == f"{expected} main {first}"
