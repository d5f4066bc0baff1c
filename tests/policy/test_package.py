"""Metadata of the package: one version, types, extras, and working links."""

import re
import tomllib

import pytest
import yaml

import tpudist
from places import PACKAGE, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
README = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)]+)\)")


def long_description(text: str) -> str:
    """Returns README.md as the package's page shows it, by the rules of pyproject.toml."""
    for rule in README["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == tpudist.__version__ == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert [x["name"] for x in citation["authors"]] == [x["name"] for x in PROJECT["authors"]]


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").read_text() == ""
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_page_of_the_package_has_no_link_that_it_cannot_follow():
    text = long_description((ROOT / "README.md").read_text())
    assert [target for _, target in LINK.findall(text) if not target.startswith("https://")] == []
    assert "From tf.distribute" in text
    assert not re.search(r"!\[|<img|<source|<!--", text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("See [the guide](docs/gpus.md#install), then", "See the guide, then"),
        ("[JAX](https://docs.jax.dev)", "[JAX](https://docs.jax.dev)"),
        ("a\n\n![A plan](docs/images/plan.png)\n\nb", "a\n\nb"),
        ("a\n\n<picture>\n  <img alt='b' src='c.svg'>\n</picture>\n\nd", "a\n\nd"),
        ("a\n\n<!-- b -->\nc", "a\n\nc"),
        ("x[0](y)", "x0"),
    ],
)
def test_links_to_files_are_the_words_that_they_stand_on(written, shown):
    assert long_description(written) == shown


def test_the_extras_of_accelerators_are_bounded_as_jax_itself():
    (bound,) = (x.removeprefix("jax") for x in PROJECT["dependencies"] if re.match(r"jax\W", x))
    extras = PROJECT["optional-dependencies"]
    assert extras["cuda"] == [f"jax[cuda13]{bound}"]
    assert extras["cuda12"] == [f"jax[cuda12]{bound}"]
    assert extras["tpu"] == [f"jax[tpu]{bound}"]
    gpus = (ROOT / "docs" / "gpus.md").read_text()
    assert {"cuda", "cuda12"} <= set(re.findall(r"tpudist\[(\w+)\]", gpus))


def test_the_page_on_installation_names_each_extra():
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "installation.md").read_text(), re.M)
    named = re.findall(r"`([\w-]+)`", " ".join(rows))
    assert sorted(named) == sorted(PROJECT["optional-dependencies"])
