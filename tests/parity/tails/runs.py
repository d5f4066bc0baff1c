"""The programs, their datasets, and their numbers of replicas."""

import importlib
from typing import Any

import numpy as np

from .. import plain
from . import data

# Of each dataset that a program takes: its arrays, and whether it ends with the partial batch. One
# that does not has as many rows in that batch as in the others.
PROGRAMS: dict[str, list[tuple[tuple[np.ndarray, ...], bool]]] = {
    "weighted_loss": [((data.features, data.labels), True)],
    "mean_loss": [((data.features, data.targets), True)],
    "metrics": [((data.features, data.labels), True)],
    "batch_norm": [((data.images, data.labels), True)],
    "transformer": [((data.tokens,), True)],
    "contrastive": [((data.features, data.others), True)],
    "speech": [((data.frames, data.words), True)],
    "ranking": [((data.features, data.labels), True)],
    "classes": [((data.features, data.labels), True)],
    "semi_supervised": [
        ((data.features, data.labels), True),
        ((data.others,), False),
    ],
    "gan": [((data.others,), False), ((data.features,), True)],
    "moved_rows": [((data.frames, data.scores), True)],
    "statistics": [((data.features, data.labels), True)],
    "no_rows": [((data.features[:, :3],), True)],
}
# Replicas, rows of a batch and of the partial one: 7 of 12 rows are 3, 3, 1 and 0.
SPLITS = [(n, 8, tail) for n in (1, 2, 4) for tail in range(1, 8)] + [(4, 12, 7)]
# Of one row, which the first of two replicas gets.
SPLITS_OF = {"no_rows": [(2, 8, 1)]}


def key(num_replicas: int, batch: int, tail: int) -> str:
    return f"{tail} of {batch} rows on {num_replicas}"


def results(name: str, library: str, strategy: Any, dataset: Any, num_replicas: int) -> dict:
    """Returns the result of a program on each dataset, or the kind of its error, by `key`.

    Args:
        dataset: `dataset(strategy, arrays, batch)`.
    """
    found = {}
    for batch in sorted({b for n, b, _ in SPLITS_OF.get(name, SPLITS) if n == num_replicas}):
        found |= results_of_batch(name, library, strategy, dataset, num_replicas, batch)
    return found


def results_of_batch(
    name: str, library: str, strategy: Any, dataset: Any, num_replicas: int, batch: int
) -> dict:
    """`results` of the splits of batches of this size, by one program."""
    program = importlib.import_module(f".{name}_{library}", __package__).program(strategy, batch)
    found = {}
    for split in SPLITS_OF.get(name, SPLITS):
        if split[:2] != (num_replicas, batch):
            continue
        tail = split[2]
        datasets = [
            dataset(
                strategy, tuple(a[: batch + (tail if partial else batch)] for a in arrays), batch
            )
            for arrays, partial in PROGRAMS[name]
        ]
        try:
            found[key(*split)] = plain.plain(program(*datasets))
        except Exception as exception:
            message = f"{type(exception).__name__}: {exception}"
            found[key(*split)] = plain.error(exception) | {"message": message}
    return found


def parts(strategy: Any, value: Any) -> list[list]:
    """The value on each replica, also where it is equal on all of them."""
    found = [np.asarray(x) for x in strategy.experimental_local_results(value)]
    return [x.tolist() for x in found * (strategy.num_replicas_in_sync // len(found))]
