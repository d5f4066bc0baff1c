"""Strategy: a mesh and a placement rule. All other code is shared.

Your own strategy passes its mesh to `Strategy.__init__`. If its variables are not simply mirrored,
it also overrides `partition`, the placement rule. This file has the constructor and the scope; the
other methods are in the `*_methods` modules of this package and of `input`, `planner` and
`verification`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from tpudist import context
from tpudist.context import ContextKind
from tpudist.goodput import goodput
from tpudist.input.strategy_methods import DataMethods
from tpudist.keras import keras_scope
from tpudist.planner.strategy_methods import PlanMethods
from tpudist.processes import process_agreement
from tpudist.run.step_cache import Replicator
from tpudist.strategy import absent_devices, logical_axes, strategy_table
from tpudist.strategy.deprecated_methods import DeprecatedStrategyMethods
from tpudist.strategy.extended import StrategyExtended
from tpudist.strategy.reduction_methods import ReductionMethods
from tpudist.strategy.run_methods import RunMethods
from tpudist.strategy.scope import Scope
from tpudist.strategy.state_methods import StateMethods
from tpudist.verification import first_verification
from tpudist.verification.strategy_methods import VerifyMethods
from tpudist.xla import traces
from tpudist.xla.mesh import ReplicaMesh


class Strategy(
    RunMethods,
    ReductionMethods,
    StateMethods,
    DeprecatedStrategyMethods,
    DataMethods,
    PlanMethods,
    VerifyMethods,
):
    """Places replicas, variables and data on devices, and runs functions on all replicas.

    Matches `tf.distribute.Strategy`.

    Args:
        replica_mesh: Mesh of the replicas and their devices.
        logical_axis_rules: Flax rules: pairs of a logical axis name, which models use to annotate
            their parameters, and a mesh axis (or a tuple of them, or None). They take precedence
            over the default rules of `logical_axes`.
    """

    def __init__(
        self, replica_mesh: ReplicaMesh, *, logical_axis_rules: Sequence[logical_axes.Rule] = ()
    ):
        self.logical_axis_rules = logical_axes.complete_rules(replica_mesh, logical_axis_rules)
        self._begin(replica_mesh)

    def _begin(self, replica_mesh: ReplicaMesh) -> None:
        # Also called on a copy of a strategy that is moved to other devices (`PlanMethods.on`). So
        # everything that belongs to one mesh is created here, not in `__init__`.
        super().__init__()
        self.replica_mesh = replica_mesh
        process_agreement.watch(replica_mesh)
        goodput.record_if_asked()
        _ = self.variable_home  # raises an error if hooks contradict each other
        self.extended = StrategyExtended(self)
        self._replicator = Replicator(self)
        if first_verification.is_wanted():
            self._replicator.before_first_call = first_verification.verify_first
        keras_scope.watch()

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh: axis `replica`, and the axes inside a replica."""
        return context.resolve_twin(self).replica_mesh.mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        return context.resolve_twin(self).replica_mesh.num_replicas

    def __repr__(self) -> str:
        mesh = self.replica_mesh
        axes = ", ".join(f"{name}={size}" for name, size in mesh.mesh.shape.items())
        how = f", deterministic={mesh.deterministic}" if mesh.deterministic else ""
        return f"{type(self).__name__}({axes} on {mesh.platform}{how})"

    def _repr_html_(self) -> str:
        return strategy_table.write_html(self)

    def __copy__(self):
        raise RuntimeError(
            f"{self!r} cannot be copied, because Variables belong to it. Make another strategy "
            "instead."
        )

    def __deepcopy__(self, memo):
        return self.__copy__()

    def around_scope(self) -> contextlib.AbstractContextManager:
        """Hook: returns the context in which the body of `scope` runs, outside of traces.

        Default: the strategy's mesh is JAX's current mesh.
        """
        return jax.set_mesh(self.mesh)

    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Makes this the current strategy in a `with` block, in cross-replica context.

        Arrays, NNX modules, optimizers and Variables that you create in it are placed on the mesh:
        mirrored, or split as annotated. You may enter a scope again inside itself.

        Raises:
            RuntimeError: On entering, if the scope of another strategy is active, or in a replica
                function.

        Matches `tf.distribute.Strategy.scope`.
        """
        return Scope(self._enter_scope)

    @contextlib.contextmanager
    def _enter_scope(self) -> Iterator["Strategy"]:
        context.require_scope_or_default(self, "scope")
        with contextlib.ExitStack() as stack:
            stack.enter_context(absent_devices.explain_errors(self))
            outer = context.current()
            stack.enter_context(context.enter(self._mode_of_scope(outer)))
            # `depth` is read after `enter`, so it counts this entry too. In a nested entry the
            # mesh, the rules and Keras' distribution are in force already: setting them again would
            # only cost time.
            is_nested = outer.strategy is self and context.depth() > 1
            if traces.is_eager() and not is_nested:  # JAX sets no mesh while it traces
                stack.enter_context(nnx.logical_axis_rules(self.logical_axis_rules))
                stack.enter_context(self.around_scope())
                stack.enter_context(keras_scope.enter(self))
            yield self

    def _mode_of_scope(self, outer: context.Mode) -> context.Mode:
        """Returns the mode of `scope`; in a trace of this strategy, its cross-replica context."""
        if outer.frame is None or outer.strategy is not self:
            return context.Mode(ContextKind.SCOPE, self)
        # The block stays a part of the function that is traced: in update context, in a
        # `tpudist.function` or in a `merge_call`. In replica context, `scope` has raised an error.
        if outer.is_update:
            return context.Mode(ContextKind.UPDATE, self, frame=outer.frame)
        kind = ContextKind.FUNCTION if outer.frame.whole else ContextKind.MERGE
        return context.Mode(kind, self, frame=outer.frame)
