"""The facts that tpudist stores in a Keras variable, in one attribute of it.

Keras copies variables (`copy.deepcopy`, or all attributes at once when it clones a model). A copy
is another variable: it was created in the same place, but no function has assigned it.
"""

import weakref
from typing import Any

import keras

from tpudist.context.frame import Frame


class VariableNotes:
    """The facts of one variable.

    Attributes:
        owner: Distribution of the strategy under which the variable was created, or None.
        frame: Weak reference to the trace that created the variable, or None.
        assigned: The Variable of each strategy whose functions assign this one, by the id of the
            strategy; see `assigned_variables`.
    """

    def __init__(self, variable: keras.Variable | None = None):
        # The notes know their variable, because a copy of all attributes shares the notes object.
        # An id is enough: a copy lives at another address as long as it shares these notes.
        self._variable_id = id(variable)
        self.owner: object = None
        self.frame: weakref.ref[Frame] | None = None
        self.assigned: dict[int, Any] = {}

    def belong_to(self, variable: keras.Variable) -> bool:
        """Returns whether these are the notes of `variable` itself, not of its original."""
        return self._variable_id == id(variable)

    def for_copy(self, variable: keras.Variable | None) -> "VariableNotes":
        """Returns the notes of a copy: the same owner and trace, but no assignments."""
        copy = VariableNotes(variable)
        copy.owner, copy.frame = self.owner, self.frame
        return copy

    def __deepcopy__(self, memo: dict) -> "VariableNotes":
        return self.for_copy(None)

    def __reduce__(self) -> tuple:
        return VariableNotes, ()  # in another process, nothing of this holds


_NO_NOTES = VariableNotes()


def read_notes(variable: keras.Variable) -> VariableNotes:
    """Returns the notes of a variable, not to be changed; empty ones if it has none."""
    notes = vars(variable).get("tpudist_notes")
    if notes is None:
        return _NO_NOTES
    return notes if notes.belong_to(variable) else write_notes(variable)


def write_notes(variable: keras.Variable) -> VariableNotes:
    """Returns the notes of a variable, to be changed."""
    notes = vars(variable).get("tpudist_notes")
    if notes is None:
        notes = VariableNotes(variable)
    elif not notes.belong_to(variable):
        notes = notes.for_copy(variable)
    variable.tpudist_notes = notes
    return notes
