import importlib.machinery
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tpudist.xla import topology, versions
from tpudist.xla.hardware.announced_chips import ANNOUNCED
from tpudist.xla.hlo import collective_ops, compiled_program
from tpudist.xla.hlo.collective_ops import Collective


@pytest.mark.parametrize("name", ["v5e", "v5e-7", "v8x:2x2x1", "v5e:32x32"])
def test_an_invalid_slice_is_rejected(name):
    """`test_slices.py` covers the similar names; libtpu would abort on the last of these."""
    with pytest.raises(ValueError, match=r"v5e-8|v5e:16x16"):
        topology.devices(name)


@pytest.mark.parametrize("num_slices", [0, 1.5])
def test_num_slices_must_be_a_positive_integer(num_slices):
    with pytest.raises(ValueError, match=f"num_slices={num_slices}"):
        topology.devices("v5e:2x4", num_slices=num_slices)


def test_two_different_numbers_of_slices_conflict():
    with pytest.raises(ValueError, match='"2xv5e-8" is 2 slices, but num_slices is 3'):
        topology.devices("2xv5e-8", num_slices=3)


def test_devices_without_libtpu_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ImportError, match=r'"v5e:2x4" needs libtpu.*pip install "tpudist\[aot\]"'):
        topology.devices("v5e:2x4")


def test_the_libtpu_of_a_different_jax_is_rejected(monkeypatch):
    """A newer libtpu cannot print some programs, and compiles no gradients for tpu7x."""
    here = importlib.machinery.ModuleSpec("libtpu", None, origin="/here/libtpu/__init__.py")
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: here)
    monkeypatch.setattr(versions, "version_of", lambda package: "0.0.420.1")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/here/libtpu/libtpu.so")  # as JAX sets it
    with pytest.raises(
        ImportError, match=r'0\.0\.\d+\.\*, but 0\.0\.420\.1 is installed.*"jax\[tpu\]=='
    ):
        topology.devices("v5e:2x4")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    topology.require_libtpu("v5e:2x4")


@pytest.mark.libtpu
def test_the_installed_libtpu_is_pinned_by_jax():
    assert f"{versions.version_of('libtpu')}.".startswith(topology._libtpu_of_jax())


@pytest.mark.libtpu
def test_a_shape_rejected_by_libtpu_raises_value_error():
    with pytest.raises(ValueError, match=r'libtpu has no TPU slice "v5e:3x3".*not divisible'):
        topology.devices("v5e:3x3")


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("name", "num_devices", "kind"),
    [
        ("v2:2x2", 8, "TPU v2"),
        ("v3:4x4", 32, "TPU v3"),
        ("v4:2x2x2", 8, "TPU v4"),
        ("v5e:1x1", 1, "TPU v5 lite"),
        ("v5e:2x4", 8, "TPU v5 lite"),
        ("v5e-16", 16, "TPU v5 lite"),
        ("2xv5e-4", 8, "TPU v5 lite"),
        ("v5p-16", 8, "TPU v5"),
        ("tpu7x-16", 16, "TPU7x"),
        ("v5e:16x16", 256, "TPU v5 lite"),
        ("v5p:4x4x8", 128, "TPU v5"),
        ("v6e:1x1", 1, "TPU v6 lite"),
        ("v6e:4x4", 16, "TPU v6 lite"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
    ],
)
def test_a_slice_has_the_devices_of_a_real_one(name, num_devices, kind):
    devices = topology.devices(name)
    assert len(devices) == num_devices
    assert {device.device_kind for device in devices} == {kind}
    assert jax.default_backend() != "tpu"  # the backend of this process is unchanged


@pytest.mark.libtpu
@pytest.mark.slow
def test_libtpu_does_not_know_the_announced_chips_yet():
    """If this fails, libtpu supports the chip: make its row in `chips.py` a `Chip`."""
    asks = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from tpudist.xla import topology
topology.require_libtpu("tpu8")
topology.os.environ.update(topology.NO_TPU_HERE)
for generation in {list(ANNOUNCED)}:
    try:
        topology.topologies.get_topology_desc(platform="tpu", topology_name=generation + ":2x2x1")
    except Exception as error:
        print("Invalid TPU external name" in str(error))
    else:
        print(generation, "is known")
"""
    ended = subprocess.run(
        [sys.executable, "-c", asks], check=True, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines() == ["True"] * len(ANNOUNCED)


@pytest.mark.libtpu
def test_devices_of_several_slices_have_slice_indices():
    devices = topology.devices("v5e:2x2", num_slices=3)
    assert len(devices) == 12
    assert len({device.slice_index for device in devices}) == 3


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_missing_tpu_causes_no_output():
    """libtpu looks for a local TPU and would print warnings to stderr if it finds none."""
    program = """
import jax
jax.config.update("jax_platforms", "cpu")
from tpudist.xla import topology
jax.devices()
print(len(topology.devices("v5e:2x4")))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert (ended.stdout, ended.stderr) == ("8\n", "")


# Programs of the TPU compiler, parsed by hlo.


def _mesh(devices, **axes):
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _shape(mesh, shape, spec=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec or P()))


def _sgd(weights, x):
    def loss(weights, x):
        hidden = x
        for weight in weights:
            hidden = jax.nn.relu(hidden @ weight)
        return jnp.mean((hidden - x) ** 2)

    value, grads = jax.value_and_grad(loss)(weights, x)
    return value, [weight - 0.1 * grad for weight, grad in zip(weights, grads, strict=True)]


def _data_parallel(mesh, width):
    step = jax.shard_map(
        lambda weights, x: jax.lax.pmean(_sgd(weights, x), "replica"),
        mesh=mesh,
        in_specs=(P(), P("replica")),
        out_specs=P(),
        check_vma=False,
    )
    arguments = ([_shape(mesh, (width, width))] * 3, _shape(mesh, (256, width), P("replica")))
    return jax.jit(step, donate_argnums=0).lower(*arguments).compile()


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_data_parallel_step_on_tpu_is_one_all_reduce():
    mesh = _mesh(topology.devices("v5e:2x4"), replica=8)
    width = 512
    program = _data_parallel(mesh, width)
    (found,) = collective_ops.collectives(program.as_text())
    assert found == Collective("all-reduce", 3 * 4 * width**2 + 4)
    assert found.groups == (tuple(range(8)),)
    assert found.source
    assert found.source.startswith(__file__)
    figures = compiled_program.program_figures(program)
    assert figures.alias_bytes >= 3 * 4 * width**2
    assert figures.flops == pytest.approx(2 * 32 * width**2 * (3 * 3 - 1), rel=0.1)
    assert figures.peak_bytes > 0


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_sharded_step_on_tpu_gathers_each_weight_once_and_scatters_its_gradient():
    """Some gathers are fused with matmuls, and each piece of a matmul prints one."""
    mesh = _mesh(topology.devices("v5e:2x4"), fsdp=8)
    width, num_layers = 2048, 2
    sharded = NamedSharding(mesh, P("fsdp"))
    step = jax.jit(_sgd, out_shardings=(NamedSharding(mesh, P()), [sharded] * num_layers))
    rows = _shape(mesh, (width, width), P("fsdp"))
    text = step.lower([rows] * num_layers, rows).compile().as_text()
    assert "AsyncCollectiveStart" in text
    found = collective_ops.collectives(text)
    assert {collective.groups for collective in found} == {(tuple(range(8)),)}
    assert sorted(found, key=str) == sorted(
        [
            *[Collective("all-gather", 2 * width**2)] * num_layers,  # as bfloat16
            *[Collective("reduce-scatter", 4 * width**2)] * num_layers,
            Collective("all-reduce", 4),
        ],
        key=str,
    )


@pytest.mark.libtpu
@pytest.mark.slow
def test_groups_identify_the_axes_of_the_mesh():
    mesh = _mesh(topology.devices("v5e:2x4"), fsdp=4, tensor=2)
    width = 1024
    sharded = NamedSharding(mesh, P("fsdp", "tensor"))
    step = jax.jit(_sgd, out_shardings=(NamedSharding(mesh, P()), [sharded] * 2))
    weights = [_shape(mesh, (width, width), P("fsdp", "tensor"))] * 2
    text = step.lower(weights, _shape(mesh, (width, width), P("fsdp"))).compile().as_text()
    groups = {collective.groups for collective in collective_ops.collectives(text)}
    positions = np.arange(8).reshape(4, 2)
    along = {
        "fsdp": tuple(map(tuple, positions.T.tolist())),
        "tensor": tuple(map(tuple, positions.tolist())),
        "both": (tuple(range(8)),),
    }
    assert groups == set(along.values())


@pytest.mark.libtpu
@pytest.mark.slow
def test_an_eighth_of_the_gradients_crosses_between_slices():
    width = 1024
    program = _data_parallel(_mesh(topology.devices("v5e:2x4", num_slices=2), replica=16), width)
    found = collective_ops.collectives(program.as_text())
    assert sum(c.num_bytes for c in found if c.kind == "reduce-scatter") == 3 * 4 * width**2
    assert sum(c.num_bytes for c in found if c.kind == "all-gather") == 3 * 4 * width**2
    crossing = sum(c.num_bytes for c in found if c.kind == "dcn-all-reduce")
    assert crossing == pytest.approx(3 * 4 * width**2 / 8, rel=0.01)
