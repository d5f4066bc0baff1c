"""What each primitive does with padded rows: the trusted base of the rows' exactness."""

from tpudist.programs.rows.evaluator import Rule
from tpudist.programs.rows.rules import (
    collective_rules,
    convolution_rules,
    elementwise_rules,
    indexing_rules,
    kernel_rules,
    matrix_rules,
    microbatch_rules,
    nesting_rules,
    reduction_rules,
    replica_rules,
    shaping_rules,
)

_ALL: dict[str, Rule] = {
    **elementwise_rules.RULES,
    **shaping_rules.RULES,
    **reduction_rules.RULES,
    **convolution_rules.RULES,
    **indexing_rules.RULES,
    **matrix_rules.RULES,
    **nesting_rules.RULES,
    **collective_rules.RULES,
    **microbatch_rules.RULES,
    **kernel_rules.RULES,
    **replica_rules.RULES,
}


def rule_of(primitive: str) -> Rule | None:
    """The rule of a primitive, by its name; None if it has none."""
    return _ALL.get(primitive)
