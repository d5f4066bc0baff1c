"""`load_pretrained`: reads the weights of a pretrained model directly to their devices.

A tensor is mapped into memory, read once, and copied to the parts of a variable on the devices of
this process. So a host needs memory for its share of one variable and one tensor of a file, never
for the complete model. On CPU devices, that share becomes the memory of the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpudist.array_types import Shape
from tpudist.context import get_strategy, has_strategy
from tpudist.models.pretrained.checkpoint_folder import read_tensors
from tpudist.models.pretrained.config_export import differences
from tpudist.models.pretrained.hub_config import read_config, read_family
from tpudist.models.pretrained.safetensors_file import DTYPE_OF_NAME, StoredTensor
from tpudist.models.pretrained.tensor_places import (
    OUTPUT,
    Bounds,
    TensorPlace,
    tensor_places,
    variable_of,
)
from tpudist.models.pretrained.transposition import copy_tasks
from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig
from tpudist.processes import process_agreement

# Buffers of angles and masks in older checkpoints; no library reads them.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_MAX_THREADS = 8  # copies are limited by the memory, not by the cores
_COMPARED_ELEMENTS = 2**22  # a few MB; the complete matrices need not be in memory


def load_pretrained(
    folder: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    config: TransformerConfig | None = None,
) -> Transformer:
    """Returns the transformer in a folder, placed by the strategy of the current scope.

    No random values are computed. A host needs memory for the weights of its devices and for one
    tensor of a file. Outside of all scopes the weights are on JAX's first device.

    Args:
        folder: Directory on this machine with `config.json` and weights in `model.safetensors`, or
            in the files that `model.safetensors.index.json` names. Supported families: `llama`,
            `mistral`, `qwen2`, `qwen3`, `gemma`, `gemma2`, `gemma3_text`, `mixtral`, `qwen3_moe`,
            `gpt_oss`, `phi3`, `olmo2` and `gpt2`.
        dtype: Dtype of the parameters: "float32", "bfloat16" or "float16"; by default the stored
            dtype of each, or the widest if its layers differ. The model also computes in it, unless
            `config` has another dtype.
        config: Result of `read_config(folder)` with other options that do not change results, such
            as `remat` or `dtype`.

    Returns:
        The transformer. Its logits equal those of the package `transformers`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the transformer does not support the model, or files are damaged or belong to
            another model.
        ProcessesDifferError: If another process loads another model.
    """
    folder = Path(folder)
    parameter_dtype = None if dtype is None else _parse_dtype(dtype)
    config = _choose_config(folder, config, parameter_dtype)
    tensors = read_tensors(folder)
    groups: dict[str, list[TensorPlace]] = defaultdict(list)
    for place in _match(folder, config, tensors):
        groups[place.variable].append(place)
    model = _make_abstract(config, parameter_dtype, tensors)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
        # One variable at a time: only of this one, the host has both the pages of the files and its
        # own copy.
        for places in groups.values():
            variable = variable_of(model, places[0])
            target = variable.get_raw_value()
            stored = [tensors[place.tensor] for place in places]
            variable_dtype = _widest_dtype(stored) if parameter_dtype is None else parameter_dtype
            variable.set_raw_value(_load(threads, places, stored, target, variable_dtype))
    return model


def _widest_dtype(stored: Sequence[StoredTensor]) -> np.dtype:
    # By JAX, because NumPy cannot promote float16 and bfloat16.
    return functools.reduce(jnp.promote_types, (DTYPE_OF_NAME[x.dtype] for x in stored))


def _choose_config(
    folder: Path, config: TransformerConfig | None, dtype: np.dtype | None
) -> TransformerConfig:
    # Also with a `config`: only the folder says which model the weights belong to.
    stored = read_config(folder)
    if config is None:
        if dtype is None:
            return stored
        return dataclasses.replace(stored, dtype="bfloat16" if dtype == jnp.bfloat16 else "float32")
    if different := differences(stored, config):
        raise ValueError(
            f"load_pretrained({str(folder)!r}) received a config that differs from the config of "
            f"the weights in {', '.join(different)}. Start with read_config(folder), and change "
            "only how the model computes, not its weights."
        )
    return config


def _make_abstract(
    config: TransformerConfig, dtype: np.dtype | None, tensors: dict[str, StoredTensor]
) -> Transformer:
    """Returns the transformer with shapes, and with shardings if there is a strategy."""

    def make() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0))

    if not has_strategy():
        return nnx.eval_shape(make)
    strategy = get_strategy()
    facts = {
        "the model": repr(config),
        "dtype": "as stored" if dtype is None else dtype.name,
        "the tensors in the files": _digest(tensors),
    }
    intention = process_agreement.Intention("load_pretrained", facts)
    process_agreement.agree(strategy.replica_mesh, intention)
    return strategy.create_abstract(make)


def _digest(tensors: dict[str, StoredTensor]) -> str:
    # Names, dtypes, shapes and places, but not values: these would have to be read twice.
    facts = sorted((name, t.dtype, t.shape, t.start) for name, t in tensors.items())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _parse_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        # NumPy does not know the name "bfloat16"; `jax.numpy` has all names as attributes.
        parsed = np.dtype(getattr(jnp, dtype) if isinstance(dtype, str) else dtype)
        if parsed in DTYPE_OF_NAME.values():
            return parsed
    except (AttributeError, TypeError):
        pass
    raise ValueError(
        f"load_pretrained(dtype={dtype!r}): dtype must be 'float32', 'bfloat16' or 'float16'. Omit "
        "it to keep the stored dtype."
    )


def _match(
    folder: Path, config: TransformerConfig, tensors: dict[str, StoredTensor]
) -> Iterator[TensorPlace]:
    """Yields the tensors of the model, after a check that the files contain exactly these."""
    places = list(tensor_places(config, read_family(folder)))
    known = {place.tensor for place in places}
    missing = [place.tensor for place in places if place.tensor not in tensors]
    unknown = [
        name for name in tensors if name not in known and not name.endswith(_IGNORED_SUFFIXES)
    ]
    if config.tied and OUTPUT in unknown:
        # A missing embedding is the first error, below.
        if (embedding := tensors.get(places[0].tensor)) is not None:
            _check_tied(folder, tensors[OUTPUT], embedding)
        unknown.remove(OUTPUT)
    if missing or unknown:
        parts = [
            f"{len(names)} {problem}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for problem, names in (("that it needs are missing", missing), ("are unknown", unknown))
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
        if tensor.dtype not in DTYPE_OF_NAME:
            raise ValueError(
                f"{place.tensor} in {tensor.file} has dtype {tensor.dtype}, but tpudist loads "
                f"only {', '.join(DTYPE_OF_NAME)}. For quantized weights, use another library."
            )
    yield from places


def _check_tied(folder: Path, output: StoredTensor, embedding: StoredTensor) -> None:
    """Checks that a stored matrix of logits equals the embedding, if the model is tied."""
    if output.shape == embedding.shape:
        first, second = output.map(), embedding.map()
        rows = max(1, _COMPARED_ELEMENTS // max(1, first.shape[1]))
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
    """Returns a variable; each device of this process has its part."""
    sharding = target.sharding
    if sharding is None:  # outside of all scopes
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    bounds_of_device = {
        device: _bounds(index or (), target.shape)
        for device, index in sharding.addressable_devices_indices_map(target.shape).items()
    }
    parts = {
        bounds: _allocate([stop - start for start, stop in bounds], dtype)
        # Devices with the same part share one array on the host.
        for bounds in dict.fromkeys(bounds_of_device.values())
    }
    for place, tensor in zip(places, stored, strict=True):
        view = place.view_as_variable(tensor.map())
        tasks = []
        for bounds, part in parts.items():
            if (overlap := place.find_in(bounds)) is not None:
                source, target_index = overlap
                tasks += copy_tasks(view[source], part[target_index])
        # Consumed, because `map` raises the error of a task only when its result is read. The
        # tensor is done before the next one begins, so only one is mapped at a time.
        for _ in threads.map(lambda task: task(), tasks):
            pass
    memory = sharding.memory_kind
    arrays = [
        jax.device_put(part, jax.sharding.SingleDeviceSharding(device, memory_kind=memory))
        for device, part in ((device, parts[bounds]) for device, bounds in bounds_of_device.items())
    ]
    # The host needs the parts until the transfers are complete. Without waiting, the parts of
    # several variables would be in its memory.
    jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(target.shape, sharding, arrays)


def _bounds(index: Sequence[slice], shape: Shape) -> Bounds:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ranges)


def _allocate(shape: list[int], dtype: np.dtype) -> np.ndarray:
    # XLA:CPU uses a NumPy array without a copy if it is aligned to 64 bytes.
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
