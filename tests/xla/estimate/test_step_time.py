import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import hlo_programs
from hlo_programs import V5E, estimate_step, price_of_last
from tpudist.xla import topology
from tpudist.xla.estimate import hbm_traffic, instruction_time, microbenchmarks, vector_work
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import hlo_module
from tpudist.xla.hlo.choices import Choices

RATES, V6E = instruction_time.Rates.of(V5E), chips.CHIPS["v6e"]
Q = "bf16[2,8,2048,128]"
PRODUCT = 2 * 2 * 8 * 2048 * 2048 * 128


# Bytes read from and written to HBM.

ROW, ALL = 8 * 128 * 4, 64 * 128 * 4
BIG, SMALL = "f32[64,128]{1,0:T(8,128)}", "f32[8,128]{1,0:T(8,128)}"
INSIDE = {
    "sum": f"""%inside (p: f32[64,128], q: f32[64,128]) -> f32[64,128] {{
  %p = {BIG} parameter(0)
  %q = {BIG} parameter(1)
  ROOT %sum = {BIG} add(%p, %q)
}}
""",
    "slice": f"""%inside (p: f32[64,128], i: s32[]) -> f32[8,128] {{
  %p = {BIG} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %b = {BIG} bitcast(%p)
  ROOT %s = {SMALL} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={{8,128}}
}}
""",
    "update": f"""%inside (p: f32[64,128], q: f32[8,128], i: s32[]) -> f32[64,128] {{
  %p = {BIG} parameter(0)
  %q = {SMALL} parameter(1)
  %i = s32[]{{:S(6)}} parameter(2)
  %twice = {SMALL} add(%q, %q)
  ROOT %u = {BIG} dynamic-update-slice(%p, %twice, %i, %i)
}}
""",
    "nested": f"""%deeper (d: f32[64,128], i: s32[]) -> f32[8,128] {{
  %d = {BIG} parameter(0)
  %i.1 = s32[]{{:S(6)}} parameter(1)
  ROOT %s = {SMALL} dynamic-slice(%d, %i.1, %i.1), dynamic_slice_sizes={{8,128}}
}}

%inside (p: f32[64,128], i: s32[]) -> f32[8,128] {{
  %p = {BIG} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %f = {SMALL} fusion(%p, %i), kind=kLoop, calls=%deeper
  ROOT %n = {SMALL} negate(%f)
}}
""",
    # XLA writes a product like this: the weight enters through a fusion that only renames it.
    "renamed": f"""%deeper (d: f32[64,128]) -> f32[64,128] {{
  %d = {BIG} parameter(0)
  ROOT %e = {BIG} bitcast(%d)
}}

%inside (p: f32[8,64], q: f32[64,128]) -> f32[8,128] {{
  %p = f32[8,64]{{1,0:T(8,128)S(1)}} parameter(0)
  %q = {BIG} parameter(1)
  %f = {BIG} fusion(%q), kind=kLoop, calls=%deeper
  ROOT %c = {SMALL} convolution(%p, %f), dim_labels=bf_io->bf
}}
""",
    "copy": f"""%deeper (d: f32[64,128]) -> f32[64,128] {{
  %d = {BIG} parameter(0)
  ROOT %e = {BIG} copy(%d)
}}

%inside (p: f32[64,128]) -> f32[64,128] {{
  %p = {BIG} parameter(0)
  ROOT %f = {BIG} fusion(%p), kind=kLoop, calls=%deeper
}}
""",
    "several": f"""%inside (p: f32[64,128]) -> (f32[8,128], s32[8,128]) {{
  %p = {BIG} parameter(0)
  ROOT %t = ({SMALL}, s32[8,128]{{1,0:T(8,128)}}) custom-call(%p), custom_call_target="TopK"
}}
""",
    "fill": f"""%inside (p: f32[8,128], i: s32[8]) -> f32[64,128] {{
  %p = {SMALL} parameter(0)
  %i = s32[8]{{0:T(1024)S(1)}} parameter(1)
  %zero = f32[] constant(0)
  %b = {BIG} broadcast(%zero), dimensions={{}}
  ROOT %s = {BIG} scatter(%b, %i, %p), update_window_dims={{1}}, to_apply=%add
}}
""",
}
FUSED = "kind=kLoop, calls=%inside"
VMEM_BIG = BIG.replace("(8,128)}", "(8,128)S(1)}")


@pytest.mark.parametrize(
    ("inside", "line", "num_bytes"),
    [
        ("", f"%x = {BIG} add(%a, %a)", 3 * ALL),
        ("", f"%x = {VMEM_BIG} copy(%a)", ALL),
        ("", f"%x = {BIG} bitcast(%a)", 0),
        ("", f"%x = ({BIG}, {BIG}) tuple(%a, %a)", 0),
        ("", f"%x = {SMALL} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{8,128}}", 2 * ROW),
        ("", f"%x = {SMALL} slice(%a), slice={{[0:64:8], [0:128]}}", 9 * ROW),
        ("", f"%x = {BIG} dynamic-update-slice(%a, %c, %i, %i)", 2 * ROW),
        ("", f"%x = ({VMEM_BIG}, {BIG}, u32[]) copy-start(%a)", ALL),
        ("", f"%x = (({BIG}), {SMALL}, s32[]) slice-start(%a), slice={{[0:8], [0:128]}}", 2 * ROW),
        ("", f"%x = {BIG} all-reduce(%a), to_apply=%add", 0),
        ("", f'%x = {BIG} custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("sum", f"%x = {BIG} fusion(%a, %b), {FUSED}", 2 * ALL),
        ("sum", f"%x = {VMEM_BIG} fusion(%b, %b), {FUSED}", 0),
        ("slice", f"%x = {SMALL} fusion(%a, %i), {FUSED}", 2 * ROW),
        ("update", f"%x = {BIG} fusion(%a, %c, %i), {FUSED}", 2 * ROW),
        ("nested", f"%x = {SMALL} fusion(%a, %i), {FUSED}", 2 * ROW),
        ("renamed", f"%x = {SMALL} fusion(%v, %a), {FUSED}", ALL + ROW),
        ("copy", f"%x = {BIG} fusion(%a), {FUSED}", 2 * ALL),
        ("several", f"%x = ({SMALL}, {SMALL}) fusion(%b), {FUSED}", 2 * ROW),
        ("fill", f"%x = {BIG} fusion(%c, %i), {FUSED}", ALL + ROW),
    ],
)
def test_only_the_bytes_that_move_count(inside, line, num_bytes):
    module = hlo_programs.program(
        f"%a = {BIG} parameter(0)",
        f"%b = {VMEM_BIG} parameter(1)",
        f"%c = {SMALL} parameter(2)",
        "%i = s32[]{:S(6)} parameter(3)",
        "%v = f32[8,64]{1,0:T(8,128)S(1)} parameter(4)",
        line,
        computations=INSIDE.get(inside, ""),
    )
    assert hbm_traffic.num_bytes(module, hlo_programs.last(module)) == num_bytes


# Times of instructions.


@pytest.mark.parametrize("generation", sorted(chips.CHIPS))
def test_the_estimates_match_the_published_microbenchmarks_on_average(generation):
    """Single measurements differ by up to a quarter, so the test compares the mean."""
    chip = chips.CHIPS[generation]
    rates = instruction_time.Rates.of(chip)
    copy_s = microbenchmarks.COPY_CYCLES[generation] / rates.other_cycles_per_s
    measured = chip.hbm_bytes_per_s * chip.hbm_efficiency / chip.devices_per_chip
    assert copy_s == pytest.approx(microbenchmarks.COPY_BYTES / measured)
    read_s = microbenchmarks.READ_CYCLES[generation] / rates.read_cycles_per_s
    assert read_s == pytest.approx(microbenchmarks.READ_BYTES / measured)
    published = microbenchmarks.MATMULS.get(generation, ())
    for matmul in published:
        seconds = matmul.cycles / rates.matmul_cycles_per_s
        assert seconds == pytest.approx(matmul.seconds, rel=0.13 if len(published) > 1 else 1e-9)
        assert matmul.flops_per_s <= rates.flops_per_s() * (1 + 1e-9)
    assert rates.flops_per_s() <= chip.bf16_flops_per_s / chip.devices_per_chip


def test_a_copy_for_the_next_step_counts_once():
    """XLA copies the first weight at the end of a step, and copies it at the start of the first."""
    copy = f"({VMEM_BIG}, {BIG}, u32[]{{:S(2)}}) copy-start(%a)"
    lines = [
        f"%a = {BIG} parameter(0)",
        f"%first = {copy}, cross_program_prefetch_index=0",
        f"%w = {VMEM_BIG} copy-done(%first)",
        f"%y = {VMEM_BIG} negate(%w)",
        f"%again = {copy}",
        f"%next = {VMEM_BIG} copy-done(%again)",
    ]
    result = f"%x = {VMEM_BIG} negate(%y)"
    for count in (1, 2):  # without the end of the step, and with it
        module = hlo_programs.program(*lines[: 2 + 2 * count], result)
        assert estimate_step(module).hbm_bytes == ALL


def _matmul_line(cycles):
    return (
        "%c = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} convolution(%a, %b), dim_labels=bf_io->bf, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def test_no_instruction_is_faster_than_the_measured_rates():
    operand = "bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter"
    for cycles, seconds in (
        (10, 2 * 1024**3 / RATES.flops_per_s()),
        (20_000, 20_000 / RATES.matmul_cycles_per_s),
    ):
        module = hlo_programs.program(
            f"%a = {operand}(0)", f"%b = {operand}(1)", _matmul_line(cycles)
        )
        price = price_of_last(module)
        assert (price.kind, price.hbm_bytes) == ("matmul", 0)
        assert price.seconds == pytest.approx(seconds)
        assert price.peak_s == pytest.approx(2 * 1024**3 / V5E.bf16_flops_per_s)
    module = hlo_programs.program(f"%a = {BIG} parameter(0)", f"%x = {BIG} add(%a, %a)")
    price = price_of_last(module)
    waits_s = 2 * instruction_time.COPYING_STEP_S
    assert price.seconds == pytest.approx(3 * ALL / RATES.hbm_bytes_per_s + waits_s, rel=1e-3)


def test_cycles_of_a_product_bound_by_memory_have_their_own_rate():
    """A step of decoding is full of them: XLA takes less bandwidth for them than was measured."""
    few, weights = "bf16[8,4096]{1,0:T(8,128)(2,1)S(1)}", "bf16[4096,4096]{1,0:T(8,128)(2,1)}"
    module = hlo_programs.program(
        f"%a = {few} parameter(0)",
        f"%b = {weights} parameter(1)",
        f"%c = {few} convolution(%a, %b), dim_labels=bf_io->bf, "
        'backend_config={"estimated_cycles":"90000"}',
    )
    price = price_of_last(module)
    assert price.seconds == pytest.approx(9e4 / RATES.read_cycles_per_s)
    assert price.hbm_bytes / RATES.hbm_bytes_per_s < price.seconds < 9e4 / RATES.matmul_cycles_per_s


@pytest.mark.parametrize(("memory", "most_s"), [("", 6.34e-6), ("S(1)", 2.3e-6)])
def test_cycles_of_a_short_product_do_not_exceed_its_bytes(memory, most_s):
    layout = f"{{1,0:T(8,128)(2,1){memory}}}"
    module = hlo_programs.program(
        f"%a = bf16[1024,64]{layout} parameter(0)",
        f"%b = bf16[64,1024]{layout} parameter(1)",
        f"%c = bf16[1024,1024]{layout} convolution(%a, %b), dim_labels=bf_io->bf, "
        'backend_config={"estimated_cycles":"18963"}',
    )
    price = price_of_last(module)
    assert price.seconds == pytest.approx(most_s, rel=0.01)


@pytest.mark.parametrize(
    ("operation", "is_bounded"),
    [
        ("add(%a, %a)", True),
        ("reverse(%a), dimensions={0}", False),
        ("negate(%v)", True),
    ],
)
def test_cycles_of_a_simple_operation_do_not_exceed_its_bytes(operation, is_bounded):
    large = "f32[8192,8192]{1,0:T(8,128)}"
    module = hlo_programs.program(
        f"%a = {large} parameter(0)",
        f"%v = {VMEM_BIG} parameter(1)",
        f"%x = {VMEM_BIG if '%v' in operation else large} {operation}, "
        'backend_config={"estimated_cycles":"9000000"}',
    )
    price = price_of_last(module)
    by_cycles_s = 9e6 / RATES.other_cycles_per_s
    by_bytes_s = price.hbm_bytes / RATES.hbm_bytes_per_s
    if is_bounded:
        assert by_bytes_s < price.seconds < 1.05 * by_bytes_s + 1e-6 < by_cycles_s
    else:
        assert price.seconds == pytest.approx(by_cycles_s)


@pytest.mark.parametrize(
    ("generation", "dtypes", "peak"),
    [
        ("v5e", ("s8", "s8"), 393e12),
        ("v5e", ("s4", "s8"), 393e12),
        ("v5e", ("s4", "s4"), 788e12),
        ("v5e", ("s8", "bf16"), 197e12),
        ("v5p", ("f8e4m3fn", "f8e5m2"), 459e12),  # converted to bfloat16
        ("tpu7x", ("f8e4m3fn", "f8e5m2"), 4614e12 / 2),  # of one of two devices
    ],
)
def test_narrow_numbers_have_a_peak_of_their_own(generation, dtypes, peak):
    chip, layout = chips.CHIPS[generation], "[1024,1024]{1,0:T(8,128)(2,1)S(1)}"
    module = hlo_programs.program(
        f"%a = {dtypes[0]}{layout} parameter(0)",
        f"%b = {dtypes[1]}{layout} parameter(1)",
        f"%c = f32{layout} convolution(%a, %b), dim_labels=bf_io->bf",
    )
    price = price_of_last(module, chip)
    assert price.peak_s == pytest.approx(2 * 1024**3 / peak)
    assert price.peak_s <= price.seconds


def test_a_step_is_the_sum_of_its_parts():
    operand = "bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter"
    module = hlo_programs.program(
        f"%a = {operand}(0)",
        f"%b = {operand}(1)",
        f"%x = {VMEM_BIG} parameter(2)",
        f'%y = {VMEM_BIG} negate(%x), backend_config={{"estimated_cycles":"5000"}}',
        "%h = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(3)",
        "%off = (bf16[1024,1024]{1,0:S(5)}, bf16[1024,1024], u32[]) copy-start(%h)",
        "%gone = bf16[1024,1024]{1,0:S(5)} copy-done(%off)",
        _matmul_line(20_000),
    )
    estimate = estimate_step(module)
    host_s = 2 * 1024**2 / V5E.host_bytes_per_s
    compute_s = 20_000 / RATES.matmul_cycles_per_s
    compute_s += RATES.price(module, module.entry.instructions["y"]).seconds
    assert estimate.compute_s == pytest.approx(compute_s)
    assert estimate.host_s == estimate.exposed_host_s == pytest.approx(host_s)
    assert estimate.step_s == pytest.approx(compute_s + host_s)
    assert estimate.flops == 2 * 1024**3
    assert estimate.hbm_bytes == 2 * 1024**2  # one end of the host copy; the rest is in VMEM
    assert [(op.name, op.kind) for op in estimate.top] == [
        ("off", "host"),
        ("c", "matmul"),
        ("y", "elementwise"),
    ]
    assert sum(op.share for op in estimate.top) == pytest.approx(1)
    assert estimate.unknown_trip_counts == estimate.unknown_kernels == ()


@pytest.mark.parametrize(("dims", "cycles"), [("4096,4096", 0), ("65536,16", 8192 * 8.4)])
def test_a_transposed_copy_takes_its_bytes_or_the_bundles_that_move_them(dims, cycles):
    module = hlo_programs.program(
        f"%a = f32[{dims}]{{0,1:T(8,128)}} parameter(0)",
        f"%c = f32[{dims}]{{1,0:T(8,128)S(1)}} copy(%a)",
        has_cycles=False,
    )
    price = price_of_last(module)
    seconds = cycles / V5E.cycles_per_s or price.hbm_bytes / RATES.hbm_bytes_per_s
    assert price.seconds == pytest.approx(seconds + 2 * instruction_time.COPYING_STEP_S, rel=0.01)


def _window_program(window, cycles=0):
    layout = "{0,1,2:T(8,128)S(1)}"
    add = """%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

"""
    return hlo_programs.program(
        f"%a = f32[2048,16,128]{layout} parameter(0)",
        "%zero = f32[] constant(0)",
        f"%c = f32[2048,16,128]{layout} reduce-window(%a, %zero), "
        f"window={{{window}}}, to_apply=%sum, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}',
        computations=add,
    )


def test_a_window_takes_its_operations_on_the_vector_units():
    """XLA has 2,866 cycles for this part of a cumulative sum, and the machine program 755,712."""
    price = price_of_last(_window_program("size=1x1x128 pad=0_0x0_0x127_0", 2866))
    least_s = 2048 * 16 * 128 * 128 / (4 * 1024) / V5E.cycles_per_s
    assert least_s < price.seconds < 2 * least_s


@pytest.mark.parametrize(
    ("window", "operations"),
    [
        ("size=1x1x255 pad=0_0x0_0x127_127", 1),
        ("size=1x1x255 pad=0_0x0_0x126_128", 255),  # the last window lacks the first number
        ("size=1x1x255 stride=1x1x2 pad=0_0x0_0x127_254", 255),  # most windows are not complete
    ],
)
def test_windows_of_complete_rows_add_each_number_once(window, operations):
    """So XLA writes the sum of a row for each of its numbers, in a softmax for example."""
    module = _window_program(window)
    assert vector_work.count(module, hlo_programs.last(module)) == operations * 2048 * 16 * 128


def _conditional(**choices):
    branch = """%BRANCH (x: f32[64,128]) -> f32[64,128] {
  %x.BRANCH = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %n.BRANCH = f32[64,128]{1,0:T(8,128)} reverse(%x.BRANCH), dimensions={0}, \
backend_config={"estimated_cycles":"CYCLES"}
}

"""
    module = hlo_programs.program(
        "%flag = s32[] parameter(0)",
        f"%a = {BIG} parameter(1)",
        f"%x = {BIG} conditional(%flag, %a, %a), branch_computations={{%cheap, %dear}}",
        computations=branch.replace("BRANCH", "cheap").replace("CYCLES", "10")
        + branch.replace("BRANCH", "dear").replace("CYCLES", "9000000"),
    )
    module = dataclasses.replace(module, choices=Choices(**choices))
    return estimate_step(module)


def test_branches_cost_their_shares_of_the_runs():
    estimate = _conditional(branches={2: (0.75, 0.25), 3: (0.0, 0.0, 1.0)})
    whole = _conditional().step_s
    assert estimate.guessed == ()
    assert estimate.step_s == pytest.approx(0.25 * whole, rel=0.01)
    assert "branches of conditionals" not in [cause.name for cause in estimate.causes]


def test_a_conditional_costs_its_most_expensive_branch():
    estimate = _conditional()
    assert [op.name for op in estimate.top] == ["n.dear"]
    (guess,) = estimate.guessed
    assert (guess.what, guess.branches[1]) == ("conditional", estimate.step_s)
    assert guess.seconds == pytest.approx(estimate.step_s - guess.branches[0])
    assert estimate.low_s < guess.branches[0] * 2
    assert estimate.step_s == pytest.approx(9e6 / RATES.other_cycles_per_s)


def _compiled(name, function, *shapes):
    sharding = SingleDeviceSharding(topology.devices(name)[0])
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes]
    return hlo_module.parse(jax.jit(function).lower(*arguments).compile().as_text())


@pytest.mark.libtpu
@pytest.mark.slow
def test_the_microbenchmark_cycles_match_this_compiler():
    """The rates would be wrong with a compiler that estimates cycles differently."""
    product = _compiled("v6e:1x1", jnp.matmul, (8192, 8192), (8192, 8192))
    copy = _compiled("v6e:1x1", lambda a: a * 2, (4096, 4096))
    assert {matmul.cycles for matmul in microbenchmarks.MATMULS["v6e"]} == {_cycles(product)}
    assert microbenchmarks.COPY_CYCLES["v6e"] == _cycles(copy)
    read = _compiled("v6e:1x1", jnp.matmul, (8, 8192), (8192, 65536))
    assert microbenchmarks.READ_CYCLES["v6e"] == pytest.approx(_cycles(read), rel=0.01)
    estimate = estimate_step(product, V6E)
    assert estimate.flops == 2 * 8192**3
    assert 0.79 * V6E.bf16_flops_per_s < estimate.flops / estimate.step_s
    assert estimate.flops / estimate.step_s < 0.91 * V6E.bf16_flops_per_s


def _cycles(module):
    return sum(run.cycles or 0 for run, _ in hlo_programs.executions(module))


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_scanned_step_counts_the_operations_of_all_layers_on_a_tpu():
    layers, rows, width = 3, 512, 256

    def step(weights, x):
        layer = jax.checkpoint(lambda x, w: (jax.nn.gelu(x @ w), None))
        loss = lambda w: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).mean()  # noqa: E731
        return jax.grad(loss)(weights)

    module = _compiled("v5e:1x1", step, (layers, width, width), (rows, width))
    assert module.unknown_trip_counts == ()
    estimate = estimate_step(module)
    assert estimate.flops == layers * 4 * 2 * rows * width * width
    assert estimate.step_s >= estimate.flops / V5E.bf16_flops_per_s
    assert all(op.seconds > 0 for op in estimate.top)
    assert any(op.source and op.source.startswith(__file__) for op in estimate.top)


def test_a_narrow_head_fills_half_of_a_wide_matrix_unit():
    kernel = hlo_programs.kernel("splash_mha_fwd_residuals", Q, Q, Q)
    for chip, filled in ((V5E, 1), (V6E, 0.5)):
        rates = instruction_time.Rates.of(chip)
        price = rates.price(*kernel)
        assert price.kind == "kernel"
        assert price.seconds == pytest.approx(2 * PRODUCT / (rates.flops_per_s() * filled))


def test_instructions_of_one_line_are_one_operation():
    """30 layers of an unrolled model would otherwise fill the list of the longest operations."""
    line = 'metadata={op_name="jit(f)/mul" source_file="/a/model.py" source_line=LINE}'
    module = hlo_programs.program(
        f"%a = {BIG} parameter(0)",
        *(
            f"%n.{i} = {BIG} negate(%a), {line.replace('LINE', str(7 if i < 30 else i))}"
            for i in range(33)
        ),
    )
    top = estimate_step(module).top
    assert [op.source for op in top] == ["/a/model.py:7"] + [
        f"/a/model.py:{i}" for i in (30, 31, 32)
    ]
    assert top[0].seconds == pytest.approx(30 * top[1].seconds)
    assert sum(op.share for op in top) == pytest.approx(1)


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        (f"%x = {BIG} all-reduce(%a), to_apply=%add", 2 * ALL),
        (f"%x = {VMEM_BIG} all-reduce(%a), to_apply=%add", ALL),
        (f"%x = {BIG} all-gather(%c), dimensions={{0}}", ROW + ALL),
        (f"%x = ({SMALL}, {BIG}) all-gather-start(%c), dimensions={{0}}", ROW + ALL),
    ],
)
def test_the_ends_of_a_collective_pass_through_hbm(line, num_bytes):
    module = hlo_programs.program(f"%a = {BIG} parameter(0)", f"%c = {SMALL} parameter(1)", line)
    assert hbm_traffic.collective_bytes(module, hlo_programs.last(module)) == num_bytes


@pytest.mark.parametrize("features", [64, 4096])  # HBM needs longer, and the matrix unit
def test_a_convolution_without_cycles_adds_what_a_read_adds(features):
    rows = "bf16[32768,4096]{1,0:T(8,128)(2,1)}"
    module = hlo_programs.program(
        f"%a = {rows} parameter(0)",
        f"%b = bf16[4096,{features}]{{1,0:T(8,128)(2,1)}} parameter(1)",
        f"%c = bf16[32768,{features}]{{1,0:T(8,128)(2,1)}} convolution(%a, %b), "
        'dim_labels=bf_io->bf, metadata={op_name="jit(f)/conv_general_dilated"}',
        has_cycles=False,
    )
    price = price_of_last(module)
    products_s = price.flops / RATES.flops_per_s() / min(1, features / 128)
    seconds = max(products_s, price.hbm_bytes / RATES.hbm_bytes_per_s)
    assert price.seconds == pytest.approx(seconds + 1.4e-3 * seconds**0.5)


def test_a_copy_without_cycles_takes_its_bytes_and_the_latency_of_the_memory():
    """The rate of the memory was measured with such a copy (v6e, 32 MiB in 49.4 us)."""
    array = "bf16[4096,4096]{1,0:T(8,128)(2,1)}"
    lines = f"%a = {array} parameter(0)", f"%b = {array} copy(%a)"
    module = hlo_programs.program(*lines, has_cycles=False)
    estimate = estimate_step(module, V6E)
    assert estimate.step_s == pytest.approx(49.4e-6, rel=0.03)
    assert [cause.name for cause in estimate.causes] == ["memory bandwidth"]


@pytest.mark.parametrize("has_cycles", [True, False])
def test_a_comparison_of_all_pairs_takes_the_operations_of_the_vector_units(has_cycles):
    """It has few bytes, but each pair takes a comparison and a step of the reduction."""
    inside = """%inside (p: f32[65536]) -> pred[65536] {
  %p = f32[65536]{0:T(1024)} parameter(0)
  %x = f32[65536,1024]{1,0:T(8,128)} broadcast(%p), dimensions={0}
  %e = pred[65536,1024]{1,0:T(8,128)(4,1)} compare(%x, %x), direction=EQ
  %no = pred[] constant(false)
  ROOT %r = pred[65536]{0:T(1024)} reduce(%e, %no), dimensions={1}, to_apply=%or
}
"""
    lines = (
        "%a = f32[65536]{0:T(1024)} parameter(0)",
        f"%b = pred[65536]{{0:T(1024)}} fusion(%a), {FUSED}"
        + ', backend_config={"estimated_cycles":"9"}' * has_cycles,
    )
    module = hlo_programs.program(*lines, computations=inside, has_cycles=has_cycles)
    estimate = estimate_step(module)
    compares_s = 2 * 65536 * 1024 / (4 * 1024 * V5E.cycles_per_s)
    assert compares_s <= estimate.step_s < 1.05 * compares_s


@pytest.mark.parametrize(
    ("result", "operation", "moves"),
    [
        ("f32[8,16,32,128]{3,2,0,1:T(8,128)}", "copy(%a)", False),  # complete tiles
        ("f32[8,16,32,128]{2,3,1,0:T(8,128)}", "copy(%a)", True),
        ("f32[8,16,40,128]{3,2,1,0:T(8,128)}", "pad(%a, %zero), padding=0_0x0_0x0_8x0_0", False),
        ("f32[8,16,32,128]{3,2,1,0:T(8,128)}", "reverse(%a), dimensions={3}", True),
        (
            "c64[8,16,32,128]{3,2,1,0:T(8,128)}",
            'custom-call(%a, %a), custom_call_target="X64Combine"',
            False,
        ),
    ],
)
def test_only_numbers_that_change_their_place_in_a_tile_move(result, operation, moves):
    module = hlo_programs.program(
        "%a = f32[8,16,32,128]{3,2,1,0:T(8,128)} parameter(0)",
        "%zero = f32[] constant(0)",
        f"%x = {result} {operation}",
    )
    assert (vector_work.count(module, hlo_programs.last(module)) is None) == moves


VMEM_LOOP = """%inside (p: f32[512,4,16], i: s32[]) -> f32[4,16] {
  %p = f32[512,4,16]{2,1,0:T(4,128)S(1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %s = f32[1,4,16]{2,1,0:T(4,128)} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,4,16}
  ROOT %b = f32[4,16]{1,0:T(4,128)} bitcast(%s)
}
"""


@pytest.mark.parametrize("has_cycles", [True, False])
@pytest.mark.parametrize(
    ("operand", "operation", "machine_us"),
    [
        ("f32[256,512]{1,0:T(8,128)S(1)}", "copy(%a)", 0.087),
        ("bf16[2048,1024]{1,0:T(8,128)(2,1)S(1)}", "copy(%a)", 0.971),
        ("f32[256,1024]{1,0:T(8,128)S(1)}", "add(%a, %a)", 0.201),
        ("bf16[8,1024,8,128]{3,2,1,0:T(8,128)(2,1)S(1)}", "copy(%a)", 22.8),
        ("f32[512,4,16]{2,1,0:T(4,128)S(1)}", f"fusion(%a, %i), {FUSED}", 0.007),
    ],
)
def test_an_instruction_in_vmem_takes_the_time_of_its_machine_program(
    operand, operation, machine_us, has_cycles
):
    """XLA's cycles for the bodies of loops are 2 to 90 times those of libtpu 0.0.50 for v5e."""
    result = operand.replace("{3,2,1,0", "{3,0,2,1")  # another layout, if it has four dims
    if "fusion" in operation:
        result = "f32[4,16]{1,0:T(4,128)S(1)}"
    module = hlo_programs.program(
        f"%a = {operand} parameter(0)",
        "%i = s32[]{:T(128)S(6)} parameter(1)",
        f"%x = {result} {operation}"
        + ', backend_config={"estimated_cycles":"200000"}' * has_cycles,
        computations=VMEM_LOOP,
        has_cycles=has_cycles,
    )
    seconds = price_of_last(module).seconds
    assert 0.5 < seconds * 1e6 / machine_us < 2.2


@pytest.mark.parametrize(
    ("dtype", "precision", "passes"),
    [("f32", "default", 1), ("f32", "high", 3), ("f32", "highest", 6), ("bf16", "highest", 1)],
)
def test_a_precise_product_of_float32_takes_several_passes(dtype, precision, passes):
    array = f"{dtype}[4096,4096]{{1,0:T(8,128)S(1)}}"
    asked = f"dim_labels=bf_io->bf, operand_precision={{{precision},{precision}}}"
    lines = f"%a = {array} parameter(0)", f"%b = {array} convolution(%a, %a), {asked}"
    module = hlo_programs.program(*lines)
    price = price_of_last(module)
    assert price.seconds == pytest.approx(passes * 2 * 4096**3 / RATES.flops_per_s())
    assert price.flops == 2 * 4096**3
