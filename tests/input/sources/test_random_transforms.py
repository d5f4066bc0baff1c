"""Random changes of examples: the same in a resumed run."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tpudist
from processes import run_processes
from tpudist import InputOptions
from tpudist.input import AutoShardPolicy, from_files, from_records

NUM_EXAMPLES = 22


def augmented(example, rng):
    return {"id": example, "noise": rng.normal(size=3).astype(np.float32)}


def records():
    return from_records(range(NUM_EXAMPLES), np.int32, random_transform=augmented, num_threads=2)


def seen(batches):
    """Returns the example ids and the noise of each batch, as rows."""
    found = []
    for batch in batches:
        rows = getattr(batch["id"], "rows", None) or [len(batch["id"])]
        ids, noise = (np.asarray(getattr(batch[key], "array", batch[key])) for key in batch)
        ids, noise = ids.reshape(len(rows), -1), noise.reshape(len(rows), -1, 3)
        real = [(ids[i, :n], noise[i, :n]) for i, n in enumerate(rows)]
        found.append([np.concatenate(parts).tolist() for parts in zip(*real, strict=True)])
    return found


def distributed(dataset, num_replicas, **options):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))


def by_epoch_and_id(batches, per_epoch):
    return {
        (number // per_epoch, example): tuple(noise)
        for number, (ids, noises) in enumerate(batches)
        for example, noise in zip(ids, noises, strict=True)
    }


@settings(max_examples=15, deadline=None)
@given(
    seed=st.none() | st.integers(0, 2**40),
    position=st.integers(0, 9),
    before=st.sampled_from([1, 4, 8]),
    after=st.sampled_from([1, 4]),
)
def test_a_resumed_run_sees_the_same_augmented_examples(seed, position, before, after):
    def make():
        dataset = records() if seed is None else records().shuffle(seed)
        return dataset.batch(8).repeat(3)

    reference = seen(distributed(make(), 1))
    iterator = iter(distributed(make(), before))
    assert seen(next(iterator) for _ in range(position)) == reference[:position]
    resumed = iter(distributed(make(), after))
    resumed.set_state(iterator.get_state())
    assert seen(resumed) == reference[position:]


def test_noise_is_a_function_of_seed_epoch_and_example_only():
    """The batch, the shard and the pass must not matter."""
    reference = by_epoch_and_id(seen(records().shuffle(3).batch(8).repeat(2)), 3)
    assert len(set(reference.values())) == 2 * NUM_EXAMPLES
    again = by_epoch_and_id(seen(records().shuffle(3).batch(5).repeat(2)), 5)
    assert again == reference
    passes = distributed(records().shuffle(3).batch(11), 2)
    assert by_epoch_and_id(seen(passes) + seen(passes), 2) == reference
    shard = by_epoch_and_id(seen(records().shard(2, 1).batch(4).repeat(2)), 3)
    in_order = by_epoch_and_id(seen(records().batch(8).repeat(2)), 3)
    assert shard.items() <= in_order.items()
    other_seed = by_epoch_and_id(seen(records().shuffle(4).batch(8).repeat(2)), 3)
    assert not set(other_seed.values()) & set(reference.values())


def test_the_order_and_the_noise_of_example_0_use_different_streams():
    """`default_rng([seed, epoch, 0])` is `default_rng([seed, epoch])`."""
    noise = by_epoch_and_id(seen(records().batch(NUM_EXAMPLES)), 1)[0, 0]
    assert noise[0] != pytest.approx(np.random.default_rng([0, 0]).normal())


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.FILE])
def test_records_of_files_are_changed_at_random(tmp_path, policy):
    for name, numbers in (("a.txt", range(12)), ("b.txt", range(12, 22))):
        (tmp_path / name).write_text("".join(f"{x}\n" for x in numbers))
    files = from_files(f"{tmp_path}/*.txt", parse=np.int32, random_transform=augmented)
    dataset = distributed(files.shuffle(3).batch(8).repeat(2), 4, auto_shard_policy=policy)
    reference = by_epoch_and_id(seen(records().shuffle(3).batch(8).repeat(2)), 3)
    assert by_epoch_and_id(seen(dataset), 3) == reference


def test_rows_of_parquet_files_are_changed_at_random(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": np.arange(NUM_EXAMPLES, dtype=np.int32)})
    parquet.write_table(table, tmp_path / "a.parquet")
    files = from_files(
        tmp_path / "a.parquet", random_transform=lambda row, rng: augmented(row["id"], rng)
    )
    reference = seen(records().shuffle(3).batch(8))
    assert seen(files.shuffle(3).batch(8)) == reference


def test_an_error_of_an_augmentation_names_its_example():
    def broken(example, rng):
        if example == 7:
            raise ZeroDivisionError("crop of nothing")
        return example

    dataset = from_records(range(NUM_EXAMPLES), np.int32, random_transform=broken).batch(22)
    with pytest.raises(ZeroDivisionError) as caught:
        next(iter(dataset))
    assert "Example 7 of the range" in caught.value.__notes__[0]
    with pytest.raises(
        TypeError, match=r"random_transform='flip': it must be a function of an exam"
    ):
        from_records([1], random_transform="flip")  # type: ignore


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_augment_like_one_process():
    program = f"""
    import sys
    import tpudist
    from processes import report
    sys.path.append({str(Path(__file__).parent)!r})
    from test_random_transforms import records
    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    dataset = strategy.experimental_distribute_dataset(records().shuffle(3).batch(8).repeat(2))
    report([[strategy.gather(x[key], axis=0).tolist() for key in x] for x in dataset])
    """
    reference = seen(records().shuffle(3).batch(8).repeat(2))
    assert [p.result for p in run_processes(program)] == [reference, reference]
