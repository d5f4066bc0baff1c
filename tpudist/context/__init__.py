"""The current context of a thread: strategy in scope, replica or cross-replica, and trace.

It also has the interfaces through which lower packages use a strategy (`strategy_base`) and a trace
(`frame`). It knows nothing of devices or programs.
"""

from tpudist.context.stack import (
    ContextKind,
    Mode,
    compute_in_parts,
    current,
    current_frame,
    default_mode,
    depth,
    enter,
    experimental_set_strategy,
    forget_default_mode,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    is_in_scope_of,
    num_parts,
    require_cross_replica,
    require_scope_or_default,
    resolve_twin,
    set_default_mode_factory,
)

__all__ = [
    "ContextKind",
    "Mode",
    "resolve_twin",
    "current",
    "current_frame",
    "default_mode",
    "depth",
    "enter",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "compute_in_parts",
    "is_in_scope_of",
    "num_parts",
    "require_cross_replica",
    "require_scope_or_default",
    "forget_default_mode",
    "set_default_mode_factory",
]
