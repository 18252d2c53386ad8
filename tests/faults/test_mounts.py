"""Mounts that go, or are covered by others, under a running engine: rows of the table of faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.backends import open_backend
from kvshelf.errors import UnavailableStorageError
from tests.faults.cells import (
    COVERED,
    DEADLINE,
    UNMOUNTED,
    EngineStandIn,
    eventually,
    make_prompt,
)
from tests.faults.faultfs import FaultMount, mounted
from tests.faults.test_table import loads_all
from tests.support.formats import make_format

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format()


def check_that_nothing_is_stored(engine: EngineStandIn, place: Path) -> None:
    """Serve prompts as without a shelf, and say why; leave what is at `place` alone."""
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    engine.patience = DEADLINE / 4
    for _ in range(3):
        assert engine.answer(known) == engine.answer(new) == 0
    for call in (
        lambda: engine.backend.write("a/x", [b"1"]),
        lambda: list(engine.backend.list()),
        engine.backend.space,
    ):
        with pytest.raises(UnavailableStorageError, match="another filesystem is at the root"):
            call()
    assert list(place.iterdir()) == []
    guard = engine.rig.guard

    def rests() -> bool:
        guard.stat(["a/x"])
        return not guard.reads.is_closed

    eventually(rests)
    engine.be_patient()


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_an_unmounted_shelf_is_not_stored_on_the_disk_beneath(
    tmp_path: Path,
    create: bool,
    inside: bool,
    short_pauses: None,
    note_cell: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    note_cell(UNMOUNTED, "write", "fuse")
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    with mounted(tmp_path) as mount:
        root = mount.path / "shelf" if inside else mount.path
        root.mkdir(exist_ok=True)
        backend = open_backend(root, storage_options={"create": create})
        with closing(EngineStandIn(backend)) as engine:
            engine.answer(known)
            eventually(loads_all(engine, known))
            mount.kill()
            mount.unmount()
            check_that_nothing_is_stored(engine, mount.path)
            said = [line for line in caplog.messages if "another filesystem is at the root" in line]
            assert 1 <= len(said) <= 4, "a line when a breaker opens, and none for each object"
            mount.mount()
            eventually(loads_all(engine, known, new))


def test_a_filesystem_mounted_over_a_shelf_is_left_alone(
    tmp_path: Path, short_pauses: None, note_cell: Callable[..., None]
) -> None:
    note_cell(COVERED, "write", "fuse")
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    with mounted(tmp_path / "one") as mount:
        with closing(EngineStandIn(open_backend(mount.path / "shelf"))) as engine:
            engine.answer(known)
            eventually(loads_all(engine, known))
            other = tmp_path / "other files"
            for folder in ("two", "three"):
                (tmp_path / folder).mkdir()
            with FaultMount(tmp_path / "two", path=mount.path, source=other, name="another"):
                check_that_nothing_is_stored(engine, other)
            eventually(loads_all(engine, known, new))
        # Opened now, what is mounted now is the shelf.
        with (
            FaultMount(tmp_path / "three", path=mount.path, source=other, name="another"),
            closing(EngineStandIn(open_backend(mount.path / "shelf"))) as engine,
        ):
            assert engine.answer(known) == 0
            eventually(loads_all(engine, known))
