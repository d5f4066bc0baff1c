"""Finds the names and attributes that the code of a function reads, in its bytecode.

The source may be missing, but the bytecode never is. A read is a chain that begins at a name:
`self.config.lr` or `options["lr"]`. Values computed from it are not followed.

The names of instructions differ between versions of Python; those of 3.11 to 3.14 are known here.
"""

import dataclasses
import dis
import functools
from collections.abc import Hashable, Iterable, Iterator
from types import CodeType

# Instructions that do not change the value on top of the stack. They may appear within a chain.
_SILENT = frozenset(
    "CACHE EXTENDED_ARG NOP NOT_TAKEN PRECALL PUSH_NULL RESUME COPY_FREE_VARS MAKE_CELL".split()
)
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_CONSTANTS = frozenset(("LOAD_CONST", "LOAD_SMALL_INT"))
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


@dataclasses.dataclass(frozen=True)
class Read:
    """A chain of attributes and constant items that begins at a name.

    Attributes:
        name: The name: of a parameter or local variable, of a closure, or of a module.
        is_global: Whether the name belongs to the module.
        steps: The attributes and items that are read in turn: ("attr", name) or ("item", key).
        alias: The local variable to which the value is assigned, or None.
    """

    name: str
    is_global: bool
    steps: tuple[tuple[str, Hashable], ...] = ()
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class CodeReads:
    """The reads of one code object.

    Attributes:
        reads: The chains, in the order of the code.
        super_reads: Attributes of `super()`: name of the object, and of the attribute.
        inner: Code of the functions that it defines.
        names: All names of attributes in it, and its string constants if it calls `getattr` or
            `vars`, or reads `__dict__`.
    """

    reads: tuple[Read, ...]
    super_reads: tuple[tuple[str, str], ...]
    inner: tuple[CodeType, ...]
    names: frozenset[str]


@functools.lru_cache(maxsize=1024)
def reads_of(code: CodeType) -> CodeReads:
    """Returns the reads of `code`."""
    names = frozenset(code.co_names)
    if names & {"getattr", "vars", "__dict__"}:
        names |= set(_texts_in(code.co_consts))
    reads: list[Read] = []
    super_reads: list[tuple[str, str]] = []
    # A call of `super` is several instructions: the global `super`, then `__class__` and `self`
    # (which the compiler adds if there are no arguments), the call, and the attribute. `owner` is
    # the name of the object from the first of them to the last, and None elsewhere.
    owner: str | None = None
    for read, instruction in _chains(code):
        opcode = instruction.opname
        if read == Read("super", True):
            owner = code.co_varnames[0] if code.co_argcount else None
        elif read is not None and owner is not None and not read.is_global and not read.steps:
            owner = owner if read.name == "__class__" else read.name
        elif read is not None:
            reads.append(read)
        if owner is None:
            continue
        if opcode == "LOAD_SUPER_ATTR" or opcode in _ATTRIBUTES:
            super_reads.append((owner, instruction.argval))
            owner = None
        elif read is None and opcode != "CALL":
            # `super()` is stored or passed on: later code may read any attribute of it.
            super_reads += [(owner, x) for x in sorted(names)]
            owner = None
    inner = tuple(x for x in code.co_consts if isinstance(x, CodeType))
    return CodeReads(tuple(reads), tuple(super_reads), inner, names)


def _texts_in(constants: Iterable[object]) -> Iterator[str]:
    for x in constants:
        if isinstance(x, str):
            yield x
        elif isinstance(x, tuple | frozenset):  # as in `for name in ("lr", "decay")`
            yield from _texts_in(x)


def _chains(code: CodeType) -> Iterator[tuple[Read | None, dis.Instruction]]:
    """Yields each chain with the instruction that ends it, and other instructions with None.

    Chains are only followed along the instructions of one expression. If code between the name and
    the attribute uses the stack otherwise, the chain ends at the name: its whole value counts.
    """
    cells = {*code.co_cellvars, *code.co_freevars}
    chain: Read | None = None
    # A constant that was loaded after the chain; it matters only if a subscript follows.
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
            # This loads the cell itself, to make a closure: the value is read in the inner code.
            loaded = [x for x in loaded if x not in cells]
        for other in loaded[:-1]:
            yield Read(other, False), instruction
        if loaded:
            chain = Read(loaded[-1], name in _GLOBALS)


def _extend(chain: Read, kind: str, key: Hashable) -> Read:
    return dataclasses.replace(chain, steps=(*chain.steps, (kind, key)))


def _names_on_stack(instruction: dis.Instruction) -> list[str]:
    """Returns the names whose values an instruction pushes; 3.13 has some that push two."""
    name, value = instruction.opname, instruction.argval
    if name in _GLOBALS or name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return [value]
    if name.startswith("LOAD_FAST"):
        return list(value) if isinstance(value, tuple) else [value]
    if name == "STORE_FAST_LOAD_FAST":
        return [value[1]]
    return []
