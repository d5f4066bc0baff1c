"""Survivor: what a program says of its state, so that it goes on when a process is lost."""

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tpudist.checkpoint import CheckpointManager, entry_values, restore_match
from tpudist.checkpoint.checkpoint import Checkpoint
from tpudist.checkpoint.entries import ARRAY, KEY, STATE, VALUE, Entry, find_entries
from tpudist.goodput import goodput
from tpudist.processes import host_copies
from tpudist.processes.generations import GenerationEnded


@dataclasses.dataclass(frozen=True)
class StateCopy:
    """The state of a run in memory of the host.

    Attributes:
        commit: How often state was committed, with this one.
        leaves: What there is, by name: `kind`, `shape`, `dtype`, and the `value` of what is no
            array.
        aliases: Other names.
        arrays: By name; random keys as numbers.
    """

    commit: int
    leaves: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    arrays: Mapping[str, np.ndarray]


class Copies:
    """The newest state that is whole in memory of the host, and those that are on their way.

    Attributes:
        newest: None if there is none yet.
        thread: What finishes them.
    """

    def __init__(self, newest: StateCopy | None):
        """Begins with one that is known."""
        self.newest = newest
        self._waiting: queue.SimpleQueue[StateCopy | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._finish, name="tpudist copies", daemon=True)
        self.thread.start()

    def begin(self, commit: int, state: Checkpoint) -> None:
        """Copies a state; the arrays may be overwritten as soon as this returns."""
        found = find_entries(state)
        leaves: dict[str, dict[str, Any]] = {}
        arrays: dict[str, Any] = {}
        on_devices: dict[str, jax.Array] = {}
        for entry in found.entries:
            value = entry.read()
            entry = entry.fit(np.shape(value)) if entry.kind == ARRAY else entry
            leaf = {"kind": entry.kind, "shape": list(entry.shape), "dtype": entry.dtype}
            leaves[entry.name] = leaf
            if entry.kind in (VALUE, STATE):
                leaf["value"] = value
            elif isinstance(value, jax.Array):
                on_devices[entry.name] = jax.random.key_data(value) if entry.kind == KEY else value
            else:
                arrays[entry.name] = np.array(value)
        copies = host_copies.begin(list(on_devices.values()))
        arrays |= zip(on_devices, copies, strict=True)
        self._waiting.put(StateCopy(commit, leaves, found.aliases, arrays))

    def end(self, wait_s: float) -> StateCopy | None:
        """The newest, after a moment for those that are on their way; no more come."""
        self._waiting.put(None)
        self.thread.join(wait_s)
        return self.newest

    def _finish(self) -> None:
        while (state := self._waiting.get()) is not None:
            try:
                arrays = {
                    name: host_copies.finish(x) if isinstance(x, jax.Array) else x
                    for name, x in state.arrays.items()
                }
            except Exception:  # a process was lost in this step; the type varies
                return
            self.newest = dataclasses.replace(state, arrays=arrays)
            del state, arrays


class Survivor:
    """What a program that survives is given: where its state comes from, and goes to.

    Attributes:
        generation: Number of sets of processes before this one.
    """

    def __init__(self, generation: int, copies: Copies, every: int, link: "Link"):
        """Created by `survive`."""
        self.generation = generation
        self._copies, self._every, self._link = copies, every, link
        self._commits = copies.newest.commit if copies.newest else 0
        self._manager: CheckpointManager | None = None

    @property
    def num_commits(self) -> int:
        """Number of commits of the run, in all generations."""
        return self._commits

    def restore(self, state: Checkpoint, manager: CheckpointManager | None = None) -> bool:
        """Restores the newest state that a running process has in memory into `state`.

        If no process has a state, as at the start, the manager restores it from disk if you pass
        one: `manager.restore_or_initialize()`.

        Args:
            state: Objects like the committed ones, on the devices of this generation.
            manager: Manager of checkpoints of the same state on disk. It also saves the state when
                all processes receive a request to end (SIGTERM).

        Returns:
            Whether a state was restored. Otherwise the objects are unchanged.

        Raises:
            CheckpointError: If the objects do not match the committed ones; lists all differences.
        """
        self._manager = manager
        self._link.platform = jax.default_backend()
        newest = self._copies.newest
        if newest is None:
            return manager is not None and manager.restore_or_initialize() is not None
        found = find_entries(state)
        match = restore_match.match(
            found, newest.leaves, newest.aliases, f"of commit {newest.commit} in memory"
        )
        used: set[str] = set()
        for entry, name in match.pairs:
            if entry.kind in (VALUE, STATE):
                entry.write(newest.leaves[name]["value"])
                continue
            value = _place(entry, newest.arrays[name])
            entry.write(entry_values.place(entry, value, again=name in used))
            used.add(name)
        found.finish()
        return True

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def commit(self, state: Checkpoint) -> None:
        """Reports the state after a step. Every `every`-th commit keeps a copy of it.

        All processes call this at the same place, with all objects that the next step needs: model,
        optimizer, iterator, random streams. Returns when the devices have been asked for copies,
        which takes no more time than a step on them. A generation ends here if processes join, or
        if one received a request to end.
        """
        self._commits += 1
        if self._link.is_over:
            raise GenerationEnded
        self._link.platform = jax.default_backend()
        is_last = self._link.is_last(self._commits)
        if is_last or self._commits % self._every == 0:
            self._copies.begin(self._commits, state)
        if is_last:
            if self._link.ends_all and self._manager is not None:
                self._manager.save(force=True)
                self._manager.wait()
            raise GenerationEnded


class Link:
    """What a Survivor asks of those who look after its process.

    Attributes:
        is_over: Whether its generation has ended.
        ends_all: Whether all processes end at the last commit.
        platform: Of the devices; None until it is known that JAX has them.
    """

    is_over = False
    ends_all = False
    platform: str | None = None

    def is_last(self, commit: int) -> bool:
        """Called with each commit: whether the generation ends with it. May wait."""
        return False


def _place(entry: Entry, value: np.ndarray) -> Any:
    """As a restore from disk would give it: on the devices that the entry has, if they are many."""
    target = entry_values.target(entry)
    if target.sharding is None or jax.process_count() == 1:
        return value
    return jax.make_array_from_callback(value.shape, target.sharding, value.__getitem__)
