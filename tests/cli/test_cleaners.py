"""Who else deletes files of a shelf, by the configuration of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshelf.cli.cleaners import cleaner_of

TMP = "q /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n"
OF_TMP = "systemd-tmpfiles deletes files below /tmp that are older than 10d (tmp.conf)"
OF_SHM = "logind deletes all files of a user in /dev/shm when the user's last session ends"


@pytest.mark.parametrize(
    ("path", "files", "user", "expected"),
    [
        ("/tmp/kv", {"usr/lib/tmpfiles.d/tmp.conf": TMP}, 0, OF_TMP),
        ("/tmp/a/kv", {"usr/lib/tmpfiles.d/tmp.conf": f"# a comment\n\n{TMP}"}, 0, OF_TMP),
        ("/srv/kv", {"usr/lib/tmpfiles.d/tmp.conf": TMP}, 0, ""),
        ("/tmpfiles/kv", {"usr/lib/tmpfiles.d/tmp.conf": TMP}, 0, ""),
        # The administrator's file of one name, and an exception for one folder.
        ("/tmp/kv", {"usr/lib/tmpfiles.d/tmp.conf": TMP, "etc/tmpfiles.d/tmp.conf": ""}, 0, ""),
        (
            "/tmp/kv",
            {"usr/lib/tmpfiles.d/tmp.conf": TMP, "etc/tmpfiles.d/a.conf": "x /tmp/k*"},
            0,
            "",
        ),
        ("/tmp/kv", {"etc/tmpfiles.d/tmp.conf": "d /tmp 1777 root root -"}, 0, ""),
        ("/tmp/kv", {"etc/tmpfiles.d/tmp.conf": "d /tmp"}, 0, ""),
        # The first of several rules for a folder counts.
        (
            "/tmp/kv",
            {"run/tmpfiles.d/a.conf": "D! /tmp - - - -", "usr/lib/tmpfiles.d/tmp.conf": TMP},
            0,
            "",
        ),
        ("/dev/shm/kv", {}, 1000, OF_SHM),
        ("/dev/shm/kv", {}, 0, ""),
        ("/dev/shm/kv", {"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no"}, 1000, ""),
        ("/dev/shm/kv", {"etc/systemd/logind.conf": "#RemoveIPC=no"}, 1000, OF_SHM),
        ("/dev/shm/kv", {"etc/systemd/logind.conf.d/a.conf": "RemoveIPC=no"}, 1000, ""),
    ],
)
def test_cleaner_is_named_by_its_rule(
    tmp_path: Path, path: str, files: dict[str, str], user: int, expected: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cleaner_of(path, root=tmp_path, user=user) == "", "nothing is said without systemd"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert cleaner_of(path, root=tmp_path, user=user) == expected
