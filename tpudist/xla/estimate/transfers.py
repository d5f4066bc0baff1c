"""Finds the transfers of a compiled program: the instructions that start one or wait for one.

Transfers are collectives inside a slice (ICI) or across slices (DCN), copies between a device and
its host's memory, and asynchronous copies between HBM and VMEM.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from tpudist.xla.devices import coords_of, slice_index
from tpudist.xla.estimate import hbm_traffic, instruction_time
from tpudist.xla.hardware import links
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo import collective_ops, shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction

_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One run of a transfer.

    Attributes:
        kind: HLO opcode, "copy-to-host", "copy-from-host", or "prefetch" for HBM and VMEM.
        num_bytes: Size of the complete operand or result on one device, whichever is larger; for a
            copy, size of the part that it moves.
        sent_bytes: Bytes that one device sends over the network.
        network: "ici", "dcn", "host" or "hbm".
        axes: Mesh axes along which it moves data.
        seconds: Seconds that it takes without other transfers.
        busy_s: Seconds for which it occupies each shared resource: a link of the slice, the
            network between slices, or a direction of a copy.
        start_up_s: Part of `seconds` before the first byte is sent.
        op_name: Path of the JAX operation that communicates, or that computed the value.
        source: The user's line "file:line"; None if the compiler added it.
    """

    kind: str
    num_bytes: int
    sent_bytes: float
    network: str
    axes: tuple[str, ...]
    seconds: float
    busy_s: Mapping[Hashable, float]
    op_name: str
    source: str | None
    start_up_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Role:
    """The role of an instruction in a transfer.

    Attributes:
        phase: "whole" if the instruction starts the transfer and waits for it.
        key: Identifies the transfer; the start and the done have the same key.
        transfer: The transfer; None for a done.
    """

    phase: Literal["start", "done", "whole"]
    key: Hashable
    transfer: Transfer | None = None


class TransferFinder:
    """Finds transfers in a program, and estimates their time on the devices of a mesh.

    Args:
        module: The compiled program.
        mesh: Mesh that the program was compiled for.
        chip: Chip of the devices; None to set all times to 0.
    """

    def __init__(self, module: Module, mesh: Mesh, chip: Chip | None):
        self._module = module
        self._mesh = mesh
        on_torus = coords_of(mesh.devices.flat[0]) is not None
        self._torus = links.Torus(mesh, chip) if chip is not None and on_torus else None
        self._hbm_bytes_per_s = instruction_time.Rates.of(chip).hbm_bytes_per_s if chip else 0.0
        # The devices of a chip share its connections to the host and to other slices.
        self._host_bytes_per_s = chip.host_bytes_per_s / chip.devices_per_chip if chip else 0.0
        self._dcn_bytes_per_s = chip.dcn_bytes_per_s / chip.devices_per_chip if chip else 0.0
        self._slices = np.vectorize(slice_index, otypes=[int])(mesh.devices)
        self.num_slices = len(np.unique(self._slices))

    def role(self, instruction: Instruction) -> Role | None:
        """Returns the role of `instruction` in a transfer, or None."""
        role = self._role(instruction)
        transfer = role.transfer if role else None
        if role is None or transfer is None or transfer.source or transfer.network == "hbm":
            return role
        # The compiler added this collective, so name the operation whose value it sends.
        origin = self._module.origin(instruction)
        op_name = transfer.op_name or origin.op_name
        transfer = dataclasses.replace(transfer, op_name=op_name, source=origin.source)
        return dataclasses.replace(role, transfer=transfer)

    def _role(self, instruction: Instruction) -> Role | None:
        opcode = instruction.opcode
        if opcode in ("fusion", "async-start", "call-start"):
            return self._role_of_caller(instruction)
        # Before other "-done": a recv-done does not wait for its operand, but for the send with the
        # same rendezvous.
        if opcode in ("send", "recv-done"):
            return self._role_between_slices(instruction)
        if opcode.endswith("-done") and instruction.operands:
            return Role("done", self._start_of(instruction))
        if opcode.removesuffix("-start") in _COPIES:
            return self._role_of_copy(instruction)
        collective = self._collective(instruction)
        if collective is None:
            return None
        phase = "start" if opcode.endswith("-start") else "whole"
        return Role(phase, instruction.name, self._transfer_of(collective))

    def _start_of(self, done: Instruction) -> str:
        """Returns the name of the start that a done waits for; updates may be between them."""
        name = done.operands[0]
        operands = self._module.operands_of(done)[:1]
        while operands and operands[0].opcode in ("async-update", "call-update"):
            name = operands[0].operands[0]
            operands = self._module.operands_of(operands[0])[:1]
        return name

    def _collective(self, instruction: Instruction) -> collective_ops.Collective | None:
        if instruction.opcode.removesuffix("-start") not in collective_ops.KINDS:
            return None
        return collective_ops.read_line(
            instruction.line,
            instruction.computation,
            self._module.num_devices,
            instruction.sources,
        )

    def _role_of_caller(self, instruction: Instruction) -> Role | None:
        """Returns the role of a fusion or an asynchronous call that contains a collective."""
        name = instruction.callee("calls") or instruction.callee("to_apply") or ""
        callee = self._module.computations.get(name)
        inside = self._collective_inside(callee) if callee else None
        if callee is None or inside is None:
            return None
        inner, collective = inside
        if instruction.opcode != "fusion":  # a TPU calls its SparseCores like this
            return Role("start", instruction.name, self._transfer_of(collective))
        # An asynchronous fusion has a start, a done and pieces in between, which compute while the
        # collective runs and have no role. Each contains the same collective.
        key = collective_ops.fusion_piece(inner.line)
        if key is None:
            return Role("whole", instruction.name, self._transfer_of(collective))
        targets = {i.attribute("custom_call_target") for i in callee.instructions.values()}
        if "AsyncCollectiveStart" in targets:
            return Role("start", key, self._transfer_of(collective))
        return Role("done", key) if "AsyncCollectiveDone" in targets else None

    def _collective_inside(
        self, computation: Computation
    ) -> tuple[Instruction, collective_ops.Collective] | None:
        for inner in computation.instructions.values():
            if inner.opcode == "fusion":
                callee = self._module.computations.get(inner.callee("calls") or "")
                inside = self._collective_inside(callee) if callee else None
                if inside:
                    return inside
            elif collective := self._collective(inner):
                return inner, collective
        return None

    def _role_between_slices(self, instruction: Instruction) -> Role | None:
        """Returns the role of a send to other slices, or of the wait for the data of another."""
        # A collective between slices is a send and a recv. They have the same rendezvous, and the
        # wait for the recv is the end of the transfer.
        if instruction.opcode == "recv-done":
            (recv,) = self._module.operands_of(instruction)
            return Role("done", recv.attribute("_xla_host_transfer_rendezvous") or recv.name)
        collective = self._collective(instruction)
        if collective is None:
            return None
        key = instruction.attribute("_xla_host_transfer_rendezvous") or instruction.name
        if not collective.kind.startswith("dcn-"):
            return Role("start", key, self._transfer_of(collective))
        # Such a collective crosses the axes along which the slice changes, and no others.
        axes = tuple(
            str(name)
            for dim, name in enumerate(self._mesh.axis_names)
            if (self._slices != np.take(self._slices, [0], dim)).any()
        )
        kind = collective.kind.removeprefix("dcn-")
        # The send has the operand, which for an all-gather is one part of the result.
        complete = collective.num_bytes * (self.num_slices if kind == "all-gather" else 1)
        sent = links.bytes_per_device(kind, complete, self.num_slices)
        return Role("start", key, self._transfer_over_dcn(collective, sent, axes))

    def _transfer_of(self, collective: collective_ops.Collective) -> Transfer:
        groups = collective.groups or ()
        axes = axes_of(self._mesh, groups)
        size = max((len(group) for group in groups), default=1)
        sent = links.bytes_per_device(collective.kind, collective.num_bytes, size)
        if self._torus is None:
            return _collective_transfer(collective, sent, "ici", axes, links.Route(0.0, {}))
        if self._torus.crosses_slices(groups):
            return self._transfer_over_dcn(collective, sent, axes)
        route = self._torus.route(collective.kind, collective.num_bytes, groups)
        return _collective_transfer(collective, sent, "ici", axes, route)

    def _transfer_over_dcn(
        self, collective: collective_ops.Collective, sent: float, axes: tuple[str, ...]
    ) -> Transfer:
        rate = self._dcn_bytes_per_s * links.dcn_share(collective.kind.removeprefix("dcn-"))
        seconds = sent / rate if rate else 0.0
        route = links.Route(seconds, {"dcn": seconds})
        return _collective_transfer(collective, sent, "dcn", axes, route)

    def _role_of_copy(self, instruction: Instruction) -> Role | None:
        """Returns the role of a copy to or from the host, or an asynchronous one on the device."""
        ends = hbm_traffic.ends_of_copy(self._module, instruction)
        if ends is None:
            return None
        from_host = ends.source.memory_space == shapes.HOST
        to_host = ends.target.memory_space == shapes.HOST
        is_start = instruction.opcode.endswith("-start")
        if from_host != to_host:
            kind, network = "copy-to-host" if to_host else "copy-from-host", "host"
            sent, rate = ends.moved.num_bytes, self._host_bytes_per_s
        elif is_start:
            kind, network = "prefetch", "hbm"
            sent = hbm_traffic.num_bytes(self._module, instruction)
            rate = self._hbm_bytes_per_s
        else:
            return None
        seconds = sent / rate if rate else 0.0
        transfer = Transfer(
            kind=kind,
            num_bytes=ends.moved.num_bytes,
            sent_bytes=sent,
            network=network,
            axes=(),
            seconds=seconds,
            busy_s={kind: seconds},
            op_name=instruction.op_name,
            source=instruction.source,
        )
        return Role("start" if is_start else "whole", instruction.name, transfer)


def _collective_transfer(
    collective: collective_ops.Collective,
    sent_bytes: float,
    network: str,
    axes: tuple[str, ...],
    route: links.Route,
) -> Transfer:
    return Transfer(
        kind=collective.kind.removeprefix("dcn-"),
        num_bytes=collective.num_bytes,
        sent_bytes=sent_bytes,
        network=network,
        axes=axes,
        seconds=route.seconds,
        busy_s=route.busy_s,
        start_up_s=route.start_up_s,
        op_name=collective.op_name,
        source=collective.source,
    )


def axes_of(mesh: Mesh, groups: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """Returns the axes of `mesh` along which devices of one group differ, in mesh order.

    Args:
        mesh: Mesh that the program was compiled for.
        groups: Groups of devices, as positions in the flat mesh; pairs for a permute.
    """
    return _axes_of(mesh.devices.shape, tuple(map(str, mesh.axis_names)), groups)


@functools.lru_cache(maxsize=4096)
def _axes_of(
    shape: tuple[int, ...], names: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[str, ...]:
    differs = np.zeros(len(shape), dtype=bool)
    for size in {len(group) for group in groups}:
        equal_groups = np.array([group for group in groups if len(group) == size])
        coords = np.stack(np.unravel_index(equal_groups, shape))  # [axis, group, device]
        differs |= (coords != coords[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, differ in zip(names, differs, strict=True) if differ)
