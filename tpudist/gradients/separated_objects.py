"""Separates NNX objects into trained arrays and all others, so that a loss becomes a function.

`jax.lax.scan` and `jax.grad` need functions of arrays, but a loss receives and changes objects.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.state import nnx_contents
from tpudist.xla import descriptions

# Called with a model, a batch and more arguments; returns a scalar, or with aux a pair.
LossFunction: TypeAlias = Callable[..., Any]


class SeparatedObjects:
    """A model, and the NNX objects among the other arguments of a loss.

    Attributes:
        parameters: Trained values, as `jax.grad` accepts and returns them.
        others: The other arrays of the objects, which the loss may change.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        model: PyTree,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        wrt: nnx.filterlib.Filter,
    ):
        self._loss_fn, self._model = loss_fn, model
        self._rest, self._structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        self._positions = [i for i, x in enumerate(self._rest) if _is_object(x)]
        trained = nnx.filterlib.to_predicate(wrt)
        self._is_nnx = any(map(_is_object, jax.tree.leaves(model, is_leaf=_is_object)))
        objects = [self._rest[i] for i in self._positions]
        self._objects = (model if self._is_nnx else None, *objects)
        # Position 0 is the model: `wrt` selects only Variables of it, not of other arguments.
        self._filter = lambda path, x: path[0] == 0 and trained(path[1:], x)
        self._graphdef, parameters, self._others = self._split(self._objects)
        if self._is_nnx and not parameters:
            raise ValueError(
                "value_and_grad_in_microbatches found no Variable to train in "
                f"{type(model).__name__}: wrt={wrt!r} matches none. Pass a matching `wrt`."
            )
        # Gradients have the structure of the model, without its position among the objects.
        self.parameters = parameters[0] if self._is_nnx else jax.tree.map(jnp.asarray, model)
        self.others, self._treedef = jax.tree.flatten(self._others)
        self._unchanged: set[int] = set()

    def call(
        self, parameters: PyTree, others: list[jax.Array], batch: PyTree
    ) -> tuple[PyTree, list[jax.Array]]:
        """Calls the loss with these values; returns its result and the other arrays after it."""
        trained = nnx.State({0: parameters} if self._is_nnx else {})
        # The loss receives copies: values of this trace must not stay in the user's objects.
        # The leaves are read before `merge`: its objects share Variables with the state, so an
        # assignment by the loss would change both sides of the comparison below.
        trained_before = jax.tree.leaves(trained)
        copies = nnx.merge(self._graphdef, trained, self._treedef.unflatten(others))
        rest = list(self._rest)
        for i, copy in zip(self._positions, copies[1:], strict=True):
            rest[i] = copy
        args, kwargs = self._structure.unflatten(rest)
        result = self._loss_fn(copies[0] if self._is_nnx else parameters, batch, *args, **kwargs)
        graphdef, trained_after, left = self._split(copies)
        leaves, treedef = jax.tree.flatten(left)
        if graphdef != self._graphdef or treedef != self._treedef:
            raise ValueError(
                f"The loss of {_name(self._loss_fn)} changed the structure of an NNX object (an "
                "attribute that is not an array, or a Variable that was added or removed, as by "
                "sow). In microbatches, only the values of Variables can change."
            )
        pairs = zip(trained_before, jax.tree.leaves(trained_after), strict=True)
        if not all(x is y for x, y in pairs):
            raise ValueError(
                f"The loss of {_name(self._loss_fn)} assigns a Variable that is trained, so its "
                "value would be lost. Assign it after the gradients, or exclude it from wrt."
            )
        # By identity: the trace of a loss that does not assign returns the same tracer.
        self._unchanged = {i for i, (x, y) in enumerate(zip(others, leaves, strict=True)) if x is y}
        pairs = zip(leaves, self.others, strict=True)
        # A loop must carry the same dtypes, but an assignment may have changed one.
        return result, [x if x.dtype == y.dtype else jnp.asarray(x, y.dtype) for x, y in pairs]

    def update(self, others: list[jax.Array]) -> None:
        """Assigns the arrays after the last microbatch to the objects, except unchanged ones."""
        kept = [
            old if i in self._unchanged else new
            for i, (old, new) in enumerate(zip(self.others, others, strict=True))
        ]
        nnx.update(self._objects, self._treedef.unflatten(kept))

    def _split(self, objects: tuple[PyTree, ...]) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        graphdef, trained, others = nnx.split(objects, self._filter, ...)
        return graphdef, trained, others


def _is_object(x: object) -> bool:
    return isinstance(x, nnx_contents.OBJECT_TYPES)


def _name(function: LossFunction) -> str:
    return f"'{descriptions.name_of(function)}'"
