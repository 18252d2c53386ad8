"""What all tests share: a clean environment and hypothesis' settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Timing belongs to `make bench`: on a busy machine a deadline would fail at random.
settings.register_profile(
    "kvshelf", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvshelf")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own settings out of the tests, and the tests out of the user's cache.

    KVSHELF_OPS stays: with it the whole suite can be run on one implementation.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("KVSHELF_") and name != "KVSHELF_OPS":
                patch.delenv(name)
        patch.setenv("KVSHELF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
