"""Names and attributes that the code of a function reads, found in its bytecode.

The source is not always there, and bytecode always is. A read is a chain that begins at a name:
`self.config.lr` or `options["lr"]`. Values computed from it are not followed.
"""

import dataclasses
import dis
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any

# Instructions that leave a value on top of the stack as it is.
_SILENT = frozenset(
    "CACHE EXTENDED_ARG NOP NOT_TAKEN PRECALL PUSH_NULL RESUME COPY_FREE_VARS MAKE_CELL".split()
)
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_CALLS = frozenset(("CALL", "CALL_FUNCTION"))
_CONSTANTS = frozenset(("LOAD_CONST", "LOAD_SMALL_INT"))
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


@dataclasses.dataclass(frozen=True)
class Read:
    """A chain of attributes and constant items that begins at a name.

    Attributes:
        name: The name: of a parameter or local variable, of a closure, or of a module.
        is_global: Whether the name belongs to the module.
        steps: The attributes and items that are taken in turn: ("attr", name) or ("item", key).
        alias: The local variable that the value is stored in, or None.
    """

    name: str
    is_global: bool
    steps: tuple[tuple[str, Any], ...] = ()
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class CodeReads:
    """The reads of one code object.

    Attributes:
        reads: The chains, in the order of the code.
        super_reads: What it takes from `super()`: the name of the object, and of the attribute.
        inner: The code of functions that it defines.
        names: All names of attributes in it, and its string constants if it calls `getattr` or
            `vars`.
    """

    reads: tuple[Read, ...]
    super_reads: tuple[tuple[str, str], ...]
    inner: tuple[CodeType, ...]
    names: frozenset[str]


@functools.lru_cache(maxsize=1024)
def reads_of(code: CodeType) -> CodeReads:
    """Returns what `code` reads."""
    names = frozenset(code.co_names)
    if names & {"getattr", "vars", "__dict__"}:
        names |= {x for x in code.co_consts if isinstance(x, str)}
    reads: list[Read] = []
    super_reads: list[tuple[str, str]] = []
    of = ""  # in a call of `super`: the object that it is about
    for read, instruction in _chains(code):
        name = instruction.opname
        if read == Read("super", True):
            of = code.co_varnames[0] if code.co_argcount else ""
        elif read is not None and of and not read.is_global and not read.steps:
            of = of if read.name == "__class__" else read.name
        elif read is not None:
            reads.append(read)
        if not of:
            continue
        if name == "LOAD_SUPER_ATTR" or name in _ATTRIBUTES:
            super_reads.append((of, instruction.argval))
            of = ""
        elif read is None and name not in _CALLS:  # any attribute may be taken from it later
            super_reads += [(of, x) for x in sorted(names)]
            of = ""
    inner = tuple(x for x in code.co_consts if isinstance(x, CodeType))
    return CodeReads(tuple(reads), tuple(super_reads), inner, names)


def _chains(code: CodeType) -> Iterator[tuple[Read | None, dis.Instruction]]:
    """Each chain with the instruction that ends it, and each other instruction with None."""
    cells = {*code.co_cellvars, *code.co_freevars}
    chain: Read | None = None
    constant: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in _SILENT:
            continue
        if chain is not None:
            if constant is not None:
                if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
                    chain, constant = _extend(chain, "item", constant.argval), None
                    continue
                constant = None
            elif name in _ATTRIBUTES:
                chain = _extend(chain, "attr", instruction.argval)
                continue
            elif name in _CONSTANTS:
                constant = instruction
                continue
            elif name == "STORE_FAST":
                chain = dataclasses.replace(chain, alias=instruction.argval)
            yield chain, instruction
            chain = None
        else:
            yield None, instruction
        loaded = _names_on_stack(instruction)
        if name.startswith("LOAD_FAST"):
            loaded = [x for x in loaded if x not in cells]  # the cell itself, for a closure
        for other in loaded[:-1]:
            yield Read(other, False), instruction
        if loaded:
            chain = Read(loaded[-1], name in _GLOBALS)


def _extend(chain: Read, kind: str, key: Any) -> Read:
    return dataclasses.replace(chain, steps=(*chain.steps, (kind, key)))


def _names_on_stack(instruction: dis.Instruction) -> list[str]:
    name, value = instruction.opname, instruction.argval
    if name in _GLOBALS or name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return [value]
    if name.startswith("LOAD_FAST"):
        return list(value) if isinstance(value, tuple) else [value]
    if name == "STORE_FAST_LOAD_FAST":
        return [value[1]]
    return []
