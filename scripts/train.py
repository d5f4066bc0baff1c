"""Trains a small model on real data, on any devices: python scripts/train.py --help

By default a byte-level transformer learns the Python source of this interpreter's standard library.
Without an accelerator it runs on 8 emulated devices. Every step is written for one replica
(`tpudist/training/steps.py`); the strategy runs it on all of them, in `tpudist.training.train`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the imports below take seconds
    print("train.py: importing JAX...", file=sys.stderr, flush=True)

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import tpudist
from experiment import arguments, devices, folder, generate, report, summary
from experiment.baselines import baselines
from experiment.batches import InOrder, RandomWindows, ShuffledEpochs
from experiment.config import Config, check, facts
from experiment.digits import load_digits
from experiment.optimizers import adamw_with_clipping
from experiment.run_end import run_to_end
from experiment.units import Unit, UnitWriter
from tpudist.checkpoint import CheckpointError
from tpudist.models import ConvNet, ConvNetConfig, Transformer, TransformerConfig, next_token_nats
from tpudist.models.convnet import label_nats
from tpudist.training import metrics_writers
from tpudist.training.compilation_cache import enable_compilation_cache
from tpudist.training.corpus import load_corpus, spread_windows
from tpudist.training.display import Display, make_display
from tpudist.training.interrupt import StopOnInterrupt
from tpudist.training.loop import train
from tpudist.training.steps import evaluate, make_evaluation_step, make_train_step
from tpudist.training.train_options import ReportOptions, RunFolder, StopOptions

BATCH_SIZES = {"text": 16, "digits": 128}


@dataclass(frozen=True)
class Job:
    """A task, ready to be trained."""

    source: str
    """The data, for people."""
    make_model: Callable[[], nnx.Module]
    nats: Callable[[Any, Any], jax.Array]
    """`(model, batch)` to the loss of each example."""
    batches: Iterable[Any]
    held_out: Iterable[Any]
    measure: Callable[[Any, Any], Any]
    """Maps `(model, batch)` to the metrics of each held-out example."""
    tell: Callable[[Any], dict[str, float]]
    """Means of the metrics by name; the loss in `unit` first."""
    unit: Unit
    baselines: dict[str, float]
    """Held-out losses, in `unit`, of guesses that a model must beat."""
    dims: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Options that size a dim: its logical name, and its size."""
    prompt: str = ""
    """Beginning of the text that is written at the end; empty for no text."""
    digest: str = ""
    """Tells these data from others."""


def text_job(config: Config) -> Job:
    """A transformer that predicts the next byte."""
    options, length = config.model, config.model.sequence_length
    corpus = load_corpus(config.data)
    windows = spread_windows(corpus.held_out, length, config.held_out_windows)
    prompt = config.prompt or "def "
    if config.prompt is None and config.data is not None:
        prompt = generate.printable(windows[0, :32].tobytes())
    shape = TransformerConfig(
        num_layers=options.num_layers,
        embed_dim=options.embed_dim,
        num_heads=options.num_heads,
        mlp_dim=options.mlp_dim,
        gated=options.gated,
        remat=options.remat,
    )

    def make_model() -> Transformer:
        dtype = options.dtype
        if dtype == "auto":
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return Transformer(dataclasses.replace(shape, dtype=dtype), rngs=nnx.Rngs(config.seed))

    def tell(nats: np.ndarray) -> dict[str, float]:
        bits = nats / math.log(2)  # [position in the window]
        told = {"bits_per_byte": float(bits.mean())}
        if length >= 32:  # a window begins without context: say what that costs
            told["first_8_bytes"] = float(bits[:8].mean())
            told["second_half"] = float(bits[length // 2 :].mean())
        return told

    return Job(
        source=(
            f"{corpus.source}: {corpus.num_train_files} files, {len(corpus.train) / 1e6:.1f} MB; "
            f"held out {corpus.num_held_out_files} files, {windows[:, 1:].size:,} bytes judged"
        ),
        make_model=make_model,
        nats=lambda model, batch: next_token_nats(model, batch["tokens"]).mean(axis=-1),
        batches=RandomWindows(corpus.train, length, config.batch_size, config.seed, config.steps),
        held_out=InOrder({"tokens": windows}, config.batch_size * 4),
        measure=lambda model, batch: next_token_nats(model, batch["tokens"]),
        tell=tell,
        unit=Unit("bits/byte", 1 / math.log(2), "tokens", config.batch_size * length),
        baselines=baselines(corpus.train, windows),
        dims={
            "embed-dim": ("embed", options.embed_dim),
            "num-heads": ("heads", options.num_heads),
            "mlp-dim": ("mlp", options.mlp_dim),
        },
        prompt=prompt if config.sample_bytes else "",
        digest=folder.digest(corpus.train, windows),
    )


def digits_job(config: Config) -> Job:
    """A convnet that names handwritten digits."""
    train_set, held_out = load_digits()

    def measure(model: ConvNet, batch: Any) -> Any:
        logits = model(batch["image"], training=False)
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        return {"nats": label_nats(logits, batch["label"]), "accuracy": right.astype(jnp.float32)}

    return Job(
        source=(
            f"scikit-learn's digits: {len(train_set['label']):,} images; "
            f"held out {len(held_out['label'])} images"
        ),
        make_model=lambda: ConvNet(ConvNetConfig(), rngs=nnx.Rngs(config.seed)),
        nats=lambda model, batch: label_nats(model(batch["image"], training=True), batch["label"]),
        batches=ShuffledEpochs(train_set, config.batch_size, config.seed, config.steps),
        held_out=InOrder(held_out, config.batch_size),
        measure=measure,
        tell=lambda means: {name: float(means[name]) for name in ("nats", "accuracy")},
        unit=Unit("nats", 1.0, "images", config.batch_size),
        baselines={"uniform": math.log(10)},
        digest=folder.digest(*train_set.values(), *held_out.values()),
    )


def make_state(config: Config, job: Job, strategy: tpudist.Strategy) -> tuple[Any, Any]:
    """A model and its optimizer."""
    memory = config.optimizer.optimizer_memory
    with strategy.scope():
        model = strategy.create(job.make_model)
        optimizer = strategy.create(
            lambda model: tpudist.Optimizer(
                adamw_with_clipping(config.optimizer, config.steps),
                model,
                reduce_dtype=config.optimizer.reduce_dtype,
            ),
            model,
            memory_kind=None if memory == "device" else memory,
        )
    return model, optimizer


def run(
    config: Config,
    job: Job,
    strategy: tpudist.Strategy,
    begun: folder.RunStart,
    display: Display,
) -> int:
    """Trains, then prints and writes the results; returns the exit code."""
    begun_s = time.perf_counter()
    out = config.out if jax.process_index() == 0 else None
    model, optimizer = make_state(config, job, strategy)
    loss_of = make_train_step(job.nats, config.run.microbatches)

    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": loss_of(model, optimizer, batch)}

    judge = make_evaluation_step(job.measure)
    held_out = strategy.experimental_distribute_dataset(job.held_out)
    writers, events = [metrics_writers.JsonLinesWriter(config.out)], None
    if metrics_writers.has_tensorboard():
        events = metrics_writers.TensorBoardWriter(config.out)
        writers.append(events)
    with ExitStack() as stack:
        # Ctrl-C while the sample is written ends nothing: the report is still printed.
        stack.enter_context(StopOnInterrupt(lambda: display.set_phase("stopping")))
        for writer in writers:
            stack.callback(writer.close)
        history = train(
            strategy,
            train_step,
            tpudist.TrainState(model, optimizer),
            job.batches,
            num_steps=config.steps,
            evaluate=lambda model, _: job.tell(evaluate(strategy, judge, model, held_out)),
            evaluate_every=-(-config.steps // config.run.evaluations),
            folder=RunFolder(config.out, config.run.checkpoint_every or None),
            progress=display,
            report=ReportOptions(
                writers=[UnitWriter(writer, job.unit) for writer in writers],
                items=(job.unit.items, job.unit.items_per_step),
                format_metrics=job.unit.format,
                on_start=lambda history: report.tell_start(
                    config.steps, config.optimizer.learning_rate, begun, display, history
                ),
            ),
            stop=StopOptions(exit_when_preempted=False),
        )
        rows = report.rows(strategy, model, optimizer, history, job.unit, job.baselines)
        if isinstance(model, Transformer):
            rows.insert(1, ("computes in", model.config.dtype))
        if job.prompt and history.ended == "finished":
            display.set_phase("writing")
            text = write_text(config, job, strategy, model)
            if events is not None and out is not None:
                events.write_text("sample", f"    {job.prompt}{text}".replace("\n", "\n    "))
            display.close()
            display.print_text("Sample", job.prompt, text)
    display.close()
    rows.insert(0, ("data", job.source))
    title = f"{config.task}, {strategy}"
    return report.finish(config, history, job.unit, job.baselines, rows, title, display, begun_s)


def write_text(config: Config, job: Job, strategy: tpudist.Strategy, model: Any) -> str:
    """Continuation of the prompt."""
    text = generate.generate(
        strategy,
        lambda model, tokens: model(tokens),
        model,
        job.prompt.encode(),
        num_bytes=config.sample_bytes,
        window=config.model.sequence_length,
        seed=config.seed,
    )
    return generate.printable(text)


def main(args: Sequence[str] | None = None) -> int:
    """Reads the command line (or `args`), checks it, and runs; returns the exit code."""
    config = tyro.cli(Config, args=args, config=(tyro.conf.OmitArgPrefixes,))
    if config.batch_size is None:
        config = dataclasses.replace(config, batch_size=BATCH_SIZES[config.task])
    with ExitStack() as stack:
        try:
            axes = check(config)
            emulated = devices.emulate(config.run.emulate)
            job = text_job(config) if config.task == "text" else digits_job(config)
            strategy = devices.make_strategy(config.run.strategy, axes)
            arguments.check_split(job.dims, strategy.logical_axis_rules, strategy.mesh.shape)
            replicas = strategy.num_replicas_in_sync
            arguments.check_microbatches(config.run.microbatches, config.batch_size, replicas)
            if config.run.compilation_cache:
                enable_compilation_cache()

            def begin() -> folder.RunStart:
                out = config.out
                stack.enter_context(folder.lock(out))
                return folder.begin(out, facts(config, job.digest), config.steps, config.run.resume)

            begun = folder.agree(begin)
            folder.require_whole(config.out, begun)
        except (ValueError, ModuleNotFoundError, RuntimeError) as refused:
            print(f"train.py: {refused}", file=sys.stderr)
            return 2
        display = make_display(config.steps, quiet=jax.process_index() != 0)
        why = f" ({emulated})" if emulated else ""
        display.print(f"{summary.describe_strategy(strategy)}{why}")
        if begun.moved_to:
            display.print(
                f"Moved the files of an earlier run from {config.out} to {begun.moved_to}."
            )
        return run_to_end(
            "train.py",
            display,
            lambda: run(config, job, strategy, begun, display),
            (CheckpointError,),
        )


if __name__ == "__main__":
    sys.exit(main())
