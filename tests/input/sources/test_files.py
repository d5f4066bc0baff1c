"""Examples in files: all formats, the order by files, and errors about unsuitable files."""

import contextlib
import hashlib
import os
import struct

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

import tpudist
from processes import run_processes
from tpudist import InputOptions
from tpudist.input import AutoShardPolicy, explain, from_files, parse_example, permutation
from tpudist.input.file_formats import open_files, parquet as parquet_files, tfrecord
from tpudist.input.file_formats.file_order import SegmentOrder
from tpudist.input.file_formats.recent import Recent
from tpudist.input.storage.local_file import LocalFile

FILE = AutoShardPolicy.FILE


def record(number):
    """Returns bytes whose length depends on the number."""
    return struct.pack("<q", number) + b"\x07" * (number % 7)


def parse(data):
    return {"id": np.frombuffer(data, np.int64, 1)[0], "x": np.zeros(2, np.float32)}


def write_tfrecord(path, records):
    with open(path, "wb") as file:
        for data in records:
            length = struct.pack("<Q", len(data))
            for part in (length, data):
                file.write(part + struct.pack("<I", tfrecord.checksum(part)))


def write_array_record(path, records):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for data in records:
        writer.write(data)
    writer.close()


def write_text(path, records):
    path.write_text("".join(f"{struct.unpack('<q', data[:8])[0]}\n" for data in records))


ROWS_PER_GROUP = 3


def write_parquet(path, records):
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    ids = [struct.unpack("<q", data[:8])[0] for data in records]
    columns = {"id": ids, "x": [[float(i), 0.5] for i in ids], "name": list(map(str, ids))}
    parquet.write_table(arrow.table(columns), str(path), row_group_size=ROWS_PER_GROUP)


FORMATS = {
    "tfrecord": (write_tfrecord, {"parse": parse}),
    "array_record": (write_array_record, {"parse": parse}),
    "text": (write_text, {"parse": lambda line: {"id": int(line)}}),
    "parquet": (write_parquet, {"columns": ["id", "x"]}),
}
ENDS = {"text": "txt"}


def folder(path, format, lengths):
    """Writes files with these numbers of records, and returns their pattern."""
    first = 0
    for number, length in enumerate(lengths):
        name = f"part-{number:02}.{ENDS.get(format, format)}"
        FORMATS[format][0](path / name, [record(first + i) for i in range(length)])
        first += length
    return str(path / f"part-*.{ENDS.get(format, format)}")


def ids(dataset):
    return [np.asarray(batch["id"]).tolist() for batch in dataset]


def distributed(dataset, num_replicas=2, **options):
    strategy = tpudist.MirroredStrategy(jax.devices()[:num_replicas])
    return strategy.experimental_distribute_dataset(dataset, InputOptions(**options))


def distributed_ids(dataset):
    batches = []
    for element in dataset:
        element = element["id"]
        rows = getattr(element, "rows", None) or [len(element)]
        parts = np.asarray(getattr(element, "array", element)).reshape(len(rows), -1)
        batches.append([int(x) for part, n in zip(parts, rows, strict=True) for x in part[:n]])
    return batches


@pytest.fixture(params=["in memory", "computed"])
def shuffle(request, monkeypatch):
    """Both ways to shuffle: as few rows, and as many rows."""
    if request.param == "computed":
        monkeypatch.setattr(permutation, "MAX_ROWS_IN_MEMORY", 0)
    return request.param


# All formats.


@pytest.mark.parametrize("format", FORMATS)
def test_the_records_of_all_files_are_examples_in_the_sequence_of_the_files(tmp_path, format):
    dataset = from_files(folder(tmp_path, format, [5, 1, 7]), **FORMATS[format][1])
    assert ids(dataset.batch(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    assert dataset.num_examples == 13
    assert dataset.num_files == 3
    shuffled = dataset.shuffle(seed=3).batch(4)
    order = np.random.default_rng([3, 0]).permutation(13)
    assert np.concatenate(ids(shuffled)).tolist() == order.tolist()
    assert ids(dataset.shard(3, 1).batch(9)) == [[1, 4, 7, 10]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, FILE])
def test_an_iterator_of_files_resumes_on_other_replicas(tmp_path, format, policy, shuffle):
    pattern = folder(tmp_path, format, [5, 4, 7, 5])

    def begin(num_replicas):
        dataset = from_files(pattern, **FORMATS[format][1]).shuffle(seed=1).batch(4).repeat(2)
        return iter(distributed(dataset, num_replicas, auto_shard_policy=policy))

    whole = distributed_ids(begin(8))
    assert sorted(sum(whole[:6], [])) == list(range(21))
    for num_given, num_replicas in ((1, 2), (7, 1)):
        iterator = begin(8)
        for _ in range(num_given):
            next(iterator)
        resumed = begin(num_replicas)
        resumed.set_state(iterator.get_state())
        assert distributed_ids(resumed) == whole[num_given:]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_empty_among_others_adds_nothing(tmp_path, format):
    dataset = from_files(folder(tmp_path, format, [0, 3, 0, 2]), **FORMATS[format][1])
    assert ids(dataset.batch(2)) == [[0, 1], [2, 3], [4]]
    assert ids(dataset.batch(2).with_order_by_files()) == [[0, 3], [1, 4], [2]]


@pytest.mark.parametrize("format", FORMATS)
def test_files_without_any_record_have_no_batches(tmp_path, format):
    for counts in ([0], [0, 0]):
        dataset = from_files(folder(tmp_path, format, counts), **FORMATS[format][1])
        assert list(dataset.shuffle(0).batch(2)) == []
        assert list(dataset.batch(2).with_order_by_files()) == []
        distributed_by_files = distributed(dataset.batch(2), auto_shard_policy=FILE)
        assert explain(distributed_by_files).hosts[0].files == 0


@pytest.mark.parametrize("format", ["tfrecord", "array_record", "parquet"])
def test_a_file_that_is_cut_off_is_named(tmp_path, format):
    folder(tmp_path, format, [9])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 5):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"{path.name}.*Write it again"):
            ids(from_files(path, **FORMATS[format][1]).batch(2))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_not_readable_is_named(tmp_path, format):
    options = FORMATS[format][1] | {"format": format}
    if format == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet files are read by pyarrow")
    with pytest.raises(ValueError, match=r"/none does not exist. Check whether it was moved"):
        from_files(tmp_path / "none", **options)
    with pytest.raises(ValueError, match=r"is a directory. Pass the files in it, such as .*/\*"):
        from_files(tmp_path, **options)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=r"/loop cannot be read: Too many levels of symbolic"):
        from_files([loop], **options)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("1\n")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ValueError, match=r"a.txt cannot be read: Permission denied"):
        from_files(tmp_path / "a.txt", parse=int)


# TFRecord.


def test_checksums_equal_those_of_a_file_that_tensorflow_wrote(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [b"123456789"])
    # `tf.io.TFRecordWriter` of TensorFlow 2.21: length, its checksum, bytes, their checksum.
    expected = "0900000000000000" + "37f97139" + b"123456789".hex() + "e5b08ac7"
    assert path.read_bytes().hex() == expected


def test_a_flipped_bit_anywhere_in_a_tfrecord_file_is_found(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [record(i) for i in range(20)])
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Record \d+ of the TFRecord file .*a.tfrecord is da"):
            ids(from_files(path, parse=lambda data: {"id": len(data)}).batch(6))


def test_the_record_that_is_damaged_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [record(i) for i in range(20)])
    whole = bytearray(path.read_bytes())
    at = whole.index(struct.pack("<q", 17))
    whole[at] ^= 1
    path.write_bytes(whole)
    dataset = from_files(path, parse=parse).batch(4)
    batches = iter(distributed(dataset))
    for _ in range(4):
        next(batches)
    with pytest.raises(
        ValueError, match="Record 17 of .* the checksum of its bytes does not match"
    ):
        next(batches)


def test_a_file_of_another_format_is_rejected_with_a_guess_of_its_format(tmp_path):
    import gzip

    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(bytes(range(256))))
    with pytest.raises(ValueError, match="is compressed with gzip: uncompress it"):
        from_files(path, parse=parse)
    path.write_text("hello, this is some text\n" * 3)
    with pytest.raises(ValueError, match="Is it a TFRecord file.*.*Pass format="):
        from_files(path, parse=parse)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [record(i) for i in range(20)])
    dataset = from_files(path, parse=parse)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"a.tfrecord is shorter .* Do not write to files"):
        ids(dataset.batch(20))


def test_byte_ranges_are_read_with_and_without_neighbors(tmp_path):
    data = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "data").write_bytes(data)
    starts = np.array([50, 90_000, 0, 60, 20_000])
    ends = starts + np.array([10, 10_000, 0, 5, 1])
    found = LocalFile(tmp_path / "data").read(starts, ends)
    assert list(map(bytes, found)) == [data[i:j] for i, j in zip(starts, ends, strict=True)]


def example(features):
    """Returns the bytes of a handmade tf.train.Example; all sizes are below 128."""

    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    return field(
        1,
        b"".join(
            field(1, field(1, name.encode()) + field(2, field(kind, values)))
            for name, (kind, values) in features.items()
        ),
    )


def test_tf_examples_are_read_without_tensorflow():
    varints = bytes([5, 0xAC, 0x02]) + b"\xff" * 9 + b"\x01"  # 5, 300, -1
    packed = bytes([1 << 3 | 2, len(varints)]) + varints
    floats = bytes([1 << 3 | 2, 8]) + struct.pack("<2f", 1.5, -2)
    one_by_one = bytes([1 << 3, 7, 1 << 3]) + b"\xff" * 9 + b"\x7f"  # bits beyond 64 are dropped
    texts = bytes([1 << 3 | 2, 2]) + b"ab" + bytes([1 << 3 | 2, 0])
    found = parse_example(
        example({"i": (3, packed), "f": (2, floats), "o": (3, one_by_one), "b": (1, texts)})
    )
    assert found["i"].tolist() == [5, 300, -1]
    assert found["f"].tolist() == [1.5, -2]
    assert found["o"].tolist() == [7, -1]
    assert found["b"] == [b"ab", b""]
    assert parse_example(example({"none": (3, b"")}))["none"].tolist() == []
    assert parse_example(b"") == {}


@given(st.binary(max_size=40))
def test_a_record_that_is_not_a_tf_example_is_rejected_and_never_loops(data):
    with contextlib.suppress(ValueError):  # its own, that is: no IndexError, and so on
        assert isinstance(parse_example(data), dict)


# Text.


def test_lines_end_with_either_newline_or_with_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("eins\r\nzwölf\n\nvier".encode())
    seen = []

    def length(line):
        seen.append(line)
        return len(line)

    dataset = from_files(tmp_path / "a.txt", parse=length, num_threads=1)
    assert [x.tolist() for x in dataset.batch(4)] == [[4, 5, 0, 4]]
    assert seen[1:] == ["eins", "zwölf", "", "vier"]


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\xff\n")
    dataset = from_files(tmp_path / "a.txt", parse=len)
    with pytest.raises(ValueError, match=r"Line 2 of .*a.txt is not UTF-8 text: .* at byte 2"):
        list(dataset.batch(2))


# Parquet.


def test_columns_without_numbers_raise_an_error_with_their_name(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    for column, complaint in (
        (["a", "b"], r"Column 'c' of the Parquet file .* holds string, but .* columns=\[...\]"),
        ([1, None], "Column 'c' .* has rows without a value. Fill them"),
        ([[1], [1, 2]], "Column 'c' .* lists of different lengths, in group 0 .* Pad or crop"),
    ):
        parquet.write_table(arrow.table({"c": column, "id": [1, 2]}), str(path))
        with pytest.raises((TypeError, ValueError), match=complaint):
            from_files(path)
        assert ids(from_files(path, columns=["id"]).batch(2)) == [[1, 2]]
    with pytest.raises(ValueError, match="has no column 'd'. It has 'c', 'id'"):
        from_files(path, columns=["id", "d"])


def test_rows_may_be_parsed_and_differing_files_are_found(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"x": [1, 2]}), str(tmp_path / "a.parquet"))
    parquet.write_table(arrow.table({"x": [1.0, 2.0]}), str(tmp_path / "b.parquet"))
    parquet.write_table(arrow.table({"y": [1, 2]}), str(tmp_path / "c.parquet"))
    a, b, c = (tmp_path / f"{name}.parquet" for name in "abc")
    tripled = from_files(a, parse=lambda row: {"id": 3 * row["x"]})
    assert ids(tripled.batch(2)) == [[3, 6]]
    with pytest.raises(ValueError, match=r"Record 0 of .*b.parquet holds float64\[\] in \['x'\], "):
        list(from_files([a, b]).batch(4))
    with pytest.raises(ValueError, match=r"Record 0 of .*c.parquet has the structure .*'y'"):
        list(from_files([a, c]).batch(4))


def test_a_parquet_file_that_was_deleted_is_not_reported_as_damaged(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet files are read by pyarrow")
    dataset = from_files(folder(tmp_path, "parquet", [8]), columns=["id"]).batch(8)
    next(tmp_path.glob("*.parquet")).unlink()
    with pytest.raises(ValueError, match=r"^The file .*parquet does not exist"):
        list(dataset)


def test_a_damaged_group_of_rows_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = arrow.table({"id": np.arange(4000)})
    parquet.write_table(
        table, str(path), row_group_size=1000, write_page_checksum=True, use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"Group [12] of the rows of .*a.parquet is damaged: .*CRC"
    ):
        ids(from_files(path).batch(4000))


# Which files.


def test_arguments_of_from_files_must_be_valid(tmp_path):
    for name in ("a.txt", "b.tfrecord", "c.data", "d.tfrecord-00000-of-00002"):
        write_tfrecord(tmp_path / name, [record(0)])
    a, b, c, d = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="No file matches '.*/e.*' .*Check the path"):
        from_files(str(tmp_path / "e*"))
    with pytest.raises(ValueError, match="No files were given"):
        from_files([])
    with pytest.raises(ValueError, match=r"several formats: .*b.tfrecord is tfrecord, .*txt is te"):
        from_files([b, a], parse=parse)
    with pytest.raises(ValueError, match=r"c.data does not show its format.*Pass format=: one of"):
        from_files(c)
    with pytest.raises(
        ValueError, match="format='csv': it must be one of 'array_record', 'tfrecord', "
    ):
        from_files(c, format="csv")
    with pytest.raises(ValueError, match=r"b.tfrecord twice"):
        from_files([b, str(b)], parse=parse)
    with pytest.raises(ValueError, match=r"ftp://x/y: from_files reads local .* from_records"):
        from_files("ftp://x/y")
    with pytest.raises(ValueError, match=r"columns=\['x'\]: tfrecord files have no columns"):
        from_files(b, columns=["x"], parse=parse)
    with pytest.raises(TypeError, match="parse=3: it must be a function"):
        from_files(b, parse=3)
    with pytest.raises(ValueError, match="num_records has 1 numbers for 2 files"):
        from_files([b, d], parse=parse, num_records=[1])
    with pytest.raises(ValueError, match="d.tfrecord-.* has 1 records, but num_records says 2"):
        list(from_files([b, d], parse=parse, num_records=[1, 2]).batch(2))
    assert ids(from_files([b, d, c], parse=parse, format="tfrecord").batch(3)) == [[0, 0, 0]]
    assert ids(from_files([b, d], parse=parse).batch(2)) == [[0, 0]]


def test_results_of_a_parse_function_must_have_the_same_structure(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [record(i) for i in range(6)])

    def read(parse):
        list(from_files(path, parse=parse).batch(3))

    def number(data):
        return struct.unpack("<q", data[:8])[0]

    with pytest.raises(
        ValueError, match=r"Record 1 of .*a.tfrecord holds float32\[1\], but the fi"
    ):
        read(lambda data: np.zeros(number(data), np.float32))
    with pytest.raises(ValueError, match=r"Record 4 .* holds int64\[\] in \['x'\], .* float32\[\]"):
        read(lambda data: {"x": (np.float32 if number(data) < 4 else np.int64)(0)})
    with pytest.raises(ValueError, match=r"Record 5 .* has the structure .*same structure for all"):
        read(lambda data: {"x": 0, **({"y": 0} if number(data) == 5 else {})})
    with pytest.raises(ValueError, match="Record 2 .* is None. tpudist cannot skip an example"):
        read(lambda data: None if number(data) == 2 else 1)
    with pytest.raises(TypeError, match="Record 0 of .* holds str, but devices hold only numbers"):
        read(lambda data: {"x": 1, "name": "a"})
    with pytest.raises(TypeError, match="holds bytes, .*parse=function of bytes.*parse_example"):
        read(None)
    with pytest.raises(ValueError, match="Record 0 of .* holds no arrays"):
        read(lambda data: {})
    with pytest.raises(ZeroDivisionError) as caught:
        read(lambda data: 1 / (3 - number(data)))
    assert f"This error was raised for Record 3 of {path}." in caught.value.__notes__


# The order by files.


# Digests of the orders of two epochs, as release 0.2 computed them in memory.
OLD_ORDERS = {
    ("text", (1, 0), None, 24): "49ad171fc12a",
    ("text", (1, 0), 4, 24): "ba187b4422ed",
    ("text", (3, 1), 4, 64): "4f8da2980c71",
    ("parquet", (1, 0), 4, 24): "ed21b01b1c62",
    ("parquet", (3, 1), 4, 24): "ef04cbff91bc",
    ("parquet", (3, 1), 4, 64): "149fc58b6ba0",
}


@pytest.mark.parametrize(("format", "shard", "seed", "size"), OLD_ORDERS)
def test_states_of_version_1_keep_the_order_by_files_of_their_release(
    tmp_path, monkeypatch, format, shard, seed, size
):
    monkeypatch.setitem(globals(), "ROWS_PER_GROUP", 50)
    pattern = folder(tmp_path, format, [500, 0, 3, 70, 1, 260, 90, 0, 33])
    dataset = from_files(pattern, **FORMATS[format][1])
    if shard != (1, 0):
        dataset = dataset.shard(*shard)
    if seed is not None:
        dataset = dataset.shuffle(seed)
    dataset = dataset.batch(size).with_order_by_files().with_orders_of(1)
    digest = hashlib.sha256()
    for epoch in (0, 5):
        order = dataset._order(epoch)[np.arange(dataset.num_examples)]
        digest.update(order.astype(np.int64).tobytes())
    assert digest.hexdigest().startswith(OLD_ORDERS[format, shard, seed, size])


@pytest.mark.parametrize("format", FORMATS)
def test_the_order_by_files_is_shuffled_and_the_same_on_any_number_of_replicas(
    tmp_path, format, shuffle
):
    pattern = folder(tmp_path, format, [8] * 4)
    dataset = from_files(pattern, **FORMATS[format][1]).shuffle(seed=0).batch(8).repeat(2)
    found = [distributed_ids(distributed(dataset, n, auto_shard_policy=FILE)) for n in (1, 2, 4, 8)]
    assert found[1:] == found[:-1]
    assert sorted(sum(found[0][:4], [])) == sorted(sum(found[0][4:], [])) == list(range(32))
    assert found[0][:4] != found[0][4:]
    for batch in found[0]:  # two rows of each file
        assert sorted(x // 8 for x in batch) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_position_by_files_is_not_one_in_another_order_or_in_other_files(tmp_path):
    pattern = folder(tmp_path, "text", [8] * 4)
    dataset = from_files(pattern, parse=lambda line: {"id": int(line)}).batch(8)
    state = iter(distributed(dataset, auto_shard_policy=FILE)).get_state()
    with pytest.raises(ValueError, match="order: 'by files' in the state, 'as they are' here"):
        iter(distributed(dataset)).set_state(state)
    fewer = from_files(pattern.replace("*", "0[0-2]"), parse=lambda line: {"id": int(line)})
    with pytest.raises(ValueError, match=r"number of examples: 32 in the state, 24 here; files: "):
        iter(distributed(fewer.batch(8), auto_shard_policy=FILE)).set_state(state)


def test_rows_of_a_parquet_file_are_shuffled_within_groups_that_are_read_together(
    tmp_path, shuffle
):
    pattern = folder(tmp_path, "parquet", [12])
    dataset = from_files(pattern, columns=["id"]).shuffle(seed=0).batch(3).with_order_by_files()
    batches = ids(dataset)
    assert sorted(sum(batches, [])) == list(range(12))
    assert batches != sorted(batches)
    for batch in batches:
        assert len({x // 3 for x in batch}) == 1
    computed = shuffle == "computed"
    assert isinstance(dataset._order(0)._rows_of_lanes._order_of(0), SegmentOrder) == computed
    sharded = from_files(pattern, columns=["id"]).shard(2, 1).shuffle(seed=0).batch(3)
    assert sorted(sum(ids(sharded.with_order_by_files()), [])) == [1, 3, 5, 7, 9, 11]


def test_files_are_opened_when_they_are_read_if_their_lengths_are_known(tmp_path):
    pattern = folder(tmp_path, "array_record", [4, 4, 4])
    (tmp_path / "part-02.array_record").unlink()
    paths = [tmp_path / f"part-0{i}.array_record" for i in range(3)]
    dataset = from_files(paths, parse=parse, num_records=[4, 4, 4])
    batches = iter(dataset.batch(4))
    next(batches)
    assert dataset.files_read == (str(paths[0]),)
    next(batches)
    assert dataset.files_read == tuple(map(str, paths[:2]))
    with pytest.raises(ValueError, match="part-02.array_record does not exist"):
        next(batches)
    assert pattern


def test_more_files_than_may_be_open_at_a_time_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(open_files, "_MAX_OPEN", 2)
    dataset = from_files(folder(tmp_path, "array_record", [3] * 6), parse=parse)
    for _ in range(2):
        assert sorted(sum(ids(dataset.shuffle(0).batch(9)), [])) == list(range(18))
    assert len(dataset._files._by_last_use) <= 3


def test_explain_reports_the_number_of_files_per_process(tmp_path):
    dataset = from_files(folder(tmp_path, "text", [8] * 4), parse=lambda x: {"id": int(x)})
    (host,) = explain(distributed(dataset.batch(8))).hosts
    assert (host.files, host.examples_per_epoch) == (4, 32)


PROGRAM = """
    import sys
    import numpy as np
    import tpudist
    from processes import report
    from tpudist.input import AutoShardPolicy, explain, from_files

    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()

    def parse(line):
        return {"id": int(line)}

    found = {}
    auto, by_files = AutoShardPolicy.AUTO, AutoShardPolicy.FILE
    for name, policy in (("AUTO", auto), ("FILE", by_files), ("one pass", by_files)):
        dataset = from_files(sys.argv[1], parse=parse, num_records=[12] * 8)
        shuffled = dataset.shuffle(seed=0).batch(16).repeat(2)
        if name == "one pass":
            shuffled = dataset.batch(16)
        distributed = strategy.experimental_distribute_dataset(
            shuffled, tpudist.InputOptions(auto_shard_policy=policy)
        )
        rows = []
        for element in distributed:
            local = strategy.experimental_local_results(element["id"])
            rows.append([x.tolist() for x in map(np.asarray, local)])
        hosts = [host.files for host in explain(distributed).hosts]
        found[name] = {"rows": rows, "read": len(dataset.files_read), "files": hosts}
    report(found)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_read_the_order_of_one_and_by_files_each_reads_its_own(tmp_path):
    """Each process opens about half of 8 files, and the first one for its example."""
    pattern = folder(tmp_path, "text", [12] * 8)
    two = run_processes(PROGRAM, args=[pattern])
    for policy in ("AUTO", "FILE"):
        dataset = from_files(pattern, parse=lambda line: {"id": int(line)})
        dataset = dataset.shuffle(seed=0).batch(16).repeat(2)
        one = distributed(dataset, 8, auto_shard_policy=AutoShardPolicy[policy])
        joined = [
            sum(first + second, [])
            for first, second in zip(*(x.result[policy]["rows"] for x in two), strict=True)
        ]
        assert joined == distributed_ids(one)
    assert [x.result["AUTO"]["files"] for x in two] == [[8, 8]] * 2
    assert [x.result["FILE"]["files"] for x in two] == [[4, 4]] * 2
    assert [x.result["AUTO"]["read"] for x in two] == [8, 8]
    # In one pass a process opens no file of the other. The second process reads the first record of
    # the first file too, to know the structure of all records.
    assert [x.result["one pass"]["files"] for x in two] == [[4, 4]] * 2
    assert [x.result["one pass"]["read"] for x in two] == [4, 5]


def test_a_file_that_shrinks_while_it_is_read_raises_an_error(tmp_path):
    """A map of such a file would end the program with a signal."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (1 << 20))
    chunks = LocalFile(path).chunks()
    assert next(chunks)[0] == 0
    path.write_bytes(b"")
    assert list(chunks) == []
    write_tfrecord(tmp_path / "a.tfrecord", [b"x" * (1 << 19)] * 3)
    file = LocalFile(tmp_path / "a.tfrecord")
    file.size = lambda: 3 * ((1 << 19) + 16)
    os.truncate(file.path, 1 << 20)
    with pytest.raises(ValueError, match=r"a.tfrecord ends within record"):
        tfrecord.TFRecordFile(file)


def test_only_the_headers_of_large_records_are_read(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecord", [b"x" * (1 << 20)] * 8)
    file = LocalFile(tmp_path / "a.tfrecord")
    num_bytes, chunks = [], file.chunks

    def count(first_needed):
        for start, chunk in chunks(first_needed):
            num_bytes.append(len(chunk))
            yield start, chunk

    file.chunks = count
    assert tfrecord.TFRecordFile(file).num_records == 8
    assert sum(num_bytes) < 2 << 20


def test_the_metadata_of_many_parquet_files_has_a_limit(tmp_path, monkeypatch):
    """It has gigabytes for thousands of files with thousands of groups and columns."""
    metadata = Recent(30_000)
    monkeypatch.setattr(parquet_files, "_metadata", metadata)
    pattern = folder(tmp_path, "parquet", [30] * 12)
    dataset = from_files(pattern, columns=["id", "x"]).shuffle(0).batch(8)
    assert 0 < metadata.num_bytes <= 30_000
    assert len(metadata._values) < 6
    assert sorted(np.concatenate([x["id"] for x in dataset]).tolist()) == list(range(360))
    assert metadata.num_bytes <= 30_000
    write_parquet(tmp_path / "part-00.parquet", [record(i + 1) for i in range(30)])
    parquet_files._groups._values.clear()
    with pytest.raises(ValueError, match=r"part-00.parquet has changed since it was first read"):
        list(dataset)


def test_the_orders_of_files_and_of_their_blocks_share_a_limit(tmp_path):
    """Each file with its own would take gigabytes for many files with many blocks."""
    pattern = folder(tmp_path, "parquet", [3000] * 8)
    dataset = from_files(pattern, columns=["id"]).shuffle(0).batch(16).with_order_by_files()
    # As of more than 65,536 examples.
    object.__setattr__(dataset._settings, "has_order_in_memory", lambda num_examples: False)
    found = dataset._order(0)
    orders = found._rows_of_lanes._orders
    orders.max_bytes = 200_000
    rows = np.concatenate([found[i : i + 16] for i in range(0, 24_000, 16)])
    assert sorted(rows.tolist()) == list(range(24_000))
    assert orders.num_bytes <= 200_000
