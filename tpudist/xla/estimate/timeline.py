"""Simulates one step of a compiled program: when each instruction runs, and how long it waits.

A device runs one instruction after the other, in the order of the schedule. A transfer continues
during the instructions after its start, until an instruction waits for it; the rest of the transfer
is then exposed. Transfers that use the same links wait for each other. The body of a loop is
simulated once and counted by its trip count. A transfer that an iteration starts and does not wait
for ends with the iteration, although the next iteration could hide it.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator

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
class _Run:
    """Runs an instruction, begins its transfer, or both; `phase` and `key` come from its `Role`."""

    event: Event
    phase: str | None
    key: Hashable


@dataclasses.dataclass(frozen=True)
class _Wait:
    """Waits for a transfer."""

    key: Hashable


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Runs other actions several times."""

    actions: "_Actions"
    trips: float


@dataclasses.dataclass
class Conditional:
    """Runs one of several lists of actions: the slowest, which the first simulation finds.

    If the `shares` of the runs are known, all branches run, each as often as its share. A branch
    that calls the host runs only if all do: it reports an error, or writes a log now and then.

    Attributes:
        instruction: The conditional.
        count: Runs per step.
        branches: Actions of each branch.
        shares: Share of the runs of each branch, if they are known.
        counted: Number of the branch that the step counts, if they are not.
        seconds: Seconds of each branch per run.
    """

    instruction: Instruction
    count: float
    branches: "list[_Actions]"
    shares: tuple[float, ...] | None = None
    counted: int = 0
    seconds: tuple[float, ...] = ()

    def select(self) -> "list[_Actions]":
        """Returns the branches that count."""
        if self.shares:
            return self.branches
        return self.branches[self.counted :][:1]


_Actions = list[_Run | _Wait | _Loop | Conditional]
SecondsOf = Callable[[Event], float]
"""Returns the seconds of one run of an event: of its computation or of its transfer."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: Time of the step.
        events: Events that take time, in order.
        num_slices: Number of slices that run the step.
        conditionals: Conditionals with several branches, whose choices are not known.
    """

    seconds: float
    events: tuple[Event, ...]
    num_slices: int = 1
    _actions: _Actions = dataclasses.field(default_factory=list, repr=False)
    conditionals: tuple[Conditional, ...] = ()

    def replay(self, compute: SecondsOf, transfer: SecondsOf) -> float:
        """Returns the time of the step with other times of its events, in the same schedule."""
        return _Player(compute, transfer, is_first=False).play(self._actions)


def simulate(module: Module, mesh: Mesh, chip: Chip | None) -> Timeline:
    """Simulates one step of `module` on the devices of `mesh`; without a chip, all times are 0."""
    finder = TransferFinder(module, mesh, chip)
    actions = _Reader(module, finder, chip).read(module.entry, 1.0)
    seconds = _Player(compute_seconds, transfer_seconds, is_first=True).play(actions)
    events, conditionals = tuple(_events(actions)), tuple(_conditionals(actions))
    return Timeline(seconds, events, finder.num_slices, actions, conditionals)


def compute_seconds(event: Event) -> float:
    """Returns the estimated seconds of the computation of an event."""
    return event.price.seconds if event.price else 0.0


def transfer_seconds(event: Event) -> float:
    """Returns the estimated seconds of the transfer of an event."""
    return event.transfer.seconds if event.transfer else 0.0


def _events(actions: _Actions) -> Iterator[Event]:
    """Yields the events that a step runs: those of the slowest branch if the choice is unknown."""
    for action in actions:
        if isinstance(action, _Run):
            yield action.event
        elif isinstance(action, _Loop):
            yield from _events(action.actions)
        elif isinstance(action, Conditional):
            for branch in action.select():
                yield from _events(branch)


def _conditionals(actions: _Actions) -> Iterator[Conditional]:
    """Yields the conditionals that a step runs, whose choices are not known."""
    for action in actions:
        if isinstance(action, _Loop):
            yield from _conditionals(action.actions)
        elif isinstance(action, Conditional):
            if len(action.branches) > 1 and not action.shares:
                yield action
            for branch in action.select():
                yield from _conditionals(branch)


class _Reader:
    """Reads a program into actions, so that it is simulated several times but priced once."""

    def __init__(self, module: Module, finder: TransferFinder, chip: Chip | None):
        self._module = module
        self._finder = finder
        self._rates = instruction_time.Rates.of(chip) if chip else None

    def read(self, computation: Computation, count: float) -> _Actions:
        """Returns the actions of a computation that runs `count` times per step."""
        actions: _Actions = []
        for instruction in computation.instructions.values():
            role = self._finder.role(instruction)
            if role is not None and role.phase == "done":
                actions.append(_Wait(role.key))
                continue
            event = Event(instruction, count)
            # The start of a transfer only begins it: the device continues with the next one.
            if role is None or role.phase == "whole":
                event.price = self._price(instruction)
            if role is not None:
                event.transfer, event.is_async = role.transfer, role.phase == "start"
            if event.price is not None or event.transfer is not None:
                phase, key = (role.phase, role.key) if role else (None, None)
                actions.append(_Run(event, phase, key))
            if role is None:
                actions.extend(self._read_callees(instruction, count))
        return actions

    def _price(self, instruction: Instruction) -> Price | None:
        if self._rates is None:
            return None
        price = self._rates.price(self._module, instruction)
        return price if price.seconds or price.flops or price.hbm_bytes else None

    def _read_callees(self, instruction: Instruction, count: float) -> _Actions:
        """Returns the actions of the computations that an instruction calls."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self._module.trip_counts[instruction.name]
            trips = 1 if trips is None else trips
            body = self._module.computations[instruction.callee("body") or ""]
            return [_Loop(self.read(body, count * trips), trips)]
        if opcode not in ("call", "async-start", "call-start", "conditional"):
            return []
        callees = (self._module.computations.get(name) for _, name in instruction.called)
        bodies = [callee for callee in callees if callee]
        if opcode != "conditional":
            return [_Loop(self.read(body, count), 1) for body in bodies]
        shares = self._module.shares_of(instruction)
        counts = [count * share for share in shares] if shares else [count] * len(bodies)
        read = [self.read(body, times) for body, times in zip(bodies, counts, strict=True)]
        return [Conditional(instruction, count, read, shares)]


class _Player:
    """Runs a clock over actions.

    Args:
        compute: Seconds of the computation of an event.
        transfer: Seconds of the transfer of an event.
        is_first: Whether to choose the slowest branches, and to record exposed times in the events.
    """

    def __init__(self, compute: SecondsOf, transfer: SecondsOf, *, is_first: bool):
        self._compute = compute
        self._transfer = transfer
        self._is_first = is_first

    def play(self, actions: _Actions) -> float:
        """Returns the seconds of one run of a computation."""
        clock = _Clock(records=self._is_first)
        for action in actions:
            if isinstance(action, _Run):
                self._run(clock, action)
            elif isinstance(action, _Wait):
                clock.wait(action.key)
            elif isinstance(action, _Loop):
                clock.time += action.trips * self.play(action.actions)
            else:
                clock.time += self._run_branches(action)
        for key in list(clock.in_flight):  # transfers that nothing in this computation waits for
            clock.wait(key)
        return clock.time

    def _run(self, clock: "_Clock", action: _Run) -> None:
        event = action.event
        if event.price is not None:
            clock.time += self._compute(event)
        if event.transfer is not None:
            clock.begin(action.key, event, self._transfer(event))
            if action.phase == "whole":
                clock.wait(action.key)

    def _run_branches(self, action: Conditional) -> float:
        if not action.branches:
            return 0.0
        if action.shares:
            seconds = map(self.play, action.branches)
            return sum(x * share for x, share in zip(seconds, action.shares, strict=True))
        if self._is_first:
            action.seconds = tuple(self.play(branch) for branch in action.branches)
            every = range(len(action.branches))
            usual = [i for i in every if not _calls_host(action.branches[i])] or every
            action.counted = max(usual, key=lambda i: action.seconds[i])
            return action.seconds[action.counted]
        return self.play(action.branches[action.counted])


def _calls_host(actions: _Actions) -> bool:
    events = _events(actions)
    return any(event.price is not None and event.price.kind == "host" for event in events)


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

    def __init__(self, *, records: bool = True):
        self.time = 0.0
        self._records = records
        self.in_flight: dict[Hashable, _Flight] = {}
        # When each link is free again, and the transfer that uses it until then.
        self._last_use: dict[Hashable, tuple[float, _Flight]] = {}

    def begin(self, key: Hashable, event: Event, seconds: float) -> None:
        """Begins a transfer of `seconds` as soon as all its links are free."""
        assert event.transfer is not None
        begin, blocker = self.time, None
        for link in event.transfer.busy_s:
            free_at, user = self._last_use.get(link, (0.0, None))
            if free_at > begin:
                begin, blocker = free_at, user
        flight = _Flight(event, begin, begin + seconds, blocker)
        estimated_s = event.transfer.seconds
        factor = seconds / estimated_s if estimated_s else 1.0
        for link, busy_s in event.transfer.busy_s.items():
            self._last_use[link] = (begin + factor * busy_s, flight)
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
            if self._records:
                flight.event.exposed_s += end - begin
            flight, end = flight.blocker, begin
