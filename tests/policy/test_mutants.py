"""`scripts/mutants.py` changes one line at a time, and files that move keep their changes."""

import ast
from pathlib import Path

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
