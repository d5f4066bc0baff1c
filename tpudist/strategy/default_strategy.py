"""The default strategy, which is the current one outside of every scope."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpudist import context
from tpudist.context import ContextKind
from tpudist.processes import generations
from tpudist.run.replica_context import ReplicaContext
from tpudist.strategy.strategy import Strategy
from tpudist.xla import mesh as meshes


class DefaultStrategy(Strategy):
    """One replica on the first of JAX's local devices, outside of every scope."""

    keeps_datasets = True  # as in tf.distribute, distributing a dataset returns the dataset itself
    has_one_device = True
    variables_have_components = False

    def __init__(self):
        super().__init__(meshes.make_mesh(jax.local_devices()[:1]))

    @contextlib.contextmanager
    def _enter_scope(self) -> Iterator[Strategy]:
        if context.has_strategy():
            raise RuntimeError(
                "Must not nest tpudist.Strategy scopes: the scope of the default strategy was "
                f"entered inside that of {context.get_strategy()!r}. Leave that scope first."
            )
        yield self

    def _sharding_of(self, value: object, *, variable: object) -> jax.sharding.Sharding:
        # Annotations name axes, and no scope defines their meaning here.
        return NamedSharding(self.mesh, PartitionSpec())


def make_default_mode() -> context.Mode:
    """Returns the mode outside of every scope: the default strategy in replica context."""
    strategy = DefaultStrategy()
    return context.Mode(ContextKind.DEFAULT, strategy, ReplicaContext(strategy, 0))


# A generation ends when the processes of a run reconnect. JAX then has new device objects, and the
# default mode would hold a mesh of the old ones.
generations.at_end(context.forget_default_mode)
