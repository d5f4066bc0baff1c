"""`save_pretrained`: writes a transformer to files that other libraries read."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from tpudist.models.pretrained.checkpoint_folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    plain_name,
    weight_files,
)
from tpudist.models.pretrained.config_export import differences, make_config
from tpudist.models.pretrained.hub_config import read_config, read_family
from tpudist.models.pretrained.safetensors_file import (
    DTYPE_OF_NAME,
    NAME_OF_DTYPE,
    StoredTensor,
    make_header,
    read_header,
)
from tpudist.models.pretrained.tensor_places import (
    Bounds,
    TensorPlace,
    output_place,
    tensor_places,
    variable_of,
)
from tpudist.models.pretrained.transposition import copy_tasks
from tpudist.models.quantization import refuse_quantized
from tpudist.models.transformer import Transformer
from tpudist.processes import host_copies

# The default of version 4 of the package `transformers`.
_MAX_FILE_BYTES = 5 * 10**9
# Files of a folder that do not depend on the values of the weights.
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
# Bytes before the first tensor, and the tensors in order with their places in variables; a tensor
# without a place is not part of the model.
FileContent = tuple[bytes, list[tuple[StoredTensor, list[TensorPlace]]]]


def save_pretrained(
    model: Transformer,
    folder: str | PathLike[str],
    *,
    like: str | PathLike[str] | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Writes a transformer to a folder that `load_pretrained` and other libraries read.

    The first process writes, one tensor at a time. If other processes have parts of the weights,
    all processes must call this function.

    Args:
        model: Transformer without adapters; see `lora.merge`.
        folder: Directory to write to. Each file replaces an older one only when it is complete. An
            index, or a single file of weights, of another model is deleted.
        like: Directory that the model was loaded from. The new files then have the same names,
            order and dtypes of tensors, and its configuration and tokenizer are copied. Weights
            that have not changed result in the same bytes. By default, a `config.json` is created,
            and there is no tokenizer.
        dtype: Without `like`, dtype in the files; by default the dtype of each parameter.
        max_file_bytes: Without `like`, maximum bytes of a file with more than one tensor.

    Raises:
        ValueError: If other libraries do not support the model, `like` is another model, or the
            model has adapters or is quantized.
    """
    refuse_quantized(model, "save_pretrained")
    folder = Path(folder)
    if model.blocks.adapter_scale is not None:
        raise ValueError(
            "save_pretrained received a model with adapters, which a file of weights cannot "
            "contain. Merge them first: lora.merge(model)."
        )
    if like is None:
        files = _new_files(model, dtype, max_file_bytes)
    else:
        files = _files_like(model, Path(like))
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    # Every process walks all files in the same order: gathering a tensor is a collective.
    for name, (header, tensors) in files.items():
        _write(model, folder / name if writes else None, header, tensors)
    if writes:
        _finish_folder(model, folder, files, None if like is None else Path(like))
    if jax.process_count() > 1:
        # A barrier: no process returns before the first one has written everything. Any collective
        # would do; this one gathers the smallest variable.
        host_copies.finish(host_copies.begin([model.final_norm.get_raw_value()])[0])


def _new_files(
    model: Transformer, dtype: DTypeLike | None, max_file_bytes: int
) -> dict[str, FileContent]:
    # Raises for a model that no family of `config_export` has.
    family = make_config(model.config, "float32")["model_type"]
    groups: list[list[TensorPlace]] = [[]]
    sizes = [0]
    names: dict[str, str] = {}
    for place in tensor_places(model.config, family):
        parameter = variable_of(model, place).get_raw_value()
        file_dtype = np.dtype(parameter.dtype if dtype is None else dtype)
        if file_dtype not in NAME_OF_DTYPE:
            raise ValueError(
                f"A file of weights cannot contain parameters of dtype {file_dtype.name}. Use "
                f"one of {', '.join(known.name for known in NAME_OF_DTYPE)}."
            )
        names[place.tensor] = NAME_OF_DTYPE[file_dtype]
        size = math.prod(place.shape) * file_dtype.itemsize
        # A tensor larger than the limit gets a file of its own.
        if groups[-1] and sizes[-1] + size > max_file_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1].append(place)
        sizes[-1] += size
    files: dict[str, FileContent] = {}
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WEIGHTS
        header = make_header((p.tensor, names[p.tensor], p.shape) for p in group)
        # Only their dtypes and shapes are used: the file does not exist yet.
        stored = [StoredTensor(Path(name), names[p.tensor], p.shape, 0) for p in group]
        files[name] = header, [(x, [place]) for x, place in zip(stored, group, strict=True)]
    return files


def _files_like(model: Transformer, like: Path) -> dict[str, FileContent]:
    config = model.config
    if different := differences(read_config(like), config):
        raise ValueError(
            f"save_pretrained(like={str(like)!r}) received a model that differs from the model in "
            f"that folder in {', '.join(different)}. Name the folder that the model was loaded "
            "from, or omit `like`."
        )
    places: dict[str, list[TensorPlace]] = defaultdict(list)
    for place in tensor_places(config, read_family(like)):
        places[place.tensor].append(place)
    if config.tied:
        places[output_place(config).tensor] = [output_place(config)]
    files: dict[str, FileContent] = {}
    for file in weight_files(like):
        header, tensors = read_header(file)
        # The header lists tensors in any order, and the bytes must follow the offsets.
        in_order = sorted(tensors.items(), key=lambda item: item[1].start)
        files[file.name] = header, [(tensor, places[plain_name(name)]) for name, tensor in in_order]
    return files


def _write(
    model: Transformer,
    file: Path | None,
    header: bytes,
    tensors: Iterable[tuple[StoredTensor, list[TensorPlace]]],
) -> None:
    """Writes a file; with None, only helps to gather the tensors that another process writes."""
    if file is None:
        for _, places in tensors:
            for place in places:
                _parts_of(model, place)
        return
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as opened:
        opened.write(header)
        for tensor, places in tensors:
            if not places:  # copied from the folder `like`
                opened.write(memoryview(tensor.map()).cast("B"))
                continue
            values = np.empty(tensor.shape, DTYPE_OF_NAME[tensor.dtype])
            for place in places:
                view = place.view_as_variable(values)
                for part, index in _parts_of(model, place):
                    for task in copy_tasks(part, view[index]):
                        task()
            opened.write(memoryview(values.view(np.uint8)).cast("B"))
        opened.flush()
        os.fsync(opened.fileno())
    # After `fsync`: a crash leaves the old file or the complete new one. It also matters if `like`
    # is the same folder, whose old file is still mapped.
    unfinished.replace(file)


def _parts_of(
    model: Transformer, place: TensorPlace
) -> Iterable[tuple[np.ndarray, tuple[slice, ...]]]:
    """Returns the parts of a tensor, with the dims of the variable, and their indices in it."""
    array = variable_of(model, place).get_raw_value()
    if not array.is_fully_addressable:
        index = tuple(slice(None) if i is None else i for i in place.part)
        tensor = host_copies.finish(host_copies.begin([array[index]])[0])
        return [(tensor, (slice(None),) * tensor.ndim)]
    parts: dict[Bounds, np.ndarray] = {}
    for shard in array.addressable_shards:
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
        )
        overlap = place.find_in(bounds)
        if overlap is None:
            continue
        tensor_index, shard_index = overlap
        key = tuple((part.start, part.stop) for part in tensor_index)
        if key not in parts:  # one of the copies on several devices is enough
            # On a CPU device, NumPy sees the shard without a copy. From others, only the tensor is
            # transferred.
            is_on_host = shard.device.platform == "cpu"
            parts[key] = (
                np.asarray(shard.data)[shard_index]
                if is_on_host
                else np.asarray(shard.data[shard_index])
            )
    return [(part, tuple(slice(*ends) for ends in key)) for key, part in parts.items()]


def _finish_folder(
    model: Transformer, folder: Path, files: dict[str, FileContent], like: Path | None
) -> None:
    # Files of an earlier save are deleted if libraries would read them instead of the new ones.
    # That is after the new weights are complete: until then the earlier model stays readable.
    if WEIGHTS not in files:
        (folder / WEIGHTS).unlink(missing_ok=True)
    elif like is None or not (like / INDEX).exists():
        (folder / INDEX).unlink(missing_ok=True)
    if like is None:
        _write_config_and_index(model, folder, files)
        return
    for pattern in _COPIED:
        for file in like.glob(pattern):
            if file.resolve() != (folder / file.name).resolve():  # `like` may be the folder itself
                shutil.copyfile(file, folder / file.name)


def _write_config_and_index(
    model: Transformer, folder: Path, files: dict[str, FileContent]
) -> None:
    tensors = [tensor for _, content in files.values() for tensor, _ in content]
    [first, *_] = [DTYPE_OF_NAME[tensor.dtype].name for tensor in tensors]
    _write_json(folder / CONFIG, make_config(model.config, first))
    if len(files) > 1:
        sizes = (DTYPE_OF_NAME[t.dtype].itemsize * math.prod(t.shape) for t in tensors)
        weight_map = {
            place.tensor: name
            for name, (_, content) in files.items()
            for _, places in content
            for place in places
        }
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(folder / INDEX, index)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
