"""One table is shown as text, as HTML and by rich, and cells are never markup."""

import dataclasses

import pytest
from rich.console import Console

from tpudist.display.text_tables import STYLE, Cell, Column, TextTable, format_source

TABLE = TextTable(
    ("name", Column("count", is_number=True), Column("more", only_wide=True)),
    [("[bold]<a>", "7", "x"), (Cell("b", "red"), "1,000", "y")],
    "Title",
    ("and 3 more",),
)


def print_rich(table, width=120):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_text_and_terminal_have_the_same_lines():
    lines = [
        "Title",
        "name       count  more",
        "[bold]<a>      7  x",
        "b          1,000  y",
        "and 3 more",
    ]
    assert str(TABLE).splitlines() == lines
    assert print_rich(TABLE) == lines


def test_narrow_terminals_omit_columns():
    assert print_rich(TABLE, 97)[1] == "name       count"
    assert print_rich(TABLE, 98)[1] == "name       count  more"


def test_headings_and_title_are_optional():
    bare = dataclasses.replace(TABLE, title="", notes=(), has_header=False)
    assert str(bare).splitlines() == ["[bold]<a>      7  x", "b          1,000  y"]
    assert print_rich(bare) == str(bare).splitlines()
    assert str(TextTable((), ())) == ""


def test_html_escapes_cells_and_contains_its_style_once():
    page = TABLE._repr_html_()
    assert "[bold]&lt;a&gt;" in page
    assert '<td class="number">1,000</td>' in page
    assert page.count(STYLE) == 1
    assert "<style>" not in TABLE.format_html()


def test_source_lines_are_shortened_by_width():
    table = TextTable((Column("line", is_source=True),), [("/a/b/models/layer.py:1",), ("",)])
    assert print_rich(table, 120)[1] == "models/layer.py:1"
    assert print_rich(table, 60)[1] == "layer.py:1"
    assert 'title="/a/b/models/layer.py:1"><code>models/layer.py:1<' in table.format_html()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, ""),
        ("/a/b/models/transformer.py:142", "models/transformer.py:142"),
        ("/a/b/models/../train.py:9", "b/train.py:9"),
        ("train.py:9", "train.py:9"),
    ],
)
def test_format_source_keeps_the_end_of_the_path(source, text):
    assert format_source(source) == text
