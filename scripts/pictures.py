"""Draws the pictures of the documentation, each for light and for dark pages.

    python scripts/pictures.py [--check | --measure] [NAME...]

writes `docs/images/NAME-light.svg` and `docs/images/NAME-dark.svg`; without names, all of them.
`--check` writes nothing: it lists the files that would change, and exits with 1 if there are any.
`--measure` first runs what the named pictures show, and stores the figures.

A picture is made of live objects, on eight emulated devices, or of `docs/data/NAME.json`: figures
of a bench or of a run, with date, versions and machine. `tests/policy/test_pictures.py` draws all
again and compares. A picture is a module in `scripts/drawing/` with the same name, in which
`facts()` returns what the picture shows and `draw(facts, palette)` returns the canvas; `measure()`,
if there is one, writes the figures.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from drawing.palettes import PALETTES

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NAMES = (
    "mesh",
    "partial-batch",
    "step",
    "placement",
    "call",
    "parameter-servers",
    "checkpoint",
    "curves",
    "comparison",
    "plan",
    "plan-accuracy",
    "call-cost",
    "lost-process",
    "layers",
)


def load(name: str) -> ModuleType:
    """The module of a picture."""
    return importlib.import_module(f"drawing.{name.replace('-', '_')}")


def draw(name: str) -> dict[Path, str]:
    """The files of a picture, and what belongs in each."""
    module = load(name)
    facts = module.facts()
    return {
        IMAGES / f"{name}-{palette.name}.svg": module.draw(facts, palette).svg()
        for palette in PALETTES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--check", action="store_true", help="write nothing; list stale files")
    parser.add_argument("--measure", action="store_true", help="measure the named pictures first")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(NAMES)}")

    import tpudist

    tpudist.emulate(num_devices=8)
    for name in options.names if options.measure else ():
        load(name).measure()
    stale = []
    for name in options.names or NAMES:
        for path, text in draw(name).items():
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path.name)
            if not options.check:
                path.write_text(text)
    print("\n".join(stale) if stale else "All pictures are current.")
    if options.check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
