"""Lookups are laid out so that the partitioner lives, and no more than that."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tpudist.lowering import compile
from tpudist.lowering.workarounds import lookup_layouts
from tpudist.xla.hlo import collective_ops
from tpudist.xla.mesh import make_mesh

VOCABULARY, EMBED, ROWS, LENGTH = 64, 32, 8, 16


def look_up(table, tokens):
    return jax.grad(lambda table: jnp.square(table[tokens]).sum())(table)


def losses(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens)


def lower(function, table_shape, spec, *, stacked_table=False, **axes):
    """A function of a table and of each replica's tokens, on 8 devices."""
    mesh = make_mesh(jax.devices(), axes)
    count = mesh.num_replicas
    rows = NamedSharding(mesh.mesh, P("replica", mesh.batch_axes))
    leading = (count,) if stacked_table else ()
    where = NamedSharding(mesh.mesh, P(*("replica",) * stacked_table, *spec))
    table = jax.ShapeDtypeStruct((*leading, *table_shape), jnp.float32, sharding=where)
    tokens = jax.ShapeDtypeStruct((count, ROWS, LENGTH), jnp.int32, sharding=rows)
    stacked = (stacked_table, True)
    program = compile.trace(lambda *args: [function(*args)], mesh, [table, tokens], stacked)
    return jax.jit(compile.spread(program, mesh, [True])).lower(table, tokens)


def constraints(lowered) -> list[str]:
    """The layouts of which JAX says nothing itself: with axes that split nothing."""
    return re.findall(r"sharding_constraint .*?(\[.*?\], replicated=\{.*?\})>", lowered.as_text())


def test_a_table_is_whole_along_the_axes_of_the_batch_and_what_else_is_left_to_xla():
    lowered = lower(look_up, (VOCABULARY, EMBED), ("fsdp", "tensor"), fsdp=2, tensor=2)
    whole = '[{}, {?}], replicated={"fsdp"}'
    tokens = '[{"fsdp"}, {?}, {?}], replicated={"tensor"}'
    assert constraints(lowered) == [tokens, whole, tokens, whole, whole]


def test_the_features_of_a_table_stay_split():
    lowered = lower(look_up, (VOCABULARY, EMBED), (None, "tensor"), fsdp=2, tensor=2)
    text = lowered.compile().as_text()
    assert f"f32[{VOCABULARY},{EMBED // 2}]" in text
    assert f"f32[{VOCABULARY},{EMBED}]" not in text


def test_logits_are_not_gathered_for_the_loss():
    """They are the largest array of a step."""
    shape = (ROWS, LENGTH, VOCABULARY)
    spec = ("fsdp", None, "tensor")
    lowered = lower(losses, shape, spec, stacked_table=True, fsdp=2, tensor=2)
    sent = collective_ops.collectives(lowered.compile().as_text())
    # Maxima, sums and the chosen logits: at most two numbers at once for each of a device's tokens.
    assert max(x.num_bytes for x in sent) <= 2 * 4 * (ROWS // 2) * LENGTH


def test_rows_that_are_looked_up_in_by_positions_stay_split():
    def every_other(x, tokens):
        return x[:, jnp.arange(0, EMBED, 2)] + tokens.sum()

    shape = (ROWS, EMBED)
    lowered = lower(every_other, shape, ("fsdp",), stacked_table=True, fsdp=2, tensor=2)
    sent = collective_ops.collectives(lowered.compile().as_text())
    assert all(x.kind == "all-reduce" and x.num_bytes <= 8 for x in sent)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_nothing_is_done_where_the_bug_is_not(axes):
    """One axis, or one replica; what a step compiles to is then the same as ever."""
    lowered = lower(look_up, (VOCABULARY, EMBED), (), **axes)
    assert constraints(lowered) == []


def test_nothing_is_done_for_the_older_partitioner(monkeypatch):
    closed = jax.make_jaxpr(look_up)(jnp.ones((4, 2)), jnp.zeros((2, 2), jnp.int32))
    monkeypatch.setattr(lookup_layouts, "_needs_layout", lambda eqn: True)
    with jax.default_device(jax.devices()[0]):
        before = jax.config.jax_use_shardy_partitioner
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            assert lookup_layouts.lay_out_lookups(closed, (False, True)) is closed
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)


def test_a_lookup_is_still_said_to_be_of_the_users_line():
    text = lower(look_up, (VOCABULARY, EMBED), (), fsdp=2, tensor=2).as_text(debug_info=True)
    line = look_up.__code__.co_firstlineno + 1
    assert f'test_lookup_layouts.py":{line}' in text
    assert "lookup_layouts.py" not in text.replace("test_lookup_layouts.py", "")


def test_axes_that_a_program_makes_manual_are_not_xlas_any_more():
    """A lookup in a shard_map of one's own over all axes is left alone."""

    def by_hand(table, tokens):
        return jax.shard_map(
            look_up,
            in_specs=(P(), P(("fsdp",))),
            out_specs=P(),
            axis_names={"fsdp", "tensor"},
            check_vma=False,
        )(table, tokens)

    lowered = lower(by_hand, (VOCABULARY, EMBED), (), fsdp=2, tensor=2)
    assert constraints(lowered) == []
