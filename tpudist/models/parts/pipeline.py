"""Pipeline parallelism: the layers are split into stages, and microbatches flow through them.

Each position along the mesh axis `stage` has an equal part of the layers. A batch enters in
`pipeline_microbatches` parts. At each tick every stage computes one microbatch and passes it on.
All stages compute at every tick, so of `microbatches + stages - 1` ticks a stage wastes
`stages - 1`: the bubble, a share of `(stages - 1) / (microbatches + stages - 1)`.

Outside of the pipeline (embedding, logits, loss) the batch is split over `stage`, as over `data`.
Therefore the stages share the waiting microbatches as well: at each tick, waiting ones move one
stage towards the first, and finished ones take their places. Two activations of one microbatch move
per tick, each to a neighbor, and nothing else crosses stages. More microbatches shrink the bubble,
but if another axis (`fsdp`) splits the weights, every tick gathers those of the stage again.

On a mesh without the axis the same layers are a plain scan, with the same results.

Sources: GPipe (arXiv 1811.06965) for the schedule; MaxText (layers/pipeline.py) for the circulation
of waiting microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpudist.array_types import PyTree
from tpudist.programs.rows.row_kernels import rowwise

AXIS = "stage"


class PipelineSettings(Protocol):
    """Fields of `TransformerConfig` that this module reads; see there."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        ...

    @property
    def pipeline_stages(self) -> int:
        """Number of stages."""
        ...

    @property
    def pipeline_microbatches(self) -> int | None:
        """Number of microbatches; None or 0 for one per stage."""
        ...


def apply(
    block: Callable[[PyTree, PyTree, PyTree], PyTree],
    x: PyTree,
    weights: PyTree,
    shared: PyTree,
    config: PipelineSettings,
) -> PyTree:
    """Returns `x` after all layers, computed in stages if the mesh has any.

    Args:
        block: Called as `block(x, weights, shared)` with the weights of one layer; returns the new
            `x`. Rows must be independent. It must not close over arrays, because these would belong
            to another mesh than its computation.
        x: Pytree of arrays `[batch, ...]`.
        weights: Pytree of arrays `[layers, ...]`.
        shared: Pytree of arrays that all layers use, without gradients.
        config: Number of stages and of microbatches.

    Raises:
        ValueError: If the mesh has another number of stages.

    A batch that does not split equally into microbatches, such as a partial batch, is padded with
    rows of zeros.
    """
    num_stages = jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)
    if num_stages == 1:
        return _scan(block, x, weights, shared)
    _check_mesh(num_stages, config)
    flow = functools.partial(_flow_in_stages, block, config.pipeline_microbatches or num_stages)
    return rowwise(flow, in_dims=(0, None, None))(x, weights, shared)


def refuse_stages() -> None:
    """Raises an error if the mesh has stages, for computations that only a plain scan supports.

    Raises:
        ValueError: If the mesh has the axis `stage`.
    """
    if (num_stages := jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)) > 1:
        raise ValueError(
            f"A KVCache does not support a mesh with {AXIS}={num_stages}, because "
            "decoding has no microbatches that fill the stages. Use the axis tensor instead."
        )


def _flow_in_stages(
    block: Callable[..., PyTree], num_microbatches: int, x: PyTree, weights: PyTree, shared: PyTree
) -> PyTree:
    num_stages = jax.sharding.get_abstract_mesh().shape[AXIS]
    num_rows = jax.tree.leaves(x)[0].shape[0]
    # Rows to the next multiple; Python's `%` is never negative here.
    num_missing = -num_rows % num_microbatches

    def run_stage(place: jax.Array, x: PyTree, weights: PyTree, shared: PyTree) -> PyTree:
        stage = functools.partial(_scan, block, weights=weights, shared=shared)
        return _flow(stage, place[0], x, num_microbatches)

    across = PartitionSpec(AXIS)
    flow = jax.shard_map(
        run_stage,
        in_specs=(across, across, across, PartitionSpec()),
        out_specs=across,
        axis_names={AXIS},
        check_vma=False,
    )
    if num_missing:
        x = jax.tree.map(lambda a: jnp.pad(a, [(0, num_missing)] + [(0, 0)] * (a.ndim - 1)), x)
    x = flow(jnp.arange(num_stages), x, weights, shared)
    return jax.tree.map(lambda a: a[:num_rows], x) if num_missing else x


def check(config: PipelineSettings) -> None:
    """Checks that stages have equal numbers of layers and of microbatches.

    Raises:
        ValueError: If they do not.
    """
    stages, layers = config.pipeline_stages, config.num_layers
    if layers % stages:
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(
            f"num_layers={layers} do not split equally into pipeline_stages={stages}: every stage "
            f"has the same number of layers. Use one of {fits} stages, or "
            f"{-(-layers // stages) * stages} layers."
        )
    microbatches = config.pipeline_microbatches or stages
    if microbatches % stages:
        raise ValueError(
            f"pipeline_microbatches={microbatches} is not a multiple of pipeline_stages={stages}: "
            "every stage keeps the same number of waiting microbatches. Use "
            f"{-(-microbatches // stages) * stages}."
        )


def bubble(config: PipelineSettings) -> float:
    """Returns the share of the time in which a stage computes nothing useful."""
    wasted = config.pipeline_stages - 1
    return wasted / ((config.pipeline_microbatches or config.pipeline_stages) + wasted)


def _scan(block: Callable[..., PyTree], x: PyTree, weights: PyTree, shared: PyTree) -> PyTree:
    return jax.lax.scan(lambda x, weights: (block(x, weights, shared), None), x, weights)[0]


def _flow(
    run_layers: Callable[[PyTree], PyTree],
    stage_index: jax.Array,
    x: PyTree,
    num_microbatches: int,
) -> PyTree:
    """Passes all microbatches through all stages; runs at every position along the axis.

    Args:
        run_layers: Applies the layers of this position.
        stage_index: Number of this stage, `[]`.
        x: Rows of this position, `[batch / stages, ...]`.
        num_microbatches: Number of microbatches of the whole batch.
    """
    num_stages = jax.lax.axis_size(AXIS)
    num_waiting = num_microbatches // num_stages
    to_next = [(i, i + 1) for i in range(num_stages - 1)]
    to_previous = [(i + 1, i) for i in range(num_stages - 1)]

    def tick(carry: tuple[PyTree, PyTree], t: jax.Array) -> tuple[tuple[PyTree, PyTree], None]:
        waiting, arrived = carry
        # Each stage keeps its waiting microbatches in a ring buffer, and all stages are at the same
        # index of it. When the first stage takes the one at that index, the one of the next stage
        # at the same index replaces it, and so on.
        ring_index = t % num_waiting
        front = jax.tree.map(lambda w: w[ring_index], waiting)
        out = run_layers(_where(stage_index == 0, front, arrived))
        # The last stage writes a finished microbatch where it would receive a waiting one: by then
        # none is left behind it. In the first and last ticks, stages compute on other values than
        # microbatches; these results are overwritten or never read.
        replacement = _where(stage_index == num_stages - 1, out, _shift(front, to_previous))
        waiting = jax.tree.map(lambda w, new: w.at[ring_index].set(new), waiting, replacement)
        return (waiting, _shift(out, to_next)), None

    # Neighboring rows go to different microbatches, so each microbatch has rows of every device
    # that the batch is split over. [waiting, rows of a microbatch, ...]
    waiting = jax.tree.map(lambda a: a.reshape(-1, num_waiting, *a.shape[1:]).swapaxes(0, 1), x)
    # Before anything arrives, stages compute on zeros and not on uninitialized memory: NaN in
    # unused results would still reach gradients, as 0 * NaN.
    arrived = jax.tree.map(lambda w: jnp.zeros_like(w[0]), waiting)
    # Microbatch i enters the first stage at tick i and leaves the last one at tick i + stages - 1.
    ticks = jnp.arange(num_microbatches + num_stages - 1)
    (finished, _), _ = jax.lax.scan(tick, (waiting, arrived), ticks)
    # A microbatch ends at the stage where it waited, `stages - 1` indices later in the ring.
    return jax.tree.map(
        lambda f: jnp.roll(f, 1 - num_stages, axis=0).swapaxes(0, 1).reshape(-1, *f.shape[2:]),
        finished,
    )


def _where(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _shift(x: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, pairs), x)


def _check_mesh(num_stages: int, config: PipelineSettings) -> None:
    if num_stages != config.pipeline_stages:
        raise ValueError(
            f"The model has pipeline_stages={config.pipeline_stages}, but the mesh has "
            f"{num_stages} positions along the axis {AXIS!r}, and each computes one stage. "
            f"Use pipeline_stages={num_stages}, or replica_axes with "
            f"{AXIS}={config.pipeline_stages}."
        )
