"""Programs that might end the process that compiles them are compiled in another one first."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.lowering import first_compile
from tpudist.lowering.workarounds import known_operations, lookup_layouts
from tpudist.xla.compiler import compiler_process
from tpudist.xla.compiler.compiler_process import CompilerDied

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def messages(caplog):
    return [x.getMessage() for x in caplog.records if "in another process" in x.getMessage()]


def make(**axes):
    return tpudist.TPUStrategy(replica_axes=axes)


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch):
    monkeypatch.setattr(first_compile, "_compiled", {})


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="tpudist.compile")
    return caplog


def test_a_program_of_known_operations_is_compiled_only_in_this_process(log):
    make(fsdp=2, tensor=2).run(lambda x: jnp.sort(x) @ x.T, args=(X,))
    assert messages(log) == []


@pytest.mark.slow
def test_an_unknown_operation_is_compiled_in_another_process_first(log, monkeypatch):
    monkeypatch.setattr(known_operations, "KNOWN", known_operations.KNOWN - {"sort"})

    def step(x):
        return jnp.sort(x) + 1

    found = make(fsdp=2, tensor=2).run(step, args=(X,))
    np.testing.assert_array_equal(found, X + 1)
    (said,) = messages(log)
    assert re.search(r"'step' .* sort \(at \S*test_first_compile.py:\d+\) was not tested", said)


@pytest.mark.slow
def test_the_other_process_has_as_many_devices_as_the_program(log, monkeypatch):
    """Also where XLA's own flag says otherwise, as in one of several processes."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(known_operations, "KNOWN", frozenset())
    make(fsdp=2).run(sine, args=(X,))
    assert len(messages(log)) == 1  # and none that it could not


@pytest.mark.parametrize("axes", [{}, {"fsdp": 1}])
def test_nothing_is_asked_where_a_replica_is_one_device(log, monkeypatch, axes):
    monkeypatch.setattr(known_operations, "KNOWN", frozenset())
    make(**axes).run(lambda x: x + 1, args=(X,))
    assert messages(log) == []


def test_an_operation_that_calls_this_process_is_compiled_here_only(log):
    """Any other process that compiles it ends."""
    found = []

    def step(x):
        jax.debug.inspect_array_sharding(x, callback=found.append)
        return x * 2

    np.testing.assert_array_equal(make(fsdp=2).run(step, args=(X,)), X * 2)
    assert len(found) == 1
    assert messages(log) == []


@pytest.mark.slow
def test_another_jaxlib_is_a_doubt_of_its_own(log, monkeypatch):
    monkeypatch.setattr(known_operations, "JAXLIBS", ("0.1",))
    strategy = make(fsdp=2)
    for _ in range(2):
        strategy.run(sine, args=(X,))
    assert len(messages(log)) == 1
    assert "operations were tested with 0.1" in messages(log)[0]


def sine(x):
    return jnp.sin(x)


@pytest.fixture
def asked(monkeypatch):
    """The requests to other processes, which all answer that the program was compiled."""
    requests = []

    def answer(request, program, *args, **options):
        requests.append(request)
        return {}, b""

    monkeypatch.setattr(compiler_process, "_ask", answer)
    return requests


def test_on_another_jaxlib_programs_of_the_same_operations_are_compiled_once(asked, monkeypatch):
    """Every program would be compiled twice otherwise, until a new tpudist knows the jaxlib."""
    monkeypatch.setattr(known_operations, "JAXLIBS", ("0.1",))
    strategy = make(fsdp=2)
    strategy.run(sine, args=(X,))
    assert len(asked) == 1
    strategy.run(sine, args=(X[:2],))  # another program
    strategy.run(lambda x: jnp.sin(jnp.sin(x)), args=(X,))
    assert len(asked) == 1
    strategy.run(lambda x: jnp.sin(jnp.cos(x)), args=(X,))
    assert len(asked) == 2
    make(fsdp=4).run(sine, args=(X,))  # other axes
    assert len(asked) == 3


def test_an_unknown_operation_is_compiled_in_another_process_once(asked, monkeypatch):
    monkeypatch.setattr(known_operations, "KNOWN", known_operations.KNOWN - {"sin"})
    for function in (sine, lambda x: jnp.sin(x) * 2):
        make(fsdp=2).run(function, args=(X,))
    assert len(asked) == 1


def test_the_other_process_does_not_optimize_machine_code(asked, monkeypatch):
    """The optimization would take most of the compile time."""
    monkeypatch.setattr(known_operations, "JAXLIBS", ("0.1",))
    make(fsdp=2).run(sine, args=(X,))
    assert dict(asked[0]["options"])["xla_backend_optimization_level"] == 0


def test_what_ends_the_process_is_an_error_with_its_line(monkeypatch):
    """The lookup is as XLA ends the process over it, here and there."""
    monkeypatch.setattr(lookup_layouts, "lay_out_lookups", lambda closed, stacked: closed)
    monkeypatch.setattr(
        known_operations, "KNOWN", known_operations.KNOWN - {"gather", "scatter-add"}
    )
    strategy = make(fsdp=2, tensor=2)

    def look_up(table, tokens):
        return nnx.grad(lambda table: jnp.square(table(tokens)).sum())(table)

    table = strategy.create(lambda: nnx.Embed(64, 32, rngs=nnx.Rngs(0)))
    tokens = next(iter(strategy.experimental_distribute_dataset([np.zeros((16, 16), np.int32)])))
    with pytest.raises(CompilerDied) as e:
        strategy.run(look_up, args=(table, tokens))
    said = str(e.value)
    assert "XLA ends the process that compiles 'look_up'" in said
    assert re.search(r"\n- gather \(at \S*test_first_compile.py:\d+\) was not tested\n", said)
    assert "Check failed: partition_group_list" in said
    assert "(fsdp=2, tensor=2)" in said


def test_lowering_compiles_nothing(log, monkeypatch):
    monkeypatch.setattr(known_operations, "KNOWN", frozenset())
    make(fsdp=2).lower(sine, args=(X,))
    assert messages(log) == []


def test_a_failure_that_ends_nothing_is_said_and_left_to_the_process_itself(log, monkeypatch):
    monkeypatch.setattr(known_operations, "KNOWN", frozenset())
    refused = {"error": "JaxRuntimeError", "message": "no such thing"}, b""
    monkeypatch.setattr(compiler_process, "_ask", lambda *args, **options: refused)
    np.testing.assert_allclose(make(fsdp=2).run(sine, args=(X,)), np.sin(X), rtol=1e-6)
    assert "it could not be compiled in another process: no such thing" in messages(log)
    assert not first_compile._compiled  # its operations stay unknown


def test_operations_outside_of_replicas_cause_no_doubts(monkeypatch):
    monkeypatch.setattr(known_operations, "KNOWN", frozenset())
    doubts = first_compile.find_doubts(jax.make_jaxpr(jnp.sin)(X), make(fsdp=2).replica_mesh)
    assert doubts == []  # outside of the replicas' mesh nothing is split
