"""The reference (docs/reference/) shows each public name once, and the site's links are right.

`mkdocs build --strict` reads docstrings and follows links; these tests need no MkDocs.
"""

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import tpudist
from places import DATA, ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
# `::: name`, and the options below it.
SHOWN = [
    (name, (yaml.safe_load(options) or {}).get("options", {}))
    for page in PAGES
    for name, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", page.read_text(), re.M)
]
NAMES = [name for name, _ in SHOWN]

# Modules whose names are explained, under these names or those of tpudist.
MODULES = (
    "tpudist",
    "tpudist.checkpoint",
    "tpudist.cluster_resolver",
    "tpudist.compat",
    "tpudist.errors",
    "tpudist.experimental",
    "tpudist.experimental.partitioners",
    "tpudist.input",
    "tpudist.keras",
    "tpudist.models",
    "tpudist.planner",
    "tpudist.testing",
    "tpudist.training",
)
# Modules whose docstring a page shows, with some of their names.
MORE_MODULES = ("tpudist.compat.v1", "tpudist.pytest_plugin", "tpudist.xla.topology")


def found(dotted: str) -> Any:
    """Returns the module or the object that a dotted name names."""
    owner: Any = tpudist
    parts = dotted.split(".")
    for i, name in enumerate(parts[1:], 2):
        if not hasattr(owner, name):
            importlib.import_module(".".join(parts[:i]))
        owner = getattr(owner, name)
    return owner


def hook(name: str) -> Any:
    """A module of docs/hooks, which MkDocs calls while it builds."""
    path = ROOT / "docs" / "hooks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"hook_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


def test_each_name_of_tpudist_is_shown_once():
    shown = [name for name in NAMES if name.count(".") == 1]
    assert sorted(set(tpudist.__all__) - {name.partition(".")[2] for name in shown}) == []
    assert len(set(NAMES)) == len(NAMES)


def test_every_name_on_a_page_exists():
    for name in NAMES:
        assert found(name) is not None, name


@pytest.mark.parametrize("module", MODULES)
def test_each_name_of_a_public_module_is_shown(module):
    shown = [id(found(name)) for name in NAMES]
    assert module == "tpudist" or module in NAMES
    assert [n for n in found(module).__all__ if id(getattr(found(module), n)) not in shown] == []


def test_the_docstrings_of_all_public_modules_are_shown():
    assert [module for module in MORE_MODULES if module not in NAMES] == []


def test_members_that_are_chosen_exist_and_leave_out_none_of_tf_distribute():
    surface: dict[str, list[str]] = json.loads((DATA / "surface.json").read_text())["surface"]
    old = [n for name in NAMES if ".deprecated_methods." in name for n in vars(found(name))]
    for name, options in SHOWN:
        if (members := options.get("members")) is None or not inspect.isclass(found(name)):
            continue
        assert [x for x in members if not hasattr(found(name), x)] == [], name
        methods = {
            x for x in surface.get(name, ()) if inspect.isfunction(getattr(found(name), x, None))
        }
        assert sorted(x for x in methods - {*members, *old} if x[0] != "_") == [], name


# The main classes. An example can be that of another name, which it uses.
EXAMPLES = (
    "tpudist.MirroredStrategy",
    "tpudist.TPUStrategy",
    "tpudist.MultiWorkerMirroredStrategy",
    "tpudist.ParameterServerStrategy",
    "tpudist.coordinator.ClusterCoordinator",
    "tpudist.Variable",
    "tpudist.PerReplica",
    "tpudist.Optimizer",
    "tpudist.TrainState",
    "tpudist.checkpoint.CheckpointManager",
    "tpudist.DistributedDataset",
    "tpudist.planner.Plan",
)


def test_each_main_class_has_a_short_example_with_output_above_its_entry():
    text = "\n".join(page.read_text() for page in PAGES)
    block = r"```python\n((?:(?!```).*\n)+)```\n\n```text\n(?:(?!```).*\n)+```\n\n::: (\S+)\n"
    examples = {name: code for code, name in re.findall(block, text)}
    for name in EXAMPLES:
        num_lines = len([x for x in examples[name].splitlines() if x.strip()])
        assert 6 <= num_lines <= 17, name
        assert "import tpudist" in examples[name], name


def test_each_page_emulates_its_devices_once_in_its_first_block():
    for page in PAGES:
        if page.stem == "command_line":  # its programs are files, which commands run
            continue
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        emulates = ["tpudist.emulate(num_devices=8)" in block for block in blocks]
        assert emulates == [True, *[False] * len(blocks)][: len(blocks)], page


def test_an_example_above_an_entry_is_shown_below_its_heading():
    example = '<div class="highlight"><pre>code</pre></div>\n<div class="highlight">output</div>\n'
    entry = '<div class="doc doc-object doc-class">\n'
    heading = '<h3 id="tpudist.X" class="doc doc-heading">X</h3>\n'
    signature = '<div class="doc-signature highlight"><pre>X()</pre></div>'
    shown = hook("names").on_page_content(f"<p>text</p>\n{example}{entry}{heading}{signature}")
    assert shown == f"<p>text</p>\n{entry}{heading}{example}{signature}"
    assert hook("names").on_page_content(signature + entry) == signature + entry


def test_the_site_has_a_page_for_each_part_of_the_reference():
    nav = re.findall(r"reference/\w+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(nav) == [f"reference/{page.name}" for page in PAGES]


@pytest.mark.parametrize(
    ("path", "link", "on_site"),
    [
        ("README.md", "docs/porting.md", "porting.md"),
        ("README.md", "docs/images/plan.png", "images/plan.png"),
        ("README.md", "CHANGELOG.md", "changelog.md"),
        ("docs/porting.md", "../README.md#emulation", "index.md#emulation"),
        ("docs/porting.md", "differences.md", "differences.md"),
        ("docs/examples.md", "../examples/README.md", "examples.md"),
        ("examples/README.md", "gpt_nnx/plain.py", "examples/gpt_nnx/plain.py"),
        ("docs/reference/strategies.md", "../architecture.md#x", "../architecture.md#x"),
        ("docs/reference/index.md", "../../README.md", "../index.md"),
        ("docs/porting.md", "#names", "#names"),
        ("README.md", "https://example.org/README.md", "https://example.org/README.md"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(path, link, on_site):
    assert hook("pages").with_links(f"a [b]({link}) c", path) == f"a [b]({on_site}) c"


def test_links_between_files_lead_to_files():
    """GitHub shows them, too, and no build checks them there."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MirroredStrategy", "tpudist.MirroredStrategy"),
        ("tpudist.function", "tpudist.function"),
        ("strategy.run", "tpudist.Strategy.run"),
        ("Strategy.plan", "tpudist.Strategy.plan"),
        ("experimental.PreemptionWatcher", "tpudist.experimental.PreemptionWatcher"),
        ("function", None),
        ("jax.Array", None),
        ("tf.distribute.MirroredStrategy", None),
        ("NoSuchName", None),
    ],
)
def test_a_public_name_in_a_text_is_found_in_the_reference(text, name):
    assert hook("names").identifier(text) == name


def test_the_options_of_a_command_are_a_table():
    source = '''
class Options:
    """What it does."""
    topology: str
    """The slice."""
    replica_axes: tuple[str, ...] = ()
    """Mesh axes;
    none | some."""
    cache: bool = True
    """Look there first."""
    count: Annotated[int | None, arg(aliases=["-n"], metavar="N")] = None
    """Number of processes (default: one)."""
    program: Annotated[Positional[str], arg(metavar="SCRIPT")]
    """A file."""
    model: Model = field(default_factory=Model)
'''
    assert hook("command_options").table(source, "Options").splitlines()[2:] == [
        "| `--topology` | required | The slice. |",
        "| `--replica-axes` |  | Mesh axes; none \\| some. |",
        "| `--cache` | on | Look there first. |",
        "| `-n N`, `--count N` | `one` | Number of processes. |",
        "| `SCRIPT` | required | A file. |",
    ]


def test_cells_know_their_columns_and_long_names_have_breaks():
    name = "a_long_package.AndItsClass"
    row = f"<tr><td><code>{name}</code></td><td><code>--host-index</code></td><td></td></tr>"
    table = "<table><thead><tr><th>one</th><th>two</th><th>three</th></tr></thead>" + row
    shown = hook("tables").on_page_content(f"{table}</table>")
    parts = "a_<wbr>long_<wbr>package.<wbr>AndItsClass"
    assert f'<td data-label="one"><code>{parts}</code></td>' in shown
    assert '<td data-label="two"><code class="short">--host-index</code></td>' in shown
    assert '<td data-label="three"></td>' in shown


def test_nothing_of_the_build_is_kept():
    assert "site/" in Path(ROOT / ".gitignore").read_text().splitlines()
