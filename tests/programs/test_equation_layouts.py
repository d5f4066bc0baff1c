"""The structure of jaxprs is checked: an unexpected equation is unknown, and may differ."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.extend import core
from jax.interpreters import mlir

import tpudist
from tpudist.planner import model_flops
from tpudist.programs import equation_layouts, jaxprs, replica_equality
from tpudist.programs.jaxpr_structure import Call, Cond, Elementary, Kernel, Scan, Unknown, While

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)


def traced(function, *arguments):
    return jax.make_jaxpr(function)(*(arguments or (VECTOR,)))


def equation(name, function, *arguments):
    """Returns the only equation of a primitive in the program of a function."""
    (found,) = (e for e in jaxprs.walk(traced(function, *arguments)) if e.primitive.name == name)
    return found


def doctored(eqn, **changes):
    """Returns an equation with changed parameters; None removes a parameter."""
    params = {k: v for k, v in {**eqn.params, **changes}.items() if v is not None}
    return eqn.replace(params=params)


def program_of(eqn):
    """Returns the program of one equation."""
    operands = [x for x in eqn.invars if not isinstance(x, core.Literal)]
    like = traced(lambda *xs: [xs[0]] * len(eqn.outvars), *(x.aval for x in operands)).jaxpr
    return core.ClosedJaxpr(
        like.replace(invars=operands, outvars=list(eqn.outvars), eqns=[eqn]), ()
    )


def causes_of(eqn, different=False):
    """Returns the proven causes for the results of one equation, with operands equal or not."""
    program = program_of(eqn)
    cause = "argument" if different else None
    return replica_equality.prove(program, [cause] * len(program.jaxpr.invars)).causes


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(equation_layouts, "_logged", set())


# Equations of the installed JAX.


@jax.custom_jvp
def with_jvp(x):
    return x * 2


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] * 2))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * x,))


@jax.custom_batching.custom_vmap
def with_vmap(x):
    return x + 1


with_vmap.def_vmap(lambda size, batched, x: (x + 1, batched[0]))


def times_and_back(x):
    return jax.custom_derivatives.linear_call(lambda r, y: y * r, lambda r, y: y * r, x, x)


def _double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def kernel(x):
    return pallas.pallas_call(_double, out_shape=x, grid=(3,), interpret=True)(x)


def on_two_devices(x):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("a")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


UNDERSTOOD = {
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x), Scan),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < x[0], lambda c: c + x[1], x),
        While,
    ),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), Cond),
    "jit": (jax.jit(jnp.sin), Call),
    "remat2": (jax.checkpoint(jnp.sin), Call),
    "custom_jvp_call": (with_jvp, Call),
    "custom_vjp_call": (with_vjp, Call),
    "custom_vmap_call": (with_vmap, Call),
    "linear_call": (times_and_back, Call),
    "composite": (jax.lax.composite(lambda x: x + 1, "some.name"), Call),
    "shard_map": (on_two_devices, Call),
    "custom_linear_solve": (
        lambda x: jax.lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: b / 2),
        Elementary,
    ),
    "reduce": (
        lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a * b + 1, (0,)),
        Elementary,
    ),
    "reduce_window": (
        lambda x: jax.lax.reduce_window(x, 0.0, lambda a, b: a * b + 1, (2,), (1,), "VALID"),
        Elementary,
    ),
    "scatter-add": (lambda x: x.at[0].add(1.0), Elementary),
    "scatter-mul": (lambda x: x.at[0].mul(2.0), Elementary),
    "scatter-min": (lambda x: x.at[0].min(2.0), Elementary),
    "scatter-max": (lambda x: x.at[0].max(2.0), Elementary),
    "pallas_call": (kernel, Kernel),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_equations_of_the_installed_jax_are_understood(name, caplog):
    """A new JAX with another layout of an equation fails here first: see CONTRIBUTING.md."""
    function, kind = UNDERSTOOD[name]
    structure = equation_layouts.structure_of(equation(name, function))
    assert isinstance(structure, kind), structure
    assert structure.bodies
    assert causes_of(equation(name, function)) == (None,) * len(equation(name, function).outvars)
    assert set(causes_of(equation(name, function), different=True)) == {"argument"}
    assert not caplog.records


def test_the_parts_of_loops_are_counted():
    def function(x, y):
        def turn(carry, z):
            return (carry[0] + y, carry[1] * z), z

        return jax.lax.scan(turn, (x, x[0]), jnp.zeros((7,)))

    scan = equation_layouts.structure_of(equation("scan", function, VECTOR, VECTOR))
    assert isinstance(scan, Scan)
    assert (scan.num_consts, scan.num_carry, scan.length) == (1, 2, 7)

    def loop(x, y, z):
        return jax.lax.while_loop(lambda c: c[0] < y[0], lambda c: c + z + x, x)

    found = equation_layouts.structure_of(equation("while", loop, VECTOR, VECTOR, VECTOR))
    assert isinstance(found, While)
    assert (found.num_cond_consts, found.num_body_consts) == (1, 2)
    assert equation_layouts.structure_of(equation("sin", jnp.sin)) is None
    assert equation_layouts.structure_of(equation("shard_map", on_two_devices)).copies == 2
    assert equation_layouts.structure_of(equation("pallas_call", kernel)).grid == (3,)


# Equations of other versions of JAX.


def a_scan():
    return equation("scan", UNDERSTOOD["scan"][0])


def counted_otherwise(eqn, by):
    """Returns a scan that counts `by` more operands as constants, in the layout of this JAX."""
    structure = equation_layouts.structure_of(eqn)
    if "num_consts" in eqn.params:
        return doctored(eqn, num_consts=structure.num_consts + by)
    groups = (structure.num_consts + by, structure.num_carry, 1)
    return doctored(eqn, ft_in=Groups(groups))


class Groups:
    """Groups of operands, as JAX has them since 0.11."""

    def __init__(self, sizes):
        self.sizes = sizes

    def unpack(self):
        return [[None] * size for size in self.sizes]


OTHER_BODY = traced(lambda x: x[:2] * 2)
# The equation, and the text that the reason must contain.
DOCTORED = {
    "a scan with one parameter more": lambda: (doctored(a_scan(), shape="new"), "shape"),
    "a scan with one parameter less": lambda: (doctored(a_scan(), unroll=None), "parameters"),
    "a scan whose operands are counted otherwise": lambda: (counted_otherwise(a_scan(), 1), "scan"),
    "a scan whose length is not a number": lambda: (doctored(a_scan(), length="n"), "length='n'"),
    "a scan of another length": lambda: (doctored(a_scan(), length=9), "9 iterations"),
    "a scan whose body is a function": lambda: (
        doctored(a_scan(), jaxpr=lambda x: x, note=OTHER_BODY),
        "scan",
    ),
    "a while whose constants are counted otherwise": lambda: (
        doctored(equation("while", UNDERSTOOD["while"][0]), body_nconsts=0),
        "while",
    ),
    "a cond of other branches": lambda: (
        doctored(equation("cond", UNDERSTOOD["cond"][0]), branches=(OTHER_BODY, OTHER_BODY)),
        "results of another shape",
    ),
    "a jit with one parameter more": lambda: (
        doctored(equation("jit", jax.jit(jnp.sin)), runs_twice=True),
        "runs_twice",
    ),
    "a jit of another program": lambda: (
        doctored(equation("jit", jax.jit(jnp.sin)), jaxpr=OTHER_BODY),
        "results of another shape",
    ),
    "a remat with one parameter more": lambda: (
        doctored(equation("remat2", jax.checkpoint(jnp.sin)), how="new"),
        "how",
    ),
    "a custom derivative under another name": lambda: (
        doctored(equation("custom_vjp_call", with_vjp), call_jaxpr=None, program=OTHER_BODY),
        "program",
    ),
    "a shard_map of one operand more": lambda: (
        doctored(
            equation("shard_map", on_two_devices), jaxpr=traced(jnp.add, VECTOR, VECTOR).jaxpr
        ),
        "operands",
    ),
    "a new primitive with a program": lambda: (
        equation("jit", jax.jit(jnp.sin)).replace(primitive=core.Primitive("loop_of_tomorrow")),
        "'loop_of_tomorrow', which contains a program",
    ),
    "a new primitive with programs in a dict": lambda: (
        equation("sin", jnp.sin).replace(
            primitive=core.Primitive("choice_of_tomorrow"), params={"by": {"x": [OTHER_BODY]}}
        ),
        "'choice_of_tomorrow', which contains a program",
    ),
    "a primitive that hides its program": lambda: (
        equation("sin", jnp.sin).replace(primitive=core.Primitive("call_exported")),
        "'call_exported', which contains a program",
    ),
}


@pytest.mark.parametrize("case", DOCTORED)
def test_an_equation_with_another_layout_is_unknown_and_may_differ(case, caplog):
    """The equation raises no KeyError, is never equal, and is logged only once."""
    eqn, told = DOCTORED[case]()
    with caplog.at_level(logging.WARNING, "tpudist.compile"):
        structure = equation_layouts.structure_of(eqn)
        causes = causes_of(eqn)
        equation_layouts.structure_of(eqn)
    assert isinstance(structure, Unknown)
    assert told in structure.reason
    assert f"does not know from jax {jax.__version__}" in structure.reason
    assert set(causes) == {structure.reason}
    (record,) = caplog.records
    assert "assumes that its result differs between replicas" in record.message


def in_replicas(function):
    """Returns the program of a function inside a `shard_map` over replicas."""
    mesh = jax.make_mesh((8,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    whole = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return traced(whole)


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "all_gather"])
def test_the_result_of_a_reduction_with_a_new_parameter_may_differ(name):
    program = in_replicas(lambda x: getattr(jax.lax, name)(x, "replica"))
    (eqn,) = (e for e in jaxprs.walk(program) if e.primitive.name == name)
    assert causes_of(eqn, different=True) == (None,)
    (cause,) = causes_of(doctored(eqn, over_some_only=True), different=True)
    assert f"'{name}' with the parameters" in cause
    assert "over_some_only" in cause


def test_a_new_collective_is_recognized_by_its_axis_name():
    eqn = equation("sin", jnp.sin).replace(
        primitive=core.Primitive("swap_of_tomorrow"), params={"along_axes": ("a", ("replica",))}
    )
    assert causes_of(eqn) == ("a swap_of_tomorrow between replicas",)


def test_a_collective_in_an_unknown_equation_is_a_hazard_if_replicas_may_disagree():
    program = in_replicas(lambda x: jax.jit(lambda y: jax.lax.psum(y, "replica"))(x))
    (eqn,) = (e for e in jaxprs.walk(program) if e.primitive.name == "jit")
    eqn = eqn.replace(primitive=core.Primitive("branch_of_tomorrow"))
    (hazard,) = replica_equality.prove(program_of(eqn), ["argument"]).hazards
    assert hazard.collective == "psum"


def test_a_hidden_program_is_a_hazard_if_replicas_may_disagree():
    """A hidden program may contain a collective, on which replicas could wait."""
    hidden = equation("sin", jnp.sin).replace(primitive=core.Primitive("call_exported"))
    plain = equation("cos", jnp.cos)
    eqn = equation("cond", UNDERSTOOD["cond"][0])
    eqn = doctored(eqn, branches=(program_of(plain), program_of(hidden)))
    (hazard,) = replica_equality.prove(program_of(eqn), ["argument", "argument"]).hazards
    assert hazard.collective == "call_exported"
    assert replica_equality.prove(program_of(eqn), [None, None]).hazards == ()


def test_constants_that_are_computed_outside_of_a_program_make_it_unknown():
    def function(x):
        inner = jax.make_jaxpr(lambda y: y + x)(x)  # contains a value of the outer trace
        found.append(doctored(equation("jit", jax.jit(jnp.sin)), jaxpr=inner))
        return x

    found = []
    traced(function)
    structure = equation_layouts.structure_of(found[0])
    assert isinstance(structure, Unknown)
    assert "whose constants are computed outside of it" in structure.reason


def test_flops_of_a_solver_match_the_program_that_solves():
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    vector = jax.ShapeDtypeStruct((8,), jnp.float32)

    def function(a, b):
        return jax.lax.custom_linear_solve(
            lambda x: a @ (a @ x), b, lambda _, b: a @ b, transpose_solve=lambda _, b: a.T @ b
        )

    assert model_flops.model_flops(traced(function, matrix, vector), 1) == ({"bf16": 2 * 8 * 8}, ())


def test_flops_of_an_unknown_equation_add_a_note():
    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    eqn = equation("jit", jax.jit(lambda x: x @ x), matrix)
    eqn = eqn.replace(primitive=core.Primitive("loop_of_tomorrow"))
    flops, (note,) = model_flops.model_flops(program_of(eqn), 1)
    assert flops == {"bf16": 2 * 4**3}
    assert "count once the contents of the primitive 'loop_of_tomorrow'" in note


# A primitive of the user, in a program that runs.


@functools.cache
def twice():
    """Returns a primitive that contains a program; outside of traces it only runs on NumPy arrays.

    A primitive whose evaluation can be traced is followed: see `test_library_operations`.
    """
    primitive = core.Primitive("twice")
    primitive.def_impl(lambda x, program: core.jaxpr_as_fun(program)(np.asarray(x))[0])
    primitive.def_abstract_eval(lambda x, program: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(lambda x, program: core.jaxpr_as_fun(program)(x)[0], multiple_results=False),
    )
    return primitive


def doubled(x):
    return twice().bind(x, program=jax.make_jaxpr(lambda x: x * 2)(x))


def test_a_user_primitive_runs_and_its_results_may_differ():
    strategy = tpudist.MirroredStrategy()
    result = strategy.run(lambda x: (doubled(x), x * 2), args=(jnp.arange(3.0),))
    assert isinstance(result[0], tpudist.PerReplica)
    assert not isinstance(result[1], tpudist.PerReplica)
    for part in strategy.experimental_local_results(result[0]):
        np.testing.assert_array_equal(part, [0, 2, 4])


def test_state_assigned_from_a_user_primitive_raises_with_its_name():
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        variable = tpudist.Variable(np.ones(3, np.float32), name="weights")
    with pytest.raises(ValueError, match=r"'weights' would differ.*the primitive 'twice'"):
        strategy.run(lambda: variable.assign(doubled(variable.value())))
    strategy.run(
        lambda: variable.assign(
            tpudist.get_replica_context().all_reduce("mean", doubled(variable.value()))
        )
    )
    np.testing.assert_array_equal(variable.numpy(), [2, 2, 2])
