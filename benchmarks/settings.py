"""The settings of a run.

Owns the command line's choices for the groups of rows, and the folder that they write to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUICK_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of one run.

    Attributes
    ----------
    scratch : Path
        An empty folder for shelves; its creator deletes it.
    chosen_pairs : int, optional
        Pairs for each row; None for each row's own number.
    quick : bool
        Tiny sizes: only checks that everything runs.
    model : Path, optional
        A checkpoint for the rows with engines; None: the demo model of a source checkout.
    progress : Callable
        Called with a short text that is shown to the user.
    """

    scratch: Path
    chosen_pairs: int | None
    quick: bool
    model: Path | None
    progress: Callable[[str], None]

    def pairs(self, default: int) -> int:
        """Return the number of pairs of a row whose default is `default`."""
        if self.chosen_pairs is not None:
            return self.chosen_pairs
        return QUICK_PAIRS if self.quick else default

    def folder(self, name: str) -> Path:
        """Create and return a folder for a group of rows."""
        path = self.scratch / name
        path.mkdir(mode=0o700)
        return path
