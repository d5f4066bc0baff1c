"""Tables that a narrow window can show: each cell has a label, and only long names have breaks.

docs/stylesheets/site.css then puts the cells of a row one below the other.
"""

import re
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_SHORT = 22
"""Characters of code that stay on one line."""
_CELL_CODE = re.compile(r"<code>([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Prepares the tables of a page."""
    return _TABLE.sub(lambda table: _with_breaks(_with_labels(table[0])), html)


def _with_labels(table: str) -> str:
    columns = [re.sub("<.*?>", "", th) for th in re.findall(r"<th\b[^>]*>(.*?)</th>", table)]
    if len(columns) < 3:
        return table
    cells = iter(columns * table.count("<tr>"))
    return re.sub(r"<td\b", lambda _: f'<td data-label="{next(cells)}"', table)


def _with_breaks(table: str) -> str:
    def mark(code: re.Match[str]) -> str:
        if len(code[1]) <= _SHORT:
            return f'<code class="short">{code[1]}</code>'
        return f"<code>{re.sub(r'(?<=[._])(?=[A-Za-z])', '<wbr>', code[1])}</code>"

    return _CELL_CODE.sub(mark, table)
