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

from tpudist.xla.estimate import instruction_time
from tpudist.xla.estimate.instruction_time import Price
from tpudist.xla.estimate.transfers import Transfer, TransferFinder
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


def simulate(module: Module, mesh: Mesh, chip: Chip | None) -> Timeline:
    """Simulates one step of `module` on the devices of `mesh`; without a chip, all times are 0."""
    simulation = _Simulation(module, TransferFinder(module, mesh, chip), chip)
    seconds = simulation.run(module.entry, 1.0)
    return Timeline(seconds, tuple(simulation.events))


class _Simulation:
    def __init__(self, module: Module, finder: TransferFinder, chip: Chip | None):
        self._module = module
        self._finder = finder
        self._rates = instruction_time.Rates.of(chip) if chip else None
        self.events: list[Event] = []

    def run(self, computation: Computation, count: float) -> float:
        """Simulates a computation that runs `count` times per step; returns seconds per run."""
        clock = _Clock()
        for instruction in computation.instructions.values():
            self._step(clock, instruction, count)
        for key in list(clock.in_flight):  # transfers that nothing in this computation waits for
            clock.wait(key)
        return clock.time

    def _step(self, clock: "_Clock", instruction: Instruction, count: float) -> None:
        role = self._finder.role(instruction)
        if role is not None and role.phase == "done":
            clock.wait(role.key)
            return
        event = Event(instruction, count)
        # The start of a transfer only begins it: the device continues with the next instruction.
        if role is None or role.phase == "whole":
            clock.time += self._compute(event)
        if role is not None and role.transfer is not None:
            event.transfer = role.transfer
            event.is_async = role.phase == "start"
            clock.begin(role.key, event)
            if role.phase == "whole":
                clock.wait(role.key)
        if event.price is not None or event.transfer is not None:
            self.events.append(event)
        if role is None:
            clock.time += self._run_callees(instruction, count)

    def _compute(self, event: Event) -> float:
        if self._rates is None:
            return 0.0
        price = self._rates.price(self._module, event.instruction)
        if price.seconds or price.flops or price.hbm_bytes:
            event.price = price
        return price.seconds

    def _run_callees(self, instruction: Instruction, count: float) -> float:
        """Simulates the computations that an instruction calls; returns their seconds."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self._module.trip_counts[instruction.name]
            trips = 1 if trips is None else trips
            body = self._module.computations[instruction.callee("body") or ""]
            return trips * self.run(body, count * trips)
        if opcode in ("call", "async-start", "call-start"):
            callees = self._module.callees_in_schedule(instruction, lambda _: 0.0)
            return sum(self.run(callee, count) for callee in callees)
        if opcode != "conditional":
            return 0.0
        return self._run_slowest_branch(instruction, count)

    def _run_slowest_branch(self, conditional: Instruction, count: float) -> float:
        """Simulates each branch, and keeps only the events of the slowest; returns its seconds."""
        before, outcomes = self.events, []
        for _, name in conditional.called:
            if branch := self._module.computations.get(name):
                self.events = []
                outcomes.append((self.run(branch, count), self.events))
        seconds, events = max(outcomes, key=lambda outcome: outcome[0], default=(0.0, []))
        self.events = before + events
        return seconds


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A transfer that has been issued: its interval, and the transfer that it waits for.

    Attributes:
        event: Event of the transfer.
        begin: Time at which it gets its links.
        end: Time at which its result has arrived.
        blocker: Transfer that releases the last of its links at `begin`; None if all were free when
            it was issued.
    """

    event: Event
    begin: float
    end: float
    blocker: "_Flight | None"


class _Clock:
    """One run of one computation: the current time, and the transfers in flight."""

    def __init__(self):
        self.time = 0.0
        self.in_flight: dict[Hashable, _Flight] = {}
        # When each link is free again, and the transfer that uses it until then.
        self._last_use: dict[Hashable, tuple[float, _Flight]] = {}

    def begin(self, key: Hashable, event: Event) -> None:
        """Begins a transfer as soon as all its links are free."""
        assert event.transfer is not None
        begin, blocker = self.time, None
        for link in event.transfer.busy_s:
            free_at, user = self._last_use.get(link, (0.0, None))
            if free_at > begin:
                begin, blocker = free_at, user
        flight = _Flight(event, begin, begin + event.transfer.seconds, blocker)
        for link, seconds in event.transfer.busy_s.items():
            self._last_use[link] = (begin + seconds, flight)
        self.in_flight[key] = flight

    def wait(self, key: Hashable) -> None:
        """Advances the time to the end of a transfer, and attributes the wait to transfers."""
        flight = self.in_flight.pop(key, None)
        if flight is None:
            return
        start_of_wait, end = self.time, flight.end
        self.time = max(start_of_wait, end)
        # Divide the wait backward from its end. The transfer itself causes the wait since its
        # begin. Before, its blocker does since the blocker's begin, and so on. A blocker releases
        # the link at the begin of the transfer that it blocks, so the parts add up to the wait.
        while flight is not None and end > start_of_wait:
            begin = max(flight.begin, start_of_wait)
            flight.event.exposed_s += end - begin
            flight, end = flight.blocker, begin
