"""Makes pictures that scroll in narrow windows reachable by keyboard."""

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Gives the box of each picture a place in the order of the Tab key."""
    return html.replace("<p><img ", '<p tabindex="0"><img ')
