"""Counts the work of a step: the FLOPs of its matrix multiplications, as its program was written.

The count is of the jaxpr, before any compiler: multiplications and additions of `dot_general` and
convolutions, loops by their lengths, of both halves of a gradient. What `jax.checkpoint` computes a
second time is no work (JAX names such operations "rematted_computation"), so a step does not look
busier for computing more again; what a custom derivative repeats by itself is counted, unless it
says so by the same name. Nor is a product that only moves values. Attention counts what a causal
mask throws away, as the usual formula 12 * layers * width * length does.

A Pallas kernel counts what it says of itself (`cost_estimate`), else its body as often as its grid
says. Its gradient is another kernel, which repeats parts of it at will: it counts twice the kernel.
"""

import math
from typing import Any

import numpy as np

from tpudist.programs import jaxprs

# `jax.named_scope`s of products that are no work: JAX's own, and those of
# models/parts/embedding.py and models/parts/rotary.py.
_NO_WORK = ("rematted_computation", "in_place_of_")


def model_flops(closed: Any, num_replicas: int) -> tuple[float, tuple[str, ...]]:
    """FLOPs of all replicas, and what could not be counted, one sentence each.

    Args:
        closed: The jaxpr of one replica, whole over the axes inside of it.
        num_replicas: How many replicas there are.
    """
    counter = _Counter()
    flops = counter.count(closed.jaxpr, "")
    return flops * num_replicas, tuple(dict.fromkeys(counter.notes))


class _Counter:
    def __init__(self):
        self.notes: list[str] = []

    def count(self, jaxpr: Any, where: str) -> float:
        """FLOPs of a jaxpr; `where` are the names of the transformations that it is in."""
        return sum(self._count_equation(eqn, where) for eqn in jaxpr.eqns)

    def _count_equation(self, eqn: Any, where: str) -> float:
        where = f"{where}/{eqn.source_info.name_stack}"
        if any(name in where for name in _NO_WORK):
            return 0.0
        if eqn.primitive.name == "dot_general":
            return _dot(eqn)
        if eqn.primitive.name == "conv_general_dilated":
            return _convolution(eqn)
        structure = jaxprs.structure_of(eqn)
        if structure is None:
            return 0.0
        if isinstance(structure, jaxprs.Kernel):
            return self._count_kernel(structure, where)
        if isinstance(structure, jaxprs.Scan):
            return structure.length * self.count(structure.body, where)
        if isinstance(structure, jaxprs.While):
            body = self.count(structure.body, where)
            if body:
                self.notes.append(
                    "Model FLOPs count a while loop, whose length is not known, as one iteration."
                )
            return body
        if isinstance(structure, jaxprs.Cond):
            return max(self.count(branch, where) for branch in structure.bodies)
        if isinstance(structure, jaxprs.Call):
            return structure.copies * self.count(structure.body, where)
        if isinstance(structure, jaxprs.Unknown):
            self.notes.append(f"Model FLOPs count the contents of {structure.reason} once.")
        return sum(self.count(body, where) for body in structure.bodies)

    def _count_kernel(self, kernel: jaxprs.Kernel, where: str) -> float:
        if "transpose(" in where:
            return 0.0  # counted with the kernel that it is the gradient of
        flops = kernel.flops
        if flops is None:
            if kernel.grid is None:
                self.notes.append(
                    "Model FLOPs omit a Pallas kernel: its grid is known only when it runs."
                )
                return 0.0
            flops = math.prod(kernel.grid) * self.count(kernel.body, where)
        return 3 * flops if "jvp(" in where else flops


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _convolution(eqn: Any) -> float:
    # Each output adds up products over the window and the input features of its group.
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    window = math.prod(np.take(kernel, numbers.rhs_spec[1:]).tolist())
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * window
