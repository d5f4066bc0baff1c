"""Weights of a pretrained model, read from files to where they belong.

A tensor is looked at once, in the pages that the system keeps of its file, and copied to the parts
of a variable that devices of this process hold. So a host has its share of the variable that is
being read and one tensor of a file, never the whole model; where the host's memory is the
devices', as on emulated ones, the share is what they hold in the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpudist.context import get_strategy, has_strategy
from tpudist.models.pretrained.checkpoint_folder import read_tensors
from tpudist.models.pretrained.config_export import differences
from tpudist.models.pretrained.hub_config import read_config
from tpudist.models.pretrained.safetensors_file import DTYPES, StoredTensor
from tpudist.models.pretrained.tensor_places import (
    OUTPUT,
    TensorPlace,
    tensor_places,
    variable_of,
)
from tpudist.models.pretrained.transposition import copy_tasks
from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig
from tpudist.processes import process_agreement

Bounds = tuple[tuple[int, int], ...]
# Buffers of angles, which older checkpoints keep and nobody reads.
_NOT_READ = "rotary_emb.inv_freq"


def load_pretrained(
    folder: str | PathLike[str],
    *,
    dtype: Any = None,
    config: TransformerConfig | None = None,
) -> Transformer:
    """The transformer with the weights of a folder, placed by the strategy in whose scope it is.

    Nothing is drawn at random, and no host holds more of the weights than its devices do and one
    tensor of a file. Outside of all scopes the weights are on JAX's first device.

    Args:
        folder: Of this machine, with `config.json` and weights in `model.safetensors`, or in the
            files that `model.safetensors.index.json` names: of the families `llama`, `mistral`,
            `qwen2`, `qwen3`, `gemma`, `gemma2` and `gemma3_text`.
        dtype: Of the parameters: "float32", "bfloat16" or "float16"; by default that in which each
            is stored. The model computes in it too, unless `config` says otherwise.
        config: What `read_config(folder)` gives, with other choices of how to compute, such as
            `remat` or `dtype`.

    Returns:
        The transformer, whose logits are those of the package `transformers`.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: The model is none that the transformer can be, or its files are damaged or of
            another model.
        ProcessesDifferError: Another process reads another model.
    """
    folder = Path(folder)
    found = read_config(folder)
    kind = None if dtype is None else _parse_dtype(dtype)
    if config is None:
        config = found
        if kind is not None:
            computed = "bfloat16" if kind == jnp.bfloat16 else "float32"
            config = dataclasses.replace(found, dtype=computed)
    elif different := differences(found, config):
        raise ValueError(
            f"load_pretrained({str(folder)!r}) received a config that differs from the config of "
            f"the weights in {', '.join(different)}. Start with read_config(folder), and change "
            "only how the model computes, not its weights."
        )
    tensors = read_tensors(folder)
    groups: dict[str, list[TensorPlace]] = defaultdict(list)
    for place in _match(folder, config, tensors):
        groups[place.variable].append(place)

    def make() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0))

    if has_strategy():
        strategy = get_strategy()
        facts = {
            "the model": repr(config),
            "dtype": "as stored" if kind is None else kind.name,
            "the tensors in the files": _digest(tensors),
        }
        intention = process_agreement.Intention("load_pretrained", facts)
        process_agreement.agree(strategy.replica_mesh, intention)
        model = strategy.create_abstract(make)
    else:
        model = nnx.eval_shape(make)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as threads:
        for places in groups.values():
            variable = variable_of(model, places[0])
            shape = variable.get_raw_value()
            stored = [tensors[place.tensor] for place in places]
            chosen = DTYPES[stored[0].dtype] if kind is None else kind
            variable.set_raw_value(_load(threads, places, stored, shape, chosen))
    return model


def _digest(tensors: dict[str, StoredTensor]) -> str:
    """What tells the tensors of different models apart, but for their values."""
    about = sorted((name, t.dtype, t.shape, t.start) for name, t in tensors.items())
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _parse_dtype(dtype: Any) -> np.dtype:
    try:
        kind = np.dtype(getattr(jnp, dtype) if isinstance(dtype, str) else dtype)
        if kind in DTYPES.values():
            return kind
    except (AttributeError, TypeError):
        pass
    raise ValueError(
        f"load_pretrained(dtype={dtype!r}): dtype must be 'float32', 'bfloat16' or 'float16'. Omit "
        "it to keep the stored dtype."
    )


def _match(
    folder: Path, config: TransformerConfig, tensors: dict[str, StoredTensor]
) -> Iterator[TensorPlace]:
    """The tensors that the model is made of, when all are there and no others."""
    places = list(tensor_places(config))
    known = {place.tensor for place in places}
    missing = [place.tensor for place in places if place.tensor not in tensors]
    more = [name for name in tensors if name not in known and not name.endswith(_NOT_READ)]
    if config.tied and OUTPUT in more:
        _check_tied(folder, tensors[OUTPUT], tensors.get(places[0].tensor))
        more.remove(OUTPUT)
    if missing or more:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for what, names in (("that it needs are missing", missing), ("are unknown", more))
            if names
        ]
        raise ValueError(
            f"The tensors in {folder} do not match the model that its config.json describes: "
            f"{'; '.join(parts)}. Use weights and a configuration of one model."
        )
    for place in places:
        tensor = tensors[place.tensor]
        if tensor.shape != place.shape:
            raise ValueError(
                f"{place.tensor} in {tensor.file} is {list(tensor.shape)}, but config.json "
                f"requires {list(place.shape)}. Use weights and a configuration of one model."
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{place.tensor} in {tensor.file} is of dtype {tensor.dtype}, but tpudist loads "
                f"only {', '.join(DTYPES)}. For quantized weights, use another library."
            )
    yield from places


def _check_tied(folder: Path, output: StoredTensor, embedding: StoredTensor | None) -> None:
    """Refuses a matrix of logits that is not the embedding, though the model is said to be tied."""
    if embedding is not None and output.shape == embedding.shape:
        first, second = output.map(), embedding.map()
        rows = max(1, 2**22 // max(1, first.shape[1]))
        pieces = range(0, len(first), rows)
        if all(np.array_equal(first[i : i + rows], second[i : i + rows]) for i in pieces):
            return
    raise ValueError(
        f"config.json in {folder} says tie_word_embeddings: true, but {OUTPUT} differs from the "
        "embedding, so it is not clear which one to use. Set it to false to load both."
    )


def _load(
    threads: ThreadPoolExecutor,
    places: list[TensorPlace],
    stored: list[StoredTensor],
    target: jax.ShapeDtypeStruct,
    dtype: np.dtype,
) -> jax.Array:
    """A variable, of which each device of this process has its part."""
    sharding: Any = target.sharding
    if sharding is None:  # outside of all scopes
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = {
        device: _bounds(index, target.shape)
        for device, index in sharding.addressable_devices_indices_map(target.shape).items()
    }
    parts = {
        bounds: _allocate([stop - start for start, stop in bounds], dtype)
        for bounds in dict.fromkeys(where.values())
    }
    for place, tensor in zip(places, stored, strict=True):
        view = place.view_as_variable(tensor.map())
        tasks = []
        for bounds, part in parts.items():
            if (found := place.find_in(bounds)) is not None:
                of, to = found
                tasks += copy_tasks(view[of], part[to])
        for _ in threads.map(lambda task: task(), tasks):
            pass
    memory = sharding.memory_kind
    arrays = [
        jax.device_put(part, jax.sharding.SingleDeviceSharding(device, memory_kind=memory))
        for device, part in ((device, parts[bounds]) for device, bounds in where.items())
    ]
    # Until it has come to them, the host holds what it was read into.
    jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(target.shape, sharding, arrays)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    found = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in found)


def _allocate(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Memory that devices which are this host's CPU take over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
