"""The replica context in nested transformations, and PerReplica in other JAX functions."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings, strategies as st

import tpudist
from tpudist import ReduceOp


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module", params=["mirrored", "fsdp", "one device"])
def strategy(request):
    if request.param == "one device":
        return tpudist.OneDeviceStrategy("cpu:1")
    if request.param == "fsdp":
        return tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    return tpudist.MirroredStrategy()


def parts_of(strategy, value_fn):
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_fn(context.replica_id_in_sync_group)
    )


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


# merge_call in nested transformations.


def merge_sum(x):
    replica = tpudist.get_replica_context()
    return replica.merge_call(lambda s, x: s.reduce("sum", x, axis=None), args=(x,))


NESTED = {
    "jit": lambda x: jax.jit(merge_sum)(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c + merge_sum(x), None), 0.0, None, length=1)[0],
    "while": lambda x: jax.lax.fori_loop(0, 1, lambda i, c: c + merge_sum(x), 0.0),
    "cond": lambda x: jax.lax.cond(jnp.array(True), merge_sum, lambda _: 0.0, x),
    "remat": lambda x: jax.checkpoint(merge_sum)(x),
    "vmap": lambda x: jax.vmap(merge_sum)(x[None])[0],
    "jit of scan": lambda x: jax.jit(NESTED["scan"])(x),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("nested", NESTED)
def test_merge_call_works_in_nested_transformations(strategy, nested):
    n = strategy.num_replicas_in_sync

    def step():
        mine = jnp.float32(tpudist.get_replica_context().replica_id_in_sync_group + 1)
        return NESTED[nested](mine)

    assert float(strategy.run(step)) == n * (n + 1) / 2


def test_merge_call_in_a_branch_that_replicas_disagree_on_raises(mirrored):
    def step():
        mine = tpudist.get_replica_context().replica_id_in_sync_group.astype(float)
        return jax.lax.cond(mine > 3, merge_sum, lambda x: x, mine)

    with pytest.raises(
        ValueError, match="Replicas with different conditions would wait for each other"
    ):
        mirrored.run(step)


def test_a_jitted_helper_works_in_every_context(mirrored):
    """JAX caches its trace, and the trace of one context must not be used in another."""
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])

    @jax.jit
    def total(x):
        return tpudist.get_replica_context().all_reduce("sum", x)

    for _ in range(2):
        assert float(mirrored.run(total, (1.0,))) == 8
        assert float(other.run(total, (1.0,))) == 2
        assert float(total(1.0)) == 1


def test_merge_call_passes_the_same_object_of_all_replicas_as_itself(mirrored):
    """Different objects become a PerReplica, and the same object stays, as in TensorFlow."""
    seen = []

    def merge(strategy, same, mine, number, name, tree):
        seen.append((type(mine).__mro__, number, name))
        doubled = same * 2
        return {"same": doubled, "mine": mine, "none": None, "tree": tree["a"] + 1}

    def step(x):
        replica = tpudist.get_replica_context()
        mine = x + replica.replica_id_in_sync_group
        return replica.merge_call(merge, (x, mine), {"number": 3, "name": "a", "tree": {"a": x}})

    result = mirrored.run(step, (jnp.float32(1),))
    assert (float(result["same"]), float(result["tree"]), result["none"]) == (2, 2, None)
    assert local(mirrored, result["mine"]) == [1.0 + i for i in range(8)]
    [(kinds, number, name)] = seen
    assert tpudist.PerReplica in kinds
    assert (number, name) == (3, "a")


def test_merge_call_receives_plain_values_with_one_replica():
    """Nothing is a PerReplica with one replica, so arithmetic works on every value."""
    strategy = tpudist.OneDeviceStrategy("cpu:0")
    dataset = strategy.experimental_distribute_dataset([np.ones((4, 2), np.float32)])

    def merge(strategy, x, y):
        assert not isinstance(x, tpudist.PerReplica)
        return strategy.reduce("sum", x * 2 + y, axis=None)

    def step(x):
        replica = tpudist.get_replica_context()
        return replica.merge_call(merge, (x, x + replica.replica_id_in_sync_group))

    for x in (np.ones((4, 2), np.float32), next(iter(dataset))):
        assert strategy.run(step, (x,)).tolist() == [[3.0, 3.0]] * 4


def test_a_context_used_after_its_call_raises(mirrored):
    kept = []

    def step():
        kept.append(tpudist.get_replica_context())
        return 0

    mirrored.run(step)
    with mirrored.scope(), pytest.raises(RuntimeError, match="current context is cross-replica"):
        kept[0].merge_call(lambda strategy: None)
    with pytest.raises(RuntimeError, match="another replica function is running"):
        mirrored.run(lambda: kept[0].all_reduce("sum", 1.0))
    with pytest.raises(RuntimeError, match="not the current one: the current strategy is"):
        tpudist.get_strategy().run(lambda: kept[0].all_gather(jnp.ones(1), 0))


def test_the_default_context_reduces_to_the_dtypes_of_several_replicas(mirrored):
    def reduce():
        here = tpudist.get_replica_context()
        slices = tpudist.IndexedSlices(jnp.ones((1, 2)), jnp.asarray([3]), (4, 2))
        values = {"integer": jnp.int32(3), "number": 2.5, "slices": slices}
        return [x.dtype for x in jax.tree.leaves(here.all_reduce("mean", values))]

    dtypes = []
    mirrored.run(lambda: dtypes.append(reduce()))
    assert dtypes == [reduce()]


def test_each_thread_has_its_own_context(mirrored):
    seen = {}

    def look(name):
        seen[name] = tpudist.has_strategy(), tpudist.in_cross_replica_context()
        if name == "own scope":
            with mirrored.scope():
                seen["in it"] = tpudist.get_strategy() is mirrored

    with mirrored.scope():
        for name in ("another thread", "own scope"):
            thread = threading.Thread(target=look, args=(name,))
            thread.start()
            thread.join()
        look("this thread")
    assert seen == {
        "another thread": (False, False),
        "own scope": (False, False),
        "in it": True,
        "this thread": (True, True),
    }


# Gradients.


@settings(max_examples=15, deadline=None)
@given(
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    weights=st.lists(st.integers(-4, 4), min_size=8, max_size=8),
)
def test_the_gradient_of_all_reduce_is_all_reduce(op, weights):
    mirrored = made_once()
    c = parts_of(mirrored, lambda i: np.float32(weights[i]))

    def step(x, c):
        replica = tpudist.get_replica_context()
        return jax.grad(lambda tree: replica.all_reduce(op, tree)["x"] * c)({"x": x})["x"]

    total = sum(weights) / (1 if op is ReduceOp.SUM else 8)
    assert local(mirrored, mirrored.run(step, (jnp.float32(2), c))) in ([total] * 8, [total])


@functools.cache
def made_once():
    """Strategy for hypothesis, which has no module fixtures."""
    return tpudist.MirroredStrategy()


@settings(max_examples=10, deadline=None)
@given(axis=st.sampled_from([0, 1, -1, -2]))
def test_the_gradient_of_all_gather_is_this_replicas_slice_of_the_sum(axis):
    mirrored = made_once()
    weight = np.arange(2 * 3 * 8, dtype=np.float32).reshape((16, 3) if axis in (0, -2) else (2, 24))

    def step(x):
        replica = tpudist.get_replica_context()
        factor = 1.0 + replica.replica_id_in_sync_group

        def loss(x):
            return (replica.all_gather([x], axis)[0] * weight * factor).sum()

        return jax.grad(loss)(x)

    got = mirrored.run(step, (jnp.ones((2, 3)),))
    expected = np.split(weight * 36.0, 8, axis=axis)
    for x, y in zip(mirrored.experimental_local_results(got), expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), y)


@pytest.mark.parametrize("op", ["sum", "SUM", "Mean", ReduceOp.MEAN])
def test_ops_may_be_strings_in_any_case(mirrored, op):
    total = mirrored.run(lambda: tpudist.get_replica_context().all_reduce(op, {"a": [2.0, 4]}))
    factor = 8 if str(op).upper() == "SUM" else 1
    assert (float(total["a"][0]), float(total["a"][1])) == (2 * factor, 4 * factor)


def test_an_invalid_reduce_op_raises(mirrored):
    with pytest.raises(ValueError, match="'product' is not a valid ReduceOp"):
        mirrored.run(lambda: tpudist.get_replica_context().all_reduce("product", 1.0))
    with pytest.raises(TypeError, match="must be a tpudist.ReduceOp or its name"):
        mirrored.run(lambda: tpudist.get_replica_context().all_reduce(3, 1.0))


# PerReplica in other JAX functions.


def test_a_per_replica_works_in_jit_and_tree_functions(mirrored):
    parts = parts_of(mirrored, lambda i: np.full(2, float(i), np.float32))
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))({"x": parts})["x"]
    assert isinstance(doubled, tpudist.PerReplica)
    assert local(mirrored, doubled) == [[2.0 * i] * 2 for i in range(8)]
    leaves, treedef = jax.tree.flatten(parts)
    assert [x.shape for x in leaves] == [(8, 2)]
    again = treedef.unflatten(leaves)
    assert local(mirrored, mirrored.run(lambda x: x, (again,))) == local(mirrored, parts)


def test_a_checkpoint_restores_a_per_replica(mirrored, tmp_path):
    dataset = mirrored.experimental_make_numpy_dataset(np.arange(11.0, dtype=np.float32)).batch(16)
    [batch] = mirrored.experimental_distribute_dataset(dataset)
    tree = {"parts": parts_of(mirrored, lambda i: np.float32(i)), "batch": batch}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert local(mirrored, restored["parts"]) == [float(i) for i in range(8)]
    assert float(mirrored.reduce("mean", restored["batch"], axis=0)) == 5.0


def test_a_per_replica_is_not_an_array_outside_of_replica_functions(mirrored):
    parts = parts_of(mirrored, lambda i: np.float32(i))
    uses = [
        lambda: parts + 1,
        lambda: 1 - parts,
        lambda: jnp.sum(parts),
        lambda: np.asarray(parts),
        lambda: float(parts),
        lambda: bool(parts),
        lambda: parts[0],
        lambda: list(parts),
        lambda: len(parts),
        lambda: -parts,
        lambda: parts < 2,
    ]
    for use in uses:
        with pytest.raises(TypeError, match="was used as one array, but every replica has its own"):
            use()
    with mirrored.scope(), pytest.raises(TypeError, match="read the parts of this process with"):
        _ = parts * 2
