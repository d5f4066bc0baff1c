"""The programs of `examples/` give the losses of one device, with few changed lines and compiles.

Steps are few here: over many, an ulp grows as it does between any two machines.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import example_programs
from compiles import NewCompiles
from example_programs import FOLDER, NAMES, load, num_changed_lines

MOST_CHANGED_LINES = 12

# What the programs are called with: as little as shows whether the numbers are the same.
SMALL = {
    "diffusion_equinox": {"num_steps": 30, "width": 32},
    "gpt_nnx": {"num_steps": 8, "width": 16, "length": 16},
    "lm1b_linen": {"num_steps": 5, "width": 16, "dropout_rate": 0.0},
    "mnist_haiku": {"num_steps": 10, "batch_size": 64},
    "mnist_jax": {"num_epochs": 2},
    "mnist_linen": {"num_steps": 10, "batch_size": 64, "width": 8},
    "ppo_jax": {"num_steps": 4, "num_environments": 16},
    "resnet_linen": {"num_steps": 5, "batch_size": 32},
    "rnn_haiku": {"num_steps": 8},
    "spirals_equinox": {"num_steps": 20, "width": 8},
    "vae_nnx": {"num_steps": 10, "width": 32},
}
# Replicas draw numbers of their own for their rows, so the losses of single steps are others.
RANDOM = {
    "diffusion_equinox": "noise, and times that are spread over the rows of a replica",
}
TAILS = {"mnist_jax": "1797 digits are 14 batches of 128 and one of 5"}
# Each run has these two, and a share of the others.
CORE = {"mnist_linen", "vae_nnx"}
PACKAGES = {"haiku": "haiku", "equinox": "equinox"}


def need(name: str) -> None:
    """Skips where the package of an example is not installed."""
    package = PACKAGES.get(name.rpartition("_")[2])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: the extra `test` has it")


def run_both(name: str, **options) -> tuple[np.ndarray, np.ndarray, list]:
    """The losses of each step of both programs, and what the distributed one compiled."""
    need(name)
    plain = load(name, "plain").main(**options)
    new_compiles = NewCompiles()
    distributed = load(name, "distributed").main(**options)
    return np.asarray(plain), np.asarray(distributed), new_compiles()


@pytest.mark.parametrize("name", NAMES)
def test_a_distributed_program_changes_few_lines(name):
    assert 0 < num_changed_lines(name) <= MOST_CHANGED_LINES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in CORE else [pytest.mark.exhaustive]) for x in NAMES]
)
def test_an_example_gives_the_losses_of_one_device_in_one_program(name, monkeypatch):
    if name == "vae_nnx":  # each replica draws noise for its own rows
        monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.zeros(shape))
    plain, distributed, compiles = run_both(name, **SMALL[name])
    assert len(compiles) == (2 if name in TAILS else 1), [x.cause for x in compiles]
    if name in RANDOM:
        # Means of 10 steps; single ones differ by 10 %, like those of two seeds.
        np.testing.assert_allclose(_tenths(distributed), _tenths(plain), rtol=0.05)
    else:
        np.testing.assert_allclose(distributed, plain, rtol=1e-5)
    assert len(plain) > 4
    assert np.isfinite(plain).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            *("lm1b_linen", {"num_steps": 20, "width": 16, "dropout_rate": 0.1}),
            marks=pytest.mark.exhaustive,
        ),
        ("vae_nnx", {}),
    ],
)
def test_losses_with_random_numbers_of_each_replica_fall_alike(name, options):
    plain, distributed, compiles = run_both(name, **options)
    assert len(compiles) == 1
    assert not np.allclose(distributed, plain, rtol=1e-5)
    np.testing.assert_allclose(_tenths(distributed), _tenths(plain), rtol=0.03)


def _tenths(losses: np.ndarray) -> np.ndarray:
    return losses.reshape(-1, 10).mean(1)


def test_the_readme_of_the_examples_counts_the_lines():
    rows = re.findall(r"^\| \[(\w+)\].*?\| (\d+) \|", (FOLDER / "README.md").read_text(), re.M)
    assert {name: int(lines) for name, lines in rows} == {x: num_changed_lines(x) for x in NAMES}


def test_there_are_ten_examples_of_five_kinds():
    assert len(NAMES) >= 10
    assert {name.rpartition("_")[2] for name in NAMES} == {
        "linen", "nnx", "haiku", "equinox", "jax",
    }  # fmt: skip
    assert set(SMALL) == set(NAMES)


def test_a_changed_line_counts_once(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "plain.py").write_text("a\nb\n\nc\nd\n")
    (tmp_path / "one" / "distributed.py").write_text("a\n\n\nB\nc\ne\nf\nd\n\n")
    monkeypatch.setattr(example_programs, "FOLDER", tmp_path)
    assert num_changed_lines("one") == 3
