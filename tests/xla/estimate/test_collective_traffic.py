import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from tpudist.xla import mesh, topology
from tpudist.xla.estimate import collective_traffic, timeline
from tpudist.xla.estimate.transfers import Transfer
from tpudist.xla.hardware import chips, links
from tpudist.xla.hlo import hlo_module


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as libtpu describes it, with the position of its chip in the slice."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int = 0
    device_kind: str = "TPU v5 lite"


def _grid(*shape, cores=1, num_slices=1):
    """Returns the devices of slices of a shape, the last coordinate fastest: [slice, ..., core]."""
    return [
        Device((*place, *(0,) * (3 - len(shape))), core, number)
        for number in range(num_slices)
        for place in np.ndindex(*shape)
        for core in range(cores)
    ]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The parts of a mesh that are used: its devices and the names of its axes."""

    devices: np.ndarray
    axis_names: tuple[str, ...]


def _mesh(devices, **axes):
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return Grid(array.reshape(tuple(axes.values())), tuple(axes))


V5E, V5P, V7 = chips.CHIPS["v5e"], chips.CHIPS["v5p"], chips.CHIPS["tpu7x"]
LINK = V5E.ici_bytes_per_s
BYTES = 2**30


def _torus(chip, *shape, **kwargs):
    return links.Torus(_mesh(_grid(*shape, **kwargs), x=-1), chip)


def _everybody(size):
    return (tuple(range(size)),)


# Routes over links.


def _moving_s(route):
    """Seconds in which the links are busy."""
    return route.seconds - route.start_up_s


@pytest.mark.parametrize(
    ("shape", "kind", "seconds"),
    [
        # A line of 4: the chip at its end receives three quarters of the result over one link.
        ((4, 1), "all-gather", 3 / 4 / 1),
        ((4, 1), "reduce-scatter", 3 / 4 / 1),
        ((4, 1), "all-reduce", 2 * 3 / 4 / links.ALL_REDUCE_SHARE),
        # A ring of 16 uses both links.
        ((16, 1), "all-gather", 15 / 16 / 2),
        # A square of 4 x 4 lines uses one link of each axis.
        ((4, 4), "all-gather", 15 / 16 / 2),
        # A pod of v5e, 16 x 16 rings, uses all four links.
        ((16, 16), "all-gather", 255 / 256 / 4),
        ((16, 16), "all-reduce", 2 * 255 / 256 / 4 / links.ALL_REDUCE_SHARE),
        # Half of the data in half of a line crosses its middle.
        ((4, 1), "all-to-all", 4 / 4 / 1),
        ((16, 1), "all-to-all", 16 / 4 / 2),
        ((16, 16), "all-to-all", 16 / 4 / 2),
    ],
)
def test_a_collective_over_all_chips_uses_all_axes(shape, kind, seconds):
    torus = _torus(V5E, *shape)
    route = torus.route(kind, BYTES, _everybody(np.prod(shape)))
    assert _moving_s(route) == pytest.approx(seconds * BYTES / LINK)
    (busy_s,) = set(route.busy_s.values())
    assert busy_s == pytest.approx(_moving_s(route))


def test_a_collective_over_rows_uses_only_the_links_of_its_axis():
    rows = tuple(tuple(range(4 * row, 4 * row + 4)) for row in range(4))
    route = _torus(V5E, 4, 4).route("all-gather", BYTES, rows)
    assert _moving_s(route) == pytest.approx(3 / 4 * BYTES / LINK)
    assert set(route.busy_s) == {(1, 1), (1, -1)}


def test_interleaved_groups_share_their_links():
    apart = ((0, 2), (1, 3))
    beside = ((0, 1), (2, 3))
    torus = _torus(V5E, 4, 1)
    assert _moving_s(torus.route("all-gather", BYTES, apart)) == pytest.approx(
        2 * _moving_s(torus.route("all-gather", BYTES, beside))
    )


def test_a_slice_is_a_torus_if_it_consists_of_whole_cubes():
    quarter = V5P.ici_bytes_per_s
    cube = _moving_s(_torus(V5P, 4, 4, 4).route("all-gather", BYTES, _everybody(64)))
    smaller = _moving_s(_torus(V5P, 2, 2, 2).route("all-gather", BYTES, _everybody(8)))
    assert cube == pytest.approx(63 / 64 * BYTES / (6 * quarter))
    assert smaller == pytest.approx(7 / 8 * BYTES / (3 * quarter))


@pytest.mark.parametrize(
    ("shape", "kind", "num_stages", "num_hops"),
    [
        ((16, 1), "all-gather", 1, 8),
        ((4, 1), "all-gather", 1, 3),
        ((4, 4), "all-gather", 2, 6),
        ((4, 4), "all-reduce", 4, 12),
    ],
)
def test_small_collectives_take_their_stages_and_hops(shape, kind, num_stages, num_hops):
    route = _torus(V5E, *shape).route(kind, 8, _everybody(np.prod(shape)))
    assert route.start_up_s == pytest.approx(num_stages * links.STAGE_S)
    assert _moving_s(route) == pytest.approx(num_hops * 1e-6)


@pytest.mark.parametrize(
    ("num_rows", "measured_s"),
    [(64, 21.9e-6), (256, 48.7e-6), (1024, 155.4e-6), (4096, 576e-6), (16384, 2252e-6)],
)
def test_estimated_small_all_gathers_match_measurements(num_rows, measured_s):
    """f32[num_rows, 8, 128] of each of 4 chips of a tpu7x:2x2x1.

    Source: AI-Hypercomputer/accelerator-microbenchmarks, Ironwood/guides/collectives/all_gather.md.
    """
    groups = ((0, 2, 4, 6), (1, 3, 5, 7))
    num_bytes = 4 * 4 * num_rows * 8 * 128
    route = _torus(V7, 2, 2, 1, cores=2).route("all-gather", num_bytes, groups)
    assert route.seconds == pytest.approx(measured_s, rel=0.06)


def test_a_permute_takes_the_shortest_path():
    ring, line = _torus(V5E, 16, 1), _torus(V5E, 4, 1)
    around = tuple((i, (i + 1) % 16) for i in range(16))
    assert ring.route("collective-permute", BYTES, around).busy_s == {(0, 1): BYTES / LINK}
    # On a line, the way back from the last chip uses every link in the other direction.
    back = tuple((i, (i + 1) % 4) for i in range(4))
    route = line.route("collective-permute", BYTES, back)
    assert route.busy_s == {(0, 1): BYTES / LINK, (0, -1): BYTES / LINK}
    two_on = tuple((i, (i + 2) % 16) for i in range(16))
    far = ring.route("collective-permute", BYTES, two_on)
    assert far.seconds == pytest.approx(links.SEND_S + 2 * BYTES / LINK)
    small = ring.route("collective-permute", 8, two_on)
    assert small.seconds == pytest.approx(links.SEND_S + 2e-6)
    assert ring.route("collective-permute", BYTES, ((3, 3),)).seconds == 0


def test_two_devices_of_a_chip_communicate_inside_it_and_share_its_links():
    torus = _torus(V7, 2, 2, 1, cores=2)
    link = V7.ici_bytes_per_s
    within = torus.route("all-gather", BYTES, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert _moving_s(within) == pytest.approx(BYTES / 2 / (6 * link))
    together = torus.route("all-gather", BYTES, _everybody(8))
    assert _moving_s(together) == pytest.approx(7 / 8 * BYTES / (2 * link))
    assert together.start_up_s == pytest.approx(3 * links.STAGE_S)  # two axes, and the chip
    apart = _moving_s(torus.route("all-gather", BYTES, ((0, 2, 4, 6), (1, 3, 5, 7))))
    assert apart == pytest.approx(3 / 4 * BYTES / (2 * link / 2))
    swap = torus.route("collective-permute", BYTES, ((0, 1), (1, 0)))
    assert _moving_s(swap) == pytest.approx(BYTES / (6 * link))


def test_estimated_permutes_and_all_reduces_match_measurements():
    """Sources: marin-community/marin, issue 6736; tpu-recipes, microbenchmarks/trillium."""
    v6e = chips.CHIPS["v6e"]
    for num_bytes, measured_s in ((2**13, 5.75e-6), (2**20, 17.45e-6), (2**26, 776.34e-6)):
        permute = _torus(v6e, 2, 4).route("collective-permute", num_bytes, ((0, 1), (1, 0)))
        assert permute.seconds == pytest.approx(measured_s, rel=0.09)
    summed = _torus(v6e, 16, 16).route("all-reduce", 2 * 17408**2, _everybody(256))
    assert summed.seconds == pytest.approx(2 * 0.606076928 * 255 / 256 / 235.76, rel=0.05)


def test_a_group_of_one_sends_nothing():
    assert _torus(V5E, 4, 1).route("all-reduce", BYTES, ((0,), (1,))).seconds == 0
    assert links.bytes_per_device("all-reduce", BYTES, 1) == 0


# Transfers of a program.

TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%started (p.1: f32[128]) -> (f32[128], f32[256], u32[]) {
  %p.1 = f32[128]{0} parameter(0)
  %ag.1 = f32[256]{0} all-gather(%p.1), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}, \
frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{}}
  ROOT %s.1 = (f32[128]{0}, f32[256]{0}, u32[]) custom-call(%ag.1), \
custom_call_target="AsyncCollectiveStart"
}

%continued (p.2: f32[128], p.3: f32[128]) -> (f32[128], f32[256]) {
  %p.2 = f32[128]{0} parameter(0)
  %p.3 = f32[128]{0} parameter(1)
  %ag.2 = f32[256]{0} all-gather(%p.2), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}, \
frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{}}
  %negated = f32[128]{0} negate(%p.3)
  ROOT %t.2 = (f32[128]{0}, f32[256]{0}) tuple(%negated, %ag.2)
}

%finished (p.4: f32[128]) -> f32[256] {
  %p.4 = f32[128]{0} parameter(0)
  %ag.3 = f32[256]{0} all-gather(%p.4), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}, \
frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{}}
  ROOT %d.1 = f32[256]{0} custom-call(%ag.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p.5: f32[128]) -> f32[32] {
  %p.5 = f32[128]{0} parameter(0)
  %ar.1 = f32[128]{0} all-reduce(%p.5), channel_id=4, replica_groups=[2,4]<=[4,2]T(1,0), \
to_apply=%add, metadata={op_name="scatter"}
  ROOT %slice.1 = f32[32]{0} dynamic-slice(%ar.1, %p.5), dynamic_slice_sizes={32}
}

ENTRY %main (p: f32[128]) -> f32[128] {
  %p = f32[128]{0} parameter(0)
  %begin = (f32[128]{0}, f32[256]{0}, u32[]) fusion(%p), kind=kCustom, calls=%started
  %go = (f32[128]{0}, f32[256]{0}) fusion(%p, %p), kind=kLoop, calls=%continued, \
backend_config={"estimated_cycles":"45030"}
  %end = f32[256]{0} fusion(%p), kind=kCustom, calls=%finished
  %scattered = f32[32]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %sent = (f32[128]{0}, f32[128]{0}, u32[]) collective-permute-start(%p), channel_id=5, \
source_target_pairs={{0,1},{1,0}}, metadata={op_name="shift"}
  %arrived = f32[128]{0} collective-permute-done(%sent)
  %off = (f32[128]{0:S(5)}, f32[128]{0}, u32[]) copy-start(%p), metadata={op_name="offload"}
  %gone = f32[128]{0:S(5)} copy-done(%off)
  %fetched = f32[128]{0} copy(%gone)
  %near = (f32[128]{0:S(1)}, f32[128]{0}, u32[]) copy-start(%p)
  ROOT %nearer = f32[128]{0:S(1)} copy-done(%near)
}
"""


def _uses(text, devices, chip=V5E, **axes):
    return _uses_on(text, _mesh(devices, **axes), chip)


def _uses_on(text, mesh, chip):
    return collective_traffic.uses(timeline.simulate(hlo_module.parse(text), mesh, chip))


def test_every_transfer_has_its_network_axes_and_bytes():
    found = _uses(TEXT, _grid(4, 2), replica=4, tensor=2)
    assert [(u.kind, u.num_bytes, u.network, u.axes, u.is_async, u.sent_bytes) for u in found] == [
        ("all-gather", 1024, "ici", ("tensor",), True, 512),
        ("reduce-scatter", 512, "ici", ("replica",), False, 384),
        ("collective-permute", 512, "ici", ("tensor",), True, 512),
        ("copy-to-host", 512, "host", (), True, 512),
        ("copy-from-host", 512, "host", (), False, 512),
    ]
    assert [u.op_name for u in found][2:4] == ["shift", "offload"]
    assert [u.count for u in found] == [1] * 5


def test_computation_between_start_and_done_hides_a_collective():
    gather, scatter, shift, *_ = _uses(TEXT, _grid(4, 2), replica=4, tensor=2)
    assert gather.seconds == pytest.approx(links.STAGE_S + 1e-6)
    assert gather.exposed_s == 0
    assert scatter.exposed_s == pytest.approx(scatter.seconds)
    assert shift.exposed_s == pytest.approx(shift.seconds)
    assert shift.seconds > 0


@pytest.mark.parametrize("waits", [False, True])
def test_transfers_on_sparse_cores_overlap_with_computation(waits):
    text = """HloModule m, num_partitions=8

%called (q: f32[128]) -> f32[256] {
  %q = f32[128]{0} parameter(0)
  ROOT %ag = f32[256]{0} all-gather(%q), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (p: f32[128]) -> f32[256] {
  %p = f32[128]{0} parameter(0)
  %n = f32[128]{0} negate(%p), metadata={op_name="made" source_file="train.py" source_line=4}
  %s = ((f32[128]{0}), f32[256]{0}) call-start(%n), async_execution_thread="sparsecore", \
to_apply=%called
  %u = ((f32[128]{0}), f32[256]{0}) call-update(%s), async_execution_thread="sparsecore", \
to_apply=%called
BUSY
  %d = f32[256]{0} call-done(%u)
BUSY
  ROOT %r = f32[256]{0} add(%d, %d)
}
"""
    busy = "  %busy = f32[128]{0} reverse(%p), dimensions={0}"
    busy += ', backend_config={"estimated_cycles":"99000"}'
    parts = text.split("BUSY")
    text = parts[0] + (parts[1] + busy if waits else busy + parts[1]) + parts[2]
    (use,) = _uses(text, _grid(4, 2), replica=4, tensor=2)
    assert (use.kind, use.num_bytes, use.axes, use.is_async) == ("all-gather", 1024, ("tensor",), 1)
    assert (use.exposed_s > 0) == waits
    assert (use.op_name, use.source) == ("made", "train.py:4")  # the program has no better source


def test_a_copy_to_host_memory_has_the_source_of_the_copied_value():
    """The buffer in host memory has a source too, but it did not cause the copy."""
    host, part = "f32[4,128]{1,0:S(5)}", "f32[1,128]{1,0}"
    text = f"""HloModule m, num_partitions=8

ENTRY %main (h: f32[4,128], p: f32[1,128], i: s32[]) -> f32[4,128] {{
  %h = {host} parameter(0), metadata={{op_name="zeros" source_file="zeros.py" source_line=1}}
  %p = {part} parameter(1)
  %i = s32[] parameter(2)
  %n = {part} negate(%p), metadata={{op_name="made" source_file="train.py" source_line=4}}
  %b = {part} bitcast(%n)
  %s = (({host}, {part}, s32[], s32[]), {host}, u32[]) dynamic-update-slice-start(%h, %b, %i, %i)
  ROOT %d = {host} dynamic-update-slice-done(%s)
}}
"""
    (use,) = _uses(text, _grid(4, 2), replica=4, tensor=2)
    assert (use.kind, use.num_bytes, use.source) == ("copy-to-host", 512, "train.py:4")


def test_transfers_over_the_same_links_are_serialized():
    line = "f32[1048576]{0} all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}"
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[524288]) -> f32[1048576] {{
  %p = f32[524288]{{0}} parameter(0)
  %a = (f32[524288]{{0}}, {line.replace(" all", ") all", 1)}, channel_id=1
  %b = (f32[524288]{{0}}, {line.replace(" all", ") all", 1)}, channel_id=2
  %bd = f32[1048576]{{0}} all-gather-done(%b)
  ROOT %ad = f32[1048576]{{0}} all-gather-done(%a)
}}
"""
    first, second = _uses(text, _grid(4, 2), replica=4, tensor=2)
    moving_s = 2 * 2**20 / LINK
    assert first.seconds == second.seconds == pytest.approx(links.STAGE_S + moving_s)
    assert first.exposed_s == pytest.approx(moving_s)
    assert second.exposed_s == pytest.approx(second.seconds)  # starts up while the first moves


@pytest.mark.parametrize(
    ("transfers", "exposed_s"),
    [
        # Links and seconds of the transfers in order of issue. The device waits from 5 s on.
        ([("b", 20), ("a", 10), ("ab", 10)], [15, 0, 10]),
        # The last one shares no link with the first, but waits for it through the second.
        ([("b", 20), ("ab", 10), ("a", 10)], [15, 10, 10]),
    ],
)
def test_exposed_times_add_up_to_the_wait_for_transfers_on_several_links(transfers, exposed_s):
    clock, events = timeline._Clock(), []
    for number, (link_names, seconds) in enumerate(transfers):
        busy_s = dict.fromkeys(link_names, float(seconds))
        transfer = Transfer("permute", 0, 0.0, "ici", (), seconds, busy_s, "", None)
        events.append(timeline.Event(instruction=None, count=1, transfer=transfer))
        clock.begin(number, events[-1], seconds)
    clock.time = 5.0
    clock.wait(len(transfers) - 1)
    assert [event.exposed_s for event in events] == exposed_s
    assert clock.time == 5 + sum(exposed_s)


def test_transfers_take_no_time_without_a_known_chip():
    found = _uses(TEXT, _grid(4, 2), chip=None, replica=4, tensor=2)
    assert len(found) == 5
    assert {u.seconds for u in found} == {0}


def test_groups_that_span_slices_use_the_data_center_network():
    found = _uses(TEXT, _grid(2, 2, num_slices=2), replica=4, tensor=2)
    scatter = next(u for u in found if u.kind == "reduce-scatter")
    assert (scatter.network, scatter.axes) == ("dcn", ("replica",))
    assert scatter.seconds == pytest.approx(384 / (0.33 * V5E.dcn_bytes_per_s))
    assert {u.network for u in found if u.axes == ("tensor",)} == {"ici"}


def test_reductions_across_slices_overlap_with_computation():
    names = '_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_transfer_type="ALL_REDUCE"'
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[2048]) -> f32[2048] {{
  %p = f32[2048]{{0}} parameter(0)
  %t = token[] after-all()
  %send = (f32[2048]{{0}}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, \
frontend_attributes={{{names}}}
  %recv = (f32[2048]{{0}}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, \
frontend_attributes={{{names}}}
  %busy = f32[2048]{{0}} reverse(%p), dimensions={{0}}, \
backend_config={{"estimated_cycles":"COMPUTE"}}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  ROOT %done = (f32[2048]{{0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
}}
"""
    devices = _grid(2, 2, num_slices=2)
    (idle,) = _uses(text.replace("COMPUTE", "0"), devices, replica=2, fsdp=4)
    (hidden,) = _uses(text.replace("COMPUTE", "99000000"), devices, replica=2, fsdp=4)
    assert (idle.kind, idle.network, idle.axes) == ("all-reduce", "dcn", ("replica",))
    assert idle.sent_bytes == 8192  # each of two slices sends half of the data and half of the sums
    assert idle.seconds == pytest.approx(8192 / (0.33 * V5E.dcn_bytes_per_s))
    assert idle.exposed_s == pytest.approx(idle.seconds, rel=0.1)
    assert hidden.exposed_s == 0


def test_nested_loop_counts_multiply():
    replicas = mesh.make_mesh(jax.devices()[:8], {"fsdp": 2})

    def step(x):
        body = lambda x, _: (jax.lax.psum(x, "replica"), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=7)[0]

    mapped = jax.shard_map(
        step, mesh=replicas.mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False
    )
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 5), jnp.float32)).compile()
    (use,) = _uses_on(compiled.as_text(), replicas.mesh, None)
    assert (use.kind, use.num_bytes, use.count) == ("all-reduce", 320, 7)
    assert use.axes == ("replica",)
    assert use.sent_bytes == 7 * 2 * 320 * 3 / 4
    assert use.source is not None
    assert use.source.startswith(__file__)


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_tpu_program_sends_the_bytes_that_its_shardings_imply():
    """Each of four devices gathers the weights of every layer and has its own rows of the batch."""
    layers, width, rows = 3, 512, 256
    devices = topology.devices("v5e:2x2")
    axes = Mesh(
        np.array(devices).reshape(1, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )

    def loss(weights, x):
        layer = lambda x, w: (jax.nn.relu(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    def argument(shape, spec):
        sharding = jax.sharding.NamedSharding(axes, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = argument((layers, width, width), P(None, "fsdp", None))
    batch = argument((rows, width), P("fsdp"))
    lowered = jax.jit(jax.grad(loss)).lower(weights, batch)
    options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000}
    text = lowered.compile(compiler_options=options).as_text()
    found = _uses_on(text, axes, V5E)

    gathers = [use for use in found if use.kind == "all-gather"]
    assert sum(use.count * use.num_bytes for use in gathers) == 2 * layers * 2 * width * width
    assert {use.axes for use in found} == {("fsdp",)}
    assert {use.network for use in found} == {"ici"}
    assert all(use.seconds > 0 for use in found)
    assert all(0 <= use.exposed_s <= use.seconds * 1.000001 for use in found)
