"""Check of versions: what is installed against what the installed packages say that they need."""

import importlib.metadata
import platform
import re

import jax

from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.xla import versions

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|~=|>|<)\s*([\w.*+!-]+)")


def look_at_versions() -> list[Answer]:
    """Whether Python and the packages are new enough, and jax has the jaxlib that it needs."""
    asked = "versions"
    found = [f"Python {platform.python_version()}"]
    found += [f"{name} {versions.version_of(name) or 'missing'}" for name in SHOWN]
    shown = ", ".join(found)
    wanted = _needs()
    if wanted is None:
        remedy = (
            "Install it: python -m pip install tpudist, or in its folder: python -m pip install "
            "-e ."
        )
        shown += "; tpudist is not installed as a package, so its requirements are unknown"
        return [Answer(asked, shown, Verdict.WARNING, remedy)]
    wrong = [
        f"{name} {versions.version_of(name) or 'is missing'}, but {who} needs {name}{bounds}"
        for who, name, bounds in wanted
        if name != "python" and not is_met(versions.version_of(name), bounds)
    ]
    wrong += [
        f"Python {platform.python_version()}, but {who} needs Python{bounds}"
        for who, name, bounds in wanted
        if name == "python" and not is_met(platform.python_version(), bounds)
    ]
    if jax.__version__ != versions.version_of("jax"):
        # Two of them lie on sys.path: the module of one is found, and the metadata of the other.
        wrong.append(
            f"jax {jax.__version__} is imported from {jax.__file__}, which is another installation"
        )
    if wrong:
        remedy = 'python -m pip install --upgrade "tpudist", in a new virtual environment'
        return [Answer(asked, f"{shown}: {'; '.join(wrong)}", Verdict.FAIL, remedy)]
    return [Answer(asked, shown)]


def _needs() -> list[tuple[str, str, str]] | None:
    """Who needs which package, within which bounds; None if tpudist's metadata is not there."""
    if not versions.version_of("tpudist"):
        return None
    found = [("tpudist", name, bounds) for name, bounds in requirements_of("tpudist").items()]
    found += [("jax", "jaxlib", requirements_of("jax").get("jaxlib", ""))]
    python = str(importlib.metadata.metadata("tpudist").json.get("requires_python", ""))
    return [*found, ("tpudist", "python", python)]


def requirements_of(package: str, extra: str = "") -> dict[str, str]:
    """The bounds of what an installed package needs, by name: `{"numpy": ">=2.0"}`.

    Args:
        package: Its name. One that is not installed needs nothing.
        extra: Which of its extras is meant; "" for what it needs without one. Requirements with
            other conditions, such as a platform, are left out.
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
    """Whether a version lies within bounds such as `>=0.11,<=0.12.0.1` or `==0.0.50.*`.

    By its numbers alone: 0.13.0.dev1 counts as 0.13.0. What has another form is not judged.
    """
    if not version:
        return False
    here = _numbers(version)
    return all(_holds(here, op, limit) for op, limit in _BOUND.findall(bounds))


def _holds(here: list[int], op: str, limit: str) -> bool:
    there = _numbers(limit)
    if limit.endswith(".*"):
        same = here[: len(there)] == there
        return same if op == "==" else not same if op == "!=" else True
    length = max(len(here), len(there))
    one, other = (x + [0] * (length - len(x)) for x in (here, there))
    if op == "~=":
        return one >= other and here[: len(there) - 1] == there[:-1]
    return {
        ">=": one >= other,
        "<=": one <= other,
        "==": one == other,
        "!=": one != other,
        ">": one > other,
        "<": one < other,
    }[op]


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(x) for x in match[0].split(".")] if match else []
