"""The same training on every geometry: strategies change where things are, never what they are."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

import tpudist
from geometry_program import (
    Setup,
    abstract_args,
    train,
    train_step,
    train_stepwise,
    weights_of,
)
from places import DATA
from processes import run_processes
from tpudist.state.partitioners import MinSizePartitioner
from tpudist.testing import ledger
from tpudist.testing.budgets import assert_collectives

# What the compilers of these versions of JAX make of the geometries, newest first.
LEDGERS = {
    (0, 12): DATA / "geometry_collectives_jax_0_12.json",
    (0, 10): DATA / "geometry_collectives_jax_0_10.json",
}
LEDGER = next(file for version, file in LEDGERS.items() if jax.__version_info__ >= version)
# float32 sums in another order differ in the last bits, and steps of Adam add to it.
RELATIVE = 1e-4
FEW_STEPS, MANY_STEPS = 6, 20


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A strategy for the emulated devices, and how a model is trained there."""

    make: object
    setup: Setup = Setup()
    num_steps: int = FEW_STEPS


def mirrored(num_devices=8, **setup):
    return Geometry(lambda: tpudist.MirroredStrategy(jax.devices()[:num_devices]), Setup(**setup))


def tpu(setup=Setup(), num_devices=8, partitioner=None, rules=(), **axes):  # noqa: B008
    def make():
        return tpudist.TPUStrategy(
            replica_axes=axes or None,
            logical_axis_rules=rules,
            devices=jax.devices()[:num_devices],
            variable_partitioner=partitioner,
        )

    return Geometry(make, setup)


def changed(**changes):
    return Setup(changes)


RING = changed(attention="ring")
STAGES = changed(pipeline_stages=2, pipeline_microbatches=4)
EXPERTS = Setup(experts=True)
UNNAMED = Setup(annotated=False)
GEOMETRIES = {
    # Replicas of one device.
    "mirrored on 8 devices": mirrored(),
    "mirrored on 2 devices": mirrored(2),
    "tpu with 8 replicas": tpu(),
    "8 replicas, 2 microbatches": mirrored(microbatches=2, reduce_dtype="float32"),
    "8 replicas, remat full, state on the host": mirrored(
        changes={"remat": "full"}, memory_kind="pinned_host"
    ),
    # Batches and parameters are split.
    "2 replicas of fsdp=4": dataclasses.replace(tpu(fsdp=4), num_steps=MANY_STEPS),
    "1 replica of fsdp=8, remat dots": tpu(changed(remat="dots"), fsdp=8),
    "1 replica of data=8": tpu(data=8),
    "2 replicas of data=2, fsdp=2": tpu(data=2, fsdp=2),
    "2 replicas of fsdp=4, 4 microbatches": tpu(Setup(microbatches=4), fsdp=4),
    "2 replicas of fsdp=4, state on the host": tpu(Setup(memory_kind="pinned_host"), fsdp=4),
    # Matrices are.
    "2 replicas of fsdp=2, tensor=2": tpu(fsdp=2, tensor=2),
    "1 replica of fsdp=4, tensor=2, remat save_qkv": tpu(
        changed(remat="save_qkv"), fsdp=4, tensor=2
    ),
    "1 replica of tensor=4": tpu(num_devices=4, tensor=4),
    "2 replicas of fsdp=2, tensor=2, 2 microbatches": tpu(
        Setup({"remat": "full"}, microbatches=2), fsdp=2, tensor=2
    ),
    "1 replica of fsdp=2, tensor=4, the residual stream split": tpu(
        changed(loss_chunk=8), fsdp=2, tensor=4, rules=[("residual", "tensor")]
    ),
    # Sequences are.
    "2 replicas of sequence=4": tpu(RING, sequence=4),
    "1 replica of fsdp=2, sequence=2, tensor=2": tpu(RING, fsdp=2, sequence=2, tensor=2),
    # Layers are.
    "2 replicas of stage=2, fsdp=2": tpu(STAGES, stage=2, fsdp=2),
    "1 replica of stage=2, data=2, tensor=2": tpu(STAGES, stage=2, data=2, tensor=2),
    # Experts are.
    "mirrored on 8 devices, experts": mirrored(experts=True),
    "2 replicas of expert=4": tpu(EXPERTS, expert=4),
    "1 replica of fsdp=2, expert=2, tensor=2": tpu(EXPERTS, fsdp=2, expert=2, tensor=2),
    # What nobody annotated is.
    "2 replicas of fsdp=4, by a partitioner": tpu(
        UNNAMED, partitioner=MinSizePartitioner(4096, max_shards=4), fsdp=4
    ),
    "2 replicas of tensor=4, by a partitioner": tpu(
        UNNAMED, partitioner=MinSizePartitioner(4096, max_shards=8), tensor=4
    ),
}


@functools.cache
def on_one_device(experts: bool = False):
    """The losses of many steps, and the weights after a few of them and after all."""
    strategy, losses, weights = tpudist.OneDeviceStrategy(), [], {}
    for loss, model in train_stepwise(strategy, MANY_STEPS, Setup(experts=experts)):
        losses.append(float(loss))
        if len(losses) in (FEW_STEPS, MANY_STEPS):
            weights[len(losses)] = weights_of(strategy, model)
    return losses, weights


def assert_same(trained, num_steps: int, experts: bool = False):
    losses, weights = on_one_device(experts)
    losses, weights = losses[:num_steps], weights[num_steps]
    np.testing.assert_allclose(trained[0], losses, rtol=RELATIVE)
    assert trained[1].keys() == weights.keys()
    for name, weight in weights.items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(
            trained[1][name], weight, rtol=RELATIVE, atol=RELATIVE * scale, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_one_device_learns(experts):
    """Otherwise equal losses would say nothing."""
    losses, _ = on_one_device(experts)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_transformer_trains_alike_on_every_geometry(name):
    """With a partial batch among the steps: every loss, and the weights at the end."""
    geometry = GEOMETRIES[name]
    steps, setup = geometry.num_steps, geometry.setup
    assert_same(train(geometry.make(), steps, setup), steps, setup.experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_geometry_communicates_what_its_ledger_says(name):
    """Which collectives, along which axes, of how many bytes, how often, and who asks for them."""
    geometry = GEOMETRIES[name]
    strategy = geometry.make()
    args = abstract_args(strategy, geometry.setup)
    assert_collectives(
        train_step(geometry.setup), args, strategy=strategy, ledger=LEDGER, name=name
    )


# jaxlib 0.12 gathers the embeddings that 0.10 turned by an all-to-all.
GATHERS_ONE_MORE = "1 replica of fsdp=2, tensor=4, the residual stream split on 8 x cpu"


def test_compilers_of_all_versions_send_the_same():
    """They may name another line that asks for it, and combine what is small as they like."""
    sent = {}
    for version, file in LEDGERS.items():
        for name, record in ledger.read(file).items():
            counts = sent.setdefault(name, {}).setdefault(version, collections.Counter())
            for entry, count in record.counts.items():
                if entry.num_bytes > 1024:
                    counts[dataclasses.replace(entry, source="")] += count
    assert {name.rpartition(" on ")[0] for name in sent} == set(GEOMETRIES)
    for name, by_version in sent.items():
        newest, oldest = (by_version[version] for version in LEDGERS)
        more, less = newest - oldest, oldest - newest
        if name == GATHERS_ONE_MORE:
            assert [(x.kind, x.num_bytes, n) for x, n in more.items()] == [("all-gather", 32768, 1)]
            assert [(x.kind, x.num_bytes, n) for x, n in less.items()] == [("all-to-all", 8192, 1)]
        else:
            assert not more, name
            assert not less, name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_of_four_devices_train_as_one_device_does():
    """The gradients cross a process boundary, and each process reads its own rows."""
    finished = run_processes("""
        import tpudist
        from processes import report
        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        from geometry_program import train
        losses, weights = train(strategy, num_steps=6)
        assert strategy.num_replicas_in_sync == 8
        report([losses, {name: weight.tolist() for name, weight in weights.items()}])
    """)
    for process in finished:
        losses, weights = process.result
        weights = {name: np.asarray(w, np.float32) for name, w in weights.items()}
        assert_same((losses, weights), FEW_STEPS)
