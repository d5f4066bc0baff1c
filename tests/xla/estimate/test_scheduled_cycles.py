"""Instructions for which XLA writes no cycles are guessed, and none is free."""

import pytest

import hlo_programs
from hlo_programs import V5E, price_of_last
from tpudist.xla.estimate import instruction_time
from tpudist.xla.estimate.scheduled_cycles import guess

VMEM = "{1,0:T(8,128)S(1)}"
TABLE, NUMBERS = f"f32[65536,1024]{VMEM}", "f32[65536]{0:T(1024)S(1)}"
CALL = "custom-call(%m), custom_call_target="


@pytest.mark.parametrize(
    ("line", "what", "cycles"),
    [
        # Measured on v4: 9,213 cycles for 1,024 single numbers.
        ("%x = f32[1024]{0:T(1024)S(1)} gather(%n, %i), slice_sizes={1}", "gather", 9213),
        # Bundles of libtpu's own machine programs for v5e.
        (
            "%x = f32[8192]{0:T(1024)S(1)} gather(%n, %i), slice_sizes={1}",
            "gather",
            8192 * 568 / 64,
        ),
        (f"%x = f32[8192,1024]{VMEM} gather(%t, %i), slice_sizes={{1,1024}}", "gather", 64 * 1856),
        (
            "%x = f32[65536]{0:T(1024)S(1)} scatter(%n, %i, %u), update_window_dims={}",
            "scatter",
            8192 * 7.5,
        ),
        (f"%x = {TABLE} scatter(%t, %i, %r), update_window_dims={{1}}", "scatter", 8192 * 79),
        (f"%x = {NUMBERS} sort(%n), dimensions={{0}}", "sort", 78130),
        (f"%x = u32[4096,4096]{VMEM} rng-bit-generator(%k)", "random bits", 33 * 1030),
        (
            f"%x = (f32[4096,8]{VMEM}, s32[4096,8]{VMEM}) custom-call(%s), "
            'custom_call_target="TopK"',
            "custom call TopK",
            801194,
        ),
        (f'%x = f32[128,128]{VMEM} {CALL}"Cholesky"', "custom call Cholesky", 7190),
        (f'%x = f32[128,128]{VMEM} {CALL}"QrDecompositionBlock"', None, 46410),
        (f'%x = f32[128,128]{VMEM} {CALL}"InvertDiagBlocksLowerTriangular"', None, 3976),
    ],
)
def test_the_guesses_are_near_the_known_programs(line, what, cycles):
    module = _program(line)
    found = guess(module, hlo_programs.last(module))
    assert what in (None, found.what)
    assert found.cycles == pytest.approx(cycles, rel=0.35)
    price = price_of_last(module)
    assert price.seconds == pytest.approx(found.cycles / V5E.cycles_per_s)
    assert price.guess == found.what


def _program(line):
    return hlo_programs.program(
        f"%t = {TABLE} parameter(0)",
        f"%n = {NUMBERS} parameter(1)",
        "%i = s32[8192]{0:T(1024)S(1)} parameter(2)",
        "%u = f32[8192]{0:T(1024)S(1)} parameter(3)",
        f"%r = f32[8192,1024]{VMEM} parameter(4)",
        "%k = u32[4]{0:T(128)S(1)} parameter(5)",
        f"%s = f32[4096,4096]{VMEM} parameter(6)",
        f"%m = f32[128,128]{VMEM} parameter(7)",
        "%h = f32[4096,4096]{1,0:T(8,128)} parameter(8)",
        line,
    )


def test_bytes_decide_where_they_take_longer_and_nothing_is_guessed():
    price = price_of_last(
        _program("%x = f32[256,4096]{1,0:T(8,128)} gather(%h, %i), slice_sizes={1,4096}")
    )
    assert price.guess == ""
    assert price.seconds == price.hbm_bytes / instruction_time.Rates.of(V5E).hbm_bytes_per_s


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f'%x = f32[4096,4096]{VMEM} custom-call(%s), custom_call_target="Mine"', "Mine"),
        (f"%x = f32[4096,4096]{VMEM} copy(%s)", ""),
    ],
)
def test_an_operation_in_vmem_is_not_free(line, what):
    price = price_of_last(_program(line))
    bytes_per_s = 22 * instruction_time.Rates.of(V5E).hbm_bytes_per_s
    factor = 1 if what else 1.6
    assert price.seconds == pytest.approx(factor * 2 * 4096 * 4096 * 4 / bytes_per_s, rel=1e-3)
    assert what in price.guess
    assert bool(what) == bool(price.guess)


def test_a_callback_takes_a_call_from_the_host_and_its_bytes():
    lines = (
        "%x = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) recv(%k), is_host_transfer=true",
        "%x = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) send(%s, %k), is_host_transfer=true",
    )
    received, sent = (price_of_last(_program(line)) for line in lines)
    moved_s = 2**22 / V5E.host_bytes_per_s
    assert sent.seconds == pytest.approx(moved_s)
    assert received.seconds == pytest.approx(moved_s + instruction_time.CALLBACK_S)
    assert {received.guess, sent.guess} == {"callback to the host"}
    assert {received.kind, sent.kind} == {"host"}


def test_a_computation_on_the_host_moves_its_operands_and_results():
    arrays = "((f32[1024,1024]{1,0:T(8,128)}), f32[512,1024]{1,0:T(8,128)}, u32[])"
    line = f'%x = {arrays} custom-call-start(%s), custom_call_target="HostExecute"'
    price = price_of_last(_program(line))
    moved_s = 1.5 * 2**22 / V5E.host_bytes_per_s
    assert price.seconds == pytest.approx(moved_s + instruction_time.CALLBACK_S)
    assert (price.kind, price.guess) == ("host", "computation on the host")
