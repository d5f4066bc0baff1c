"""The port of a notebook changes only its Python code."""

import json

import pytest

from tpudist.port import CannotPort, port_notebook, show_code


def notebook(*cells: str) -> str:
    """Returns a notebook of code cells, with a text cell before them."""
    code = [
        {"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []}
        for cell in cells
    ]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["# T\n"]}, *code]}, indent=2)


def code_of(source: str) -> list[str]:
    cells = json.loads(source)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


CELLS = (
    "!pip install tensorflow\n%load_ext tensorboard\nimport tensorflow as tf",
    "strategy = tf.distribute.MirroredStrategy()",
    "if True:\n  !ls {folder}\n  print('%d' \n    % 3)",
    "print('%d of'\n   %(strategy.num_replicas_in_sync))",
    "%%writefile model.py\nimport tensorflow as tf\n\n"
    "model = tf.keras.Sequential()\nx = tf.signal.fft(y)\n",
    "%%bash\npython model.py",
    "a = tf.signal.ifft(2)",
)


def test_cells_are_ported_as_one_program_and_writefile_cells_as_separate_programs():
    ported = port_notebook(notebook(*CELLS))
    code = code_of(ported.source)
    assert code[0] == (
        "!pip install tensorflow\n%load_ext tensorboard\nimport tensorflow as tf\nimport tpudist"
    )
    assert code[1] == "strategy = tpudist.MirroredStrategy()"
    assert code[2:4] == list(CELLS[2:4])
    assert code[4].startswith("%%writefile model.py\nimport os\n")
    assert "model = keras.Sequential()" in code[4]
    assert code[5] == CELLS[5]


def test_new_imports_come_into_the_first_cell_with_python_after_its_commands():
    cells = ("!pip install x", "try:\n    import tensorflow as tf\nexcept ImportError:\n    raise")
    ported = port_notebook(notebook(*cells, "strategy = tf.distribute.get_strategy()"))
    code = code_of(ported.source)
    assert code[0] == cells[0]
    assert code[1].startswith("import tpudist\ntry:\n")
    assert code[2] == "strategy = tpudist.get_strategy()"


def test_leftovers_report_their_cell_and_line():
    ported = port_notebook(notebook(*CELLS))
    code = ["", *code_of(ported.source)]
    found = [(one.name, code[one.cell - 1].splitlines()[one.line - 1]) for one in ported.leftovers]
    assert found == [
        ("tf.signal.fft", "x = tf.signal.fft(y)"),
        ("tf.signal.ifft", "a = tf.signal.ifft(2)"),
    ]


def test_a_ported_notebook_is_not_changed_again():
    ported = port_notebook(notebook(*CELLS))
    assert port_notebook(ported.source) == ported
    other = notebook("import tpudist\nstrategy = tpudist.get_strategy()")
    assert port_notebook(other).source == other


def test_show_code_separates_cells():
    assert show_code(notebook("a = 1\nb = 2", "c = 3")) == (
        "# In cell 2:\na = 1\nb = 2\n# In cell 3:\nc = 3\n"
    )


@pytest.mark.parametrize("source", ["{", "[]", '{"cells": [{"cell_type": "code"}]}'])
def test_an_invalid_notebook_is_rejected(source):
    with pytest.raises(CannotPort, match="It is not a valid notebook"):
        port_notebook(source)
