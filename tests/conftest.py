"""Shared fixtures. Engines are started once a session and only by tests marked ``engine``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from specgram_lab import models

settings.register_profile("lab", deadline=None)  # beside an engine an example may take its time
settings.load_profile("lab")

if "PYTEST_XDIST_WORKER" in os.environ:  # engines run beside each other: one thread each, on whatever core is free
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with engines first; the others fill what is left at the end of a run with two workers."""
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The converted target, fetched on first use."""
    return models.ensure("smollm2-135m")
