"""Writes arrays to disk and reads them, through Orbax. No other file imports Orbax.

A step is a directory with two Orbax items: `state` has the arrays as a nested dict, which any Orbax
program can read, and `tpudist` has our own JSON.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from tpudist.array_types import PyTree
from tpudist.checkpoint import entries, manifest
from tpudist.checkpoint.entries import ValuePath
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import ARRAYS, CONTENTS, TEMPORARY_SUFFIX
from tpudist.checkpoint.one_save import Barrier

Spec: TypeAlias = jax.ShapeDtypeStruct | np.ndarray
"""Shape, dtype and sharding of an array to read; without a sharding it is read with NumPy."""
_ORBAX_METADATA_FILE = "_METADATA"  # Orbax writes it into each item that is a tree


class Writer:
    """Writes steps in the background, one at a time.

    What happens on the disk in one save:

      1. Orbax creates `<step>.orbax-checkpoint-tmp/` and writes the arrays and the JSON into it,
         each process its own shards. Object stores cannot rename, so there it is `<step>/` itself.
      2. Each process computes the checksums of the files with its shards.
      3. All processes meet at a barrier, where process 0 receives the checksums: every file with
         shards has been written.
      4. Process 0 merges the indices of the shards, and writes the manifest with the checksums of
         all files, and fsync. It reads only the files that it wrote itself.
      5. Commit, in process 0: the directory is renamed to `<step>/`; in an object store, the file
         `commit_success.txt` is written.
      6. All processes meet at a second barrier, after which the save has succeeded.

    A crash at any moment leaves the state of the line before, and `Directory.remove_unfinished`
    deletes the temporary directory at the next save. So a committed step always has a manifest, and
    a step without one is not ours.

    Args:
        barrier: Barrier of the background threads of all processes.
        timeout_s: Maximum seconds for one step.
    """

    def __init__(self, barrier: Barrier, timeout_s: float):
        self._barrier = barrier
        self._path = epath.Path()
        # Checksums of the files with shards, in process 0; None before the first barrier of a step.
        self._sums: manifest.Sums | None = None
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{ARRAYS: _array_handler(), CONTENTS: ocp.JsonCheckpointHandler()}
            ),
            async_options=ocp.AsyncOptions(
                timeout_secs=max(1, int(timeout_s)),
                barrier_sync_fn=self._meet if jax.process_count() > 1 else None,
                post_finalization_callback=self._write_manifest,  # in process 0
            ),
            # By default Orbax writes the metadata of a step in another thread, which may still
            # write when `_write_manifest` computes the checksum.
            checkpoint_metadata_store=ocp.metadata.metadata_store(
                enable_write=True, blocking_write=True
            ),
        )

    def begin(
        self,
        path: epath.Path,
        arrays: Mapping[ValuePath, jax.Array | np.ndarray],
        contents: Mapping[str, Any],
    ) -> None:
        """Copies the arrays to the host, and starts to write them in the background.

        The arrays may be overwritten after this has returned.
        """
        self._path, self._sums = path, None
        items: dict[str, Any] = {CONTENTS: ocp.args.JsonSave(contents)}
        if arrays:
            items[ARRAYS] = ocp.args.PyTreeSave(_nest(arrays))
        self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Waits until the step is committed; raises the error if it failed."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        self._checkpointer.close()

    def _meet(self, key: str, timeout_ms: int) -> None:
        """Waits for the other processes; Orbax calls it, twice in each step."""
        start = time.monotonic()
        text = ""
        if self._sums is None:  # in the first round
            text = json.dumps(manifest.sum_shards(self._place(), jax.process_index()))
        timeout_s = timeout_ms / 1000 - (time.monotonic() - start)
        texts = self._barrier.meet(text, max(1.0, timeout_s))
        if self._sums is None:
            self._sums = {name: x for text in texts for name, x in json.loads(text).items()}

    def _write_manifest(self) -> None:
        manifest.write(self._place(), self._sums or {})

    def _place(self) -> epath.Path:
        """Returns the directory of the step before its commit; object stores cannot rename it."""
        hidden = self._path.with_name(self._path.name + TEMPORARY_SUFFIX)
        return hidden if hidden.exists() else self._path


def read_arrays(path: epath.Path, specs: Mapping[ValuePath, Spec]) -> dict[ValuePath, Any]:
    """Reads some of the arrays of a step.

    Args:
        path: Directory of the item that contains the arrays.
        specs: Path of each array to read -> its shape, dtype and sharding.
    """
    if not specs:
        return {}
    restore_args = {name: _restore_args(x) for name, x in specs.items()}
    checkpointer = ocp.Checkpointer(_array_handler())
    try:
        tree = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                # Only the structure counts; `restore_args` has how to read each leaf.
                item=_nest(dict.fromkeys(specs, 0)),
                restore_args=_nest(restore_args),
                partial_restore=True,
            ),
        )
    finally:
        checkpointer.close()
    return {name: _lookup(tree, name) for name in specs}


def _restore_args(x: Spec) -> ocp.RestoreArgs:
    if isinstance(x, np.ndarray) or x.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
    return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def foreign_item(path: epath.Path) -> tuple[epath.Path, dict[ValuePath, Any]]:
    """Returns the item with the arrays of a step that plain Orbax wrote, and their metadata."""
    # Orbax's CheckpointManager calls the item of a single tree `default`; other names are the
    # user's choice.
    for item in (ARRAYS, "default", *sorted(x.name for x in path.iterdir() if x.is_dir())):
        if (path / item / _ORBAX_METADATA_FILE).exists():
            checkpointer = ocp.Checkpointer(_array_handler())
            try:
                metadata = checkpointer.metadata(path / item)
            finally:
                checkpointer.close()
            # Orbax's metadata: older versions return the tree itself.
            tree = getattr(metadata.item_metadata, "tree", metadata.item_metadata)
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            return path / item, {tuple(map(entries.key_name, keys)): x for keys, x in flat}
    raise CheckpointError(
        f"{path} contains no arrays: Orbax saved no item in it as a tree. Check the path."
    )


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # With this option each replica writes a slice of a mirrored array. On emulated devices, which
    # share the host's memory and cores, the slices are only additional copies.
    parallel = jax.default_backend() != "cpu"
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=type_handlers.create_type_handler_registry(
            (jax.Array, type_handlers.ArrayHandler(use_replica_parallel=parallel)),
            (np.ndarray, type_handlers.NumpyHandler()),
            # Plain Orbax stores Python numbers in this way; our own are in the JSON.
            (int, type_handlers.ScalarHandler()),
            (float, type_handlers.ScalarHandler()),
        )
    )


def _nest(flat: Mapping[ValuePath, Any]) -> dict[str, Any]:
    # No path is the beginning of another one: a value is not also a container.
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        node = tree
        *parents, last = _parts(path)
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = x
    return tree


def _lookup(tree: PyTree, path: ValuePath) -> Any:
    for part in _parts(path):
        tree = tree[part]
    return tree


def _parts(path: ValuePath) -> Iterable[str]:
    # Orbax makes names of files of these, so each part is escaped.
    return [entries.join_path((part,)) for part in path]
