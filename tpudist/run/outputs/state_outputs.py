"""Relates the outputs of a trace to the state that they replace."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tpudist.lowering import compile
from tpudist.options import ALL_COLLECTIONS
from tpudist.programs import accumulation, jaxprs, replica_agreement, unchanged_keys
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run import trace_warnings
from tpudist.run.arguments.inputs import positions
from tpudist.run.outputs import drift_finder, returned_state, state_collections
from tpudist.run.outputs.output_placement import OutputPlacement
from tpudist.run.outputs.results import CallOutputs, LeafKind
from tpudist.run.replica_call import ReplicaCall
from tpudist.values.drift import Drift


@dataclasses.dataclass(frozen=True, eq=False)
class StateOutputs:
    """The outputs of one trace, as new values of state.

    Attributes:
        closed: The program of one replica.
        num_variables: Number of inputs that are Variables and captured values, the first ones.
        labels: Returns the names of the flat arguments.
    """

    call: ReplicaCall
    found: CallOutputs
    closed: jaxprs.ClosedJaxpr
    num_variables: int
    labels: Callable[[], list[str]]

    def _leaf_outputs(self) -> dict[int, tuple[int, int]]:
        """Returns the outputs that are new NNX arrays: the leaf, and the input it replaces."""
        if self.call.binding is None:
            return {}
        flat = positions(self.call.binding.values())
        first = self.found.num_results + len(self.found.variables)
        return {
            first + n: (i, self.num_variables + flat[i][j])
            for n, (i, j) in enumerate(self.found.nnx)
        }

    def find_replaced(self, returned: Mapping[int, int]) -> dict[int, int]:
        """Returns the outputs that are new state, without Variables, and the inputs they replace.

        `returned` is the result of `place_collections`.
        """
        state = {o: self.num_variables + k for o, k in returned.items()}
        return state | {o: source for o, (_, source) in self._leaf_outputs().items()}

    def find_averaged_state(
        self,
        returned: Mapping[int, int],
        aggregated: Mapping[ReduceOp | None, Sequence[int]],
    ) -> dict[int, int]:
        """Returns the new state that is averaged over replicas, with the inputs it replaces.

        A replica without rows leaves such state unchanged. Running statistics are an example. NNX's
        averages are not: their totals and counts are summed.
        """
        state = self.find_replaced(returned) | self._find_collections()
        averaged = set(aggregated.get(ReduceOp.MEAN, ()))
        return {o: i for o, i in state.items() if o in averaged}

    def find_not_summed(self) -> frozenset[int]:
        """Returns the leaves of NNX's averages to which the function does more than add.

        The caller traces again with these in `call.not_sums`. That ends, because the set only
        grows.
        """
        call, binding = self.call, self.call.binding
        if binding is None or not binding.summed or call.whole:
            return frozenset()
        rules, parts = dict(call.rules), call.inputs.parts_of_objects
        leaves_and_arrays = zip(self._leaf_outputs().items(), self.found.nnx, strict=True)
        return frozenset(
            i
            for (output, (i, source)), leaf_and_array in leaves_and_arrays
            if binding.is_average(i)
            and i not in call.not_sums
            and leaf_and_array not in parts
            and binding.aggregation(i, rules) is VariableAggregation.SUM
            and accumulation.replaces_state(self.closed, output, source)
        )

    def _find_collections(self) -> dict[int, int]:
        """Returns the results that are parts of collections, with the inputs they replace."""
        inputs = self.call.inputs
        paths = state_collections.paths_of(self.found.treedef)
        results = {
            output: paths[i]
            for i, (kind, output) in enumerate(self.found.result)
            if kind is LeafKind.ARRAY and i in paths
        }
        names, first = self.labels(), self.num_variables + inputs.num_nnx
        arguments = {i: names[leaf] for i, leaf in enumerate(inputs.leaves_of_arguments, first)}
        replaced = state_collections.find_replaced(results, arguments, dict(self.call.rules))
        before = [(x.shape, x.dtype) for x in self.closed.in_avals]
        after = [(x.shape, x.dtype) for x in self.closed.out_avals]
        return {o: i for o, i in replaced.items() if after[o] == before[i]}

    def find_drifting(
        self,
        program: compile.ReplicaProgram,
        proof: replica_agreement.Agreement,
        returned: Mapping[int, int],
        stacked: Sequence[bool],
    ) -> dict[int, Drift]:
        """Returns the outputs that replace equal state and differ; see `drift_finder`."""
        replaced = {i: self.num_variables + k for i, k in returned.items() if stacked[i]}
        rules = dict(self.call.rules)
        if not replaced or self.call.whole or ALL_COLLECTIONS in rules:
            return {}
        names, leaves = self.labels(), self.call.inputs.leaves_of_arguments
        num_nnx = self.call.inputs.num_nnx
        names_of_inputs = {
            self.num_variables + k: names[leaves[k - num_nnx]]
            for k in returned.values()
            if k >= num_nnx
        }
        drifting = drift_finder.find_drifting(
            self.closed,
            replaced,
            stacked,
            proof.causes,
            names_of_inputs,
            self.call.name,
            program.stacked,
        )
        return {
            i: x
            for i, x in drifting.items()
            if rules.get(state_collections.collection_of(x.leaf, rules) or "") != "none"
        }

    def place_collections(
        self, proof: replica_agreement.Agreement, placement: OutputPlacement
    ) -> dict[int, int]:
        """Places state in plain pytrees that the function returns; extends `placement`.

        Returns:
            The outputs that are such state, each with the number of its input after the Variables.

        Raises:
            ValueError: If parameters or optimizer state would differ between replicas.
        """
        call, inputs, rules = self.call, self.call.inputs, dict(self.call.rules)
        returned, not_gradients = returned_state.find_returned_outputs(
            self.found, call.structure, inputs, self.closed, self.num_variables
        )
        if call.strategy.num_replicas_in_sync == 1 or call.whole or ALL_COLLECTIONS in rules:
            return returned
        stacked = placement.stacked
        outputs = {i: o for i, (kind, o) in enumerate(self.found.result) if kind is LeafKind.ARRAY}
        others = [i for i, o in outputs.items() if stacked[o] and o not in returned]
        by_path = state_collections.find_collections(self.found.treedef, others, rules)
        names_of_outputs = {outputs[i]: label for i, label in by_path.items()}
        if returned:
            names, leaves = self.labels(), inputs.leaves_of_arguments
            names_of_outputs |= {o: names[leaves[k - inputs.num_nnx]] for o, k in returned.items()}
        if rules:
            self._warn_of_unknown_rules(rules)
        dtypes = [x.dtype for x in self.closed.out_avals]
        state_collections.place_collections(
            proof, names_of_outputs, not_gradients, dtypes, rules, call.name, placement
        )
        return returned

    def _warn_of_unknown_rules(self, rules: Mapping[str, str]) -> None:
        binding = self.call.binding
        labels = [
            *self.labels(),
            *(kind.__name__ for kind in (binding.types if binding is not None else ())),
            *state_collections.paths_of(self.found.treedef).values(),
        ]
        if text := state_collections.describe_unknown(rules, labels, self.call.name):
            # At each trace: other shapes may come with other names.
            trace_warnings.warn_once([trace_warnings.TraceWarning(UserWarning, text)], set())

    def keep_unchanged_keys(
        self,
    ) -> tuple[jaxprs.ClosedJaxpr, frozenset[int]]:
        """Returns the program with the random keys of NNX that nothing has changed, unfolded.

        Each replica folds its number into the keys at the start. A key that the function does not
        change must leave as it came, and is then equal on all replicas.

        Returns:
            The program, and the outputs that are such keys.
        """
        binding = self.call.binding
        keys = {
            output: source
            for output, (leaf, source) in self._leaf_outputs().items()
            if binding is not None and binding.is_random_key(leaf)
        }
        closed, kept = unchanged_keys.keep_unchanged_keys(self.closed, keys)
        return closed, frozenset(kept)
