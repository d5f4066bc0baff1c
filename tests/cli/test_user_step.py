"""`tpudist plan FILE.py:function` recognizes the named object, and says what to write instead."""

import os
import subprocess
import sys

import pytest

from tpudist import planner
from tpudist.cli import user_step
from tpudist.cli.errors import WrongUse

FILE = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tpudist import planner

x = jax.ShapeDtypeStruct((8, 4), jnp.float32)

def step(state): return state * 2
filtered = eqx.filter_jit(step)
by_name = lambda *, params, batch: params
traced = jax.jit(step).trace(x)

class Model:
    def __call__(self, x): return x
    def fit(self, x, y): return None
model = Model()

def make_traced(): return traced
def make_plan(): return planner.plan(step, x)
def make_model(): return model
def make_bare(): return step
def main(argv): step(x)
def loss(params): return params["w"].sum()
def create(num_steps): return step, (np.ones(num_steps),)
def make_counted(): return step, (np.ones(jax.device_count()),)
def make_mesh(): return step, (x,), {"mesh": jax.make_mesh((4, 32), ("a", "b"))}
def make_large(): return step, (np.ones(2**44),)
def make_value():
    (device, *_) = planner.devices("v5e-4")
    return step, (jax.device_put(np.ones(3), device),)
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of the file is added
    (tmp_path / "own_steps.py").write_text(FILE)
    return lambda name: user_step.load(f"{tmp_path}/own_steps.py:{name}", "v5e-128").make


@pytest.mark.parametrize("name", ["traced", "make_traced"])
def test_a_program_that_was_traced_is_planned(load, name):
    strategy, traced, args = load(name)(None)
    assert (strategy, args, traced.fun_name) == (None, (), "step")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("filtered", r"is a step.*def make_step\(\): return filtered, \(state,\), whose"),
        ("by_name", r"is a step.*return by_name, \(params, batch\), whose"),
        ("model", r"is a model.*return model.fit, \(x, y\), whose"),
        ("make_model", r"returned a model.*return model.fit, \(x, y\), whose"),
        ("make_bare", r"returned a step.*return step, \(state,\), whose"),
        ("make_plan", "returned a plan. Return the arguments of tpudist.planner.plan instead"),
        ("main", r"returns nothing, so it was not called.*return train_step, \(state, batch\)"),
        ("loss", r"called with a candidate.*TypeError.*return loss, \(params,\), whose"),
        ("create", r"with a candidate.*creates and returns a step.*return create\(\.\.\.\)\. Or"),
        ("make_large", r"own_steps.py.*exceed the free memory.*jax.eval_shape\(init\)"),
        ("missing", "no function 'missing'. It has step, .*make_traced, make_plan, .*Name a"),
    ],
)
def test_the_error_shows_the_function_to_write(load, name, message):
    with pytest.raises(WrongUse, match=message):
        load(name)(planner.Candidate("v5e-128", {}, "none", 1, ()))


def test_the_main_of_absl_receives_no_arguments_and_the_defaults_of_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_flags.py").write_text(
        "from absl import flags\n"
        "rate = flags.DEFINE_float('rate_of_this_test', 0.5, '')\n"
        "def main(argv): return abs, (rate.value, len(argv))\n"
    )
    assert user_step.load(f"{tmp_path}/own_flags.py:main", "v5e-8").make(None) == (
        None,
        abs,
        (0.5, 1),
    )


@pytest.mark.slow
def test_a_step_sees_as_many_devices_as_its_slice(tmp_path):
    """Otherwise a program that makes a mesh of `jax.device_count()` devices would use one."""
    (tmp_path / "own_steps.py").write_text(FILE)
    load = "user_step.load('own_steps.py:make_counted', 'v5e-16').make(None)"
    program = f"from tpudist.cli import user_step; print({load}[2][0].shape)"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        environment.pop(name, None)
    command = [sys.executable, "-c", program]
    shown = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
    assert shown == "(16,)\n"


@pytest.mark.libtpu
def test_a_mesh_of_more_devices_than_this_machine_has_is_one_of_the_slice(load):
    """So a program that makes its mesh of `jax.devices()` is planned without a change."""
    *_, figures = load("make_mesh")(None)
    mesh = figures["mesh"]
    assert (dict(mesh.shape), mesh.devices.flat[0].platform) == ({"a": 4, "b": 32}, "tpu")


@pytest.mark.libtpu
def test_a_value_on_a_slice_is_explained(load):
    with pytest.raises(WrongUse, match=r"descriptions.*jax.eval_shape\(init\)"):
        load("make_value")(None)
