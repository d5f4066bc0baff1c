"""The steps of a `tf.data` pipeline that have an equivalent in `tpudist.NumpyDataset`."""

from __future__ import annotations

import dataclasses
import enum

import libcst as cst

from tpudist.port.analysis.program import Program

SLICES = "tensorflow.data.Dataset.from_tensor_slices"
ONE_ELEMENT = "tensorflow.data.Dataset.from_tensors"


class Stage(enum.IntEnum):
    """Position in a pipeline; each step requires one of these."""

    EXAMPLES = 1
    SHUFFLED = 2
    BATCHED = 3
    REPEATED = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a pipeline, with the name of the method and its arguments."""

    call: cst.Call
    method: str
    args: dict[str, cst.BaseExpression]


PARAMETERS = {
    "cache": ("filename",),
    "shuffle": ("buffer_size", "seed", "reshuffle_each_iteration"),
    "batch": ("batch_size", "drop_remainder", "num_parallel_calls", "deterministic"),
    "repeat": ("count",),
    "prefetch": ("buffer_size",),
    "shard": ("num_shards", "index"),
}


@dataclasses.dataclass
class Chain:
    """A pipeline: its first call, `repeat` if it repeats a single element, and its steps."""

    base: cst.Call
    repeat: cst.Call | None
    steps: list[Step]


def begin_chain(program: Program, root: cst.Call, calls: list[cst.Call]) -> Chain | None:
    """Returns the start of a chain; None if its data may not be arrays."""
    if len(root.args) != 1 or root.args[0].keyword is not None or root.args[0].star:
        return None
    if program.callee(root) == SLICES:
        return Chain(root, None, [])
    step = read_step(calls[0]) if calls else None
    # `from_tensors` has one element. Only `from_tensors(x).repeat(n)`, with equal rows, is a
    # dataset of arrays with n rows.
    if step is None or step.method != "repeat" or set(step.args) != {"count"}:
        return None
    if not _is_literal_element(root.args[0].value):
        return None
    if not isinstance(step.args["count"], cst.Name | cst.Integer):
        return None
    return Chain(root, step.call, [])


def advance(stage: Stage, step: Step) -> Stage | None:
    """Returns the stage after a step; None if tpudist has no such step."""
    args = step.args
    match step.method:
        case "cache" if stage is Stage.EXAMPLES and not args:
            return stage
        case "prefetch":
            return stage
        # After `shuffle`, the rows of a shard depend on the order, which differs here.
        case "shard" if stage in (Stage.EXAMPLES, Stage.BATCHED) and len(args) == 2:
            return stage
        # After `batch`, TensorFlow would shuffle whole batches, and with
        # reshuffle_each_iteration=False every epoch would have the same order. A NumpyDataset does
        # neither.
        case "shuffle" if stage is Stage.EXAMPLES and "buffer_size" in args:
            again = args.get("reshuffle_each_iteration")
            return Stage.SHUFFLED if again is None or _is_name(again, "True", "None") else None
        # A second `batch` would add a dim.
        case "batch" if stage < Stage.BATCHED and "batch_size" in args:
            return Stage.BATCHED
        # Before `batch`, a repetition would put rows of two epochs into one batch.
        case "repeat" if stage is Stage.BATCHED:
            return Stage.REPEATED
    return None


def arguments_of(step: Step) -> list[tuple[str, cst.BaseExpression]]:
    """Returns the arguments of a step; the name of a positional argument is empty."""
    args = step.args
    match step.method:
        case "shuffle":
            # A NumpyDataset always shuffles all rows, by a seed, so `buffer_size` goes.
            seed = args.get("seed")
            return [("seed", cst.Integer("0") if seed is None or _is_name(seed, "None") else seed)]
        case "batch":
            # The others change how TensorFlow computes a batch, not the result.
            rest = [("drop_remainder", args["drop_remainder"])] if "drop_remainder" in args else []
            return [("", args["batch_size"]), *rest]
        case "repeat":
            # In TensorFlow, no count, None and -1 all mean: endlessly.
            count = args.get("count")
            endless = count is None or _is_name(count, "None") or _is_minus_one(count)
            return [] if endless or count is None else [("", count)]
    return [("", value) for value in args.values()]


def read_step(call: cst.Call) -> Step | None:
    """Returns a call as a step of a pipeline; None if an argument is unknown."""
    assert isinstance(call.func, cst.Attribute)
    method = call.func.attr.value
    parameters = PARAMETERS.get(method)
    if parameters is None or any(arg.star for arg in call.args):
        return None
    args: dict[str, cst.BaseExpression] = {}
    for i, arg in enumerate(call.args):
        if arg.keyword is None and i >= len(parameters):
            return None
        name = arg.keyword.value if arg.keyword else parameters[i]
        if name == "name":  # the name in TensorFlow's graph
            continue
        if name not in parameters:
            return None
        args[name] = arg.value
    return Step(call, method, {name: args[name] for name in parameters if name in args})


def _is_literal_element(value: cst.BaseExpression) -> bool:
    """Returns whether a value is a number, a list of numbers, or a tuple of both."""
    if isinstance(value, cst.Tuple | cst.List):
        return all(
            isinstance(part, cst.Element)
            and not isinstance(part.value, cst.Tuple)
            and _is_literal_element(part.value)
            for part in value.elements
        )
    return isinstance(value, cst.Integer | cst.Float)


def repeat_rows(value: cst.BaseExpression, times: cst.BaseExpression) -> cst.BinaryOperation:
    """Returns `[value] * times`."""
    return cst.BinaryOperation(cst.List([cst.Element(value)]), cst.Multiply(), times)


def _is_name(value: cst.BaseExpression, *names: str) -> bool:
    return isinstance(value, cst.Name) and value.value in names


def _is_minus_one(value: cst.BaseExpression) -> bool:
    return (
        isinstance(value, cst.UnaryOperation)
        and isinstance(value.operator, cst.Minus)
        and isinstance(value.expression, cst.Integer)
        and value.expression.value == "1"
    )
