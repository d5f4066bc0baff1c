"""Programs of `examples/` whose workers do not wait for each other: `ParameterServerStrategy`."""

import importlib.util
import sys
import threading
from types import ModuleType

import numpy as np
import pytest

from example_programs import FOLDER


@pytest.fixture
def load(monkeypatch):
    """Runs the file again, as a module that its data classes find."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    before = set(threading.enumerate())
    yield load
    assert not [x for x in set(threading.enumerate()) - before if x.name.startswith("tpudist")]


@pytest.mark.slow
def test_learners_that_die_lose_no_outer_update(load, capsys):
    """Each round of H steps is merged once, and less is waited for than in step."""
    diloco = load("decoupled_diloco")
    storm = diloco.Scenario("storm", 1, (1.0, 2.0), steps_between_deaths=50, down_s=3.0)
    [outcome] = diloco.main(diloco.QUICK, [storm])
    assert "one learner alone" in capsys.readouterr().out.lower()
    assert outcome.num_deaths >= 2
    np.testing.assert_array_equal(outcome.was_applied, 1)
    assert outcome.loss < 4.5  # nats; 5.5 says nothing
    assert outcome.goodput > storm.goodput_in_step


@pytest.mark.slow
def test_learners_of_several_devices_learn_what_those_of_one_do(load):
    diloco = load("decoupled_diloco")
    calm = diloco.Scenario("calm", 2, (1.0, 1.0))
    losses = []
    for num_devices in (1, 2):
        options = diloco.dataclasses.replace(
            diloco.QUICK, num_steps=10, devices_per_learner=num_devices
        )
        outcome = diloco.train_decoupled(diloco.Task(options), calm)
        assert outcome.num_merges == 2
        losses.append(outcome.loss)
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.slow
def test_no_trajectory_is_learned_from_that_is_too_old_or_counted_twice(load, tmp_path):
    """Actors and servers die, at moments that a seed decides."""
    program = load("actor_learner")
    options = program.Options(
        num_environments=4, num_versions=30, steps_per_version=4, max_age=2, kills=10, seed=0
    )
    outcome = program.run(options, tmp_path)
    assert outcome.num_kills == 10
    assert set(outcome.ages) <= {0, 1, 2}
    assert outcome.num_too_old > 0  # there were such
    np.testing.assert_array_equal(outcome.was_played, 1)
    assert outcome.num_published == 30
    assert outcome.is_served


@pytest.mark.slow
def test_a_learner_waits_for_no_actor_while_it_has_something_to_learn_from(load, tmp_path):
    program = load("actor_learner")
    options = program.Options(num_environments=4, num_versions=20, steps_per_version=4, seed=0)
    outcome = program.run(options, tmp_path)
    assert outcome.num_steps == 80
    assert outcome.num_waits == 0


@pytest.mark.slow
def test_actors_and_a_learner_balance_the_pole(load, capsys):
    outcome = load("actor_learner").main()
    assert np.mean(outcome.scores[:10]) < 60
    assert np.mean(outcome.scores[-10:]) > 150
    assert "at most 4" in capsys.readouterr().out


@pytest.mark.slow
def test_servers_in_order_learn_what_one_process_does(load, tmp_path):
    program = load("recommender")
    options = program.Options(
        dim=8, steps=12, batch_size=64, capacity=1024, servers=3, in_order=True
    )
    alone, losses = program.train_alone(options)
    outcome = program.run(options, tmp_path)
    np.testing.assert_array_equal(outcome.was_counted, 1)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-4)
    np.testing.assert_allclose(outcome.logits, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_table_of_ten_times_the_memory_of_a_server_is_learned_through_deaths(load, capsys):
    program = load("recommender")
    outcome = program.main(
        program.Options(
            dim=8,
            steps=45,
            batch_size=64,
            servers=12,
            budget_mb=0.08,
            capacity=512,
            kills=4,
            tolerance=0.02,  # of so few steps AUC is less certain
        )
    )
    assert outcome.num_kills == 4
    np.testing.assert_array_equal(outcome.was_counted, 1)
    assert outcome.table_bytes >= 10 * 80_000
    assert "With max_bytes=80000 it has room for 1024" in capsys.readouterr().out


def test_no_float_could_hold_the_ids_of_the_recommender(load):
    program = load("recommender")
    clicks = program.Clicks(0, 64)
    ids, *_ = clicks.batch(3)
    assert ids.dtype == np.int64
    assert (ids != ids.astype(np.float64).astype(np.int64)).mean() > 0.9
    np.testing.assert_array_equal(clicks.batch(3)[0], ids)
    assert program.auc(np.array([0.0, 1, 1, 2]), np.array([0, 0, 1, 1])) == 0.875
