"""No message prints a model or a state, whatever place it was given in by mistake."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.checkpoint import Checkpoint, CheckpointManager
from tpudist.training import train

LONGEST = 900


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(30, 30, rngs=nnx.Rngs(0)) for _ in range(3)])


MODEL = Model()
GIVEN = {
    "model": MODEL,
    "state": nnx.state(MODEL),
    "dict": {f"layer {i}": jnp.ones((30, 30)) for i in range(9)},
}
S = tpudist.get_strategy()
ROWS = np.ones((2, 3), np.float32)


def optimizer(**kwargs):
    return tpudist.Optimizer(optax.sgd(0.1), MODEL, **kwargs)


def manager(path="unused", **kwargs):
    return CheckpointManager(Checkpoint(v=jnp.ones(3)), path, **kwargs)


def train_for(num_steps):
    return train(S, lambda model, x: {"loss": 0.0}, (MODEL,), [ROWS], num_steps=num_steps)


CALLS = {
    "args": lambda x: S.run(lambda x: x, args=x),
    "options of run": lambda x: S.run(lambda: 0, options=x),
    "op of reduce": lambda x: S.reduce(x, jnp.ones(3), axis=None),
    "axis of reduce": lambda x: S.reduce("sum", jnp.ones(3), axis=x),
    "axis of gather": lambda x: S.gather(jnp.ones(3), axis=x),
    "options of a dataset": lambda x: S.experimental_distribute_dataset([ROWS], x),
    "run_steps": lambda x: S.run_steps(lambda x: x, iter([ROWS]), x),
    "update": lambda x: S.extended.update(x, lambda v: v),
    "destinations": lambda x: S.extended.reduce_to("sum", jnp.ones(3), x),
    "global batch": lambda x: S.run(
        lambda: tpudist.compute_average_loss(jnp.ones(3), global_batch_size=x)
    ),
    "name of a Variable": lambda x: tpudist.Variable(1.0, name=x),
    "aggregation": lambda x: tpudist.Variable(1.0, aggregation=x),
    "constraint": lambda x: tpudist.Variable(1.0, constraint={"x": x}),
    "optimizer": lambda x: tpudist.Optimizer(x, MODEL),
    "optimizer alone": lambda x: tpudist.Optimizer(x),
    "wrt": lambda x: optimizer(wrt=x),
    "reduce_op": lambda x: optimizer(reduce_op=x),
    "reduce_dtype": lambda x: optimizer(reduce_dtype=x),
    "learning_rate": lambda x: setattr(optimizer(), "learning_rate", x),
    "folder": manager,
    "max_to_keep": lambda x: manager(max_to_keep=x),
    "num_steps": train_for,
    "function": lambda x: tpudist.function({"x": x}),
    "partial_batch": lambda x: tpudist.InputOptions(partial_batch=x),
    "donate_argnums": lambda x: tpudist.RunOptions(donate_argnums=x),
    "device": tpudist.OneDeviceStrategy,
    "axis_name": lambda x: tpudist.MirroredStrategy(axis_name=x),
    "axes": lambda x: tpudist.TPUStrategy(replica_axes={"fsdp": x}),
    "microbatches": lambda x: tpudist.value_and_grad_in_microbatches(lambda *x: 0.0, x),
    "emulate": tpudist.emulate,
}


@pytest.mark.parametrize("kind", list(GIVEN))
@pytest.mark.parametrize("call", list(CALLS))
def test_no_message_prints_what_it_was_given(call, kind):
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        CALLS[call](GIVEN[kind])
    assert len(str(caught.value)) < LONGEST
    assert "Array(" not in str(caught.value)
