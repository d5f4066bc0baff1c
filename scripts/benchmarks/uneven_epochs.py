"""A linear model trained on 8 replicas by each of several libraries, for `comparison.py`.

    python uneven_epochs.py LIBRARY [--steps]

prints JSON: the weights after one epoch of 100 examples in batches of 64 (the last has 36),
or the error of the library; or with `--steps` the seconds of CPU that a step of a larger one takes,
whose batches are even. Each function is what a user of the library writes, and its lines are
counted.
"""

import json
import os
import sys
import time

import numpy as np

NUM_REPLICAS = 8
RATE = 0.1
EXAMPLES, BATCH, FEATURES = 100, 64, 4
STEPS = {"examples": 5120, "batch": 512, "features": 1024, "epochs": 200}


def train_with_tpudist(x, y, batch, epochs):
    import optax
    from flax import nnx

    import tpudist

    strategy = tpudist.MirroredStrategy()
    zeros = nnx.initializers.zeros
    init = lambda: nnx.Linear(x.shape[1], 1, kernel_init=zeros, rngs=nnx.Rngs(0))  # noqa: E731
    model = strategy.create(init)
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.sgd(RATE), m), model)

    def step(model, optimizer, rows):
        def loss_fn(model):
            return tpudist.compute_average_loss(((model(rows["x"]) - rows["y"]) ** 2).mean(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    data = strategy.experimental_make_numpy_dataset({"x": x, "y": y}).batch(batch)
    for rows in strategy.experimental_distribute_dataset(data.repeat(epochs)):
        strategy.run(step, args=(model, optimizer, rows))
    return model.kernel[...]


def train_with_jax(x, y, batch, epochs):
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((NUM_REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tx = optax.sgd(RATE)
    params = jax.device_put({"w": jnp.zeros((x.shape[1], 1)), "b": jnp.zeros(1)}, whole)
    state = params, tx.init(params)

    def loss_fn(params, rows):
        errors = ((rows["x"] @ params["w"] + params["b"] - rows["y"]) ** 2).mean(-1)
        return (errors * rows["is_real"]).sum() / rows["is_real"].sum()

    def step(state, rows):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    step = jax.jit(step, donate_argnums=0)
    for _ in range(epochs):
        for i in range(0, len(x), batch):
            rows = {"x": x[i : i + batch], "y": y[i : i + batch]}
            rows["is_real"] = np.ones(len(rows["x"]), np.float32)
            if missing := batch - len(rows["x"]):
                padding = {k: np.zeros((missing, *v.shape[1:]), v.dtype) for k, v in rows.items()}
                rows = {k: np.concatenate([v, padding[k]]) for k, v in rows.items()}
            state, _loss = step(state, jax.device_put(rows, split))
    return state[0]["w"]


def train_with_keras(x, y, batch, epochs):
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((x.shape[1],)), dense])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model.weights[0]


def train_with_accelerate(x, y, batch, epochs):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _torch_model(x)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(data, batch // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for rows, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
    return accelerator.unwrap_model(model).weight


def train_with_fabric(x, y, batch, epochs):
    import torch
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=NUM_REPLICAS, strategy="ddp")
    fabric.launch()
    model = _torch_model(x)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(data, batch // fabric.world_size)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(epochs):
        for rows, targets in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
    return model.module.weight


LIBRARIES = {
    "tpudist": train_with_tpudist,
    "jax": train_with_jax,
    "keras": train_with_keras,
    "accelerate": train_with_accelerate,
    "fabric": train_with_fabric,
}


def _torch_model(x):
    import torch

    model = torch.nn.Linear(x.shape[1], 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def make_data(examples, features):
    """Numbers, and their sums: the same in each process."""
    x = np.random.default_rng(0).normal(size=(examples, features)).astype(np.float32)
    return x / np.float32(np.sqrt(features / 4)), x.sum(1, keepdims=True)


def weights_of_one_device():
    """Returns the weights after the epoch without any library, in float64."""
    x, y = (array.astype(np.float64) for array in make_data(EXAMPLES, FEATURES))
    weights, bias = np.zeros((FEATURES, 1)), np.zeros(1)
    for i in range(0, EXAMPLES, BATCH):
        rows, targets = x[i : i + BATCH], y[i : i + BATCH]
        errors = 2 * (rows @ weights + bias - targets) / len(rows)
        weights, bias = weights - RATE * rows.T @ errors, bias - RATE * errors.sum(0)
    return weights.ravel()


def _seconds_per_step(train):
    """Returns CPU seconds per step: the difference of two runs, without the one-time work."""
    x, y = make_data(STEPS["examples"], STEPS["features"])
    taken = []
    for epochs in (1, 1 + STEPS["epochs"]):
        start = time.process_time()
        np.asarray(train(x, y, STEPS["batch"], epochs))
        taken.append(time.process_time() - start)
    return (taken[1] - taken[0]) / (STEPS["epochs"] * STEPS["examples"] / STEPS["batch"])


def main(library, *options):
    """Trains, and prints the weights or the error."""
    train = LIBRARIES[library]
    if library in ("tpudist", "jax", "keras"):
        os.environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
        import jax

        jax.config.update("jax_num_cpu_devices", NUM_REPLICAS)
    if "--steps" in options:
        found = {"seconds_per_step": _seconds_per_step(train)}
    else:
        try:
            weights = train(*make_data(EXAMPLES, FEATURES), BATCH, 1)
        except ValueError as error:
            found = {"refused": f"{type(error).__name__}: {error}"}
        else:
            weights = weights.detach() if hasattr(weights, "detach") else weights
            found = {"weights": np.asarray(weights).ravel().tolist()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
