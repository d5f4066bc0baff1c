"""Explains why a program does not fit: its size, its largest parts, and their source lines."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tpudist.xla import topology
from tpudist.xla.compiler import compiler_process
from tpudist.xla.estimate import refusal
from tpudist.xla.hlo.buffers import Buffer

GIB = 2**30
HUNDREDTH = 0.01 * GIB  # the rounding of the compiler's messages


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (19.39G) exceeds available HBM (15.75G).",
            19.39,
            15.75,
        ),
        (  # openxla.org/xla/errors/error_1000
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G.",
            49.34,
            32.00,
        ),
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, "
            "exceeding available bytes: 33.74G",
            34.82,
            33.74,
        ),
        (  # a published run on v4: github.com/erfanzar/EasyDeL/issues/166
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.\n\nTotal hbm "
            "usage >= 65.05G:\n    reserved          1.25G\n    program          63.80G",
            63.80,
            30.75,
        ),
        (  # libtpu 0.0.50
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (32.48G) exceeds available HBM (31.24G). HLO "
            "module: jit_f.\nSee https://openxla.org/xla/errors/error_1000 for more details.",
            32.48,
            31.24,
        ),
        ("RESOURCE_EXHAUSTED: Used 1.5T of 512.00M hbm. Exceeded", 1536, 0.5),
    ],
)
def test_the_figures_in_a_message_are_parsed(text, needed, available):
    found = refusal.explain(text)
    assert found.needed_bytes == pytest.approx(needed * GIB)
    assert found.available_bytes == pytest.approx(available * GIB)
    assert found.over_bytes == found.needed_bytes - found.available_bytes
    assert found.largest == ()
    assert found.text == text
    share = (needed - available) / available
    assert f"({share:.1%}) too much" in str(found)


TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "({}) exceeds available HBM (30.75G)."
)


@pytest.mark.parametrize(
    ("message", "buffer_bytes", "needed", "over"),
    [
        # Seen on v4: the message counts 1.25 GiB more than the buffers.
        (TEMPORARIES.format("30.98G"), 29.73 * GIB, 30.98 * GIB, 0.23 * GIB),
        (TEMPORARIES.format("30.98G"), 30.982 * GIB, 30.982 * GIB, 0.232 * GIB),
        # Both figures round to the same number: first with buffers, then without.
        (TEMPORARIES.format("30.75G"), 30.751 * GIB, 30.751 * GIB, 0.001 * GIB),
        (TEMPORARIES.format("30.75G"), 0, 30.75 * GIB, HUNDREDTH),
        (
            "RESOURCE_EXHAUSTED: Used 15.75G of 15.75G hbm. Exceeded hbm capacity by 512.0K.",
            0,
            15.75 * GIB,
            512 * 2**10,
        ),
    ],
)
def test_the_bytes_of_a_refusal_are_those_of_the_message(message, buffer_bytes, needed, over):
    buffers = f"\nBufferAssignment:\nallocation 0: size {buffer_bytes:.0f}, preallocated-temp:\n"
    found = refusal.explain(message + (buffers if buffer_bytes else ""))
    assert found.needed_bytes == pytest.approx(needed, abs=2)
    assert found.over_bytes == pytest.approx(over, abs=2)
    assert ": 0 B (0.0%) too much" not in str(found)


@pytest.mark.parametrize(
    "reports", ["", "\nBufferAssignment:\nallocation 0: size 100, preallocated-temp:\n"]
)
def test_a_message_without_figures_is_returned_unchanged(reports):
    found = refusal.explain("RESOURCE_EXHAUSTED: no" + reports)
    assert (found.needed_bytes, found.over_bytes, found.largest) == (0, 0, ())
    assert str(found) == "The compiler rejected the program: RESOURCE_EXHAUSTED: no"


LISTED = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 98.2G of 15.75G hbm.

Program hbm requirement 97.92G:
    HLO temp         97.92G (89.3% utilization: Unpadded (87.45G) Padded (97.92G))

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="pmap(update)/add" source_file="/home/me/train.py" source_line=711
     Shape: f32[1,524288,500]{2,1,0:T(8,128)}
     Unpadded size: 1.75G
     Extra memory due to padding: 250.0M (1.1x expansion)
     XLA label: %fusion.6 = f32[1,524288,500]{2,1,0:T(8,128)} fusion(f32[524288]{0} %x)
     Allocation type: HLO temp
     ==========================

  2. Size: 64.00M
     Operator: op_name="params[\\'w\\']"
     Shape: f32[4096,4096]{1,0:T(8,128)}
     Unpadded size: 64.00M
     XLA label: copy.13 = copy(copy.16), sharding={replicated}
     Allocation type: HLO temp
     ==========================
"""


def test_the_list_of_largest_allocations_in_a_message_is_parsed():
    assert refusal.explain(LISTED).largest == (
        Buffer(
            name="fusion.6",
            shape="f32[1,524288,500]{2,1,0:T(8,128)}",
            num_bytes=2 * GIB,
            unpadded_bytes=round(1.75 * GIB),
            op_name="pmap(update)/add",
            source="/home/me/train.py:711",
        ),
        Buffer(
            name="copy.13",
            shape="f32[4096,4096]{1,0:T(8,128)}",
            num_bytes=GIB // 16,
            unpadded_bytes=GIB // 16,
            op_name="params['w']",
            source=None,
        ),
    )


# Messages of the pinned compiler.


def arguments_that_are_too_large(x, y):
    return x.sum() + y.sum()


def temporaries_that_are_too_large(x):
    table = jnp.sort(x[:, None] * x[None, :], axis=0)
    return (table @ jnp.sort(table, axis=1)).sum()


def a_loop_that_keeps_too_much(w, x):
    def loss(w):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, w)[0].sum()

    return jax.grad(loss)(w)


def too_large_by_little(x):
    table = jnp.sort(x[:, None] * x[None, :], axis=0)
    return table @ jnp.ones((x.size, 8))


@functools.cache
def refused(function, *shapes):
    devices = topology.devices("v5e:2x2")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    args = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=NamedSharding(mesh, P())) for x in shapes]
    with pytest.raises(compiler_process.HbmExceeded) as caught:
        compiler_process.compile_here(jax.jit(function).lower(*args))
    return caught.value


TOO_LARGE = {
    arguments_that_are_too_large: ((40_000, 100_000), (20_000, 60_000)),
    temporaries_that_are_too_large: ((50_000,),),
    a_loop_that_keeps_too_much: ((64, 4096, 4096), (16384, 4096)),
    too_large_by_little: ((46_200,),),
}


@pytest.mark.libtpu
@pytest.mark.parametrize("function", TOO_LARGE)
def test_a_refusal_states_exactly_how_much_memory_is_needed(function):
    error = refused(function, *TOO_LARGE[function])
    message, found = refusal.explain(str(error)), refusal.explain(error.text)
    assert found.available_bytes == message.available_bytes == 15.75 * GIB
    assert found.needed_bytes == pytest.approx(message.needed_bytes, abs=HUNDREDTH)
    assert found.over_bytes == found.needed_bytes - found.available_bytes > 0
    assert found.text == str(error)  # without the other output of the compiler


@pytest.mark.libtpu
@pytest.mark.parametrize("function", TOO_LARGE)
def test_a_refusal_names_nearly_all_allocations(function):
    found = refusal.explain(refused(function, *TOO_LARGE[function]).text)
    sizes = [x.num_bytes for x in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    # The rest is fragmentation: space that fits no value.
    assert 0.8 * found.needed_bytes < sum(sizes) <= found.needed_bytes


@pytest.mark.libtpu
def test_arguments_that_are_too_large_have_the_users_names():
    error = refused(arguments_that_are_too_large, *TOO_LARGE[arguments_that_are_too_large])
    found = refusal.explain(error.text, names=["batch.images", "table"])
    first, second = found.largest[:2]
    assert [first.name, second.name] == ["batch.images", "table"]
    assert first.unpadded_bytes == 4 * 40_000 * 100_000
    assert found.argument_bytes == pytest.approx(found.needed_bytes, rel=1e-3)
    assert "The largest allocation has 14.92 GiB: batch.images." in str(found)


@pytest.mark.libtpu
def test_the_largest_temporary_has_its_source_line():
    function = a_loop_that_keeps_too_much
    found = refusal.explain(refused(function, *TOO_LARGE[function]).text)
    first = found.largest[0]
    assert first.unpadded_bytes == 4 * 64 * 16384 * 4096  # an activation of every layer
    file, _, line = first.source.rpartition(":")
    start = function.__code__.co_firstlineno
    assert file == __file__
    assert start < int(line) <= start + 7
    assert str(found).endswith(f"{first.op_name} ({first.source}).")


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_compiler_in_another_process_raises_the_same_message():
    function = too_large_by_little
    here = refused(function, *TOO_LARGE[function])
    devices = topology.devices("v5e:2x2")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    x = jax.ShapeDtypeStruct((46_200,), jnp.float32, sharding=NamedSharding(mesh, P()))
    with pytest.raises(compiler_process.HbmExceeded) as caught:
        compiler_process.compile_elsewhere(jax.jit(function).lower(x), devices)
    there = caught.value
    assert str(there) == str(here)
    assert refusal.explain(there.text) == refusal.explain(here.text)
