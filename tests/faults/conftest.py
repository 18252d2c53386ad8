"""Mounts and buckets for tests with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvshelf.backends import guard, posix_mount
from kvshelf.shelf import failed_keys
from tests.faults.cells import (
    BACK_OFF,
    BucketStorage,
    MountedStorage,
    Storage,
)
from tests.faults.faultfs import FaultMount, mounted


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FaultMount]]:
    """Mount fault-injecting filesystems; they are gone after the session."""
    made: list[FaultMount] = []

    def make(**options: Any) -> FaultMount:
        made.append(mounted(tmp_path_factory.mktemp("fault"), **options))
        return made[-1]

    yield make
    for mount in made:
        mount.close()


@pytest.fixture(scope="session")
def mount(mounts: Callable[..., FaultMount]) -> FaultMount:
    """The filesystem that most tests share; each has a directory of its own there."""
    return mounts()


@pytest.fixture(autouse=True)
def short_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what failed be loaded again soon."""
    monkeypatch.setattr(failed_keys, "_SECONDS", {True: BACK_OFF, False: BACK_OFF})


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores be tried again soon after the storage refused them."""
    monkeypatch.setattr(guard, "REFUSED_SECONDS", BACK_OFF)
    monkeypatch.setattr(posix_mount, "READ_ONLY_MEMORY", BACK_OFF)


@pytest.fixture
def storage(request: pytest.FixtureRequest, backend: str, short_pauses: None) -> Iterator[Storage]:
    """A shelf's place of the kind that the test's parameter `backend` names."""
    made: Storage
    if backend == "fuse":
        made = MountedStorage(request.getfixturevalue("mount"))
    else:
        pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
        made = BucketStorage()
    yield made
    made.heal()
    made.close()
