"""The notebooks print their stored outputs, need no TPU, and contain no logic."""

import ast
import base64
import importlib.metadata
import re
from types import SimpleNamespace

import nbformat
import pytest

import notebook_outputs
from places import ROOT
from policy.test_reference import hook

NOTEBOOKS = notebook_outputs.NOTEBOOKS
# What a notebook must print to show what it is for.
PRINTED = {
    "01_quickstart": ["accuracy 9"],  # 90 percent or more: it did learn
    "02_plan_before_you_rent": ["best: fsdp=", "over ICI per step", "within its budget"],
    "03_finetune": ["60/60  held out nats", "\nbetter\n", "computes the same as the trained model"],
    "04_port_a_tf_program": [
        "left to port manually: []",
        "rows: 2.0\nsum of squares: 40425.0",
        "tf.GradientTape: write the loss as a function",
        "weight 3.00, loss 0.0000",
    ],
    "05_keras_fit": ["held-out accuracy 9", "on 8 devices", "match one device"],
    "06_your_flax_model": [
        "difference below 1e-5: True",
        "equals one device",
        "would differ between replicas after 'old_step'",
        "- 8 times: gradients of a mean over the replica's own rows",
        "(at cell:7)",
        "[fsdp]",
    ],
    "07_first_hour": [
        "No accelerator found: 8 emulated devices",
        "numbers: 16 of 16 ok",
        "host: 5 of 5 ok",
        "all checks passed: True",
    ],
}
MARKS = {"02_plan_before_you_rent": [pytest.mark.libtpu]}
# Positions of the functions that a notebook gives to tpudist.
GIVEN = {"run": 0, "search": 0, "train": 1, "verify": 0, "create": 0, "jit": 0}
PAGES = hook("notebooks")

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def read(name: str):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code_cells(name: str):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.notebook
@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS.get(x, ())) for x in NOTEBOOKS])
def test_it_prints_its_stored_outputs(name, tmp_path):
    notebook = read(name)
    found = notebook_outputs.execute(notebook, tmp_path)
    printed = "".join(map(notebook_outputs.print_text, found))
    for expected in PRINTED[name]:
        assert expected in printed, printed
    for cell, outputs in zip(notebook.cells, found, strict=True):
        # Another Python has other texts to learn, and another libtpu other lines of a plan.
        if cell.cell_type == "code" and not notebook_outputs.varies(cell):
            difference = notebook_outputs.find_difference(cell, outputs)
            remedy = f"python scripts/notebook_outputs.py {name} stores the new output"
            assert difference is None, f"{cell.source}\n{difference}\n{remedy}"


@every_notebook
def test_it_is_stored_with_outputs_that_a_reader_can_trust(name):
    cells = code_cells(name)
    printed = "".join(notebook_outputs.print_text(cell.outputs) for cell in cells)
    for expected in PRINTED[name]:
        assert expected in printed
    assert not re.search(r"/tmp/|/home/|\x1b|\r", printed)
    for cell in cells:
        assert cell.execution_count is None
        assert not set(cell.metadata) - {"tags"}
        for output in cell.outputs:
            image = output.get("data", {}).get("image/png", "")
            assert len(base64.b64decode(image)) < notebook_outputs.MOST_IMAGE_BYTES


@every_notebook
def test_the_first_cells_install_tpudist_and_choose_the_devices(name):
    first, *others = code_cells(name)
    assert first.source == notebook_outputs.make_first_cell(), (
        "python scripts/notebook_outputs.py --only-first-cell writes the first cells"
    )
    assert notebook_outputs.is_hosted(first)
    assert not any(map(notebook_outputs.is_hosted, others))
    assert any("tpudist.emulate(num_devices=8" in x.source for x in others[:2])


def install(folder, monkeypatch, address: str = "") -> list[str]:
    """Runs the first cell in a folder without tpudist, and returns the packages it installs."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [SimpleNamespace(name="a")])
    source = notebook_outputs.FIRST_CELL.format(address=address)
    source, number = re.subn(
        r'%pip install --quiet ("tpudist.*")', r"installed.append(f\1)", source
    )
    assert number == 1
    installed: list[str] = []
    exec(source, {"installed": installed})
    return [x.partition(" @ ")[2] for x in installed]


def test_the_first_cell_installs_the_clone_a_wheel_or_the_address(tmp_path, monkeypatch):
    assert install(ROOT / "colab", monkeypatch) == [ROOT.as_uri()]
    assert install(tmp_path, monkeypatch, "https://a.b/c") == ["git+https://a.b/c"]
    wheel = tmp_path / "tpudist-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install(tmp_path, monkeypatch) == [wheel.as_uri()]
    wheel.unlink()
    with pytest.raises(RuntimeError, match=r"not in a clone .* upload a wheel"):
        install(tmp_path, monkeypatch)


def _name_of_call(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


@every_notebook
def test_it_defines_only_functions_that_a_strategy_runs_or_a_search_calls(name):
    """Logic in a notebook is tested nowhere and copied everywhere."""
    cells = [x for x in code_cells(name) if not notebook_outputs.is_hosted(x)]
    tree = ast.parse("\n".join(cell.source for cell in cells))
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    given = {
        node.args[position].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for position in [GIVEN.get(_name_of_call(node))]
        if position is not None and position < len(node.args)
        if isinstance(node.args[position], ast.Name)
    }
    assert defined <= given
    assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))


@every_notebook
def test_its_links_lead_to_files(name):
    for cell in read(name).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", cell.source):
                assert (ROOT / "colab" / target).is_file(), target


@pytest.mark.parametrize(
    ("printed", "cleaned"),
    [
        ("\x1b[1mloss\x1b[0m 0.5  \n", "loss 0.5\n"),
        (" 10%\r100% done\n", "100% done\n"),
        (
            "f: 6.5 s, 72ms/step, 29,106 tokens/s  0:19 left",
            "f: ... s, ...ms/step, ... tokens/s  ... left",
        ),
        ("step 1/9  loss 1.0\nstep 5/9  loss 0.5  0:19 left\nend", "step 1/9  loss 1.0\nend"),
        ("0.02 where rounding explains 2.1e-08 (rows)", "0.02 where rounding explains ... (rows)"),
        ("at /tmp/ipykernel_12/3456789.py:7 and FOLDER/a.txt", "at cell:7 and a.txt"),
    ],
)
def test_stored_texts_have_no_times_and_paths(printed, cleaned, tmp_path):
    printed = printed.replace("FOLDER", str(tmp_path))
    assert notebook_outputs.clean(printed, tmp_path) == cleaned


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_run_writes_the_same_file(tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell("# Title"),
        nbformat.v4.new_code_cell("%pip", metadata={"tags": ["colab"]}),
        nbformat.v4.new_code_cell("import time\nprint(f'{time.time():.0f} s')\ntime.time() > 0"),
        nbformat.v4.new_code_cell("print(f'loss {1.001}')"),
    ]
    path = tmp_path / "new.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert notebook_outputs.update(path) == 2
    text = path.read_text().replace("1.001", "1.000", 1)
    stored = [
        notebook_outputs.print_text(x.get("outputs", [])) for x in nbformat.reads(text, 4).cells
    ]
    assert stored == ["", "", "... s\nTrue\n", "loss 1.000\n"]
    path.write_text(text)
    assert notebook_outputs.update(path) == 0
    assert path.read_text() == text


def test_estimates_stay_where_times_are_measured(tmp_path):
    printed = "step 205 ms, compiled in 2.24 min with libtpu"
    cleaned = "step 205 ms, compiled in ...      with libtpu"
    assert notebook_outputs.clean(printed, tmp_path, has_times=False) == cleaned


def test_numbers_that_depend_on_versions_may_vary():
    outputs = [
        [nbformat.v4.new_output("stream", text=text)]
        for text in ("205 ms  12%", "19.1 ms  7%", "s")
    ]
    cell = nbformat.v4.new_code_cell("", metadata={"tags": ["varies"]}, outputs=outputs[0])
    assert notebook_outputs.find_difference(cell, outputs[1]) is None
    assert notebook_outputs.find_difference(cell, outputs[2]) is not None
    cell.metadata.tags = []
    assert notebook_outputs.find_difference(cell, outputs[1]) is not None


def test_a_page_shows_cells_outputs_images_and_links(tmp_path):
    image = base64.b64encode(b"png").decode()
    outputs = [
        nbformat.v4.new_output("stream", text=f"a ``` b\n  {'c d ' * 40}\n"),
        nbformat.v4.new_output("display_data", data={"image/png": image, "text/plain": "figure"}),
    ]
    link = "[a](../docs/planning.md#b) [c](05_keras_fit.ipynb) [d](https://e.f)"
    cells = [
        nbformat.v4.new_markdown_cell(f"# Title\n\n{link}"),
        nbformat.v4.new_code_cell("%pip", metadata={"tags": ["colab"]}),
        nbformat.v4.new_code_cell("print(1)", outputs=outputs),
    ]
    path = tmp_path / "07_new.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    markdown, images = PAGES.render(path)
    assert images == {"notebooks/07_new_1.png": b"png"}
    links = (
        "[Download this notebook](../colab/07_new.ipynb) · [Install tpudist](../installation.md)"
    )
    assert markdown.split("\n\n") == [
        "# Title",
        links,
        "[a](../planning.md#b) [c](05_keras_fit.md) [d](https://e.f)",
        "```python\nprint(1)\n```",
        f"````text\na ``` b\n  {'c d ' * 22}c\n    {'d c ' * 17}d\n````",
        "![Figure 1](07_new_1.png)",
    ]
    colab = "(https://colab.research.google.com/github/a/b/blob/main/colab/07_new.ipynb)"
    assert colab in PAGES.render(path, "https://github.com/a/b")[0]


@pytest.mark.parametrize(
    ("page", "link", "on_site"),
    [
        ("index.md", "colab/05_keras_fit.ipynb", "notebooks/05_keras_fit.md"),
        ("keras_fit.md", "../colab/05_keras_fit.ipynb#a", "notebooks/05_keras_fit.md#a"),
        ("a/b.md", "../../colab/01_quickstart.ipynb", "../quickstart.md"),
        ("quickstart.md", "colab/01_quickstart.ipynb", "colab/01_quickstart.ipynb"),
    ],
)
def test_links_to_notebooks_lead_to_pages(page, link, on_site):
    assert PAGES.link_to_pages(f"[x]({link})", page) == f"[x]({on_site})"
