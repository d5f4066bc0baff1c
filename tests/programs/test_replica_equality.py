"""The proof that values are equal on every replica, checked against JAX's own batching.

Under `jax.vmap` with the replica axis' name, a value that stays unbatched is equal on every replica
by construction, and `custom_vmap` reports these values (DESIGN D2).
"""

import builtins
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.extend import core

from tpudist.lowering import compile
from tpudist.programs import references, replica_equality, user_lines
from tpudist.xla import mesh

N = 8


@functools.cache
def replicas():
    return mesh.make_mesh(jax.devices())


def traced(function, stacked, value=None):
    """Returns the jaxpr of `function` of scalars (or `value`s); some differ between replicas."""
    value = jnp.zeros(()) if value is None else value
    inputs = [
        jax.ShapeDtypeStruct((N, *value.shape) if s else value.shape, value.dtype) for s in stacked
    ]
    return compile.trace(function, replicas(), inputs, stacked).closed


def prove(function, *stacked, value=None):
    causes = ["argument" if s else None for s in stacked]
    return replica_equality.prove(traced(function, stacked, value), causes)


def batched_outputs(closed, stacked):
    """Returns which outputs `vmap` batches: the reference for the proof."""
    told = [False] * len(closed.jaxpr.outvars)

    def spy(i):
        @custom_vmap
        def identity(x):
            return x

        @identity.def_vmap
        def rule(axis_size, in_batched, x):
            told[i] = in_batched[0]
            return x, in_batched[0]

        return identity

    def observed(*values):
        outputs = core.jaxpr_as_fun(closed)(*values)
        return [spy(i)(x) for i, x in enumerate(outputs)]

    inputs = [
        jax.ShapeDtypeStruct((N, *v.aval.shape) if s else v.aval.shape, v.aval.dtype)
        for v, s in zip(closed.jaxpr.invars, stacked, strict=True)
    ]
    axes = [0 if s else None for s in stacked]
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        jax.eval_shape(
            jax.vmap(observed, in_axes=axes, out_axes=0, axis_name="replica", axis_size=N), *inputs
        )
    return tuple(told)


# Random programs: each instruction appends a scalar to the earlier ones. The proof knows more about
# `ppermute` than `vmap`: `vmap` keeps equal values equal, but a replica without a sender gets zero.

ARITHMETIC = {
    "add": lambda x, y: x + y,
    "select": lambda x, y: jnp.where(x > 0, y, 1.0),
    "sine": lambda x, y: jnp.sin(x),
    "zeros": lambda x, y: jnp.zeros_like(x),
    "psum": lambda x, y: jax.lax.psum(x, "replica"),
    "psum of one": lambda x, y: jax.lax.psum(1.0, "replica"),
    "all_gather": lambda x, y: jax.lax.all_gather(x, "replica").sum(),
    "replica id": lambda x, y: jax.lax.axis_index("replica").astype(jnp.float32),
}
BODIES = ("cond", "while", "scan", "jit", "remat", "grad", "custom")


def execute(program, values):
    """Runs a program on scalars, and returns all scalars."""
    values = list(values)
    for name, i, j, body in program:
        x, y = values[i % len(values)], values[j % len(values)]
        values.append(STEPS[name](x, y, body) if name in STEPS else ARITHMETIC[name](x, y))
    return values


def last(body):
    return lambda *values: execute(body, values)[-1]


def _while(x, y, body):
    def advance(carry):
        steps, a, b = carry
        return steps + 1, b, last(body)(a, b)

    return jax.lax.while_loop(lambda carry: carry[0] < y, advance, (jnp.float32(0), x, x * 2))[2]


def _scan(x, y, body):
    # A value that differs moves through the carry by one position in each turn.
    def turn(carry, z):
        a, b, c = carry
        return (b, c, last(body)(a, z)), a

    carry, out = jax.lax.scan(turn, (jnp.float32(1), jnp.float32(2), x), jnp.stack([y, y]))
    return carry[0] + out[0]


def _custom(x, y, body):
    @jax.custom_jvp
    def function(x, y):
        return last(body)(x, y)

    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] + tangents[1]))
    return function(x, y)


STEPS = {
    "cond": lambda x, y, body: jax.lax.cond(x > 0, last(body), lambda x, y: y, x, y),
    "while": _while,
    "scan": _scan,
    "jit": lambda x, y, body: jax.jit(last(body))(x, y),
    "remat": lambda x, y, body: jax.checkpoint(last(body))(x, y),
    "grad": lambda x, y, body: jax.grad(last(_without_loops(body)))(x, y),
    "custom": _custom,
}


def _without_loops(body):
    """`while` has no gradient."""
    return [
        ("jit" if name == "while" else name, i, j, _without_loops(inner))
        for name, i, j, inner in body
    ]


index = st.integers(0, 3)
plain = st.tuples(st.sampled_from(sorted(ARITHMETIC)), index, index, st.just([]))
programs = st.recursive(
    st.lists(plain, min_size=1, max_size=3),
    lambda inner: st.lists(
        plain | st.tuples(st.sampled_from(BODIES), index, index, inner), min_size=1, max_size=4
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(program=programs, stacked=st.tuples(st.booleans(), st.booleans()))
# The proof must repeat the loop until no more values differ.
@example([("scan", 0, 1, [("add", 0, 1, [])])], (True, False))
@example([("while", 0, 1, [("psum", 0, 0, [])])], (True, False))
def test_values_proven_equal_are_the_values_that_vmap_leaves_unbatched(program, stacked):
    """A value wrongly proven equal would be marked as replicated: silently wrong results."""
    closed = traced(lambda *values: execute(program, values), stacked)
    proof = replica_equality.prove(closed, ["argument" if s else None for s in stacked])
    if proof.hazards:
        return  # vmap would not match the behavior of the replicas
    assert proof.differs == batched_outputs(closed, stacked)


@pytest.mark.slow
@settings(max_examples=300)
@given(program=programs, stacked=st.tuples(st.booleans(), st.booleans()))
def test_proofs_of_many_programs_match_the_batching_of_vmap(program, stacked):
    closed = traced(lambda *values: execute(program, values), stacked)
    proof = replica_equality.prove(closed, ["argument" if s else None for s in stacked])
    if not proof.hazards:
        assert proof.differs == batched_outputs(closed, stacked)


# Single operations.


def test_results_of_equal_values_are_equal():
    proof = prove(lambda x, y: [x + 1, jnp.sin(x) * y, jnp.zeros(3), y], False, True)
    assert proof.differs == (False, True, False, True)
    assert proof.causes == (None, "argument", None, "argument")


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "pmean", "all_gather"])
def test_a_value_reduced_over_all_replicas_is_equal(name):
    assert prove(lambda x: [getattr(jax.lax, name)(x, "replica")], True).causes == (None,)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda x: [jax.lax.axis_index("replica")], "the replica id"),
        (
            lambda x: [jax.lax.ppermute(x, "replica", [(0, 1)])],
            "a ppermute between replicas",
        ),
        (
            lambda x: [jax.lax.psum_scatter(jnp.ones(N), "replica")],
            "a reduce_scatter between replicas",
        ),
        (
            lambda x: [jax.lax.psum(x, "replica", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])],
            "a psum between replicas",
        ),
        (
            lambda x: [io_callback(lambda: np.float32(0), jax.ShapeDtypeStruct((), jnp.float32))],
            "the result of a host callback",
        ),
    ],
    ids=["replica id", "ppermute", "psum_scatter", "psum in groups", "callback"],
)
def test_a_value_that_differs_despite_equal_inputs_has_a_cause(function, cause):
    assert prove(function, False).causes == (cause,)


def test_a_reduction_of_values_that_differ_is_equal():
    def function(x):
        loss = lambda w: jnp.sin(w * x)  # noqa: E731
        gradient = jax.grad(loss)(1.0)
        return [gradient, jax.lax.pmean(gradient, "replica"), jax.lax.psum(x, "replica") * 2]

    assert prove(function, True).differs == (True, False, False)


def test_a_reduction_over_the_axis_of_a_nested_vmap_proves_nothing():
    """Such a reduction does not combine replicas."""
    mapped = lambda v: jax.vmap(lambda y: jax.lax.psum(y, "mine"), axis_name="mine")(v)  # noqa: E731
    assert prove(lambda x: [mapped(jnp.stack([x, x]))], True).differs == (True,)


def test_a_host_callback_is_never_proven_equal():
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def function(x):
        return [
            jax.pure_callback(lambda v: v, shape, x),
            io_callback(lambda v: v, shape, x),
            jax.jit(lambda: io_callback(int, shape))(),
        ]

    assert prove(function, False).differs == (True, True, True)


def test_a_user_function_named_like_an_all_reduce_is_not_one():
    """The name that marks an all-reduce is not a valid identifier."""
    assert not replica_equality.EQUALIZING_FUNCTION.isidentifier()

    @jax.jit
    def tpudist_all_reduce(x):
        return x * 2

    assert prove(lambda x: [tpudist_all_reduce(x)], True).differs == (True,)


def put(ref, value):
    ref[...] = jnp.asarray(value, jnp.float32)


REFERENCES = {
    "the last write counts": (
        lambda ref, x: (put(ref, x), put(ref, 1.0)),
        False,
    ),
    "a value that differs stays different": (lambda ref, x: put(ref, x), True),
    "a sum has both values": (lambda ref, x: jax.ref.addupdate(ref, ..., x), True),
    "a branch may write": (
        lambda ref, x: jax.lax.cond(ref[...] > 0, lambda: put(ref, x), lambda: None),
        True,
    ),
    "a branch may write the same": (
        lambda ref, x: jax.lax.cond(ref[...] > 0, lambda: put(ref, 2.0), lambda: None),
        False,
    ),
    "not all replicas take the branch": (
        lambda ref, x: jax.lax.cond(x > 0, lambda: put(ref, 2.0), lambda: None),
        True,
    ),
    "a branch that writes nothing": (
        lambda ref, x: jax.lax.cond(x > 0, lambda: ref[...], lambda: 0.0),
        False,
    ),
    "the second turn of a loop": (
        lambda ref, x: jax.lax.scan(
            lambda c, _: ((put(ref, c), x)[1], None), jnp.float32(0), length=2
        ),
        True,
    ),
    "a turn reduces": (
        lambda ref, x: jax.lax.scan(
            lambda c, _: (put(ref, jax.lax.psum(x, "replica")), (c, None))[1], 0.0, length=2
        ),
        False,
    ),
    "a loop of another length on each": (
        lambda ref, x: jax.lax.while_loop(
            lambda c: c < x, lambda c: (put(ref, ref[...] + 1), c + 1)[1], 0.0
        ),
        True,
    ),
    "a loop of one length": (
        lambda ref, x: jax.lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (put(ref, ref[...] + 1), (c[0] + 1, c[1] + x))[1],
            (0, 0.0),
        ),
        False,
    ),
    "a jit": (lambda ref, x: jax.jit(lambda: put(ref, x))(), True),
    "a gradient": (
        lambda ref, x: jax.grad(lambda w: (put(ref, jax.lax.stop_gradient(w)), w)[1])(x),
        True,
    ),
    "inside of a loop in a branch": (
        lambda ref, x: jax.lax.cond(
            x > 0,
            lambda: jax.lax.scan(lambda c, _: (put(ref, c), (c, None))[1], 0.0, length=2)[0],
            lambda: 0.0,
        ),
        True,
    ),
    "another reference, made in the loop": (
        lambda ref, x: jax.lax.scan(
            lambda c, _: (jax.new_ref(x)[...] * 0, (c, None))[1], 0.0, length=2
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_followed(name):
    change, differs = REFERENCES[name]

    def function(x):
        ref = jax.new_ref(jnp.ones(()))
        change(ref, x)
        return [ref[...], jax.freeze(ref)]

    assert prove(function, True).differs == (differs, differs)
    assert prove(function, False).differs == (False, False)


def test_writing_a_part_of_a_reference_keeps_the_rest():
    def function(x):
        ref = jax.new_ref(x)
        ref[0] = 1.0
        ref[jnp.array([0, 0])] = jnp.ones(2)
        return [ref[...]]

    assert prove(function, True, value=jnp.zeros(2)).differs == (True,)


def test_a_reference_with_an_unknown_use_is_not_followed(monkeypatch):
    """Values written to the reference may differ, so values read from it may too."""
    monkeypatch.setattr(references, "access_of", lambda eqn: None)

    def function(x):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] = x
        return [ref[...], x]

    assert prove(function, False).causes == (references.NOT_FOLLOWED, None)


def test_lost_references_are_reported_with_their_place():
    def function(x):
        refs = [jax.new_ref(x), jax.new_ref(x)]
        jax.grad(jax.checkpoint(lambda w: (put(refs[1], jax.lax.stop_gradient(w)), w)[1]))(x)
        jax.lax.while_loop(
            lambda c: refs[0][...] < c, lambda c: (put(refs[0], c), c)[1], jnp.float32(1)
        )
        return [x]

    found = {(x.number, x.place) for x in prove(function, False).lost_references}
    assert {number for number, _ in found} == {0, 1}
    assert (0, "the condition of a while loop whose body assigns it") in found


def test_a_custom_rule_for_gradients_is_followed():
    @jax.custom_vjp
    def function(x):
        return jax.lax.psum(x, "replica")

    function.defvjp(lambda x: (function(x), None), lambda _, g: (jax.lax.psum(g, "replica"),))
    proof = prove(lambda x: [function(x), jax.grad(function)(x), function(x) + x], True)
    assert proof.differs == (False, False, True)


# Replicas that could wait for each other forever.


def conditional(x):
    return [jax.lax.cond(x > 0, lambda: jax.lax.psum(1.0 * x, "replica"), lambda: x * 0)]


def loop_by_condition(x):
    return [
        jax.lax.while_loop(
            lambda carry: carry < x, lambda carry: carry + jax.lax.pmax(carry, "replica"), 1.0
        )
    ]


def loop_with_a_reduced_condition(x):
    def unfinished(carry):
        return jax.lax.pmax(carry, "replica") < 10

    return [jax.lax.while_loop(unfinished, lambda carry: carry + jnp.abs(x) + 1, 1.0)]


def loop_whose_carry_differs(x):
    return [
        jax.lax.while_loop(
            lambda carry: carry < 10, lambda carry: carry + x + jax.lax.psum(1, "replica"), 1.0
        ),
        jax.lax.while_loop(
            lambda carry: carry < 10,
            lambda carry: carry + x + jax.lax.psum(carry, "replica") * 0,
            1.0,
        ),
    ]


def nested(x):
    return [jax.jit(lambda y: jax.lax.scan(lambda c, _: (conditional(y)[0], c), y, length=2)[0])(x)]


def rematerialized(x):
    return [jax.checkpoint(lambda y: conditional(y)[0])(x)]


def switch(x):
    branches = [lambda: x, lambda: x * 2, lambda: jax.lax.ppermute(x, "replica", [(0, 1)])]
    return [jax.lax.switch(x.astype(jnp.int32), branches)]


@pytest.mark.parametrize(
    ("function", "collective"),
    [
        (conditional, "psum"),
        (loop_by_condition, "pmax"),
        (loop_whose_carry_differs, "psum"),
        (nested, "psum"),
        (rematerialized, "psum"),
        (switch, "ppermute"),
    ],
)
def test_a_collective_that_only_some_replicas_may_reach_is_a_hazard(function, collective):
    proof = prove(function, True)
    assert {h.collective for h in proof.hazards} == {collective}
    assert {h.cause for h in proof.hazards} == {"argument"}
    assert all("test_replica_equality.py:" in h.where for h in proof.hazards)
    assert prove(function, False).hazards == ()


def test_a_user_line_is_found_in_a_folder_named_like_the_library(tmp_path):
    """`git clone` creates such a folder. Library files are recognized by location, not by name."""
    file = tmp_path / "tpudist" / "scripts" / "own.py"
    defined = {}
    text = "import jax\ndef own(x):\n    return jax.numpy.sin(x)\n"
    exec(builtins.compile(text, str(file), "exec"), defined)
    (eqn,) = jax.make_jaxpr(defined["own"])(1.0).eqns
    assert user_lines.line_of(eqn) == f"{file}:3"


def test_a_collective_under_an_equal_condition_is_not_a_hazard():
    def function(x):
        total = jax.lax.psum(x, "replica")
        return [
            jax.lax.cond(total > 0, lambda: jax.lax.psum(x, "replica"), lambda: x * 0),
            *loop_with_a_reduced_condition(x),
        ]

    proof = prove(function, True)
    assert proof.hazards == ()
    assert proof.differs == (True, True)


def test_a_condition_without_a_collective_is_not_a_hazard():
    proof = prove(lambda x: [jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)], True)
    assert (proof.hazards, proof.differs) == ((), (True,))


def test_a_collective_in_a_scan_is_not_a_hazard():
    """The length of the scan is the same on every replica."""

    def function(x):
        return [jax.lax.scan(lambda c, _: (jax.lax.psum(c, "replica"), None), x, length=3)[0]]

    proof = prove(function, True)
    assert proof.hazards == ()
