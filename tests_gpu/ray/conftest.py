"""One Ray cluster for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from harness.world.environment import VARIABLES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Actors see the checkout, and the variables that a world's ranks have."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
             runtime_env={"env_vars": VARIABLES | {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()
