"""Replaces the statements that split a CPU in TensorFlow by `tpudist.emulate`."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.nodes import function_name, has_text, keyword_arg, remove_statement
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer

_SETS_DEVICES = (
    "tensorflow.config.set_logical_device_configuration",
    "tensorflow.config.experimental.set_virtual_device_configuration",
)
_LISTS_DEVICES = (
    "tensorflow.config.list_physical_devices",
    "tensorflow.config.experimental.list_physical_devices",
)
_MAKES_DEVICE = (
    "tensorflow.config.LogicalDeviceConfiguration",
    "tensorflow.config.experimental.VirtualDeviceConfiguration",
)


class CpuEmulation(Transformer):
    """Writes `tpudist.emulate(num_devices=...)`, and removes statements for the old setting."""

    def __init__(self, program: Program):
        super().__init__(program)
        # By statement to replace. A program has one, so all leads belong to it.
        self._num_devices_by_statement: dict[cst.CSTNode, cst.BaseExpression] = {}
        self._leads: list[cst.SimpleStatementLine] = []  # statements before it, to remove
        for statement in program.nodes(cst.SimpleStatementLine):
            self._note_statement(statement)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Rewrites or removes a statement."""
        if original_node in self._leads:
            return remove_statement(self.program.parent(original_node), updated_node)
        if original_node not in self._num_devices_by_statement:
            return updated_node
        num_devices = keyword_arg("num_devices", self._num_devices_by_statement[original_node])
        emulate = cst.Call(self.write("tpudist.emulate"), [num_devices])
        # The comment above the first of the removed statements explains all of them, so it moves to
        # the new statement.
        first = min([original_node, *self._leads], key=self.program.line)
        lines = [
            *first.leading_lines,
            *(updated_node.leading_lines if first in self._leads else ()),
        ]
        return updated_node.with_changes(body=[cst.Expr(emulate)], leading_lines=lines)

    def _note_statement(self, statement: cst.SimpleStatementLine) -> None:
        if len(statement.body) != 1 or not isinstance(statement.body[0], cst.Expr):
            return
        call = statement.body[0].value
        if self.program.callee(call) not in _SETS_DEVICES or not isinstance(call, cst.Call):
            return
        # The devices and their number, both by position: (cpu, [LogicalDeviceConfiguration()] * 8).
        if len(call.args) != 2 or any(arg.keyword or arg.star for arg in call.args):
            return
        num_devices = self._num_devices(call.args[1].value)
        if num_devices is None or not self._is_cpu(call.args[0].value):
            return
        self._num_devices_by_statement[statement] = num_devices
        # Statements such as `cpus = tf.config.list_physical_devices("CPU")` go as well, if only
        # this call reads their name.
        for arg in call.args:
            value = arg.value.value if isinstance(arg.value, cst.Subscript) else arg.value
            if isinstance(value, cst.Name) and self._is_read_once(value):
                lead = self._statement(value)
                if isinstance(lead, cst.SimpleStatementLine) and lead not in self._leads:
                    self._leads.append(lead)

    def _num_devices(
        self, value: cst.BaseExpression, *, follows_names: bool = True
    ) -> cst.BaseExpression | None:
        """Returns the number in `[Device()] * number` or `[Device() for _ in range(number)]`."""
        if isinstance(value, cst.Name) and follows_names:
            values = self.program.values(value)
            return self._num_devices(values[0], follows_names=False) if len(values) == 1 else None
        if isinstance(value, cst.ListComp) and self._is_device(value.elt):
            loop, call = value.for_in, value.for_in.iter
            if (
                loop.inner_for_in is None
                and not loop.ifs
                and isinstance(call, cst.Call)
                and function_name(call) == "range"
                and len(call.args) == 1
            ):
                return call.args[0].value
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Multiply):
            for devices, number in ((value.left, value.right), (value.right, value.left)):
                if isinstance(devices, cst.List) and self._num_devices_of_list(devices) == 1:
                    return number
        if isinstance(value, cst.List) and (number := self._num_devices_of_list(value)):
            return cst.Integer(str(number))
        return None

    def _num_devices_of_list(self, value: cst.List) -> int:
        """Returns the length of a list of devices; 0 if it contains other objects."""
        elements = value.elements
        are_devices = all(
            isinstance(element, cst.Element) and self._is_device(element.value)
            for element in elements
        )
        return len(elements) if are_devices else 0

    def _is_device(self, value: cst.BaseExpression) -> bool:
        return self.program.callee(value) in _MAKES_DEVICE

    def _is_cpu(self, value: cst.BaseExpression) -> bool:
        """Returns whether a device is one of `tf.config.list_physical_devices("CPU")`."""
        if isinstance(value, cst.Subscript):
            value = value.value
        if isinstance(value, cst.Name):
            if len(self.program.assignments(value)) != 1:
                return False
            statement = self._statement(value)
            if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
                return False
            [part] = statement.body
            if not isinstance(part, cst.Assign):
                return False
            value = part.value
        if isinstance(value, cst.Subscript):
            value = value.value
        return (
            self.program.callee(value) in _LISTS_DEVICES
            and isinstance(value, cst.Call)
            and len(value.args) == 1
            and has_text(value.args[0].value, "CPU")
        )

    def _is_read_once(self, name: cst.Name) -> bool:
        found = self.program.assignments(name)
        return len(found) == 1 and len(list(found[0].references)) == 1

    def _statement(self, name: cst.Name) -> cst.CSTNode:
        """Returns the statement that binds a name."""
        [assignment] = self.program.assignments(name)
        return next(
            outer
            for outer in self.program.around(assignment.node)
            if isinstance(outer, cst.BaseStatement)
        )
