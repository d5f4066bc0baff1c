"""Raises for traced programs that must not run: replicas that could hang, and frozen state.

The checks need only the program and the proof; `output_placement` checks state that may differ.
"""

from tpudist.lowering import compile
from tpudist.programs import replica_agreement
from tpudist.state import nnx_contents
from tpudist.xla import descriptions


def check_hazards(proof: replica_agreement.Agreement, name: str) -> None:
    """Raises ValueError if replicas of the function `name` could wait for each other forever."""
    if proof.hazards:
        hazard = proof.hazards[0]
        where = f" (at {hazard.where})" if hazard.where else ""
        raise ValueError(
            f"'{name}' has a {hazard.collective} between replicas in a branch or loop{where} whose "
            f"condition depends on {hazard.cause}. Replicas with different conditions would wait "
            "for each other forever. Reduce the condition over the replicas first, or move the "
            "communication out. For a line search: tpudist.loss_of_all_rows(loss)."
        )


def check_constants(program: compile.ReplicaProgram, name: str, whole: bool) -> None:
    """Raises for a program with state or data as constants, which would never change.

    Args:
        whole: Whether the function is a `tpudist.function`, which is called without `run`.

    Raises:
        ValueError: If the function captures an NNX object or a large array.
    """
    for array in compile.constant_arrays(program):
        for variable in nnx_contents.holders_of(array):
            raise ValueError(
                f"'{name}' captures an NNX object: its {type(variable).__name__} "
                f"{descriptions.describe_array(array)} would be frozen into the program as a "
                "constant, and never change. Pass the object as an argument: "
                f"{descriptions.describe_call(name, 'model, ...', whole)}."
            )
    for array in compile.large_constants(program):
        raise ValueError(
            f"'{name}' captures an array {descriptions.describe_array(array)} of "
            f"{array.nbytes / 2**20:.1f} MiB, which would be frozen into the program as a "
            f"constant. Arrays above {compile.MAX_CONSTANT_BYTES / 2**20:.0f} MiB must be "
            f"passed as arguments: {descriptions.describe_call(name, 'array, ...', whole)}."
        )
