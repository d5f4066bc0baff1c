"""Options of `Strategy.run`."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from tpudist.options.messages import shorten, warn_if_given

# Name in `RunOptions.aggregation` that stands for all state in plain pytrees.
ALL_COLLECTIONS = ""

_AGGREGATIONS = ("none", "sum", "mean", "max", "min", "only_first_replica")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: how it compiles and calls a replica function.

    The `experimental_` fields come from `tf.distribute.RunOptions`; tpudist adds the others.

    Attributes:
        experimental_enable_dynamic_batch_size: Accepted for `tf.distribute`; False gives a warning.
            Partial batches are padded to one static shape and masked (see `PerReplica.rows`).
        experimental_bucketizing_dynamic_shape: Must stay False: shapes are static.
        experimental_xla_options: Compiler options by name, passed to XLA unchanged. Stored as
            pairs.
        donate_argnums: Positions of positional arguments whose arrays the call may overwrite. You
            must not use these arrays afterwards.
        static_argnums: Positions of positional arguments whose Python numbers become part of the
            program, as in `jax.jit`. The program is compiled once for each value. By default,
            integers and floats are arrays in the function, unless it turns out to need the Python
            number (for a shape, in `if` or `range`). Booleans are always static.
        donate_state: Whether the call may overwrite in place the old values of NNX objects and
            Variables that the function changes. Arrays that you read from them before the call are
            then deleted.
        aggregation: Rules that combine state in plain pytrees when it differs between replicas:
            a dict from the name of a collection to a `tpudist.VariableAggregation`, its name,
            `"max"`, `"min"`, or `"none"`, which keeps one value for each replica. The rules apply
            to state that the function takes as an argument and returns, such as Linen's
            collections, and to state that it returns under the name of a collection
            (`{"batch_stats": ...}`). An NNX Variable uses the name of its type
            (`{"MetricState": "max"}`). The default rule is `{"batch_stats": "mean"}`. State without
            a rule becomes a `PerReplica`. But if `params` or `opt_state` are returned next to an
            integer, such as the number of the step, they are a state, and raise an error if they
            differ. Without an integer they may be gradients, which are nested alike. The value
            `"none"` without a dict keeps one value for each replica of all such state, and of all
            NNX Variables that differ: these then hold a `PerReplica`. Stored as pairs.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    donate_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    static_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    donate_state: bool = dataclasses.field(default=True, kw_only=True)
    aggregation: Any = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        """Checks the fields and makes them hashable."""
        object.__setattr__(self, "aggregation", _check_aggregation(self.aggregation))
        for name in ("donate_argnums", "static_argnums"):
            object.__setattr__(self, name, _check_positions(name, vars(self)[name]))
        if self.experimental_xla_options is not None:
            pairs = tuple(sorted(dict(self.experimental_xla_options).items()))
            object.__setattr__(self, "experimental_xla_options", pairs)
        if not self.experimental_enable_dynamic_batch_size:
            warn_if_given(
                "RunOptions(experimental_enable_dynamic_batch_size",
                self.experimental_enable_dynamic_batch_size,
                "shapes are static, and partial batches are padded and counted exactly",
            )
        if self.experimental_bucketizing_dynamic_shape:
            raise ValueError(
                "RunOptions(experimental_bucketizing_dynamic_shape=True) is not supported: every "
                "replica function is compiled for static shapes. Distribute the dataset with "
                "tpudist, which pads the last batch and counts only its real rows."
            )


_Rule = str | enum.Enum

_Rules = _Rule | Mapping[str, _Rule] | Iterable[tuple[str, _Rule]] | None


def _check_aggregation(rules: _Rules) -> tuple[tuple[str, str], ...]:
    """Returns pairs of the name of a collection and the name of its aggregation."""
    if isinstance(rules, str | enum.Enum):
        rules = {ALL_COLLECTIONS: rules}
    checked = []
    for collection, rule in sorted(dict(rules or ()).items()):
        # A `VariableAggregation`, which this layer cannot import, or the name of one.
        name = (rule.name if isinstance(rule, enum.Enum) else str(rule)).lower()
        known = ("none",) if collection == ALL_COLLECTIONS else _AGGREGATIONS
        if name not in known or not isinstance(collection, str):
            raise ValueError(
                f"RunOptions(aggregation={shorten(rules)}): aggregation must map the names of "
                f"collections to a tpudist.VariableAggregation or its name "
                f"({', '.join(_AGGREGATIONS)}). For example: {{'batch_stats': 'mean'}}."
            )
        checked.append((collection, name))
    return tuple(checked)


def _check_positions(name: str, value: object) -> tuple[int, ...]:
    positions = (value,) if isinstance(value, int) else value
    if not isinstance(positions, tuple | list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in positions
    ):
        raise TypeError(
            f"RunOptions({name}={shorten(value)}): {name} must hold positions of arguments. Pass a "
            f"tuple of integers, such as (1,)."
        )
    return tuple(positions)
