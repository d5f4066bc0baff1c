"""Trains the constructs on geometries, in processes that XLA may end: what became of each cell.

python construct_cells.py              runs the cells that it reads, [[construct, geometry], ...]
python construct_cells.py v5e:2x4      compiles them for a TPU slice instead
"""

import concurrent.futures
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import tpudist
from constructs import CONSTRUCTS, batch_of
from places import PYTHONPATH
from tpudist.lowering import placement
from tpudist.xla import topology

GEOMETRIES: dict[str, dict[str, int] | None] = {
    "mirrored": None,
    "fsdp=2": {"fsdp": 2},
    "tensor=2": {"tensor": 2},
    "data=2": {"data": 2},
    "expert=2": {"expert": 2},
    "stage=2": {"stage": 2},
    "fsdp=2, tensor=2": {"fsdp": 2, "tensor": 2},
    "data=2, fsdp=2": {"data": 2, "fsdp": 2},
    "fsdp=4, tensor=2": {"fsdp": 4, "tensor": 2},
}
Cell = tuple[str, str]


def run_cells(
    cells: Sequence[Cell], slice_name: str = "", workers: int = 2, program: str = __file__
) -> dict[Cell, str]:
    """Returns the outcome of each cell: "exact", or the problem, such as "aborted: Check failed".

    Cells of one geometry share a process. If a cell ends it, a new process continues after it.
    """
    groups = [[x for x in cells if x[1] == geometry] for geometry in GEOMETRIES]
    with concurrent.futures.ThreadPoolExecutor(min(workers, os.cpu_count() or 1)) as pool:
        run = functools.partial(_run_group, slice_name=slice_name, program=program)
        found = pool.map(run, filter(None, groups))
        return {cell: told for group in found for cell, told in group.items()}


def _run_group(cells: list[Cell], slice_name: str, program: str) -> dict[Cell, str]:
    found: dict[Cell, str] = {}
    while left := [cell for cell in cells if cell not in found]:
        done = subprocess.run(
            [sys.executable, program, slice_name],
            input=json.dumps(left),
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu"},
        )
        answers = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("[")]
        found |= {(name, geometry): told for name, geometry, told in answers}
        if done.returncode and len(answers) < len(left):
            why = [x for x in done.stderr.splitlines() if "Check failed" in x] or ["", done.stderr]
            found[left[len(answers)]] = f"aborted: {why[-1][-300:]}"
        elif len(answers) < len(left):
            raise RuntimeError(f"{program} gave {len(answers)} answers for {len(left)} cells.")
    return found


def _run_here(cells: Sequence[Cell], slice_name: str) -> None:
    for name, geometry in cells:
        try:
            told = _compile(name, geometry, slice_name) if slice_name else _train(name, geometry)
        except Exception as error:
            own = isinstance(error, ValueError | TypeError | NotImplementedError)
            kind = (
                "refused" if own and not isinstance(error, jax.errors.JaxRuntimeError) else "failed"
            )
            told = f"{kind}: {type(error).__name__}: {str(error)[:300]}"
        print(json.dumps([name, geometry, told]), flush=True)


def step(name: str):
    """One step of training, less the update: the loss and the gradients of the global batch.

    And the loss again as in an evaluation, which is made of other operations.
    """

    def train(model, batch):
        def loss_fn(model):
            return tpudist.compute_average_loss(CONSTRUCTS[name].loss(model, batch))

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        replica = tpudist.get_replica_context()
        return replica.all_reduce("sum", (loss, loss_fn(model), nnx.to_pure_dict(gradients)))

    return train


def strategy_of(geometry: str, slice_name: str = "") -> tpudist.Strategy:
    devices = topology.devices(slice_name) if slice_name else None
    replica_axes = GEOMETRIES[geometry]
    if replica_axes is None and not slice_name:
        return tpudist.MirroredStrategy()
    return tpudist.TPUStrategy(replica_axes=replica_axes, devices=devices)


def _compile(name: str, geometry: str, slice_name: str) -> str:
    strategy = strategy_of(geometry, slice_name)
    model = strategy.create_abstract(CONSTRUCTS[name].make)
    mesh = strategy.replica_mesh

    def abstract(x):
        shape = (mesh.num_replicas, x.shape[0] // mesh.num_replicas, *x.shape[1:])
        where = placement.sharding_of_stack(mesh, shape, split_rows=True)
        return tpudist.PerReplica(jax.ShapeDtypeStruct(shape, x.dtype, sharding=where))

    batch = {name: abstract(x) for name, x in batch_of().items()}
    strategy.lower(step(name), args=(model, batch)).compile()
    return "compiled"


def _train(name: str, geometry: str) -> str:
    strategy = strategy_of(geometry)
    model = strategy.create(CONSTRUCTS[name].make)
    (batch,) = strategy.experimental_distribute_dataset([batch_of()])
    found = strategy.run(step(name), args=(model, batch))
    found = jax.tree.map(lambda x: np.asarray(strategy.replicate(x)), found)
    wanted = _on_one_device(name, strategy.num_replicas_in_sync)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    relative = CONSTRUCTS[name].relative
    wrong = [
        jax.tree_util.keystr(path)
        for (path, one), other in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
        )
        if not np.allclose(one, other, rtol=0, atol=relative * max(np.abs(other).max(), 1e-2))
    ]
    return f"wrong: {', '.join(wrong)}" if wrong else "exact"


@functools.cache
def _on_one_device(name: str, num_replicas: int):
    """The same in plain JAX; each replica's rows by themselves where they depend on each other.

    Random keys of replicas are folded with their numbers.
    """
    known = CONSTRUCTS[name]
    parts = num_replicas if known.of_batch else 1

    @jax.jit
    @functools.partial(jax.vmap, axis_name="replica")
    def one(batch, replica):
        model = known.make()
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.RngKey) and parts > 1:
                fold_in = functools.partial(jax.random.fold_in, data=replica)
                keys = variable.get_value()
                variable.set_value(jax.vmap(fold_in)(keys) if keys.ndim else fold_in(keys))
        value_and_grad = nnx.value_and_grad(lambda model: known.loss(model, batch).mean())
        loss, gradients = value_and_grad(model)
        return loss, known.loss(model, batch).mean(), nnx.to_pure_dict(gradients)

    batch = {k: x.reshape(parts, -1, *x.shape[1:]) for k, x in batch_of().items()}
    with jax.default_device(jax.devices()[0]):
        return jax.tree.map(lambda x: np.asarray(x).mean(0), one(batch, np.arange(parts)))


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    tpudist.emulate(num_devices=8)
    _run_here([tuple(cell) for cell in json.load(sys.stdin)], sys.argv[1])
