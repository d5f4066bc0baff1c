"""Plays a compiled program through: what runs when, and how long it waits for transfers.

A device computes one instruction after the other, in the order of the schedule. A transfer that an
instruction starts goes on beside the next ones, until an instruction waits for it; what is left of
it then is exposed. Transfers that use the same links wait for each other. A loop is played once,
and counts as often as it runs; what an iteration starts and does not wait for is waited for at its
end, though the next one could hide it.
"""

import dataclasses

from jax.sharding import Mesh

from tpudist.xla.estimate import instruction_time, transfers
from tpudist.xla.estimate.instruction_time import Price
from tpudist.xla.estimate.transfers import Transfer
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction


@dataclasses.dataclass
class Event:
    """An instruction that takes time, or a transfer that it starts.

    Attributes:
        instruction: The instruction.
        count: How often a step runs it.
        price: What computing it takes each time; None if nothing.
        transfer: What it sends each time; None if nothing.
        is_async: Whether the transfer goes on beside other instructions.
        exposed_s: How long others wait for the transfer, each time, be it that they need its result
            or its links.
    """

    instruction: Instruction
    count: float
    price: Price | None = None
    transfer: Transfer | None = None
    is_async: bool = False
    exposed_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step, played through.

    Attributes:
        seconds: How long it takes.
        events: What takes time in it, in order.
    """

    seconds: float
    events: tuple[Event, ...]


def play(module: Module, mesh: Mesh, chip: Chip | None) -> Timeline:
    """Plays one step of `module` on the devices of `mesh`; without a chip, nothing takes time."""
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
        """Plays a computation that runs `count` times a step; returns what it takes each time."""
        run = _Run()
        for instruction in computation.instructions.values():
            self._step(run, instruction, count)
        for key in list(run.under_way):  # what nothing in this computation waits for
            run.wait(key)
        return run.now

    def _step(self, run: "_Run", instruction: Instruction, count: float) -> None:
        role = self._finder.role(instruction)
        if role is not None and role.phase == "done":
            run.wait(role.key)
            return
        event = Event(instruction, count)
        if role is None or role.phase == "whole":
            run.now += self._compute(event)
        if role is not None and role.transfer is not None:
            event.transfer = role.transfer
            event.is_async = role.phase == "start"
            run.begin(role.key, event)
            if role.phase == "whole":
                run.wait(role.key)
        if event.price is not None or event.transfer is not None:
            self.events.append(event)
        if role is None:
            run.now += self._inner(instruction, count)

    def _compute(self, event: Event) -> float:
        if self._rates is None:
            return 0.0
        price = self._rates.price(self._module, event.instruction)
        if price.seconds or price.flops or price.hbm_bytes:
            event.price = price
        return price.seconds

    def _inner(self, instruction: Instruction, count: float) -> float:
        """Plays what an instruction calls; returns what that takes in all."""
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
        return self._dearest_branch(instruction, count)

    def _dearest_branch(self, conditional: Instruction, count: float) -> float:
        before, best = self.events, (-1.0, [])
        for _, name in conditional.called:
            self.events = []
            if branch := self._module.computations.get(name):
                seconds = self.play(branch, count)
                if seconds > best[0]:
                    best = seconds, self.events
        self.events = before + best[1]
        return max(best[0], 0.0)


class _Run:
    """One run of one computation: the time, and the transfers under way."""

    def __init__(self):
        self.now = 0.0
        self.under_way: dict[object, tuple[float, Event]] = {}
        self._begun: list[tuple[float, float, Event]] = []
        self._free_at: dict[object, float] = {}

    def begin(self, key: object, event: Event) -> None:
        """Begins a transfer, as soon as all it needs is free."""
        assert event.transfer is not None
        needs = event.transfer.busy_s
        begin = max([self.now, *(self._free_at.get(link, 0.0) for link in needs)])
        for link, seconds in needs.items():
            self._free_at[link] = begin + seconds
        end = begin + event.transfer.seconds
        self.under_way[key] = (end, event)
        self._begun = [*(b for b in self._begun if b[1] > self.now), (begin, end, event)]

    def wait(self, key: object) -> None:
        """Waits for the end of a transfer, if it is under way.

        The time before it began was spent on those that kept its links.
        """
        if key not in self.under_way:
            return
        end, event = self.under_way.pop(key)
        now, self.now = self.now, max(self.now, end)
        # The wait, from `now` to `end`, is shared out backwards: this transfer had its links from
        # its begin on; before, those had them that began before it and use one of them too.
        for begin, its_end, other in reversed(self._begun):
            if other is event or (its_end <= end and _compete(other, event)):
                waited = max(0.0, min(its_end, end) - max(begin, now))
                other.exposed_s += waited
                end = min(end, max(begin, now))


def _compete(one: Event, other: Event) -> bool:
    needs = [event.transfer.busy_s.keys() for event in (one, other) if event.transfer]
    return len(needs) == 2 and bool(needs[0] & needs[1])
