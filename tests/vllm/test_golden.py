"""A real engine loads what earlier releases stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.engines import NEAR_TIE, Engine, assert_same
from tests.support.fleet import Reference
from tests.vllm.shelf_files import ShelfFiles

RELEASES = sorted(Path(__file__).parents[1].joinpath("golden").glob("v[0-9]*"))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_release_s_shelf_copied_into_place_is_loaded(
    engine: Engine, shelf: ShelfFiles, reference: Reference, release: Path
) -> None:
    prompt = json.loads((release / "prompt.json").read_text())
    engine.generate([3] * 300, max_tokens=1)  # so that the engine's namespace is there
    shelf.wait_stored([3] * 300)
    known = {folder.name for folder in Path(shelf.root).iterdir()}
    folder = next((f for f in (release / "shelf").iterdir() if f.name in known), None)
    if folder is None:
        pytest.skip(
            f"stored on {', '.join(prompt['machines'].values())}: this machine's attention kernel"
            " packs KV differently"
        )
    shutil.copytree(folder, Path(shelf.root) / folder.name, dirs_exist_ok=True)
    engine.reset_prefix_cache()
    answer = engine.generate(prompt["tokens"])
    assert answer.shelf_tokens == prompt["chunks"] * 256
    # Another processor may have computed it.
    assert_same(answer, reference(prompt["tokens"]), NEAR_TIE)
