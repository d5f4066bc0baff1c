"""The index of errors (docs/errors.md) has every class and message that users meet."""

import re

import pytest

import tpudist
from places import PACKAGE, ROOT
from policy.test_reference import hook

INDEX = hook("error_index")

# Classes that users never see, and what they see instead.
INTERNAL = {
    "ActorDied": "UnavailableError, or the function is run again",
    "ActorKilled": "ends a thread that was killed",
    "AllWait": "of tests of the engine",
    "ArgumentsChanged": "the call is looked at again",
    "CallError": "a code and a text for the caller",
    "Cancelled": "a wait that is no longer needed",
    "CannotPort": "WrongUse",
    "Died": "CompilerDied",
    "FailedElsewhere": "the cause of a CheckpointError",
    "GenerationEnded": "ends a thread that was left behind",
    "HbmExceeded": "`plan.refusal`",
    "LargeConstantError": "the operation of the library stays",
    "LocalState": "the function is traced again",
    "MakesVariables": "the function is traced again",
    "StoreError": "CannotRead",
    "TraceAgain": "the function is traced again",
    "NotSums": "the replicas run again",
    "NextElement": "the function is traced again",
    "NumbersLearned": "the program is created again",
    "NoRecords": "WrongUse",
    "NotSent": "another process is asked",
    "OtherStrategy": "the function is begun again",
    "PlanOutdated": "the function is traced again",
    "Preempted": "the loop ends, with a checkpoint",
    "Released": "the error of the other replica",
    "ResultTimeout": "the server is replaced",
    "TraceFailed": "the error of the trace",
    "_Abandoned": "the result of the search so far",
    "_CannotTrace": "the operation of the library stays",
    "_CodeBegins": "a compile without code ends before the machine code",
    "_Enough": "the call of `fit` ends, with its first batches",
    "_TooManyEquations": "the slowest branch of each conditional counts",
    "_UnknownCopies": "operands of a kernel with unknown copies count once",
    "_UnknownLayout": "unknown values may differ between replicas",
}


@pytest.fixture(scope="module")
def classes():
    return INDEX.find_classes(PACKAGE)


@pytest.fixture(scope="module")
def messages():
    return INDEX.find_messages(PACKAGE)


def test_every_class_of_errors_is_in_the_index_or_met_by_nobody(classes):
    assert sorted(x.name for x in classes if not x.remedy) == sorted(INTERNAL)
    assert {x.name for x in classes if x.remedy} >= set(tpudist.errors.__all__)
    assert [x.name for x in classes if not x.cause] == []


def test_the_page_has_a_row_for_each_class_and_a_list_for_each_group(classes, messages):
    page = INDEX.on_page_markdown((ROOT / "docs" / "errors.md").read_text())
    assert "<!-- errors" not in page
    for found in classes:
        assert (f"| `{found.name}` (" in page) == bool(found.remedy), found.name
    for (title, guide, _), found in messages.items():
        assert f"\n### {title}\n" in page
        assert found, title
        assert (ROOT / "docs" / f"{guide}.md").exists()


def test_each_prefix_of_a_group_is_a_file_or_folder_of_the_package():
    prefixes = [x for *_, group in INDEX.GROUPS for x in group.split()]
    assert [x for x in prefixes if not (PACKAGE / x).exists()] == []


def test_the_longest_prefix_decides_the_group_and_each_file_needs_one():
    assert INDEX.find_group("xla/mesh.py")[0] == "Create a strategy and choose devices"
    assert INDEX.find_group("xla/compiler/compiler_process.py")[0] == "Plan a step"
    with pytest.raises(ValueError, match="new_package/file.py raises errors"):
        INDEX.find_group("new_package/file.py")


def test_a_message_that_is_raised_is_found_in_the_index(messages):
    with pytest.raises(RuntimeError) as caught, tpudist.OneDeviceStrategy("cpu:0").scope():
        tpudist.experimental_set_strategy(None)
    assert str(caught.value) in [x.text for x in messages[INDEX.find_group("context/stack.py")]]


def test_few_errors_are_without_a_message_of_their_own(messages):
    """Computed parts are not in the index; most of the text is a literal in the sources."""
    raised = sum(file.read_text().count("raise ") for file in PACKAGE.rglob("*.py"))
    assert sum(map(len, messages.values())) > 0.9 * raised


# A page shows a message as the output of code that catches one, or with its class.
BLOCK = re.compile(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", re.DOTALL)
TEXT = re.compile(r"```text\n(.*?)```", re.DOTALL)
WITH_CLASS = re.compile(r"\w(?:Error|Warning): (.*)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def quotes(page):
    """Yields the lines of messages that a page shows; without the rows of tables in messages."""
    for code, output in BLOCK.findall(page):
        if re.search(r"^ *except .* as (\w+):(?:\n .*)*\n? .*print\(.*\b\1\b", code, re.MULTILINE):
            yield from (x for x in output.splitlines() if len(x.split()) > 4 and "  " not in x)
    for output in TEXT.findall(page):
        yield from WITH_CLASS.findall(output)


def segments(text):
    """Splits a text at its computed parts, and keeps parts of at least three words."""
    return [x.strip() for x in re.split(r"\.{3,}", text) if len(x.split()) > 2]


# Lines that pages show and that cannot be found, by a part of each, with the reason.
NOT_FOUND = {
    "(nan) encountered": "JAX writes it",
    "computed NaN": "nearly all of it is computed",
    "x cpu (mesh": "nearly all of it is computed",
    "Replica 3 of 8": "the page shows only the first words",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_message_that_a_page_shows_is_in_the_index(page, messages):
    known = [x for found in messages.values() for m in found for x in segments(m.text)]
    for line in quotes(page.read_text()):
        if not any(x in line for x in NOT_FOUND):
            for part in segments(line):
                assert any(part in x or x in part for x in known), part


def test_pages_show_messages():
    lines = [x for page in PAGES for x in quotes(page.read_text())]
    assert len(lines) > 2 * len(NOT_FOUND)
    assert [x for x in NOT_FOUND if not any(x in line for line in lines)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ValueError", "would differ between replicas after"),
        ("LocalMeanWarning", "share of a loss"),
        ("LocalMeanWarning", "with all rows"),
        ("NameError", "in a collective"),
        ("reason", "it was killed (by SIGKILL"),
        ("reason", "`while`, `and`, `or`"),
        ("log", "a partial batch"),
    ],
)
def test_a_text_that_is_put_together_is_in_the_index(name, text, messages):
    assert [x for found in messages.values() for x in found if x.name == name and text in x.text]


def test_the_first_messages_of_the_page_are_in_the_index(messages, classes):
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|.*\]\(.*#.*\) \|$", page, re.MULTILINE)
    assert len(rows) == 10
    known = [x.text for found in messages.values() for x in found] + [x.name for x in classes]
    for part in [part for row in rows for part in re.findall("`(.*?)`", row)]:
        assert any(part in x for x in known), part


def test_a_text_is_followed_to_where_it_is_written(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file.py").write_text(
        "from tpudist.run import other\n"
        "from tpudist.run.other import advise\n"
        "AGAIN = 'Start it again, please.'\n"
        "class A(ValueError):\n"
        "    def __init__(self, n):\n"
        "        super().__init__(f'the class says {n}')\n"
        "def f(n):\n"
        "    what = f'{n} is a local name' if n else 'nothing is here'\n"
        "    warnings.warn(what, stacklevel=2)\n"
        "    _log.warning('%s has no %d rows', n, 3)\n"
        "    check('a parameter is odd')\n"
        "    error = ValueError(f'{n} ended with a bang. {AGAIN}')\n"
        "    raise error\n"
        "def check(why):\n"
        "    raise TypeError(why)\n"
        "def g(n):\n"
        "    raise KeyError(advise(n))\n"
        "    raise OSError(other.explain(n))\n"
    )
    (tmp_path / "run" / "other.py").write_text(
        "def advise(n):\n    return f'pass {n} in a list'\n"
        "def explain(n):\n    return n + ' is not the disk'\n"
    )
    found = INDEX.find_messages(tmp_path)[INDEX.find_group("run/file.py")]
    assert {(x.name, x.text) for x in found} == {
        ("A", "the class says ..."),
        ("UserWarning", "... is a local name"),
        ("UserWarning", "nothing is here"),
        ("log", "... has no ... rows"),
        ("TypeError", "a parameter is odd"),
        ("ValueError", "... ended with a bang. ..."),
        ("KeyError", "pass ... in a list"),
        ("OSError", "... is not the disk"),
    }


def test_classes_and_messages_are_read_as_they_are_written(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file.py").write_text(
        'class A(ValueError):\n    """What\n    it is.\n\n    Remedy: do | this.\n    """\n\n'
        'class B(errors.A):\n    """No more."""\n\n'
        "def f(n, problem):\n"
        "    operation.refuse('it is <odd>')\n"
        "    warnings.warn(f'{n} was ignored', stacklevel=2)\n"
        "    warnings.warn('an old name', DeprecationWarning)\n"
        "    raise A(f'{n!r} is ' + 'no number.') from None\n"
        "    raise self._death('it is dead')\n"
        "    raise A(problem)\n"
        "    raise A('code')\n"
    )
    assert INDEX.find_classes(tmp_path) == [
        ("A", ("ValueError",), "What it is.", "do | this."),
        ("B", ("A",), "No more.", ""),
    ]
    assert INDEX.find_messages(tmp_path)[INDEX.find_group("run/file.py")] == [
        ("reason", "it is <odd>", "run/file.py"),
        ("UserWarning", "... was ignored", "run/file.py"),
        ("DeprecationWarning", "an old name", "run/file.py"),
        ("A", "... is no number.", "run/file.py"),
        ("reason", "it is dead", "run/file.py"),
    ]
    assert "| `A` (ValueError) | What it is. | Do &#124; this. |" in INDEX.show_classes(tmp_path)
    assert "<li><code>reason</code> it is &lt;odd&gt; <small>" in INDEX.show_messages(tmp_path)
