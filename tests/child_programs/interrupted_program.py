"""Trains, is interrupted at random moments, and checks the state each time.

    python interrupted_program.py NUM_INTERRUPTIONS NUM_DEVICES:run|run_steps...

On one device most come while the program runs, on two while the host waits for an earlier one.
Prints for each way how many interruptions came, and how many lost state.
"""

import os
import random
import signal
import sys
import threading
import time

import jax
import numpy as np
import optax
from flax import nnx

import tpudist

NUM, WAYS = int(sys.argv[1]), sys.argv[2:]
tpudist.emulate(2)


class Interruption(Exception):
    """The exception that a handler raises."""


def handle(number, frame):
    raise SystemExit if number == signal.SIGTERM else Interruption


# A shell's background jobs ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
SIGNALS = [signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1]
for other in SIGNALS[1:]:
    signal.signal(other, handle)
RAISED = (KeyboardInterrupt, Interruption, SystemExit)

wanted, arrived = threading.Semaphore(0), threading.Event()
rng = random.Random(0)


def interrupt():
    while wanted.acquire():
        time.sleep(rng.uniform(0, 4e-3))
        number = rng.choice(SIGNALS)
        os.kill(os.getpid(), number)
        while not arrived.wait(2):  # Python drops exceptions of destructors
            os.kill(os.getpid(), number)


def interrupt_training(num_devices: int, way: str) -> tuple[int, int]:
    """Returns the number of interruptions, and how many of them lost state."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_devices])
    model = strategy.create(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(1e-3), model))
    with strategy.scope():
        counter = tpudist.Variable(0)
        total = tpudist.Variable(
            0.0,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )
    batch = np.ones((256, 256), np.float32)

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        counter.assign_add(1)
        total.assign_add(1.0)
        return loss

    def train():
        if way == "run":
            strategy.run(step, args=(model, optimizer, batch))
        else:
            strategy.run_steps(step, iter([batch, batch]), 2, args=(model, optimizer))

    def is_whole() -> bool:
        """Whether all state is there, and of the same step."""
        leaves = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
        if any(x.is_deleted() for x in (*leaves, counter._value, total._value)):
            return False
        return (
            int(counter)
            == int(optimizer.step.get_value())
            == int(total) // strategy.num_replicas_in_sync
        )

    train()
    num_interrupted = num_lost = 0
    for _ in range(NUM):
        try:
            arrived.clear()
            wanted.release()
            while True:
                train()
        except RAISED:
            arrived.set()
            num_interrupted += 1
        while True:
            try:
                whole = is_whole()
                break
            except RAISED:  # a second signal, sent when the first was slow to arrive
                pass
        if not whole:
            num_lost += 1
            break
    return num_interrupted, num_lost


threading.Thread(target=interrupt, daemon=True).start()
for each in WAYS:
    num_devices, way = each.split(":")
    print(each, *interrupt_training(int(num_devices), way))
