"""Renames strategies, contexts, checkpoints and all other names that tpudist has.

tpudist does not initialize TPUs or TensorFlow, so the port removes statements that only do that.
"""

from __future__ import annotations

import functools

import libcst as cst

from tpudist.port.analysis.nodes import remove_statement
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.tensorflow_names import TPUDIST

_INITIALIZES = {
    f"tensorflow.{name}"
    for name in """
        autograph.set_verbosity compat.v1.enable_eager_execution compat.v1.enable_v2_behavior
        compat.v1.logging.set_verbosity config.experimental_connect_to_cluster
        config.experimental_connect_to_host config.optimizer.set_experimental_options
        config.optimizer.set_jit config.set_soft_device_placement
        config.threading.set_inter_op_parallelism_threads
        config.threading.set_intra_op_parallelism_threads debugging.set_log_device_placement
        enable_eager_execution enable_v2_behavior tpu.experimental.initialize_tpu_system
        tpu.experimental.shutdown_tpu_system
    """.split()
}

# By default JAX allocates most of a GPU's memory when it starts.
_MEMORY_GROWTH = "tensorflow.config.experimental.set_memory_growth"
_NO_PREALLOCATION = 'os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"'
_LISTS = {
    f"tensorflow.config.{place}list_{kind}_devices"
    for place in ("", "experimental.")
    for kind in ("logical", "physical")
}
# Listing devices starts JAX, so it has to come after these.
_BEFORE_DEVICES = (
    _MEMORY_GROWTH,
    "tensorflow.config.experimental.set_virtual_device_configuration",
    "tensorflow.config.set_logical_device_configuration",
    "tensorflow.distribute.MultiWorkerMirroredStrategy",
    "tensorflow.distribute.experimental.MultiWorkerMirroredStrategy",
    "tensorflow.distribute.experimental.ParameterServerStrategy",
    "tensorflow.distribute.ParameterServerStrategy",
)


class StrategyNames(Transformer):
    """Rewrites `tf.distribute.X` to `tpudist.X`."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites a name that `TPUDIST` has."""
        name = TPUDIST.get(self.program.name(original_node))
        if (
            name
            and not self._is_started_server(original_node)
            and self._names_objects(original_node)
        ):
            return self.write(name, updated_node)
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Removes a statement that only initializes."""
        [first, *more] = original_node.body
        if more or not isinstance(first, cst.Expr):
            return updated_node
        called = self.program.callee(first.value)
        if called in _INITIALIZES:
            return remove_statement(self.program.parent(original_node), updated_node)
        # On a GPU, TensorFlow's option makes it allocate memory as needed. The variable of JAX has
        # the same effect, but must be set before JAX starts.
        if called == _MEMORY_GROWTH:
            self.imports.add("os")
            statement = cst.parse_statement(_NO_PREALLOCATION)
            assert isinstance(statement, cst.SimpleStatementLine)
            return updated_node.with_changes(body=statement.body)
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites lists of the devices of one kind, and `tf.executing_eagerly()`."""
        name = self.program.callee(original_node)
        if name == "tensorflow.executing_eagerly" and not original_node.args:
            return cst.Name("True")
        # Calls without a kind stay: TensorFlow also lists the CPU of a host with GPUs, but
        # `jax.devices()` does not. Nor may a list start JAX before a setup that must come first.
        if name not in _LISTS or len(original_node.args) != 1 or self._has_setup_before_devices:
            return updated_node
        kind = original_node.args[0].value
        if not isinstance(kind, cst.SimpleString):
            return updated_node
        self.imports.add("jax")
        platform = str(kind.evaluated_value).lower()
        if platform == "cpu":
            return cst.parse_expression('jax.devices("cpu")')
        return cst.parse_expression(f'[x for x in jax.devices() if x.platform == "{platform}"]')

    @functools.cached_property
    def _has_setup_before_devices(self) -> bool:
        """Whether the program sets up something that must come before JAX starts."""
        return any(
            self.program.name(x) in _BEFORE_DEVICES for x in self.program.nodes(cst.Attribute)
        )

    def _names_objects(self, node: cst.Attribute) -> bool:
        """Whether a checkpoint receives its objects by name, as tpudist requires."""
        call = self.program.parent(node)
        if self.program.name(node) != "tensorflow.train.Checkpoint" or not isinstance(
            call, cst.Call
        ):
            return True
        return all(arg.keyword is not None or arg.star == "**" for arg in call.args)

    def _is_started_server(self, node: cst.Attribute) -> bool:
        """Whether a server is started and not stored: the program runs a complete cluster."""
        call = self.program.parent(node)
        return (
            self.program.name(node) == "tensorflow.distribute.Server"
            and isinstance(call, cst.Call)
            and isinstance(self.program.parent(call), cst.Expr)
        )
