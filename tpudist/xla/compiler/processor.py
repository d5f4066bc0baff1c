"""Names the processor of this machine, on whose model and instructions programs depend."""

import hashlib
import platform
from pathlib import Path


def name() -> str:
    """Returns a name that is equal on two machines with the same model of a processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    keys = ("flags", "Features", "model name")  # instruction sets of x86 and of ARM, and the model
    facts = sorted({line for line in lines if line.startswith(keys)})
    digest = hashlib.sha256("\n".join([platform.processor(), *facts]).encode()).hexdigest()
    return f"{platform.machine() or 'unknown'}-{digest[:12]}"
