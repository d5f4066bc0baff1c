"""Checks the installed versions against the requirements of the installed packages.

Parses versions itself, because the package `packaging` need not be installed.
"""

import importlib.metadata
import operator
import platform
import re

import jax

from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.xla import versions

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
# Name, bounds and condition of "jaxlib<=0.12,>=0.11; extra == 'tpu'". Older metadata have "jaxlib
# (<=0.12,>=0.11)". Extras of the package, as in "ray[default]", are dropped.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_BOUND = re.compile(r"(>=|<=|==|!=|~=|>|<)\s*([\w.*+!-]+)")


def check_versions() -> list[Answer]:
    """Checks whether Python, the packages and jaxlib have the required versions."""
    asked = "versions"
    installed = [f"Python {platform.python_version()}"]
    installed += [f"{name} {versions.version_of(name) or 'missing'}" for name in SHOWN]
    shown = ", ".join(installed)
    requirements = _list_requirements()
    if requirements is None:
        remedy = (
            "Install it: python -m pip install tpudist, or in its folder: python -m pip install "
            "-e ."
        )
        shown += "; tpudist is not installed as a package, so its requirements are unknown"
        return [Answer(asked, shown, Verdict.WARNING, remedy)]
    wrong = [
        f"{name} {versions.version_of(name) or 'is missing'}, but {who} needs {name}{bounds}"
        for who, name, bounds in requirements
        if name != "python" and not is_met(versions.version_of(name), bounds)
    ]
    wrong += [
        f"Python {platform.python_version()}, but {who} needs Python{bounds}"
        for who, name, bounds in requirements
        if name == "python" and not is_met(platform.python_version(), bounds)
    ]
    if jax.__version__ != versions.version_of("jax"):
        # Two installations are on sys.path: Python imports one, and finds the metadata of the
        # other.
        wrong.append(
            f"jax {jax.__version__} is imported from {jax.__file__}, which is another installation"
        )
    if wrong:
        remedy = 'python -m pip install --upgrade "tpudist", in a new virtual environment'
        return [Answer(asked, f"{shown}: {'; '.join(wrong)}", Verdict.FAIL, remedy)]
    return [Answer(asked, shown)]


def _list_requirements() -> list[tuple[str, str, str]] | None:
    """Returns package, requirement and bounds; None if tpudist is not installed as a package."""
    if not versions.version_of("tpudist"):
        return None
    found = [("tpudist", name, bounds) for name, bounds in requirements_of("tpudist").items()]
    found += [("jax", "jaxlib", requirements_of("jax").get("jaxlib", ""))]
    python = str(importlib.metadata.metadata("tpudist").json.get("requires_python", ""))
    return [*found, ("tpudist", "python", python)]


def requirements_of(package: str, extra: str = "") -> dict[str, str]:
    """Returns the bounds of a package's requirements, by name: `{"numpy": ">=2.0"}`.

    Args:
        package: Name of the package. If it is not installed, the result is empty.
        extra: Extra whose requirements to return; "" for those without an extra. Requirements with
            other conditions, such as a platform, are omitted.
    """
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        match = _REQUIREMENT.fullmatch(line.strip())
        condition = (match[3] or "").strip() if match else ""
        names = _EXTRA.fullmatch(condition)
        if match and ((names and names[1] == extra) or (not condition and not extra)):
            found[match[1].lower()] = match[2].strip()
    return found


def is_met(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=0.11,<=0.12.0.1` or `==0.0.50.*`.

    Only numbers count: 0.13.0.dev1 is 0.13.0. Bounds in another form are ignored. A package that
    is missing (version "") meets no bounds.
    """
    if not version:
        return False
    here = _numbers(version)
    return all(_is_within(here, op, limit) for op, limit in _BOUND.findall(bounds))


def _is_within(here: list[int], op: str, limit: str) -> bool:
    there = _numbers(limit)
    if limit.endswith(".*"):
        is_same = here[: len(there)] == there
        return {"==": is_same, "!=": not is_same}.get(op, True)
    # Missing numbers count as zero: 1.4 equals 1.4.0.
    length = max(len(here), len(there))
    padded, bound = (x + [0] * (length - len(x)) for x in (here, there))
    if op == "~=":  # "~=1.4" means ">=1.4, ==1.*"
        return padded >= bound and here[: len(there) - 1] == there[:-1]
    return _COMPARISONS[op](padded, bound)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(x) for x in match[0].split(".")] if match else []
