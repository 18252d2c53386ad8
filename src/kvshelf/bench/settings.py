"""What a run is asked to do.

Owns the command line's choices as the groups of rows see them, and the folder they write to.
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
        An empty folder for shelves; deleted by whoever made it.
    chosen_pairs : int, optional
        Pairs for each row; None for each row's own number.
    quick : bool
        Tiny sizes: shows that everything runs, measures nothing.
    model : Path, optional
        A checkpoint for the rows with engines; None: the demo model of a source checkout.
    progress : Callable
        Tells the user what happens; called with a short text.
    """

    scratch: Path
    chosen_pairs: int | None
    quick: bool
    model: Path | None
    progress: Callable[[str], None]

    def pairs(self, default: int) -> int:
        """Return the number of pairs of a row that by itself takes `default`."""
        if self.chosen_pairs is not None:
            return self.chosen_pairs
        return QUICK_PAIRS if self.quick else default

    def folder(self, name: str) -> Path:
        """Make and return a folder of its own for a group of rows."""
        path = self.scratch / name
        path.mkdir(mode=0o700)
        return path
