"""Weights of pretrained models: read to where they belong, and written back."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpudist.context import get_strategy, has_strategy
from tpudist.models.pretrained import checkpoint_folder, safetensors_file
from tpudist.models.pretrained.hub_config import make_config, read_config
from tpudist.models.pretrained.safetensors_file import StoredTensor
from tpudist.models.pretrained.tensor_places import TensorPlace, tensor_places
from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig

Folder = str | PathLike[str]
Index = tuple[tuple[int, int], ...]


def load_pretrained(
    folder: Folder, *, dtype: Any = None, config: TransformerConfig | None = None
) -> Transformer:
    """The transformer with the weights of a folder, each placed where the strategy wants it."""
    folder = Path(folder)
    found = read_config(folder)
    stored = checkpoint_folder.read_tensors(folder)
    if config is None:
        config = found if dtype is None else dataclasses.replace(found, dtype=np.dtype(dtype).name)
    make = lambda: Transformer(config, rngs=nnx.Rngs(0))  # noqa: E731
    model = get_strategy().create_abstract(make) if has_strategy() else nnx.eval_shape(make)
    groups: dict[str, list[TensorPlace]] = defaultdict(list)
    for place in tensor_places(config):
        groups[place.variable].append(place)
    for name, places in groups.items():
        variable = _variable(model, name)
        shape = variable.get_raw_value()
        kind = dtype or safetensors_file.DTYPES[stored[places[0].tensor].dtype]
        variable.set_raw_value(_load_variable(places, stored, shape, np.dtype(kind)))
    return model


def _variable(model: Transformer, name: str) -> Any:
    owner: Any = model
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def _load_variable(
    places: list[TensorPlace],
    stored: dict[str, StoredTensor],
    target: jax.ShapeDtypeStruct,
    dtype: np.dtype,
) -> jax.Array:
    sharding: Any = target.sharding
    if sharding is None:  # outside of all strategies
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = sharding.addressable_devices_indices_map(target.shape)
    shards: dict[Index, np.ndarray] = {}
    for index in where.values():
        bounds = _bounds(index, target.shape)
        if bounds not in shards:
            shards[bounds] = _allocate([stop - start for start, stop in bounds], dtype)
    for place in places:
        tensor = stored[place.tensor].map().reshape(place.view).transpose(place.order)
        for bounds, shard in shards.items():
            _copy_part(place, tensor, bounds, shard)
    arrays = [
        jax.device_put(
            shards[_bounds(index, target.shape)],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, index in where.items()
    ]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, arrays)


def _copy_part(place: TensorPlace, tensor: np.ndarray, bounds: Index, shard: np.ndarray) -> None:
    """Copies what a shard has of a tensor, if it has any."""
    into: list[Any] = []
    of: list[slice] = []
    for index, (start, stop) in zip(place.part, bounds, strict=True):
        if index is None:
            of.append(slice(start, stop))
            into.append(slice(None))
        elif start <= index < stop:
            into.append(index - start)
        else:
            return
    shard[tuple(into)] = tensor[tuple(of)]


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _allocate(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Memory that devices of this host's CPU take over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def save_pretrained(model: Transformer, folder: Folder) -> None:
    """Writes a transformer as a folder that `load_pretrained` and other libraries read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    dtype = model.embedding.dtype
    places = list(tensor_places(config))
    about = [(p.tensor, safetensors_file.NAMES[np.dtype(dtype)], p.shape) for p in places]
    with (folder / checkpoint_folder.WEIGHTS).open("wb") as file:
        file.write(safetensors_file.make_header(about))
        for place in places:
            whole = np.asarray(_variable(model, place.variable)[...])
            part = whole[tuple(slice(None) if i is None else i for i in place.part)]
            tensor = part.transpose(np.argsort(place.order)).reshape(place.shape)
            file.write(np.ascontiguousarray(tensor).tobytes())
    text = json.dumps(make_config(config, np.dtype(dtype).name), indent=2) + "\n"
    (folder / checkpoint_folder.CONFIG).write_text(text)
