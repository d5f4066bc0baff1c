"""Operations give what TensorFlow's give: compared where TensorFlow is, with `-m parity`."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.port.array_operations import OPERATIONS

A = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -0.75]], np.float32)
B = np.array([[1.5, 2.0, -2.0], [0.5, 0.25, 1.0]], np.float32)
IS = np.array([[True, False, True], [False, False, True]])
POSITIVE = np.abs(A) + 0.5
INTEGERS = np.array([[5, -3, 2], [7, 0, 1]], np.int32)

# What operations are given by their last name; A for those that are not listed.
ARGUMENTS = {
    "log": [(POSITIVE,)],
    "sqrt": [(POSITIVE,)],
    "rsqrt": [(POSITIVE,)],
    "matmul": [(A, B.T), (INTEGERS, INTEGERS.T)],
    "pow": [(POSITIVE, B)],
    "cast": [(A, "int32"), (INTEGERS, "float32"), (IS, "float32"), (A, "bool")],
    "zeros": [((2, 3),), ([4], "int32")],
    "ones": [((2, 3),), ([4], "int32")],
    "constant": [([1.0, 2.0],), ([1, 2],), (3,), (True,)],
    "convert_to_tensor": [(A,), ([1, 2],)],
    "transpose": [(A,), (A[None], [2, 0, 1])],
    "reshape": [(A, [3, 2]), (A, (-1,))],
    "concat": [([A, B], 0), ([A, B], -1)],
    "stack": [([A, B],), ([A, B], 1)],
    "expand_dims": [(A, 0), (A, -1)],
    "squeeze": [(A[None],), (A[None, :, None], (0,))],
    "where": [(IS, A, B), (IS, A, np.float32(0))],
    "argmax": [(A, 0), (A, -1)],
    "argmin": [(A, 0), (A, -1)],
    "clip_by_value": [(A, -1.0, 1.0)],
    "one_hot": [(INTEGERS, 4)],
    "softmax": [(A,), (A, 0)],
    "log_softmax": [(A,), (A, 0)],
    "logical_not": [(IS,)],
}
for _name in ("logical_and", "logical_or"):
    ARGUMENTS[_name] = [(IS, IS[::-1])]
for _name in "maximum minimum add subtract multiply equal not_equal greater less".split():
    ARGUMENTS[_name] = [(A, B), (INTEGERS, INTEGERS[::-1]), (A, B[0])]
for _name in ("greater_equal", "less_equal", "divide"):
    ARGUMENTS[_name] = [(A, B)]
for _name in ("sum", "max", "min", "prod"):
    ARGUMENTS[f"reduce_{_name}"] = [(A,), (INTEGERS, 1), (A, (0, 1)), (INTEGERS, -1)]
for _name in ("any", "all"):
    ARGUMENTS[f"reduce_{_name}"] = [(IS,), (IS, 1), (IS, (0, 1))]
ARGUMENTS["abs"] = ARGUMENTS["sign"] = ARGUMENTS["square"] = [(A,), (INTEGERS,)]


def find(name: str):
    """What a dotted name of an imported module stands for."""
    first, *rest = name.replace("jnp.", "jax.numpy.").split(".")
    owner = importlib.import_module(first)
    for part in rest:
        owner = getattr(owner, part)
    return owner


def same(found, wanted) -> None:
    """The same numbers, of the same kind: 64 bits may have become 32."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype.kind == wanted.dtype.kind
    assert found.shape == wanted.shape
    # Operations of float32 by two libraries, which may add and approximate otherwise.
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_gives_what_tensorflow_gives(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("tensorflow")
    operation = OPERATIONS[name]
    for args in ARGUMENTS.get(name.rpartition(".")[2], [(A,)]):
        wanted = find(name)(*args)
        on_jax = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
        same(find(operation.jax)(*on_jax), wanted)
        same(find(f"keras.ops.{operation.keras}")(*on_jax), wanted)


def test_every_operation_that_is_compared_is_in_the_table():
    names = {name.rpartition(".")[2] for name in OPERATIONS}
    assert set(ARGUMENTS) <= names
