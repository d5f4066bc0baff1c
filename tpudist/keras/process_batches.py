"""Makes several processes train one Keras model: all have the same batches and random numbers.

Keras itself would treat the data of each process as a part of the batch, and each process would
initialize and shuffle with its own random numbers. Here all processes pass the same data, as under
`tf.distribute`. They agree on the seed and on the order of shuffled arrays, and compare their
batches. Each process places its own rows; see `uneven_rows`.
"""

import hashlib
import pickle
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np
from keras import tree

from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals
from tpudist.keras.keras_internals import Batch
from tpudist.options.member_names import format_values
from tpudist.processes import process_agreement
from tpudist.processes.process_agreement import Intention


def agree_on_seed(strategy: StrategyBase) -> None:
    """Sets Keras' random seed to a number of the first process, if the program has set none.

    Raises:
        ValueError: If processes have set different seeds, or only some have set one.
    """
    mesh = strategy.replica_mesh
    if not process_agreement.is_needed(mesh):
        return
    own = keras_internals.random_seed()
    intention = Intention(f"Keras in the scope of {strategy!r}")
    # Format: the own seed or "None", and a proposal, as in "None 1804289383". The proposal of the
    # first process counts. 31 bits fit all generators that Keras seeds.
    answers = process_agreement.exchange(mesh, intention, f"{own} {secrets.randbits(31)}")
    seeds = [answer.split()[0] for answer in answers]
    if len(set(seeds)) > 1:
        found = format_values("process", dict(zip(mesh.processes, seeds, strict=True)))
        raise ValueError(
            f"The processes have different Keras random seeds ({found}), and would make different "
            "models. Call keras.utils.set_random_seed with the same number in all processes, or in "
            "none."
        )
    if own is None:
        keras.utils.set_random_seed(int(answers[0].split()[1]))


def require_order(strategy: StrategyBase, arguments: Mapping[str, Any]) -> None:
    """Checks that the processes can agree on the order of the data of `fit`.

    Raises:
        ValueError: If `fit` would shuffle a PyDataset, which draws random numbers in a thread.
    """
    if (
        isinstance(arguments.get("x"), keras.utils.PyDataset)
        and arguments.get("shuffle", True)
        and process_agreement.is_needed(strategy.replica_mesh)
    ):
        raise ValueError(
            "A PyDataset was passed in several processes with shuffle=True, and each process would "
            "shuffle it independently. Pass shuffle=False, and shuffle its items by a seed in "
            "on_epoch_end."
        )


def iterate(strategy: StrategyBase, adapter: Any) -> Iterator[Batch]:
    """Yields the host batches of an epoch, the same in all processes.

    Args:
        strategy: Strategy of the model.
        adapter: Keras' source of the batches.

    Raises:
        ProcessesDifferError: If batches differ, or the data of some process end earlier.
    """
    batches = adapter.get_jax_iterator()
    mesh = strategy.replica_mesh
    if not process_agreement.is_needed(mesh):
        yield from batches
        return
    name = type(adapter).__name__
    # NumPy's generator draws the order of arrays. Not its `repr`, which depends on print options.
    own_state = hashlib.sha256(pickle.dumps(np.random.get_state(legacy=False))).hexdigest()
    facts = {"data": name, "batches": str(adapter.num_batches)}
    states = process_agreement.exchange(mesh, Intention("an epoch of Keras", facts), own_state)
    # Equal generators are left as they are, so that the order equals that of a single process.
    if len(set(states)) > 1:
        # 8 hexadecimal digits, because a seed of RandomState has 32 bits.
        batches = _draw_from(np.random.RandomState(int(states[0][:8], 16)), iter(batches))
    # Slices of equal arrays in an agreed order are equal, so the first batch is enough to compare.
    is_sliced = keras_internals.is_of_arrays(adapter)
    for number, batch in enumerate(batches):
        if number == 0 or not is_sliced:
            agree_on_batch(strategy, batch, f"batch {number} of an epoch of Keras")
        yield batch
    # A process whose data end earlier would otherwise leave the others waiting in a collective of
    # the next step, with no error that names the cause.
    process_agreement.agree(mesh, Intention("the end of an epoch of Keras"))


def agree_on_batch(
    strategy: StrategyBase, batch: Batch, description: str = "a batch of Keras"
) -> None:
    """Compares a host batch with the batches of the other processes.

    Raises:
        ProcessesDifferError: If shapes, dtypes or values differ.
    """
    mesh = strategy.replica_mesh
    if process_agreement.is_needed(mesh):
        # Sparse tensors are not compared.
        leaves = [np.asarray(x) for x in tree.flatten(batch) if is_dense(x)]
        facts = {f"array {i}": _describe(x) for i, x in enumerate(leaves)}
        process_agreement.agree(mesh, Intention(description, facts))


def _describe(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape)} of checksum {checksum(x):08x}"


def checksum(array: np.ndarray | jax.Array, start: int = 0) -> int:
    """Returns a checksum of the values of an array, continued from the checksum of others."""
    # A view of bytes, because arrays with dtypes of JAX, such as bfloat16, have no buffer.
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, start)


def _draw_from(generator: np.random.RandomState, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches, drawn with `generator` instead of NumPy's global generator."""
    while True:
        global_state = np.random.get_state()
        np.random.set_state(generator.get_state())
        try:
            batch = next(batches, None)
        finally:
            generator.set_state(np.random.get_state())
            np.random.set_state(global_state)
        if batch is None:  # the end: a batch is never None
            return
        yield batch


def is_dense(value: object) -> bool:
    """Returns whether NumPy can convert a leaf of a batch: sparse tensors have no `__array__`."""
    return hasattr(value, "__array__")
