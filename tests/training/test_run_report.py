"""The summary rows of a run and the text that a model generates, for models with known results."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tpudist
from experiment.generate import generate
from experiment.report import rows
from experiment.summary import describe_kind, describe_strategy
from experiment.units import Unit, UnitWriter
from tpudist.training.history import History


class Scale(nnx.Module):
    """Multiplies by one parameter."""

    def __init__(self):
        self.scale = nnx.Param(jnp.float32(3.0))


class Successor(nnx.Module):
    """Predicts that each byte is followed by the next larger byte."""

    def __init__(self):
        self.sure = nnx.Param(jnp.float32(50.0))


@pytest.fixture(scope="module")
def strategy() -> tpudist.Strategy:
    return tpudist.MirroredStrategy(jax.devices()[:2])


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (tpudist.MirroredStrategy, "MirroredStrategy: 8 replicas on 8 emulated CPU devices"),
        (
            lambda: tpudist.TPUStrategy(replica_axes={"tensor": 2}),
            "TPUStrategy: 4 replicas on 8 emulated CPU devices (replica 4 x tensor 2)",
        ),
        (tpudist.OneDeviceStrategy, "OneDeviceStrategy: 1 replica on 1 emulated CPU device"),
    ],
)
def test_describe_strategy_names_the_replicas_and_devices(strategy, told):
    assert describe_strategy(strategy()) == told


def test_a_tpu_is_named_by_its_generation():
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    assert describe_kind(device) == "TPU v5e"


@pytest.mark.parametrize(
    ("held_out", "baseline"),
    [
        ([(3, {"nats": 0.5})], "2.000, beaten by 1.500"),
        ([(3, {"nats": 2.5})], "2.000, not beaten, worse by 0.500"),
        ([], "2.000"),
    ],
)
def test_a_run_is_compared_with_its_baselines_if_it_was_evaluated(strategy, held_out, baseline):
    model = strategy.create(Scale)
    history = History(held_out=held_out)
    told = dict(rows(strategy, model, model, history, Unit("nats", 1.0, "x", 8), {"b": 2}))
    assert told["  b baseline"] == baseline
    assert "step time" not in told


def test_throughput_counts_all_steps_over_their_time(strategy):
    """The median would be near zero if two steps are recorded at the same time."""
    model = strategy.create(Scale)
    history = History(seconds=[9.0, 0.001, 0.001, 0.001, 0.397], num_earlier_seconds=1)
    told = dict(rows(strategy, model, model, history, Unit("nats", 1.0, "x", 8), {}))
    assert (told["step time"], told["throughput"]) == ("100 ms (mean of 4)", "80 x/s")


def test_losses_are_shown_in_one_unit_and_written_in_both():
    unit = Unit("bits/byte", 2.0, "tokens", 8)
    assert unit.format("train", {"loss": 1.5}) == "loss 3.000 bits/byte"
    told = unit.format("held_out", {"bits_per_byte": 1.25, "second_half": 1.0})
    assert told == "1.250 bits/byte (second half 1.000)"
    got = []

    class Writer:
        def write(self, step, split, values):
            got.append((step, split, list(values.items())))

    writer = UnitWriter(Writer(), unit)
    writer.write(1, "train", {"loss": 1.5, "step_s": 0.1})
    writer.write(1, "held_out", {"bits_per_byte": 1.25})
    assert got == [
        (1, "train", [("loss", 1.5), ("bits_per_byte", 3.0), ("step_s", 0.1)]),
        (1, "held_out", [("bits_per_byte", 1.25)]),
    ]


def successor_logits(model: Successor, tokens: jnp.ndarray) -> jnp.ndarray:
    return nnx.one_hot(tokens + 1, 256) * model.sure[...]


@pytest.mark.parametrize("prompt", [b"xyza", b"much longer than the window: a"])
def test_generate_continues_from_the_last_byte_of_the_prompt(strategy, prompt):
    """Covers a window that is not yet full, just full, and overfull."""
    model = strategy.create(Successor)
    written = generate(strategy, successor_logits, model, prompt, num_bytes=10, window=6)
    assert written == b"bcdefghijk"


@pytest.mark.slow
def test_generate_with_a_different_seed_writes_a_different_text(strategy):
    model = strategy.create(Successor)

    def write(**options):
        options = {"num_bytes": 10, "window": 4, "temperature": 40.0} | options
        return generate(strategy, successor_logits, model, b"a", **options)

    assert write() == write()
    assert write() != write(seed=1)


def test_generate_requires_a_prompt_and_a_positive_temperature(strategy):
    model = strategy.create(Successor)
    with pytest.raises(ValueError, match="the prompt must have at least one byte"):
        generate(strategy, successor_logits, model, b"", num_bytes=1, window=4)
    with pytest.raises(ValueError, match="temperature=0\\): temperature must be positive"):
        generate(strategy, successor_logits, model, b"a", num_bytes=1, window=4, temperature=0)
