"""Damaged states of iterators: an error before anything is read, and the iterator stays."""

import copy
import json

import jax
import numpy as np
import pytest

import tpudist
from tpudist import NumpyDataset
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.options import PartialBatch
from tpudist.xla.mesh import make_mesh

MISSING = object()
NO_COUNT = (None, -1, "x", [], {}, 1.5, True)


class Loader:
    """Batches whose iterators have a state; counts the iterators."""

    def __init__(self):
        self.num_opened = 0

    def __iter__(self):
        self.num_opened += 1
        return Batches()


class Batches:
    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number > 8:
            raise StopIteration
        return np.arange(8) + 8 * self.number

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def distribute(kind, loader):
    mesh = make_mesh(jax.devices()[:2])
    numbers = NumpyDataset(np.arange(40)).batch(8)
    match kind:
        case "numbers":
            return tpudist.DistributedDataset(numbers, mesh)
        case "loader":
            return tpudist.DistributedDataset(loader, mesh)
        case "parts":
            feed = WholeBatches([Rebatched(numbers, 2, PartialBatch.PAD)], mesh)
            return tpudist.DistributedDataset(feed, mesh)
        case "function":
            strategy = tpudist.MirroredStrategy(jax.devices()[:2])
            return strategy.distribute_datasets_from_function(lambda _: loader)


SIZES, OF_LOADER = ("source", "sizes by shape"), ("source", "dataset")
OF_FUNCTION = ("source", "datasets", 0, 0)
DAMAGES = {
    "numbers": [
        (("ended",), (None, "x", 1)),
        (("source",), (None, "x", 7, [])),
        (("step",), (*NO_COUNT, 0, 2, 4)),
        (("source", "batches"), (*NO_COUNT, 2, 4, MISSING)),
    ],
    "loader": [
        (("step",), (*NO_COUNT, 0, 4)),
        (SIZES, (None, "x", [], {}, {"int32[rows]": 7}, {"int32[rows]": -1})),
        (("source", "global batch size"), (*NO_COUNT, 7, MISSING)),
        (OF_LOADER, (None, "x", [], {}, 7, MISSING)),
        ((*OF_LOADER, "batches"), (*NO_COUNT, 2, MISSING)),
        *(((*OF_LOADER, key), NO_COUNT) for key in ("opened", "since", "checksum")),
        ((*OF_LOADER, "since"), (4,)),
        ((*OF_LOADER, "iterator"), (MISSING,)),
    ],
    "function": [
        (SIZES, (None, "x", [], {}, {"int32[rows]": 7})),
        (OF_FUNCTION, (None, "x", [], {}, 7)),
        ((*OF_FUNCTION, "batches"), (*NO_COUNT, MISSING)),
        ((*OF_FUNCTION, "checksum"), NO_COUNT),
    ],
    "parts": [
        (OF_FUNCTION, (None, "x", [], {}, 7)),
        ((*OF_FUNCTION, "before"), ("x", [], {}, 7, MISSING)),
        ((*OF_FUNCTION, "before", "batches"), (*NO_COUNT, MISSING)),
        ((*OF_FUNCTION, "parts"), (*NO_COUNT, MISSING)),
    ],
}


def with_damage(state, path, value):
    state = copy.deepcopy(state)
    part = state
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    if value is MISSING:
        del part[path[-1]]
    return state


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_state_raises_before_anything_is_read(kind):
    iterator = iter(distribute(kind, Loader()))
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [str(jax.tree.leaves(x)) for x in iterator]
    loader = Loader()
    resumed = iter(distribute(kind, loader))
    for path, values in DAMAGES[kind]:
        for value in values:
            with pytest.raises(ValueError, match=r"The state is damaged: .* Use another state\."):
                resumed.set_state(with_damage(state, path, value))
    assert loader.num_opened == 0
    resumed.set_state(state)
    assert [str(jax.tree.leaves(x)) for x in resumed] == expected
