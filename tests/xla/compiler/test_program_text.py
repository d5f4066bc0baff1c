"""What identifies a program does not depend on where its source lies."""

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
    """A program with a Pallas kernel whose source is in a folder, below other lines."""
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
def test_a_kernel_is_the_same_in_another_folder_and_on_other_lines(tmp_path):
    here = lowered(tmp_path / "here")
    there = lowered(tmp_path / "there", above="# A comment.\n" * 3)
    assert here.as_text() != there.as_text()  # or there would be nothing to do
    assert program_text.strip_locations(here) == program_text.strip_locations(there)
    assert saved_plan.hash_of(here) == saved_plan.hash_of(there)


@pytest.mark.libtpu
def test_another_kernel_is_another_program(tmp_path):
    text = program_text.strip_locations(lowered(tmp_path, factor=2.0))
    assert "stable_mosaic" in text
    assert program_text.strip_locations(lowered(tmp_path, factor=3.0)) != text
    assert program_text.strip_locations(lowered(tmp_path, name="other")) != text


def test_a_program_without_kernels_is_as_jax_prints_it():
    program = jax.jit(lambda x: x + 1).lower(1.0)
    assert program_text.strip_locations(program) == program.as_text()


@pytest.mark.libtpu
def test_bytecode_that_nobody_can_read_is_left_as_it_is(tmp_path, monkeypatch):
    program = lowered(tmp_path)
    body = base64.b64encode(b"no kernel").decode()
    text = program_text._LOCATIONS.sub("", program_text._BYTECODE.sub(body, program.as_text()))
    monkeypatch.setattr(type(program), "as_text", lambda self: text)
    assert program_text.strip_locations(program) == text
