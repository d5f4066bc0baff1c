"""The identity of a program does not depend on the location of its source."""

import base64
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import SingleDeviceSharding

from tpudist.planner import saved_plan
from tpudist.xla import topology
from tpudist.xla.compiler import program_text

_KERNEL = """
    def {name}(x, out):
        out[...] = x[...] * {factor}
"""


def lowered(folder, factor=2.0, above="", name="kernel"):
    """Returns a program with a Pallas kernel from a source in `folder`, below the lines `above`."""
    folder.mkdir(exist_ok=True)
    file = folder / "kernels.py"
    file.write_text(above + textwrap.dedent(_KERNEL.format(factor=factor, name=name)))
    defined = {}
    exec(compile(file.read_text(), str(file), "exec"), defined)
    where = SingleDeviceSharding(topology.devices("v5e:1x1")[0])
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=where)
    call = pallas.pallas_call(defined[name], out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.jit(call).lower(x)


@pytest.mark.libtpu
def test_a_kernel_in_a_different_folder_and_on_different_lines_is_the_same_program(tmp_path):
    here = lowered(tmp_path / "here")
    there = lowered(tmp_path / "there", above="# A comment.\n" * 3)
    assert here.as_text() != there.as_text()  # otherwise this test checks nothing
    assert program_text.strip_locations(here) == program_text.strip_locations(there)
    assert saved_plan.hash_of(here) == saved_plan.hash_of(there)


@pytest.mark.libtpu
def test_a_different_kernel_is_a_different_program(tmp_path):
    text = program_text.strip_locations(lowered(tmp_path, factor=2.0))
    assert "stable_mosaic" in text
    assert program_text.strip_locations(lowered(tmp_path, factor=3.0)) != text
    assert program_text.strip_locations(lowered(tmp_path, name="other")) != text


def test_a_program_without_kernels_is_unchanged():
    program = jax.jit(lambda x: x + 1).lower(1.0)
    assert program_text.strip_locations(program) == program.as_text()


@pytest.mark.libtpu
def test_unreadable_bytecode_is_unchanged(tmp_path, monkeypatch):
    program = lowered(tmp_path)
    body = base64.b64encode(b"no kernel").decode()
    text = program_text._LOCATIONS.sub("", program_text._BYTECODE.sub(body, program.as_text()))
    monkeypatch.setattr(type(program), "as_text", lambda self: text)
    assert program_text.strip_locations(program) == text
