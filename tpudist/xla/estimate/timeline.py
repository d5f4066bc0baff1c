"""Simulates one step of a compiled program: when each instruction runs, and how long it waits.

A device runs one instruction after the other, in the order of the schedule. A transfer continues
during the instructions after its start, until an instruction waits for it; the rest of the transfer
is then exposed. Transfers that use the same links wait for each other. The body of a loop is
simulated once and counted by its trip count. A transfer that an iteration starts and does not wait
for ends with the iteration, although the next iteration could hide it.
"""

import dataclasses
from collections.abc import Hashable

from jax.sharding import Mesh

from tpudist.xla.estimate import instruction_time, transfers
from tpudist.xla.estimate.instruction_time import Price
from tpudist.xla.estimate.transfers import Transfer
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction


@dataclasses.dataclass
class Event:
    """An instruction that takes time, or that starts a transfer.

    Attributes:
        instruction: The instruction.
        count: Runs per step.
        price: Cost of the computation per run; None if it costs nothing.
        transfer: Transfer that each run starts; None if none.
        is_async: Whether other instructions run during the transfer.
        exposed_s: Seconds per run during which others wait for the result or for the links of the
            transfer.
    """

    instruction: Instruction
    count: float
    price: Price | None = None
    transfer: Transfer | None = None
    is_async: bool = False
    exposed_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step: its time, and the events that take time, in order."""

    seconds: float
    events: tuple[Event, ...]


def play(module: Module, mesh: Mesh, chip: Chip | None) -> Timeline:
    """Simulates one step of `module` on the devices of `mesh`; without a chip, all times are 0."""
    player = _Player(module, transfers.Finder(module, mesh, chip), chip)
    seconds = player.play(module.entry, 1.0)
    return Timeline(seconds, tuple(player.events))


class _Player:
    def __init__(self, module: Module, finder: transfers.Finder, chip: Chip | None):
        self._module = module
        self._finder = finder
        self._rates = instruction_time.Rates.of(chip) if chip else None
        self.events: list[Event] = []

    def play(self, computation: Computation, count: float) -> float:
        """Simulates a computation that runs `count` times per step; returns seconds per run."""
        run = _Run()
        for instruction in computation.instructions.values():
            self._step(run, instruction, count)
        for key in list(run.in_flight):  # transfers that nothing in this computation waits for
            run.wait(key)
        return run.time

    def _step(self, run: "_Run", instruction: Instruction, count: float) -> None:
        role = self._finder.role(instruction)
        if role is not None and role.phase == "done":
            run.wait(role.key)
            return
        event = Event(instruction, count)
        if role is None or role.phase == "whole":
            run.time += self._compute(event)
        if role is not None and role.transfer is not None:
            event.transfer = role.transfer
            event.is_async = role.phase == "start"
            run.begin(role.key, event)
            if role.phase == "whole":
                run.wait(role.key)
        if event.price is not None or event.transfer is not None:
            self.events.append(event)
        if role is None:
            run.time += self._play_callees(instruction, count)

    def _compute(self, event: Event) -> float:
        if self._rates is None:
            return 0.0
        price = self._rates.price(self._module, event.instruction)
        if price.seconds or price.flops or price.hbm_bytes:
            event.price = price
        return price.seconds

    def _play_callees(self, instruction: Instruction, count: float) -> float:
        """Simulates the computations that an instruction calls; returns their seconds."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self._module.trip_counts[instruction.name]
            trips = 1 if trips is None else trips
            body = self._module.computations[instruction.callee("body") or ""]
            return trips * self.play(body, count * trips)
        if opcode in ("call", "async-start", "call-start"):
            callees = self._module.callees_in_schedule(instruction, lambda _: 0.0)
            return sum(self.play(callee, count) for callee in callees)
        if opcode != "conditional":
            return 0.0
        return self._play_slowest_branch(instruction, count)

    def _play_slowest_branch(self, conditional: Instruction, count: float) -> float:
        # Each branch adds its events to a list of its own; only the list of the slowest one stays.
        before, slowest = self.events, (-1.0, [])
        for _, name in conditional.called:
            self.events = []
            if branch := self._module.computations.get(name):
                seconds = self.play(branch, count)
                if seconds > slowest[0]:
                    slowest = seconds, self.events
        self.events = before + slowest[1]
        return max(slowest[0], 0.0)


class _Run:
    """One run of one computation: the current time, and the transfers in flight."""

    def __init__(self):
        self.time = 0.0
        self.in_flight: dict[Hashable, tuple[float, Event]] = {}  # end and event
        # Begin, end and event of each transfer, by begin. Transfers that have ended are dropped.
        self._begun: list[tuple[float, float, Event]] = []
        self._free_at: dict[Hashable, float] = {}  # when each link is free again

    def begin(self, key: Hashable, event: Event) -> None:
        """Begins a transfer as soon as all its links are free."""
        assert event.transfer is not None
        busy_s = event.transfer.busy_s
        begin = max([self.time, *(self._free_at.get(link, 0.0) for link in busy_s)])
        for link, seconds in busy_s.items():
            self._free_at[link] = begin + seconds
        end = begin + event.transfer.seconds
        self.in_flight[key] = (end, event)
        self._begun = [*(b for b in self._begun if b[1] > self.time), (begin, end, event)]

    def wait(self, key: Hashable) -> None:
        """Advances the time to the end of a transfer, and attributes the wait to transfers."""
        if key not in self.in_flight:
            return
        end, event = self.in_flight.pop(key)
        start_of_wait, self.time = self.time, max(self.time, end)
        # Divide the wait backward from `end`. This transfer used its links since its begin. Before
        # that it waited for earlier transfers on one of its links, the latest one first. `end`
        # moves down with each part, so no time counts twice and the parts add up to the wait.
        for begin, other_end, other in reversed(self._begun):
            if other is event or (other_end <= end and _share_links(other, event)):
                part_begin = max(begin, start_of_wait)
                other.exposed_s += max(0.0, min(other_end, end) - part_begin)
                end = min(end, part_begin)


def _share_links(first: Event, second: Event) -> bool:
    assert first.transfer is not None
    assert second.transfer is not None
    return not first.transfer.busy_s.keys().isdisjoint(second.transfer.busy_s)
