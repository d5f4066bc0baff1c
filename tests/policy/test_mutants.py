"""`scripts/mutants.py` changes one line at a time, and files that move keep their changes."""

import ast
from pathlib import Path

import pytest

import mutants

SOURCE = """
LIMIT = 3

class Counter:
    def add(self, number: int) -> int:
        \"\"\"Adds a number.\"\"\"
        if not number < LIMIT:
            raise ValueError(f"{number} + 1")
        self.notify()
        return self.total + number
"""


def draw(folder: Path, name: str) -> list[mutants.Mutant]:
    file = folder / "tpudist" / name
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    return mutants.mutants_of(folder, 100, 0)


def test_each_mutant_is_another_program_with_one_changed_line(tmp_path):
    found = draw(tmp_path, "counter.py")
    for mutant in found:
        assert SOURCE.count(mutant.before) == 1
        assert ast.dump(ast.parse(SOURCE)) != ast.dump(
            ast.parse(SOURCE.replace(mutant.before, mutant.after))
        )
    assert {x.after.strip() for x in found} == {
        "if not (number <= LIMIT):",
        "if (number < LIMIT):",
        "pass",
        "return (self.total - number)",
    }
    assert {x.before.strip() for x in found if x.after.strip() == "pass"} == {
        "self.notify()",
        'raise ValueError(f"{number} + 1")',
    }


def test_a_file_that_moves_keeps_its_mutants(tmp_path):
    changes = [
        [(x.before, x.after) for x in draw(tmp_path / place, f"{place}/{place}.py")]
        for place in ("here", "there")
    ]
    assert changes[0] == changes[1]


def test_a_mutant_is_run_against_the_tests_of_its_package_that_reach_it():
    mutant = mutants.Mutant("tpudist/keras/layout_map.py", "f", 1, 1, "", "")
    reaching = {
        "tests/keras_fit/test_a.py::test_slow": 9.0,
        "tests/keras_fit/test_a.py::test_fast": 1.0,
        "tests/run/test_b.py::test_other": 1.0,
        "tests/keras_fit/test_c.py::test_too_slow": mutants.BUDGET_S,
    }
    chosen = mutants.chosen_tests(mutant, set(reaching), reaching, ["keras_fit", "run"])
    assert chosen == [
        "tests/keras_fit/test_a.py::test_fast",
        "tests/keras_fit/test_a.py::test_slow",
    ]


PASSES = "from counter import is_small\ndef test_it():\n    assert is_small(3)\n"
FAILS = "def test_it():\n    assert False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "test", "outcome"),
    [
        ("    return number > 5", PASSES, "caught"),
        ("    return number <= 5", PASSES, "survived"),
        ("    return number > 5", FAILS, "invalid"),
    ],
)
def test_a_mutant_is_caught_by_a_test_that_passes_without_it(tmp_path, after, test, outcome):
    """A test that fails anyway would count every mutant as caught."""
    before = "    return number < 5"
    (tmp_path / "counter.py").write_text(f"def is_small(number):\n{before}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_counter.py").write_text(test)
    mutant = mutants.Mutant("counter.py", "is_small", 2, 2, before, after)
    assert (
        mutants.run_one(mutant, ["tests/test_counter.py::test_it"], tmp_path, tmp_path / "cache")
        == outcome
    )
