"""What each input of a compiled step is to its user: its name, and what it is for."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from tpudist.lowering import compile
from tpudist.run.arguments import call_description
from tpudist.run.arguments.call_arguments import Call
from tpudist.run.step import Step
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.xla.estimate.memory import InputLeaf

# Of plain pytrees only names tell what they are: those of Optax's states and of common models.
_OPTIMIZER_WORDS = frozenset({"opt", "optimizer", "mu", "nu", "trace", "momentum", "adam"})
_PARAMETER_WORDS = frozenset({"params", "parameters", "param", "weights", "kernel", "embedding"})


def inputs_of(
    step: Step, now: Call, donated: Sequence[Any], kept: Sequence[Any], batches: frozenset[int]
) -> list[InputLeaf]:
    """The flat inputs of a lowered step, in the program's order: the overwritten ones first.

    JAX leaves out of the program those that it does not use; see `select_used`.

    Args:
        step: The step.
        now: The call that it was lowered for.
        donated: The inputs that are overwritten.
        kept: The others.
        batches: Ids of the arrays that are parts of a batch.
    """
    assert step.plan is not None, "it has been lowered"
    arrays = step.plan.merge_inputs(donated, kept)
    named = [
        *_roles_of_captured(step),
        *_roles_of_objects(now, step),
        *_roles_of_arguments(step, now),
    ]
    assert len(named) == len(arrays), (len(named), len(arrays))

    def leaf(name: str, role: str, x: Any, overwritten: bool) -> InputLeaf:
        role = "batch" if id(x) in batches else role
        where = getattr(x, "sharding", None) or step.mesh.replicated
        x = x if hasattr(x, "shape") else compile.shape_of(x)  # a Python number
        return InputLeaf(name, role, tuple(x.shape), x.dtype, where, overwritten)

    # Names come in the order of the step: captured, objects, arguments. The program has another,
    # for JAX donates whole arguments: first all that is overwritten, then all that is kept.
    return [
        leaf(*named[i], arrays[i], k < len(donated))
        for k, i in enumerate((*step.plan.donated, *step.plan.kept))
    ]


def select_used(text: str, inputs: Sequence[InputLeaf], num_donated: int) -> list[InputLeaf]:
    """Those of `inputs` that the program of this HLO text has, in its order.

    Its parameters are named as those of the Python function that `Step` gives to `jax.jit`.
    """
    entry = text[text.rfind("\nENTRY ") :]
    found: dict[int, int] = {}
    for line in entry.splitlines():
        match = re.search(r" parameter\((\d+)\),.*op_name=\"(donated|kept)_arrays\[(\d+)\]\"", line)
        if match:
            offset = 0 if match[2] == "donated" else num_donated
            found[int(match[1])] = offset + int(match[3])
    number = len(re.findall(r" parameter\(\d+\)", entry))
    if sorted(found) != list(range(number)):  # names were lost: they can be told if all are there
        return list(inputs) if number == len(inputs) else []
    return [inputs[found[i]] for i in sorted(found)]


def _roles_of_captured(step: Step) -> list[tuple[str, str]]:
    found = []
    for v in step.captured:
        if not isinstance(v, Variable):
            role = "batch" if v.on_read else "other"
        elif v.trainable:
            role = "parameters"
        else:
            role = "optimizer state" if v.name.startswith("optimizer") else "other"
        found.append((v.name, role))
    return found


def _roles_of_objects(now: Call, step: Step) -> list[tuple[str, str]]:
    if now.binding is None:
        return []
    names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
    names = [names[i] for i in step.kinds_of_leaves.objects]
    found = []
    binding = now.binding
    for i, (path, value) in enumerate(zip(binding.paths, binding.values(), strict=True)):
        name = ".".join([names[path[0]], *map(str, path[1:])])
        role = nnx_contents.role_of(binding.variables[i])
        inside = jax.tree_util.tree_flatten_with_path(value)[0]
        found += [(name + jax.tree_util.keystr(rest), role) for rest, _ in inside]
    return found


def _roles_of_arguments(step: Step, now: Call) -> list[tuple[str, str]]:
    names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
    kinds, leaves = step.kinds_of_leaves, now.leaves()
    found = []
    for i in kinds.dynamic:
        if i in kinds.states:
            found += [
                (names[i] + path, nnx_contents.role_of(variable))
                for path, variable in nnx_contents.variables_of_state(leaves[i])
            ]
        else:
            found.append((names[i], "batch" if i in kinds.per_replica else _guess_role(names[i])))
    for i in range(len(step.groups.sizes) if step.groups else 0):
        found += [(f"real rows of batch {i}", "other"), (f"all real rows of batch {i}", "other")]
    return found


def _guess_role(name: str) -> str:
    """What an array of a plain pytree is for, if its name tells."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & _OPTIMIZER_WORDS:
        return "optimizer state"
    return "parameters" if words & _PARAMETER_WORDS else "other"
