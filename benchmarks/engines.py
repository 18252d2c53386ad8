"""Real vLLM engines for rows: each is a child process on one model and one shelf.

Owns the parent's side: start, one question at a time, and a stop that leaves no engine behind. The
child's side is :mod:`benchmarks.engine_process`; its output goes to a file. This module imports
neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row
from benchmarks.samples import BLOCK_TOKENS, make_prompt
from benchmarks.settings import Settings

#: Tokens of a prompt behind its last whole chunk: they are computed in a hit, too.
REST_TOKENS: Final = 32
#: vLLM's workers poll for a second after their last step before they sleep. During this time an
#: idle engine uses a core that the measured engine needs.
QUIET_SECONDS: Final = 1.3
#: Files count as written when nothing has changed for so long.
_SETTLED_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 30.0
#: Contains the package ``benchmarks``, which an engine's processes also import.
CHECKOUT: Final = Path(__file__).resolve().parents[1]

COMPUTED: Final = "computed"
ALWAYS: Final = "always"
AUTO: Final = "auto"
POLICIES: Final = (COMPUTED, ALWAYS, AUTO)

#: ``kv_transfer_config`` of a connector that does nothing.
INERT: Final[Mapping[str, Any]] = {
    "kv_connector": "InertConnector",
    "kv_connector_module_path": "benchmarks.inert",
}


def kvshelf_connector(folder: Path, **options: Any) -> Mapping[str, Any]:
    """Return the ``kv_transfer_config`` of kvshelf on a directory, with further options."""
    return {
        "kv_connector": "KVShelfConnector",
        "kv_connector_module_path": "kvshelf.vllm.connector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), **options},
    }


class ChildError(RuntimeError):
    """A child did not start, died, or replied with an error."""


class MissingEngineError(ChildError):
    """vLLM, or what a row needs beside it, is not installed."""


class Child:
    """One engine in a child process.

    Parameters
    ----------
    log : Path
        File for the child's output.
    env : mapping
        Environment variables added to the parent's.
    arguments : mapping
        Passed to the child.
    """

    def __init__(self, log: Path, env: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
        self._log = log
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSHELF_")}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # As where kvshelf is installed: its modules are compiled once, not by each process.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (os.environ.get("PYTHONPATH"), str(CHECKOUT)))
            ),
            **env,
        }
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "benchmarks.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._send(arguments)

    def wait_ready(self) -> None:
        """Wait until the engine has started."""
        self._receive()

    def ask(self, prompts: Sequence[Sequence[int]], **how: Any) -> dict[str, Any]:
        """Ask for prompts at once, see ``_Engine.ask`` in :mod:`benchmarks.engine_process`.

        Raises
        ------
        ChildError
            If the child replies with an error, dies, or needs more than ten minutes.
        """
        self._send({"prompts": prompts, **how})
        return self._receive()

    def first_token(self, prompt: Sequence[int], cached: int, shelf: int) -> float:
        """Return the seconds to the first token of a prompt.

        Raises
        ------
        ChildError
            If not `cached` tokens of it were found, `shelf` of them on the shelf.
        """
        reply = self.ask([prompt])
        if reply["cached"] != [cached] or reply["shelf"] != shelf:
            raise ChildError(
                f"expected {cached} cached tokens, {shelf} of them from the shelf; found "
                f"{reply['cached']} and {reply['shelf']}"
            )
        return float(reply["first"][0])

    def close(self) -> None:
        """Stop the child gracefully, then kill its remaining processes."""
        self._lines.close()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        self._socket.settimeout(_LONGEST_SECONDS)
        try:
            line = self._lines.readline()
        except OSError as error:
            line = json.dumps({"error": str(error)}).encode()
        reply: dict[str, Any] = json.loads(line or '{"error": "the child ended"}')
        if "error" in reply:
            log = self._log.read_text(errors="replace").splitlines()[-15:]
            raise ChildError("\n".join([reply["error"], "end of its log:", *log]))
        return reply


class EngineRun:
    """Starts engines on one model and one shelf, and makes their prompts.

    Attributes
    ----------
    shelf : Path
    seed : int
        Number of the prompt that :meth:`prompt` returned last.
    """

    def __init__(self, settings: Settings, model: Path, name: str) -> None:
        self.shelf = settings.folder(f"{name}-shelf")
        self._logs = settings.folder(f"{name}-logs")
        self._settings = settings
        self._model = model
        self._config: dict[str, Any] = json.loads((model / "config.json").read_text())
        self.seed = 0

    @contextlib.contextmanager
    def engine(
        self,
        name: str,
        longest: int,
        connector: Mapping[str, Any] | None = None,
        *,
        prompts: int = 2,
        switched: bool = False,
        slow_start: float = 0.0,
    ) -> Iterator[Child]:
        """Run an engine whose KV cache holds so many `prompts` of `longest` tokens.

        `connector` is its ``kv_transfer_config``; by default kvshelf loads all that the shelf has.
        The first step of a `switched` one takes `slow_start` seconds more.
        """
        self._settings.progress(f"starting an engine: {name}")
        connector = connector or kvshelf_connector(self.shelf, admission=ALWAYS)
        arguments = {
            "model": str(self._model),
            # By itself vLLM runs a float32 checkpoint in bf16.
            "dtype": self._config.get("dtype", "auto"),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": prompts * self.prompt_bytes(longest),
            "gpu_memory_utilization": 0.1,
            "max_num_seqs": 16,
            "seed": 0,
            "disable_log_stats": False,
            "switched": switched,
            "slow_start": slow_start,
            "kv_transfer_config": {"kv_role": "kv_both", **connector},
        }
        env = {"KVSHELF_CACHE_DIR": str(self._logs / "cache")}
        with contextlib.closing(Child(self._logs / f"{name}.txt", env, arguments)) as child:
            child.wait_ready()
            yield child

    def prompt_bytes(self, tokens: int) -> int:
        """Return the bytes of the KV of a prompt of `tokens` tokens, in whole blocks."""
        config = self._config
        heads = config["num_attention_heads"]
        row = config.get("head_dim") or config["hidden_size"] // heads
        itemsize = 4 if config.get("dtype") == "float32" else 2
        kv_heads = config.get("num_key_value_heads") or heads
        token = 2 * itemsize * config["num_hidden_layers"] * kv_heads * row
        return int(token * (tokens + BLOCK_TOKENS))

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt of `tokens` tokens that shares no prefix with earlier ones."""
        self.seed += 1
        return make_prompt(tokens, self.seed, self._config["vocab_size"])

    def settle(self) -> None:
        """Wait until what engines store lies on the shelf."""
        until, before, since = time.monotonic() + _LONGEST_SECONDS, -1, time.monotonic()
        while time.monotonic() < until:
            now = _nbytes(self.shelf)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _SETTLED_SECONDS:
                return
            time.sleep(0.1)
        raise ChildError(f"{self.shelf} changed for {_LONGEST_SECONDS:g} s")


def _nbytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            # It may have been given its own name meanwhile.
            with contextlib.suppress(FileNotFoundError):
                found += os.stat(os.path.join(path, name)).st_size
    return found


def find_model(settings: Settings) -> Path:
    """Return the model to measure with; create the demo model if necessary."""
    if settings.model is not None:
        return settings.model.resolve()
    folder = CHECKOUT / "build" / "models" / "demo"
    settings.progress("making the demo model")
    script = CHECKOUT / "examples" / "models" / "make_model.py"
    subprocess.run(  # noqa: S603  our own script
        [sys.executable, str(script), str(folder), "--recipe", "demo", "--replace"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


def slow_mount(settings: Settings, name: str, source: Path) -> Any:
    """Return a mount of a folder, by the filesystem of the tests that makes trouble on order.

    Raises
    ------
    MissingEngineError
        If FUSE is missing.
    """
    faultfs = import_module("tests.faults.faultfs")
    missing = faultfs.why_not()
    if missing is not None:
        raise MissingEngineError(missing)
    return faultfs.FaultMount(settings.folder(f"{name}-mount"), source=source)


def guarded(
    settings: Settings, group: str, measure: Callable[[Settings], Iterator[Row]]
) -> Iterator[Row]:
    """Yield the measured rows; where not all can be, then a skipped row with the reason."""
    reason = "not with --quick"
    if not settings.quick:
        try:
            if importlib.util.find_spec("vllm") is None:
                raise MissingEngineError("vLLM is not installed")
            yield from measure(settings)
            return
        except MissingEngineError as error:
            reason = str(error)
        except (ChildError, OSError, subprocess.CalledProcessError) as error:
            reason = f"failed: {error}"
    yield Row(group, "rows with engines", skipped=reason)
