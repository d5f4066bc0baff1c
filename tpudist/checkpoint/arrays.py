"""How arrays get to disk and back: the one file that knows Orbax.

A step is a directory with two items: `state`, the arrays as a nested dict, as any Orbax program
reads it; and `tpudist`, our own JSON. Orbax writes both into a temporary directory that it renames
when everything is there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from tpudist.checkpoint import entries
from tpudist.checkpoint.entries import Path
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import ARRAYS, CONTENTS


class Writer:
    """Writes steps in the background, one at a time."""

    def __init__(
        self,
        before_commit: Callable[[], None],
        barrier: Callable[..., None] | None,
        timeout_s: float,
    ):
        """A writer.

        Args:
            before_commit: Called in the background, in process 0, when all files of a step are
                written and before it counts as there.
            barrier: How processes wait for each other in the background; None for JAX's own way.
            timeout_s: How long one step may take.
        """
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{ARRAYS: _array_handler(), CONTENTS: ocp.JsonCheckpointHandler()}
            ),
            async_options=ocp.AsyncOptions(
                timeout_secs=max(1, int(timeout_s)),
                barrier_sync_fn=barrier,
                post_finalization_callback=before_commit,
            ),
            # Orbax's own writes what it says of a step in another thread, and may still do so when
            # `before_commit` reads it.
            checkpoint_metadata_store=ocp.metadata.metadata_store(
                enable_write=True, blocking_write=True
            ),
        )

    def begin(self, path: epath.Path, arrays: Mapping[Path, Any], contents: Any) -> None:
        """Copies the arrays to the host and goes on in the background.

        The arrays may be overwritten as soon as this returns.
        """
        items: dict[str, Any] = {CONTENTS: ocp.args.JsonSave(contents)}
        if arrays:
            items[ARRAYS] = ocp.args.PyTreeSave(_nest(arrays))
        self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Waits until the step is there; raises what went wrong."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends what runs in the background."""
        self._checkpointer.close()


def read_arrays(
    path: epath.Path, wanted: Mapping[Path, jax.ShapeDtypeStruct | np.ndarray]
) -> dict[Path, Any]:
    """Reads the arrays of these names, and no others.

    Args:
        path: Of the step's item.
        wanted: Shape, dtype and sharding of each; without a sharding it is read as a numpy array.
    """
    if not wanted:
        return {}
    restore_args = {name: _restore_args(x) for name, x in wanted.items()}
    checkpointer = ocp.Checkpointer(_array_handler())
    try:
        tree = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=_nest(dict.fromkeys(wanted, 0)),
                restore_args=_nest(restore_args),
                partial_restore=True,
            ),
        )
    finally:
        checkpointer.close()
    return {name: _lookup(tree, name) for name in wanted}


def _restore_args(x: Any) -> ocp.RestoreArgs:
    if getattr(x, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
    return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def foreign_item(path: epath.Path) -> tuple[epath.Path, dict[Path, Any]]:
    """The arrays of a step that plain Orbax wrote: where, and the shape and dtype of each."""
    for item in (ARRAYS, "default", *sorted(x.name for x in path.iterdir() if x.is_dir())):
        if (path / item / "_METADATA").exists():
            checkpointer = ocp.Checkpointer(_array_handler())
            try:
                metadata = checkpointer.metadata(path / item)
            finally:
                checkpointer.close()
            tree = getattr(metadata.item_metadata, "tree", metadata.item_metadata)
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            return path / item, {tuple(map(entries.key_name, keys)): x for keys, x in flat}
    raise CheckpointError(
        f"{path} contains no arrays: Orbax saved no item in it as a tree. Check the path."
    )


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # On emulated devices each replica's slice of a mirrored array would be a copy of its own.
    parallel = jax.default_backend() != "cpu"
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=type_handlers.create_type_handler_registry(
            (jax.Array, type_handlers.ArrayHandler(use_replica_parallel=parallel)),
            (np.ndarray, type_handlers.NumpyHandler()),
            (int, type_handlers.ScalarHandler()),
            (float, type_handlers.ScalarHandler()),
        )
    )


def _nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        node = tree
        *parents, last = _parts(path)
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = x
    return tree


def _lookup(tree: Any, path: Path) -> Any:
    for part in _parts(path):
        tree = tree[part]
    return tree


def _parts(path: Path) -> Iterable[str]:
    return [entries.join_path((part,)) for part in path]
