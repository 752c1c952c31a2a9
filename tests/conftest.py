"""Shared fixtures. Engines are started once a session and only by tests marked ``engine``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from specgram_lab import models

settings.register_profile("lab", deadline=None)  # beside an engine an example may take its time
settings.load_profile("lab")


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The converted target, fetched on first use."""
    return models.ensure("smollm2-135m")
