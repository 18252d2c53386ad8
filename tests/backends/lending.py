"""A backend that lends its objects in memory, and keeps account of what it lent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvshelf.backends import Backend, Properties
from kvshelf.backends.base import StatResults
from kvshelf.backends.wrappers import WrappedBackend


@dataclass(eq=False)
class Loan:
    """One object that was lent.

    Attributes
    ----------
    name : str
    view : memoryview
        Read-only, as the memory of another process would be.
    valid_now : bool
        What :meth:`valid` answers.
    asked, released : int
        Calls of :meth:`valid` and of :meth:`release`.
    """

    name: str
    data: bytearray
    view: memoryview
    valid_now: bool = True
    asked: int = 0
    released: int = 0
    on_valid: Callable[[], None] = field(default=lambda: None)

    def valid(self) -> bool:
        """Answer as the test has said."""
        assert not self.released, "asked after it was given back"
        self.asked += 1
        self.on_valid()
        return self.valid_now

    def release(self) -> None:
        """Count, and spoil the bytes, so that a later use shows."""
        self.released += 1
        self.data[:] = b"\xa5" * len(self.data)


class LendingBackend(WrappedBackend):
    """Lends the objects that `lends` chooses.

    Attributes
    ----------
    loans : list of Loan
    expected : list of pairs
        Names and sizes of all objects that were expected.
    lends : Callable[[str], bool]
    kept : set of str
        Objects that are in memory, whether or not the storage has them.
    on_lend : Callable[[Loan], None]
        Called with each loan before the borrower has it.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.loans: list[Loan] = []
        self.expected: list[tuple[str, int]] = []
        self.lends: Callable[[str], bool] = lambda name: True
        self.kept: set[str] = set()
        self.on_lend: Callable[[Loan], None] = lambda loan: None
        self._lock = threading.Lock()

    @property
    def properties(self) -> Properties:
        """Those of the storage, and that it lends."""
        return replace(self.inner.properties, lends=True)

    def find(self, names: Sequence[str], sizes: Sequence[int]) -> StatResults:
        """Answer for what is in memory, and ask the storage for the rest."""
        return [
            size if name in self.kept else found
            for name, size, found in zip(names, sizes, self.inner.stat(names), strict=True)
        ]

    def expect(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Note the names."""
        with self._lock:
            self.expected += zip(names, sizes, strict=True)

    def borrow(self, name: str, size: int) -> Loan | None:
        """Lend an object, read from the storage."""
        if not self.lends(name):
            return None
        data = bytearray(size)
        with self.inner.open(name) as reader:
            assert reader.read_into(memoryview(data), 0) == size
        loan = Loan(name, data, memoryview(data).toreadonly())
        self.on_lend(loan)
        with self._lock:
            self.loans.append(loan)
        return loan
