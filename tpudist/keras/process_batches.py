"""Several processes train one Keras model: each is given the whole batches, and places its rows.

Keras itself would take what each process has for a part of the batch, and let each initialise and
shuffle by numbers of its own. Here all have the same data, as under `tf.distribute`, and agree: on
the seed, on the order in which arrays are shuffled, and that they were given the same batches.
"""

import hashlib
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import tree

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals
from tpudist.processes import process_agreement
from tpudist.processes.process_agreement import Intention


def agree_on_seed(strategy: StrategyBase) -> None:
    """Sets Keras' random seed, if the program has not, to that of the first process.

    Raises:
        ValueError: Processes have set different seeds, or some have and others have not.
    """
    mesh = strategy.replica_mesh
    if not process_agreement.is_needed(mesh):
        return
    mine = keras_internals.random_seed()
    intention = Intention(f"Keras in the scope of {strategy!r}")
    texts = process_agreement.exchange(mesh, intention, f"{mine} {secrets.randbits(31)}")
    seeds = [text.split()[0] for text in texts]
    if len(set(seeds)) > 1:
        found = ", ".join(f"{s} in process {i}" for i, s in zip(mesh.processes, seeds, strict=True))
        raise ValueError(
            f"The processes have different Keras random seeds ({found}), and would make different "
            "models. Call keras.utils.set_random_seed with the same number in all processes, or in "
            "none."
        )
    if mine is None:
        keras.utils.set_random_seed(int(texts[0].split()[1]))


def require_order(strategy: StrategyBase, arguments: Mapping[str, Any]) -> None:
    """Refuses what `fit` would shuffle in a way that processes cannot agree on.

    Raises:
        ValueError: A PyDataset: the numbers are drawn in a thread.
    """
    is_numbered = isinstance(arguments.get("x"), keras.utils.PyDataset)
    if (
        is_numbered
        and arguments.get("shuffle", True)
        and process_agreement.is_needed(strategy.replica_mesh)
    ):
        raise ValueError(
            "A PyDataset was passed in several processes with shuffle=True, and each process would "
            "shuffle it independently. Pass shuffle=False, and shuffle its items by a seed in "
            "on_epoch_end."
        )


def iterate(strategy: StrategyBase, adapter: Any) -> Iterator[Any]:
    """The host batches of an epoch, which are the same in all processes.

    Raises:
        ProcessesDifferError: They are not; or the data of some process end earlier.
    """
    batches = adapter.get_jax_iterator()
    mesh = strategy.replica_mesh
    if not process_agreement.is_needed(mesh):
        yield from batches
        return
    name = type(adapter).__name__
    state = hashlib.sha256(repr(np.random.get_state(legacy=False)).encode()).hexdigest()
    facts = {"data": name, "batches": str(adapter.num_batches)}
    texts = process_agreement.exchange(mesh, Intention("an epoch of Keras", facts), state)
    if len(set(texts)) > 1:  # else all draw the same numbers, and those of a single process
        batches = _draw_from(np.random.RandomState(int(texts[0][:8], 16)), iter(batches))
    is_array = keras_internals.is_of_arrays(adapter)
    for number, batch in enumerate(batches):
        if number == 0 or not is_array:
            agree_on_batch(strategy, batch, f"batch {number} of an epoch of Keras")
        yield batch
    process_agreement.agree(mesh, Intention("the end of an epoch of Keras"))


def agree_on_batch(strategy: StrategyBase, batch: Any, what: str = "a batch of Keras") -> None:
    """Compares a host batch with that of the other processes.

    Raises:
        ProcessesDifferError: They are different: in shapes, dtypes or values.
    """
    mesh = strategy.replica_mesh
    if process_agreement.is_needed(mesh):
        leaves = [np.asarray(x) for x in tree.flatten(batch) if hasattr(x, "__array__")]
        facts = {f"array {i}": _describe(x) for i, x in enumerate(leaves)}
        process_agreement.agree(mesh, Intention(what, facts))


def _describe(x: np.ndarray) -> str:
    # Through bytes, as dtypes of JAX's own, such as bfloat16, give no buffer.
    checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data)
    return f"{x.dtype}{list(x.shape)} of checksum {checksum:08x}"


def _draw_from(generator: np.random.RandomState, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, made with a random state of their own in place of NumPy's."""
    while True:
        users = np.random.get_state()
        np.random.set_state(generator.get_state())
        try:
            batch = next(batches, None)
        finally:
            generator.set_state(np.random.get_state())
            np.random.set_state(users)
        if batch is None:
            return
        yield batch
