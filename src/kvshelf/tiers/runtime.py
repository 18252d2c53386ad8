"""Opens the shelf of a configuration for a process, with its tiers, use records and evictor.

Owns how the shelf is opened for each :class:`Role`, which parts that role has in addition, and the
order in which they are closed. Engines, :class:`~kvshelf.cache.ChunkCache` and the node server make
a :class:`Runtime`. Commands need the shelf alone (:mod:`kvshelf.cli.shelves`).

========== ========================== ================================
role       the shelf is opened        bounds are kept
========== ========================== ================================
ENGINE     on a thread; it is used as from the worker's first
           soon as it answers         namespace on
CACHE      at once, or not at all     from the start
SERVER     at once; a storage that    from the start, with
           does not answer, later     :meth:`Runtime.keep_bounds`
========== ========================== ================================

Contracts
---------
* A process that writes nothing to the shelf keeps no bounds. Behind a node server the server keeps
  them.
* Parts are closed in this order: uses, which are recorded first; housekeeping, which lifts its
  bounds; the disk tier; the shelf. Stores have ended by then.
* :meth:`Runtime.keep_bounds` and :meth:`Runtime.shelf` never block.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvshelf.backends import Backend, open_backend
from kvshelf.capacity.evictor import Evictor
from kvshelf.capacity.limits import FINEST
from kvshelf.capacity.uses import Uses
from kvshelf.config import Config, default_shelf_path
from kvshelf.metrics import Counters
from kvshelf.shelf.opening import START_SECONDS, TIERED_SECONDS, LateBackend, Opening
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.tiers.directories import refuse_tier
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import AnyShelf, TieredShelf
from kvshelf.urls import shown_url

logger = logging.getLogger(__name__)


class Role(enum.Enum):
    """What a process uses a shelf for."""

    ENGINE = enum.auto()
    CACHE = enum.auto()
    SERVER = enum.auto()


class Runtime:
    """The parts of one process around one shelf.

    Parameters
    ----------
    config : Config
    counters : Counters
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf with its disk tier; None while it is not open. The caller closes it.
    storage : tuple of Shelf and DiskTier or None, optional
        The same, apart; not for an engine, whose shelf may open later.
    url : str
        Where the shelf is, without secrets.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.

    Attributes
    ----------
    counters : Counters
    shelf : Callable
    url : str
    uses : Uses
    evictor : Evictor or None
        Keeps the bounds.

    Raises
    ------
    ConfigError
        If uses cannot be recorded as the configuration says.
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        shelf: Callable[[], AnyShelf | None],
        *,
        storage: tuple[Shelf, DiskTier | None] | None = None,
        url: str = "",
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.counters = counters
        self.shelf = shelf
        self.url = url
        # A client of a node server reports uses to the server, which knows the age of chunks.
        self.uses = Uses(
            counters,
            max_age=config.capacity.max_age,
            every=FINEST if config.server is not None else None,
            off=config.read_only,
            on_thread_start=on_thread_start,
        )
        self.evictor: Evictor | None = None
        self._config = config
        self._on_thread_start = on_thread_start
        self._storage = storage
        #: What is closed after all else.
        self._closing = contextlib.ExitStack()

    @property
    def storage(self) -> tuple[Shelf, DiskTier | None]:
        """The shelf and its disk tier, apart, of a cache or a server."""
        assert self._storage is not None
        return self._storage

    # ------------------------------------------------------------- housekeeping

    def keep_bounds(self) -> None:
        """Keep the shelf within its bounds, unless other processes do. Idempotent.

        Where the system allows no thread now, the next call tries again.
        """
        shelf, config = self.shelf(), self._config
        if shelf is None or config.read_only or config.server is not None:
            return
        if self.evictor is None:
            self.evictor = Evictor(
                shelf.backend, config.capacity, self.counters, on_thread_start=self._on_thread_start
            )
        self.evictor.start()

    def note_handover(self) -> None:
        """Have the evictor delete tails and markers of hand-overs that this process writes."""
        if self.evictor is not None:
            self.evictor.hands_over()

    # ------------------------------------------------------------- the end

    def close(self) -> None:
        """Record queued uses for a limited time, and close all parts. Idempotent."""
        self.uses.close()
        if self.evictor is not None:
            self.evictor.close()
        self._closing.close()


def open_runtime(
    config: Config,
    role: Role,
    counters: Counters,
    *,
    open_served: Callable[[], Shelf] | None = None,
    on_thread_start: Callable[[], None] | None = None,
) -> Runtime:
    """Open the shelf of a configuration, and make what a role needs beside it.

    Parameters
    ----------
    config : Config
    role : Role
    counters : Counters
    open_served : Callable, optional
        Opens the shelf behind the node server that ``config.server`` names.
    on_thread_start
        As for :class:`Runtime`.

    Raises
    ------
    ConfigError
        If the configuration cannot work.
    StorageError
        If the shelf cannot be opened, and waiting would not help; for a cache, also if its storage
        does not answer.
    """
    url = config.server or shelf_url(config)
    shown = shown_url(url)

    def open_parts() -> tuple[Shelf, DiskTier | None]:
        if open_served is not None:
            return open_served(), None
        late = role is Role.SERVER
        return open_configured(url, config, counters, late=late, on_thread_start=on_thread_start)

    def open_joined() -> AnyShelf:
        shelf, tier = open_parts()
        return shelf if tier is None else TieredShelf(shelf, [tier])

    storage: tuple[Shelf, DiskTier | None] | None = None
    get: Callable[[], AnyShelf | None]
    with contextlib.ExitStack() as closing:
        if role is Role.ENGINE:
            opening = Opening(shown, open_joined)
            closing.callback(opening.close)
            opening.first(START_SECONDS, "the engine runs without it")
            get = opening.get
        else:
            storage = shelf, tier = open_parts()
            closing.callback(shelf.close)
            if tier is not None:
                closing.callback(tier.close)

            def get() -> Shelf:
                return shelf

        runtime = Runtime(
            config, counters, get, storage=storage, url=shown, on_thread_start=on_thread_start
        )
        if role is Role.CACHE and config.server is None:
            runtime.keep_bounds()
        runtime._closing = closing.pop_all()
    return runtime


def open_late(
    url: str | os.PathLike[str],
    tier: DiskTier | None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    counters: Counters | None = None,
) -> Shelf:
    """Open a shelf, also when it does not answer now.

    The objects in its tier can be loaded meanwhile.

    Parameters
    ----------
    url, storage_options, read_only, counters
        As for :func:`kvshelf.shelf.shelf.open_shelf`.
    tier : DiskTier or None
        The disk tier in front of it.

    Raises
    ------
    ConfigError, StorageError
        If the shelf cannot be opened, and waiting would not help.
    """

    def make() -> Backend:
        opened = open_backend(url, storage_options=storage_options, read_only=read_only)
        try:
            if tier is not None:
                tier.check_disjoint(opened)
            refuse_tier(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    if tier is None:
        seconds, consequence = START_SECONDS, "nothing is found or stored"
    else:
        seconds = TIERED_SECONDS
        consequence = f"only objects in the disk tier {tier.path} can be loaded"
    opening = Opening(shown_url(url), make)
    backend = opening.first(seconds, consequence) or LateBackend(opening)
    return Shelf(backend, counters)


def shelf_url(config: Config) -> str:
    """Return where the shelf of `config` is; logs a warning if it is a default."""
    if config.shared_storage_path is not None:
        return config.shared_storage_path
    url = str(default_shelf_path())
    logger.warning(
        "shared_storage_path is not set: KV is kept in %s, which only this user on this machine"
        " can read. Set it to a directory or URL that your engines share.",
        url,
    )
    return url


def open_configured(
    url: str,
    config: Config,
    counters: Counters,
    *,
    late: bool = False,
    on_thread_start: Callable[[], None] | None = None,
) -> tuple[Shelf, DiskTier | None]:
    """Open the shelf of a configuration, and its disk tier if it has one. May block.

    Behind a disk tier the shelf may open later, see :func:`open_late`.

    Parameters
    ----------
    url : str
        Where the shelf is, see :func:`shelf_url`.
    config : Config
    counters : Counters
        Counts what both do.
    late : bool
        The shelf may open later without a disk tier, too. Nothing is found meanwhile.
    on_thread_start : Callable, optional
        Called first on the tier's thread, to set its processors.

    Raises
    ------
    ConfigError, StorageError
        If the shelf or the tier cannot be opened, and waiting would not help; without a disk
        tier also if the storage does not answer, unless it may be `late`.
    """
    options: dict[str, Any] = {
        "storage_options": config.storage_options,
        "read_only": config.read_only,
        "counters": counters,
    }
    tier_config = config.disk_tier
    with contextlib.ExitStack() as undo:
        if tier_config is None:
            shelf = open_late(url, None, **options) if late else open_shelf(url, **options)
            undo.callback(shelf.close)
            refuse_tier(shelf.backend)
            undo.pop_all()
            return shelf, None
        begin = time.monotonic()
        tier = DiskTier(
            tier_config.path,
            tier_config.max_bytes,
            counters=counters,
            open_seconds=None,
            on_thread_start=on_thread_start,
        )
        undo.callback(tier.close)
        shelf = open_late(url, tier, **options)
        undo.callback(shelf.close)
        # Both are opened at the same time.
        tier.wait_open(max(0.0, begin + TIERED_SECONDS - time.monotonic()))
        undo.pop_all()
    return shelf, tier
