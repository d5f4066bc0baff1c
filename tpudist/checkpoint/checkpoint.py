"""Checkpoint: what belongs to one state, by name."""

from typing import Any

from tpudist.checkpoint import entries


class Checkpoint(entries.Container):
    """Objects that are saved and restored together, each under its attribute's name.

    Objects may be NNX modules, optimizers, metrics and Rngs, which are changed in place;
    `tpudist.Variable`s; arrays and pytrees of them, Python numbers, bools and strings, which are
    replaced on restore; what has `get_state()` and `set_state(state)`, such as a
    `DistributedIterator`; trees of all of these; other Checkpoints. None is nothing. What is
    assigned to an attribute later belongs to it as well, unless its name begins with `_`.

        checkpoint = tpudist.checkpoint.Checkpoint(model=model, optimizer=optimizer, step=0)
        checkpoint.step += 1

    As `tf.train.Checkpoint`; `CheckpointManager` saves and restores it, and it has no `save` of its
    own. What is captured in closures is not found: TensorFlow tracks objects through attributes,
    and so do we.
    """

    def __init__(self, **objects: Any):
        """Of these objects.

        Raises:
            ValueError: A name begins with `_`, or is that of a method.
        """
        for name, x in objects.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(
                    f"{type(self).__name__} was given an object of the name {name!r}, which is "
                    f"taken. Use a name that is no method's and does not begin with '_'."
                )
            setattr(self, name, x)

    def checkpoint_objects(self) -> dict[str, Any]:
        """The objects, by name."""
        return {name: x for name, x in vars(self).items() if not name.startswith("_")}

    def __repr__(self) -> str:
        kinds = ", ".join(f"{k}={type(x).__name__}" for k, x in self.checkpoint_objects().items())
        return f"{type(self).__name__}({kinds})"
