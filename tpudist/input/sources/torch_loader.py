"""Source for PyTorch's data loaders, whose tensors are read without a copy.

PyTorch is not a dependency. It is imported only if your program passes an object of PyTorch.
"""

import base64
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import State, read_count
from tpudist.input.sources import iterable


class TorchSource(iterable.IterableSource):
    """The elements of a `torch.utils.data.DataLoader` as batches.

    A `StatefulDataLoader` of torchdata has its own state. For other loaders, batches are counted
    and read again to resume, with the state of the random generator at the start of the pass.
    """

    def __init__(self, loader: Any):
        super().__init__(loader)
        self._loader = loader
        self.name = f"{type(loader).__name__} of PyTorch"
        self.plan = {"kind": "batches of a PyTorch DataLoader"}
        sampler = type(getattr(loader, "sampler", None)).__name__
        # The second one belongs to an IterableDataset, which PyTorch does not shuffle.
        if sampler not in ("SequentialSampler", "_InfiniteConstantSampler"):
            # Processes compare their plans, so this finds out before the first step if they would
            # shuffle differently.
            # As text: some readers of JSON round integers of 64 bits.
            self.plan["seed"] = str(_generator(loader).initial_seed())

    def _open(self) -> "_StatefulPass | _CountedPass":
        if hasattr(self._loader, "load_state_dict"):  # a StatefulDataLoader
            return _StatefulPass(self._loader)
        return _CountedPass(self._loader)

    def _skip_pass(self) -> None:
        _draw(self._loader)

    def elements(self, pass_number: int, state: State | None = None) -> iterable.Elements:
        """See `IterableSource.elements`."""
        if state is None or "iterator" not in state:
            return super().elements(pass_number, state)
        if state.get("ended"):
            # The next pass continues with the random numbers after this one.
            self._open().end_at(state["iterator"])
        # The state has the random numbers of its pass, so no earlier passes need to be opened.
        return iterable.Elements(self, state)


class _StatefulPass(Iterator[PyTree]):
    """A pass through a loader that has its own state."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> PyTree:
        self._iterator = self._iterator or iter(self._loader)
        return as_numpy(next(self._iterator))

    def get_state(self) -> State:
        generator = _generator(self._loader).get_state()
        loader = None if self._iterator is None else self._loader.state_dict()
        return {"loader": _encode_state(loader), "generator": _encode_state(generator)}

    def set_state(self, state: State) -> None:
        self._iterator = None
        if state["loader"] is not None:  # None: at its beginning, where it draws an order
            self._loader.load_state_dict(_decode_state(state["loader"]))
            self._iterator = iter(self._loader)
        # `iter` of torchdata has drawn from the generator, so the next pass would differ.
        _generator(self._loader).set_state(_decode_state(state["generator"]))

    def end_at(self, state: State) -> None:
        """Moves the loader to the end of the pass of `state`."""
        self.set_state(state)
        for _ in self:
            pass


class _CountedPass(Iterator[PyTree]):
    """A pass through a loader without a state, whose batches are counted."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._generator_at_start: Any = None  # state of the generator before the first batch
        self._iterator: Iterator[Any] | None = None
        self._num_taken = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._generator_at_start = _generator(self._loader).get_state()
            self._iterator = iter(self._loader)
            for _ in range(self._num_taken):
                next(self._iterator)
        element = next(self._iterator)
        self._num_taken += 1
        return as_numpy(element)

    def get_state(self) -> State:
        generator = self._generator_at_start
        if self._iterator is None:
            generator = _generator(self._loader).get_state()
        return {"batches": self._num_taken, "generator": _encode_state(generator)}

    def set_state(self, state: State) -> None:
        self._num_taken = read_count(state, "batches")
        _generator(self._loader).set_state(_decode_state(state["generator"]))
        self._iterator = None

    def end_at(self, state: State) -> None:
        """Moves the random generator to the end of the pass of `state`."""
        self.set_state(state)
        _draw(self._loader)


def _draw(loader: Any) -> None:
    """Draws the random numbers of a pass, in the order of PyTorch: a worker seed, then the order.

    No batches are read.
    """
    import torch  # type: ignore[import-not-found]

    # PyTorch draws the worker seed from the loader's own generator, not from the sampler's.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    for _ in loader.batch_sampler or loader.sampler:
        pass


def convert_output(transform: Callable[[Any], PyTree] | None) -> Callable[[Any], PyTree]:
    """Returns `transform` (or the identity) with NumPy arrays in place of tensors."""

    def transform_to_numpy(record: Any) -> PyTree:
        return as_numpy(record if transform is None else transform(record))

    return transform_to_numpy


def as_numpy(element: PyTree) -> PyTree:
    """Replaces tensors by NumPy arrays, which share the memory of tensors on the CPU.

    Raises:
        TypeError: If a tensor is not dense.
    """
    return jax.tree.map(_to_numpy, element)


def _to_numpy(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(
            f"A batch of the PyTorch DataLoader holds a tensor that is not dense: {value.layout}. "
            "Devices hold only dense arrays: convert it, such as with to_dense() or "
            "torch.nn.utils.rnn.pad_sequence."
        )
    tensor = value.detach().cpu()
    if tensor.dtype is torch.bfloat16:  # a dtype that `Tensor.numpy` does not support
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    # Conjugation and negation are lazy in PyTorch, and `numpy` refuses such tensors.
    return tensor.resolve_conj().resolve_neg().numpy()


def _generator(loader: object) -> Any:
    """Returns the random generator that shuffles a loader."""
    import torch  # type: ignore[import-not-found]

    # A sampler or loader of your own may have no such attribute.
    own = getattr(getattr(loader, "sampler", None), "generator", None)
    return own or getattr(loader, "generator", None) or torch.default_generator


_TENSOR = "tensor in base64"


def _encode_state(state: object) -> Any:
    """Returns a state as values of JSON; tensors as text, never pickled."""
    if isinstance(state, dict):
        return {key: _encode_state(x) for key, x in state.items()}
    if isinstance(state, list | tuple):
        return [_encode_state(x) for x in state]
    array = _to_numpy(state)
    if isinstance(array, np.ndarray):
        text = base64.b64encode(array.tobytes()).decode()
        return {_TENSOR: text, "dtype": str(array.dtype), "shape": list(array.shape)}
    return state


def _decode_state(encoded: object) -> Any:
    if isinstance(encoded, list):
        return [_decode_state(x) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TENSOR not in encoded:
        return {key: _decode_state(x) for key, x in encoded.items()}
    import torch  # type: ignore[import-not-found]

    array = np.frombuffer(base64.b64decode(encoded[_TENSOR]), encoded["dtype"])
    return torch.from_numpy(array.reshape(encoded["shape"]).copy())
