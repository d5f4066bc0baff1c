"""Functions that know nothing of padding, on padded rows, against the same rows alone.

Padding is NaN, or a number that no index survives: nothing may depend on it. A function is exact
for a number of rows, or refused for it; it is never wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replica_functions
from row_steps import ENDS, STEPS
from tpudist.xla.rows.errors import RowsError
from tpudist.xla.rows.row_program import RowProgram
from tpudist.xla.rows.row_sizes import size_at

FULL = 6
RNG = np.random.default_rng(0)


def resize(x, rows):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), x)


def spoil(x, real):
    """The rows from `real` on are such that using them shows."""
    array = np.array(x)
    if array.dtype.kind == "f":
        array[real:] = np.nan
    elif array.dtype.kind in "iu" and array.dtype.itemsize > 1:
        array[real:] = 10**6
    else:
        array[real:] = True
    return jnp.asarray(array)


class Padded:
    """A function of arguments, some of which have rows: `groups` has the batch of each, or None."""

    def __init__(self, function, args, groups):
        self.function, self.args, self.groups = function, args, groups
        self.batches = sorted({g for g in groups if g is not None})
        full = []
        for g in self.batches:
            sizes = [
                a.shape[0]
                for x, own in zip(args, groups, strict=True)
                if own == g
                for a in jax.tree.leaves(x)
            ]
            full.append(sizes[0])
        self.program = RowProgram(self.trace, tuple(full))
        self.run = jax.jit(lambda counts, *flat: self.program.evaluate(counts, flat))

    def trace(self, point):
        resized = [
            jax.tree.map(jnp.asarray, x) if g is None else resize(x, point[self.batches.index(g)])
            for x, g in zip(self.args, self.groups, strict=True)
        ]
        return jax.make_jaxpr(self.function)(*resized)

    def each(self, counts, change):
        return [
            x if g is None else jax.tree.map(lambda a, g=g: change(a, counts[g]), x)
            for x, g in zip(self.args, self.groups, strict=True)
        ]

    def outcome(self, *counts, tolerance=2e-5):
        """ "exact", "refused" or "no reference"; raises if a number is wrong."""
        at = dict(zip(self.batches, counts, strict=True))
        flat = jax.tree.leaves(self.each(at, spoil))
        found = self.run([jnp.int32(n) for n in counts], *flat)
        try:
            self.program.check([counts])
        except RowsError:
            return "refused"
        try:
            expected = jax.tree.leaves(self.function(*self.each(at, lambda a, n: a[:n])))
        except Exception:
            return "no reference"
        for value, wanted, dims in zip(found, expected, self.program.out_dims, strict=True):
            part = np.asarray(value)[tuple(slice(0, size_at(d, counts)) for d in dims)]
            np.testing.assert_allclose(part, np.asarray(wanted), tolerance, tolerance)
        return "exact"


def case_named(name):
    (case,) = [c for c in replica_functions.CASES if c.name == name]
    args = case.make_args(FULL, 0)
    return Padded(case.fn, args, [0 if i in case.batched else None for i in range(len(args))])


# What is refused as a whole, each for a reason that the message says.
REFUSED = {"ranking", "ridge_and_whitening"}
QUICK = {"npairs", "confusion", "einsums"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(c.name, marks=() if c.name in QUICK else pytest.mark.slow)
        for c in replica_functions.CASES
    ],
)
def test_a_function_of_somebody_elses_is_exact_or_refused(name):
    if name in REFUSED:
        with pytest.raises(RowsError):
            case_named(name).outcome(FULL)
        return
    padded = case_named(name)
    outcomes = [padded.outcome(n) for n in range(FULL, -1, -1)]
    least = 3 if name in ("optax_ntxent",) else 2
    assert outcomes[: FULL - least + 1] == ["exact"] * (FULL - least + 1), outcomes


X = jnp.asarray(RNG.normal(size=(FULL, 3)), jnp.float32)


def follow(function, *args, groups=None):
    return Padded(function, args or (X,), groups or [0] * len(args or (X,)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[::2],
        lambda x: jax.lax.associative_scan(jnp.add, x),
        lambda x: x.at[1:].set(0.0),
        lambda x: jnp.linalg.svd(x, compute_uv=False),
        lambda x: jnp.sum(x) * (1 + x.shape[0] % 2),
        lambda x: x.sum() + x[:, 0] @ (np.ones(x.shape[0], np.float32) / x.shape[0]),
        lambda x: jax.pure_callback(
            lambda v: np.float32(v.sum()), jax.ShapeDtypeStruct((), jnp.float32), x
        ),
        lambda x: jax.lax.top_k(x[:, 0], min(x.shape[0], 4))[0],
    ],
)
def test_what_cannot_be_followed_is_refused(function):
    with pytest.raises(RowsError):
        follow(function).outcome(FULL)


def power_of_few(x, power):
    return (x[0] ** power).sum() + x.sum()


def column_of_few(x, column):
    return x[:, column].sum() + x[0].sum()


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (lambda x: jnp.sum(x) if x.shape[0] > 4 else jnp.sum(x) / 2, {0, 1, 2, 3, 4}),
        (lambda x: jnp.sum(x * 2 if x.shape[0] == 1 else x * 3 + 1), {1}),
        (lambda x: jnp.sum(x if x.shape[0] else x + 1), set()),
        (lambda x: jnp.sum(x) / max(x.shape[0], 1), {0}),
        (lambda x: power_of_few(x, 2 if x.shape[0] == 1 else 3), {1}),
        (lambda x: column_of_few(x, 0 if x.shape[0] == 1 else 1), {1}),
        (lambda x: x[2], {0, 1, 2}),
        (lambda x: x[-1], {0}),
        (lambda x: x[:, 0] * jnp.linspace(0, 1, x.shape[0]), {1}),
        (lambda x: jnp.sum(x) * (3 if x.shape[0] == 5 else 2), {5}),
        (lambda x: x.reshape(2, -1, 3).sum(0), {1, 3, 5}),
    ],
)
def test_a_branch_on_the_number_of_rows_is_refused_where_it_is_taken(function, refused):
    try:
        padded = follow(function)
        outcomes = {n: padded.outcome(n) for n in range(FULL + 1)}
    except RowsError:
        assert refused  # the branch was met among the first traces
        return
    assert refused <= {n for n, found in outcomes.items() if found != "exact"}, outcomes


@pytest.mark.parametrize(
    "number",
    [
        lambda n: 1 - 1 / n,
        lambda n: (n + 1) / (2 * n),
        lambda n: 2 / (n * (n - 1)),
        lambda n: np.sqrt(n),
        lambda n: np.log(n),
        lambda n: n / 7 + 0.5,
    ],
)
def test_a_number_computed_of_the_number_of_rows_is_exact(number):
    padded = follow(lambda x: x.sum() * number(x.shape[0]) + x)
    assert [padded.outcome(n) for n in range(FULL, 1, -1)] == ["exact"] * (FULL - 1)


def test_a_number_of_each_of_two_batches_is_exact():
    padded = follow(
        lambda a, b: a.sum() * (1 - 1 / a.shape[0]) + b.sum() * (b.shape[0] - 3) / b.shape[0],
        X,
        X + 1,
        groups=[0, 1],
    )
    assert {padded.outcome(*at) for at in [(6, 6), (6, 2), (3, 5), (2, 3)]} == {"exact"}


def test_two_batches_of_one_shape_are_told_apart():
    padded = follow(
        lambda a, b: (a.sum(), b.mean(0), a @ b.T, jnp.concatenate([a, b]), (a @ b.T).mean()),
        X,
        X + 1,
        groups=[0, 1],
    )
    for counts in [(6, 6), (6, 2), (3, 5), (1, 4), (0, 3)]:
        assert padded.outcome(*counts) in ("exact", "refused")
    assert padded.outcome(3, 5) == "exact"


def test_a_users_code_may_lie_in_a_folder_of_any_name(tmp_path):
    """A branch in `jax/train.py` is the user's, and not one of JAX's own."""
    folder = tmp_path / "jax" / "tpudist"
    folder.mkdir(parents=True)
    file = folder / "theirs.py"
    file.write_text(
        "import jax.numpy as jnp\n"
        "def step(x):\n"
        "    y = x[0] + x.sum()\n"
        "    if x.shape[0] == 1:\n"
        "        y = y * 7\n"
        "    return y\n"
    )
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    padded = follow(scope["step"])
    assert [padded.outcome(n) for n in (FULL, 2, 1)] == ["exact", "exact", "refused"]


def check_random_function(names, end, real):
    def function(x):
        for name in names:
            x = STEPS[name](x)
        return ENDS[end](x)

    try:
        padded = follow(function)
    except RowsError:
        return
    try:
        padded.outcome(real, tolerance=2e-3)
    except RowsError:
        return


random_functions = given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    end=st.sampled_from(sorted(ENDS)),
    real=st.integers(0, FULL),
)
_quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@random_functions
@settings(max_examples=20, **_quiet)
def test_random_functions_are_exact_or_refused(names, end, real):
    check_random_function(names, end, real)


@pytest.mark.slow
@random_functions
@settings(max_examples=300, **_quiet)
def test_many_random_functions_are_exact_or_refused(names, end, real):
    check_random_function(names, end, real)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_each_step_of_them_is_exact_for_two_rows_and_more(name):
    padded = follow(STEPS[name])
    assert [padded.outcome(n) for n in (FULL, 4, 2)] == ["exact"] * 3
    for n in (1, 0):
        padded.outcome(n)
