"""The engines that tests know by name, and how they are started and stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.constants import PATIENT
from tests.support.engines import (
    INERT_CONNECTOR,
    SHELF_CONNECTOR,
    Answer,
    Engine,
    engine_environment,
)
from tests.support.fork_server import ForkServer

#: Fixtures of tests/vllm: makes prompts; returns what is answered without a shelf; lets an engine
#: answer and compares.
MakePrompt = Callable[..., list[int]]
Reference = Callable[..., Answer]
Ask = Callable[..., Answer]

_MULTI_CONNECTOR = (
    "MultiConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)


@dataclass(frozen=True)
class Places:
    """Where things are in this session: models, and the directories of shelves."""

    root: Path
    model: Path
    copied_model: Path
    shelf: Path
    own: Path


def _on_shelf(path: object, **extra: Any) -> dict[str, Any]:
    return {
        "connector": SHELF_CONNECTOR,
        "extra_config": {"shared_storage_path": str(path), **PATIENT, **extra},
    }


def of_ranks(count: int) -> dict[str, Any]:
    """Return the arguments of an engine with so many tensor-parallel ranks, one on each core."""
    if count == 1:
        return {"core": 0}
    return {
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(count)))},
        "tensor_parallel_size": count,
        "distributed_executor_backend": "mp",
    }


def beside_example(
    shelf: object, folder: object, *, ours_first: bool, **extra: Any
) -> dict[str, Any]:
    """Return the arguments of an engine with vLLM's ExampleConnector beside kvshelf's.

    Parameters
    ----------
    shelf, folder : path
        Where kvshelf stores, and where the other one does.
    ours_first : bool
        Which of them vLLM asks first.
    **extra
        Further options of kvshelf.
    """
    connectors: list[dict[str, Any]] = [
        {
            "kv_connector": SHELF_CONNECTOR[0],
            "kv_connector_module_path": SHELF_CONNECTOR[1],
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(shelf), **extra},
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    ]
    return {
        "connector": _MULTI_CONNECTOR,
        "extra_config": {"connectors": connectors if ours_first else connectors[::-1]},
        # vLLM looks for it at the parent only.
        "transfer": {"kv_load_failure_policy": "recompute"},
    }


#: 23 blocks of 128 tokens, 384 tokens a step: requests wait for each other and are preempted.
_SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 384, "max_model_len": 2816}

#: Arguments of every engine that tests know by name, see :class:`Engine`.
ENGINES: dict[str, Callable[[Places], dict[str, Any]]] = {
    "inert": lambda at: {"model": at.model, "connector": INERT_CONNECTOR, "core": 0, **_SMALL},
    "on_shelf": lambda at: {"model": at.model, **_on_shelf(at.shelf), "core": 1, **_SMALL},
    # Its caches are taken for those of a device whose streams run behind.
    "beside_device": lambda at: {
        "model": at.model,
        **_on_shelf(at.shelf),
        "connector": ("ConnectorBesideADevice", "tests.vllm.device_connector"),
        "core": 1,
    },
    "doomed": lambda at: {"model": at.model, **_on_shelf(at.shelf), "core": 0},
    "second": lambda at: {
        "model": at.copied_model,
        **_on_shelf(at.shelf),
        "core": 0,
        "enable_lora": True,
    },
    "third": lambda at: {
        "model": at.model,
        **_on_shelf(at.own),
        "core": 1,
        "heed_permissions": True,
    },
    "chatting": lambda at: {
        "model": at.model,
        **_on_shelf(at.shelf, save_decode=True),
        "core": 0,
        "enable_prefix_caching": False,
    },
}


class Engines:
    """All engines of the session, forked by one server.

    Each is started when it is first asked for, and waited for when it is given a command.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._started: dict[str, Engine] = {}
        self._forks = ForkServer(places.root / "logs" / "fork server.log", engine_environment())

    def __getitem__(self, name: str) -> Engine:
        """Return the engine, started."""
        return self._started.get(name) or self.start(name, **ENGINES[name](self.places))

    def start(self, name: str, **arguments: Any) -> Engine:
        """Start an engine that no other test knows; see :class:`Engine`."""
        cores = sorted(os.sched_getaffinity(0))
        arguments["core"] = cores[arguments.get("core", 0) % len(cores)]
        log = self.places.root / "logs" / f"{name}.log"
        engine = Engine(log=log, forks=self._forks, **arguments)
        self._started.setdefault(name, engine)
        return engine

    def on_shelf(
        self, name: str, shelf: object, config: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Engine:
        """Start an engine on a shelf, by default with the session's model.

        `config` are further options of the connector; the others are those of :meth:`start`.
        """
        given = {"model": self.places.model, **_on_shelf(shelf, **(config or {}))}
        return self.start(name, **(given | arguments))

    def stop_all(self) -> None:
        """Stop the engines; those that tests have stopped already are left alone."""
        for engine in self._started.values():
            engine.stop(at_once=True)
        self._forks.stop()
