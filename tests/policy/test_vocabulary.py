"""Names are words of the field: nouns for objects, verbs for actions.

A reader who knows JAX and TensorFlow should guess the meaning from the name. A participle
(`placed`, `described`) names a state, not an action. So functions are named by verbs (`place`,
`describe`) or, as in NumPy, by their result (`num_parts`, `mesh_shape`).
Properties may be participles, as adjectives are (`replicated`), and so may what answers yes or no
(`is_padded`). A context manager is a verb too (`run_eagerly`).
"""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import PACKAGE

# Words of a dialect that this code once had, whatever stands before and after them.
DIALECT = {"beside", "lend", "lent", "made", "making", "moved", "opened", "own", "owned", "pardon"}
DIALECT |= {"tell", "telling", "tells", "told", "wording"}

# Participles that do not end in -ed or -ing, except words that are verbs or nouns, too.
IRREGULAR = set(
    """
    begun being born borne broken brought built caught chosen come done drawn driven eaten fallen
    forgotten found frozen given gone grown heard held hidden kept known laid lent lost made meant
    met overwritten paid said seen sent shown sold sought spent spoken stolen taken taught thought
    thrown told torn undone unmade understood withdrawn worn written
    """.split()
)

# What ends in -ed or -ing and is a verb or a noun of the field.
NO_PARTICIPLES = {
    "embed", "exceed", "feed", "need", "proceed", "seed", "speed", "unembed",
    "binding", "bring", "embedding", "mapping", "packing", "padding", "ping", "ring", "setting",
    "sharding", "string",
}  # fmt: skip

# Names that stay, each for a reason.
ALLOWED = {
    "input.storage.remote_file._ByteReader.tell": "a method of Python's files",
    "coordinator.cluster_coordinator.ClusterCoordinator.done": "tf.distribute's name",
    "coordinator.remote_value.RemoteValue.done": "the name of concurrent.futures",
    "pytest_plugin.__init__.emulated_devices": "a fixture, named by what a test is given",
    "cluster_resolver.tpu_topology.Topology.serialized": "tf.tpu.experimental.Topology has it",
    "xla.internals.call_at_preemption_poll.Manager.reached_sync_point": "JAX calls it so",
    "processes.coordination.KeyValueClient.blocking_key_value_get": "JAX calls it so",
    "models.transformer.Transformer.hidden": "the hidden states, as the field calls them",
}

# Names of several files: of environments, which have one file in each package that knows them, and
# of public modules, which are where tf.distribute has them.
NOT_UNIQUE = {"__init__", "errors", "strategy_methods", "gce", "tpu", "experimental"}

ALLOWED_FILES = {
    "deprecated": "what it offers is deprecated, and is called so",
    "extended": "tf.distribute's name of `strategy.extended`",
    "mirrored": "of MirroredStrategy: strategies are in files of their names",
}

PROPERTIES = re.compile(r"(\w+\.)*(cached_)?property|\w+\.(setter|deleter)")


def is_participle(word: str) -> bool:
    """Whether a word is a participle: by its ending, or by the list."""
    if word in NO_PARTICIPLES:
        return False
    return word in IRREGULAR or (len(word) > 3 and word.endswith(("ed", "ing")))


def words_of(name: str) -> list[str]:
    """`_read_rows` is read and rows, `IndexedSlices` indexed and slices."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def definitions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Each class, function and method, those inside others too, by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{node.name}" if outer else node.name
            yield name, node
            yield from definitions(node, name)
        else:
            yield from definitions(node, outer)


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(PROPERTIES.fullmatch(ast.unparse(x)) for x in function.decorator_list)


def faults_of(source: str) -> dict[str, str]:
    """Returns the problems of names in a module, by qualified name."""
    found = {}
    for name, node in definitions(ast.parse(source)):
        last = name.split(".")[-1]
        if last.startswith("__"):
            continue
        words = words_of(last)
        if strange := DIALECT & set(words):
            found[name] = f"{', '.join(sorted(strange))}: no word of the field"
        elif not isinstance(node, ast.ClassDef) and is_participle(words[0]):
            if not is_property(node):
                found[name] = f"{words[0]} is a participle"
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def placed(x): ...", ["placed"]),
        ("def place(x):\n    def _made(): ...\n", ["place._made"]),
        ("class Row:\n    def gathered(self): ...\n", ["Row.gathered"]),
        ("class Row:\n    @property\n    def gathered(self): ...\n", []),
        ("class Row:\n    @functools.cached_property\n    def held(self): ...\n", []),
        ("@contextlib.contextmanager\ndef entered(): ...", ["entered"]),
        ("def _telling_rows(): ...", ["_telling_rows"]),
        ("class Row:\n    @property\n    def own_plan(self): ...\n", ["Row.own_plan"]),
        ("class ToldRow: ...", ["ToldRow"]),
        ("def is_padded(): ...\ndef feed(): ...\ndef _ring(): ...\ndef read(): ...", []),
        ("def __getattr__(name): ...", []),
    ],
)
def test_names_by_participles_and_of_the_dialect_are_found(source, names):
    assert sorted(faults_of(source)) == names


def test_functions_are_verbs_or_what_they_give():
    """See above; a name that must stay is listed with its reason."""
    found = {
        f"{dotted(path)}.{name}": fault
        for path in files()
        for name, fault in faults_of(path.read_text()).items()
    }
    assert {name: fault for name, fault in found.items() if name not in ALLOWED} == {}
    assert sorted(set(ALLOWED) - set(found)) == [], "these are allowed, and do not exist"


def test_a_file_is_named_by_a_noun_and_has_its_name_alone():
    stems = collections.Counter(path.stem for path in files())
    twice = [stem for stem, number in stems.items() if number > 1 and stem not in NOT_UNIQUE]
    assert twice == []
    assert sorted(x for x in NOT_UNIQUE if stems[x] < 2) == [], "these are unique"
    named = {stem for stem in stems if is_participle(words_of(stem)[-1])}
    assert named == set(ALLOWED_FILES)
    assert [stem for stem in stems if DIALECT & set(words_of(stem))] == []
