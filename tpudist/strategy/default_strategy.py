"""The strategy that is in force where no other one is."""

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpudist import context
from tpudist.context import ContextKind
from tpudist.processes import generations
from tpudist.run.replica_context import ReplicaContext
from tpudist.strategy.strategy import Strategy
from tpudist.xla import mesh as meshes


class DefaultStrategy(Strategy):
    """What is in force outside of every scope: one replica on the first device."""

    keeps_datasets = True
    has_one_device = True

    variables_have_components = False

    def __init__(self):
        """On JAX's default device."""
        super().__init__(meshes.make_mesh(jax.local_devices()[:1]))

    def _enter_scope(self) -> contextlib.AbstractContextManager[Strategy]:
        if context.has_strategy():
            raise RuntimeError(
                "Must not nest tpudist.Strategy scopes: the scope of the default strategy was "
                f"entered inside that of {context.get_strategy()!r}. Leave that scope first."
            )
        return contextlib.nullcontext(self)

    def _sharding_of(self, value: Any, *, variable: Any) -> jax.sharding.Sharding:
        """All on the one device: annotations name axes, and here no scope says what they mean."""
        return NamedSharding(self.mesh, PartitionSpec())


def make_default_mode() -> context.Mode:
    """What is in force outside of every scope: its context, and one replica of it."""
    strategy = DefaultStrategy()
    return context.Mode(ContextKind.DEFAULT, strategy, ReplicaContext(strategy, 0))


generations.at_end(context.forget_default_mode)
