"""tpudist gives what TensorFlow gives: the cases of `parity/`, compared with the record.

Where it is meant to differ, the case says why, and what tpudist gives. The marker `parity` asks
TensorFlow itself (the extra `[parity]`) whether the record is what it gives.
"""

import importlib.util
import sys

import pytest

from parity import differences, on_tpudist, plain, record, rules

RULES = rules.all_rules()


def _marks(rule, strategy):
    """Each run checks a rule on its first strategy, and where another one differs otherwise."""
    first = rule.strategies[0]
    is_sweep = strategy != first and rule.differs.get(strategy) == rule.differs.get(first)
    return [pytest.mark.exhaustive] if is_sweep else []


PARAMETERS = [
    pytest.param(rule, strategy, id=f"{rule.name} [{strategy}]", marks=_marks(rule, strategy))
    for rule in RULES
    for strategy in rule.strategies
]


@pytest.fixture(scope="module")
def api():
    api = on_tpudist.Api()
    yield api
    api.close()


@pytest.fixture(scope="module")
def recorded():
    return {section: record.recorded(section) for section in {rule.section for rule in RULES}}


# Old names warn, and options that XLA ignores warn, too: other tests check that.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*has no effect:UserWarning")
@pytest.mark.parametrize(("rule", "strategy"), PARAMETERS)
def test_tpudist_gives_what_tensorflow_gives(rule, strategy, api, recorded):
    tensorflow = recorded[rule.section][rule.name][rules.RECORDED_ON.get(strategy, strategy)]
    found = api.plain(rule.program(api, api.strategy(strategy)))
    if strategy not in rule.differs:
        assert plain.same(found, tensorflow), f"TensorFlow: {tensorflow}\ntpudist:    {found}"
        return
    _, expected = rule.differs[strategy]
    assert plain.same(found, expected), f"expected: {expected}\nfound:    {found}"
    assert not plain.same(found, tensorflow), "they no longer differ: take `differs` off the case"


def test_no_name_of_a_rule_is_cut_short_in_the_record(recorded):
    """A record without a case would never be compared."""
    of_rules = {(rule.section, rule.name) for rule in RULES}
    assert {(section, name) for section in recorded for name in recorded[section]} == of_rules


def test_every_difference_is_asserted_by_a_case():
    asserted = {difference for rule in RULES for difference, _ in rule.differs.values()}
    declared = {d for d in vars(differences).values() if isinstance(d, rules.Difference)}
    assert asserted == declared


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, {"x": [2.0]}], [1.000001, {"x": [2.0]}], True),
        ([1.0], [1.001], False),
        ([1.0], [1.0, 2.0], False),
        ({"x": 1}, {"y": 1}, False),
        (1, 1.0, False),
        (True, 1, False),
        ("nan", "nan", True),
    ],
)
def test_results_are_the_same_if_types_and_numbers_are(a, b, expected):
    assert plain.same(a, b) == expected


@pytest.mark.parity
def test_the_record_is_what_tensorflow_gives():
    """The job of the marker: records again, in separate processes, and compares."""
    if record.PYTHON == sys.executable and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'tpudist[parity]'")
    assert record.changed() == []
