"""Each fault of `scripts/inject_faults.py` changes a program that exists, and differs from it."""

import sys

import pytest

from places import ROOT

sys.path.append(str(ROOT / "scripts"))
import fault_sites


@pytest.mark.parametrize("name", fault_sites.SITES)
def test_every_fault_is_a_change_of_its_program(name):
    source = fault_sites.read(name)
    faults = [*fault_sites.make_faults(fault_sites.SITES[name])]
    assert len(faults) >= 5
    for kind, old, new in faults:
        changed = source.replace(old, new, 1)
        assert changed != source, kind
        compile(changed, name, "exec")
