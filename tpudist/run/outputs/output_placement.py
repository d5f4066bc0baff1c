"""Decides for each output of a replica function whether it leaves as one array or one per replica.

State that replicas share must be equal on all of them, or be aggregated by its rule.
"""

import dataclasses

from tpudist.programs import replica_agreement
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run.frame.trace_requests import LocalState
from tpudist.run.outputs import divergence
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_call import ReplicaCall


@dataclasses.dataclass(eq=False)
class OutputPlacement:
    """The way in which each output of a trace leaves the replicas.

    Attributes:
        stacked: For each output, whether it differs and leaves with one part per replica.
        aggregated: Outputs that replicas combine at the end of the step, by reduction; None stands
            for the value of the first replica. These are not stacked.
    """

    stacked: list[bool]
    aggregated: dict[ReduceOp | None, list[int]] = dataclasses.field(default_factory=dict)

    def aggregate(self, output: int, op: ReduceOp | None) -> None:
        """Adds an output that replicas combine by `op`; None takes the first replica's value."""
        self.aggregated.setdefault(op, []).append(output)
        self.stacked[output] = False


def place_outputs(
    call: ReplicaCall, found: CallOutputs, proof: replica_agreement.Agreement
) -> OutputPlacement:
    """Returns the placement of all outputs; `proof` says which may differ, and why.

    Raises:
        ValueError: If state that replicas share would differ between them.
        LocalState: If NNX Variables must have one value per replica first.
    """
    num_replicas = call.strategy.replica_mesh.num_replicas
    placement = OutputPlacement([x and num_replicas > 1 for x in proof.differs])
    stacked = placement.stacked
    # In a function in cross-replica context, `run` has added up the shares of the replicas already.
    adds_shares = num_replicas > 1 and not call.whole
    refused: list[tuple[str, str, str]] = []
    # Outputs are results, then Variables, then NNX arrays. Results may differ: they stay stacked.
    first = len(stacked) - len(found.variables) - len(found.nnx)
    for k, v in enumerate(found.variables, first):
        if v.is_counted and adds_shares:
            placement.aggregate(k, ReduceOp.SUM)
        elif stacked[k] and not v.on_read:
            remedy = v.remedy or divergence.VARIABLE_REMEDY
            refused.append((f"Variable '{v.name}'", proof.describe_cause(k), remedy))
        stacked[k] = v.on_read  # a counted Variable is not ON_READ
    local = _place_leaves(call, found, proof, placement, adds_shares, refused)
    if refused:
        raise ValueError(divergence.describe_divergence(call.name, refused))
    if local and call.outer is None:
        raise LocalState(local)
    return placement


def _place_leaves(
    call: ReplicaCall,
    found: CallOutputs,
    proof: replica_agreement.Agreement,
    placement: OutputPlacement,
    adds_shares: bool,
    refused: list[tuple[str, str, str]],
) -> list[tuple[int, int]]:
    """Places the NNX leaves; returns the arrays that need one value per replica first."""
    local: list[tuple[int, int]] = []
    stacked, binding, rules = placement.stacked, call.binding, dict(call.rules)
    for k, (i, j) in enumerate(found.nnx, len(stacked) - len(found.nnx)):
        assert binding is not None, "the leaves belong to its objects"
        if (i, j) in call.inputs.parts_of_objects:
            stacked[k] = True
            continue
        rule = None if i in call.not_sums else binding.aggregation(i, rules)
        # Each replica has its own share of a sum, even if all shares are equal.
        shares = rule is VariableAggregation.SUM and adds_shares
        if not stacked[k] and not shares:
            continue
        if rule is VariableAggregation.NONE:
            local.append((i, j))
        elif rule is None:
            remedy = divergence.remedy_of(binding.types[i].__name__)
            refused.append((binding.name(i), proof.describe_cause(k), remedy))
        elif rule is VariableAggregation.ONLY_FIRST_REPLICA:
            placement.aggregate(k, None)
        else:
            placement.aggregate(k, ReduceOp.from_variable_aggregation(rule))
    return local
