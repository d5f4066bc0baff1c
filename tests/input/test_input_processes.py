"""Data in several processes: the rows of each, their agreement, and that no process hangs."""

import json

import jax
import numpy as np
import pytest

import tpudist
from processes import run_processes
from tpudist import NumpyDataset

pytestmark = [pytest.mark.multiprocess]

PROGRAM = """
    import json, logging, sys, warnings
    import jax, numpy as np
    import tpudist
    from processes import report
    from tpudist import InputOptions, NumpyDataset
    from tpudist.input import SHARD_HINT, AutoShardPolicy, explain
    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    me = jax.process_index()

    def distribute(dataset, **options):
        return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))

    def ids(element):
        return strategy.gather(element, axis=0).tolist()

    def failure(make):
        try:
            return len(list(make()))
        except Exception as error:
            return [type(error).__name__, str(error)]

    def indexed():
        return NumpyDataset(np.arange(52)).shuffle(5).batch(16).repeat(2)

    def generator():
        for i in range(6):
            yield np.arange(16 - 2 * (i == 5)) + 16 * i

    def share_out():
        found = {}
        mine = np.arange(20) + 100 * me

        parts = distribute(NumpyDataset(mine).batch(8), auto_shard_policy=AutoShardPolicy.OFF)
        iterator = iter(parts)
        found["off"] = [ids(next(iterator))]
        state = iterator.get_state()
        found["off"] += [ids(x) for x in iterator]
        again = iter(distribute([mine[:8], mine[8:16], mine[16:]],
                                auto_shard_policy=AutoShardPolicy.OFF))
        found["off of a list"] = [ids(x) for x in again]
        again = iter(distribute(NumpyDataset(mine).batch(8), auto_shard_policy=AutoShardPolicy.OFF))
        again.set_state(state)
        found["off resumed"] = [ids(x) for x in again]
        off, file = AutoShardPolicy.OFF, AutoShardPolicy.FILE
        found["off dropped"] = [ids(x) for x in distribute(
            NumpyDataset(mine).batch(8), auto_shard_policy=off, partial_batch="drop")]

        marked = NumpyDataset(np.arange(20)).shard(SHARD_HINT, SHARD_HINT)
        hint = AutoShardPolicy.HINT
        found["hint"] = [ids(x) for x in distribute(marked.batch(8), auto_shard_policy=hint)]
        marked = NumpyDataset(np.arange(20)).shuffle(0).batch(8).shard(SHARD_HINT, SHARD_HINT)
        found["hint of batches"] = [ids(x) for x in distribute(marked, auto_shard_policy=hint)]

        rows = NumpyDataset(np.arange(20)).batch(8)
        data = distribute(rows, auto_shard_policy=AutoShardPolicy.DATA)
        found["data"] = [ids(x) for x in data]
        found["table"] = str(explain(data))
        found["table of iterable"] = str(explain(distribute(lambda: iter([np.zeros(8)]))))
        found["table of function"] = str(
            explain(strategy.distribute_datasets_from_function(lambda _: [np.zeros(2)])))

        class Folder(NumpyDataset):
            num_files = 1

            def with_order_by_files(self):
                return self.__class__(np.arange(20)[::-1]).batch(8)

            def num_files_of(self, numbers):
                return 1

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            by_files = distribute(Folder(np.arange(20)).batch(8), auto_shard_policy=file)
        first = ids(next(iter(by_files)))
        found["by files"] = [first, str(caught[0].message), str(explain(by_files))]
        found["mistakes"] = [
            failure(lambda: distribute(rows, auto_shard_policy=off)),
            failure(lambda: distribute(rows, auto_shard_policy=hint)),
            failure(lambda: distribute([np.zeros(8)], auto_shard_policy=hint)),
            failure(lambda: distribute(rows, auto_shard_policy=file)),
            failure(lambda: distribute(rows, auto_shard_policy=off, partial_batch="shrink")),
            failure(lambda: distribute(marked)),
        ]
        return found


    def go_on(states):
        found = []
        for make, state in ((indexed, states[0]), (lambda: generator, states[1])):
            iterator = iter(distribute(make()))
            iterator.set_state(state)
            taken = [ids(next(iterator)) for _ in range(2)]
            found.append([taken, iterator.get_state()])
        return found


    def make_by_functions():
        def dataset_fn(context):
            size = 21 if context.input_pipeline_id else 9
            return NumpyDataset({"x": np.arange(1, size) + 100 * me, "y": (np.ones((size - 1, 2)),)}
                                ).batch(2)

        def make(prefetch=1):
            options = InputOptions(experimental_per_replica_buffer_size=prefetch)
            return strategy.distribute_datasets_from_function(dataset_fn, options)

        whole = [ids(element["x"]) for element in make()]
        found = []
        for step in range(len(whole) + 1):
            iterator = iter(make(step % 2))
            for _ in range(step):
                next(iterator)
            state = iterator.get_state()
            iterator.close()
            resumed = iter(make())
            resumed.set_state(state)
            found.append([ids(element["x"]) for element in resumed])

        def nothing_here(context):
            some = [{"x": (np.full((2, 3), i + 1.0), None)} for i in range(5)]
            return some if me else []

        dry = [[x["x"][0].rows, ids(x["x"][0])]
               for x in strategy.distribute_datasets_from_function(nothing_here)]
        padding = [np.asarray(s.data).min().item()
                   for x in strategy.distribute_datasets_from_function(nothing_here)
                   for s in x["x"][0].array.addressable_shards]
        differ = failure(lambda: strategy.distribute_datasets_from_function(
            lambda _: [np.zeros((2, 3 + me))] * 4))

        def shuffled(seed):
            return strategy.distribute_datasets_from_function(
                lambda context: NumpyDataset(np.arange(20) + 100 * me).shuffle(seed + me).batch(2))

        iterator = iter(shuffled(0))
        next(iterator)
        given, iterator = iterator.get_state(), iter(shuffled(7))
        other = failure(lambda: [iterator.set_state(given)])
        records = [ids(x) for x in strategy.distribute_datasets_from_function(
            lambda _: tpudist.input.from_records([3.0, 4.0][: 2 * me]).batch(2))]
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("tpudist").addHandler(handler)
        small = NumpyDataset(np.ones(3)).batch(64, drop_remainder=True)
        steps = [
            len(list(strategy.experimental_distribute_dataset([]))),
            len(list(strategy.experimental_distribute_dataset(small))),
            len(list(strategy.distribute_datasets_from_function(lambda _: []))),
            len(list(strategy.distribute_datasets_from_function(lambda _: small))),
        ]
        logging.getLogger("tpudist").removeHandler(handler)
        empty = [records, steps, ["gave no batches" in text for text in told]]
        parts = np.arange(8.0).reshape(4, 2) + 100 * me
        empty += [ids(strategy.distribute_batch(np.arange(16.0))),
                  ids(strategy.distribute_batch(parts, has_device_dim=True)),
                  ids(strategy.distribute_batch(np.arange(9.0), global_batch_size=16))]
        return [whole, found, state, dry, padding, differ, other, empty, in_memory()]


    def in_memory():
        parts = np.arange(4.0 * (3 - me)).reshape(4, 3 - me) + 100 * me
        uneven = strategy.distribute_batch({"x": parts, "y": parts[..., None]}, has_device_dim=True)
        square = strategy.run(lambda x: (x["x"] ** 2).sum(), (uneven,))
        total = float(strategy.reduce("sum", square, axis=None))
        mistakes = [
            (np.arange(8 - me), {}),
            (np.arange(8), {"global_batch_size": 8 + 8 * me}),
            ({"x": np.arange(8)} if me else [np.arange(8)], {}),
            (np.arange(8, dtype=["int32", "float32"][me]), {}),
            (np.ones((4, 2, 1 + me)), {"has_device_dim": True}),
            (np.ones((4, 2, 1))[:, :me], {"has_device_dim": True}),
            (np.ones((4 - me, 2)), {"has_device_dim": True}),
        ]
        found = [failure(lambda: strategy.distribute_batch(x, **options))
                 for x, options in mistakes]
        return [ids(uneven["x"]), uneven["y"].array.shape, uneven["y"].rows, total, found]


    def read_alike():
        def ends_early():
            yield from [np.zeros(8)] * (2 if me else 4)

        def has_other_rows():
            yield np.zeros(8)
            yield np.zeros(6 if me else 8)

        def fails():
            yield np.zeros(8)
            if me:
                raise OSError("disk on fire")
            yield from [np.zeros(8)] * 3

        def changes():
            yield np.zeros(8)
            yield np.zeros(8, np.int32 if me else np.float32)

        def open_fails():
            if me:
                raise PermissionError("not yours")
            return [np.zeros(8)]

        mistakes = [failure(lambda: distribute(make))
                    for make in (ends_early, has_other_rows, fails, changes)]
        mistakes.append(failure(lambda: distribute(open_fails)))
        rows = NumpyDataset(np.arange(32))
        mistakes.append(failure(lambda: distribute(rows.shuffle(me).batch(8 + 8 * me))))
        mistakes.append(failure(lambda: distribute(rows.batch(8) if me else [np.zeros(8)])))

        dataset = distribute(indexed())
        if me:
            iter(dataset)
        mistakes.append(failure(lambda: dataset))

        # If only one process leaves a loop, the other is notified at once.
        alone = None
        try:
            for i, _ in enumerate(distribute(lambda: (np.zeros(8) for _ in range(1000)))):
                if me and i == 1:
                    break
        except RuntimeError as error:
            alone = str(error)

        # A pass that is left in the middle leaves nobody waiting, and the next one is whole.
        dataset = distribute(generator)
        for _ in dataset:
            break
        iterator = iter(dataset)
        next(iterator), next(iterator)
        iterator.close()
        whole = [ids(x) for x in dataset]
        return [mistakes, whole, alone]


    report({
        "shared out": share_out(),
        "resumed": go_on(json.loads(sys.argv[1])),
        "of functions": make_by_functions(),
        "read alike": read_alike(),
    })
"""


def _ids(strategy, element):
    return strategy.gather(element, axis=0).tolist()


def _indexed():
    return NumpyDataset(np.arange(52)).shuffle(5).batch(16).repeat(2)


def _generator():
    for i in range(6):
        yield np.arange(16 - 2 * (i == 5)) + 16 * i


MAKES = (_indexed, lambda: _generator)


@pytest.fixture(scope="module")
def references():
    """Returns the results of one process without a stop, and its states after two steps."""
    strategy = tpudist.MirroredStrategy()
    states, found = [], []
    for make in MAKES:
        dataset = strategy.experimental_distribute_dataset(make())
        found.append([_ids(strategy, x) for x in dataset])
        iterator = iter(strategy.experimental_distribute_dataset(make()))
        for _ in range(2):
            next(iterator)
        states.append(iterator.get_state())
    return found, states


@pytest.fixture(scope="module")
def processes(references):
    """Returns the results of two processes that have run all of `PROGRAM`."""
    return run_processes(PROGRAM, args=[json.dumps(references[1])])


def _results(processes, name):
    return [process.result[name] for process in processes]


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_in_one_process_and_back_again(references, processes):
    """The ids equal those of a run without a stop: none is missing, and none appears twice."""
    one, two = _results(processes, "resumed")
    assert one == two
    for make, reference, (taken, state) in zip(MAKES, references[0], one, strict=True):
        assert taken == reference[2:4]
        for num_replicas in (1, 2, 8):
            here = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
            iterator = iter(here.experimental_distribute_dataset(make()))
            iterator.set_state(state)
            assert [_ids(here, x) for x in iterator] == reference[4:]


def test_processes_that_read_the_same_data_agree_at_every_step(processes):
    """Each mistake raises an error in both processes at the same step, and neither hangs."""
    results = _results(processes, "read alike")
    assert "process 1 left and will not answer" in results[0][2]
    assert results[1][2] is None
    for mistakes, whole, _ in results:
        early, rows, _, _, _, plan, kind, position = mistakes
        assert early[0] == rows[0] == plan[0] == kind[0] == position[0] == "ValueError"
        assert "in batch 2 of the dataset: process 0: 8 rows of float32[rows]; proc" in early[1]
        assert "process 1: no more batch" in early[1]
        assert "in batch 1 of the dataset: process 0: 8 rows of float32[rows]; proc" in rows[1]
        assert "process 1: 6 rows of float32[rows]" in rows[1]
        assert "seed: 0 in process 0, 1 in process 1" in plan[1]
        assert "global batch size: 8 in process 0, 16 in process 1" in plan[1]
        assert "kind: 'batches of an iterable' in process 0, 'examples read by number'" in kind[1]
        assert "pass_number: 0 in process 0, 1 in process 1" in position[1]
        assert [len(x) for x in whole] == [16] * 5 + [14]
        assert sum(whole, []) == list(range(94))
    here, there = ([x for x in result[0][2:5]] for result in results)
    assert there == [
        ["OSError", "disk on fire"],
        ["ValueError", there[1][1]],
        ["PermissionError", "not yours"],
    ]
    assert "holds int32[rows], before float32[rows]" in there[1][1]
    for (kind, text), step, told in zip(
        here,
        ["at step 1", "at step 1", "at step 0"],
        ["OSError: disk on fire", "int32[rows]", "PermissionError: not yours"],
        strict=True,
    ):
        assert kind == "RuntimeError"
        assert f"The dataset of process 1 failed {step}" in text
        assert told in text


@pytest.mark.slow
def test_a_dataset_is_sharded_by_its_policy_and_process_0_logs_how(processes):
    here, there = _results(processes, "shared out")
    assert here == there
    a, b = np.arange(20), np.arange(20) + 100
    steps = [
        [*a[0:4], *b[0:4]],
        [*a[4:8], *b[4:8]],
        [*a[8:12], *b[8:12]],
        [*a[12:16], *b[12:16]],
        [*a[16:20], *b[16:20]],
    ]
    assert here["off"] == here["off of a list"] == steps
    assert here["off resumed"] == steps[1:]
    assert here["off dropped"] == steps[:4]
    hint = here["hint"]
    assert hint[0] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert sorted(sum(hint, [])) == sorted(sum(here["hint of batches"], [])) == list(range(20))
    assert here["data"] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    first, warned, table = here["by files"]
    assert first == list(range(19, 11, -1))
    assert "divides 1 files among 2 processes" in warned
    assert table.splitlines()[-1].split() == ["1", "4-7", "1", "4", "8", "0"]
    for (kind, text), told in zip(
        here["mistakes"],
        [
            "begin with exactly the same examples",
            "the NumpyDataset has no SHARD_HINT",
            "the list has no SHARD_HINT",
            "the NumpyDataset is not read from files",
            "InputOptions(partial_batch='shrink') does not support auto_shard_policy OFF",
            "but is distributed with AutoShardPolicy.AUTO",
        ],
        strict=True,
    ):
        assert kind == "ValueError"
        assert told in text
    table = here["table"].splitlines()
    assert table[0] == "dataset:       NumpyDataset"
    assert table[1].startswith("sharding:      DATA: examples are read by number")
    assert table[-2].split() == ["0", "0-3", "-", "4", "12", "0"]
    assert table[-1].split() == ["1", "4-7", "-", "4", "8", "0"]
    iterable = here["table of iterable"].splitlines()
    assert iterable[-1].split() == ["1", "4-7", "-", "4", "?", "4"]
    assert "each of 2 processes reads and decodes all of it" in iterable[1]
    assert "a function made the datasets" in here["table of function"]
    told, silent = (p.stderr for p in processes)
    assert "tpudist: " not in silent
    line = next(line for line in told.splitlines() if "DATA (examples are read by n" in line)
    assert "process 0 has replicas 0-3, 4 examples of each step, 12 of an epoch; process" in line


@pytest.mark.slow
def test_processes_agree_on_a_batch_in_memory(processes):
    """Otherwise they would compile different programs, and hang."""
    here, there = (result[-1] for result in _results(processes, "of functions"))
    assert here[:4] == there[:4]
    rows, shape, counts, total, mistakes = here
    assert rows == [*range(12), *range(100, 108)]
    assert (shape, counts) == ([8, 3, 1], [3] * 4 + [2] * 4)
    assert total == sum(x**2 for x in rows)
    texts = (
        "process 0 has 8 rows of 8, int32[rows]; process 1 has 7 rows of 7, int32[rows]",
        "process 1 has 8 rows of 16",
        "process 0 has 8 rows of 8, [0] int32[rows]; process 1 has 8 rows of 8, ['x'] int32[rows]",
        "int32[rows]; process 1 has 8 rows of 8, float32[rows]",
        "float32[rows,1]; process 1 has float32[rows,2]",
        "The batch has no rows",
        "The call of distribute_batch of process 1 failed",
    )
    for text, (_, told) in zip(texts, mistakes, strict=True):
        assert text in told
    kinds = [kind for kind, _ in mistakes]
    assert kinds == ["ProcessesDifferError"] * 5 + ["ValueError", "RuntimeError"]
    assert "process 0 failed" in there[4][5][1]


@pytest.mark.slow
def test_datasets_of_functions_are_resumed_and_may_be_empty_in_some_processes(processes):
    here, there = _results(processes, "of functions")
    whole, found, state, dry, padding, differ, other, empty, _ = here
    assert empty == there[7]
    assert empty[:3] == [[[3, 4]], [0] * 4, [True] * 4]
    assert empty[3:] == [list(range(16)), [*range(8), *range(100, 108)], list(range(9))]
    assert found == [whole[step:] for step in range(len(whole) + 1)]
    assert state == there[2]
    assert [rows for rows, _ in dry] == [[0, 0, 0, 0, 2, 2, 2, 2], [0, 0, 0, 0, 2, 0, 0, 0]]
    assert [len(rows) for _, rows in dry] == [8, 2]
    assert min(padding) == 1.0  # a real row of the other process, never zeros
    assert differ == there[5]
    assert differ[0] == "ValueError"
    assert "float32[rows,3], process 1" in differ[1]
    assert other[0] == there[6][0] == "ValueError"
    assert "seed of dataset 0: 0 in the state, 7 here" in other[1]
    assert "seed of dataset 0: 1 in the state, 8 here" in there[6][1]
