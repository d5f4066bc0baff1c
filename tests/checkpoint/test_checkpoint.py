"""States are restored bitwise, on any placement of the objects; mismatches raise."""

import dataclasses
import warnings

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as some

import tpudist
from checkpoint_program import MEAN, ON_READ, SUM, Counter, digest, make_state
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, save_restore
from tpudist.checkpoint.entries import VALUE, Entries, find_entries, join_path
from tpudist.checkpoint.restore_match import Selection, match

STRATEGIES = {
    "one device": tpudist.OneDeviceStrategy,
    "2 replicas": lambda: tpudist.MirroredStrategy(jax.devices()[:2]),
    "8 replicas": tpudist.MirroredStrategy,
    "2 replicas of fsdp 4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "fsdp 2 x tensor 4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 4}),
}


@pytest.fixture(scope="module")
def states():
    """A function that returns the state under a strategy, created at the first call."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = make_state(STRATEGIES[name](), seed=0)
        return known[name]

    return get


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories with one checkpoint each, saved under a strategy: its step and its digest."""
    known = {}

    def get(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("saved")
            state = make_state(STRATEGIES[name](), seed=3 + len(known))  # other values in each
            with CheckpointManager(state, folder) as manager:
                manager.save()
            known[name] = folder, state.step, digest(state)
        return known[name]

    return get


# Each run restores these, and a share of the other pairs.
MARKS_OF_PAIRS = {
    ("8 replicas", "one device"): (),
    ("fsdp 2 x tensor 4", "8 replicas"): pytest.mark.slow,
    ("2 replicas of fsdp 4", "fsdp 2 x tensor 4"): pytest.mark.slow,
}
OTHER_PAIRS = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(here, there, marks=MARKS_OF_PAIRS.get((here, there), OTHER_PAIRS))
        for here in STRATEGIES
        for there in ("one device", "8 replicas", "fsdp 2 x tensor 4")
    ],
)
def test_a_state_is_restored_bitwise_on_any_mesh(states, saved, there, here):
    state, (folder, step, expected) = states(here), saved(there)
    shardings = [x.sharding for x in jax.tree.leaves(nnx.state(state.model))]
    assert digest(state) != expected
    report = CheckpointManager(state, folder).restore(step)
    assert digest(state) == expected
    assert set(report.restored) == set(expected)
    assert not report.not_restored
    assert not report.left_in_checkpoint
    assert [x.sharding for x in jax.tree.leaves(nnx.state(state.model))] == shardings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8 replicas", "fsdp 2 x tensor 4"])
def test_a_restored_state_trains_as_the_saved_one_does(saved, name):
    folder, seed, _ = saved(name)
    strategy = STRATEGIES[name]()
    x = jnp.arange(64, dtype=jnp.float32).reshape(4, 16) / 64

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)
        optimizer.update(model, tpudist.get_replica_context().all_reduce("mean", grads))
        return tpudist.get_replica_context().all_reduce("mean", loss)

    def three_steps():
        steps = [strategy.run(step, (state.model, state.optimizer, x)) for _ in range(3)]
        return [float(loss) for loss in steps]

    state = make_state(strategy, seed)
    saved_one, further = three_steps(), three_steps()
    CheckpointManager(state, folder).restore()  # its arrays have been donated to steps
    assert three_steps() == saved_one != further


def test_donated_arrays_are_restored_to_their_placement(tmp_path):
    mesh = tpudist.MirroredStrategy().mesh
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
    checkpoint = Checkpoint(x=jax.device_put(jnp.arange(16.0), split), key=jax.random.key(1))
    manager = CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    manager.wait()
    checkpoint.x.delete()
    checkpoint.key.delete()
    manager.restore()
    assert checkpoint.x.sharding == split
    assert checkpoint.x.tolist() == list(range(16))
    assert jax.random.key_data(checkpoint.key).tolist() == [0, 1]
    assert not checkpoint.key.committed


def test_variables_in_central_storage_are_restored_there(tmp_path):
    strategy = tpudist.experimental.CentralStorageStrategy()
    with strategy.scope():
        v = tpudist.Variable(jnp.arange(4.0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path)
    manager.save(1)
    v.assign(jnp.zeros(4))
    manager.restore()
    assert v._value.sharding == strategy.storage.sharding
    strategy.run(lambda: v.assign_add(jnp.ones(4), read_value=False))
    assert v.numpy().tolist() == [1, 2, 3, 4]


@pytest.mark.slow
@hypothesis.given(
    some.dictionaries(
        some.text(some.characters(codec="utf-8"), max_size=6),
        hypothesis.extra.numpy.arrays(
            some.sampled_from(["f4", "i4", "u1", "?", "c8", "f2", "i8"]),
            hypothesis.extra.numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=5,
    )
)
@hypothesis.settings(max_examples=8)
def test_any_names_and_arrays_round_trip(tmp_path_factory, tree):
    target = Checkpoint(tree={name: np.zeros_like(x) for name, x in tree.items()})
    folder = tmp_path_factory.mktemp("any")
    with CheckpointManager(Checkpoint(tree=tree), folder) as manager:
        manager.save(0, allow_nan=True)
    CheckpointManager(target, folder).restore()
    for name, x in tree.items():
        assert target.tree[name].dtype == x.dtype
        assert target.tree[name].shape == x.shape
        assert target.tree[name].tobytes() == x.tobytes()


@hypothesis.given(some.lists(some.lists(some.text(max_size=4), max_size=3), unique_by=tuple))
def test_different_paths_have_different_names(paths):
    names = [join_path(path) for path in paths if path]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_variables_with_components_are_saved_aggregated(tmp_path, num_replicas):
    """TensorFlow saves them in the same way, but there 7 over 2 replicas does not stay 7."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:4])
    with strategy.scope():
        total = tpudist.Variable(0, synchronization=ON_READ, aggregation=SUM)
        mean = tpudist.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)

    def step():
        replica = tpudist.get_replica_context().replica_id_in_sync_group
        total.assign_add(replica + 1)
        mean.assign_add(1.0 * replica)

    strategy.run(step)
    with CheckpointManager(Checkpoint(total=total, mean=mean), tmp_path) as manager:
        manager.save(1)
    other = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    with other.scope():
        total = tpudist.Variable(100, synchronization=ON_READ, aggregation=SUM)
        mean = tpudist.Variable(100.0, synchronization=ON_READ, aggregation=MEAN)
    CheckpointManager(Checkpoint(total=total, mean=mean), tmp_path).restore()
    assert int(total.read_value()) == 10
    assert float(mean.read_value()) == 1.5
    assert [float(x.numpy()) for x in mean.values] == [1.5] * num_replicas
    assert sum(int(x.numpy()) for x in total.values) == 10


def test_a_variable_without_a_single_value_is_not_saved(tmp_path):
    with tpudist.MirroredStrategy().scope():
        apart = tpudist.Variable(0, synchronization=ON_READ)
    with pytest.raises(ValueError, match="its components have no single value"):
        CheckpointManager(Checkpoint(apart=apart), tmp_path).save(1)


def test_a_shared_object_is_saved_once_and_may_be_separate_later(tmp_path):
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with CheckpointManager(Checkpoint(a=layer, b=layer), tmp_path) as manager:
        manager.save(1)
    a, b = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    CheckpointManager(Checkpoint(a=a, b=b), tmp_path).restore()
    for x in (a, b):
        np.testing.assert_array_equal(x.kernel[...], layer.kernel[...])
    a.kernel.get_raw_value().delete()
    np.testing.assert_array_equal(b.kernel[...], layer.kernel[...])


def test_only_process_0_reads_the_state_of_an_iterator_to_save_it(monkeypatch):
    """It has the positions of all processes, so n processes would read n * n."""
    dataset = tpudist.NumpyDataset(np.arange(24)).batch(4)
    batches = iter(tpudist.MirroredStrategy().experimental_distribute_dataset(dataset))
    state, values = tpudist.TrainState(batches=batches), []
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        _, contents = save_restore.gather(find_entries(state), 0, {})
        values.append(contents["leaves"]["batches"]["value"])
    assert values == [batches.get_state(), None]


def test_the_iterator_of_a_dataset_resumes_at_its_position(tmp_path):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = tpudist.NumpyDataset(np.arange(24)).shuffle(3).batch(4)

    def state(strategy):
        batches = iter(strategy.experimental_distribute_dataset(dataset))
        return tpudist.TrainState(batches=batches)

    def rows(strategy, batches):
        return [np.asarray(strategy.gather(batch, 0)).tolist() for batch in batches]

    first = state(strategy)
    for _ in range(2):
        next(first.batches)
        first.step += 1
    with CheckpointManager(first, tmp_path) as manager:
        manager.save()
    rest = rows(strategy, first.batches)
    assert len(rest) == 4
    for other in (strategy, tpudist.OneDeviceStrategy(), tpudist.MirroredStrategy()):
        second = state(other)
        CheckpointManager(second, tmp_path).restore_or_initialize()
        assert second.step == 2
        assert rows(other, second.batches) == rest
        second.batches.close()


def test_objects_that_are_assigned_later_are_saved(tmp_path):
    state = tpudist.TrainState(None, None, extra=1)
    state.more = {"a": [jnp.ones(2), None, "text"]}
    state._private = object()
    with CheckpointManager(state, tmp_path) as manager:
        manager.save()
    state.more["a"][2] = "other"
    state.extra = 2
    CheckpointManager(state, tmp_path).restore()
    assert (state.step, state.extra, state.more["a"][2]) == (0, 1, "text")


@pytest.mark.parametrize("name", ["v", None])
def test_the_slots_of_an_optimizer_of_variables_are_saved(tmp_path, name):
    """Under keys that another process gives too: Variables without a name have their place."""

    def make(value):
        with tpudist.MirroredStrategy().scope():
            tpudist.Variable(0.0)  # one more that counts
            v = tpudist.Variable(jnp.full(3, value), name=name)
            optimizer = tpudist.Optimizer(optax.adam(0.1))
        return v, optimizer

    def train(v, optimizer):
        optimizer.apply_gradients([(jnp.ones(3), v)])

    v, optimizer = make(1.0)
    for _ in range(3):
        v.strategy.run(train, (v, optimizer))
    with CheckpointManager(Checkpoint(v=v, optimizer=optimizer), tmp_path) as manager:
        manager.save(1)
    v.strategy.run(train, (v, optimizer))
    w, other = make(5.0)
    with pytest.raises(CheckpointError, match="not in the objects: optimizer.slots.0.count int32"):
        CheckpointManager(Checkpoint(v=w, optimizer=other), tmp_path).restore()
    other.build([w])
    CheckpointManager(Checkpoint(v=w, optimizer=other), tmp_path).restore()
    w.strategy.run(train, (w, other))
    np.testing.assert_array_equal(v.numpy(), w.numpy())


# What does not fit.


def _saved(tmp_path, **objects):
    with CheckpointManager(Checkpoint(**objects), tmp_path) as manager:
        manager.save(1)
    return tmp_path


def test_all_differences_are_listed_and_nothing_is_restored(tmp_path):
    _saved(
        tmp_path,
        shape=jnp.zeros((2, 3)),
        dtype=jnp.zeros(2),
        gone=jnp.zeros(1),
        kind=1,
        number=1,
        key=jax.random.key(0),
        fits=jnp.zeros(2),
    )
    target = Checkpoint(
        shape=jnp.ones((3, 2)),
        dtype=jnp.ones(2, jnp.bfloat16),
        new=jnp.ones(1),
        kind=jnp.ones(()),
        number=1.0,
        key=jax.random.key(0, impl="rbg"),
        fits=jnp.ones(2),
    )
    with pytest.raises(CheckpointError) as error:
        CheckpointManager(target, tmp_path).restore()
    for line in (
        "shape is float32[3,2] in the objects, float32[2,3] in the checkpoint",
        "dtype is bfloat16[2] in the objects, float32[2] in the checkpoint",
        "missing in the checkpoint: new float32[1]",
        "in the checkpoint, but not in the objects: gone float32[1]",
        "kind is float32[] in the objects, int in the checkpoint",
        "number is float in the objects, int in the checkpoint",
        "key is key rbg[] in the objects, key threefry2x32[] in the checkpoint",
    ):
        assert line in str(error.value)
    assert "fits" not in str(error.value).splitlines()[1:-1]
    assert target.fits.tolist() == [1, 1]


def test_a_dtype_is_converted_only_with_cast(tmp_path):
    _saved(tmp_path, x=jnp.array([1.5, 2.25]))
    target = Checkpoint(x=jnp.zeros(2, jnp.bfloat16))
    manager = CheckpointManager(target, tmp_path)
    with pytest.raises(CheckpointError, match="cast=True"):
        manager.restore()
    report = manager.restore(cast=True)
    assert target.x.dtype == jnp.bfloat16
    assert target.x.tolist() == [1.5, 2.25]
    assert report.cast == ("x: float32 to bfloat16",)
    assert "Converted to another dtype (1):\n  x" in str(report)


@pytest.fixture
def net_folder(tmp_path):
    state = make_state(tpudist.OneDeviceStrategy(), 3)
    with CheckpointManager(state, tmp_path) as manager:
        manager.save()
    return tmp_path


@pytest.mark.slow
def test_a_part_is_restored_by_name_or_by_type(net_folder):
    state = make_state(tpudist.OneDeviceStrategy(), 5)
    before, there = digest(state), digest(make_state(tpudist.OneDeviceStrategy(), 3))
    report = CheckpointManager(state, net_folder).restore(
        only=["model", "rngs"], exclude=[nnx.BatchStat, "model.split"]
    )
    now = digest(state)
    for name in now:
        part = name.startswith(("model", "rngs")) and not name.startswith("model.split")
        part = part and name not in ("model.norm.mean", "model.norm.var")
        assert now[name] == (there[name] if part else before[name]), name
        assert (name in report.restored) == part
    assert "step int" in report.not_restored
    assert "opt.0.count int32[]" in report.left_in_checkpoint
    assert "Only in the checkpoint" in str(report)
    assert str(report).startswith(f"Restored {len(report.restored)} values of step 3 from ")


@pytest.mark.slow
def test_only_parameters_are_restored_by_their_type(net_folder):
    state = tpudist.TrainState(make_state(tpudist.OneDeviceStrategy(), 5).model)
    report = CheckpointManager(state, net_folder).restore(only=[nnx.Param])
    assert all(name.startswith("model.") for name in report.restored)
    assert "model.norm.mean float32[16]" in report.not_restored
    assert state.step == 0


def test_names_of_the_checkpoint_can_be_renamed(tmp_path):
    _saved(tmp_path, encoder={"a": jnp.ones(2), "b": jnp.full(2, 3.0)}, step=4)
    target = Checkpoint(model={"body": {"a": jnp.zeros(2), "c": jnp.zeros(2)}}, steps=0)
    rename = {"encoder": "model.body", "encoder.b": "model.body.c", "step": "steps"}
    CheckpointManager(target, tmp_path).restore(rename=rename)
    assert target.model["body"]["a"].tolist() == [1, 1]
    assert target.model["body"]["c"].tolist() == [3, 3]
    assert target.steps == 4
    with pytest.raises(CheckpointError, match="rename: the checkpoint has no such name: decoder"):
        CheckpointManager(target, tmp_path).restore(rename={**rename, "decoder": "x"})


@pytest.mark.parametrize(
    ("only", "restored"),
    [
        ("*.kernel", ["net.0.kernel", "net.1.in.kernel", "net.10.kernel"]),
        ("net.*.kernel", ["net.0.kernel", "net.1.in.kernel", "net.10.kernel"]),
        ("net.1*", ["net.1.in.kernel", "net.10.kernel"]),
        ("net.*.in", ["net.1.in.kernel"]),
        (["net.**.bias", "st*p"], ["net.0.bias", "step"]),
        ("*", ["net.0.bias", "net.0.kernel", "net.1.in.kernel", "net.10.kernel", "step"]),
    ],
)
def test_a_pattern_selects_names(only, restored):
    net = {"0": {"kernel": 1, "bias": 2}, "1": {"in": {"kernel": 3}}, "10": {"kernel": 4}}
    found = Entries({"net": net, "step": 5}, lambda name, x: None)
    saved = {x.name: {"kind": x.kind, "shape": (), "dtype": "int"} for x in found.entries}
    chosen = match(found, saved, {}, "there", Selection(only=only))
    assert sorted(name for _, name in chosen.pairs) == restored
    others = (
        match(found, saved, {}, "there", Selection(exclude=only))
        if restored != sorted(saved)
        else None
    )
    if others is not None:
        assert {name for _, name in others.pairs} == saved.keys() - set(restored)


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"layers_*": "net.*"}, ["net.0.w", "net.12.w", "top"]),
        ({"layers_*.w": "net.*.kernel", "top": "head"}, ["net.0.kernel", "net.12.kernel", "head"]),
        ({"layers_*": "net.*", "layers_0": "first"}, ["first.w", "net.12.w", "top"]),
        ({"*": "model.*"}, ["model.layers_0.w", "model.layers_12.w", "model.top"]),
        ({"l*_*": "*.*"}, ["ayers.0.w", "ayers.12.w", "top"]),
        ({"layers_0": "top"}, ["top.w", "layers_12.w", "top"]),
    ],
)
def test_a_pattern_renames_matching_names(rename, names):
    saved = dict.fromkeys(["layers_0.w", "layers_12.w", "top"], {"kind": VALUE, "dtype": "int"})
    saved = {name: x | {"shape": ()} for name, x in saved.items()}
    found = Entries({name: 0 for name in names}, lambda name, x: None)
    found.entries = [
        dataclasses.replace(x, path=tuple(x.path[0].split("."))) for x in found.entries
    ]
    paired = match(found, saved, {}, "there", Selection(rename=rename)).pairs
    assert [(entry.name, old) for entry, old in paired] == list(zip(names, saved, strict=True))


def test_an_ambiguous_rename_raises(tmp_path):
    _saved(tmp_path, a={"x": 1, "y": 2}, b=3)
    manager = CheckpointManager(Checkpoint(b=0), tmp_path)
    with pytest.raises(CheckpointError, match=r"several names are renamed to b: a.x, a.y"):
        manager.restore(rename={"a.x": "b", "a.y": "b"}, only="b")
    assert manager.restore(rename={"a.x": "b"}, only="b").restored == ("b",)
    assert manager.checkpoint.b == 1
    with pytest.raises(ValueError, match=r"the old name has 1 '\*' and the new name has 0"):
        manager.restore(rename={"a.*": "b"})


def test_a_star_in_a_name_matches_itself(tmp_path):
    _saved(tmp_path, t={"a*": 1, "ab": 2})
    target = Checkpoint(t={"c": 0, "ab": 0})
    CheckpointManager(target, tmp_path).restore(rename={"t.a*": "t.c"} | {"t.ab": "t.ab"})
    assert target.t == {"c": 1, "ab": 2}


def test_selecting_a_missing_name_raises(tmp_path):
    _saved(tmp_path, x=jnp.ones(2))
    manager = CheckpointManager(Checkpoint(x=jnp.ones(2)), tmp_path)
    with pytest.raises(CheckpointError, match="the objects have nothing of this name: model"):
        manager.restore(only=["model"])
    with pytest.raises(CheckpointError, match="the objects have nothing of this type: <class"):
        manager.restore(only=[nnx.Param])


def test_a_rejected_position_leaves_the_arrays_unchanged(tmp_path):
    class Stubborn(Counter):
        def set_state(self, state):
            raise ValueError("not mine")

    _saved(tmp_path, x=jnp.ones(2), batches=Counter(3))
    target = Checkpoint(x=jnp.zeros(2), batches=Stubborn(0))
    with pytest.raises(ValueError, match="not mine"):
        CheckpointManager(target, tmp_path).restore()
    assert target.x.tolist() == [0, 0]


# Objects that cannot be saved.


def test_all_unsupported_objects_are_named(tmp_path):
    checkpoint = Checkpoint(ok=1, f=lambda: 1, tree={"a": object(), "b": np.array([None])})
    with pytest.raises(TypeError, match=r"f: builtins.function\n  tree.a: .*\n  tree.b: numpy"):
        CheckpointManager(checkpoint, tmp_path).save(1)


def test_a_state_that_is_not_json_raises(tmp_path):
    class Odd(Counter):
        def get_state(self):
            return {"position": (1, 2)}

    with pytest.raises(TypeError, match="'batches' returned .* JSON cannot store"):
        CheckpointManager(Checkpoint(batches=Odd(1)), tmp_path).save(1)


def test_a_state_may_contain_nan(tmp_path):
    class Odd(Counter):
        def get_state(self):
            return {"mean": float("nan")}

    assert CheckpointManager(Checkpoint(batches=Odd(1)), tmp_path).save(1)


def test_an_unsupported_dtype_raises(tmp_path):
    with pytest.raises(TypeError, match="'x' is x uint4.3., and checkpoints cannot store"):
        CheckpointManager(Checkpoint(x=jnp.ones(3, jnp.uint4)), tmp_path).save(1)


def test_arrays_that_have_been_donated_cannot_be_saved(tmp_path):
    checkpoint = Checkpoint(x=jnp.ones(2), y=jnp.ones(2))
    checkpoint.x.delete()
    with pytest.raises(CheckpointError, match="were donated to a step or deleted: x. Pass"):
        CheckpointManager(checkpoint, tmp_path).save(1)


@pytest.mark.parametrize("name", ["_x", "checkpoint_objects"])
def test_a_reserved_name_raises(name):
    with pytest.raises(ValueError, match="is reserved"):
        Checkpoint(**{name: 1})


def test_a_manager_requires_a_checkpoint(tmp_path):
    with pytest.raises(TypeError, match="must be a Checkpoint"):
        CheckpointManager({"x": 1}, tmp_path)


def test_nothing_is_saved_in_a_replica_function(tmp_path):
    manager = CheckpointManager(Checkpoint(x=1), tmp_path)
    with pytest.raises(ValueError, match="outside of the replica function"):
        tpudist.MirroredStrategy().run(lambda: manager.save(1))


def test_a_state_in_the_scope_of_a_strategy_is_saved_and_restored(tmp_path):
    strategy = tpudist.MirroredStrategy()
    alone = jnp.arange(3.0)
    with strategy.scope(), warnings.catch_warnings():
        checkpoint = Checkpoint(
            alone=alone,
            key=jax.random.key(0),
            v=tpudist.Variable(2.0),
            bn=nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
        )
        manager = CheckpointManager(checkpoint, tmp_path)
        manager.save(1)
        checkpoint.v.assign(3.0)
        manager.restore()
        assert float(checkpoint.v.read_value()) == 2.0
    assert checkpoint.alone.sharding == alone.sharding


def test_bare_arrays_in_modules_and_checkpoints_in_checkpoints_are_restored(tmp_path):
    class Bare(nnx.Module):
        def __init__(self, value):
            self.scale = nnx.data(jnp.full(2, value))
            self.more = nnx.List([nnx.data(jnp.full(2, value)), nnx.Param(jnp.full(2, value))])

    def make(value):
        return Checkpoint(inner=Checkpoint(bare=Bare(value), n=value), outer=[value])

    with CheckpointManager(make(1.0), tmp_path) as manager:
        manager.save(1)
    target = make(2.0)
    bare = target.inner.bare
    CheckpointManager(target, tmp_path).restore()
    assert target.inner.bare is bare
    assert [x.tolist() for x in (bare.scale, bare.more[0], bare.more[1][...])] == [[1, 1]] * 3
    assert (target.inner.n, target.outer) == (1.0, [1.0])


# What users do.


def test_numpy_scalars_stay_numpy_scalars(tmp_path):
    checkpoint = Checkpoint(x=np.float64(0.1), y=[np.bool_(True)], z=np.array(3))
    with CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(1)
    checkpoint.x, checkpoint.y = np.float64(0), [np.bool_(False)]
    manager.restore()
    assert isinstance(checkpoint.x, np.float64)
    assert isinstance(checkpoint.y[0], np.bool_)
    assert isinstance(checkpoint.z, np.ndarray)
    assert (checkpoint.x, checkpoint.y) == (0.1, [True])


@pytest.mark.parametrize(
    "x", [np.array(["a"]), np.str_("a"), np.array(["2020-01-01"], "datetime64[D]"), 1j, b"bytes"]
)
def test_an_invalid_step_number_raises_before_anything_is_written(tmp_path, x):
    with pytest.raises(TypeError, match="cannot save these objects:\n  x: "):
        CheckpointManager(Checkpoint(x=x), tmp_path / "run").save(1)
    assert not (tmp_path / "run").exists()


class Twin:
    """A key that looks like any other of its kind."""

    def __init__(self, number):
        self.number = number

    def __lt__(self, other):
        return self.number < other.number

    def __str__(self):
        return "twin"


def test_two_objects_with_one_name_raise(tmp_path):
    checkpoint = Checkpoint(x={Twin(0): jnp.zeros(2), Twin(1): jnp.ones(2)})
    with pytest.raises(TypeError, match="x.twin: 2 objects have this name"):
        CheckpointManager(checkpoint, tmp_path).save(1)


def test_shapes_are_restored_as_arrays_and_cannot_be_saved(tmp_path):
    split = jax.sharding.NamedSharding(
        tpudist.MirroredStrategy().mesh, jax.sharding.PartitionSpec("replica")
    )
    make = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))  # noqa: E731
    whole = Checkpoint(model=make(), x=jnp.arange(8.0), key=jax.random.key(3))
    with CheckpointManager(whole, tmp_path) as manager:
        manager.save(1)
    shapes = Checkpoint(
        model=nnx.eval_shape(make),
        x=jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split),
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    manager = CheckpointManager(shapes, tmp_path)
    with pytest.raises(CheckpointError, match=r"shapes without values: model.bias, model.kernel"):
        manager.save(2)
    manager.restore()
    assert digest(shapes) == digest(whole)
    assert shapes.x.sharding == split


def test_a_checkpoint_may_refer_to_its_container(tmp_path):
    inner = Checkpoint(x=jnp.ones(2))
    outer = Checkpoint(inner=inner)
    inner.outer = outer
    with CheckpointManager(outer, tmp_path) as manager:
        manager.save(1)
    assert manager.restore().restored == ("inner.x",)


def test_one_part_needs_no_list(tmp_path):
    checkpoint = Checkpoint(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), x=1)
    with CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(1)
    assert manager.restore(only="x").restored == ("x",)
    assert manager.restore(exclude=nnx.Param).restored == ("x",)


def test_a_donated_step_counter_raises(tmp_path):
    step = jnp.asarray(3)
    step.delete()
    with pytest.raises(CheckpointError, match="step number is an array that was don"):
        CheckpointManager(Checkpoint(step=step), tmp_path).save()
