import dataclasses
import math

import pytest

import hlo_programs
from hlo_programs import V5E, estimate_step
from tpudist.planner.calibration import Calibration
from tpudist.xla.estimate import error_bar, step_time, timeline
from tpudist.xla.estimate.transfers import Transfer

MATRIX = "bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}"
VECTOR = "f32[64,128]{1,0:T(8,128)S(1)}"
PRODUCT = (
    f"%c = {MATRIX} convolution(%a, %b), dim_labels=bf_io->bf, "
    'metadata={op_name="NAME"}, backend_config={"estimated_cycles":"1000000"}'
)
NEGATION = f'%y = {VECTOR} negate(%x), backend_config={{"estimated_cycles":"300000"}}'
QUERIES = "bf16[2,8,2048,128]"


def _program(*lines, name="jit(f)/dot_general", has_cycles=True):
    parameters = (f"%a = {MATRIX} parameter(0)", f"%b = {MATRIX} parameter(1)")
    return hlo_programs.program(
        *parameters,
        f"%x = {VECTOR} parameter(2)",
        *(x.replace("NAME", name) for x in lines),
        has_cycles=has_cycles,
    )


def test_errors_of_one_cause_add_up_and_those_of_two_causes_do_not():
    one = estimate_step(_program(PRODUCT))
    twice = estimate_step(_program(PRODUCT.replace("%c =", "%d ="), PRODUCT))
    assert one.high_s == pytest.approx(1.12 * one.step_s)
    assert one.low_s == pytest.approx(one.step_s / 1.12)
    assert twice.high_s == pytest.approx(1.12 * twice.step_s)
    both = estimate_step(_program(NEGATION, PRODUCT))
    assert [cause.name for cause in both.causes] == ["matrix products", "other instructions"]
    products, others = both.causes
    assert products.high_s == pytest.approx(0.12 * one.step_s)
    assert others.high_s == pytest.approx(0.24 * (both.step_s - one.step_s))
    assert both.high_s == pytest.approx(both.step_s + math.hypot(products.high_s, others.high_s))
    assert both.low_s == pytest.approx(both.step_s - math.hypot(products.low_s, others.low_s))


@pytest.mark.parametrize(
    ("count", "name", "spread", "low", "high"),
    [
        (1, "dot_general", 0.12, 0.84, 1.15),
        (500, "dot_general", 0.12, 0.94, 1.08),
        (500, "conv_general_dilated", 0.24, 0.84, 1.15),
    ],
)
def test_programs_without_cycles_have_the_spread_of_their_rule_in_addition(
    count, name, spread, low, high
):
    lines = (f"{PRODUCT.replace('%c =', f'%c{i} =')}" for i in range(count))
    module = _program(*lines, name=f"jit(f)/{name}", has_cycles=False)
    large = dataclasses.replace(V5E, bf16_flops_per_s=V5E.bf16_flops_per_s / 10)
    step = estimate_step(module, large)
    assert (step.step_s >= 0.05) == (count > 1)
    own = error_bar.PRODUCTS if name == "dot_general" else error_bar.CONVOLUTIONS
    assert {cause.name for cause in step.causes} == {error_bar.NO_CYCLES, own}
    assert step.high_s == pytest.approx(step.step_s * (1 + math.hypot(spread, high - 1)))
    assert step.low_s == pytest.approx(
        step.step_s * (1 - math.hypot(1 - 1 / (1 + spread), 1 - low))
    )


def test_a_convolution_has_twice_the_spread_of_a_product():
    """XLA writes both as convolutions; only the path of the operation tells them apart."""
    step = estimate_step(_program(PRODUCT, name="jit(f)/conv_general_dilated"))
    assert [cause.name for cause in step.causes] == ["convolutions"]
    assert step.high_s == pytest.approx(1.24 * step.step_s)


def test_a_kernel_that_cannot_be_read_may_take_twice_as_long():
    module, _ = hlo_programs.kernel("splash_mha_fwd", QUERIES, QUERIES, QUERIES)
    step = estimate_step(module)
    assert [cause.name for cause in step.causes] == [error_bar.UNREAD]
    assert (step.low_s, step.high_s) == pytest.approx((step.step_s, 1.9 * step.step_s))


def test_a_kernel_without_known_operations_is_guessed_by_its_bytes():
    module, kernel = hlo_programs.kernel("mine", QUERIES)
    step = estimate_step(module)
    assert step.unknown_kernels == (kernel.name,)
    assert step.guessed_s == step.kernels_s == pytest.approx(step.memory_bound_s)
    assert step.hbm_bytes == 2**24
    assert [cause.name for cause in step.causes] == ["guessed instructions"]
    # Its bytes are a lower bound.
    assert (step.low_s, step.high_s) == pytest.approx((step.step_s, 2 * step.step_s))


def test_no_step_is_faster_than_the_peak():
    line = PRODUCT.replace("1000000", "1")  # at the best measured rate, 95 % of the peak
    step = estimate_step(_program(line))
    assert (
        step.low_s == pytest.approx(step.peak_bound_s) == pytest.approx(0.949 * step.step_s, 1e-3)
    )


@pytest.mark.parametrize(
    ("field", "line", "name"),
    [
        ({"matmul_flops_per_s": 150e12}, PRODUCT, "matrix products"),
        ({"hbm_bytes_per_s": 700e9}, "%z = f32[2048,1024]{1,0} negate(%w)", "memory bandwidth"),
        ({"host_bytes_per_s": 9e9}, "", "host bandwidth"),
    ],
)
def test_a_measured_rate_halves_the_spread_of_its_cause(field, line, name):
    chip = Calibration("v5e", **field).apply(V5E)
    lines = (
        [line]
        if line
        else [
            "%off = (f32[2048,1024]{1,0:S(5)}, f32[2048,1024]{1,0}, u32[]) copy-start(%w)",
            "%gone = f32[2048,1024]{1,0:S(5)} copy-done(%off)",
        ]
    )
    module = _program("%w = f32[2048,1024]{1,0} parameter(3)", *lines)
    widths = []
    for one in (V5E, chip):
        step = estimate_step(module, one)
        (cause,) = (cause for cause in step.causes if cause.name == name)
        widths.append(math.log1p(cause.high_s / step.step_s))
    assert widths[1] == pytest.approx(widths[0] / 2)


def _transfer(network, seconds, kind="all-gather", start_up_s=0.0):
    busy = {network: seconds - start_up_s}
    return Transfer(kind, 0, 0.0, network, (), seconds, busy, "", None, start_up_s)


def _timeline(transfer, *, compute_s, is_async, num_slices=1):
    """A step that computes while, or after, it transfers."""
    price = timeline.Price(compute_s, "elementwise", 0.0, 0.0)
    instruction = _program(NEGATION).entry.root
    moves = timeline.Event(instruction, 1, transfer=transfer, is_async=is_async)
    computes = timeline.Event(instruction, 1, price=price)
    actions = [
        timeline._Run(moves, "start" if is_async else "whole", 0),
        timeline._Run(computes, None, None),
        timeline._Wait(0),
    ]
    player = timeline._Player(timeline.compute_seconds, timeline.transfer_seconds, is_first=True)
    return timeline.Timeline(player.play(actions), (moves, computes), num_slices, actions)


def _causes(simulated):
    bar = error_bar.estimate(_program(NEGATION), V5E, simulated, 0.0, 0.0)
    return {cause.name: cause for cause in bar.causes}


def test_the_bandwidth_of_a_hidden_transfer_widens_no_bar():
    hidden = _causes(_timeline(_transfer("ici", 1.0), compute_s=9.0, is_async=True))
    assert "ICI bandwidth" not in hidden
    waited = _causes(_timeline(_transfer("ici", 1.0), compute_s=9.0, is_async=False))
    assert waited["ICI bandwidth"].high_s == pytest.approx(0.20)
    assert waited["ICI bandwidth"].low_s == pytest.approx(0.07)


def test_the_start_up_of_a_transfer_has_a_spread_of_its_own():
    transfer = _transfer("ici", 3.0, start_up_s=2.0)
    causes = _causes(_timeline(transfer, compute_s=0.0, is_async=False))
    low, high = error_bar.RANGES[error_bar.START_UP]
    assert causes["start-up of transfers"].high_s == pytest.approx(2 * (high - 1))
    assert causes["start-up of transfers"].low_s == pytest.approx(2 * (1 - low))
    assert causes["ICI bandwidth"].high_s == pytest.approx(0.20)


@pytest.mark.parametrize(
    ("kind", "ends"), [("send", (0.57, 0.57 / 0.33)), ("all-reduce", (0.33 / 0.57, 1.2))]
)
def test_the_data_center_network_has_a_third_to_all_of_its_bandwidth(kind, ends):
    simulated = _timeline(_transfer("dcn", 1.0, kind), compute_s=0.0, is_async=False)
    bar = error_bar.estimate(_program(NEGATION), V5E, simulated, 0.0, 0.0)
    assert (bar.low_s, bar.high_s) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("is_async", "compute_s", "low_s", "high_s"),
    [
        (True, 9.0, 0.0, 0.189),  # all hidden: computation may be slower meanwhile
        (False, 9.0, 1.0, 0.0),  # nothing hidden: a tuned schedule may hide all
        (False, 0.5, 0.5 * (1 - 1 / 1.38) * 3, 0.0),  # at most 1.38 times as fast
        (False, 0.25, 0.25, 0.0),  # no more than there is computation
    ],
)
def test_overlap_may_be_better_or_may_slow_computation(is_async, compute_s, low_s, high_s):
    causes = _causes(_timeline(_transfer("ici", 1.0), compute_s=compute_s, is_async=is_async))
    cause = causes["overlap"]
    assert (cause.low_s, cause.high_s) == pytest.approx((low_s, high_s))


def test_a_step_waits_for_the_slowest_of_many_slices():
    simulated = _timeline(_transfer("ici", 1.0), compute_s=99.0, is_async=False, num_slices=24)
    step = step_time.estimate(_program(NEGATION), V5E, simulated)
    assert step.slow_slices_s == pytest.approx(100 * 0.0115 * math.log(24))
    assert step.step_s == pytest.approx(100 + step.slow_slices_s)
    (cause,) = (cause for cause in step.causes if cause.name == "the slowest slice")
    assert step.slow_slices_s + cause.high_s == pytest.approx(100 * 0.06, rel=0.01)
    one = step_time.estimate(_program(NEGATION), V5E, dataclasses.replace(simulated, num_slices=1))
    assert one.slow_slices_s == 0


def test_a_product_bound_by_memory_is_not_faster_than_its_bytes():
    weights = MATRIX.replace("S(1)", "").replace("1024,1024", "1024,4096")
    few = MATRIX.replace("1024,1024", "8,4096")
    line = PRODUCT.replace(f"%c = {MATRIX} convolution(%a, %b)", f"%c = {few} convolution(%f, %w)")
    parameters = (
        f"%w = {weights} parameter(3)",
        f"%f = {MATRIX.replace('1024,1024', '8,1024')} parameter(4)",
    )
    step = estimate_step(_program(*parameters, line.replace("1000000", "22000")))
    assert [cause.name for cause in step.causes] == [error_bar.READS]
    assert step.low_s == pytest.approx(step.memory_bound_s)
    assert step.low_s > step.step_s / 1.24
    assert step.high_s == pytest.approx(1.24 * step.step_s)
