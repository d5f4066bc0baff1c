"""Names the processor of this machine by what it can do: programs for the CPU hold its own code."""

import hashlib
import platform
from pathlib import Path


def name() -> str:
    """A name that two machines share if their processors have the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name")
    facts = sorted({line for line in lines if line.startswith(wanted)})
    digest = hashlib.sha256("\n".join([platform.processor(), *facts]).encode()).hexdigest()
    return f"{platform.machine() or 'unknown'}-{digest[:12]}"
