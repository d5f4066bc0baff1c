"""DatasetOfWorkers: a dataset that each worker of a strategy reads for itself."""

from collections.abc import Iterator
from operator import methodcaller
from typing import Any

from tpudist.context.closure_place import current_place


class DatasetOfWorkers:
    """A dataset that each worker creates with its own strategy.

    Args:
        method: Calls the method of a strategy that distributes the dataset.
    """

    def __init__(self, method: methodcaller):
        self._method = method

    def __call__(self) -> Any:
        """Returns the dataset of this worker."""
        place = current_place()
        assert place is not None, "create_per_worker_dataset calls it on workers"
        return self._method(place.session.strategy)

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(
            "A dataset of a ParameterServerStrategy was iterated over outside of its workers. Pass "
            "it to coordinator.create_per_worker_dataset(dataset), and pass the iterator of the "
            "result to the functions that you schedule."
        )


def distribute_on_worker(method: methodcaller) -> Any:
    """Returns the dataset of this worker; outside of workers, the dataset of all of them."""
    place = current_place()
    if place is not None and place.session is not None:
        return method(place.session.strategy)
    return DatasetOfWorkers(method)
