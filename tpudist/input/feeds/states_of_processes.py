"""Positions of the datasets of all processes in one pass, which are only read to save them.

Each process leaves the positions of its own datasets in the coordination service, before it
announces the steps. They go to another process only when it asks for the state of an iterator, so
any process may ask for it, at any time, and no other one has to answer.
"""

import base64
import json
import threading
import weakref
import zlib
from collections.abc import Collection
from typing import Any, TypedDict

import jax

from tpudist.input.feeds.step_counts import StepCounts
from tpudist.input.iterator_state import State, UnreadState
from tpudist.processes.board import Board

_PLANS, _STATES = "plans", "states"


class _Posted(TypedDict):
    """The positions that a process has posted in one round.

    Attributes:
        first: First step of `states`.
        states: Positions of the process's datasets after each step.
        ended: Whether all later steps have the last position, too.
    """

    first: int
    states: list[list[State]]
    ended: bool


class PassStates:
    """The positions after each step of one pass.

    Args:
        name: Name of the pass, the same in all processes.
        process: Position of this process among the processes of the pass.
        num_processes: Number of processes.
        next_step: First step of the pass.

    Attributes:
        name: See Args.
        counts: Rows of all steps, from which all positions follow; None if they are posted.
        is_over: Whether this process makes no more rounds in the pass.
    """

    def __init__(self, name: str, process: int, num_processes: int, next_step: int):
        self.name = name
        self.counts: StepCounts | None = None
        self.is_over = False
        self._board = Board(name)
        self._process = process
        self._num_processes = num_processes
        self._next_step = next_step
        self._lock = threading.Lock()
        # The states that this process may still request, because something refers to them.
        self._live: weakref.WeakSet[StateOfProcesses] = weakref.WeakSet()
        self._round = 0
        self._num_removed = 0
        self._ends: list[int] = []  # of each round: the step after the last one of any process

    def post_plan(self, plan: dict[str, Any]) -> None:
        """Leaves the plan of this process's datasets."""
        self._post(_PLANS, json.dumps(plan))

    def plans(self) -> list[dict[str, Any]]:
        """Returns the plan of each process's datasets."""
        texts = self._board.read_all(_PLANS)
        return [json.loads(texts[str(i)]) for i in range(self._num_processes)]

    def state_after(self, step: int, local: State) -> "StateOfProcesses":
        """Returns the state after a step; the steps come in order.

        Args:
            step: The step.
            local: The part of the state that every process has.
        """
        state = StateOfProcesses(self, step, local)
        with self._lock:
            self._live.add(state)
            self._next_step = step + 1
        return state

    @property
    def oldest(self) -> int:
        """First step whose state this process may still ask for."""
        with self._lock:
            return min([self._next_step, *(state.step for state in self._live)])

    @property
    def is_needed(self) -> bool:
        """Whether this process may still need the texts of the pass. Once False, it stays False."""
        with self._lock:
            return not self.is_over or bool(self._live)

    def post(self, first: int, states: list[list[State]], *, ended: bool) -> None:
        """Leaves the positions after steps from `first` on, for the next round."""
        posted: _Posted = {"first": first, "states": states, "ended": ended}
        # Positions of successive steps are nearly equal, so their text shrinks to a tenth.
        text = base64.b64encode(zlib.compress(json.dumps(posted).encode())).decode()
        self._post(f"{_STATES}/{self._round}", text)

    def _post(self, folder: str, text: str) -> None:
        # An earlier text would stay, and be read as the position of this pass.
        if not self._board.post(f"{folder}/{self._process}", text):
            raise RuntimeError(
                f"Process {jax.process_index()} begins pass '{self.name}' of a dataset, which has "
                "positions already. All processes must create their distributed datasets and begin "
                "their passes in the same order. Check whether one of them creates more or fewer."
            )

    def end_round(self, end: int) -> None:
        """Ends a round, in which no process has posted the position after step `end` or later."""
        self._round += 1
        self._ends.append(end)

    def remove_before(self, step: int) -> None:
        """Removes the positions of rounds that are only about earlier steps, of all processes."""
        while self._num_removed < self._round and self._ends[self._num_removed] <= step:
            self._board.remove(f"{_STATES}/{self._num_removed}")
            self._num_removed += 1

    def datasets_after(self, step: int) -> list[list[State]]:
        """Returns the positions of the datasets of each process after `step`."""
        if self.counts is not None:
            return self.counts.states(step + 1)
        found: dict[int, list[State]] = {}
        for key, text in self._board.read_all(_STATES).items():
            process = int(key.rpartition("/")[2])
            posted: _Posted = json.loads(zlib.decompress(base64.b64decode(text)))
            index = step - posted["first"]
            if posted["ended"] and index >= 0:
                index = min(index, len(posted["states"]) - 1)
            if 0 <= index < len(posted["states"]):
                found[process] = posted["states"][index]
        return [found[i] for i in range(self._num_processes)]


class OpenPasses:
    """The passes through one dataset whose texts are still in the coordination service."""

    def __init__(self) -> None:
        self._passes: dict[str, PassStates] = {}

    def add(self, states: PassStates) -> None:
        """Adds a pass, before its first round."""
        self._passes[states.name] = states

    def list_needed(self) -> list[str]:
        """Returns the names of the passes that this process may still need."""
        return [name for name, states in list(self._passes.items()) if states.is_needed]

    def keep(self, names: Collection[str], *, remove: bool) -> None:
        """Forgets the passes that no process needs.

        Args:
            names: Names of the texts that a process needs.
            remove: Whether to remove the texts of the others, which one process must do.
        """
        for name in [name for name in list(self._passes) if name not in names]:
            del self._passes[name]
            if remove:
                folder, _, number = name.rpartition("/")
                Board(folder).remove(number)


class StateOfProcesses(UnreadState):
    """The state of all processes after one step."""

    def __init__(self, states: PassStates, step: int, local: State):
        self.step = step
        self._states = states
        self._local = local
        self._state: State | None = None

    def read(self) -> State:
        """Returns the state; asks the coordination service for it once."""
        if self._state is None:
            datasets, plans = self._states.datasets_after(self.step), self._states.plans()
            self._state = self._local | {"datasets": datasets, "plans": plans}
        return self._state
