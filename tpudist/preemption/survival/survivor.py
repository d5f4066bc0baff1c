"""Survivor: the object by which a program commits and restores its state in memory.

Copies of the state are made on the devices and moved to the host by a thread, so a commit does not
wait. If steps are faster than the thread, it leaves out copies: at most two are on the devices.
Each process has the whole state: every process that remains can continue, and send the state to
others.
"""

import contextlib
import dataclasses
import logging
import queue
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
from tpudist.processes.host import Queue, this_host

_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class StateCopy:
    """A copy of the state of a run in host memory.

    Attributes:
        commit: Number of the commit, from 1.
        leaves: Name of each value -> its `kind`, `shape` and `dtype`, and the `value` if it is not
            an array; as in a checkpoint.
        aliases: Other names -> names in `leaves`.
        arrays: Name of each array -> the array; random keys as numbers.
    """

    commit: int
    leaves: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    arrays: Mapping[str, np.ndarray]


class Copies:
    """The newest complete copy of the state in host memory, and unfinished newer ones.

    Args:
        newest: Copy to begin with, or None.

    Attributes:
        newest: Newest complete copy, or None.
        thread: Thread that completes the copies. It may wait forever for a lost process.
    """

    def __init__(self, newest: StateCopy | None):
        self.newest = newest
        self._waiting: Queue = this_host().queue()
        self.thread = this_host().start_thread(self._finish, name="tpudist copies")

    def begin(self, commit: int, state: Checkpoint) -> None:
        """Starts to copy a state; the arrays may be overwritten after this has returned."""
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
        self._replace_waiting(StateCopy(commit, leaves, found.aliases, arrays))

    def end(self, wait_s: float) -> StateCopy | None:
        """Stops after a moment for unfinished copies; returns the newest complete copy."""
        self._waiting.put(None)
        self.thread.join(wait_s)
        return self.newest

    def _replace_waiting(self, state: StateCopy) -> None:
        # Only the newest copy counts, and an older one would keep memory of the devices. The queue
        # has at most one: this thread alone adds states. Without a lock, which an exception of
        # `generations.raise_in` could leave locked.
        with contextlib.suppress(queue.Empty):
            if self._waiting.get(block=False) is None:  # `end` was called meanwhile
                self._waiting.put(None)
                return
        self._waiting.put(state)

    def _finish(self) -> None:
        while (state := self._waiting.get()) is not None:
            try:
                arrays = {
                    name: host_copies.finish(x) if isinstance(x, jax.Array) else x
                    for name, x in state.arrays.items()
                }
            except Exception as error:  # jaxlib's type varies
                # A process was lost in this step, or this host has too little memory now.
                _log.info("Commit %d has no copy on the host: %s", state.commit, error)
                continue
            # One assignment: other threads see the old copy or the new one, never a part.
            self.newest = dataclasses.replace(state, arrays=arrays)
            del state, arrays  # else the loop keeps a third copy while it waits


class Survivor:
    """Restores the state of a program from memory, and commits it there; see `survive`.

    Without a supervisor, too: `restore` works in the same way after a commit.

    Attributes:
        generation: Number of the generation. 0 without a supervisor, where there is only one;
            otherwise the first one is 1.
    """

    def __init__(self, generation: int, copies: Copies, commits_per_copy: int, link: "Link"):
        self.generation = generation
        self._copies, self._commits_per_copy, self._link = copies, commits_per_copy, link
        self._num_commits = copies.newest.commit if copies.newest else 0
        self._manager: CheckpointManager | None = None

    @property
    def num_commits(self) -> int:
        """Number of commits of the run, in all generations."""
        return self._num_commits

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
        # For the supervisor's order to restart: the main thread must not start JAX to find it out.
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
            # The program may change an array of the host in place, but the copy must stay as it is:
            # other processes fetch it, and the next generation may begin with it.
            is_shared = entry.on_host or name in used
            entry.write(entry_values.place(entry, value, is_shared=is_shared))
            used.add(name)
        found.finish()
        return True

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def commit(self, state: Checkpoint) -> None:
        """Reports the state after a step. One of each `every` commits keeps a copy of it.

        All processes call this at the same place, with all objects that the next step needs: model,
        optimizer, iterator, random streams. Returns when the copies on the devices are dispatched,
        which takes no more time than a step. A generation ends here if processes join, or if one
        received a request to end.
        """
        self._num_commits += 1
        if self._link.is_over:
            raise GenerationEnded
        self._link.platform = jax.default_backend()  # the program need not call `restore`
        is_last = self._link.is_last(self._num_commits)
        if is_last or self._num_commits % self._commits_per_copy == 0:
            self._copies.begin(self._num_commits, state)
        if is_last:
            if self._link.ends_all and self._manager is not None:
                self._manager.save(force=True)
                self._manager.wait()
            raise GenerationEnded


class Link:
    """The connection of a Survivor to its supervisor; this class is for programs without one.

    Attributes:
        is_over: Whether the generation has ended.
        ends_all: Whether all processes end at the last commit.
        platform: Platform of the devices; None until JAX has started them.
    """

    is_over = False
    ends_all = False
    platform: str | None = None

    def is_last(self, commit: int) -> bool:
        """Returns whether the generation ends with this commit; may wait for the others."""
        return False


def _place(entry: Entry, value: np.ndarray) -> np.ndarray | jax.Array:
    """Returns the value as a restore from disk would: sharded over processes like its entry."""
    target = entry_values.target(entry)
    if target.sharding is None or jax.process_count() == 1:
        return value
    return jax.make_array_from_callback(value.shape, target.sharding, value.__getitem__)
