"""Examples that are read by number: the processes that read them, and the explanation."""

import jax
import numpy as np
import pytest
from rich.console import Console

import tpudist
from tpudist import InputOptions, NumpyDataset
from tpudist.input import SHARD_HINT, AutoShardPolicy, IndexedDataset, explain


class Folder(IndexedDataset):
    """Examples in several files; records the numbers that are read."""

    def __init__(self, lengths, by_files=False):
        self._num_rows = sum(lengths)
        self._treedef = jax.tree.structure({"x": 0, "id": 0})
        self._leaf_specs = [
            jax.ShapeDtypeStruct((), np.int64),
            jax.ShapeDtypeStruct((2,), np.float32),
        ]
        self._ends = np.cumsum(lengths)
        self.num_files = len(lengths)
        self._by_files = by_files
        self.read = []

    def _read(self, rows, epoch):
        self.read += rows.reshape(-1).tolist()
        return [rows.copy(), np.stack([rows, -rows], -1).astype(np.float32)]

    def with_order_by_files(self):
        dataset = self._replace()
        dataset._by_files = True
        return dataset

    def _order(self, epoch):
        order = super()._order(epoch)
        return np.arange(self.num_examples)[::-1] if self._by_files else order

    def num_files_of(self, numbers):
        return len(np.unique(np.searchsorted(self._ends, numbers, side="right")))


def _distribute(dataset, num_replicas=2, **options):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))


def _ids(element):
    element = element["id"]
    rows = getattr(element, "rows", None) or [len(element)]
    parts = np.asarray(getattr(element, "array", element)).reshape(len(rows), -1)
    return [int(x) for part, n in zip(parts, rows, strict=True) for x in part[:n]]


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_any_examples_with_numbers_are_shuffled_batched_and_split_as_arrays_are(num_replicas):
    arrays = {"x": np.zeros((23, 2)), "id": np.arange(23)}
    for wanted, given in (
        (NumpyDataset(arrays).batch(8), Folder([23]).batch(8)),
        (NumpyDataset(arrays).shuffle(3).batch(8), Folder([20, 3]).shuffle(3).batch(8)),
        (NumpyDataset(arrays).shard(3, 1).batch(4), Folder([23]).shard(3, 1).batch(4)),
    ):
        wanted = [_ids(x) for x in _distribute(wanted, num_replicas)]
        assert [_ids(x) for x in _distribute(given, num_replicas)] == wanted


def test_every_example_is_read_once_though_padding_repeats_it():
    dataset = Folder([11]).batch(8)
    _, last = _distribute(dataset, 8)
    assert last["x"].array.shape == (8, 1, 2)
    assert sorted(dataset.read) == list(range(11))


def test_elements_of_such_a_dataset_are_pytrees():
    assert next(iter(Folder([5])))["id"].shape == ()
    batch = next(iter(Folder([5]).shuffle(0).batch(3)))
    assert batch["x"].shape == (3, 2)
    np.testing.assert_array_equal(batch["x"][:, 0], batch["id"])
    assert Folder([5]).batch(3).element_spec["x"].shape == (3, 2)


def test_replicas_may_take_whole_batches_of_it():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.distribute_datasets_from_function(lambda _: Folder([10]).batch(3))
    assert [_ids(x) for x in dataset] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    dataset = strategy.distribute_datasets_from_function(lambda _: Folder([4]))
    assert [np.asarray(x["id"].array).tolist() for x in dataset] == [[0, 1], [2, 3]]
    assert dataset.element_spec["x"].shape == (2,)


def test_a_dataset_that_is_not_batched_is_not_split():
    with pytest.raises(ValueError, match=r"The Folder is not batched. Distribute dataset.batch"):
        _distribute(Folder([5]))


# Sharing out, in one process. The rest is in test_input_processes.py.


@pytest.mark.parametrize("policy", AutoShardPolicy)
def test_in_one_process_every_policy_gives_the_whole_dataset(policy):
    arrays = {"x": np.zeros(10), "id": np.arange(10)}
    sources = NumpyDataset(arrays).batch(4), list(NumpyDataset(arrays).batch(4))
    for source in sources:
        found = [_ids(x) for x in _distribute(source, auto_shard_policy=policy)]
        assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_order_by_files_does_not_depend_on_the_number_of_processes():
    """It is the same in one."""
    found = [_ids(x) for x in _distribute(Folder([5]).batch(4), auto_shard_policy=_FILE)]
    assert found == [[4, 3, 2, 1], [0]]


_FILE = AutoShardPolicy.FILE


def test_a_hint_stands_for_all_of_the_data_in_one_process():
    for marked in (
        Folder([10]).shard(SHARD_HINT, SHARD_HINT).shuffle(0).batch(4),
        Folder([10]).shuffle(0).batch(4).shard(SHARD_HINT, SHARD_HINT).repeat(1),
    ):
        elements = [_ids(x) for x in _distribute(marked, auto_shard_policy=AutoShardPolicy.HINT)]
        assert sorted(sum(elements, [])) == list(range(10))
        assert [x["id"].tolist() for x in marked] == elements
        with pytest.raises(ValueError, match=r"is distributed with AutoShardPolicy.AUTO. Use "):
            _distribute(marked)
    with pytest.raises(ValueError, match="already has a SHARD_HINT"):
        Folder([9]).shard(SHARD_HINT, SHARD_HINT).shard(2, 0)
    with pytest.raises(ValueError, match="examples of the dataset are already sharded"):
        Folder([9]).shard(2, 0).shard(SHARD_HINT, SHARD_HINT)


def test_unknown_options_are_rejected():
    with pytest.raises(
        ValueError, match="'FILE'.* it must be an AutoShardPolicy: .*OFF, AUTO, FILE"
    ):
        InputOptions(auto_shard_policy="FILE")  # type: ignore
    with pytest.raises(
        ValueError, match="partial_batch='trim': it must be one of 'pad', 'shrink', 'dr"
    ):
        InputOptions(partial_batch="trim")
    assert InputOptions(partial_batch="drop").partial_batch is tpudist.input.PartialBatch.DROP


def test_unsupported_options_for_a_dataset_function_raise_or_warn():
    strategy = tpudist.MirroredStrategy()
    with pytest.raises(ValueError, match="'shrink'.*is not supported for datasets from a function"):
        strategy.distribute_datasets_from_function(
            lambda _: [np.zeros(2)], InputOptions(partial_batch="shrink")
        )
    with pytest.warns(UserWarning, match="no effect: the function makes each process's part"):
        strategy.distribute_datasets_from_function(
            lambda _: [np.zeros(2)], InputOptions(auto_shard_policy=_FILE)
        )
    with pytest.warns(UserWarning, match="no effect: the default strategy returns the dataset"):
        tpudist.get_strategy().experimental_distribute_dataset(
            [np.zeros(2)], InputOptions(partial_batch="drop")
        )


# The explanation.


def test_a_table_reports_the_data_of_each_process():
    explained = explain(_distribute(Folder([12, 8, 2]).batch(8), partial_batch="shrink"))
    assert str(explained).splitlines() == [
        "dataset:       Folder",
        "sharding:      not shared: one process reads all",
        "global batch:  8",
        "partial batch: shrink",
        "process  replicas  files  examples/step  examples/epoch  in vain/step",
        "      0      0, 1      3              8              22             0",
    ]
    console = Console(width=120, file=None)
    with console.capture() as captured:
        console.print(explained)
    assert "not shared: one process reads all" in captured.get()
    assert "examples/epoch" in captured.get()


def test_iterables_and_functions_are_explained_too():
    batches = (np.full(6, i) for i in range(3))
    dataset = _distribute(batches, 4)
    explained = explain(dataset)
    assert (explained.source, explained.global_batch_size) == ("generator", 6)
    assert explained.hosts[0].replicas == (0, 1, 2, 3)
    assert len(list(dataset)) == 3  # the inspected batch is not lost
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    explained = explain(strategy.distribute_datasets_from_function(lambda _: Folder([4]).batch(2)))
    assert (explained.source, explained.policy) == ("Folder", "each has its own")
    assert "a function made the datasets" in explained.line


def test_only_distributed_datasets_are_explained():
    with pytest.raises(TypeError, match="A Folder is not distributed, so there is nothing to expl"):
        explain(Folder([4]))


@pytest.mark.parametrize("size", [2**33, 2**17])
def test_a_batch_that_would_be_mostly_padding_raises(size):
    """Earlier, the padding was allocated until the kernel ended the process."""
    strategy = tpudist.MirroredStrategy()
    dataset = strategy.experimental_make_numpy_dataset(np.zeros(8))
    with pytest.raises(ValueError, match=rf"size={size}.*the dataset has 8 examples.*padding"):
        dataset.batch(size)
    dataset.batch(2**16)
