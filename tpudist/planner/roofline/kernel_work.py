"""The work of a Pallas kernel before it is compiled, as `kernel_bodies` reads it afterward."""

import functools
import math

from tpudist.programs import elementwise, equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Cond, Kernel, Scan
from tpudist.xla.hlo.kernel_bodies import Block, KernelBody


@functools.lru_cache(maxsize=256)
def body_of(kernel: Kernel) -> KernelBody:
    """Returns the grid and the elementwise operations of a kernel, each of whose steps copies."""
    steps = float(math.prod(kernel.grid or ()))
    blocks = (Block(0.0, steps, in_vmem=True),) * kernel.num_blocks
    return KernelBody(steps, (), _vector_ops(kernel.body), 0, blocks, kernel.is_parallel)


def _vector_ops(program: jaxprs.Jaxpr) -> float:
    """Returns the elementwise operations of a program: of a conditional, those of one branch."""
    total = 0.0
    for eqn in program.eqns:
        if eqn.primitive.name in elementwise.ALL:
            shape = jaxprs.shape_of(eqn.outvars[0])
            total += math.prod(shape) if shape else 0
            continue
        structure = equation_layouts.structure_of(eqn)
        inner = [_vector_ops(x) for x in jaxprs.jaxprs_in(eqn.params)]
        if isinstance(structure, Cond):
            total += max(inner)
        else:
            total += sum(inner) * (structure.length if isinstance(structure, Scan) else 1)
    return total
