"""References to the Variables that a replica function assigns inside nested transformations of JAX.

A value that `jax.grad`, `lax.scan` or `lax.cond` computes can leave it only as a result. A
reference (`jax.new_ref`) that was created outside can be written there. So in such a function each
of these Variables is a reference while the function is traced, and its last value is an output.
Tracing finds out which Variables they are: see `ReplicaFrame.set`. No other program has references.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from tpudist.context.protocols import VariableLike
from tpudist.programs import references, replica_agreement


class VariableReferences:
    """The references of one trace, by Variable."""

    def __init__(self):
        self._refs: dict[Any, Any] = {}

    def make(self, variables: Iterable[Any], values: Mapping[Any, jax.Array]) -> None:
        """Creates references for the `variables` that have a value. Call it before the function.

        The order matters: `check_references` recognizes references by their number in the program.
        """
        self._refs = {v: jax.new_ref(values[v]) for v in variables if v in values}

    @property
    def variables(self) -> list[Any]:
        """The Variables that are references, in the order in which the references were created."""
        return list(self._refs)

    def __contains__(self, variable: object) -> bool:
        return variable in self._refs

    def read(self, variable: VariableLike) -> jax.Array:
        """Returns the current value of a Variable."""
        return self._refs[variable][...]

    def write(self, variable: VariableLike, value: jax.Array) -> None:
        """Assigns `value` to a Variable.

        Raises:
            RuntimeError: If called inside `jax.vmap`.
        """
        try:
            self._refs[variable][...] = value
        except Exception as error:
            self.raise_if_of_vmap(error, [variable])
            raise

    def raise_if_of_vmap(self, error: Exception, variables: Iterable[VariableLike] = ()) -> None:
        """Raises a clear error if `error` is JAX's complaint about a reference in `jax.vmap`."""
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
    """Raises for Variables whose references do not behave in JAX as the Python code says.

    The program of the `proof` creates the references of `variables` first, in this order.

    Raises:
        RuntimeError: If the program uses a reference where JAX computes code twice, or reads it in
            the condition of a loop.
    """
    for lost in proof.lost_references:
        # References have the numbers of their creation in the program, where Variables come first.
        if lost.number >= len(variables):
            continue  # a reference that the user's code creates
        where = f" (at {lost.where})" if lost.where else ""
        name = variables[lost.number].name
        if lost.place.startswith("the condition"):
            raise RuntimeError(
                f"Variable '{name}' is read in '{function_name}' in {lost.place}{where}. JAX would "
                "show the condition the value from before the loop in every iteration. Carry the "
                "value through the loop, and read that in the condition."
            )
        # Both are names of the primitive, in different versions of JAX.
        place = "jax.checkpoint" if lost.place in ("checkpoint", "remat2") else lost.place
        raise RuntimeError(
            f"Variable '{name}', which '{function_name}' assigns in a nested JAX transformation, "
            f"is read or assigned inside {place}{where}. JAX may compute that code again for the "
            "gradients, or in another form: the variable would be assigned twice, or read with a "
            "wrong value. Read the variable before and pass the value; return the new value, and "
            f"assign it outside {place}."
        )
