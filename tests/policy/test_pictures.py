"""The pictures of the documentation are current, readable, and have alternative text."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

import pictures
from drawing.palettes import PALETTES, contrast
from places import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SLOW = ("checkpoint", "layers", "mesh", "placement", "step")  # take more than 0.3 s
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in pictures.NAMES],
)
def test_a_picture_is_up_to_date(name):
    """`python scripts/pictures.py NAME` draws it again."""
    for path, text in pictures.draw(name).items():
        assert path.read_text() == text, path.name
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        assert root.findtext(f"{SVG}title")


def test_every_picture_file_belongs_to_a_picture():
    files = {x.name for x in pictures.IMAGES.glob("*-*.svg")}
    themes = [x.name for x in PALETTES]
    assert files == {f"{x}-{theme}.svg" for x, theme in itertools.product(pictures.NAMES, themes)}


@pytest.mark.parametrize("palette", PALETTES, ids=lambda x: x.name)
def test_text_has_a_contrast_of_at_least_4_5(palette):
    backgrounds = [*palette.pages, *palette.fills.values()]
    pairs = itertools.product(palette.text.values(), backgrounds)
    assert [x for x in pairs if contrast(*x) < 4.5] == []
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def images_of(text):
    """The images of a Markdown text: alternative text and address."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)
    yield from re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", text)
    for tag in re.findall(r"<img\b[^>]*>", text):
        parts = dict(re.findall(r'(alt|src)="([^"]*)"', tag))
        yield parts.get("alt", ""), parts["src"]


def test_images_are_found():
    text = "![A b](x.svg#only-light)\n```\n![](no.svg)\n```\n<img src='y' alt=''>".replace("'", '"')
    assert list(images_of(text)) == [("A b", "x.svg#only-light"), ("", "y")]


def test_every_image_has_a_short_alternative_text():
    for page in PAGES:
        for alt, address in images_of(page.read_text()):
            assert 3 <= len(alt.split()) <= 25, (page.name, address, alt)
