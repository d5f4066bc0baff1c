"""PyTorch's data loaders, whose tensors are read where they are, without a copy."""

import base64
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import read_count
from tpudist.input.sources import iterable


class TorchSource(iterable.IterableSource):
    """The elements of a `torch.utils.data.DataLoader` as batches.

    A `StatefulDataLoader` of torchdata is asked where it is. Of others the batches are counted, and
    read again to come back to the same place, with the random numbers that the pass began with.
    """

    def __init__(self, source: Any):
        """Wraps a loader."""
        super().__init__(source)
        self.name = f"{type(source).__name__} of PyTorch"
        self.plan = {"kind": "batches of a PyTorch DataLoader"}
        sampler = type(getattr(source, "sampler", None)).__name__
        if sampler not in ("SequentialSampler", "_InfiniteConstantSampler"):
            # So that processes that would shuffle differently are found out before they train.
            self.plan["seed"] = str(_generator(source).initial_seed())

    def _open(self) -> Iterator[PyTree]:
        if hasattr(self._source, "load_state_dict"):
            return _StatefulPass(self._source)
        return _CountedPass(self._source)

    def _skip_pass(self) -> None:
        _draw(self._source)

    def elements(self, pass_number: int, state: Any = None) -> iterable.Elements:
        """The batches of one pass, after those that `state` counts."""
        if state is None or "iterator" not in state:
            return super().elements(pass_number, state)
        if state.get("ended"):  # the next pass goes on with the random numbers after this one
            self._open().end_at(state["iterator"])  # type: ignore[attr-defined]
        return iterable.Elements(self, state)  # it says itself with which seeds it began


class _StatefulPass(Iterator[PyTree]):
    """A pass through a loader that keeps its state itself."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> PyTree:
        self._iterator = self._iterator or iter(self._loader)
        return as_numpy(next(self._iterator))

    def get_state(self) -> Any:
        generator = _generator(self._loader).get_state()
        told = None if self._iterator is None else self._loader.state_dict()
        return {"loader": _encode_state(told), "generator": _encode_state(generator)}

    def set_state(self, state: Any) -> None:
        self._iterator = None
        if state["loader"] is not None:  # else it is at its beginning, and draws an order there
            self._loader.load_state_dict(_decode_state(state["loader"]))
            self._iterator = iter(self._loader)
        # torchdata leaves it elsewhere, so that the next pass would differ
        _generator(self._loader).set_state(_decode_state(state["generator"]))

    def end_at(self, state: Any) -> None:
        """Leaves the loader as it is at the end of the pass of `state`."""
        self.set_state(state)
        for _ in self:
            pass


class _CountedPass(Iterator[PyTree]):
    """A pass through a loader that knows nothing of where it is, counted."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._before: Any = None
        self._iterator: Iterator[Any] | None = None
        self._num_given = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._before = _generator(self._loader).get_state()
            self._iterator = iter(self._loader)
            for _ in range(self._num_given):
                next(self._iterator)
        element = next(self._iterator)
        self._num_given += 1
        return as_numpy(element)

    def get_state(self) -> Any:
        """How many batches it gave, and the state that the random generator began with."""
        before = _generator(self._loader).get_state() if self._iterator is None else self._before
        return {"batches": self._num_given, "generator": _encode_state(before)}

    def set_state(self, state: Any) -> None:
        self._num_given = read_count(state, "batches")
        _generator(self._loader).set_state(_decode_state(state["generator"]))
        self._iterator = None

    def end_at(self, state: Any) -> None:
        """Leaves the random generator as it is at the end of the pass of `state`."""
        self.set_state(state)
        _draw(self._loader)


def _draw(loader: Any) -> None:
    """Draws what a pass would: a seed for workers, and an order of the examples."""
    import torch  # type: ignore[import-not-found]

    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    for _ in loader.batch_sampler or loader.sampler:
        pass


def convert_output(transform: Callable[[Any], PyTree] | None) -> Callable[[Any], PyTree]:
    """What `transform` makes of an example, or the example, with arrays for tensors."""

    def transform_to_numpy(record: Any) -> PyTree:
        return as_numpy(record if transform is None else transform(record))

    return transform_to_numpy


def as_numpy(element: PyTree) -> PyTree:
    """The same with arrays for tensors, which share their memory where NumPy knows their dtype.

    Raises:
        TypeError: A tensor is not dense.
    """
    return jax.tree.map(_array, element)


def _array(value: Any) -> Any:
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
    if tensor.dtype is torch.bfloat16:  # NumPy does not know it by itself
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.resolve_conj().resolve_neg().numpy()


def _generator(loader: Any) -> Any:
    """What a loader takes its random numbers from."""
    import torch  # type: ignore[import-not-found]

    own = getattr(getattr(loader, "sampler", None), "generator", None)
    return own or getattr(loader, "generator", None) or torch.default_generator


_TENSOR = "tensor in base64"


def _encode_state(state: Any) -> Any:
    """A state in the words of JSON: tensors as texts, never pickled."""
    if isinstance(state, dict):
        return {key: _encode_state(x) for key, x in state.items()}
    if isinstance(state, list | tuple):
        return [_encode_state(x) for x in state]
    array = _array(state)
    if isinstance(array, np.ndarray):
        text = base64.b64encode(array.tobytes()).decode()
        return {_TENSOR: text, "dtype": str(array.dtype), "shape": list(array.shape)}
    return state


def _decode_state(written: Any) -> Any:
    if isinstance(written, list):
        return [_decode_state(x) for x in written]
    if not isinstance(written, dict):
        return written
    if _TENSOR not in written:
        return {key: _decode_state(x) for key, x in written.items()}
    import torch  # type: ignore[import-not-found]

    array = np.frombuffer(base64.b64decode(written[_TENSOR]), written["dtype"])
    return torch.from_numpy(array.reshape(written["shape"]).copy())
