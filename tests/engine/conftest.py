"""Ray, which takes seconds to start: once for the tests of a file."""

import importlib.util

import pytest

from tpudist.engine.ray_engine import RayEngine


@pytest.fixture(scope="session")
def needs_ray():
    """Skips where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


@pytest.fixture(scope="module")
def running_ray(needs_ray):
    """An engine that has started Ray, which others use as they would use that of a program."""
    engine = RayEngine()
    engine.start()
    yield engine
    engine.shutdown()
