"""Who else deletes files of a directory: systemd-tmpfiles by their age, and logind at a logout.

Reads files of this machine's configuration only. What cannot be read counts as not there.
"""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import Final

#: Where rules lie. Of files with one name the last one counts.
_FOLDERS: Final = (
    "usr/lib/tmpfiles.d",
    "usr/local/lib/tmpfiles.d",
    "run/tmpfiles.d",
    "etc/tmpfiles.d",
)
#: logind leaves the files of system users, whose ids are smaller.
_FIRST_USER: Final = 1000


def cleaner_of(path: str, *, root: Path = Path("/"), user: int | None = None) -> str:
    """Return what deletes files below a directory; empty if nothing is known to.

    Parameters
    ----------
    path : str
        Absolute, without links.
    root : Path
        Of the filesystem whose configuration is read.
    user : int, optional
        Whose files they are; this process' user by default.
    """
    if not (root / "run/systemd/system").is_dir():
        # As in most containers.
        return ""
    login = (os.getuid() if user is None else user) >= _FIRST_USER
    if login and path.startswith("/dev/shm/") and _removes_ipc(root):  # noqa: S108
        return "logind deletes all files of a user in /dev/shm when the user's last session ends"
    pattern, kind, age, file = max(_rules(path, root), default=("", "", "-", ""))
    if kind == "x" or age == "-":
        return ""
    return f"systemd-tmpfiles deletes files below {pattern} that are older than {age} ({file})"


def _rules(path: str, root: Path) -> list[tuple[str, str, str, str]]:
    """Return pattern, type, age and file of the rules for a directory and those around it."""
    files = {file.name: file for folder in _FOLDERS for file in (root / folder).glob("*.conf")}
    around = [path, *map(str, Path(path).parents)]
    rules: dict[str, tuple[str, str, str, str]] = {}
    for name in sorted(files):
        for line in _lines(files[name]):
            kind, pattern, _, _, _, age, *_ = [*line.split(), *"------"]
            if kind[0] in "dDevqQx" and any(fnmatch.fnmatch(folder, pattern) for folder in around):
                rules.setdefault(pattern, (pattern, kind[0], age, name))
    return list(rules.values())


def _removes_ipc(root: Path) -> bool:
    """Whether logind deletes what a user leaves in shared memory, as it does by default."""
    folder = root / "etc/systemd"
    lines = [
        line
        for file in (folder / "logind.conf", *sorted(folder.glob("logind.conf.d/*.conf")))
        for line in _lines(file)
        if line.startswith("RemoveIPC=")
    ]
    return lines[-1:] != ["RemoveIPC=no"]


def _lines(file: Path) -> list[str]:
    try:
        return [
            line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        return []
