"""The same training step twice: for `strategy.run`, and by hand as a JAX user would write it.

Both are lowered from abstract arrays, so that they can be compiled for absent devices.
The hand-written one has its own loss, gradients, reduction and Optax update; model, optimizer and
the layout of their state are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from tpudist.lowering import placement
from tpudist.models import MLP, Transformer, TransformerConfig, next_token_nats
from tpudist.training.steps import make_train_step
from tpudist.xla.hlo import collective_ops, compiled_program
from tpudist.xla.mesh import ReplicaMesh

GEOMETRIES: dict[str, dict[str, int] | None] = {"data parallel": None, "fsdp=4": {"fsdp": 4}}
MORE_GEOMETRIES: dict[str, dict[str, int] | None] = {
    "tensor=4": {"tensor": 4},
    "fsdp=4, tensor=2": {"fsdp": 4, "tensor": 2},
}
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Task:
    """Model, loss and shapes of a training task."""

    make_model: Callable[[], nnx.Module]
    loss: Callable[[Any, jax.Array], jax.Array]
    """`loss(model, batch)` of each example, `[batch]`."""
    example: jax.ShapeDtypeStruct
    """One example."""
    batch_size: int = 64
    """Examples in a global batch."""


def mlp(dims: Sequence[int] = (256, 1024, 1024, 256)) -> Task:
    """An MLP that learns to give back its input."""
    return Task(
        lambda: MLP(dims, rngs=nnx.Rngs(0)),
        lambda model, x: jnp.square(model(x) - x).mean(axis=-1),
        jax.ShapeDtypeStruct((dims[0],), jnp.float32),
    )


def transformer(config: TransformerConfig | None = None, length: int = 128) -> Task:
    """The reference transformer, by default of the size that scripts/train.py trains."""
    config = config or TransformerConfig()
    return Task(
        lambda: Transformer(config, rngs=nnx.Rngs(0)),
        lambda model, tokens: next_token_nats(model, tokens).mean(axis=-1),
        jax.ShapeDtypeStruct((length + 1,), jnp.uint8),
    )


@dataclass(frozen=True)
class Pair:
    """The two programs, lowered.

    Attributes:
        state_bytes: Size on one device of the state that a step replaces.
    """

    ours: jax.stages.Lowered
    by_hand: jax.stages.Lowered
    state_bytes: int


def lower_both(task: Task, geometry: str, devices: Sequence[jax.Device] | None = None) -> Pair:
    """Lowers both steps for `devices`, all that there are by default."""
    axes = (GEOMETRIES | MORE_GEOMETRIES)[geometry]
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=devices)
    tx = optax.adamw(LEARNING_RATE)
    model = strategy.create_abstract(task.make_model)
    optimizer = strategy.create_abstract(lambda model: tpudist.Optimizer(tx, model), model)
    batch_spec = P((strategy.replica_mesh.replica_axis, *strategy.replica_mesh.batch_axes))
    ours = strategy.lower(
        make_train_step(task.loss), args=(model, optimizer, batch_of_replicas(task, strategy))
    )
    graphdef, parameters = nnx.split(model)
    parameters, opt_state = nnx.as_pure(parameters), nnx.as_pure(optimizer.opt_state)
    batch = jax.ShapeDtypeStruct(
        (task.batch_size, *task.example.shape),
        task.example.dtype,
        sharding=NamedSharding(strategy.mesh, batch_spec),
    )
    state = (parameters, opt_state)
    by_hand = jit_by_hand(
        task, graphdef, tx, strategy.replica_mesh, state, dict(strategy.compiler_options)
    )
    with jax.set_mesh(strategy.mesh), nnx.logical_axis_rules(strategy.logical_axis_rules):
        lowered = by_hand.lower(*state, batch)
    return Pair(ours, lowered, sum(map(_bytes_on_a_device, jax.tree.leaves(state))))


def jit_by_hand(
    task: Task,
    graphdef: Any,
    tx: optax.GradientTransformation,
    mesh: ReplicaMesh,
    state: tuple[Any, Any],
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """`jit(shard_map(step))` of `step(parameters, opt_state, batch)`, as a JAX user would write it.

    On TPUs it is given the same options for the compiler.

    Returns:
        A jitted function that gives new parameters, a new optimizer state and the loss.
    """

    def step(parameters, opt_state, batch):
        def loss_of(parameters):
            return task.loss(nnx.merge(graphdef, parameters), batch).sum() / task.batch_size

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        gradients = jax.lax.psum(gradients, "replica")
        updates, opt_state = tx.update(gradients, opt_state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        return parameters, opt_state, jax.lax.psum(loss, "replica")

    mapped = jax.shard_map(
        step,
        mesh=mesh.mesh,
        in_specs=(P(), P(), P("replica")),
        out_specs=P(),
        axis_names=mesh.manual_axes,
        check_vma=False,
    )
    options = {"compiler_options": compiler_options} if compiler_options else {}
    if mesh.devices_per_replica == 1:
        return jax.jit(mapped, donate_argnums=(0, 1), **options)
    where = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(mapped, donate_argnums=(0, 1), out_shardings=(*where, None), **options)


def batch_of_replicas(task: Task, strategy: tpudist.Strategy) -> tpudist.PerReplica:
    """A global batch of a task, as abstract arrays."""
    n = strategy.num_replicas_in_sync
    shape = (n, task.batch_size // n, *task.example.shape)
    where = placement.sharding_of_stack(strategy.replica_mesh, shape, split_rows=True)
    return tpudist.PerReplica(jax.ShapeDtypeStruct(shape, task.example.dtype, sharding=where))


def _bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


@dataclass(frozen=True)
class Program:
    """Operations and memory of a compiled program.

    Attributes:
        collectives: (kind, bytes) of each, sorted.
        figures: FLOPs, bytes and memory.
    """

    collectives: tuple[tuple[str, int], ...]
    figures: compiled_program.ProgramFigures


def read(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program and reads it."""
    compiled = lowered.compile()
    found = collective_ops.collectives(compiled.as_text())
    return Program(
        tuple(sorted((x.kind, x.num_bytes) for x in found)),
        compiled_program.program_figures(compiled),
    )
