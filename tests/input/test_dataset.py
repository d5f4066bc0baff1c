import contextvars
import gc
import itertools
import subprocess
import sys
import threading
import time
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec

import tpudist
from processes import run_processes
from tpudist import InputOptions, InputReplicationMode, context
from tpudist.input import from_records
from tpudist.input.dataset import DistributedDataset
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.transfer.prefetch import Prefetcher
from tpudist.values.per_replica import PerReplica
from tpudist.xla.mesh import make_mesh

# NumPy datasets.


def test_batches_that_are_not_shuffled_are_views_of_the_arrays():
    x = np.arange(10.0)
    batches = list(NumpyDataset(x).batch(4))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(np.shares_memory(batch, x) for batch in batches)


def test_before_batching_the_elements_are_examples():
    dataset = NumpyDataset({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})
    assert [(e["x"].tolist(), int(e["y"])) for e in dataset] == [
        ([0, 1], 0),
        ([2, 3], 1),
        ([4, 5], 2),
    ]
    assert dataset.element_spec["x"].shape == (2,)
    assert {int(e["y"]) for e in dataset.shuffle(0)} == {0, 1, 2}


def test_a_list_is_one_array_with_its_elements_stacked():
    """Tuples and dicts are structure, as in tf.data."""
    (x, y), *_ = NumpyDataset(([np.zeros(3), np.ones(3)], [[1], [2]])).batch(2)
    np.testing.assert_array_equal(x, [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(y, [[1], [2]])


def test_each_epoch_has_its_own_reproducible_shuffled_order():
    dataset = NumpyDataset(np.arange(100)).shuffle(7).batch(30).repeat(2)
    batches = list(dataset)
    assert [len(batch) for batch in batches] == [30, 30, 30, 10] * 2
    first, second = np.concatenate(batches[:4]), np.concatenate(batches[4:])
    assert sorted(first) == sorted(second) == list(range(100))
    assert first.tolist() != second.tolist()
    again = NumpyDataset(np.arange(100)).shuffle(7).batch(30).repeat(2)
    np.testing.assert_array_equal(np.concatenate(list(again)), np.concatenate(batches))
    other = NumpyDataset(np.arange(100)).shuffle(8).batch(100)
    assert next(iter(other)).tolist() != first.tolist()


def test_the_remainder_is_dropped_in_every_epoch():
    dataset = NumpyDataset(np.arange(10)).batch(4, drop_remainder=True).repeat(3)
    assert [len(batch) for batch in dataset] == [4] * 6
    assert len(dataset) == dataset.cardinality == 6


def test_a_dataset_without_end_has_no_length():
    dataset = NumpyDataset(np.arange(3)).batch(2).repeat()
    assert dataset.cardinality == -1
    assert [len(batch) for batch in itertools.islice(dataset, 5)] == [2, 1, 2, 1, 2]
    with pytest.raises(TypeError, match="without end"):
        len(dataset)


def test_a_shard_of_examples_is_a_view_of_every_nth_of_them():
    x = np.arange(7)
    shards = [list(NumpyDataset(x).shard(3, i).batch(2)) for i in range(3)]
    assert [[b.tolist() for b in shard] for shard in shards] == [
        [[0, 3], [6]],
        [[1, 4]],
        [[2, 5]],
    ]
    assert np.shares_memory(shards[0][0], x)


def test_a_shard_of_a_batched_dataset_is_every_nth_batch_of_each_epoch():
    dataset = NumpyDataset(np.arange(10)).batch(2)
    assert [b.tolist() for b in dataset.shard(2, 1)] == [[2, 3], [6, 7]]
    twice = dataset.shard(2, 0).repeat(2)
    assert [b.tolist() for b in twice] == [[0, 1], [4, 5], [8, 9]] * 2
    assert (len(twice), dataset.shard(2, 1).cardinality) == (6, 2)
    shuffled = NumpyDataset(np.arange(10)).shuffle(3).batch(2)
    whole = [b.tolist() for b in shuffled]
    assert [b.tolist() for b in shuffled.shard(5, 4)] == [whole[4]]


def test_methods_return_new_datasets():
    dataset = NumpyDataset(np.arange(4))
    dataset.shuffle(0).batch(2).repeat(5)
    assert dataset.global_batch_size is None
    assert len(dataset) == 4
    assert dataset.batch(4).element_spec == jax.ShapeDtypeStruct((4,), np.arange(4).dtype)


def _numpy(size=4):
    return NumpyDataset(np.arange(size))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NumpyDataset({"x": np.zeros(3), "y": np.zeros(4)}), ValueError, r"\['x'\] 3, "),
        (lambda: NumpyDataset({}), ValueError, "holds no arrays"),
        (lambda: NumpyDataset((np.zeros(3), np.float32(1))), ValueError, r"\[1\] is a scalar"),
        (lambda: NumpyDataset([np.zeros(3), np.zeros(4)]), ValueError, "every row must have the"),
        (lambda: NumpyDataset(np.array(["a", "b"])), TypeError, "Convert it"),
        (lambda: NumpyDataset({"t": np.array([None])}), TypeError, r"\['t'\] has dtype object"),
        (lambda: _numpy().batch(2).batch(2), ValueError, "already batched, by 2"),
        (lambda: _numpy().batch(0), ValueError, "at least 1"),
        (lambda: _numpy().batch(2.0), ValueError, "an integer"),
        (lambda: _numpy().batch(2).shuffle(0), ValueError, "before batching"),
        (lambda: _numpy().shuffle(0).shuffle(1), ValueError, "already shuffled, with seed 0"),
        (lambda: _numpy().shuffle(-1), ValueError, "at least 0"),
        (lambda: _numpy().repeat(2), ValueError, "not batched"),
        (lambda: _numpy().batch(2).repeat(2).repeat(2), ValueError, "already repeated"),
        (lambda: _numpy().batch(2).repeat(0), ValueError, "at least 1"),
        (lambda: _numpy().shard(0, 0), ValueError, "at least 1"),
        (lambda: _numpy().shard(2, -1), ValueError, "at least 0"),
        (lambda: _numpy().shard(2, 2), ValueError, "must be one of 2 shards"),
        (lambda: _numpy().shuffle(0).shard(2, 0), ValueError, "Shard examples before shuffling"),
        (lambda: _numpy().batch(2).repeat(2).shard(2, 0), ValueError, "already repeated. Shard it"),
        (lambda: _numpy().batch(1).shard(2, 0).shard(2, 0), ValueError, "are already sharded"),
    ],
)
def test_the_error_for_an_invalid_numpy_dataset_names_the_mistake(make, error, message):
    with pytest.raises(error, match=f"(?i){message}"):
        make()


# Distributed datasets.


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda n: f"{n} replicas")
def replicas(request):
    return make_mesh(jax.devices()[: request.param])


def _two():
    return make_mesh(jax.devices()[:2])


def _real_rows(value):
    """Returns the real rows of all replicas, in global order."""
    if not isinstance(value, PerReplica):
        return np.asarray(value)
    parts = np.asarray(value.array)
    return np.concatenate([part[:count] for part, count in zip(parts, value.rows, strict=True)])


@given(
    num_rows=st.integers(1, 40),
    global_batch=st.integers(1, 20),
    num_replicas=st.sampled_from([1, 2, 4, 8]),
    seed=st.none() | st.integers(0, 3),
    as_iterable=st.booleans(),
)
@settings(max_examples=60)
def test_replicas_together_hold_each_batch_exactly(
    num_rows, global_batch, num_replicas, seed, as_iterable
):
    """The real rows equal the rows of the batch, in order, for any number of replicas."""
    x = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    dataset = NumpyDataset({"x": x, "id": np.arange(num_rows)})
    dataset = (dataset if seed is None else dataset.shuffle(seed)).batch(global_batch)
    expected = list(dataset)
    mesh = make_mesh(jax.devices()[:num_replicas])
    source = list(expected) if as_iterable else dataset
    elements = list(DistributedDataset(source, mesh, prefetch=0))
    assert len(elements) == len(expected)
    size = min(global_batch, num_rows) if as_iterable else global_batch
    for element, batch in zip(elements, expected, strict=True):
        np.testing.assert_array_equal(_real_rows(element["x"]), batch["x"])
        np.testing.assert_array_equal(_real_rows(element["id"]), batch["id"])
        if num_replicas > 1:
            assert element["x"].rows is element["id"].rows
            assert element["x"].array.shape == (num_replicas, -(-size // num_replicas), 3)
            padded = set(np.asarray(element["id"].array).flat)
            assert padded <= set(batch["id"])  # never zeros: log(0) there would spoil gradients


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_a_partial_batch_is_split_as_in_tensorflow(num_replicas):
    """Replicas have ceil(rows / n) rows until the rows end, in arrays of the full shape."""
    full, mesh = np.arange(40), make_mesh(jax.devices()[:num_replicas])
    for rows in range(1, 41):
        _, element = DistributedDataset([full, full[:rows]], mesh)
        each = -(-rows // num_replicas)
        starts = range(0, num_replicas * each, each)
        assert element.rows == tuple(min(max(rows - x, 0), each) for x in starts)
        assert element.array.shape == (num_replicas, 40 // num_replicas)
        for part, start, count in zip(np.asarray(element.array), starts, element.rows, strict=True):
            np.testing.assert_array_equal(part[:count], full[start : start + count])
            assert set(part[count:]) <= set(full[:rows])  # padding repeats rows


def test_a_full_batch_counts_all_of_its_rows_as_real():
    (element,) = DistributedDataset([np.arange(8)], _two())
    assert element.rows == (4, 4)


def test_one_replica_gets_plain_arrays_of_the_exact_size():
    mesh = make_mesh(jax.devices()[:1])
    full, last = DistributedDataset(NumpyDataset(np.arange(5)).batch(3), mesh)
    assert isinstance(full, jax.Array)
    assert (full.tolist(), last.tolist()) == ([0, 1, 2], [3, 4])
    assert full.devices() == {jax.devices()[0]}


def test_rows_are_split_over_the_batch_axes_inside_a_replica():
    mesh = make_mesh(jax.devices(), {"fsdp": 2, "tensor": 2})
    (element,) = DistributedDataset([np.zeros((8, 3))], mesh)
    assert element.array.shape == (2, 4, 3)
    assert element.array.sharding.spec == PartitionSpec("replica", ("fsdp",))
    mesh = make_mesh(jax.devices(), {"fsdp": 8})
    full, odd = DistributedDataset([np.zeros((8, 3)), np.zeros((5, 3))], mesh)
    assert full.sharding.shard_shape(full.shape) == (1, 3)
    assert odd.sharding.is_fully_replicated


def test_each_part_is_on_its_own_device(replicas):
    (element,) = DistributedDataset([np.arange(16)], replicas)
    array = element.array if replicas.num_replicas > 1 else element[None]
    each = 16 // replicas.num_replicas
    for shard in array.addressable_shards:
        replica = list(replicas.mesh.devices.flat).index(shard.device)
        first = replica * each
        assert np.asarray(shard.data).ravel().tolist() == list(range(first, first + each))


@pytest.mark.parametrize(
    "make",
    [
        lambda batches: batches,
        lambda batches: lambda: iter(batches),
        lambda batches: lambda: (batch for batch in batches),
        lambda batches: tuple(batches),
    ],
    ids=["list", "factory", "generator function", "tuple"],
)
def test_a_source_is_read_again_for_each_pass(make):
    batches = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]
    dataset = DistributedDataset(make(batches), _two())
    for _ in range(3):
        passed = [_real_rows(element).tolist() for element in dataset]
        assert passed == [batch.tolist() for batch in batches]


def test_iterators_are_independent():
    dataset = DistributedDataset(NumpyDataset(np.arange(6)).batch(2), _two())
    one, two = iter(dataset), iter(dataset)
    assert _real_rows(next(one)).tolist() == [0, 1]
    assert _real_rows(next(one)).tolist() == [2, 3]
    assert _real_rows(next(two)).tolist() == [0, 1]
    assert iter(one) is one


def test_every_pass_is_an_epoch_with_its_own_order():
    """A user who loops over the dataset per epoch must not see the same order each time."""
    source = NumpyDataset(np.arange(32)).shuffle(3).batch(8)
    dataset = DistributedDataset(source, _two())
    passes = [np.concatenate([_real_rows(e) for e in dataset]) for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate(passes), np.concatenate(list(source.repeat(2))))
    plain = [np.concatenate(list(source)) for _ in range(2)]
    np.testing.assert_array_equal(plain, passes)


def test_leaves_may_be_anything_that_numpy_accepts(replicas):
    batch = {
        "list": [0, 1, 2, 3],
        "jax": jnp.ones((4, 2)),
        "nested": ([[1.0], [2], [3], [4]], None),
    }
    (element,) = DistributedDataset([batch], replicas)
    np.testing.assert_array_equal(_real_rows(element["list"]), [0, 1, 2, 3])
    assert _real_rows(element["jax"]).shape == (4, 2)
    assert _real_rows(element["nested"][0]).shape == (4, 1)
    assert element["nested"][1] is None


def test_a_list_of_arrays_is_structure():
    """PyTorch's loaders yield [inputs, labels]."""
    ([x, y],) = DistributedDataset([[np.zeros((4, 3)), np.zeros(4)]], _two())
    assert (x.shape, y.shape) == ((2, 3), (2,))


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (np.float64, jnp.float32),
        (np.int64, jnp.int32),
        (np.uint8, jnp.uint8),
        (np.bool_, jnp.bool_),
        (jnp.bfloat16, jnp.bfloat16),
        (">i4", jnp.int32),  # reversed byte order, as in MNIST's files
        (">f8", jnp.float32),
    ],
)
def test_dtypes_match_jax(given_dtype, dtype, replicas):
    rows = np.ones(8, given_dtype)
    for source in [rows], NumpyDataset(rows).shuffle(0).batch(8):
        dataset = DistributedDataset(source, replicas)
        (element,) = dataset
        assert element.dtype == dtype
        np.testing.assert_array_equal(_real_rows(element).astype(np.float32), np.ones(8))
        assert getattr(dataset.element_spec, "array", dataset.element_spec).dtype == dtype


def test_a_loader_may_fill_the_same_array_again():
    """JAX uses aligned NumPy arrays in place on CPU, so elements would change in use."""
    memory = np.zeros(4096 + 16, np.float32)
    first = (-memory.ctypes.data // 4) % 16
    buffer = memory[first : first + 4096].reshape(8, 512)
    assert buffer.ctypes.data % 64 == 0

    def loader():
        for value in range(6):
            buffer[:] = value
            yield buffer

    for mesh in (make_mesh(jax.devices()[:1]), _two()):
        elements = list(DistributedDataset(loader, mesh))
        assert [float(_real_rows(e).max()) for e in elements] == [0, 1, 2, 3, 4, 5]


def test_donating_a_batch_does_not_change_its_source_arrays():
    memory = np.zeros(4096 + 16, np.float32)
    x = memory[(-memory.ctypes.data // 4) % 16 :][:4096].reshape(8, 512)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for element in DistributedDataset(NumpyDataset(x).batch(8), _two()):
        add(element.array).block_until_ready()
    assert x.max() == 0


def test_a_partial_batch_can_be_dropped():
    batches = [np.arange(4), np.arange(3), np.arange(4)]
    assert len(list(DistributedDataset(batches, _two(), partial_batch="drop"))) == 2
    dataset = DistributedDataset(NumpyDataset(np.arange(7)).batch(4), _two(), partial_batch="drop")
    assert dataset.cardinality == len(list(dataset)) == 1


def test_a_partial_batch_can_be_an_error_at_its_step():
    iterator = iter(DistributedDataset([np.arange(4), np.arange(3)], _two(), partial_batch="error"))
    next(iterator)
    with pytest.raises(ValueError, match="Batch 1 of the dataset has 3 rows, fewer than"):
        next(iterator)


def test_the_element_spec_describes_full_elements(replicas):
    arrays = {"x": np.zeros((12, 3)), "y": np.zeros(12, np.int64)}
    for source in (NumpyDataset(arrays).batch(8), list(NumpyDataset(arrays).batch(8))):
        dataset = DistributedDataset(source, replicas)
        spec, element = dataset.element_spec, next(iter(dataset))
        assert jax.tree.structure(spec) == jax.tree.structure(element)
        for wanted, found in zip(jax.tree.leaves(spec), jax.tree.leaves(element), strict=True):
            assert (wanted.shape, wanted.dtype) == (found.shape, found.dtype)
            assert wanted.sharding == found.sharding
        assert jax.tree.leaves(iter(dataset).element_spec) == jax.tree.leaves(spec)


def test_reading_the_element_spec_consumes_no_batch():
    dataset = DistributedDataset((np.full(4, i) for i in range(3)), _two())
    assert [dataset.element_spec.shape, dataset.element_spec.shape] == [(2,), (2,)]
    assert [int(_real_rows(element)[0]) for element in dataset] == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "cardinality"),
    [
        ([np.zeros(4)] * 3, 3),
        (lambda: iter([np.zeros(4)]), -2),
        (NumpyDataset(np.zeros(10)).batch(4).repeat(2), 6),
        (NumpyDataset(np.zeros(10)).batch(4).repeat(), -1),
    ],
    ids=["list", "factory", "numpy", "endless"],
)
def test_the_number_of_elements_is_known_for_data_that_is_read_by_number(source, cardinality):
    dataset = DistributedDataset(source, _two())
    assert dataset.cardinality == cardinality
    if cardinality > 0:
        assert len(dataset) == cardinality
    else:
        reason = {-1: "is infinite", -2: "is not known in advance"}[cardinality]
        with pytest.raises(TypeError, match=f"batches {reason}. .* enumerate"):
            len(dataset)
        assert dataset


def test_the_cardinality_is_unknown_if_batches_may_be_dropped():
    dataset = DistributedDataset([np.zeros(4)] * 3, _two(), partial_batch="drop")
    assert dataset.cardinality == -2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exhausted_iterator_stays_at_its_end(prefetch):
    iterator = iter(DistributedDataset([np.arange(4)], _two(), prefetch=prefetch))
    assert _real_rows(iterator.get_next()).tolist() == [0, 1, 2, 3]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(StopIteration):
            iterator.get_next()


def test_typed_random_keys_in_a_batch_raise_with_an_alternative():
    keys = jax.random.split(jax.random.key(0), 8)
    match = (
        r"dataset\['k'\] has random keys, key<fry>\[8\], .*key_data\(data, impl='threefry2x32'\)"
    )
    with pytest.raises(TypeError, match=match):
        list(DistributedDataset([{"k": keys}], _two()))
    with pytest.raises(TypeError, match="The NumPy dataset has random keys"):
        NumpyDataset(keys)
    strategy = tpudist.MirroredStrategy()
    [batch] = strategy.experimental_distribute_dataset([jax.random.key_data(keys)])
    wrapped = strategy.run(
        lambda data: jax.random.bits(jax.random.wrap_key_data(data, impl="threefry2x32")[0]),
        args=(batch,),
    )
    found = [int(x) for x in strategy.experimental_local_results(wrapped)]
    assert found == [int(jax.random.bits(key)) for key in keys]


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([{"x": np.zeros(4), "y": np.zeros(3)}], ValueError, r"\['x'\] 4, \['y'\] 3"),
        ([np.float32(1)], ValueError, "Batch 0 of the dataset is a scalar.*Batch the dataset"),
        ([3, 4], ValueError, "Batch 0 of the dataset is a scalar"),
        ([{"x": np.array([None, 1])}], TypeError, r"dataset\['x'\] has dtype object"),
        ([np.array(["a", "b"])], TypeError, "has dtype <U1"),
        ([{"x": [[1, 2], [3]]}], ValueError, "pad the rows"),
        ([{}], ValueError, "Batch 0 of the dataset holds no arrays"),
        ([np.zeros(0)], ValueError, "Batch 0 of the dataset has no rows"),
        ([np.zeros(4), {"x": np.zeros(4)}], ValueError, "Batch 1 of the dataset has the structure"),
        (
            [{"x": np.zeros((4, 2))}, {"x": np.zeros((4, 3, 1))}],
            ValueError,
            r"Batch 1 .*\['x'\] holds float32\[rows,3,1\], before float32\[rows,2\].*reshape",
        ),
        (
            [np.zeros(4, np.int32), np.zeros(2, np.float32)],
            ValueError,
            r"the array holds float32\[rows\], before int32\[rows\].*Convert the arrays",
        ),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_error_for_an_invalid_batch_names_it(batches, error, message, prefetch):
    with pytest.raises(error, match=message):
        list(DistributedDataset(batches, _two(), prefetch=prefetch))


def test_a_dtype_that_is_the_same_to_jax_may_change():
    """The program is the same."""
    batches = [np.zeros(4, np.float64), np.ones(4, np.float32)]
    assert {x.dtype for x in DistributedDataset(batches, _two())} == {np.dtype(np.float32)}


WITHOUT_BATCHES = {
    "list": list,
    "function": lambda: lambda: iter(()),
    "dropped remainder": lambda: NumpyDataset(np.ones(2)).batch(4, drop_remainder=True),
    "large batch": lambda: NumpyDataset(np.ones(2)).batch(1 << 20, drop_remainder=True),
    "no rows": lambda: NumpyDataset(np.ones(0)).shuffle(0).batch(1 << 20).repeat(),
    "shard of examples": lambda: NumpyDataset(np.ones(2)).shard(4, 3).batch(2),
    "shard of batches": lambda: NumpyDataset(np.ones(2)).batch(2).shard(4, 3).repeat(2),
    "no records": lambda: from_records([]).shuffle(0).batch(4),
}


@pytest.mark.parametrize("make", WITHOUT_BATCHES.values(), ids=WITHOUT_BATCHES)
@pytest.mark.parametrize("road", ["split", "drop", "function", "each replica", "optional", "steps"])
def test_data_without_batches_runs_no_step_and_warns_once(make, road, caplog):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    options = InputOptions(
        partial_batch="drop" if road == "drop" else None,
        experimental_replication_mode=InputReplicationMode.PER_REPLICA
        if road == "each replica"
        else InputReplicationMode.PER_WORKER,
    )
    if road in ("function", "each replica"):
        dataset = strategy.distribute_datasets_from_function(lambda _: make(), options)
        assert dataset.cardinality in (0, -2)
    else:
        dataset = strategy.experimental_distribute_dataset(make(), options)
        assert "dataset" in str(tpudist.input.explain(dataset))
    for _ in range(2):
        if road == "optional":
            assert not iter(dataset).get_next_as_optional().has_value()
        elif road == "steps":
            with pytest.raises(StopIteration):
                strategy.run_steps(lambda x: x.sum(), iter(dataset), 2)
        else:
            assert list(dataset) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gave no batches" in caplog.text


def test_dropping_all_batches_warns(caplog):
    batches = [np.zeros(4), np.zeros(3)]
    dataset = DistributedDataset(batches, _two(), partial_batch="drop")
    assert len(list(dataset)) == 1
    del batches[0]
    assert list(dataset) == []
    assert "All 1 batches of the dataset were partial" in caplog.text


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (np.zeros((4, 3)), TypeError, "experimental_make_numpy_dataset"),
        ({"x": np.zeros(4)}, TypeError, "A dict is not a dataset of batches"),
        ("train.txt", TypeError, "A str is not a dataset of batches"),
        (7, TypeError, "A int is not a dataset. Pass an iterable"),
        (NumpyDataset(np.zeros(4)), ValueError, "is not batched"),
        (lambda: 7, TypeError, "not iterable"),
    ],
)
def test_a_dataset_must_be_a_dataset_of_batches(source, error, message):
    with pytest.raises(error, match=message):
        next(iter(DistributedDataset(source, _two())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_batch": "shrunk"}, "it must be one of 'pad', 'shrink', 'drop', 'err"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": True}, "prefetch=True"),
    ],
)
def test_an_unknown_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataset([np.zeros(4)], _two(), **options)


def test_partial_numpy_batches_raise_before_any_step():
    """The error must not appear only after an epoch."""
    source = NumpyDataset(np.zeros(7)).batch(4)
    with pytest.raises(ValueError, match="does not split into full batches of 4"):
        DistributedDataset(source, _two(), partial_batch="error")
    DistributedDataset(NumpyDataset(np.zeros(8)).batch(4), _two(), partial_batch="error")


def test_a_distributed_dataset_is_not_distributed_again():
    dataset = DistributedDataset([np.zeros(4)], _two())
    for again in (dataset, iter(dataset)):
        with pytest.raises(TypeError, match="already distributed"):
            DistributedDataset(again, _two())


def test_a_second_pass_through_a_generator_raises_an_error():
    dataset = DistributedDataset((np.zeros(4) for _ in range(2)), _two())
    assert len(list(dataset)) == 2
    with pytest.raises(ValueError, match="is a generator, which can be read only once.* Pass a"):
        iter(dataset)


@pytest.mark.parametrize("kind", [iter, lambda batches: (x for x in batches)])
def test_a_function_that_returns_a_used_up_iterator_is_found(kind):
    batches = kind([np.zeros(4)])
    dataset = DistributedDataset(lambda: batches, _two())
    assert len(list(dataset)) == 1
    with pytest.raises(ValueError, match="pass a function that makes a new one"):
        list(dataset)


def test_iterating_in_a_replica_function_raises():
    dataset = DistributedDataset([np.zeros(4)], _two())
    iterator = iter(dataset)
    frame = types.SimpleNamespace(whole=False)
    mode = context.Mode(context.ContextKind.REPLICA, None, object(), frame)  # type: ignore
    with context.enter(mode):
        with pytest.raises(ValueError, match=r"next\(iterator\) should be called from outside"):
            next(iterator)
        with pytest.raises(ValueError, match=r"iter\(distributed_dataset\) should be called"):
            iter(dataset)
    next(iterator)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_feeds_its_own_replicas():
    program = """
        import json, os
        import jax, numpy as np
        from processes import report
        from tpudist.input.dataset import DistributedDataset
        from tpudist.input.sources.numpy_arrays import NumpyDataset
        from tpudist.processes import connection
        from tpudist.xla import mesh
        os.environ["NPROC"] = "32"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        config = json.loads(os.environ["TF_CONFIG"])
        workers = config["cluster"]["worker"]
        connection.connect(workers[0], len(workers), config["task"]["index"])
        found = []
        for inner_axes in ({}, {"fsdp": 2}, {"fsdp": 8}):
            replicas = mesh.make_mesh(jax.devices(), inner_axes)
            dataset = DistributedDataset(NumpyDataset(np.arange(26)).shuffle(1).batch(16), replicas)
            for element in dataset:
                array = getattr(element, "array", element)
                shards = [(s.index[0].start, s.data) for s in array.addressable_shards]
                values = {int(v) for _, data in shards for v in np.asarray(data).flat}
                found.append([list(array.shape), sorted(values), getattr(element, "rows", None)])
        report(found)
    """
    one, two = (process.result for process in run_processes(program))
    order = next(iter(NumpyDataset(np.arange(26)).shuffle(1).batch(26))).tolist()
    full, last = order[:16], order[16:]
    assert one[0] == [[8, 2], sorted(full[:8]), [2] * 8]
    assert two[0] == [[8, 2], sorted(full[8:]), [2] * 8]
    assert one[1] == [[8, 2], sorted(last[:8]), [2, 2, 2, 2, 2, 0, 0, 0]]
    assert two[1] == [[8, 2], sorted({*last[8:], last[0]}), [2, 2, 2, 2, 2, 0, 0, 0]]
    assert [one[2], two[2]] == [
        [[4, 4], sorted(full[:8]), [4] * 4],
        [[4, 4], sorted(full[8:]), [4] * 4],
    ]
    assert one[4] == [[16], sorted(full[:8]), None]
    assert two[4] == [[16], sorted(full[8:]), None]
    assert one[5] == two[5] == [[10], sorted(last), None]  # 10 rows do not split over 8 devices


# Prefetching.


_of_others = set()


def _prefetch_threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "tpudist-prefetch" and thread.ident not in _of_others
    ]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Checks that all iterator threads of a test end; threads of other files may remain."""
    _of_others.clear()
    _of_others.update(thread.ident for thread in threading.enumerate())
    yield
    if _prefetch_threads():
        gc.collect()  # slow, and needed only where a traceback holds an iterator
        _wait_until(lambda: not _prefetch_threads())


def _wait_until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.005)


def test_items_come_in_order():
    assert list(Prefetcher(iter(range(500)), 3)) == list(range(500))


def test_prefetching_stays_within_the_buffer_size():
    made = []
    prefetcher = Prefetcher((made.append(i) or i for i in itertools.count()), 2)
    _wait_until(lambda: made == [0, 1])
    time.sleep(0.05)
    assert made == [0, 1]
    assert next(prefetcher) == 0
    _wait_until(lambda: made == [0, 1, 2])
    time.sleep(0.05)
    assert made == [0, 1, 2]


def test_an_error_of_the_source_is_raised_at_its_step_with_its_traceback():
    def broken_loader():
        yield np.zeros(4)
        yield np.zeros(4)
        raise OSError("disk on fire")

    iterator = iter(DistributedDataset(broken_loader, _two()))
    next(iterator)
    next(iterator)
    with pytest.raises(OSError, match="disk on fire") as caught:
        next(iterator)
    assert "broken_loader" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_thread_ends_when_the_loop_is_left():
    dataset = DistributedDataset(NumpyDataset(np.arange(8)).batch(4).repeat(), _two())
    for _ in dataset:
        break
    _wait_until(lambda: not _prefetch_threads())


def test_the_thread_ends_when_the_loop_raises():
    dataset = DistributedDataset(NumpyDataset(np.arange(8)).batch(4).repeat(), _two())

    def train():
        for _ in dataset:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()  # the traceback held the iterator
    _wait_until(lambda: not _prefetch_threads())


def test_closing_ends_the_pass_at_once_and_lets_the_source_clean_up():
    cleaned = []

    def loader():
        try:
            while True:
                yield np.zeros(4)
        finally:
            cleaned.append(True)

    iterator = iter(DistributedDataset(loader, _two()))
    next(iterator)
    iterator.close()
    assert not _prefetch_threads()
    assert cleaned == [True]
    with pytest.raises(StopIteration):
        next(iterator)
    iterator.close()


def test_the_source_sees_the_context_variables_of_the_loop():
    """A loader that reads the strategy in scope must find it."""
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert list(Prefetcher((variable.get() for _ in range(2)), 1)) == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["time.sleep(1000)", "itertools.repeat(0)"])
def test_a_process_ends_though_its_source_does_not(source):
    program = f"""
import itertools, time
from tpudist.input.transfer.prefetch import Prefetcher
def loader():
    yield 1
    yield from {source}
prefetcher = Prefetcher(loader(), 2)
assert next(prefetcher) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
