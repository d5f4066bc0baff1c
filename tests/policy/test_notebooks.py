"""The notebooks run where there is no TPU, are stored without outputs, and hold no logic."""

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest

from places import ROOT

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
# What a notebook must have printed, to have shown what it is for.
PRINTED = {
    "01_quickstart": ["accuracy 9"],  # 90 percent or more: it did learn
    "02_plan_before_you_rent": ["best: fsdp=", "over ICI per step", "within its budget"],
    "03_finetune": ["60/60  held out nats", "\nbetter\n", "the files compute what was trained"],
    "05_keras_fit": ["held-out accuracy 9", "on 8 devices", "those of one device"],
    "04_port_a_tf_program": [
        "left for hands: []",
        "rows: 2.0\nsum of squares: 40425.0",
        "tf.GradientTape: make the loss a function",
        "weight 3.00, loss 0.0000",
    ],
}
MARKS = {"02_plan_before_you_rent": [pytest.mark.libtpu]}

every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def read(file: Path) -> nbformat.NotebookNode:
    """The notebook, without the cells that are for the hosted machine only."""
    notebook = nbformat.read(file, as_version=4)
    notebook.cells = [c for c in notebook.cells if "colab" not in c.metadata.get("tags", [])]
    return notebook


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.notebook
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=MARKS.get(file.stem, ())) for file in NOTEBOOKS],
    ids=lambda file: file.stem,
)
def test_it_runs_from_top_to_bottom(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Where Jupyter and IPython leave files: not in the home of whoever runs the tests.
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = read(file)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    for expected in PRINTED[file.stem]:
        assert expected in printed, printed


@every_notebook
def test_it_is_stored_without_outputs(file):
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def _name_of_call(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


@every_notebook
def test_it_defines_nothing_but_what_a_strategy_runs_or_a_search_asks(file):
    """Logic in a notebook is tested nowhere and copied everywhere."""
    source = "\n".join(cell.source for cell in read(file).cells if cell.cell_type == "code")
    tree = ast.parse(source)
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    given = {
        node.args[position].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for position in [{"run": 0, "search": 0, "train": 1}.get(_name_of_call(node))]
        if position is not None and isinstance(node.args[position], ast.Name)
    }
    assert defined <= given
    assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
