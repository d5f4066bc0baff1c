"""Variables that a replica function assigns inside of nested transformations of JAX.

A value that is made in `jax.grad`, `lax.scan` or `lax.cond` cannot leave it but as a result. A
reference (`jax.new_ref`) that was made outside can be written there, so in such a function each of
these Variables is one, for as long as the function is traced; its last value is an output. Which
ones they are is found by tracing: see `ReplicaFrame.set`. No other program has references.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from tpudist.context.protocols import VariableLike
from tpudist.programs import references, replica_agreement


class VariableReferences:
    """The references of one trace.

    Attributes:
        variables: Which Variables they stand for, in the order in which they were made.
    """

    def __init__(self):
        """None yet."""
        self._refs: dict[Any, Any] = {}

    def make(self, variables: Iterable[Any], values: Mapping[Any, jax.Array]) -> None:
        """Makes references of some Variables, before the function is called."""
        self._refs = {v: jax.new_ref(values[v]) for v in variables if v in values}

    @property
    def variables(self) -> list[Any]:
        """See the class."""
        return list(self._refs)

    def __contains__(self, variable: Any) -> bool:
        return variable in self._refs

    def read(self, variable: Any) -> jax.Array:
        """What a Variable holds now."""
        return self._refs[variable][...]

    def write(self, variable: VariableLike, value: jax.Array) -> None:
        """Makes a Variable hold `value`.

        Raises:
            RuntimeError: Inside of `jax.vmap`.
        """
        try:
            self._refs[variable][...] = value
        except Exception as error:
            self.explain(error, [variable])
            raise

    def explain(self, error: Exception, variables: Iterable[Any] = ()) -> None:
        """Says in words what JAX says of a reference inside of `jax.vmap`."""
        if self._refs and references.is_of_vmap(error):
            names = " or ".join(f"'{v.name}'" for v in variables or self._refs)
            raise RuntimeError(
                f"Variable {names} was assigned inside jax.vmap (which jax.hessian and jax.jacfwd "
                "also use), or was read there in a branch or loop and is assigned elsewhere. "
                "jax.vmap calls the function for all examples at once, but a variable has one "
                "value. Read the variable before and pass the value; return values from the mapped "
                "function, and assign the new value outside."
            ) from error


def check_references(
    proof: replica_agreement.Agreement, variables: list[Any], function_name: str
) -> None:
    """Refuses Variables where JAX does not do what the program says with their references.

    Args:
        proof: Of the program, in which the references of the Variables were made first.
        variables: Those, in that order.
        function_name: For messages.

    Raises:
        RuntimeError: There is one.
    """
    for lost in proof.lost_references:
        if lost.number >= len(variables):
            continue  # a reference of the user's own
        where = f" (at {lost.where})" if lost.where else ""
        name = variables[lost.number].name
        if lost.place.startswith("the condition"):
            raise RuntimeError(
                f"Variable '{name}' is read in '{function_name}' in {lost.place}{where}. JAX would "
                "show the condition the value from before the loop in every iteration. Carry the "
                "value through the loop, and read that in the condition."
            )
        place = "jax.checkpoint" if lost.place in ("checkpoint", "remat2") else lost.place
        raise RuntimeError(
            f"Variable '{name}', which '{function_name}' assigns in a nested JAX transformation, "
            f"is read or assigned inside {place}{where}. JAX may compute that code again for the "
            "gradients, or in another form: the variable would be assigned twice, or read with a "
            "wrong value. Read the variable before and pass the value; return the new value, and "
            f"assign it outside {place}."
        )
