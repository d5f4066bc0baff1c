"""Keeps old addresses of pages alive: each shows its reader the page that took its place."""

from pathlib import Path
from typing import Any

MOVED = {
    "data_and_checkpoints": "data_pipelines",
    "faults": "fault_tolerance",
    "finetuning": "pretrained",
    "gradients": "losses",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="../{to}/"><meta http-equiv="refresh" content="0; url=../{to}/"></head>
<body><p>This page has moved to <a href="../{to}/">{to}</a>.</p></body></html>
"""


def on_post_build(config: Any) -> None:
    """Writes a page at each old address that has no page of its own."""
    for old, to in MOVED.items():
        page = Path(config["site_dir"]) / old / "index.html"
        if not page.exists():
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(_PAGE.format(to=to))
