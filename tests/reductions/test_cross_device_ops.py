"""How replicas communicate is a choice: the program is another, the numbers are the same."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import VariableAggregation as Aggregation, VariableSynchronization as Synchronization
from tpudist.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tpudist.lowering import reductions
from tpudist.xla import communication_options
from tpudist.xla.hlo import collective_ops
from tpudist.xla.packing import Packing


class SumOfValues(tpudist.CrossDeviceOps):
    """As a user of TensorFlow writes it."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append("reduce")
        return self._sum(reduce_op, per_replica_value)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.calls.append("batch_reduce")
        return [self._sum(reduce_op, value) for value, _ in value_destination_pairs]

    def _sum(self, reduce_op, value):
        total = sum(value.values)
        return total / len(value.values) if reduce_op is tpudist.ReduceOp.MEAN else total


class Delegates(tpudist.HierarchicalCopyAllReduce):
    """As a user of TensorFlow extends a built-in one."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


def added(arrays):
    total = arrays[0]
    for x in arrays[1:]:
        total = total + x
    return total


CHOICES = {
    "XLA's": lambda: None,
    "one device": tpudist.ReductionToOneDevice,
    "a named device, by a function": lambda: tpudist.ReductionToOneDevice("cpu:1", added),
    "groups": tpudist.HierarchicalCopyAllReduce,
    "groups, in two packs": lambda: tpudist.HierarchicalCopyAllReduce(num_packs=2),
    "groups, one by one": lambda: tpudist.HierarchicalCopyAllReduce(num_packs=0),
    "a sum in Python": SumOfValues,
    "a subclass": Delegates,
}


VARIATIONS = {
    "a named device, by a function",
    "groups, in two packs",
    "groups, one by one",
    "a subclass",
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive) if name in VARIATIONS else name
        for name in CHOICES
    ]
)
def choice(request):
    return CHOICES[request.param]


def replica():
    return tpudist.get_replica_context()


def me():
    return replica().replica_id_in_sync_group


def collectives(strategy, fn, args=()):
    """Kind, number of groups and bytes of each collective of a compiled program."""
    text = strategy.lower(fn, args).compile().as_text()
    return [(c.kind, len(c.groups or ()), c.num_bytes) for c in collective_ops.collectives(text)]


def kinds(strategy, fn, args=()):
    return {(kind, groups) for kind, groups, _ in collectives(strategy, fn, args)}


# The numbers.


def results_of_reductions(strategy):
    """Returns the results of all reductions, in a step and after it."""
    with strategy.scope():
        summed = tpudist.Variable(0.0, aggregation=Aggregation.SUM)
        mean = tpudist.Variable(
            0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.MEAN
        )

    def merged(strategy, x):
        first = strategy.reduce("sum", x, axis=None)
        second = strategy.reduce("mean", x, axis=0)
        third = strategy.extended.reduce_to("mean", x, x)
        return [first, second, third, *strategy.extended.batch_reduce_to("sum", [(x, x)] * 2)]

    def step(x):
        mine = x + me()
        tree = {
            "float": mine,
            "half": mine.astype(jnp.bfloat16),
            "int": me() * jnp.arange(3),
            "equal": 2.0,
        }
        summed.assign_add(mine.sum())
        mean.assign_add(mine.sum())
        return (
            replica().all_reduce("sum", tree),
            replica().all_reduce("mean", tree["float"]),
            replica().merge_call(merged, args=(mine,)),
            mine,
        )

    *reduced, mine = strategy.run(step, (jnp.arange(4.0),))
    after = [strategy.reduce(op, mine, axis) for op in ("sum", "mean") for axis in (None, 0)]
    found = reduced, after, float(summed), float(mean)
    return jax.tree.map(lambda x: np.asarray(x, float), found)


@functools.cache
def plain_results(devices):
    return results_of_reductions(tpudist.MirroredStrategy(devices))


OTHER_DEVICES = [("cpu:0", "cpu:1"), ("cpu:1",), tuple(f"cpu:{i}" for i in range(6))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [None, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OTHER_DEVICES)],
    ids=str,
)
def test_every_reduction_gives_the_same_numbers(choice, devices):
    strategy = tpudist.MirroredStrategy(devices, cross_device_ops=choice())
    found, wanted = results_of_reductions(strategy), plain_results(devices)
    jax.tree.map(np.testing.assert_allclose, found, wanted)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize(
    "ops", [tpudist.ReductionToOneDevice(), tpudist.HierarchicalCopyAllReduce(2)]
)
def test_the_smallest_and_the_largest_can_be_chosen_too(ops, op):
    strategy = tpudist.MirroredStrategy(cross_device_ops=ops)
    result = strategy.run(lambda: replica().all_reduce(op, [me(), me() % 3 == 1, 1.5 * me()]))
    assert [float(x) for x in result] == ([0, 0, 0] if op == "min" else [7, 1, 10.5])


@pytest.mark.exhaustive
def test_partial_batches_stay_exact(choice):
    strategy = tpudist.MirroredStrategy(cross_device_ops=choice())
    (batch,) = strategy.experimental_distribute_dataset([np.arange(11.0, dtype=np.float32)])
    assert float(strategy.reduce("mean", batch, axis=0)) == 5
    assert float(strategy.reduce("sum", batch, axis=0)) == 55
    in_trace = strategy.run(
        lambda x: replica().merge_call(lambda s, x: s.reduce("mean", x, axis=0), args=(x,)),
        (batch,),
    )
    assert float(in_trace) == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "name", ["XLA's", "one device", "groups", "groups, in two packs", "a sum in Python"]
)
def test_the_gradient_of_a_reduction_is_the_same_reduction(name, op):
    """As TensorFlow's: y_i = all_reduce(x) * c_i has the gradient all_reduce(c)."""
    strategy = tpudist.MirroredStrategy(cross_device_ops=CHOICES[name]())

    def step(x, other):
        def loss(x, other):
            y, z = replica().all_reduce(op, [x, other])
            return ((y + z.sum()) * (me() + 1.0)).sum()

        return jax.grad(loss)(x * me(), other), jax.jvp(loss, (x, other), (x, other))[1]

    gradient, tangent = strategy.run(step, (jnp.ones(3), jnp.ones((2, 2))))
    for part in strategy.experimental_local_results(gradient):
        assert part.tolist() == [36.0 if op == "sum" else 4.5] * 3
    scale = 8 if op == "sum" else 1
    expected = [(scale * 3 + 3 * scale * 4) * (i + 1) for i in range(8)]
    assert [float(x) for x in strategy.experimental_local_results(tangent)] == expected


@pytest.mark.parametrize("name", ["one device", "groups"])
def test_a_gradient_through_a_reduction_is_known_to_be_equal_on_all_replicas(name):
    """Else a program that XLA's own reduction allows would be refused."""
    strategy = tpudist.MirroredStrategy(cross_device_ops=CHOICES[name]())
    gradient = strategy.run(
        lambda: jax.grad(lambda x: replica().all_reduce("mean", x) * me())(jnp.float32(1))
    )
    assert isinstance(gradient, jax.Array)
    assert float(gradient) == 3.5


def trained_weights(strategy):
    rng = np.random.default_rng(0)
    model = strategy.create(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.sgd(0.1), m), model)

    def step(model, optimizer, x):
        def loss_of(model):
            return tpudist.compute_average_loss((model(x) ** 2).mean(-1))

        optimizer.update(model, nnx.grad(loss_of)(model))

    data = [rng.normal(size=(16, 8)).astype(np.float32) for _ in range(3)]
    for x in strategy.experimental_distribute_dataset(data):
        strategy.run(step, (model, optimizer, x))
    return np.asarray(model.kernel[...])


@pytest.fixture(scope="module")
def plain_weights():
    return trained_weights(tpudist.MirroredStrategy())


@pytest.mark.exhaustive
def test_training_gives_the_same_weights(choice, plain_weights):
    chosen = trained_weights(tpudist.MirroredStrategy(cross_device_ops=choice()))
    np.testing.assert_allclose(chosen, plain_weights, rtol=1e-5, atol=1e-7)


def test_statistics_of_a_model_are_combined_as_chosen():
    """At the end of a step, without a word of the user's."""
    strategy = tpudist.MirroredStrategy(cross_device_ops=tpudist.HierarchicalCopyAllReduce())
    model = strategy.create(lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0)))

    def step(model):
        model(jnp.ones((2, 3)) * me())

    assert kinds(strategy, step, (model,)) == {("all-reduce", 2), ("all-reduce", 4)}
    strategy.run(step, (model,))
    np.testing.assert_allclose(model.mean[...], np.full(3, 0.01 * 3.5), rtol=1e-5)


# The programs.


def everything(strategy):
    """A step that reduces in all the ways there are."""
    with strategy.scope():
        v = tpudist.Variable(0.0, aggregation=Aggregation.MEAN)
        local = tpudist.Variable(
            0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM
        )

    def merged(strategy, x):
        return strategy.reduce("sum", x, axis=None), local.read_value()

    def assigns():
        v.assign(1.0 * me())

    return {
        "all_reduce": lambda: replica().all_reduce("sum", me()),
        "assign": assigns,
        "reduce": lambda: replica().merge_call(merged, args=(1.0 * me(),)),
    }


@pytest.mark.parametrize("how", ["all_reduce", "assign", "reduce"])
def test_every_reduction_compiles_the_chosen_algorithm(how):
    expected = {
        "XLA's": {("all-reduce", 1)},
        "one device": {("collective-permute", 1), ("all-reduce", 1)},
        "groups": {("all-reduce", 2), ("all-reduce", 4)},
        "a sum in Python": {("all-gather", 1)},
    }
    found = {}
    for name in expected:
        strategy = tpudist.MirroredStrategy(cross_device_ops=CHOICES[name]())
        found[name] = kinds(strategy, everything(strategy)[how])
    assert found == expected


def test_values_travel_to_the_device_that_was_named():
    strategy = tpudist.MirroredStrategy(cross_device_ops=tpudist.ReductionToOneDevice("cpu:5"))
    text = strategy.lower(lambda: replica().all_reduce("sum", me())).compile().as_text()
    pairs = {f"source_target_pairs={{{{{i},5}}}}" for i in range(8) if i != 5}
    assert all(pair in text for pair in pairs)


@pytest.mark.parametrize(
    ("num_replicas", "size"), [(1, 1), (2, 2), (4, 2), (6, 3), (7, 7), (8, 4), (32, 8), (64, 8)]
)
def test_groups_are_as_many_as_large_or_larger(num_replicas, size):
    assert reductions.group_size(num_replicas) == size


def test_replicas_without_groups_combine_at_once():
    ops = tpudist.HierarchicalCopyAllReduce()
    strategy = tpudist.MirroredStrategy(jax.devices()[:3], cross_device_ops=ops)
    fn = lambda: replica().all_reduce("sum", me())  # noqa: E731
    assert collectives(strategy, fn) == [("all-reduce", 1, 4)]


@pytest.mark.slow
def test_packs_are_collectives():
    """One per pack in each of the three phases, of the number that was asked for."""
    for num_packs, number in ((1, 1), (2, 2), (3, 3), (0, 6), (9, 6)):
        ops = tpudist.HierarchicalCopyAllReduce(num_packs)
        strategy = tpudist.MirroredStrategy(cross_device_ops=ops)

        def step(xs):
            return replica().all_reduce("sum", [x * me() for x in xs])

        found = collectives(strategy, step, ([jnp.ones(16)] * 6,))
        across = [num_bytes for _, groups, num_bytes in found if groups == 4]
        assert len(across) == number
        assert sum(across) == 6 * 64


def test_users_own_collectives_in_groups_are_still_not_trusted():
    """The built-in ones are known by name to make values equal."""
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        v = tpudist.Variable(0.0)

    def step():
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        v.assign(jax.lax.psum(1.0 * me(), "replica", axis_index_groups=halves))

    with pytest.raises(ValueError, match="would differ between replicas"):
        strategy.run(step)


# Outside of programs.


def stacked(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.full(2, c.replica_id_in_sync_group, np.float32)
    )


def test_values_can_be_combined_by_hand(choice):
    ops = choice()
    if ops is None:
        ops = tpudist.HierarchicalCopyAllReduce(num_packs=1)
    strategy = tpudist.MirroredStrategy()
    value = stacked(strategy)
    assert ops.reduce("sum", value, value).tolist() == [28, 28]
    assert ops.reduce("sum", value, value).sharding.is_fully_replicated
    on_one = ops.reduce("mean", value, "cpu:3")
    assert (on_one.tolist(), on_one.devices()) == ([3.5, 3.5], {jax.devices()[3]})
    several = ops.batch_reduce("sum", [(value, value), (value, "cpu:2")])
    assert [x.tolist() for x in several] == [[28, 28]] * 2
    assert several[1].devices() == {jax.devices()[2]}
    assert ops.batch_reduce("sum", []) == []
    assert ops.broadcast(2.0, value).sharding.device_set == set(jax.devices())
    assert ops.broadcast(2.0, "cpu:4").devices() == {jax.devices()[4]}


def test_the_value_of_one_replica_is_itself():
    """As in TensorFlow; an array is taken for one."""
    ops = tpudist.ReductionToOneDevice()
    assert ops.reduce("sum", jnp.ones(2), "cpu:0").tolist() == [1, 1]
    one = tpudist.MirroredStrategy(["cpu:2"])
    value = tpudist.PerReplica(one.replicate(np.ones((1, 2), np.float32)))
    assert ops.reduce("sum", value, value).tolist() == [1, 1]


def test_a_value_that_is_equal_on_all_replicas_counts_as_often():
    ops, strategy = tpudist.ReductionToOneDevice(), tpudist.MirroredStrategy()
    mirrored = strategy.replicate(np.float32(2))
    assert float(ops.reduce("sum", mirrored, mirrored)) == 16
    assert float(ops.reduce("mean", mirrored, mirrored)) == 2

    def merged(strategy, x):
        equal = ops.reduce("mean", x, x)
        return ops.batch_reduce("sum", [(equal, equal), (x, x)])

    result = strategy.run(lambda: replica().merge_call(merged, args=(1.0 * me(),)))
    assert [float(x) for x in result] == [28, 28]


def test_a_program_made_by_hand_is_compiled_once():
    ops, strategy = SumOfValues(), tpudist.MirroredStrategy()
    for _ in range(3):
        ops.reduce("sum", stacked(strategy), "cpu:0")
    assert ops.calls == ["reduce"]


def test_single_values_and_batches_call_different_implementations():
    """Same as in TensorFlow: all_reduce and batch_reduce_to call the batch implementation."""
    ops = SumOfValues()
    strategy = tpudist.MirroredStrategy(cross_device_ops=ops)
    strategy.run(lambda: replica().all_reduce("sum", [1.0, 2.0]))
    assert ops.calls == ["batch_reduce"]
    value = stacked(strategy)
    assert strategy.extended.batch_reduce_to("sum", [(value, value)])[0].tolist() == [28, 28]
    assert ops.calls == ["batch_reduce"] * 2
    assert strategy.reduce("sum", value, axis=None).tolist() == [28, 28]
    assert ops.calls == ["batch_reduce"] * 2 + ["reduce"]


# What is refused.


def test_the_base_class_says_what_to_override():
    strategy = tpudist.MirroredStrategy(cross_device_ops=tpudist.CrossDeviceOps())
    with pytest.raises(NotImplementedError, match="batch_reduce_implementation must be implement"):
        strategy.run(lambda: replica().all_reduce("sum", me()))
    value = stacked(strategy)
    with pytest.raises(
        NotImplementedError, match="CrossDeviceOps does not support reduce: reduce_"
    ):
        strategy.reduce("sum", value, axis=None)


@pytest.mark.parametrize("make", [tpudist.HierarchicalCopyAllReduce, tpudist.NcclAllReduce])
@pytest.mark.parametrize("num_packs", [-1, 1.5, True])
def test_invalid_numbers_of_packs_are_rejected(make, num_packs):
    with pytest.raises(ValueError, match="`num_packs` must be an integer >= 0"):
        make(num_packs=num_packs)


def test_nccl_is_refused_where_there_are_no_gpus():
    ops = tpudist.NcclAllReduce()
    with pytest.raises(ValueError, match="NcclAllReduce does not support 8 cpu device.s.: NCC"):
        tpudist.MirroredStrategy(cross_device_ops=ops)
    value = stacked(tpudist.MirroredStrategy())
    with pytest.raises(ValueError, match=r"or use HierarchicalCopyAllReduce\(\) or Reduction"):
        ops.reduce("sum", value, value)


def test_invalid_cross_device_ops_are_rejected():
    with pytest.raises(ValueError, match="must not be of type str. Pass a tpud"):
        tpudist.MirroredStrategy(cross_device_ops="nccl")
    with pytest.raises(ValueError, match="is not among those .* omit reduce_to_device"):
        tpudist.MirroredStrategy(["cpu:0"], tpudist.ReductionToOneDevice("cpu:1"))


@pytest.mark.parametrize("destinations", [None, [], ["cpu:0"], 3.5])
def test_invalid_destinations_are_rejected(destinations):
    ops, value = tpudist.ReductionToOneDevice(), stacked(tpudist.MirroredStrategy())
    for act in (
        lambda: ops.reduce("sum", value, destinations),
        lambda: ops.batch_reduce("sum", [(value, destinations)]),
        lambda: ops.broadcast(1.0, destinations),
    ):
        with pytest.raises(ValueError, match="received destinations="):
            act()


def test_batch_reduce_rejects_values_without_destinations():
    with pytest.raises(ValueError, match="batch_reduce takes pairs .value, destinations., but"):
        tpudist.ReductionToOneDevice().batch_reduce("sum", [1.0])


def test_a_partial_batch_is_refused_by_hand():
    strategy = tpudist.MirroredStrategy()
    (batch,) = strategy.experimental_distribute_dataset([np.arange(11.0, dtype=np.float32)])
    with pytest.raises(ValueError, match="a partial batch, whose parts have no common shape"):
        tpudist.ReductionToOneDevice().reduce("sum", batch, batch)


def test_a_function_that_does_not_add_is_refused():
    def stack(arrays):
        return jnp.stack(arrays)

    ops = tpudist.ReductionToOneDevice(accumulation_fn=stack)
    strategy = tpudist.MirroredStrategy(cross_device_ops=ops)
    with pytest.raises(
        ValueError, match=r"accumulation_fn returned an array of shape \(8, 2\) for arr"
    ):
        strategy.run(lambda: replica().all_reduce("sum", jnp.ones(2)))
    with pytest.raises(
        ValueError, match="cannot reduce by ReduceOp.MAX, because its function adds"
    ):
        strategy.run(lambda: replica().all_reduce("max", jnp.ones(2)))


class Broken(SumOfValues):
    """Gives what it is told to give of a value."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def _sum(self, reduce_op, value):
        return self.give(value)


@pytest.mark.parametrize("give", [lambda value: None, lambda value: tpudist.PerReplica(None)])
def test_a_reduction_that_gives_no_array_is_refused(give):
    strategy = tpudist.MirroredStrategy(cross_device_ops=Broken(give))
    with pytest.raises(ValueError, match="Broken reduced a value to .*. It must be an array"):
        strategy.run(lambda: replica().all_reduce("sum", me()))


def test_a_reduction_that_gives_replicas_different_values_is_refused():
    strategy = tpudist.MirroredStrategy()
    value = stacked(strategy)
    with pytest.raises(
        ValueError, match="Broken returned a result that may differ between replicas"
    ):
        Broken(lambda value: value).reduce("sum", value, value)


def test_a_reduction_that_forgets_values_is_refused():
    class Forgets(SumOfValues):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return []

    strategy = tpudist.MirroredStrategy(cross_device_ops=Forgets())
    with pytest.raises(ValueError, match="received 1 value.s., and returned 0"):
        strategy.run(lambda: replica().all_reduce("sum", me()))


# Options.


def test_options_are_checked_when_they_are_made():
    assert CommunicationOptions() == CommunicationOptions(0, None, "auto")
    assert CommunicationOptions(implementation="nccl").implementation.value == "NCCL"
    assert CollectiveCommunication is CommunicationImplementation
    assert [x.name for x in CommunicationImplementation] == ["AUTO", "RING", "NCCL"]
    for size in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`bytes_per_pack` must be an integer >= 0"):
            CommunicationOptions(bytes_per_pack=size)
    for implementation in ("gloo", None, 3):
        with pytest.raises(ValueError, match="`implementation` must be a tpudist.experimental.Com"):
            CommunicationOptions(implementation=implementation)


def test_hints_are_options_and_deprecated():
    with pytest.warns(DeprecationWarning, match="use tpudist.experimental.CommunicationOptions"):
        hints = CollectiveHints(bytes_per_pack=4)
    assert isinstance(hints, CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (4, None)


def places_of_options(options):
    """Calls that take options, by name."""
    strategy = tpudist.MirroredStrategy()
    value = stacked(strategy)

    def in_replica(method, *args):
        return lambda: strategy.run(lambda: getattr(replica(), method)(*args, options=options))

    extended, ops = strategy.extended, tpudist.ReductionToOneDevice()
    return {
        "all_reduce": in_replica("all_reduce", "sum", jnp.ones(2)),
        "all_gather": in_replica("all_gather", jnp.ones(2), 0),
        "reduce_to": lambda: extended.reduce_to("sum", value, value, options),
        "batch_reduce_to": lambda: extended.batch_reduce_to("sum", [(value, value)], options),
        "reduce": lambda: ops.reduce("sum", value, value, options),
        "batch_reduce": lambda: ops.batch_reduce("sum", [(value, value)], options),
        "MultiWorkerMirroredStrategy": lambda: tpudist.MultiWorkerMirroredStrategy(
            communication_options=options
        ),
    }


PLACES = (
    "all_reduce",
    "all_gather",
    "reduce_to",
    "batch_reduce_to",
    "reduce",
    "batch_reduce",
    "MultiWorkerMirroredStrategy",
)


def test_the_places_of_options_are_all_tried():
    assert tuple(places_of_options(None)) == PLACES


@pytest.mark.parametrize("place", PLACES)
def test_options_of_another_type_are_refused(place):
    with pytest.raises(ValueError, match="must be a tpudist.experimental.CommunicationOptions"):
        places_of_options("ring")[place]()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "asked",
    [
        {"timeout_seconds": 61.5},
        pytest.param({"implementation": "RING"}, marks=pytest.mark.slow),
        pytest.param({"implementation": "NCCL"}, marks=pytest.mark.exhaustive),
    ],
)
def test_options_without_effect_warn_once_per_place(monkeypatch, place, asked):
    monkeypatch.setattr("tpudist.xla.communication_options._warned", set())
    call = places_of_options(CommunicationOptions(**asked))[place]
    with pytest.warns(UserWarning, match=f"{next(iter(asked))}=.* has no effect") as caught:
        call()
    assert f"{place}(" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        places_of_options(CommunicationOptions(**asked))[place]()


SIX = [jnp.ones(16)] * 6  # 64 bytes each


@pytest.mark.parametrize(("size", "number"), [(0, 1), (64, 6), (150, 3), (384, 1), (1, 6)])
def test_packs_hold_at_most_the_requested_bytes(size, number):
    """An array is not split: a larger array has its own collective."""
    strategy = tpudist.MirroredStrategy()

    def step(xs):
        return replica().all_reduce("sum", [x * me() for x in xs], CommunicationOptions(size))

    found = collectives(strategy, step, (SIX,))
    assert len(found) == number
    assert sum(num_bytes for *_, num_bytes in found) == 384
    assert strategy.run(step, (SIX,))[5].tolist() == [28] * 16


def test_packs_of_mixed_dtypes_give_the_same_numbers():
    strategy = tpudist.MirroredStrategy()

    def step():
        xs = [jnp.ones((2, 3)) * me(), jnp.arange(5) * me(), jnp.ones(3, jnp.bfloat16) * me(), me()]
        options = CommunicationOptions(bytes_per_pack=60)
        return replica().all_reduce("sum", xs), replica().all_reduce("sum", xs, options)

    plain, packed = strategy.run(step)
    for x, y in zip(plain, packed, strict=True):
        assert (x.dtype, x.tolist()) == (y.dtype, y.tolist())


def test_a_gather_and_a_merge_call_take_packs_too():
    strategy = tpudist.MirroredStrategy()
    options = CommunicationOptions(bytes_per_pack=128)

    def merged(strategy, *xs):
        return strategy.extended.batch_reduce_to("sum", [(x, x) for x in xs], options)

    def reduces(xs):
        return replica().merge_call(merged, args=[x * me() for x in xs])

    def gathers(xs):
        return replica().all_gather([x * me() for x in xs], 0, options)

    assert [c[0] for c in collectives(strategy, reduces, (SIX,))] == ["all-reduce"] * 3
    gathered = strategy.run(gathers, (SIX,))
    assert gathered[0].tolist() == np.repeat(range(8), 16).tolist()


def test_reductions_without_options_use_the_options_of_the_strategy():
    options = CommunicationOptions(bytes_per_pack=128)
    strategy = tpudist.MultiWorkerMirroredStrategy(communication_options=options)

    def step(xs):
        return replica().all_reduce("sum", [x * me() for x in xs])

    assert len(collectives(strategy, step, (SIX,))) == 3
    plain = tpudist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions())
    assert len(collectives(plain, step, (SIX,))) == 1


def test_packs_in_replicas_of_several_devices():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})

    def step(xs):
        return replica().all_reduce("sum", [x * (me() + 1) for x in xs], CommunicationOptions(64))

    assert strategy.run(step, (SIX,))[0].tolist() == [3] * 16


class Chip:
    """As much of a device as is asked for."""

    def __init__(self, platform):
        self.platform = platform


def test_packs_that_are_combined_again_are_a_warning(monkeypatch):
    monkeypatch.setattr("tpudist.xla.communication_options._warned", set())
    with pytest.warns(UserWarning, match="bytes_per_pack=64.* has no effect: on tpu devices XLA"):
        communication_options.check_options(CommunicationOptions(64), "all_reduce(options", "tpu")
    with pytest.warns(UserWarning, match=r"HierarchicalCopyAllReduce\(num_packs=2\) has no effect"):
        tpudist.HierarchicalCopyAllReduce(2).check_devices([Chip("tpu")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        communication_options.check_options(CommunicationOptions(64), "all_reduce(options", "gpu")
        communication_options.check_options(
            CommunicationOptions(0, None, "NCCL"), "all_reduce(options", "gpu"
        )
        tpudist.HierarchicalCopyAllReduce().check_devices([Chip("tpu")])
        tpudist.NcclAllReduce().check_devices([Chip("gpu")])


def test_compiler_options_keep_packs_apart():
    """XLA:CPU combines all-reduces, XLA:GPU up to a threshold, and XLA:TPU takes no such option."""
    packing = Packing(bytes_per_pack=1000)
    assert packing.compiler_options("gpu") == {
        "xla_gpu_all_reduce_combine_threshold_bytes": 1000,
        "xla_gpu_all_gather_combine_threshold_bytes": 1000,
    }
    assert set(packing.compiler_options("cpu")) == {"xla_disable_hlo_passes"}
    assert packing.compiler_options("tpu") == {}
    assert Packing().compiler_options("cpu") == {}


@pytest.mark.parametrize(
    ("packing", "sizes", "packs"),
    [
        (Packing(), [1, 2], [[0, 1]]),
        (Packing(), [], []),
        (Packing(num_packs=2), [1, 1, 1, 1], [[0, 1], [2, 3]]),
        (Packing(num_packs=2), [100, 1, 1, 1], [[0], [1, 2, 3]]),
        (Packing(num_packs=3), [1, 1], [[0], [1]]),
        (Packing(num_packs=0), [5, 5], [[0], [1]]),
        (Packing(num_packs=2), [0, 0, 0], [[0, 1, 2]]),
        (Packing(bytes_per_pack=10), [4, 4, 4, 20, 0, 1], [[0, 1], [2], [3], [4, 5]]),
    ],
)
def test_arrays_are_divided_by_their_bytes(packing, sizes, packs):
    assert packing.packs(sizes) == packs


@pytest.mark.slow
def test_several_steps_and_functions_of_all_replicas_communicate_as_chosen(choice):
    strategy = tpudist.MirroredStrategy(cross_device_ops=choice())
    with strategy.scope():
        v = tpudist.Variable(0.0, aggregation=Aggregation.SUM)
        seen = tpudist.Variable(0.0)

    def step(x):
        v.assign_add(x.sum())
        return x.sum() * me()

    @tpudist.function
    def train(x):
        seen.assign(strategy.reduce("sum", strategy.run(step, (x,)), axis=None))
        return seen.read_value()

    batches = [np.ones((8, 2), np.float32)] * 3
    (*_, batch) = strategy.experimental_distribute_dataset(batches)
    results = strategy.run_steps(step, iter([batch] * 3), 3)
    assert [float(strategy.reduce("mean", x, axis=None)) for x in results] == [7, 7, 7]
    assert float(v) == 48
    assert float(train(batch)) == 56
    assert float(v) == 64


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_complex_numbers_are_summed_also_those_of_a_constant(num_replicas):
    """XLA:CPU ends the process over the sum of such a constant."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    same = np.full(4, 1 - 2j, np.complex64)

    def step(x):
        replica = tpudist.get_replica_context()
        own = x * (1 + replica.replica_id_in_sync_group)
        return [replica.all_reduce(op, y) for op in ("sum", "mean") for y in (same, own)]

    constant, own, mean, own_mean = strategy.run(step, (same,))
    total = num_replicas * (num_replicas + 1) // 2
    np.testing.assert_allclose(constant, same * num_replicas)
    np.testing.assert_allclose(own, same * total)
    np.testing.assert_allclose(mean, same)
    np.testing.assert_allclose(own_mean, same * total / num_replicas)
