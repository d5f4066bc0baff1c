"""Figures of a run or a bench: `docs/data/NAME.json`, with date, versions and machine."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
PACKAGES = ("tpudist", "jax", "flax", "optax", "numpy")


def read(name: str) -> Any:
    """The figures of a picture."""
    return json.loads((DATA / f"{name}.json").read_text())["figures"]


def write(name: str, source: str, figures: Any, **more: Any) -> None:
    """Stores figures that were measured on this machine just now.

    Args:
        name: Name of the picture.
        source: The command that measures them.
        figures: Figures that the picture shows.
        more: Further facts that a reader needs.
    """
    stored = {
        "source": source,
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{x: importlib.metadata.version(x) for x in PACKAGES},
        },
        "machine": f"{os.cpu_count()} shared CPU cores",
        **more,
        "figures": figures,
    }
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")


def load_average() -> float:
    """Number of programs that wanted a core in the last minute, of this machine."""
    return round(os.getloadavg()[0], 1)
