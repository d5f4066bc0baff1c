"""Hand-written plans, for tests of their output."""

import dataclasses

from tpudist.planner.plan_record import Plan
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.error_bar import Cause
from tpudist.xla.estimate.memory import MemoryReport
from tpudist.xla.estimate.refusal import Refusal
from tpudist.xla.estimate.step_time import OpTime, TimeEstimate
from tpudist.xla.hlo.buffers import Buffer

GIB = 1024**3
_HERE = "/home/somebody/project/models"
_LOOP = "jit(train_step)/shard_map/{}/while/body/closed_call/checkpoint/{}"


def fitting(**changes) -> Plan:
    """16 billion parameters, split over the 256 chips of a v5e slice."""
    memory = MemoryReport(
        capacity_bytes=int(15.75 * GIB),
        peak_bytes=int(8.9 * GIB),
        categories={
            "parameters": int(0.26 * GIB),
            "optimizer state": int(0.52 * GIB),
            "batch": 50_000,
            "gradients and activations": int(8.12 * GIB) - 50_000,
        },
        host_bytes=int(1.5 * GIB),
        largest=(
            Buffer(
                "fusion.12",
                "bf16[40,6,2048,6144]{3,2,1,0:T(8,128)(2,1)}",
                int(5.6 * GIB),
                int(5.6 * GIB),
                _LOOP.format("jvp()", "dot_general"),
                f"{_HERE}/transformer.py:142",
            ),
            Buffer(
                "copy.3",
                "f32[6,2048,32000]{2,1,0:T(8,128)}",
                int(1.47 * GIB),
                int(1.46 * GIB),
                "jit(train_step)/shard_map/transpose(jvp())/dot_general",
                f"{_HERE}/transformer.py:97",
            ),
            Buffer("copy.4", "f32[64,3]{1,0:T(8,128)}", 32 * 1024, 768, "", None),
        ),
        replicated_share=0.0004,
        replicated=("model.final_norm.scale", "model.blocks.attention_norm"),
        not_donated=("optimizer.step",),
        donated_bytes=int(0.78 * GIB),
        padding_bytes={"gradients and activations": int(0.02 * GIB)},
        program_bytes=int(0.03 * GIB),
        allocated_bytes=int(9.1 * GIB),
    )
    time = TimeEstimate(
        step_s=10.42,
        compute_s=8.9,
        kernels_s=1.1,
        memory_bound_s=3.2,
        ici_s=1.3,
        dcn_s=0.0,
        host_s=0.2,
        exposed_ici_s=0.42,
        exposed_dcn_s=0.0,
        exposed_host_s=0.0,
        exposed_hbm_s=0.0,
        flops=1.28e15,
        peak_bound_s=6.5,
        hbm_bytes=2.6e12,
        low_s=9.31,
        high_s=12.2,
        causes=(Cause("matrix products", 0.9, 1.1), Cause("overlap", 0.42, 0.24)),
        guessed_s=0.73,
        top=(
            OpTime(
                "fusion.7",
                _LOOP.format("transpose(jvp())", "rematted_computation/dot_general"),
                f"{_HERE}/transformer.py:151",
                2.2,
                0.211,
                "matmul",
            ),
            OpTime(
                "splash.1",
                _LOOP.format("jvp()", "pallas_call"),
                f"{_HERE}/attention.py:40",
                1.1,
                0.106,
                "kernel",
            ),
            OpTime("copy.9", "", None, 0.3, 0.029, "elementwise"),
        ),
    )
    plan = Plan(
        name="train_step",
        topology="v5e-256",
        chip="v5e",
        num_chips=256,
        num_devices=256,
        mesh={"replica": 1, "fsdp": 256},
        num_replicas=1,
        fits=True,
        refusal=None,
        memory=memory,
        time=time,
        collectives=collectives(),
        tokens_per_step=256 * 6 * 2048,
        model_flops=3.17e17,
        trace_s=3.1,
        compile_s=61.2,
        versions={"jax": "0.10.2", "libtpu": "0.0.42.1"},
        program="ab12",
        notes=("The kernel splash.1 is priced from its FLOPs.",),
    )
    return dataclasses.replace(plan, **changes)


def collectives() -> tuple[CollectiveUse, ...]:
    """Collectives of a split model: some hidden, two alike."""

    def gather(count: float, num_bytes: int) -> CollectiveUse:
        return CollectiveUse(
            "all-gather",
            num_bytes,
            count,
            ("fsdp",),
            "ici",
            True,
            f"{_HERE}/transformer.py:142",
            _LOOP.format("jvp()", "dot_general"),
            num_bytes * count * 255 / 256,
            0.003 * count,
            0.0005 * count,
        )

    return (
        gather(80, 226_000_000),
        gather(40, 226_000_000),
        CollectiveUse(
            "reduce-scatter", 226_000_000, 120, ("fsdp",), "ici", False, None, "", 27e9, 0.36, 0.36
        ),
        CollectiveUse(
            "all-reduce",
            4,
            1,
            ("replica", "fsdp"),
            "ici",
            False,
            f"{_HERE}/../train.py:9",
            "jit(train_step)/shard_map/psum",
            8,
            2e-6,
            2e-6,
        ),
    )


def refused(**changes) -> Plan:
    """The same model without anything split or computed again, on a slice of 16 chips."""
    refusal = Refusal(
        needed_bytes=int(210.4 * GIB),
        available_bytes=int(15.75 * GIB),
        over_bytes=int(194.65 * GIB),
        largest=(
            Buffer(
                "fusion.1",
                "f32[40,6144,3,48,128]{4,3,2,1,0:T(8,128)}",
                int(17.8 * GIB),
                int(17.8 * GIB),
                _LOOP.format("transpose(jvp())", "dot_general"),
                f"{_HERE}/transformer.py:142",
            ),
        ),
        text="RESOURCE_EXHAUSTED: ...",
        argument_bytes=int(180 * GIB),
    )
    return fitting(
        topology="v5e-16",
        num_chips=16,
        num_devices=16,
        mesh={"replica": 16},
        num_replicas=16,
        fits=False,
        refusal=refusal,
        memory=None,
        time=None,
        collectives=(),
        notes=(),
        **changes,
    )
