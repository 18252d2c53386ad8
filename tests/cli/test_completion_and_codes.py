"""Of all commands: the shell completes them, and each ends by a documented code on S3 as here."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.common import UNEXPECTED
from tests.support.commands import all_commands, run
from tests.support.filled import fill, namespace, prompt
from tests.support.servers import BUCKET, S3Server

pytestmark = pytest.mark.real

FOLDER = namespace().folder


def process(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------ completion


def completed(line: str, shell: str = "bash") -> list[str]:
    """What a shell is told for a line that ends at the cursor."""
    words = line.split(" ")
    env = os.environ | {
        "_KVSHELF_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
    }
    done = process(sys.executable, "-m", "kvshelf", env=env)
    assert done.stderr == ""
    return done.stdout.split()


def test_shell_completes_commands_and_options() -> None:
    assert set(completed("kvshelf ")) >= set(all_commands())
    assert set(completed("kvshelf ver")) == {"verify"}
    assert set(completed("kvshelf verify --re")) == {"--repair"}
    assert set(completed("kvshelf ls --by ")) == {"namespace", "group", "age"}


def test_shell_completes_namespaces(tmp_path: Path) -> None:
    fill(tmp_path, namespace(), prompt(0, 1))
    assert completed(f"kvshelf ls {tmp_path} -n {FOLDER[:3]}") == [FOLDER]
    assert completed(f"kvshelf ls {tmp_path}/typo -n ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_a_shell(shell: str) -> None:
    env = os.environ | {"_KVSHELF_COMPLETE": f"source_{shell}"}
    done = process(sys.executable, "-m", "kvshelf", env=env)
    assert "_KVSHELF_COMPLETE" in done.stdout


# ------------------------------------------------------------------------------ all commands


def test_help_of_each_command_has_an_example_that_it_takes() -> None:
    assert " ".join(all_commands()) == "ls verify explain copy gc rm pin seed serve doctor"
    for name, command in all_commands().items():
        shown = " ".join(run(name, "-h", env={"COLUMNS": "200"}).stdout.split())
        assert shown == " ".join(run(name, "--help", env={"COLUMNS": "200"}).stdout.split())
        # Servers write logs instead of reports.
        assert ("--json" in shown) == (name != "serve"), name
        words = shown.split("Example: kvshelf ")[1].split()
        assert words[0] == name
        command.make_context(name, words[1:])
        assert "KVSHELF_STORAGE_OPTIONS" in shown


def test_each_command_on_s3(server: S3Server, tmp_path: Path) -> None:
    """Its output is that of the same shelf in a directory."""
    assert server.folder is not None
    local, bucket = tmp_path / "shelf", server.folder / BUCKET / tmp_path.name
    fill(local, namespace(), prompt(0, 3))
    shutil.copytree(local, bucket)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(prompt(0, 2)))
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(server.options())}
    for line in (
        "ls",
        f"ls -n {FOLDER}",
        "ls --by group",
        "ls --by age",
        "verify",
        "verify --sample 3",
        "doctor",
        f"rm -n {FOLDER}",
        "rm --unused-for 1h",
        f"pin system {prompts}",
        "pin all --group _",
        "pin all --remove",
        "gc --max-bytes 60KB --yes",
        "ls",
        f"rm --prompts {prompts} --pinned --yes",
        "pin system --remove",
        f"rm -n {FOLDER} --yes",
        "ls",
    ):
        first, *rest = line.split()
        there = run(first, f"s3://{BUCKET}/{tmp_path.name}", *rest, "--json", env=env)
        here = run(first, local, *rest, "--json")
        assert there.exit_code == here.exit_code == 0, (line, there.output, here.output)
        if first != "doctor":
            assert _comparable(there.stdout) == _comparable(here.stdout), line


def _comparable(line: str) -> Any:
    """The parts of a row of JSON that do not depend on the storage."""

    def without(value: Any) -> Any:
        skipped = ("mtime", "atime", "last_used", "seconds", "free", "total", "shelf")
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key not in skipped}
        return [without(one) for one in value] if isinstance(value, list) else value

    return without(json.loads(line))


def test_interrupt_has_a_code_of_its_own(tmp_path: Path) -> None:
    """And says how to go on."""
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 40))
    code = (
        "import os, signal, time\n"
        "from kvshelf.backends.posix import PosixBackend\n"
        "real = PosixBackend.open\n"
        "def slow(self, name, size=None):\n"
        "    os.write(1, b'reading\\n')\n"
        "    time.sleep(0.1)\n"
        "    return real(self, name)\n"
        "PosixBackend.open = slow\n"
        "import sys\n"
        f"sys.argv = ['kvshelf', 'verify', {str(root)!r}, '--json']\n"
        "from kvshelf.cli import main\n"
        "main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells have what they start in the background ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline() == "reading\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    report = json.loads(next(line for line in out.splitlines() if line[0] == "{"))
    assert (report["interrupted"], report["sound"]) == (True, None)
    assert "start it again from the beginning" in err


@pytest.mark.parametrize(
    ("command", "module", "interrupt"),
    [
        *(("ls", f"kvshelf.cli.{name}", "raise KeyboardInterrupt") for name in ("app", "ls")),
        # torch takes an exception for a failed import, so doctor ends without one.
        ("doctor", "torch", "with contextlib.suppress(KeyboardInterrupt): os.kill(os.getpid(), 2)"),
    ],
)
def test_interrupt_during_an_import_is_one_line(
    tmp_path: Path, command: str, module: str, interrupt: str
) -> None:
    code = f"""
import contextlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            {interrupt}
sys.meta_path.insert(0, Interrupt())
sys.argv = ["kvshelf", {command!r}, {str(tmp_path)!r}]
from kvshelf.cli import main
main()
"""
    done = process(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (130, "kvshelf: interrupted\n")


@pytest.mark.parametrize(
    ("how", "told"),
    [(">&-", "standard output is closed"), ("> /dev/full", "standard output cannot be written")],
)
@pytest.mark.parametrize("arguments", ["ls {}", "--help"])
def test_standard_output_that_takes_nothing_is_one_line(
    tmp_path: Path, how: str, told: str, arguments: str
) -> None:
    command = f"{sys.executable} -m kvshelf {arguments.format(tmp_path)} {how}"
    done = process("sh", "-c", command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvshelf: {told}") and done.stderr.count("\n") == 1


def test_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path, namespace(), prompt(0, 1))
    command = f"{sys.executable} -m kvshelf ls {tmp_path} | true"
    done = process("bash", "-o", "pipefail", "-c", command)
    assert (done.returncode, done.stderr) == (0, "")


def test_verbose_has_the_traceback_and_quiet_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> None:
        logging.getLogger("kvshelf.shelf").warning("a warning")
        raise OverflowError("too large")

    monkeypatch.setattr(PosixBackend, "folders", warn)
    for before, behind in (((), ("-v",)), (("-v",), ())):
        assert "Traceback" in run(*before, "ls", tmp_path, *behind).stderr
    assert "kvshelf: a warning\n" in run("ls", tmp_path).stderr
    assert len(run("ls", tmp_path, "-q").stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "missing", "told"),
    [
        (["--help"], ["numpy", "pydantic", "fsspec", "rich"], "doctor"),
        (["ls", "SHELF"], ["torch", "vllm", "s3fs"], FOLDER),
    ],
)
def test_command_runs_without_packages_that_it_does_not_need(
    tmp_path: Path, words: list[str], missing: list[str], told: str
) -> None:
    fill(tmp_path, namespace(), prompt(0, 1))
    argv = ["kvshelf", *(word.replace("SHELF", str(tmp_path)) for word in words)]
    code = (
        "import sys\n"
        f"for name in {missing}: sys.modules[name] = None\n"
        f"sys.argv = {argv}\n"
        "from kvshelf.cli import main\n"
        "main()\n"
    )
    done = process(sys.executable, "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


# ------------------------------------------------------------------------------ what is damaged


@pytest.mark.parametrize("name", ["ls", "rm", "copy", "explain"])
def test_what_kvshelf_does_not_expect_ends_a_command_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With a code of its own, and without a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise OverflowError("cannot convert float infinity\nto integer")

    root, prompts = tmp_path / "shelf", tmp_path / "prompts"
    fill(root, namespace(), prompt(0, 1))
    prompts.write_text(json.dumps(prompt(0, 1)))
    arguments: dict[str, list[object]] = {
        "rm": [root, "--unused-for", "1h"],
        "copy": [root, tmp_path / "target"],
        "explain": [root, prompts],
    }
    for method in ("list", "folders", "stat"):
        monkeypatch.setattr(PosixBackend, method, fail)
    result = run(name, *arguments.get(name, [root]))
    assert result.exit_code == UNEXPECTED
    assert isinstance(result.exception, SystemExit)
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "OverflowError: cannot convert float infinity" in result.stderr
    assert f"{name} ended early" in result.stderr
    assert f"({Path(__file__).name}:" in result.stderr


def test_verify_names_damaged_pins(tmp_path: Path) -> None:
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 1))
    assert run("verify", root).exit_code == 0
    path = root / ".kvshelf/pins/x.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"[")
    result = run("verify", root)
    assert result.exit_code == 1, result.output
    assert ".kvshelf/pins/x.json" in result.output
    assert path.read_bytes() == b"["
