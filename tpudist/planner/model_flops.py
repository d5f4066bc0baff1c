"""Model FLOPs of a step: the work of its matrix multiplications, as the program was written.

The count reads the jaxpr, before any compiler: multiplications and additions of `dot_general` and
convolutions in the forward and the backward pass, with loops by their lengths. Zeros of padding and
of dilated gradients are not operations.

Not counted: operations that `jax.checkpoint` computes again (JAX names them
"rematted_computation"), so that rematerialization does not look like more work; products that only
move values; products whose results are not used, and repetitions of a product, because XLA removes
both. Counted: operations that a custom derivative repeats under another name; and the
part of attention that a causal mask discards, as in the formula 12 * layers * width * length.

A Pallas kernel counts its `cost_estimate`, else its body times the size of its grid. Its gradient
is another kernel, which may repeat parts of the first; it counts twice the kernel. A kernel in a
`jax.jvp` without a backward pass counts as with one, because both have the same names.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from tpudist.planner import branch_shares
from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Kernel, Scan, Unknown, While
from tpudist.xla.estimate.flops import valid_positions
from tpudist.xla.hardware import chips
from tpudist.xla.hlo.choices import Shares

# Parts of `jax.named_scope`s whose products do not count: JAX's name of rematerialization, and the
# names in models/parts/embedding.py and models/parts/rotary.py for products that move values.
_SCOPES_WITHOUT_WORK = ("rematted_computation", "in_place_of_")


def model_flops(
    closed: jaxprs.ClosedJaxpr, num_replicas: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Returns the FLOPs of all replicas, and a sentence for each part that could not be counted.

    The FLOPs are by the kind of the numbers that are multiplied; see `chips.kind_of_products`.

    Args:
        closed: Jaxpr of one replica, with arrays that are not split over the axes inside it.
        num_replicas: Number of replicas.
    """
    counter = _Counter(branch_shares.find(closed).branches)
    written = jaxprs.open_jaxpr(closed)
    used, _ = partial_eval.dce_jaxpr(written, [True] * len(written.outvars))
    flops = counter.count(used, "")
    return dict(flops.times(num_replicas)), tuple(dict.fromkeys(counter.notes))


def count(jaxpr: jaxprs.Jaxpr) -> float:
    """Returns the FLOPs of a program, such as the body of a kernel."""
    return _Counter().count(jaxpr, "").total()


class _Flops(dict[str, float]):
    """FLOPs by kind."""

    @classmethod
    def sum(cls, parts: Iterable["_Flops"]) -> "_Flops":
        total = cls()
        for part in parts:
            for kind, flops in part.items():
                total[kind] = total.get(kind, 0.0) + flops
        return total

    def total(self) -> float:
        return sum(self.values())

    def times(self, factor: float) -> "_Flops":
        return _Flops({kind: factor * flops for kind, flops in self.items()})


class _Counter:
    def __init__(self, shares: Mapping[int, Shares] | None = None):
        self._shares = shares or {}
        self.notes: list[str] = []

    def count(self, jaxpr: jaxprs.Jaxpr, name_stack: str) -> _Flops:
        """Returns the FLOPs of a jaxpr; `name_stack` names the transformations around it."""
        # The first of equal equations computes the results of the others.
        originals: dict[Any, Any] = {}
        counted: dict[Any, bool] = {}
        parts = []
        for eqn in jaxpr.eqns:
            key = _key_of(eqn, originals)
            flops = _Flops() if counted.get(key) else self._count_equation(eqn, name_stack)
            parts.append(flops)
            if key is not None:
                counted[key] = counted.get(key, False) or bool(flops)
                first = originals.setdefault(key, eqn.outvars)
                originals.update(zip(eqn.outvars, first, strict=True))
        return _Flops.sum(parts)

    def _count_equation(self, eqn: Any, name_stack: str) -> _Flops:
        name_stack = f"{name_stack}/{eqn.source_info.name_stack}"
        if any(name in name_stack for name in _SCOPES_WITHOUT_WORK):
            return _Flops()
        if eqn.primitive.name in PRODUCTS:
            kind = chips.kind_of_products(map(bits_of, eqn.invars[:2]))
            # A product of complex numbers has four of real ones.
            is_complex = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
            return _Flops({kind: (4 if is_complex else 1) * PRODUCTS[eqn.primitive.name](eqn)})
        structure = equation_layouts.structure_of(eqn)
        if structure is None:
            return _Flops()
        if isinstance(structure, Kernel):
            return self._count_kernel(structure, name_stack)
        if isinstance(structure, Scan):
            return self.count(structure.body, name_stack).times(structure.length)
        if isinstance(structure, While):
            body = self.count(structure.body, name_stack)
            if body.total():
                self.notes.append(
                    "Model FLOPs count a while loop, whose length is not known, as one iteration."
                )
            return body
        if isinstance(structure, Cond):
            # If it is not known which branch runs, the one with the most work counts.
            branches = [self.count(branch, name_stack) for branch in structure.bodies]
            if shares := self._shares.get(len(branches)):
                return _Flops.sum(map(_Flops.times, branches, shares))
            return max(branches, key=_Flops.total)
        if isinstance(structure, Call):
            # `copies` counts the devices of a `shard_map`, whose body has the shapes of one device.
            return self.count(structure.body, name_stack).times(structure.copies)
        if isinstance(structure, Unknown):
            counts = "count once" if structure.bodies else "omit"
            self.notes.append(f"Model FLOPs {counts} the contents of {structure.reason}.")
        return _Flops.sum(self.count(body, name_stack) for body in structure.bodies)

    def _count_kernel(self, kernel: Kernel, name_stack: str) -> _Flops:
        # Names of JAX's transformations in the name stack: "jvp(" is the forward pass of a
        # derivative, and "transpose(" the backward pass.
        if "transpose(" in name_stack:
            return _Flops()  # counted with the kernel whose gradient it is: 1 + 2 below
        if kernel.flops is not None:
            # The estimate does not say which kinds of numbers the kernel multiplies; its body does.
            flops = _Counter().count(kernel.body, name_stack)
            total = flops.total()
            flops = flops.times(kernel.flops / total) if total else _Flops(bf16=kernel.flops)
        elif kernel.grid is None:
            self.notes.append(
                "Model FLOPs omit a Pallas kernel: its grid is known only when it runs."
            )
            return _Flops()
        else:
            flops = self.count(kernel.body, name_stack).times(math.prod(kernel.grid))
        # A product of the forward pass has two in the backward pass: one per operand.
        return flops.times(3) if "jvp(" in name_stack else flops


def _key_of(eqn: Any, originals: Mapping[Any, Any]) -> Any:
    """Returns an equal key for equations with equal results; None for those with effects."""
    if eqn.effects or equation_layouts.structure_of(eqn) is not None:
        return None
    operands = [
        _key_of_literal(x) if jaxprs.is_literal(x) else originals.get(x, x) for x in eqn.invars
    ]
    key = eqn.primitive, tuple(operands), tuple(sorted(eqn.params.items()))
    try:
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key


def _key_of_literal(x: Any) -> Any:
    # Not its text, which leaves out the dtype, and the middle of a large array.
    return x.aval.shape, x.aval.dtype, np.asarray(jaxprs.literal_value(x), x.aval.dtype).tobytes()


def bits_of(operand: Any) -> tuple[int, bool]:
    """Returns the bits of an element of an operand, and whether it is a float."""
    dtype = operand.aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits, False
    return 8 * dtype.itemsize, True


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _product_of_rows(eqn: Any) -> float:
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * eqn.invars[0].aval.shape[-1]


def _convolution(eqn: Any) -> float:
    # Each output adds up products over the window and the input features of its group. Positions in
    # the padding, and in the holes of a dilated array, are not products: the gradient of a strided
    # convolution is one with holes. The specs are (batch or features, features, *window).
    numbers = eqn.params["dimension_numbers"]
    left, kernel = (eqn.invars[i].aval.shape for i in (0, 1))
    out = eqn.outvars[0].aval.shape
    valid = 1
    for dim, (stride, padding, left_dilation, right_dilation) in enumerate(
        zip(
            eqn.params["window_strides"],
            eqn.params["padding"],
            eqn.params["lhs_dilation"],
            eqn.params["rhs_dilation"],
            strict=True,
        )
    ):
        valid *= valid_positions(
            left[numbers.lhs_spec[2 + dim]],
            kernel[numbers.rhs_spec[2 + dim]],
            out[numbers.out_spec[2 + dim]],
            stride=stride,
            padding=padding[0],
            lhs_dilate=left_dilation,
            rhs_dilate=right_dilation,
        )
    batch, features = (out[dim] for dim in numbers.out_spec[:2])
    return 2.0 * batch * features * kernel[numbers.rhs_spec[1]] * valid


def _group_dot(eqn: Any) -> float:
    # Every row of the operand belongs to one group. If rows are contracted (the gradient of the
    # matrices), each row contributes to the result of one group only.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left = eqn.invars[0].aval.shape
    products = math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    is_contracted = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return 2.0 * products / (eqn.invars[2].aval.shape[-1] if is_contracted else 1)


PRODUCTS = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "scaled_matmul_wrapper": _product_of_rows,
    "ragged_dot_general": _group_dot,
    "conv_general_dilated": _convolution,
}
