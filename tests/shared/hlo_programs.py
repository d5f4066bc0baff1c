"""Programs written as text, for tests of what reads them."""

import numpy as np

from tpudist.xla.estimate import flops, instruction_time, step_time, timeline
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import hlo_module

V5E = chips.CHIPS["v5e"]


def program(*lines, computations="", has_cycles=True):
    """A program with the instructions `lines`; the last is its result."""
    *most, last = lines
    body = "\n".join(f"  {line}" for line in [*most, f"ROOT {last}"])
    return hlo_module.parse(
        f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n"
        f"{body}\n}}\n",
        has_cycles=has_cycles,
    )


def last(module):
    """The instruction that computes the result of the program."""
    return module.entry.root


class _Device:
    coords = (0, 0, 0)


class OneDevice:
    """The parts of a mesh that are used, for one device."""

    devices = np.array([_Device()], dtype=object)
    axis_names = ("replica",)


def estimate_step(module, chip=V5E):
    """The time of a step on one device."""
    return step_time.estimate(module, chip, timeline.simulate(module, OneDevice(), chip))


def price_of_last(module, chip=V5E):
    """The cost of the instruction that computes the result of the program."""
    return instruction_time.Rates.of(chip).price(module, last(module))


def kernel(name, *operands, results="bf16[2,8,2048,128]", config="{}"):
    """A program that runs one custom kernel, and the instruction that does."""
    lines = [f"%p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    call = f'custom-call({names}), custom_call_target="tpu_custom_call", backend_config={config}'
    module = program(*lines, f"%{name}.1 = {results} {call}")
    return module, last(module)


def executions(module, computation=None, count=1):
    """Yields the scheduled instructions of a step with their run counts, all branches included."""
    computation = computation or module.entry
    for instruction in computation.instructions.values():
        yield instruction, count
        if instruction.opcode in ("call", "call-start", "async-start", "while", "conditional"):
            trips = module.trip_counts[instruction.name] if instruction.opcode == "while" else 1
            for _, name in instruction.called:
                if name in module.computations:
                    callee = module.computations[name]
                    yield from executions(module, callee, count * (1 if trips is None else trips))


def step_flops(module):
    """The operations of a step in matrix multiplications."""
    return sum(n * flops.instruction_flops(module, i) for i, n in executions(module))
