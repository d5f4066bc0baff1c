"""Paths of saved Keras models and weights: Keras 3 rejects file extensions that Keras 2 accepts.

The port corrects a path if it can correct all calls that write or read the same file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from tpudist.port.analysis.file_accesses import MODEL, WEIGHTS, FileAccess, find_accesses
from tpudist.port.analysis.file_paths import PathEnd
from tpudist.port.analysis.nodes import code_of, function_name, keyword_name
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.guide_sections import (
    LOAD_STATUS,
    LOADED_PATH,
    MODEL_PATH,
    SAVE_ARGUMENT,
    WEIGHTS_PATH,
    Advice,
)

SUFFIXES = {MODEL: ".keras", WEIGHTS: ".weights.h5"}
# Longer extensions first: ".weights.hdf5" also ends in ".hdf5".
_REPLACES = {
    MODEL: (".hdf5", ".hdf", ".ckpt", ".tf", ".pb"),
    WEIGHTS: (".weights.hdf5", ".hdf5", ".hdf", ".h5", ".keras", ".ckpt", ".tf"),
}
# Functions whose result does not depend on the file extension.
_FORMAT_NEUTRAL = ("os.path.exists", "os.path.isfile", "os.remove", "tensorflow.io.gfile.exists")


class SavedFiles(Transformer):
    """Corrects the file extensions of models and weights."""

    def __init__(self, program: Program):
        """Finds the corrections."""
        super().__init__(program)
        accesses = program.once(find_accesses)
        self._new_nodes: dict[cst.CSTNode, cst.CSTNode] = {}
        # Calls that lose `save_format`.
        self._calls_without_format: set[cst.Call] = set()
        for access, end in _corrections(program, accesses):
            assert access.end is not None
            assert access.end.node is not None
            assert end.node is not None
            self._new_nodes[access.end.node] = end.node
            self._calls_without_format.add(access.call)
        # An argument that `save_weights` does not have in Keras 3, where the path decides.
        self._calls_without_format |= {
            x.call for x in accesses if x.kind == WEIGHTS and x.is_certain and not x.is_load
        }

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.BaseExpression:
        """Corrects a path."""
        new = self._new_nodes.get(original_node)
        return new.deep_clone() if isinstance(new, cst.SimpleString) else updated_node

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.BaseExpression:
        """Corrects an f-string that ends in a number."""
        new = self._new_nodes.get(original_node)
        if not isinstance(new, cst.FormattedString):
            return updated_node
        return updated_node.with_changes(parts=[*updated_node.parts, new.parts[-1]])

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        """Corrects the end of an f-string."""
        new = self._new_nodes.get(original_node)
        return new.deep_clone() if isinstance(new, cst.FormattedStringText) else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Removes `save_format`."""
        if original_node not in self._calls_without_format:
            return updated_node
        args = [
            arg
            for arg in updated_node.args
            if keyword_name(arg) != "save_format"
            or not isinstance(arg.value, cst.SimpleString | cst.Name)
        ]
        if len(args) == len(updated_node.args):
            return updated_node
        if args:
            args[-1] = args[-1].with_changes(comma=updated_node.args[-1].comma)
        return updated_node.with_changes(args=args)


def find_wrong_accesses(program: Program) -> list[tuple[cst.CSTNode, str, Advice]]:
    """Returns the calls that Keras 3 rejects, each with its name and the advice."""
    found: list[tuple[cst.CSTNode, str, Advice]] = []
    for access in program.once(find_accesses):
        function = access.call.func
        name = code_of(function)
        if access.is_wrong and access.is_load:
            found.append((function, name, LOADED_PATH))
        elif access.is_wrong:
            found.append((function, name, MODEL_PATH if access.kind == MODEL else WEIGHTS_PATH))
        elif access.removed:
            instruction = SAVE_ARGUMENT.instruction.format(", ".join(access.removed))
            found.append(
                (function, name, dataclasses.replace(SAVE_ARGUMENT, instruction=instruction))
            )
        elif (
            access.is_load
            and access.kind == WEIGHTS
            and isinstance(program.parent(access.call), cst.Attribute)
        ):
            found.append((function, name, LOAD_STATUS))
    return found


def _corrections(
    program: Program, accesses: list[FileAccess]
) -> Iterator[tuple[FileAccess, PathEnd]]:
    """Yields the accesses to correct, each with the new end of its path."""
    groups: list[tuple[list[FileAccess], dict[cst.Call, PathEnd]]] = []
    done: set[cst.Call] = set()
    for access in accesses:
        if access.end is None or access.call in done:
            continue
        group = _same_file(access, accesses)
        done |= {member.call for member in group}
        if (ends := _correct_group(program, group, accesses)) is not None:
            groups.append((group, ends))
    # Two files must not get the same name: a corrected name may be in use already, or two paths
    # that differed in their extension become equal. Such groups stay.
    uncorrected_names = [
        member.end.name
        for member in accesses
        if member.end is not None and all(member not in group for group, _ in groups)
    ]
    for group, ends in groups:
        names_of_other_groups = [
            end.name for other, more in groups if other is not group for end in more.values()
        ]
        new_names = {end.name for end in ends.values()}
        if new_names.isdisjoint([*uncorrected_names, *names_of_other_groups]):
            for member in group:
                yield member, ends[member.call]


def _correct_group(
    program: Program, group: list[FileAccess], accesses: list[FileAccess]
) -> dict[cst.Call, PathEnd] | None:
    """Returns the new ends of the paths of one file by their calls; None to leave them."""
    kinds = {member.kind for member in group if not member.is_load}
    if len(kinds) != 1 or not any(member.is_wrong and not member.is_load for member in group):
        return None
    [kind] = kinds
    ends: dict[cst.Call, PathEnd] = {}
    for member in group:
        end = member.end and member.end.with_suffix(SUFFIXES[kind], _REPLACES[kind])
        if not end or not member.end:
            return None
        # Code that is not understood may need the old name.
        if not member.is_certain or not _may_rename(program, member, accesses):
            return None
        # Loading a model from a file of weights is an error in either Keras. `by_name` works only
        # for .h5 files.
        if member.is_load and ((kind == WEIGHTS and member.kind == MODEL) or member.has("by_name")):
            return None
        ends[member.call] = end
    for other in accesses:
        if other in group:
            continue
        if other.end is None:
            # A path that is not known may be this file. Then the program would look for the old
            # name.
            is_reader = other.is_load and (kind == MODEL or other.kind == WEIGHTS)
            if is_reader:
                return None
        elif any(member.is_doubtfully_same(other) for member in group):
            return None
    return None if _is_path_elsewhere(program, group, accesses) else ends


def _same_file(access: FileAccess, accesses: list[FileAccess]) -> list[FileAccess]:
    """Returns all accesses to the file of one access."""
    group = [access]
    for member in group:  # the list grows in the loop, at most to all accesses
        group += [x for x in accesses if x not in group and member.is_same(x)]
    return group


def _may_rename(program: Program, access: FileAccess, accesses: list[FileAccess]) -> bool:
    """Returns whether the variables of a path are used only as paths of such files."""
    calls = {member.call for member in accesses}
    assert access.end is not None
    return all(
        any(
            outer in calls
            or program.callee(outer) in _FORMAT_NEUTRAL
            or function_name(outer) == "print"
            or outer is program.parent(name)  # the read that led to this path
            for outer in program.around(read)
        )
        for name in access.end.variables
        for read in program.references(name)
    )


def _is_path_elsewhere(
    program: Program, group: list[FileAccess], accesses: list[FileAccess]
) -> bool:
    """Returns whether the program has the path of a file elsewhere, too."""
    paths = {member.end.text.rstrip("/") for member in group if member.end is not None}
    known = {member.end.node for member in accesses if member.end is not None}
    texts = {x.value for x in program.nodes(cst.FormattedStringText) if x not in known}
    for node in program.nodes(cst.SimpleString):
        outer, text = program.parent(node), node.evaluated_value
        is_name = isinstance(outer, cst.Arg) and keyword_name(outer) == "name"
        # A string that is a statement is a comment.
        if node not in known and not is_name and not isinstance(outer, cst.Expr):
            if isinstance(text, str):
                texts.add(text)
    return any(
        text.rstrip("/") == path or text.startswith(f"{path}/") for text in texts for path in paths
    )
