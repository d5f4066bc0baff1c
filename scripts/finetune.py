"""Fine-tunes a pretrained language model on your text: python scripts/finetune.py --help

By default it first creates a tiny model with Llama's architecture, which then learns to write like
Python's help texts: this needs no network. Without an accelerator it runs on 8 emulated devices.
--model FOLDER names a downloaded model; --lora RANK trains adapters instead of its weights.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the imports below take seconds
    print("finetune.py: importing JAX...", file=sys.stderr, flush=True)

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from flax import nnx

import tpudist
from experiment import arguments, devices, folder, generate, report, summary
from experiment.batches import InOrder, RandomWindows
from experiment.finetune_config import FinetuneConfig, check, facts
from experiment.optimizers import adamw_with_clipping
from experiment.run_end import run_to_end
from experiment.tiny_model import NUM_STEPS, make_tiny_model
from experiment.token_text import TokenText, python_topics, read_documents, tokenize
from experiment.units import Unit
from tpudist.checkpoint import Checkpoint, CheckpointError
from tpudist.models import (
    Transformer,
    load_pretrained,
    load_tokenizer,
    lora,
    next_token_loss,
    next_token_nats,
    read_config,
    save_pretrained,
)
from tpudist.training import metrics_writers
from tpudist.training.compilation_cache import enable_compilation_cache
from tpudist.training.corpus import spread_windows
from tpudist.training.display import Display, make_display
from tpudist.training.interrupt import StopOnInterrupt
from tpudist.training.loop import train
from tpudist.training.steps import evaluate, make_evaluation_step, make_train_step
from tpudist.training.train_options import ReportOptions, RunFolder, StopOptions

TINY = "tiny-model"
BEFORE = "before.json"


@dataclass(frozen=True)
class Job:
    """A model and text, ready to be brought together."""

    source: Path
    """The folder of the model."""
    tokenizer: Any
    text: TokenText
    batches: RandomWindows
    held_out: InOrder
    unit: Unit
    prompt: list[int]
    """Beginning of the texts that are written; empty for no texts."""


def make_job(config: FinetuneConfig, source: Path) -> Job:
    """Reads the text, and makes tokens of it.

    Raises:
        ValueError: If there is too little text, or the model cannot be loaded.
        FileNotFoundError: If a file of the model is missing.
    """
    vocabulary = read_config(source).vocabulary
    tokenizer = load_tokenizer(source)
    documents = read_documents(config.text) if config.text else python_topics()
    said = ", ".join(map(str, config.text)) or "the topics of Python's help()"
    ends = json.loads((source / "config.json").read_text()).get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    text = tokenize(
        documents,
        tokenizer,
        vocabulary=vocabulary,
        end=end if isinstance(end, int) else None,
        source=f"{said}: {len(documents)} document(s)",
    )
    length = config.sequence_length
    windows = spread_windows(text.held_out, length, config.held_out_windows)
    # Whole batches, where there are enough: a partial one is another program to compile.
    windows = windows[: len(windows) // config.batch_size * config.batch_size or len(windows)]
    prompt: list[int] = []
    if config.sample_tokens:
        given = tokenizer.encode(config.prompt).ids if config.prompt else None
        prompt = given or windows[0, : min(16, length)].tolist()
    return Job(
        source=source,
        tokenizer=tokenizer,
        text=text,
        batches=RandomWindows(text.train, length, config.batch_size, config.seed, config.steps),
        held_out=InOrder({"tokens": windows}, config.batch_size),
        unit=Unit("nats/token", 1.0, "tokens", config.batch_size * length),
        prompt=prompt,
    )


def make_state(
    config: FinetuneConfig, job: Job, strategy: tpudist.Strategy
) -> tuple[Transformer, tpudist.Optimizer, Checkpoint | None]:
    """The model, its optimizer, and what checkpoints hold if that is not both of them whole."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    shape = dataclasses.replace(read_config(job.source), dtype=dtype, remat=config.remat)
    with strategy.scope():
        model = load_pretrained(job.source, dtype=None if config.lora else "float32", config=shape)
        if config.lora:
            rngs = nnx.Rngs(config.seed)
            lora.add(model, rank=config.lora, alpha=config.lora_alpha, rngs=rngs)
        optimizer = strategy.create(
            lambda model: tpudist.Optimizer(
                adamw_with_clipping(config, config.steps), model, wrt=trained(config)
            ),
            model,
        )
    if not config.lora:
        return model, optimizer, None
    adapters = {x: v for x, v in vars(model.blocks).items() if isinstance(v, lora.LoRAParam)}
    return model, optimizer, Checkpoint(adapters=adapters, optimizer=optimizer)


def trained(config: FinetuneConfig) -> type[nnx.Param]:
    """The kind of Variables that are trained."""
    return lora.LoRAParam if config.lora else nnx.Param


def measure_before(
    out: Path,
    goes_on: bool,
    judge: Callable[[], Mapping[str, float]],
    write_sample: Callable[[], str],
) -> dict[str, Any]:
    """Metrics before training: measured once, and kept for a run that resumes."""
    if goes_on and (out / BEFORE).exists():
        return json.loads((out / BEFORE).read_text())
    found = {"held_out": dict(judge()), "sample": write_sample()}
    if jax.process_index() == 0:
        (out / BEFORE).write_text(json.dumps(found, indent=2) + "\n")
    return found


def write_sample(
    config: FinetuneConfig, job: Job, strategy: tpudist.Strategy, model: Transformer
) -> str:
    """Continuation of the prompt; empty without a prompt."""
    if not job.prompt:
        return ""
    drawn = generate.generate_tokens(
        strategy,
        logits_of,
        model,
        job.prompt,
        num_tokens=config.sample_tokens,
        window=config.sequence_length,
        seed=config.seed,
    )
    return generate.printable(job.tokenizer.decode(drawn).encode())


def logits_of(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Logits of the token after each token; a separate function, so that it compiles once."""
    return model(tokens)


def tell(means: Any) -> dict[str, float]:
    """The held-out loss, named."""
    nats = float(means.mean())
    return {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0))}


def run(
    config: FinetuneConfig,
    job: Job,
    strategy: tpudist.Strategy,
    begun: folder.RunStart,
    display: Display,
) -> int:
    """Trains, then prints and writes the results; returns the exit code."""
    begun_s = time.perf_counter()
    display.set_phase("loading")
    model, optimizer, saved = make_state(config, job, strategy)
    loss_of = make_train_step(
        lambda model, batch: next_token_loss(model, batch["tokens"]).mean(axis=-1),
        config.run.microbatches,
        wrt=trained(config),
    )

    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": loss_of(model, optimizer, batch)}

    judge_step = make_evaluation_step(lambda model, batch: next_token_nats(model, batch["tokens"]))
    held_out = strategy.experimental_distribute_dataset(job.held_out)

    def judge(model: Transformer, *_: Any) -> dict[str, float]:
        return tell(evaluate(strategy, judge_step, model, held_out))

    num_trained = sum(x.size for x in jax.tree.leaves(nnx.state(model, trained(config))))
    writers: list[Any] = [metrics_writers.JsonLinesWriter(config.out)]
    if metrics_writers.has_tensorboard():
        writers.append(metrics_writers.TensorBoardWriter(config.out))
    with ExitStack() as stack:
        # Ctrl-C while the weights are written ends nothing: the trained weights are kept.
        stack.enter_context(StopOnInterrupt(lambda: display.set_phase("stopping")))
        for writer in writers:
            stack.callback(writer.close)
        display.set_phase("evaluating the untrained model")
        before = measure_before(
            config.out,
            begun.goes_on,
            lambda: judge(model),
            lambda: write_sample(config, job, strategy, model),
        )
        if not begun.goes_on:
            display.print(f"before: held out {job.unit.format('held_out', before['held_out'])}")
        history = train(
            strategy,
            train_step,
            tpudist.TrainState(model, optimizer),
            job.batches,
            num_steps=config.steps,
            evaluate=judge,
            evaluate_every=-(-config.steps // config.run.evaluations),
            folder=RunFolder(config.out, config.run.checkpoint_every or None, saved=saved),
            progress=display,
            report=ReportOptions(
                writers=writers,
                items=(job.unit.items, job.unit.items_per_step),
                format_metrics=job.unit.format,
                on_start=lambda history: report.tell_start(
                    config.steps, config.learning_rate, begun, display, history
                ),
            ),
            stop=StopOptions(exit_when_preempted=False),
        )
        baselines = {"before": before["held_out"]["nats_per_token"]}
        rows = report.rows(strategy, model, optimizer, history, job.unit, baselines)
        if history.ended == "finished":
            display.set_phase("writing")
            if config.lora:
                lora.merge(model)
            save_pretrained(model, config.out / "model", like=job.source)
            after = write_sample(config, job, strategy, model)
            display.close()
            if job.prompt:
                prompt = generate.printable(job.tokenizer.decode(job.prompt).encode())
                display.print_text("Sample before training", prompt, before["sample"])
                display.print_text("Sample after training", prompt, after)
    display.close()
    what = f"adapters of rank {config.lora}" if config.lora else "all weights"
    rows = [
        ("text", job.text.source),
        ("tokens", f"{len(job.text.train):,} to train on, {len(job.text.held_out):,} held out"),
        ("trains", f"{what}, {num_trained:,} parameters"),
        *rows,
    ]
    title = f"{job.source.name}, {strategy}"
    return report.finish(config, history, job.unit, baselines, rows, title, display, begun_s)


def digest_of_model(source: Path) -> str:
    """Tells a model from others: its configuration and all its weights."""
    return folder.digest_of_files([source / "config.json", *sorted(source.glob("*.safetensors"))])


def find_model(config: FinetuneConfig, strategy: tpudist.Strategy, display: Display) -> Path:
    """Folder of the model; by default the folder of the tiny model, created if missing."""
    if config.model is not None:
        return config.model
    tiny = config.out.parent / TINY
    if not folder.agree_on(lambda: (tiny / "config.json").exists()):
        display.print(
            f"Creating a tiny model in {tiny}, once: its tokenizer, then {NUM_STEPS} steps."
        )
        # A display of its own: it shows steps of another run.
        shown = make_display(NUM_STEPS, quiet=jax.process_index() != 0)
        make_tiny_model(strategy, tiny, shown)
        shown.close()
    return tiny


def main(args: Sequence[str] | None = None) -> int:
    """Reads the command line (or `args`), checks it, and runs; returns the exit code."""
    config = tyro.cli(FinetuneConfig, args=args, config=(tyro.conf.OmitArgPrefixes,))
    with ExitStack() as stack:
        try:
            axes = check(config)
            emulated = devices.emulate(config.run.emulate)
            strategy = devices.make_strategy(config.run.strategy, axes)
            replicas = strategy.num_replicas_in_sync
            arguments.check_microbatches(config.run.microbatches, config.batch_size, replicas)
            if config.run.compilation_cache:
                enable_compilation_cache()
            why = f" ({emulated})" if emulated else ""
            about = f"{summary.describe_strategy(strategy)}{why}"
            shown = make_display(1, quiet=jax.process_index() != 0)
            stack.callback(shown.close)
            job = make_job(config, find_model(config, strategy, shown))
            shown.close()

            def begin() -> folder.RunStart:
                out = config.out
                stack.enter_context(folder.lock(out))
                text = folder.digest(job.text.train, job.text.held_out)
                known = facts(config, text, digest_of_model(job.source))
                return folder.begin(out, known, config.steps, config.run.resume)

            begun = folder.agree(begin)
            folder.require_whole(config.out, begun)
        except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as refused:
            print(f"finetune.py: {refused}", file=sys.stderr)
            return 2
        display = make_display(config.steps, quiet=jax.process_index() != 0)
        display.print(about)
        if begun.moved_to:
            display.print(
                f"Moved the files of an earlier run from {config.out} to {begun.moved_to}."
            )
        return run_to_end(
            "finetune.py",
            display,
            lambda: run(config, job, strategy, begun, display),
            (ValueError, CheckpointError),
        )


if __name__ == "__main__":
    sys.exit(main())
