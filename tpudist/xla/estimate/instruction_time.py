"""Estimates how long one run of an instruction takes on a chip, once its operands are ready.

The rules were fixed before any comparison with a training run. They are the same for all chips and
programs:

1. XLA writes `estimated_cycles` into most instructions. They rank instructions well, but at the
   chip's clock they are not times: matrix multiplications differ by up to a fifth from
   measurements, and a copy of 32 MiB gets half of the measured bandwidth. So cycles are converted
   at the rate that reproduces published microbenchmarks: one rate for instructions that multiply
   matrices, one for all others. Several measurements are averaged. A chip without measurements
   gets the mean of the others.
   A product for which HBM needs longer than the matrix unit has cycles of a model of the memory:
   by them, a product of 8 rows and a matrix of 1 GiB reads at 0.50 (v2) to 0.90 (v3) of the peak.
   They are converted at the rate at which this product reads at the measured share.
   Cycles of other instructions are too many in the same way. So if the bytes take longer than the
   operations on the vector units, which hide as in rule 3, both are the most that an instruction
   takes, with the overhead of rule 6. The same holds for products on the vector units: for one row
   and a matrix in VMEM, XLA has 28 cycles per register, and the operations take 2. It also holds
   for instructions without an array in HBM (rule 7), and for products whose bytes take at least
   half as long as their multiplications: the machine programs for v5e of five such products, of
   128 to 1024 rows, take 0.01 to 0.27 of XLA's cycles.
2. No instruction is faster than a measurement: it takes at least its FLOPs at the best published
   share of the chip's peak, and at least its bytes to and from HBM at the measured share of the
   bandwidth. A product of float32 has 3 or 6 passes of FLOPs, if it asks for that precision.
   Another instruction takes at least its operations on the vector units: 1 Mi random numbers take
   14 us by these cycles, 22 us by their operations, and 25 us by the machine program for v5e.
   Without cycles, these operations and the bytes hide as in rule 3. A convolution without cycles
   fills a part of the matrix unit (`convolutions`). It is guessed if it has few input features.
3. A custom kernel, for which XLA has no cycles, takes the time of its units and of its grid:
   - The matrix unit takes its FLOPs at that share of the peak. The share is smaller if its matrices
     are narrower than the unit: a head of 128 fills half of a unit that is 256 wide (v6e and tpu7x:
     docs.cloud.google.com/tpu/docs/v6e; 128 before). The vector processor does 1,024 elementwise
     operations per core and cycle on each of four units (two before v5e; jax-ml/scaling-book,
     tpus.md, appendix C). The longer of the two hides 0.65 of the shorter: the mean of the machine
     programs (see `scheduled_cycles`) of JAX's Splash attention with blocks of 512 and 1024.
     A step of the grid that a mask excludes does neither.
   - Each step of the grid takes 40 cycles, and 25 per block that it uses. In these programs, and
     those of copies with 2 to 7 blocks and of the product below, on v5e, v5p and v6e, it takes
     60 to 300 cycles.
   - A step that copies a block waits for it, at least 0.35 us: with blocks of 128, the products of
     docs.jax.dev/en/latest/pallas/tpu/matmul.html take 11.77 ms for 32,768 steps and 91.84 ms for
     262,144 on v5e, where the smallest call takes 0.1 ms. That is four times the cycles of its
     machine program, so it is the latency of the memory, and the same for all chips. A kernel that
     starts copies itself waits as long each time (`kernel_copies` counts them).
   - If a chip of v4 or v5p is one device, its two cores share the steps, if the grid has a parallel
     axis; else one of them runs all
     (docs.jax.dev/en/latest/pallas/tpu/pipelining.html, "TPUs in Megacore configuration").
4. Other instructions without XLA's cycles, such as sorts and gathers, have guessed cycles
   (`scheduled_cycles`), at the chip's clock. They take at least their bytes in VMEM, at 22 times
   the bandwidth of HBM (scaling-book, tpus.md).
5. A callback to the host takes its bytes over the host's link, and 0.1 ms, which is what a call of
   the smallest matrix product takes from the host (rule 3). The time of its Python is unknown. A
   computation on the host (`compute_on`) takes the same, for its operands and its results.
6. A program without machine code (`compile_elsewhere`) has no cycles. To the t us of rule 2
   a product adds 3 sqrt(t) us, and an instruction that moves numbers 6 sqrt(t), at most 15 us:
   short ones are less efficient. These numbers are from XLA's cycles of 99 programs of this
   repository: 80 % of them take 0.84 to 1.15 times as long by their cycles
   (with all rules, 0.86 to 1.07). A product for which HBM needs longer adds 1.4 sqrt(t): the median
   by rule 1 of products of 8 to 128 rows and matrices of 8 MiB to 512 MiB on v4, v5e, v5p, v6e and
   tpu7x (0.4 to 2.3 for 80 % of them). A convolution adds as much: with a batch norm, its machine
   program for v5e takes 0.3 to 0.5 of the time of its bytes or, if larger, 0.8 to 1.2 of rule 2.
   A copy in the same layout, which the rate of rule 2 was measured with, only waits for the memory
   before it reads and before it writes: 0.35 us each (rule 3). The same holds for elementwise
   operations, slices and updates in place. By XLA's cycles, those of loops add 0 to 0.6 us.
   A transposed copy waits as long. It takes at least the bundles of rule 7.
7. An instruction without an array in HBM has nothing to wait for. The machine programs of 60 such
   instructions in loops (libtpu 0.0.50, v5e) take 10 bundles and 1 to 3 times the bytes in VMEM and
   operations of rules 3 and 4, where XLA has at least 1,824 cycles. The estimate is 1.6 times.
   Products take 1 to 2 times their FLOPs. Transposed copies take 6 to 10 times their bytes: 8.4
   bundles per register of bfloat16, 2.1 to 7.5 of float32. XLA's cycles of such copies are 0.06 to
   0.4 of them, and those of cumulative sums 0.002 to 0.01, so the estimate replaces them.
8. Names of values (tuples, bitcasts) take no time.

Rates are per JAX device. A chip of v2, v3 or tpu7x is two devices, which share it evenly.
"""

import dataclasses
import math
from collections.abc import Iterable

from tpudist.xla.estimate import flops, hbm_traffic, kernels, scheduled_cycles, vector_work
from tpudist.xla.estimate.convolutions import use_of_unit
from tpudist.xla.estimate.microbenchmarks import (
    COPY_BYTES,
    COPY_CYCLES,
    READ_BYTES,
    READ_CYCLES,
    best_share,
    cycles_per_clock,
)
from tpudist.xla.hardware import chips
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo import kernel_bodies, shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

_WIDE_UNITS = ("v6e", "tpu7x")  # generations with a matrix unit of 256, not 128 (rule 3)
COPYING_STEP_S = 0.35e-6  # rule 3
_STEP_CYCLES = (40, 25)  # rule 3: per step of the grid, and per block
_HIDDEN_SHARE = 0.65  # rule 3
_LANES = 1024  # of each vector unit (rule 3)
_FEW_VECTOR_UNITS = ("v2", "v3", "v4")
_VMEM_OVER_HBM = 22.0  # rule 4
CALLBACK_S = 0.1e-3  # rule 5
# Rule 6. The overheads are square roots of seconds; the maximum is in seconds.
_PRODUCT_OVERHEAD, _OTHER_OVERHEAD, _MAX_OVERHEAD_S = 3e-3, 6e-3, 15e-6
_READ_OVERHEAD = 1.4e-3
_VMEM_OVERHEAD, _VMEM_MOVE_OVERHEAD, _START_CYCLES = 0.6, 9.0, 10  # rule 7
_MOVE_CYCLES, _REGISTER_BYTES = 8.4, 4096  # rules 6 and 7


@dataclasses.dataclass(frozen=True)
class Price:
    """The cost of one run of an instruction.

    Attributes:
        seconds: Estimated time.
        kind: "matmul", "kernel", "host" for a callback, or "elementwise" for everything else, such
            as copies.
        flops: Operations in matrix multiplications.
        hbm_bytes: Bytes to and from HBM.
        peak_s: Seconds that the operations take at the chip's peak.
        guess: Name of the guessed part, such as "sort"; empty if a rule gives the time.
        waits_for_blocks: Whether a kernel takes the time in which its blocks are copied.
    """

    seconds: float
    kind: str
    flops: float
    hbm_bytes: float
    peak_s: float = 0.0
    guess: str = ""
    waits_for_blocks: bool = False


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        chip: The chip, whose peak depends on the numbers that are multiplied.
        matmul_share: Share of the peak that a large matrix multiplication reaches.
        hbm_bytes_per_s: Bytes of a large copy, read and written together.
        matmul_cycles_per_s: XLA's cycles of instructions that multiply matrices.
        read_cycles_per_s: XLA's cycles of such instructions for which HBM needs longer.
        other_cycles_per_s: XLA's cycles of all other instructions.
        unit_width: Width of the matrix unit.
    """

    chip: Chip
    matmul_share: float
    hbm_bytes_per_s: float
    matmul_cycles_per_s: float
    read_cycles_per_s: float
    other_cycles_per_s: float
    unit_width: int

    @classmethod
    def of(cls, chip: Chip) -> "Rates":
        """Returns the rates of one device of `chip`."""
        # `matmul_share` is a calibration by the user. It scales the peak and, by the same factor,
        # the rate of the cycles.
        published = best_share(chip)
        share = chip.matmul_share or published
        hbm_bytes_per_s = chip.hbm_bytes_per_s * chip.hbm_efficiency / chip.devices_per_chip
        return cls(
            chip=chip,
            matmul_share=share,
            hbm_bytes_per_s=hbm_bytes_per_s,
            matmul_cycles_per_s=chip.cycles_per_s * cycles_per_clock(chip) * share / published,
            read_cycles_per_s=READ_CYCLES[chip.generation] * hbm_bytes_per_s / READ_BYTES,
            other_cycles_per_s=COPY_CYCLES[chip.generation] * hbm_bytes_per_s / COPY_BYTES,
            unit_width=256 if chip.generation in _WIDE_UNITS else 128,
        )

    def flops_per_s(self, kinds: Iterable[str] = ("bf16",)) -> float:
        """Returns the operations of a large matrix multiplication: of the slowest of `kinds`."""
        peak = min(map(self.chip.peak_flops_per_s, kinds))
        return peak / self.chip.devices_per_chip * self.matmul_share

    def is_bound_by_memory(self, price: Price) -> bool:
        """Returns whether the bytes of an instruction take longer than its multiplications."""
        return price.hbm_bytes / self.hbm_bytes_per_s > price.peak_s / self.matmul_share

    def price(self, module: Module, instruction: Instruction) -> Price:
        """Returns the cost of one run; zero for loops and calls, whose bodies count instead."""
        if _is_callback(instruction):
            return self._price_callback(instruction)
        num_flops = flops.instruction_flops(module, instruction)
        num_bytes = hbm_traffic.num_bytes(module, instruction)
        hbm_s = num_bytes / self.hbm_bytes_per_s
        cycles = instruction.cycles
        if kernels.is_kernel(instruction):
            return self._price_kernel(module, instruction, num_flops, num_bytes)
        if num_flops:
            kinds = flops.kinds_of_products(module, instruction) or {"bf16"}
            at_rate_s = num_flops / self.flops_per_s(kinds)
            passes_s = at_rate_s * flops.num_passes(module, instruction)
            use = use_of_unit(module, instruction, self.unit_width)
            filled_s = passes_s / use.share + use.cycles / self.chip.cycles_per_s
            convolves = flops.is_convolution(module, instruction)
            reads = hbm_s > at_rate_s and not convolves
            cycles_per_s = self.read_cycles_per_s if reads else self.matmul_cycles_per_s
            cycles_s = 0.0 if use.replaces_cycles else (cycles or 0) / cycles_per_s
            uses_hbm = hbm_traffic.uses(module, instruction)
            most_s = max(filled_s, hbm_s)
            overhead_s = product_overhead_s(most_s, reads=reads or convolves)
            if not uses_hbm:
                overhead_s = min(overhead_s, self.vmem_overhead_s(most_s))
            most_s += overhead_s
            if use.replaces_cycles or not module.has_cycles:
                cycles_s = max(cycles_s, most_s)
            elif use.bounds_cycles and (not uses_hbm or hbm_s > filled_s / 2):
                cycles_s = min(cycles_s, most_s)
            seconds = max(cycles_s, passes_s, hbm_s)
            guess = use.guess if filled_s > hbm_s else ""
            peak_s = at_rate_s * self.matmul_share
            return Price(seconds, "matmul", num_flops, num_bytes, peak_s, guess)
        num_ops = vector_work.count(module, instruction)
        vmem_bytes = hbm_traffic.vmem_bytes(module, instruction)
        bytes_s, vector_s = self.unit_seconds(num_bytes, vmem_bytes, num_ops or 0)
        uses_hbm, is_product = hbm_traffic.uses(module, instruction), _is_product(instruction)
        most_s = self.loop_seconds(
            bytes_s, vector_s, moves=num_ops is None, uses_hbm=uses_hbm, is_product=is_product
        )
        if instruction.opcode == "copy" and num_ops is None and uses_hbm:
            most_s = max(bytes_s, self._move_seconds(instruction)) + 2 * COPYING_STEP_S
        if cycles is not None:
            cycles_s = cycles / self.other_cycles_per_s
            moves = instruction.opcode == "copy" and num_ops is None
            if not uses_hbm and (moves or vector_s > cycles_s):  # rule 7
                return Price(most_s, "elementwise", 0.0, num_bytes)
            seconds = max(cycles_s, hbm_s, vector_s)
            is_at_most = hbm_s > vector_s or is_product
            if is_at_most and num_ops is not None or not uses_hbm:
                seconds = min(seconds, most_s)
            return Price(seconds, "elementwise", 0.0, num_bytes)
        guess = scheduled_cycles.guess(module, instruction)
        guessed_s = guess.cycles / self.chip.cycles_per_s if guess else 0.0
        if guess is None:
            bytes_s = most_s
        # If the bytes take longer, they decide the time, and nothing is guessed.
        is_guessed = guess is not None and (not guess.cycles or guessed_s > bytes_s)
        what = guess.what if guess and is_guessed else ""
        return Price(max(bytes_s, guessed_s), "elementwise", 0.0, num_bytes, guess=what)

    def _price_kernel(
        self, module: Module, kernel: Instruction, num_flops: float, num_bytes: float
    ) -> Price:
        """Returns the cost of a custom kernel (rule 3)."""
        body = kernels.body(kernel)
        kinds = {chips.kind_of_products(p.bits) for p in body.products} if body else set()
        at_rate_s = num_flops / self.flops_per_s(kinds or {"bf16"})
        width = kernels.narrowest_dim(module, kernel)
        if width is None and body is not None and body.flops:
            filled = body.share_of_unit(self.unit_width)
        else:
            filled = min(1.0, (width or self.unit_width) / self.unit_width)
        work_s, copies_s = at_rate_s / filled, 0.0
        if body is not None:
            share = kernels.share_of_steps(module, kernel)
            work_s, copies_s = self.grid_seconds(body, work_s, share)
        seconds = max(work_s, copies_s, num_bytes / self.hbm_bytes_per_s)
        unknown = kernels.unknown_work(module, kernel)
        return Price(
            seconds=seconds,
            kind="kernel",
            flops=num_flops,
            hbm_bytes=num_bytes,
            peak_s=at_rate_s * self.matmul_share,
            guess=f"custom kernel, {unknown}" if unknown else "",
            waits_for_blocks=copies_s >= seconds,
        )

    def grid_seconds(
        self, body: kernel_bodies.KernelBody, products_s: float, share: float
    ) -> tuple[float, float]:
        """Returns the time of all steps of a grid, and of the copies of their blocks.

        Args:
            body: The kernel.
            products_s: Time of its matrix multiplications on all cores.
            share: Share of the steps that compute and copy.
        """
        cores = self.chip.cores_in_name / self.chip.devices_per_chip
        used_cores = cores if body.is_parallel else 1
        products_s *= cores / used_cores
        vector_s = share * body.num_steps * body.vector_ops
        vector_s *= cores / used_cores / self._vector_ops_per_s
        per_step, per_block = _STEP_CYCLES
        cycles = body.num_steps * (per_step + per_block * len(body.blocks))
        steps_s = cycles / self.chip.cycles_per_s / used_cores
        copies_s = share * body.num_copying_steps * COPYING_STEP_S / used_cores
        return _overlap(products_s, vector_s) + steps_s, copies_s

    @property
    def _vector_ops_per_s(self) -> float:
        units = 2 if self.chip.generation in _FEW_VECTOR_UNITS else 4
        cores = self.chip.cores_in_name / self.chip.devices_per_chip
        return cores * units * _LANES * self.chip.cycles_per_s

    def _move_seconds(self, copy: Instruction) -> float:
        """Returns the time in which the vector units transpose the numbers of a copy (rule 7)."""
        cores = self.chip.cores_in_name / self.chip.devices_per_chip
        registers = sum(array.padded_bytes for array in copy.arrays) / _REGISTER_BYTES
        return _MOVE_CYCLES * registers / cores / self.chip.cycles_per_s

    def unit_seconds(
        self, hbm_bytes: float, vmem_bytes: float, num_ops: float
    ) -> tuple[float, float]:
        """Returns the time of the memories and of the vector units."""
        bytes_s = max(hbm_bytes, vmem_bytes / _VMEM_OVER_HBM) / self.hbm_bytes_per_s
        return bytes_s, num_ops / self._vector_ops_per_s

    def loop_seconds(
        self,
        bytes_s: float,
        vector_s: float,
        *,
        moves: bool,
        uses_hbm: bool,
        is_product: bool = False,
    ) -> float:
        """Returns the time of these units, and what an instruction adds to it (rules 3, 6, 7)."""
        seconds = _overlap(bytes_s, vector_s)
        if not seconds:
            return 0.0
        if not uses_hbm:
            return seconds + self.vmem_overhead_s(seconds, moves=moves)
        if is_product:
            return seconds + product_overhead_s(seconds, reads=True)
        return seconds + (other_overhead_s(seconds) if moves else 2 * COPYING_STEP_S)

    def vmem_overhead_s(self, seconds: float, *, moves: bool = False) -> float:
        """Returns what an instruction without an array in HBM adds to its time (rule 7)."""
        share = _VMEM_MOVE_OVERHEAD if moves else _VMEM_OVERHEAD
        return share * seconds + _START_CYCLES / self.chip.cycles_per_s

    def _price_callback(self, instruction: Instruction) -> Price:
        """Returns the cost of an end of a callback, or of a computation on the host (rule 5)."""
        arrays, call_s, guess = instruction.arrays[:1], 0.0, "callback to the host"
        if instruction.opcode == "recv":
            call_s = CALLBACK_S
        elif _is_host_computation(instruction):
            # The operands, the results and a context. Those in the host's memory do not move.
            arrays = [x for x in instruction.arrays[:-1] if x.memory_space != shapes.HOST]
            call_s, guess = CALLBACK_S, "computation on the host"
        elif instruction.opcode != "send":
            return Price(0.0, "host", 0.0, 0.0)
        num_bytes = sum(array.padded_bytes for array in arrays)
        rate = self.chip.host_bytes_per_s / self.chip.devices_per_chip
        return Price(num_bytes / rate + call_s, "host", 0.0, float(num_bytes), guess=guess)


def _overlap(*seconds: float) -> float:
    """Returns the time of two units that work at the same time (rule 3)."""
    return max(seconds) + (1 - _HIDDEN_SHARE) * min(seconds)


def product_overhead_s(seconds: float, *, reads: bool) -> float:
    """Returns what a product of this time adds to it in a program without cycles (rule 6).

    `reads` is whether its bytes decide its time.
    """
    return (_READ_OVERHEAD if reads else _PRODUCT_OVERHEAD) * math.sqrt(seconds)


def other_overhead_s(seconds: float) -> float:
    """Returns what another instruction adds to its time in a program without cycles (rule 6)."""
    return min(_OTHER_OVERHEAD * math.sqrt(seconds), _MAX_OVERHEAD_S)


def _is_product(instruction: Instruction) -> bool:
    """Returns whether the user multiplies matrices: XLA uses the vector units for a single row."""
    return instruction.op_name.endswith("dot_general")


def _is_callback(instruction: Instruction) -> bool:
    """Returns whether an instruction exchanges data with Python on the host, or runs there."""
    # XLA writes transfers to other slices as transfers with the host, too.
    is_transfer = instruction.attribute("is_host_transfer") == "true"
    is_transfer &= "_xla_megascale" not in instruction.attributes
    return is_transfer or _is_host_computation(instruction)


def _is_host_computation(instruction: Instruction) -> bool:
    """Returns whether an instruction starts a computation of `jax.experimental.compute_on`."""
    starts = instruction.opcode == "custom-call-start"
    return starts and '="HostExecute"' in instruction.attributes
