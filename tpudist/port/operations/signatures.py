"""Finds the specifications of arrays that TensorFlow itself reads."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.program import Program


def is_signature(program: Program, node: cst.CSTNode, depth: int = 0) -> bool:
    """Returns whether a specification stays: a signature, TensorFlow or nothing reads it."""
    for outer in program.around(node):
        if isinstance(outer, cst.Arg) and outer.keyword and "signature" in outer.keyword.value:
            return True
        if isinstance(outer, cst.Call) and program.callee(outer).startswith(
            ("tensorflow.data.", "tensorflow.function")
        ):
            return True
        if isinstance(outer, cst.Assign):
            name = outer.targets[0].target
            # A specification that goes through more than three names is rare; the limit also ends
            # recursion.
            if not isinstance(name, cst.Name) or depth > 3:
                return False
            reads = program.references(name)
            return not reads or any(is_signature(program, x, depth + 1) for x in reads)
        if isinstance(outer, cst.BaseStatement | cst.BaseSmallStatement):
            return False
    return False
