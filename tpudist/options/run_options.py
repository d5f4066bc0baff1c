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
            (`{"batch_stats": ...}`). For an NNX Variable, use the name of its type
            (`{"MetricState": "max"}`). The default rule is `{"batch_stats": "mean"}`. State without
            a rule becomes a `PerReplica`, with one exception: `params` and `opt_state` next to an
            integer, such as a step counter, raise an error if they differ. Without an integer
            they may be gradients, which have the same nesting. Pass `"none"` instead of a dict to
            keep one value for each replica of all such state, and of all NNX Variables that
            differ: these then contain a `PerReplica`. Stored as pairs.
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
            pairs = _check_xla_options(self.experimental_xla_options)
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
    is_one_rule = isinstance(rules, str | enum.Enum)
    try:
        by_collection = {ALL_COLLECTIONS: rules} if is_one_rule else dict(rules or ())
    except (TypeError, ValueError):  # neither a dict nor pairs
        raise _aggregation_error(rules) from None
    checked = []
    for collection, rule in by_collection.items():
        # A `VariableAggregation`, which this layer cannot import, or the name of one.
        name = (rule.name if isinstance(rule, enum.Enum) else str(rule)).lower()
        known = ("none",) if collection == ALL_COLLECTIONS else _AGGREGATIONS
        if name not in known or not isinstance(collection, str):
            raise _aggregation_error(rules)
        checked.append((collection, name))
    return tuple(sorted(checked))


def _aggregation_error(rules: object) -> ValueError:
    return ValueError(
        f"RunOptions(aggregation={shorten(rules)}): aggregation must map the names of collections "
        f"to a tpudist.VariableAggregation or its name ({', '.join(_AGGREGATIONS)}). For example: "
        f"{{'batch_stats': 'mean'}}. 'none' may also be passed without a name."
    )


def _check_xla_options(options: Any) -> tuple[tuple[str, Any], ...]:
    """Returns pairs of the name of a compiler option and its value."""
    try:
        return tuple(sorted(dict(options).items(), key=lambda pair: pair[0]))
    except (TypeError, ValueError):  # neither a dict nor pairs, or names that cannot be sorted
        raise TypeError(
            f"RunOptions(experimental_xla_options={shorten(options)}): experimental_xla_options "
            f"must map the names of compiler options to values. For example: "
            f"{{'xla_cpu_enable_fast_math': False}}."
        ) from None


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
