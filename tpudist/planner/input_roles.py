"""The user's name and the role (parameters, batch, ...) of each input of a compiled step."""

import re
from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from tpudist.lowering import compile
from tpudist.run.arguments import call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.step import Step
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.xla.array_attributes import sharding_of
from tpudist.xla.estimate.memory import InputLeaf

# Plain pytrees have no types that show roles, only names. These are from Optax's states and common
# models. A wrong guess only changes a label of the report.
_OPTIMIZER_WORDS = frozenset({"opt", "optimizer", "mu", "nu", "trace", "momentum", "adam"})
_PARAMETER_WORDS = frozenset(
    {"params", "parameters", "param", "weights", "weight", "kernel", "embedding", "model"}
)
_BATCH_WORDS = frozenset({"batch", "x", "y", "inputs", "tokens", "images", "labels", "targets"})


def inputs_of(
    step: Step,
    call: RunCall,
    donated: Sequence[ArrayLike],
    kept: Sequence[ArrayLike],
    batch_ids: frozenset[int],
) -> list[InputLeaf]:
    """Returns the flat inputs of a lowered step, in the order of the program: donated ones first.

    JAX removes unused inputs from the program; see `select_used`. The arrays with `batch_ids` are
    parts of a batch.
    """
    assert step.program.plan is not None, "lowering makes it"
    arrays = step.program.plan.merge_inputs(donated, kept)
    named = [
        *_roles_of_captured(step),
        *_roles_of_objects(step, call),
        *_roles_of_arguments(step, call),
    ]
    # Names and arrays come from different walks over the arguments. A new kind of argument must be
    # added to both, or every later input would have the name of another one.
    assert len(named) == len(arrays), (len(named), len(arrays))

    def leaf(name: str, role: str, x: ArrayLike, is_donated: bool) -> InputLeaf:
        # By identity: a `GlobalBatch` became arrays without a type of their own.
        role = "batch" if id(x) in batch_ids else role
        sharding = sharding_of(x) or step.mesh.replicated
        array = compile.shape_of(x) if isinstance(x, bool | int | float | complex) else x
        return InputLeaf(name, role, tuple(array.shape), array.dtype, sharding, is_donated)

    # Names are in the order of the step: captured, objects, arguments. The program has another
    # order, because JAX donates complete arguments: first all donated arrays, then all others.
    return [
        leaf(*named[i], arrays[i], k < len(donated))
        for k, i in enumerate((*step.program.plan.donated, *step.program.plan.kept))
    ]


def select_used(text: str, inputs: Sequence[InputLeaf], num_donated: int) -> list[InputLeaf]:
    """Returns the inputs that the program of an HLO text has, in the order of its parameters.

    The list is empty if the text does not show which inputs the program has.
    """
    # `Step` gives `jax.jit` a function of `donated_arrays` and `kept_arrays`, and XLA writes these
    # names into the metadata of the parameters. Unused inputs leave gaps in the numbers.
    entry = text[text.rfind("\nENTRY ") :]
    input_of_parameter: dict[int, int] = {}
    for line in entry.splitlines():
        # Lines such as `p.3 = f32[8,4]{1,0} parameter(3), sharding={...},
        # metadata={op_name="kept_arrays[5]"}`.
        match = re.search(r" parameter\((\d+)\),.*op_name=\"(donated|kept)_arrays\[(\d+)\]\"", line)
        if match:
            offset = 0 if match[2] == "donated" else num_donated
            input_of_parameter[int(match[1])] = offset + int(match[3])
    num_parameters = len(re.findall(r" parameter\(\d+\)", entry))
    if sorted(input_of_parameter) != list(range(num_parameters)):
        # Some parameters have lost their names. If none was removed, the order is the same. Else
        # the report shows sizes without names.
        return list(inputs) if num_parameters == len(inputs) else []
    return [inputs[input_of_parameter[i]] for i in sorted(input_of_parameter)]


def _roles_of_captured(step: Step) -> list[tuple[str, str]]:
    roles = []
    for v in step.traces.captured:
        if not isinstance(v, Variable):
            # A captured PerReplica, which usually is a batch, or an array.
            role = "batch" if v.on_read else "other"
        elif v.trainable:
            role = "parameters"
        else:
            role = "optimizer state" if v.name.startswith("optimizer") else "other"
        roles.append((v.name, role))
    return roles


def _roles_of_objects(step: Step, call: RunCall) -> list[tuple[str, str]]:
    if call.binding is None:
        return []
    names = call_description.names_of_leaves(call.fn, call.args, call.kwargs)
    names = [names[i] for i in step.signature.kinds.objects]
    roles = []
    binding = call.binding
    for i, (path, value) in enumerate(zip(binding.paths, binding.values(), strict=True)):
        name = ".".join([names[path[0]], *map(str, path[1:])])
        role = nnx_contents.role_of(binding.variables[i])
        inside = jax.tree_util.tree_flatten_with_path(value)[0]
        roles += [(name + jax.tree_util.keystr(rest), role) for rest, _ in inside]
    return roles


def _roles_of_arguments(step: Step, call: RunCall) -> list[tuple[str, str]]:
    names = call_description.names_of_leaves(call.fn, call.args, call.kwargs)
    kinds, leaves = step.signature.kinds, call.leaves()
    roles = []
    for i in kinds.dynamic:
        if i in kinds.states:
            roles += [
                (names[i] + path, nnx_contents.role_of(variable))
                for path, variable in nnx_contents.variables_of_state(leaves[i])
            ]
        else:
            roles.append((names[i], "batch" if i in kinds.per_replica else guess_role(names[i])))
    # Partial batches add two inputs per group of batches: the real rows of the replica, and of all.
    for i in range(len(step.signature.groups.sizes) if step.signature.groups else 0):
        roles += [(f"real rows of batch {i}", "other"), (f"all real rows of batch {i}", "other")]
    return roles


def guess_role(name: str) -> str:
    """Returns the role of an input with this name."""
    # Whole words of a path such as "opt_state[0].mu['kernel']", so that "nu" does not match "num".
    # The optimizer comes first, because its state repeats the names of the parameters.
    # The state of a batch normalization is not a batch.
    text = re.sub(r"batch_?(norm|stats)", "", name.lower())
    words = set(re.split(r"[^a-z]+", text))
    if words & _OPTIMIZER_WORDS:
        return "optimizer state"
    if words & _PARAMETER_WORDS:
        return "parameters"
    return "batch" if words & _BATCH_WORDS else "other"
