"""A transformer's weights, written to files that other libraries read, a tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpudist.models.pretrained.checkpoint_folder import CONFIG, INDEX, WEIGHTS, weight_files
from tpudist.models.pretrained.config_export import differences, make_config
from tpudist.models.pretrained.hub_config import read_config
from tpudist.models.pretrained.safetensors_file import (
    DTYPES,
    NAMES,
    StoredTensor,
    make_header,
    read_header,
)
from tpudist.models.pretrained.tensor_places import (
    TensorPlace,
    output_place,
    tensor_places,
    variable_of,
)
from tpudist.models.pretrained.transposition import copy_tasks
from tpudist.models.transformer import Transformer
from tpudist.processes import host_copies

_MAX_FILE_BYTES = 5 * 10**9
# What stands beside the weights in a folder, and is of the same model whatever they are.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
Header = tuple[bytes, list[tuple[StoredTensor, TensorPlace | None]]]


def save_pretrained(
    model: Transformer,
    folder: str | PathLike[str],
    *,
    like: str | PathLike[str] | None = None,
    dtype: Any = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Writes a transformer to a folder that `load_pretrained` and other libraries read.

    The first process writes, a tensor at a time; where others hold parts, all must call this.

    Args:
        model: The transformer; adapters are merged first (`lora.merge`).
        folder: Where to write. What has the same name there is replaced when a file is whole, and
            an index, or a single file of weights, that is not of this model is taken away.
        like: The folder that the model was loaded from. The files then have its names, tensors in
            its order and dtypes, and its configuration and tokenizer are copied: weights that were
            not changed are written as the same bytes. By default a `config.json` is made, and no
            tokenizer.
        dtype: Without `like`, that of the files; by default that of each parameter.
        max_file_bytes: Without `like`, after how many bytes another file begins.

    Raises:
        ValueError: Other libraries know no such model, `like` is another model, or the model has
            adapters.
    """
    folder = Path(folder)
    if model.blocks.adapter_scale is not None:
        raise ValueError(
            "save_pretrained received a model with adapters, which a file of weights cannot "
            "contain. Merge them first: lora.merge(model)."
        )
    files = _plan(model, dtype, max_file_bytes) if like is None else _imitate(model, Path(like))
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for name, (start, tensors) in files.items():
        _write(model, folder / name if writes else None, start, tensors)
    if writes:
        _remove_earlier(folder, files, like)
    if writes and like is not None:
        for pattern in _BESIDE:
            for file in Path(like).glob(pattern):
                if file.resolve() != (folder / file.name).resolve():
                    shutil.copyfile(file, folder / file.name)
    elif writes:
        _write_about(model, folder, files)
    if jax.process_count() > 1:  # nobody reads before the first process has written
        host_copies.finish(host_copies.begin([model.final_norm.get_raw_value()])[0])


def _plan(model: Transformer, dtype: Any, max_file_bytes: int) -> dict[str, Header]:
    """The files of a model of one's own: by name, how they begin, and what is in them."""
    groups: list[list[TensorPlace]] = [[]]
    sizes = [0]
    names: dict[str, str] = {}
    for place in tensor_places(model.config):
        kind = np.dtype(variable_of(model, place).get_raw_value().dtype if dtype is None else dtype)
        if kind not in NAMES:
            raise ValueError(
                f"A file of weights cannot contain parameters of dtype {kind.name}. Use one of "
                f"{', '.join(known.name for known in NAMES)}."
            )
        names[place.tensor] = NAMES[kind]
        size = int(np.prod(place.shape, dtype=np.int64)) * kind.itemsize
        if groups[-1] and sizes[-1] + size > max_file_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1].append(place)
        sizes[-1] += size
    make_config(model.config, "float32")  # refuses what has no configuration before all is written
    files: dict[str, Header] = {}
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WEIGHTS
        start = make_header((p.tensor, names[p.tensor], p.shape) for p in group)
        stored = [StoredTensor(Path(name), names[p.tensor], p.shape, 0) for p in group]
        files[name] = start, list(zip(stored, group, strict=True))
    return files


def _imitate(model: Transformer, like: Path) -> dict[str, Header]:
    """The files of the folder that the model was loaded from."""
    config = model.config
    if different := differences(read_config(like), config):
        raise ValueError(
            f"save_pretrained(like={str(like)!r}) received a model that differs from the model in "
            f"that folder in {', '.join(different)}. Name the folder that the model was loaded "
            "from, or omit `like`."
        )
    places = {place.tensor: place for place in tensor_places(config)}
    if config.tied:
        places[output_place(config).tensor] = output_place(config)
    files: dict[str, Header] = {}
    for file in weight_files(like):
        start, tensors = read_header(file)
        in_order = sorted(tensors.items(), key=lambda item: item[1].start)
        files[file.name] = start, [(tensor, places.get(name)) for name, tensor in in_order]
    return files


def _write(
    model: Transformer,
    file: Path | None,
    start: bytes,
    tensors: Iterable[tuple[StoredTensor, TensorPlace | None]],
) -> None:
    """Writes a file, or takes part in gathering what another process writes."""
    if file is None:
        for _, place in tensors:
            if place is not None:
                _gather(model, place)
        return
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as opened:
        opened.write(start)
        for tensor, place in tensors:
            if place is None:  # what is no part of the model stays as it was
                opened.write(memoryview(tensor.map()).cast("B"))
                continue
            values = np.empty(place.shape, DTYPES[tensor.dtype])
            view = place.view_as_variable(values)
            for part, of in _gather(model, place):
                for task in copy_tasks(part, view[of]):
                    task()
            opened.write(memoryview(values.view(np.uint8)).cast("B"))
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def _gather(
    model: Transformer, place: TensorPlace
) -> Iterable[tuple[np.ndarray, tuple[slice, ...]]]:
    """The parts of a tensor, with the dims of the variable, and where in it each of them is."""
    array = variable_of(model, place).get_raw_value()
    if not array.is_fully_addressable:
        index = tuple(slice(None) if i is None else i for i in place.part)
        whole = host_copies.finish(host_copies.begin([array[index]])[0])
        return [(whole, (slice(None),) * whole.ndim)]
    found: dict[Any, np.ndarray] = {}
    for shard in array.addressable_shards:
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
        )
        within = place.find_in(bounds)
        if within is None:
            continue
        of, to = within
        key = tuple((part.start, part.stop) for part in of)
        if key not in found:  # of copies on several devices one is enough
            is_here = shard.device.platform == "cpu"
            found[key] = np.asarray(shard.data)[to] if is_here else np.asarray(shard.data[to])
    return [(part, tuple(slice(*ends) for ends in key)) for key, part in found.items()]


def _remove_earlier(
    folder: Path, files: dict[str, Header], like: str | PathLike[str] | None
) -> None:
    """Takes away what would have weights of an earlier save read in place of these."""
    if WEIGHTS not in files:
        (folder / WEIGHTS).unlink(missing_ok=True)
    elif like is None or not (Path(like) / INDEX).exists():
        (folder / INDEX).unlink(missing_ok=True)


def _write_about(model: Transformer, folder: Path, files: dict[str, Header]) -> None:
    """The configuration, and the index of several files."""
    tensors = [tensor for _, found in files.values() for tensor, _ in found]
    [first, *_] = [DTYPES[tensor.dtype].name for tensor in tensors]
    _write_json(folder / CONFIG, make_config(model.config, first))
    if len(files) > 1:
        sizes = (DTYPES[t.dtype].itemsize * int(np.prod(t.shape, dtype=np.int64)) for t in tensors)
        where = {
            place.tensor: name
            for name, (_, found) in files.items()
            for _, place in found
            if place is not None
        }
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(where.items()))}
        _write_json(folder / INDEX, index)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
