import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpudist.xla import mesh
from tpudist.xla.hlo import collective_ops, compiled_program
from tpudist.xla.hlo.collective_ops import Collective

# Programs compiled by this process.


def _compile(body, argument, *, inner_axes=None, out_specs=None):
    """Compiles `body` for 8 replicas (fewer with `inner_axes`) and their parts of `argument`."""
    replicas = mesh.make_mesh(jax.devices()[:8], inner_axes)
    spec = P(replicas.replica_axis)
    mapped = jax.shard_map(
        body,
        mesh=replicas.mesh,
        in_specs=spec,
        out_specs=spec if out_specs is None else out_specs,
        axis_names=replicas.manual_axes,
        check_vma=False,
    )
    return jax.jit(mapped).lower(argument).compile()


def _collectives(*args, **kwargs):
    return collective_ops.collectives(_compile(*args, **kwargs).as_text())


EVERYBODY = (tuple(range(8)),)
ONE = jax.ShapeDtypeStruct((64, 5), jnp.float32)  # 8 rows, 160 bytes per replica


def test_collectives_are_equal_if_kind_and_bytes_are_equal():
    """This allows tests to compare the communication of two programs as lists."""
    found = _collectives(lambda x: jax.lax.psum(x, "replica"), ONE)
    assert found == [Collective("all-reduce", 160)]
    assert found[0].groups == EVERYBODY
    assert hash(found[0]) == hash(Collective("all-reduce", 160))
    assert found != [Collective("all-reduce", 164)]
    assert found != [Collective("all-gather", 160)]


@pytest.mark.parametrize(
    ("body", "collective"),
    [
        # Bytes of the full array on one device: the result of a gather, the operand of a scatter.
        (lambda x: jax.lax.all_gather(x, "replica", tiled=True), ("all-gather", 1280)),
        (lambda x: jax.lax.psum_scatter(x, "replica", tiled=True), ("reduce-scatter", 160)),
        (lambda x: jax.lax.all_to_all(x, "replica", 0, 0, tiled=True), ("all-to-all", 160)),
    ],
)
def test_the_bytes_count_the_full_operand_or_result(body, collective):
    assert _collectives(body, ONE) == [Collective(*collective)]


def test_a_permutation_reports_its_pairs_of_sender_and_receiver():
    ring = [(i, (i + 1) % 8) for i in range(8)]
    (found,) = _collectives(lambda x: jax.lax.ppermute(x, "replica", ring), ONE)
    assert found == Collective("collective-permute", 160)
    assert found.groups == tuple(ring)


def test_arrays_reduced_together_are_one_collective():
    tree = {"w": ONE, "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
    found = _collectives(lambda x: jax.lax.psum(x, "replica"), tree)
    assert found == [Collective("all-reduce", 164)]


def test_groups_are_positions_in_the_mesh():
    found = _collectives(lambda x: jax.lax.psum(x, "replica"), ONE, inner_axes={"tensor": 2})
    assert [c.groups for c in found] == [((0, 2, 4, 6), (1, 3, 5, 7))]


def test_a_collective_in_a_loop_is_listed_once():
    def body(x):
        step = lambda x, _: (jax.lax.psum(x, "replica"), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=7)[0]

    (found,) = _collectives(body, ONE)
    assert found == Collective("all-reduce", 160)
    assert "while/body" in found.op_name


def test_a_program_for_one_device_has_no_collectives():
    text = jax.jit(lambda x: x @ x.T).lower(ONE).compile().as_text()
    assert collective_ops.collectives(text) == []


def test_the_source_line_is_in_the_users_code():
    def body(x):
        return jax.lax.psum(x, "replica")

    (found,) = _collectives(body, ONE)
    line = inspect.getsourcelines(body)[1] + 1
    assert found.source == found.stack[0] == f"{__file__}:{line}"
    assert found.op_name.endswith("/psum")
    callers = [entry.rpartition(":")[0] for entry in found.stack]
    assert callers.count(__file__) >= 2


def test_the_source_line_is_not_in_the_library():
    library = f"{inspect.getsourcefile(mesh)}:3"
    model = library.replace("xla/mesh.py", "models/transformer.py")
    assert Collective("all-reduce", 4, stack=(library, "train.py:7")).source == "train.py:7"
    assert Collective("all-reduce", 4, stack=(model, "train.py:7")).source == model
    scan = model.replace("transformer", "pipeline")
    assert Collective("all-reduce", 4, stack=(scan, model, "train.py:7")).source == model
    assert Collective("all-reduce", 4, stack=(library,)).source is None
    assert Collective("all-reduce", 4).source is None


def test_program_figures_match_a_matrix_product():
    n = 64
    array = jax.ShapeDtypeStruct((n, n), jnp.float32)
    program = jax.jit(lambda x, y: x @ y + x, donate_argnums=0).lower(array, array).compile()
    figures = compiled_program.program_figures(program)
    assert figures.flops == pytest.approx(2 * n**3, rel=0.1)
    assert figures.bytes_accessed >= 3 * 4 * n * n
    assert figures.argument_bytes == 2 * 4 * n * n
    assert figures.output_bytes == figures.alias_bytes == 4 * n * n
    assert figures.peak_bytes >= figures.argument_bytes
    assert figures.temp_bytes >= 0


def test_a_program_that_computes_nothing_has_no_flops():
    assert compiled_program.program_figures(jax.jit(lambda x: x).lower(ONE).compile()).flops == 0


# Lines written by other compilers.


def _read(line, header="HloModule m, num_partitions=8"):
    return collective_ops.collectives(
        f"{header}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"
    )


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{{0},{1}}", ((0,), (1,))),
        ("{}", EVERYBODY),
        ("[1,8]<=[8]", EVERYBODY),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(1,2,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['axis_0'=8] {'axis_0'}", EVERYBODY),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0','axis_1'}", EVERYBODY),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh[a=2,b=2] {b}", ((0, 1), (2, 3))),
        ("mesh['a'=2] {}", ((0,), (1,))),
    ],
)
def test_every_syntax_of_groups_is_parsed(written, groups):
    (found,) = _read(
        f"%ar = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={written}, "
        f'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/psum"}}'
    )
    assert found.groups == groups
    assert found.op_name == "jit(f)/psum"


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("f32[]", 4),
        ("f32[2,3]{1,0}", 24),
        ("bf16[8,1,5]{2,1,0:T(2,128)(2,1)S(1)}", 80),
        ("f64[3]", 24),
        ("pred[5]", 5),
        ("s4[5]", 3),
        ("u2[8]", 2),
        ("f8e4m3fn[16]", 16),
        ("f4e2m1fn[16]", 8),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("s8[0,4]", 0),
        ("f32[<=8,2]{1,0}", 64),
        ("(f32[4]{0}, /*index=1*/bf16[2,2]{1,0:T(8,128)})", 24),
    ],
)
def test_every_dtype_has_its_size(shape, num_bytes):
    assert _read(f"%ar = {shape} all-reduce(%p), to_apply=%add") == [
        Collective("all-reduce", num_bytes)
    ]


@pytest.mark.parametrize(
    ("start", "done", "collective"),
    [
        (
            "f32[4]{0} all-reduce-start(%p), replica_groups={{0,1}}",
            "f32[4]{0} all-reduce-done(%s)",
            ("all-reduce", 16),
        ),
        (
            "(f32[4]{0}, f32[4]{0}) all-reduce-start(%p, %q), replica_groups={{0,1}}",
            "(f32[4]{0}, f32[4]{0}) all-reduce-done(%s)",
            ("all-reduce", 32),
        ),
        (
            "(bf16[4]{0}, bf16[8]{0}) all-gather-start(%p), replica_groups={{0,1}}",
            "bf16[8]{0} all-gather-done(%s)",
            ("all-gather", 16),
        ),
        (
            "((f32[4], f32[2]), (f32[8], f32[4]), u32[]) all-gather-start(%p, %q), dimensions={0}",
            "(f32[8], f32[4]) all-gather-done(%s)",
            ("all-gather", 48),
        ),
        (
            "((f32[8]{0}), f32[4]{0}, u32[]) reduce-scatter-start(%p), replica_groups={{0,1}}",
            "f32[4]{0} reduce-scatter-done(%s)",
            ("reduce-scatter", 32),
        ),
        (
            "(f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "f32[8]{0} collective-permute-done(%s)",
            ("collective-permute", 32),
        ),
    ],
)
def test_a_start_and_its_done_are_one_collective(start, done, collective):
    assert _read(f"%s = {start}\n  %d = {done}") == [Collective(*collective)]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("f32[4] collective-broadcast(%p), replica_groups={{0,1}}", "collective-broadcast"),
        ("f32[4] ragged-all-to-all(%p, %o, %a, %b, %c, %d)", "ragged-all-to-all"),
        ("(f32[4], u32[], token[]) send(%p, %after), channel_id=2", "send"),
    ],
)
def test_rarer_kinds_are_recognized(line, kind):
    assert _read(f"ROOT %x = {line}") == [Collective(kind, 16)]


def test_transfers_between_slices_are_distinguished_from_transfers_to_the_host():
    attributes = '_xla_megascale_transfer_type="ALL_REDUCE"'
    found = _read(
        "%s = (f32[4], u32[], token[]) send(%p, %t), channel_id=4, is_host_transfer=true, "
        f"frontend_attributes={{{attributes}}}\n"
        "  %r = (f32[4], u32[], token[]) recv(%t), channel_id=3, is_host_transfer=true, "
        f"frontend_attributes={{{attributes}}}\n"
        "  %callback = (f32[9], u32[], token[]) send(%p, %t), channel_id=6, is_host_transfer=true"
    )
    assert found == [Collective("dcn-all-reduce", 16)]


def test_the_pieces_of_an_asynchronous_fusion_are_one_collective():
    piece = (
        "%ag = bf16[8]{0} all-gather(%p), channel_id=5, replica_groups={{0,1}}, "
        'frontend_attributes={chain_id="0"}, '
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    )
    other = piece.replace("channel_id=5", "channel_id=6")
    assert _read(f"{piece}\n  {piece}\n  {other}") == [Collective("all-gather", 16)] * 2


def test_collectives_that_share_a_channel_are_each_counted():
    """The collectives of one all-reduce across slices share a channel."""
    line = "f32[4] all-gather(%p), channel_id=1, replica_groups={{0,1}}"
    assert _read(f"%a = {line}\n  %b = {line}") == [Collective("all-gather", 16)] * 2


def test_an_all_reduce_fused_with_a_slice_is_a_reduce_scatter():
    text = """HloModule m, num_partitions=2

%all-reduce-scatter.3 (input: f32[8]) -> f32[4] {
  %input = f32[8]{0} parameter(0)
  %all-reduce.9 = f32[8]{0} all-reduce(%input), replica_groups={{0,1}}, to_apply=%add
  ROOT %slice = f32[4]{0} dynamic-slice(%all-reduce.9, %index), dynamic_slice_sizes={4}
}

ENTRY %main (p: f32[8]) -> f32[4] {
  %all-reduce.1 = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %f = f32[4]{0} fusion(%all-reduce.1), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    assert collective_ops.collectives(text) == [
        Collective("reduce-scatter", 32),
        Collective("all-reduce", 32),
    ]


def test_names_and_attributes_are_not_mistaken_for_collectives():
    assert (
        _read(
            "%all-reduce.5 = f32[4] fusion(%all-gather.1), calls=%all-reduce-scatter, "
            'metadata={op_name="x = f32[4] all-reduce(y)"}\n'
            "  %gte = f32[4]{0} get-tuple-element(%all-reduce), index=0"
        )
        == []
    )


def test_source_lines_in_the_older_format_are_parsed():
    (found,) = _read(
        '%ar = f32[4] all-reduce(%p), metadata={op_name="psum" source_file="a/train.py" '
        "source_line=12}"
    )
    assert found.source == "a/train.py:12"
