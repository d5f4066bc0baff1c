"""Executes the notebooks of `colab/`, and stores what each cell prints below it.

`python scripts/notebook_outputs.py 01_quickstart` rewrites the outputs of a notebook that are out
of date; without a name, those of all notebooks. Devices are emulated. The first cell, which
installs tpudist, is written with the address of the project (`Repository` of `[project.urls]` in
pyproject.toml), and not executed. `--only-first-cell` writes this cell and executes nothing.

Outputs have no times, progress bars, paths, warnings or execution counts, so a second run writes
the same file. A stored output that still matches is kept (`doc_outputs.find_difference`). If a cell
has the tag `varies`, its numbers depend on the version of Python or of the TPU compiler: its stored
output is kept if only numbers differ.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import nbclient
import nbformat

import doc_outputs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {x.stem: x for x in sorted((ROOT / "colab").glob("*.ipynb"))}
MOST_IMAGE_BYTES = 60_000
FIRST_CELL = """\
# Installs tpudist if it is missing: from the clone, a wheel in this folder, or ADDRESS.
import importlib.metadata
from pathlib import Path

ADDRESS = "{address}"
EXTRAS = "aot,hub,keras,port,train"
if Path("/dev/nvidiactl").exists():
    EXTRAS += ",cuda"

here = Path.cwd()
urls = [x.as_uri() for x in (here, *here.parents) if (x / "tpudist" / "__init__.py").exists()]
urls += [x.as_uri() for x in here.glob("tpudist-*.whl")]
urls += [f"git+{{ADDRESS}}"] if ADDRESS else []
if all(x.name != "tpudist" for x in importlib.metadata.distributions()):
    if not urls:
        raise RuntimeError(
            "This notebook is not in a clone of the repository. Open it in a clone, or upload a "
            "wheel (tpudist-*.whl) to this folder. Then run this cell again."
        )
    %pip install --quiet "tpudist[{{EXTRAS}}] @ {{urls[0]}}"
"""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What a clock measures: "3 s", "72ms/step", "31 steps/s", "0:19", "7% of it in compiled steps".
_TIME = re.compile(
    r"\b\d[\d,]*(?:\.\d+)?(?= ?(?:ms|s|min)\b| \w+/s\b|% of it in compiled)|\b\d+:\d\d\b"
)
# The times that a plan or a search measures, among its estimates: "compiled in 2.24 min".
_MEASURED = re.compile(r"((?:compiled +|candidates )in )(\d[\d.]* (?:ms|s|min))\b")
_ROUNDING = re.compile(r"(?<=rounding explains )[\d.e+-]+")
# A step that a progress report shows because some seconds have passed.
_PROGRESS = re.compile(r"^step \d+/\d+ .* left\n", re.M)
_CELL_FILE = re.compile(r"(?:/tmp/ipykernel_\d+/)?\b\d{5,}\.py\b")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?%?")


def read_address() -> str:
    """Returns the public address of the repository; empty if it has none yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def make_first_cell() -> str:
    """Returns the source of the cell that installs tpudist."""
    return FIRST_CELL.format(address=read_address()).rstrip()


def is_hosted(cell: Any) -> bool:
    """Whether a cell is only for a machine where tpudist is not installed."""
    return "colab" in cell.metadata.get("tags", [])


def execute(notebook: Any, folder: Path) -> list[list[Any]]:
    """Executes a notebook, and returns the outputs of each of its cells.

    Args:
        notebook: The notebook. It does not change.
        folder: Working directory of the notebook, and of all files that it leaves.
    """
    names = "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"
    environ = {name: str(folder / ".home") for name in (*names, "XDG_CACHE_HOME")}
    environ |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    cells = copy.deepcopy(notebook.cells)
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = []
    ran = nbformat.v4.new_notebook(cells=[x for x in cells if not is_hosted(x)])
    nbclient.NotebookClient(
        ran, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute(env=os.environ | environ)
    return [_clean_outputs(x, folder) for x in cells]


def varies(cell: Any) -> bool:
    """Whether the numbers of a cell depend on the version of Python or of the TPU compiler."""
    return "varies" in cell.metadata.get("tags", [])


def _clean_outputs(cell: Any, folder: Path) -> list[Any]:
    """Returns the printed text, results and images, and nothing that differs between two runs."""
    cleaned: list[Any] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            if cleaned and cleaned[-1].output_type == "stream":
                cleaned[-1].text += output.text
            else:
                cleaned.append(nbformat.v4.new_output("stream", text=output.text, name="stdout"))
        elif output.output_type in ("execute_result", "display_data"):
            kept = {k: v for k, v in output.data.items() if k in ("image/png", "text/plain")}
            if "image/png" in kept:
                kept["text/plain"] = "figure"
            cleaned.append(nbformat.v4.new_output(output.output_type, data=kept))
    for output in cleaned:
        if output.output_type == "stream":
            output.text = clean(output.text, folder)
        else:
            text = output.data["text/plain"]
            output.data["text/plain"] = clean(text, folder, has_times=False)
    return [x for x in cleaned if print_text([x]).strip()]


def clean(text: str, folder: Path, *, has_times: bool = True) -> str:
    """Returns a printed text without colors, progress bars, times and paths.

    Args:
        text: The text.
        folder: Working directory of the notebook.
        has_times: Whether all its times are measured, as in printed text. Plans estimate times.
    """
    text = _ESCAPE.sub("", text).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    lines = [x.rstrip("\r").rpartition("\r")[2].rstrip() for x in text.split("\n")]
    text = _PROGRESS.sub("", _CELL_FILE.sub("cell", "\n".join(lines)))
    text = _ROUNDING.sub("...", text)
    if has_times:
        return _TIME.sub("...", text)
    return _MEASURED.sub(lambda found: found[1] + "...".ljust(len(found[2])), text)


def find_difference(cell: Any, found: list[Any]) -> str | None:
    """Returns the first difference between the stored and the new outputs of a cell, or None.

    Args:
        cell: The cell, with its stored outputs.
        found: New outputs. Of figures, only the number is compared.
    """
    stored = cell.outputs
    images = [sum("image/png" in x.get("data", {}) for x in outputs) for outputs in (stored, found)]
    if images[0] != images[1]:
        return f"stored {images[0]} figures, found {images[1]}"
    texts = [print_text(stored), print_text(found)]
    if varies(cell):
        texts = [" ".join(_NUMBER.sub("0", x).replace("-", "").split()) for x in texts]
    return doc_outputs.find_difference(*texts)


def print_text(outputs: list[Any]) -> str:
    """Returns the text of outputs, as a reader sees it."""
    return "".join(
        x.text if x.output_type == "stream" else x.data["text/plain"] + "\n" for x in outputs
    )


def update(path: Path, *, only_first_cell: bool = False) -> int:
    """Rewrites the outputs of a notebook that are out of date, and returns how many it rewrote."""
    notebook = nbformat.read(path, as_version=4)
    changed = 0
    if not only_first_cell:
        with tempfile.TemporaryDirectory() as folder:
            found = execute(notebook, Path(folder))
        for cell, outputs in zip(notebook.cells, found, strict=True):
            if cell.cell_type == "code" and find_difference(cell, outputs):
                cell.outputs = outputs
                changed += 1
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = make_first_cell() if is_hosted(cell) else cell.source
            cell.execution_count = None
            cell.metadata.pop("execution", None)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
    return changed


def main() -> None:
    """Rewrites the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description="Execute notebooks and store their outputs.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="notebook (default: all of colab/)"
    )
    parser.add_argument(
        "--only-first-cell", action="store_true", help="execute nothing; write the first cell"
    )
    options = parser.parse_args()
    for name in options.names or NOTEBOOKS:
        changed = update(NOTEBOOKS[name], only_first_cell=options.only_first_cell)
        print(f"{name}: {changed} outputs rewritten", flush=True)


if __name__ == "__main__":
    main()
