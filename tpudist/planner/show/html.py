"""A plan or a search as HTML without other files, readable on light and dark pages."""

from __future__ import annotations

import dataclasses
from html import escape

from tpudist.display.text_tables import STYLE, TextTable
from tpudist.planner.show.report_parts import Bars, Part, Report

# In addition to the style of tables; the colors are mid-tones or half transparent, too.
_STYLE = """
.tpudist-plan.tpudist-table { max-width: 60rem; }
.tpudist-plan .verdict { padding: 0.6rem 0.9rem; border-left: 0.3rem solid; border-radius: 0.3rem; }
.tpudist-plan .fits { border-color: #2fa56a; background: rgba(47, 165, 106, 0.12); }
.tpudist-plan .refused { border-color: #e2574c; background: rgba(226, 87, 76, 0.12); }
.tpudist-plan .title { font-size: 1.15rem; font-weight: 600; margin-bottom: 0.3rem; }
.tpudist-plan .head { font-weight: 600; margin: 1.1rem 0 0.4rem; }
.tpudist-plan .bar { display: flex; height: 1.15rem; border-radius: 0.25rem; overflow: hidden;
  background: rgba(128, 128, 128, 0.22); margin-bottom: 0.45rem; }
.tpudist-plan .bar div { min-width: 1px; }
.tpudist-plan .swatch { display: inline-block; width: 0.7em; height: 0.7em; margin-right: 0.5em;
  border-radius: 0.15em; }
.tpudist-plan .dim { opacity: 0.65; }
.tpudist-plan ul { margin: 0.3rem 0 0; padding-left: 1.2rem; }
.tpudist-plan table.facts td:first-child { opacity: 0.65; }
.tpudist-plan table.facts tr:nth-child(-n+3) td:last-child { font-weight: 600; }
"""


def format_html(report: Report) -> str:
    """Returns a `div` with its style, for a notebook."""
    facts = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in report.facts
    )
    parts = [
        f'<div class="tpudist-plan tpudist-table"><style>{STYLE}{_STYLE}</style>',
        f'<div class="verdict {"fits" if report.fits else "refused"}">',
        f'<div class="title">{escape(report.title)}</div>',
        f'<table class="facts"><tbody>{facts}</tbody></table></div>',
    ]
    for section in report.sections:
        parts.append(f'<div class="head">{escape(section.title)}</div>')
        if isinstance(section, Bars):
            parts.append(_bars(section))
        elif isinstance(section, TextTable):
            parts.append(dataclasses.replace(section, title="").format_html())
        else:
            parts.append(_lines(section.lines))
    return "\n".join([*parts, "</div>"])


def format_page(content: str) -> str:
    """Returns a complete page around a `div` of `format_html`, for a file."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<title>tpudist plan</title><style>:root { color-scheme: light dark; } "
        "body { font-family: system-ui, sans-serif; margin: 2rem; }</style></head>"
        f"<body>{content}</body></html>\n"
    )


def _bars(bars: Bars) -> str:
    pieces = "".join(
        f'<div style="width:{100 * part.amount / (bars.whole or 1):.3f}%;background:{part.color}"'
        f' title="{escape(f"{part.name}: {part.text}")}"></div>'
        for part in bars.parts
    )
    rows = [_legend(part) for part in bars.parts]
    if bars.free:
        rows.append(_legend(bars.free, is_free=True))
    return (
        f'<div class="bar">{pieces}</div>'
        f"<table><tbody>{''.join(rows)}</tbody></table>{_lines(bars.lines)}"
    )


def _legend(part: Part, *, is_free: bool = False) -> str:
    # The free rest has no piece of the bar, and so no color.
    color, attributes = ("transparent", ' class="dim"') if is_free else (part.color, "")
    return (
        f'<tr{attributes}><td><span class="swatch" style="background:{color}"></span>'
        f'{escape(part.name)}</td><td class="number">{escape(part.text)}</td>'
        f'<td class="number">{escape(part.share)}</td></tr>'
    )


def _lines(lines: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
