"""Raw access to storages, without a backend: what the backend suite compares with.

An oracle must not use the code under test, or the tests miss errors that both share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshelf.testing.backends import Oracle


class FolderOracle(Oracle):
    """Accesses a directory.

    Parameters
    ----------
    root : str or os.PathLike
        The directory.
    """

    specials = ("folder", "link", "fifo")

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def get(self, name: str) -> bytes | None:
        """Read a file."""
        path = self.root / name
        return path.read_bytes() if path.is_file() else None

    def put(self, name: str, data: bytes) -> None:
        """Write a file in place."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def names(self) -> set[str]:
        """Walk the directory."""
        return {
            os.path.relpath(os.path.join(folder, file), self.root)
            for folder, _, files in os.walk(self.root)
            for file in files
        }

    def clear(self) -> None:
        """Remove all files; folders stay, as on a shelf."""
        for name in self.names():
            (self.root / name).unlink()

    def put_special(self, name: str, kind: str) -> None:
        """Create a folder with a file in it, a link to a file outside the root, or a FIFO."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
            (path / "inside").write_bytes(b"inside")
        elif kind == "link":
            outside = self.root.parent / f"outside-{self.root.name}"
            outside.write_bytes(b"outside")
            path.symlink_to(outside)
        else:
            os.mkfifo(path)


class MemoryOracle(Oracle):
    """Accesses fsspec's ``memory://``.

    Parameters
    ----------
    root : str
        Path of the backend's root, such as ``/name``.
    """

    def __init__(self, root: str) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self.root = "/" + root.strip("/") + "/"
        self._files: dict[str, Any] = MemoryFileSystem.store
        self._new: Callable[..., Any] = MemoryFileSystem().pipe_file

    def get(self, name: str) -> bytes | None:
        """Look a file up."""
        found = self._files.get(self.root + name)
        return None if found is None else bytes(found.getvalue())

    def put(self, name: str, data: bytes) -> None:
        """Put a file in."""
        self._new(self.root + name, data)

    def names(self) -> set[str]:
        """Return the names of all files below the root."""
        skip = len(self.root)
        return {name[skip:] for name in list(self._files) if name.startswith(self.root)}

    def clear(self) -> None:
        """Drop all files below the root."""
        for name in self.names():
            del self._files[self.root + name]
