"""The placement table of a model, and tables of strategies and compilations in notebooks."""

import html
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import tpudist
from tpudist.xla.estimate.sizes import format_bytes


@pytest.fixture
def strategy():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})


def rows_of(page):
    return [
        [
            html.unescape(re.sub("<.*?>", "", cell))
            for cell in re.findall("<td[^>]*>(.*?)</td>", row)
        ]
        for row in re.findall("<tr>(.*?)</tr>", page)
    ][1:]


def test_each_array_has_its_split_and_bytes(strategy):
    model = strategy.create(lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    table = tpudist.describe_placement({"model": model, "step": jnp.int32(0), "x": np.ones(3)})
    found = {x.name: x for x in table.arrays}
    kernel = found["model.kernel"]
    assert (kernel.shape, kernel.dtype) == ((64, 128), "float32")
    assert kernel.split == "[-, fsdp]"
    assert kernel.bytes_per_device == 64 * 128 * 4 // 2
    assert kernel.num_devices == 8
    assert found["model.bias"].split == "whole on each"
    assert found["step"].split.startswith("on ")
    assert found["x"].split == "in NumPy, on no device"
    sizes = [x.bytes_per_device for x in table.arrays]
    assert table.bytes_per_device == sum(sizes)
    lines = str(table).splitlines()
    assert lines[0] == "4 arrays, 16.5 KiB on each of 8 device(s)"
    assert "float32[64,128]" in str(table)
    assert [row[0] for row in rows_of(table._repr_html_())] == [x.name for x in table.arrays]


def test_optimizers_variables_and_boxes_are_known(strategy):
    model = strategy.create(lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.1), model))
    names = {x.name for x in tpudist.describe_placement((model, optimizer)).arrays}
    assert any("mu" in name for name in names)
    with strategy.scope():
        variable = tpudist.Variable(jnp.ones((2, 3)), name="v")
    [array] = tpudist.describe_placement(variable).arrays
    assert (array.name, array.bytes_per_device) == ("v", 24)
    kernel_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    dense = nn.Dense(8, kernel_init=kernel_init)
    variables = strategy.create_abstract(lambda: dense.init(jax.random.key(0), jnp.ones((1, 4))))
    splits = {x.name: x.split for x in tpudist.describe_placement(variables).arrays}
    assert "[fsdp, tensor]" in splits.values()
    keys = strategy.experimental_distribute_values_from_function(
        lambda c: jax.random.key(c.replica_id_in_sync_group)
    )
    [key] = tpudist.describe_placement(keys).arrays
    assert (key.split, key.bytes_per_device) == ("[replica]", 8)


@pytest.mark.parametrize(("impl", "num_bytes"), [("threefry2x32", 8), ("rbg", 16)])
def test_keys_of_any_kind_have_their_bytes(impl, num_bytes):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    [array] = tpudist.describe_placement(keys).arrays
    assert array.bytes_per_device == 3 * num_bytes


def test_an_abstract_array_without_a_place_is_called_abstract():
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    [array] = tpudist.describe_placement(shape).arrays
    assert (array.split, array.bytes_per_device) == ("abstract, on no device", 12)


def test_arrays_of_numpy_in_an_nnx_object_are_counted():
    class Table(nnx.Module):
        def __init__(self):
            self.rows = nnx.Param(np.ones((4, 2), np.float32))
            self.bare = nnx.data(np.ones(3, np.float32))
            self.param_dtype = jnp.float32

    table = tpudist.describe_placement({"model": Table()})
    found = {x.name: (x.split, x.bytes_per_device) for x in table.arrays}
    where = "in NumPy, on no device"
    assert found == {"model.rows": (where, 32), "model.bare": (where, 12)}


def test_tracers_are_abstract_and_arrays_of_other_libraries_are_not():
    other = types.SimpleNamespace(shape=(3,), dtype=np.dtype("int8"))
    found = []

    def step(x):
        found.extend(tpudist.describe_placement({"traced": x, "other": other}).arrays)
        return x

    jax.make_jaxpr(step)(jnp.ones(2))
    assert [(x.name, x.split, x.bytes_per_device) for x in found] == [
        ("other", "in another library", 3),
        ("traced", "abstract, on no device", 8),
    ]


def test_a_large_model_is_one_screen():
    tree = {f"layer_{i:03}": np.ones(1000 - i, np.float32) for i in range(100)}
    table = tpudist.describe_placement(tree)
    assert len(table.arrays) == 100
    assert len(str(table).splitlines()) == 43
    bytes_of_others = 4 * sum(1000 - i for i in range(40, 100))
    assert str(table).splitlines()[-1] == (
        f"and 60 smaller ones, {format_bytes(bytes_of_others)} per device together"
    )
    assert len(rows_of(table._repr_html_())) == 40


def test_a_shared_array_is_counted_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
            self.head = self.embed

    assert len(tpudist.describe_placement(Tied()).arrays) == 1


def test_notebooks_show_strategies_and_compiles(strategy):
    strategy.run(lambda x: x + 1, args=(jnp.ones(2),))
    page = strategy._repr_html_()
    assert rows_of(page) == [["0", "cpu:0, cpu:1, cpu:2, cpu:3", "0"]] + [
        ["1", "cpu:4, cpu:5, cpu:6, cpu:7", "0"]
    ]
    assert "fsdp=2, tensor=2" in page
    log = tpudist.compile_log()
    assert isinstance(log, list)
    name, seconds, *phases, cause = rows_of(log._repr_html_())[-1]
    assert (name, seconds, cause) == ("<lambda>", f"{log[-1].seconds:.2f}", log[-1].cause)
    assert [x for x in phases if x] == [f"{x:.2f}" for x in log[-1].phases.values()]
    assert "&lt;lambda&gt;" in log._repr_html_()
    named = tpudist.MirroredStrategy(axis_name="batch")
    assert "'replica' and 'batch'" in html.unescape(named._repr_html_())
