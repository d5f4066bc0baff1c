"""Module paths that users may have written keep working, wherever the code moves."""

import importlib
import inspect
import subprocess
import sys

import pytest

import tpudist

# Modules that README, the guides, notebooks and docstrings tell people to import, each with what
# they find there.
PATHS = {
    "tpudist.checkpoint": ("Checkpoint", "CheckpointManager"),
    "tpudist.cluster_resolver": ("ClusterSpec", "TPUClusterResolver"),
    "tpudist.compat.v1": ("distribute",),
    "tpudist.compat.v1.distribute": ("MirroredStrategy", "experimental"),
    "tpudist.compat.v1.distribute.experimental": ("TPUStrategy",),
    "tpudist.errors": (
        "OutOfRangeError",
        "ProcessFailedError",
        "ProcessesDifferError",
        "StartupError",
    ),
    "tpudist.experimental": ("PreemptionCheckpointHandler", "partitioners"),
    "tpudist.input": ("explain", "from_files", "from_records"),
    "tpudist.keras": ("ModelState", "set_layout_map"),
    "tpudist.models": ("ConvNet", "MLP", "Transformer", "TransformerConfig", "next_token_nats"),
    "tpudist.planner": ("GlobalBatch", "Plan", "devices", "parse_topology", "search"),
    "tpudist.pytest_plugin": ("pytest_configure",),
    "tpudist.testing": ("assert_collectives", "assert_fits"),
    "tpudist.training": ("train", "evaluate", "make_train_step"),
    "tpudist.training.steps": ("make_train_step",),
    "tpudist.xla.topology": ("devices",),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_is_there(path):
    module = importlib.import_module(path)
    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


@pytest.mark.slow
def test_python_runs_the_package():
    command = [sys.executable, "-m", "tpudist", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(tpudist) == sorted(tpudist.__all__)


def test_what_people_meet_is_not_said_to_be_elsewhere():
    """A class in an error or a pickle is found where its module says it is."""
    for name in tpudist.__all__:
        value = getattr(tpudist, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert getattr(importlib.import_module(value.__module__), value.__name__) is value
