"""Writes arrays to disk and reads them, through Orbax. No other file imports Orbax.

A step is a directory with two Orbax items: `state` has the arrays as a nested dict, which any Orbax
program can read, and `tpudist` has our own JSON.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from tpudist.array_types import PyTree
from tpudist.checkpoint import entries
from tpudist.checkpoint.entries import ValuePath
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import ARRAYS, CONTENTS

Spec: TypeAlias = jax.ShapeDtypeStruct | np.ndarray
"""Shape, dtype and sharding of an array to read; without a sharding it is read with NumPy."""
_ORBAX_METADATA_FILE = "_METADATA"  # Orbax writes it into each item that is a tree


class Writer:
    """Writes steps in the background, one at a time.

    What happens on the disk in one save:

      1. Orbax creates `<step>.orbax-checkpoint-tmp/` and writes the arrays and the JSON into it,
         each process its own shards. Object stores cannot rename, so there it is `<step>/` itself.
      2. All processes meet at a barrier: every file has been written.
      3. `before_commit`, in process 0: the manifest with the checksums of all files, and fsync.
      4. Commit, in process 0: the directory is renamed to `<step>/`; in an object store, the file
         `commit_success.txt` is written.
      5. All processes meet at a second barrier, after which the save has succeeded.

    A crash at any moment leaves the state of the line before, and `Directory.remove_unfinished`
    deletes the temporary directory at the next save. So a committed step always has a manifest, and
    a step without one is not ours.

    Args:
        before_commit: Called in the background, in process 0, after all files of a step are
            written and before the step is committed.
        barrier: Called by Orbax with a key and a timeout; returns when all processes have called
            it. None for JAX's own barrier.
        timeout_s: Maximum seconds for one step.
    """

    def __init__(
        self,
        before_commit: Callable[[], None],
        barrier: Callable[..., None] | None,
        timeout_s: float,
    ):
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{ARRAYS: _array_handler(), CONTENTS: ocp.JsonCheckpointHandler()}
            ),
            async_options=ocp.AsyncOptions(
                timeout_secs=max(1, int(timeout_s)),
                barrier_sync_fn=barrier,
                post_finalization_callback=before_commit,
            ),
            # By default Orbax writes the metadata of a step in another thread, which may still
            # write when `before_commit` computes the checksum.
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
