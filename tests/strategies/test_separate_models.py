"""A strategy of one process in a cluster of several warns: each process would train by itself."""

import json
import warnings

import pytest

import tpudist
from tpudist.cluster_resolver import separate_models

WORKERS = ["a:1", "b:2"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Resets the record of the warning: a new process has not warned yet."""
    monkeypatch.setattr(separate_models, "_has_warned", False)


def set_cluster(monkeypatch, cluster, task="worker"):
    config = {"cluster": cluster, "task": {"type": task, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


@pytest.mark.parametrize(
    "make",
    [
        tpudist.MirroredStrategy,
        tpudist.OneDeviceStrategy,
        tpudist.experimental.CentralStorageStrategy,
    ],
)
def test_it_warns_once_and_names_the_remedy(monkeypatch, make):
    set_cluster(monkeypatch, {"chief": ["a:1"], "worker": ["b:2"]}, "chief")
    with pytest.warns(UserWarning, match="TF_CONFIG names 2 processes") as caught:
        make()
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.startswith(f"{make.__name__} uses only devices of this process")
    assert "Use tpudist.MultiWorkerMirroredStrategy()" in message
    make()  # a second warning would be an error


@pytest.mark.parametrize(
    ("cluster", "task"),
    [
        ({"worker": ["a:1"]}, "worker"),
        ({"worker": WORKERS}, "evaluator"),
        ({"chief": ["a:1"], "worker": WORKERS, "ps": ["d:4"]}, "chief"),
        ({"worker": []}, "worker"),  # not valid, and not needed
    ],
)
def test_one_worker_an_evaluator_and_parameter_servers_are_not_warned_of(
    monkeypatch, cluster, task
):
    set_cluster(monkeypatch, cluster, task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpudist.MirroredStrategy()


def test_connected_processes_are_not_warned_of(monkeypatch):
    set_cluster(monkeypatch, {"worker": WORKERS})
    monkeypatch.setattr(separate_models.jax.distributed, "is_initialized", lambda: True)
    tpudist.MirroredStrategy()
