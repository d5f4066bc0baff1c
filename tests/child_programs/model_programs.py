"""The training step of a transformer, compiled for devices that may not be there: what it sends."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from places import PYTHONPATH
from tpudist.lowering import placement
from tpudist.models import Transformer, TransformerConfig, next_token_loss
from tpudist.training.steps import make_train_step
from tpudist.xla import topology
from tpudist.xla.hlo import collective_ops


class Sent(NamedTuple):
    """A collective: its kind, the mesh axes it crosses, its bytes, and the code that needs it."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    op_name: str


def sent_by_step(
    config: TransformerConfig, axes: dict[str, int], rows: int, length: int, slice_name: str = ""
) -> list[Sent]:
    """The collectives of one step, on the emulated devices or for those of a TPU slice.

    Args:
        config: Configuration of the model.
        axes: Mesh axes of a replica.
        rows: Rows of each replica's batch.
        length: Tokens of each row.
        slice_name: Name of the TPU slice; needs libtpu.
    """
    devices = topology.devices(slice_name) if slice_name else None
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=devices)
    mesh = strategy.replica_mesh
    model = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.adamw(1e-3), model), model
    )
    shape = (mesh.num_replicas, rows, length + 1)
    where = placement.sharding_of_stack(mesh, shape, split_rows=True)
    batch = tpudist.PerReplica(jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=where))
    step = make_train_step(lambda model, tokens: next_token_loss(model, tokens).mean(axis=-1))
    compiled = strategy.lower(step, args=(model, optimizer, batch)).compile()
    return [
        Sent(found.kind, crossed(found.groups or (), mesh.mesh), found.num_bytes, found.op_name)
        for found in collective_ops.collectives(compiled.as_text())
    ]


def crossed(groups, mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ."""
    places = [np.stack(np.unravel_index(group, mesh.devices.shape)) for group in groups]
    return tuple(
        axis
        for i, axis in enumerate(mesh.axis_names)
        if any(len(set(place[i])) > 1 for place in places)
    )


def sent_by_step_on_tpu(
    config: TransformerConfig, axes: dict[str, int], rows: int, length: int, slice_name: str
) -> list[Sent]:
    """The same in a process of its own, which libtpu may end."""
    program = (
        "import json, jax; jax.config.update('jax_platforms', 'cpu'); import model_programs\n"
        "from tpudist.models import TransformerConfig\n"
        f"arguments = ({config!r}, {axes!r}, {rows}, {length}, {slice_name!r})\n"
        "print(json.dumps(model_programs.sent_by_step(*arguments)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    return [Sent(kind, tuple(axes), *rest) for kind, axes, *rest in found]
