"""A small table as text, and as HTML that a notebook shows on light and on dark pages."""

from collections.abc import Sequence
from html import escape

# `all: revert` keeps what notebooks say of every table out of this one.
_STYLE = """
.tpudist-table { font-size: 0.9rem; line-height: 1.4; max-width: 70rem; overflow-x: auto; }
.tpudist-table .title { font-weight: 600; margin-bottom: 0.3rem; }
.tpudist-table .note { opacity: 0.65; margin-top: 0.3rem; }
.tpudist-table table { all: revert; border-collapse: collapse; color: inherit; font-size: inherit; }
.tpudist-table table tr { all: revert; background: none !important; }
.tpudist-table table td, .tpudist-table table th { all: revert; padding: 0.1rem 1.1rem 0.1rem 0;
  text-align: left; vertical-align: top; color: inherit; }
.tpudist-table table th { font-weight: 400; opacity: 0.65; }
"""


def write_text(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """Lines of aligned columns, under a title and over notes."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([title, *lines, *notes])


def write_html(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """A `div` with its style, of the same."""

    def write_row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = write_row("th", head) + "".join(write_row("td", row) for row in rows)
    below = "".join(f'<div class="note">{escape(note)}</div>' for note in notes)
    return (
        f'<div class="tpudist-table"><style>{_STYLE}</style><div class="title">{escape(title)}'
        f"</div><table>{body}</table>{below}</div>"
    )
