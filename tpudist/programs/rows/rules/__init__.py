"""The rules of the primitives on padded rows, by name. The exactness of results depends on them.

A rule receives an `Operation` and returns its padded results. It must keep the invariant of
`evaluator`: the leading corner of each result is the array of the real rows.
"""

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

_TABLES = (
    elementwise_rules.RULES,
    shaping_rules.RULES,
    reduction_rules.RULES,
    convolution_rules.RULES,
    indexing_rules.RULES,
    matrix_rules.RULES,
    nesting_rules.RULES,
    collective_rules.RULES,
    microbatch_rules.RULES,
    kernel_rules.RULES,
    replica_rules.RULES,
)
_ALL: dict[str, Rule] = {name: rule for table in _TABLES for name, rule in table.items()}
assert len(_ALL) == sum(map(len, _TABLES)), "a primitive has two rules"


def rule_of(primitive: str) -> Rule | None:
    """Returns the rule of a primitive; None if it has none."""
    return _ALL.get(primitive)
