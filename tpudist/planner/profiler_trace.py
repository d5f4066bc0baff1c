"""Reads rates of a TPU from a trace of JAX's profiler.

`jax.profiler.trace` writes `HOST.xplane.pb` (a protocol buffer `XSpace`) and `HOST.trace.json.gz`
(Chrome's trace format). Both list the operations of each device with their operations, bytes and
seconds. Schemas: github.com/openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto, and
xprof's xplane_schema.cc for the names of figures.
"""

import dataclasses
import gzip
import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tpudist.protobuf_wire import FIXED64, LENGTH, VARINT, read_fields
from tpudist.xla.hardware.chips import CHIPS, Chip

_MIN_S = 50e-6
"""Seconds of the shortest operation that counts: the start of a shorter one takes a part of it."""
_MAX_SHARE = 1.05  # of the peak, as in `Calibration`
_IN_VMEM = "S(1)"  # in a layout: the profiler counts its bytes, too
_OPS, _DEVICE = "XLA Ops", "/device:TPU:"
# Errors of a file that is damaged, or of another program.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, struct.error)
_FIGURES = ("hlo_category", "flops", "model_flops", "bytes_accessed", "long_name")


@dataclasses.dataclass(frozen=True)
class _Op:
    """One run of an operation on a device; `text` is its line in the program."""

    text: str
    category: str
    flops: float
    num_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class TraceRates:
    """Rates of one device, None if the trace has no such operation.

    Attributes:
        generation: Generation of the chips.
        matmul_flops_per_s: The fastest matrix product.
        hbm_bytes_per_s: The fastest operation that only moves bytes to and from HBM.
    """

    generation: str
    matmul_flops_per_s: float | None
    hbm_bytes_per_s: float | None


def is_trace(path: str | Path) -> bool:
    """Whether a file has the name of a trace of the profiler."""
    return str(path).endswith((".xplane.pb", ".trace.json.gz", ".trace.json"))


def read_rates(path: str | Path, generation: str | None = None) -> TraceRates:
    """Returns the rates in a trace.

    Args:
        path: `*.xplane.pb`, `*.trace.json.gz` or `*.trace.json`.
        generation: Generation of the chips, if the trace does not say it; only an xplane does.

    Raises:
        ValueError: If the file is not a trace of a TPU, or has no operation of at least 50 us with
            a possible rate.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        if path.name.endswith(".pb"):
            kind, ops = _read_xplane(data)
        else:
            kind, ops = "", _read_json(gzip.decompress(data) if path.suffix == ".gz" else data)
        ops = list(ops)
    except (*_DAMAGE, zlib.error) as error:
        raise ValueError(f"{path} is not a trace of JAX's profiler: {error!r}.") from error
    if not ops:
        raise ValueError(
            f"{path} has no operations of a TPU. Trace a step that runs on one, with "
            "jax.profiler.trace(folder)."
        )
    found = next((c for c in CHIPS.values() if c.device_kind.lower() == kind.lower()), None)
    chip = found or CHIPS.get(generation or "")
    if chip is None:
        raise ValueError(f"{path} does not say which TPU ran it. Pass its slice as --topology.")
    return _find_rates(path, chip, ops)


def _find_rates(path: Path, chip: Chip, ops: Iterable[_Op]) -> TraceRates:
    """Returns the best rates that the chip can have."""
    flops: dict[str, list[tuple[float, float]]] = defaultdict(list)
    copied: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op in ops:
        if "convolution" in op.category and op.flops:
            flops[op.text].append((op.flops, op.seconds))
        elif not op.flops and op.num_bytes and "{" in op.text and _IN_VMEM not in op.text:
            copied[op.text].append((op.num_bytes, op.seconds))
    matmul = _best(flops.values(), chip.bf16_flops_per_s / chip.devices_per_chip)
    memory = _best(copied.values(), chip.hbm_bytes_per_s / chip.devices_per_chip)
    if matmul is None and memory is None:
        raise ValueError(
            f"{path} has no matrix product and no copy of at least 50 us below the peak of "
            f"{chip.generation}, so it shows no rate. Trace a larger step."
        )
    return TraceRates(chip.generation, matmul, memory)


def _best(runs: Iterable[list[tuple[float, float]]], peak: float) -> float | None:
    """Returns the largest rate of an operation over all its runs.

    Rates above the peak are left out: those of products of narrower numbers, and of bytes that
    never left VMEM.
    """
    rates = []
    for amounts in runs:
        amount, seconds = (sum(column) for column in zip(*amounts, strict=True))
        if seconds / len(amounts) >= _MIN_S and amount / seconds <= _MAX_SHARE * peak:
            rates.append(amount / seconds)
    return max(rates, default=None)


def _op(text: str, figures: dict[str, object], seconds: float) -> _Op:
    def number(name: str) -> float:
        return float(str(figures.get(name) or 0))

    return _Op(
        text=str(figures.get("long_name") or text),
        category=str(figures.get("hlo_category", "")),
        flops=number("model_flops") or number("flops"),
        num_bytes=number("bytes_accessed"),
        seconds=seconds,
    )


def _read_json(data: bytes) -> Iterator[_Op]:
    events = json.loads(data)["traceEvents"]
    named: dict[str, dict[object, str]] = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event.get("ph") == "M" and event["name"] in named:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            named[event["name"]][key] = event["args"]["name"]
    for event in events:
        if event.get("ph") != "X":
            continue
        process = named["process_name"].get(event["pid"], "")
        if process.startswith(_DEVICE) and (
            named["thread_name"].get((event["pid"], event["tid"])) == _OPS
        ):
            yield _op(event["name"], event.get("args", {}), event["dur"] / 1e6)


def _read_xplane(data: bytes) -> tuple[str, Iterator[_Op]]:
    """Returns the kind of the devices, and their operations."""
    # The literal numbers are fields of xplane.proto.
    kind, ops = "", []
    for plane in _children(data, 1):
        name = _text(plane, 2)
        if not name.startswith(_DEVICE) or " " in name:  # also "... SparseCore 0"
            continue
        stat_names = {key: _text(value, 2) for key, value in _entries(plane, 5)}
        kind = str(_figures(plane, 6, stat_names).get("device_type_string", kind))
        kinds = {
            key: (_text(value, 2), _figures(value, 5, stat_names))
            for key, value in _entries(plane, 4)
        }
        for line in _children(plane, 3):
            if _text(line, 2) == _OPS:
                for event in _children(line, 4):
                    text, figures = kinds[_number(event, 1)]
                    own = _figures(event, 4, stat_names)
                    ops.append(_op(text, {**figures, **own}, _number(event, 3) / 1e12))
    return kind, iter(ops)


def _children(message: bytes | memoryview, number: int) -> Iterator[memoryview]:
    for field, wire_type, value in read_fields(message):
        if field == number and wire_type == LENGTH:
            assert isinstance(value, memoryview)
            yield value


def _text(message: memoryview, number: int) -> str:
    return bytes(next(_children(message, number), b"")).decode()


def _number(message: memoryview, number: int) -> int:
    for field, wire_type, value in read_fields(message):
        if field == number and wire_type == VARINT:
            assert isinstance(value, int)
            return value
    return 0


def _entries(message: memoryview, number: int) -> Iterator[tuple[int, memoryview]]:
    """Yields the entries of a map from numbers to messages."""
    for entry in _children(message, number):
        yield _number(entry, 1), next(_children(entry, 2), memoryview(b""))


def _figures(message: memoryview, number: int, names: dict[int, str]) -> dict[str, object]:
    """Returns the figures (`XStat`) of a message by name."""
    figures: dict[str, object] = {}
    for stat in _children(message, number):
        name = names.get(_number(stat, 1), "")
        if name not in _FIGURES and name != "device_type_string":
            continue
        for field, wire_type, value in read_fields(stat):
            if field == 1:
                continue
            if wire_type == FIXED64:
                assert isinstance(value, memoryview)
                figures[name] = struct.unpack("<d", value)[0]
            elif wire_type == LENGTH:
                assert isinstance(value, memoryview)
                figures[name] = bytes(value).decode(errors="replace")
            else:  # field 7 refers to a text in the table of names
                figures[name] = names.get(int(value), "") if field == 7 else value
    return figures
