"""Datasets of other libraries: their batches, their states, and data that devices do not support.

Tests of libraries that are not installed are skipped.
"""

import json
import pickle
import sys
import threading

import jax
import numpy as np
import pytest

import tpudist
from processes import run_processes
from tpudist import InputOptions
from tpudist.input import AutoShardPolicy, from_records
from tpudist.input.sources import adapt

NUM_EXAMPLES = 22


def distributed(dataset, num_replicas=2, **options):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))


def ids(dataset):
    batches = []
    for element in dataset:
        element = element["id"]
        rows = getattr(element, "rows", None) or [len(element)]
        parts = np.asarray(getattr(element, "array", element)).reshape(len(rows), -1)
        batches.append([int(x) for part, n in zip(parts, rows, strict=True) for x in part[:n]])
    return batches


def take(iterator, count):
    return ids(next(iterator) for _ in range(count))


def goes_on(make):
    """Checks that a new dataset resumes at every position of another one."""
    dataset = distributed(make(), 8)
    passes = [ids(dataset), ids(dataset)]
    for number, batches in enumerate(passes):
        for position in range(len(batches) + 1):
            dataset = distributed(make(), 8)
            for _ in range(number):
                ids(dataset)
            iterator = iter(dataset)
            assert take(iterator, position) == batches[:position]
            state = json.loads(json.dumps(iterator.get_state()))
            fresh = distributed(make(), 2)
            resumed = iter(fresh)
            resumed.set_state(state)
            assert ids(resumed) == batches[position:], (number, position)
            if number == 0:
                assert ids(fresh) == passes[1], position
    return passes


# Anything with a length.


class Examples:
    """Examples that are read by number, and record the threads that read them."""

    def __init__(self, count=NUM_EXAMPLES):
        self.count = count
        self.threads = set()

    def __repr__(self):  # by which Grain's DataLoader knows its source again
        return f"Examples({self.count})"

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        assert 0 <= number < self.count
        self.threads.add(threading.current_thread().name)
        return {"id": number, "x": np.full((2, 3), number, np.float32)}


def test_examples_that_can_be_read_by_number_are_shuffled_and_batched_as_arrays_are():
    arrays = tpudist.NumpyDataset({"id": np.arange(NUM_EXAMPLES)})
    for num_threads in (1, 3, None):
        dataset = from_records(Examples(), num_threads=num_threads)
        wanted, found = (x.shuffle(seed=1).batch(8).repeat(2) for x in (arrays, dataset))
        assert ids(distributed(found, 8)) == ids(distributed(wanted, 8))
        assert dataset.element_spec["x"].shape == (2, 3)
    batch = next(iter(dataset.batch(5)))
    np.testing.assert_array_equal(batch["x"][:, 1, 2], np.arange(5))


@pytest.mark.parametrize("make", [list, tuple, lambda x: x])
def test_lists_are_sources_of_examples(make):
    dataset = from_records(make([{"id": np.int32(i)} for i in range(5)]))
    assert ids(distributed(dataset.batch(4))) == [[0, 1, 2, 3], [4]]
    assert dataset.element_spec["id"].dtype == np.int32


def test_num_threads_threads_read_a_batch_and_end_with_the_dataset():
    all_there = threading.Barrier(4, timeout=30)

    class Waiting(Examples):
        def __getitem__(self, number):
            if number % 16 == 1:
                all_there.wait()
            return super().__getitem__(number)

    dataset = from_records(Waiting(64), num_threads=4).batch(64)
    (batch,) = dataset
    assert batch["id"].tolist() == list(range(64))
    del dataset
    for thread in threading.enumerate():
        if thread.name.startswith("tpudist-read"):
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_a_dataset_that_threads_have_read_can_be_sent_to_another_process():
    dataset = from_records([{"id": i} for i in range(64)], num_threads=4).batch(64)
    batches = [batch["id"].tolist() for batch in dataset]
    copied = pickle.loads(pickle.dumps(dataset))
    assert [batch["id"].tolist() for batch in copied] == batches == [list(range(64))]


def test_a_transform_creates_examples_and_its_errors_name_the_example():
    doubled = from_records(Examples(5), lambda x: {"id": 2 * x["id"]})
    assert ids(distributed(doubled.batch(4))) == [[0, 2, 4, 6], [8]]
    failing = from_records(Examples(), lambda x: {"id": 1 // (7 - x["id"])}).batch(4)
    iterator = iter(distributed(failing))
    next(iterator)
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert "This error was raised for Example 7 of the Examples." in caught.value.__notes__


def test_the_error_for_examples_that_differ_in_structure_names_them():
    def read(*examples):
        list(from_records(list(examples)).batch(2))

    with pytest.raises(ValueError, match=r"Example 1 of the list holds int64\[3\] in \['x'\], but"):
        read({"x": np.zeros(2, int)}, {"x": np.zeros(3, int)})
    with pytest.raises(ValueError, match=r"holds float64\[\], but .* int64\[\]. Convert all to"):
        read(1, 2.5)
    with pytest.raises(
        ValueError, match="Example 1 of the list has the structure .*'y'.* the same"
    ):
        read({"x": 1}, {"y": 1})
    with pytest.raises(ValueError, match="Example 1 of the list is None. tpudist cannot skip"):
        read(1, None)
    with pytest.raises(ValueError, match="Example 0 of the list.* is not an array: .*pad the rows"):
        read([[1], [1, 2]], 0)
    with pytest.raises(TypeError, match=r"Example 0 .* holds str, .*from_records\(source, tran"):
        read({"x": 1, "name": "a"})
    with pytest.raises(ValueError, match="Example 0 of the list holds no arrays"):
        read({})


class _ReadsSeveral(list):
    def __getitems__(self, numbers):
        return [self[i] for i in numbers]


class _Doubled:
    """A wrapper that changes records, and passes on other names."""

    def __init__(self, records):
        self._records = records

    def __len__(self):
        return len(self._records)

    def __getitem__(self, number):
        return 2 * self._records[number]

    def __getattr__(self, name):
        return getattr(self._records, name)


def test_a_wrapper_of_a_source_that_reads_several_records_is_read_itself():
    records = _ReadsSeveral(np.arange(4))
    for source, expected in ((records, [0, 1, 2, 3]), (_Doubled(records), [0, 2, 4, 6])):
        [batch] = from_records(source).batch(4)
        assert batch.tolist() == expected


def test_a_source_without_numbered_examples_raises():
    for source in (iter([1]), {"x": 1}, "text", 3):
        with pytest.raises(TypeError, match="has no examples that can be read by number. Pass"):
            from_records(source)
    with pytest.raises(TypeError, match="transform is a int"):
        from_records([1], 3)
    with pytest.raises(ValueError, match="num_threads=0: it must be an integer of at least 1"):
        from_records([1], num_threads=0)
    with pytest.raises(ValueError, match="The RecordDataset is not batched. Distribute dataset.ba"):
        distributed(from_records([1]))
    with pytest.raises(TypeError, match="A Examples holds examples, not batches. .*from_records"):
        distributed(Examples())


# Grain.


def grain_dataset(kind):
    import grain

    batched = grain.MapDataset.source(Examples()).seed(3).shuffle().batch(8)
    if kind == "MapDataset":
        return batched
    if kind == "IterDataset":
        return batched.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    sampler = grain.samplers.IndexSampler(
        NUM_EXAMPLES, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    return grain.DataLoader(
        data_source=Examples(), sampler=sampler, operations=[grain.transforms.Batch(8)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MapDataset", "IterDataset", "DataLoader"])
def test_grain_datasets_resume_from_the_state_of_grain(kind):
    first, second = goes_on(lambda: grain_dataset(kind))
    assert first == second
    assert sorted(sum(first, [])) == list(range(NUM_EXAMPLES))
    dataset = distributed(grain_dataset(kind))
    assert dataset.cardinality == (3 if kind == "MapDataset" else -2)
    assert dataset.element_spec["x"].shape == (4, 2, 3)


def test_a_state_of_another_kind_of_grain_dataset_raises():
    iterator = iter(distributed(grain_dataset("IterDataset")))
    next(iterator)
    assert "next_index" in str(iterator.get_state()["source"])
    with pytest.raises(ValueError, match="kind: 'batches of a IterDataset of Grain' in the state"):
        iter(distributed(grain_dataset("MapDataset"))).set_state(iterator.get_state())


def test_an_endless_grain_dataset_has_infinite_cardinality():
    dataset = distributed(grain_dataset("MapDataset").repeat())
    assert dataset.cardinality == -1
    assert len(take(iter(dataset), 5)) == 5


def test_examples_of_grain_are_read_by_number():
    import grain

    examples = grain.MapDataset.source(Examples()).map(lambda x: {"id": x["id"] + 100})
    assert ids(distributed(from_records(examples[:5]).batch(4))) == [[100, 101, 102, 103], [104]]
    with pytest.raises(ValueError, match="MapDataset has no end. Remove its repeat"):
        from_records(examples.repeat())
    odd = from_records(examples.filter(lambda x: x["id"] % 2 == 0)).batch(4)
    with pytest.raises(ValueError, match="Example 1 of .* is None. tpudist cannot skip an example"):
        list(odd)
    with pytest.raises(ValueError, match="Batch 0 of the dataset.* is a scalar"):
        next(iter(distributed(examples)))


def test_a_map_dataset_of_grain_is_not_read_far_ahead():
    """Grain's default would keep 500 global batches in memory."""
    import grain

    read = []

    def note(batch):
        read.append(1)
        return batch

    dataset = grain.MapDataset.source(Examples(400)).batch(2).map(note)
    iterator = iter(distributed(dataset))
    next(iterator)
    iterator.close()
    assert len(read) <= 16


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_of_grain_need_no_flags_and_end_with_the_iterator():
    program = """
        import multiprocessing
        import grain
        import numpy as np
        import tpudist
        from processes import report

        class Examples:
            def __len__(self):
                return 16
            def __getitem__(self, i):
                return np.int32(i)

        if __name__ == "__main__":
            tpudist.emulate()
            dataset = grain.MapDataset.source(Examples()).batch(4).to_iter_dataset()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
            strategy = tpudist.MirroredStrategy()
            iterator = iter(strategy.experimental_distribute_dataset(dataset))
            found = [np.asarray(next(iterator).array).reshape(-1).tolist() for _ in range(2)]
            state = iterator.get_state()
            resumed = iter(strategy.experimental_distribute_dataset(dataset))
            resumed.set_state(state)
            found += [np.asarray(x.array).reshape(-1).tolist() for x in resumed]
            iterator.close()
            del iterator, resumed
            report([found, len(multiprocessing.active_children())])
    """
    (result,) = run_processes(program, num_processes=1, devices_per_process=4)
    batches, num_children = result.result
    assert batches == np.arange(16).reshape(4, 4).tolist()
    assert num_children == 0


# tf.data.


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip(
        "tensorflow", reason="needs TensorFlow, which the extra `parity` installs"
    )


def tf_dataset(tf, seed=3):
    dataset = tf.data.Dataset.range(NUM_EXAMPLES)
    if seed is not None:
        dataset = dataset.shuffle(NUM_EXAMPLES, seed=seed)
    return dataset.batch(8).map(lambda i: {"id": i, "x": tf.cast(i, tf.float32)[:, None]})


def test_tf_data_resumes_in_any_pass_of_a_reshuffled_dataset(tf):
    first, second = goes_on(lambda: tf_dataset(tf))
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(NUM_EXAMPLES))


def test_inspecting_the_first_batch_does_not_change_the_batches_of_tf_data(tf):
    wanted = distributed(tf_dataset(tf))
    dataset = distributed(tf_dataset(tf))
    assert dataset.element_spec["x"].shape == (4, 1)
    tpudist.input.explain(dataset)
    for _ in range(2):
        assert ids(dataset) == ids(wanted)


def test_the_element_spec_of_a_tf_dataset_reads_no_batch(tf):
    read = []

    def note(i):
        read.append(int(i))
        return i

    dataset = tf.data.Dataset.range(8).batch(4, drop_remainder=True)
    dataset = dataset.map(lambda x: tf.ensure_shape(tf.py_function(note, [x[0]], tf.int64) + x, 4))
    found = distributed(dataset)
    assert found.element_spec.shape == (2,)
    assert found.cardinality == 2
    assert not read


def test_a_tf_tensor_is_not_copied(tf):
    source = adapt.to_source(tf_dataset(tf))
    (element,) = list(source.elements(0))[:1]
    assert not element["x"].flags.owndata
    assert source.owns_memory


def test_a_state_of_an_earlier_pass_of_a_tf_dataset_is_not_resumed_with_other_batches(tf):
    dataset = distributed(tf_dataset(tf))
    iterator = iter(dataset)
    state = (take(iterator, 1), iterator.get_state())[1]
    ids(dataset)
    again = iter(dataset)
    again.set_state(state)
    with pytest.raises(
        ValueError, match=r"after 1 batches .* \(tf.data.Dataset\).*differs from the batch"
    ):
        next(again)


def test_a_tf_dataset_shuffled_without_a_seed_warns_and_is_not_resumed(tf):
    for given in (lambda: tf_unseeded(tf), lambda: lambda: tf_unseeded(tf)):
        iterator = iter(distributed(given()))
        take(iterator, 2)
        with pytest.warns(UserWarning, match=r"shuffled by tf.data.Dataset.shuffle without a seed"):
            state = iterator.get_state()
        resumed = iter(distributed(given()))
        resumed.set_state(state)
        with pytest.raises(ValueError, match="differs from the batch before"):
            next(resumed)


def tf_unseeded(tf):
    return tf.data.Dataset.range(200).shuffle(200).batch(50).map(lambda i: {"id": i}).prefetch(1)


def test_a_function_may_make_a_tf_dataset_for_each_pass(tf):
    dataset = distributed(lambda: tf_dataset(tf))
    first, second = ids(dataset), ids(dataset)
    assert first == second
    assert sorted(sum(first, [])) == list(range(NUM_EXAMPLES))


def test_replicas_may_take_whole_batches_of_tf_data(tf):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.distribute_datasets_from_function(lambda _: tf_dataset(tf, None))
    assert ids(dataset) == [list(range(16)), list(range(16, 22))]


def test_tf_data_without_numeric_arrays_raises(tf):
    def refuse(dataset, error, match):
        with pytest.raises(error, match=match):
            distributed(dataset)

    slices = tf.data.Dataset.from_tensor_slices
    texts = slices({"id": [1, 2], "text": ["a", "b"]}).batch(2)
    refuse(texts, TypeError, r"dtype=tf.string.* in \['text'\], .* Convert texts to token ids")
    ragged = slices(tf.ragged.constant([[1], [1, 2]])).batch(2)
    refuse(ragged, TypeError, "hold RaggedTensorSpec.*. Devices hold only dense arrays: use")
    sparse = slices(tf.sparse.from_dense([[1, 0], [0, 1]])).batch(2)
    refuse(sparse, TypeError, "hold SparseTensorSpec.*to_dense")
    refuse(tf.data.Dataset.range(3), ValueError, "a scalar, but .* dataset.batch\\(global_batch_si")


def test_the_auto_shard_policy_of_a_tf_dataset_is_used(tf):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert adapt.to_source(tf_dataset(tf)).auto_shard_policy is AutoShardPolicy.AUTO
    off = adapt.to_source(tf_dataset(tf).with_options(options))
    assert off.auto_shard_policy is AutoShardPolicy.OFF


@pytest.mark.multiprocess
@pytest.mark.slow
def test_tf_data_is_shared_out_over_processes_as_its_options_say(tf):
    program = """
        import numpy as np
        import tensorflow as tf
        import tpudist
        from processes import report

        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        found = []
        for policy in (tf.data.experimental.AutoShardPolicy.AUTO,
                       tf.data.experimental.AutoShardPolicy.OFF):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = policy
            dataset = tf.data.Dataset.range(16).batch(8).with_options(options)
            if policy is tf.data.experimental.AutoShardPolicy.OFF:
                first = 100 * int(strategy.cluster_resolver.task_id)
                dataset = dataset.map(lambda x: x + first)
            rows = []
            for element in strategy.experimental_distribute_dataset(dataset):
                local = strategy.experimental_local_results(element)
                rows += [int(x) for part in local for x in np.asarray(part)]
            found.append(rows)
        report(found)
    """
    first, second = (x.result for x in run_processes(program))
    assert first[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert second[0] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert first[1] == list(range(16))
    assert second[1] == list(range(100, 116))


def test_tfrecords_and_examples_that_tensorflow_writes_are_read_as_it_reads_them(tf, tmp_path):
    def feature(i):
        return {
            "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[i, -i, i << 40])),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i / 3] * (i % 3))),
            "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n%d" % i, b""])),
            "none": tf.train.Feature(),
        }

    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(200):
            example = tf.train.Example(features=tf.train.Features(feature=feature(i)))
            writer.write(example.SerializeToString())
    for i, record in enumerate(tf.data.TFRecordDataset(path).as_numpy_iterator()):
        found = tpudist.input.parse_example(record)
        assert found["id"].tolist() == [i, -i, i << 40]
        assert found["x"].tolist() == [np.float32(i / 3)] * (i % 3)
        assert found["name"] == [b"n%d" % i, b""]
        assert found["none"].tolist() == []
    dataset = tpudist.input.from_files(
        path, parse=lambda record: {"id": tpudist.input.parse_example(record)["id"][0]}
    )
    assert ids(distributed(dataset.batch(200), 8)) == [list(range(200))]


# PyTorch.


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="needs PyTorch, which no extra installs")


def torch_examples(torch):
    class TorchExamples(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_EXAMPLES

        def __getitem__(self, number):
            return {"id": number, "x": torch.full((2,), float(number))}

    return TorchExamples()


def torch_loader(torch, kind, **options):
    generator = torch.Generator()
    generator.manual_seed(3)
    options = {"shuffle": True, "generator": generator} | options
    return kind(torch_examples(torch), batch_size=8, **options)


def test_a_pytorch_loader_resumes_in_any_pass_of_a_reshuffled_dataset(torch):
    first, second = goes_on(lambda: torch_loader(torch, torch.utils.data.DataLoader))
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(NUM_EXAMPLES))
    dataset = distributed(torch_loader(torch, torch.utils.data.DataLoader))
    assert dataset.cardinality == 3
    assert dataset.element_spec["x"].shape == (4, 2)


def test_a_loader_shuffled_by_pytorchs_global_seed_resumes(torch):
    def make():
        torch.manual_seed(5)
        return torch_loader(torch, torch.utils.data.DataLoader, generator=None)

    iterator = iter(distributed(make()))
    batches = take(iterator, 3)
    iterator = iter(distributed(make()))
    take(iterator, 1)
    state = iterator.get_state()
    loader = make()
    torch.rand(10)
    resumed = iter(distributed(loader))
    resumed.set_state(state)
    assert ids(resumed) == batches[1:]


def test_a_loader_shuffled_with_another_seed_does_not_resume(torch):
    loader = torch.utils.data.DataLoader
    state = iter(distributed(torch_loader(torch, loader))).get_state()
    other = torch_loader(torch, loader, generator=torch.Generator().manual_seed(4))
    with pytest.raises(ValueError, match="seed: '3' in the state, '4' here"):
        iter(distributed(other)).set_state(state)


def test_a_loader_with_a_state_resumes_from_it(torch, recwarn):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    first, second = goes_on(lambda: torch_loader(torch, torchdata.StatefulDataLoader))
    assert first != second
    recwarn.clear()  # torchdata calls what PyTorch has deprecated


def goes_on_in_first_pass(make):
    batches = ids(distributed(make()))
    for position in range(1, len(batches)):
        iterator = iter(distributed(make()))
        assert take(iterator, position) == batches[:position]
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        resumed = iter(distributed(make(), 8))
        resumed.set_state(state)
        assert ids(resumed) == batches[position:]


def test_tensors_are_read_without_a_copy_and_bfloat16_is_supported(torch):
    from tpudist.input.sources import torch_loader

    given = {"x": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    found = torch_loader.as_numpy(given)
    given["x"][0] = 5
    assert found["x"].tolist() == [5, 1, 2]
    assert found["b"].dtype == jax.numpy.bfloat16
    assert found["b"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="a tensor that is not dense: torch.sparse_coo.*to_dense"):
        torch_loader.as_numpy(torch.eye(2).to_sparse())


def test_examples_of_pytorch_are_read_by_number(torch):
    dataset = from_records(torch_examples(torch)).shuffle(seed=0).batch(8)
    assert sorted(sum(ids(distributed(dataset)), [])) == list(range(NUM_EXAMPLES))
    assert from_records(torch_examples(torch)).element_spec["x"].dtype == np.float32
    doubled = from_records(torch_examples(torch), lambda x: {"id": 2 * x["id"]})
    assert ids(distributed(doubled.batch(2)))[1] == [4, 6]
    with pytest.raises(TypeError, match="TorchExamples holds examples, not batches. .*from_recor"):
        distributed(torch_examples(torch))


def test_strings_of_a_pytorch_loader_raise(torch):
    loader = torch.utils.data.DataLoader([{"text": "a"}, {"text": "b"}], batch_size=2)
    with pytest.raises(TypeError, match=r"Batch 0 .*\['text'\].* but devices hold only numbers"):
        next(iter(distributed(loader)))


# Hugging Face.


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip(
        "datasets", reason="needs Hugging Face datasets, which no extra installs"
    )


def hf_dataset(datasets, **columns):
    numbers = range(NUM_EXAMPLES)
    columns = columns or {"id": list(numbers), "x": [[float(i), 0.5] for i in numbers]}
    return datasets.Dataset.from_dict(columns)


def test_examples_of_hugging_face_are_read_by_number_many_at_a_time(datasets):
    arrays = tpudist.NumpyDataset({"id": np.arange(NUM_EXAMPLES)})
    dataset = from_records(hf_dataset(datasets))
    wanted, found = (x.shuffle(seed=1).batch(8).repeat(2) for x in (arrays, dataset))
    assert ids(distributed(found, 8)) == ids(distributed(wanted, 8))
    assert dataset.element_spec["x"].shape == (2,)
    named = from_records(hf_dataset(datasets), lambda x: {"id": x["id"] + 1})
    assert ids(distributed(named.batch(4)))[0] == [1, 2, 3, 4]


def test_the_error_for_invalid_hugging_face_examples_names_them(datasets):
    ragged = hf_dataset(datasets, x=[[1], [2], [3, 4]])
    with pytest.raises(ValueError, match=r"Example 2 of the Dataset holds int64\[2\] in \['x'\]"):
        list(from_records(ragged).batch(3))
    with pytest.raises(TypeError, match="Example 0 of the Dataset holds str, but devices"):
        from_records(hf_dataset(datasets, x=["a"]))
    with pytest.raises(TypeError, match="DatasetDict is several datasets: 'train'. Pass one of"):
        from_records(datasets.DatasetDict(train=hf_dataset(datasets)))
    with pytest.raises(TypeError, match="DatasetDict is several datasets: 'train', 'test'"):
        distributed(lambda: datasets.DatasetDict(train=[1], test=[2])).element_spec  # noqa: B018
    with pytest.raises(TypeError, match="IterableDataset has no examples that can be read by num"):
        from_records(hf_dataset(datasets).to_iterable_dataset())


def test_rows_of_hugging_face_may_be_batches(datasets):
    rows = hf_dataset(datasets, id=[[0, 1, 2, 3], [4, 5, 6, 7], [8]])
    assert ids(distributed(rows)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert distributed(rows).cardinality == 3
    with pytest.raises(TypeError, match="Dataset is not batched: its 'id' .*from_records.dataset"):
        distributed(hf_dataset(datasets))
    with pytest.raises(
        TypeError, match=r"IterableDataset is not batched: .* Distribute dataset.ba"
    ):
        distributed(hf_dataset(datasets).to_iterable_dataset())


def test_a_hugging_face_stream_resumes_from_its_own_state(datasets):
    rows = hf_dataset(datasets, id=[[i, i + 1] for i in range(0, 12, 2)])
    goes_on_in_first_pass(rows.to_iterable_dataset)


class BufferShuffledExamplesIterable:
    """Stands in for the Hugging Face class whose state lacks the rows in its buffer."""

    def __init__(self, rows, epoch, size=3):
        self.rows, self.rng, self.size = rows, np.random.default_rng([7, epoch]), size

    def __iter__(self):
        kept = []
        for row in self.rows:
            kept.append(row)
            if len(kept) == self.size:
                yield kept.pop(self.rng.integers(self.size))
        yield from kept


class StreamLikeHuggingFace:
    """Stands in for a `datasets.IterableDataset`, which is not installed everywhere."""

    features = None

    def __init__(self, buffer=True):
        self.buffer, self.epoch, self._start, self._row = buffer, 0, None, 0
        self._ex_iterable = BufferShuffledExamplesIterable([], 0) if buffer else object()

    def with_format(self, kind):
        assert kind == "numpy"
        return StreamLikeHuggingFace(self.buffer)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"row": self._row, "epoch": self.epoch}

    def load_state_dict(self, state):
        self._start = state

    def __iter__(self):
        start = self._start or {"row": 0, "epoch": self.epoch}
        self._row = start["row"] if start["epoch"] == self.epoch else 0
        rows = self._rows()
        yield from BufferShuffledExamplesIterable(rows, self.epoch) if self.buffer else rows

    def _rows(self):
        while self._row < 12:
            self._row += 1
            yield {"id": np.arange(2) + 2 * self._row + 100 * self.epoch}


StreamLikeHuggingFace.__module__ = "datasets.iterable_dataset"


@pytest.mark.parametrize("buffer", [True, False])
def test_a_stream_resumes_exactly_in_each_epoch_that_the_user_has_set(buffer):
    """Also with rows in a shuffle buffer; later epochs start at their beginning."""

    def epochs(stream, dataset, numbers):
        found = []
        for number in numbers:
            stream.set_epoch(number)
            found.append(ids(dataset))
        return found

    stream = StreamLikeHuggingFace(buffer)
    wanted = epochs(stream, distributed(stream), range(3))
    assert wanted[0] != wanted[1]
    for step in (1, 4, 12):
        stream = StreamLikeHuggingFace(buffer)
        dataset = distributed(stream)
        epochs(stream, dataset, [0])
        stream.set_epoch(1)
        iterator = iter(dataset)
        assert take(iterator, step) == wanted[1][:step]
        state = json.loads(json.dumps(iterator.get_state()))
        stream = StreamLikeHuggingFace(buffer)
        dataset = distributed(stream)
        resumed = iter(dataset)
        resumed.set_state(state)
        assert ids(resumed) == wanted[1][step:]
        assert stream.epoch == 1
        assert epochs(stream, dataset, [2]) == wanted[2:]


def test_a_shuffled_stream_of_hugging_face_resumes_exactly_in_any_epoch(datasets):
    def make(seed=3):
        rows = hf_dataset(datasets, id=list(range(40))).to_iterable_dataset(num_shards=3)
        return rows.shuffle(seed=seed, buffer_size=10).batch(8)

    def epochs(stream, dataset, numbers):
        for number in numbers:
            stream.set_epoch(number)
            yield ids(dataset)

    stream = make()
    wanted = list(epochs(stream, distributed(stream), range(3)))
    stream = make()
    iterator = iter(distributed(stream))
    stream.set_epoch(1)
    assert take(iterator, 2) == wanted[1][:2]
    state = iterator.get_state()
    stream = make()
    dataset = distributed(stream)
    resumed = iter(dataset)
    resumed.set_state(state)
    assert ids(resumed) == wanted[1][2:]
    assert list(epochs(stream, dataset, [2])) == wanted[2:]
    iterator = iter(distributed(make(seed=None)))
    take(iterator, 2)
    with pytest.warns(UserWarning, match="shuffled by shuffle.. of the dataset without a seed"):
        state = iterator.get_state()
    resumed = iter(distributed(make(seed=None)))
    resumed.set_state(state)
    with pytest.raises(ValueError, match="differs from the batch before"):
        next(resumed)


# Without any of these libraries.


@pytest.mark.slow
def test_no_library_is_imported_before_one_of_its_objects_is_passed():
    program = """
        import sys
        import numpy as np
        import tpudist
        from processes import report
        tpudist.emulate()
        strategy = tpudist.MirroredStrategy()
        batches = [np.zeros(8)]
        list(strategy.experimental_distribute_dataset(batches))
        list(strategy.experimental_distribute_dataset(tpudist.input.from_records(batches).batch(4)))
        names = ("grain", "tensorflow", "torch", "datasets", "pyarrow", "array_record")
        report([name for name in names if name in sys.modules])
    """
    (result,) = run_processes(program, num_processes=1)
    assert result.result == []
    assert "tpudist" in sys.modules
