"""RecordFile: records survive their process, and damage is never read as a record."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tpudist.ps import record_file
from tpudist.ps.record_file import RecordError, RecordFile, encode, read_records

RECORDS = [
    ({"closure": i, "ops": [["add", "w"]]}, {"w": np.arange(i + 1.0), "n": np.array(i)})
    for i in range(5)
]


def write(path, records=RECORDS):
    file = RecordFile(path)
    sizes = [file.append(facts, arrays) for facts, arrays in records]
    file.sync()
    file.close()
    file.close()
    return sizes


def require_same(found, expected):
    assert len(found) == len(expected)
    for (facts, arrays), (other, others) in zip(found, expected, strict=True):
        assert facts == other
        assert list(arrays) == list(others)
        for name, x in arrays.items():
            assert x.dtype == others[name].dtype
            np.testing.assert_array_equal(x, others[name])


def test_records_are_read_as_appended(tmp_path):
    write(tmp_path / "log", RECORDS[:2])
    write(tmp_path / "log", RECORDS[2:])
    require_same(list(read_records(tmp_path / "log")), RECORDS)
    other = [({}, {"b": np.ones((2, 0, 3), ml_dtypes.bfloat16), "t": np.ones((3, 2)).T})]
    write(tmp_path / "other", other)
    require_same(list(read_records(tmp_path / "other")), other)


def test_an_incomplete_record_at_the_end_is_removed(tmp_path):
    sizes = write(tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    ends = np.cumsum(sizes)
    for length in range(len(data)):
        (tmp_path / "log").write_bytes(data[:length])
        whole = int(np.searchsorted(ends, length, "right"))
        require_same(list(read_records(tmp_path / "log")), RECORDS[:whole])
        if length % 7 == 0:
            write(tmp_path / "log", RECORDS[whole:])  # continues after the last complete record
            require_same(list(read_records(tmp_path / "log")), RECORDS)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_records_are_never_read(tmp_path_factory, where, change):
    folder = tmp_path_factory.mktemp("log")
    sizes = write(folder / "log")
    data = bytearray((folder / "log").read_bytes())
    where %= len(data)
    data[where] ^= change
    (folder / "log").write_bytes(data)
    damaged = int(np.searchsorted(np.cumsum(sizes), where, "right"))
    if damaged < len(RECORDS) - 1:
        with pytest.raises(RecordError, match="is damaged at byte"):
            list(read_records(folder / "log"))
    else:
        require_same(list(read_records(folder / "log")), RECORDS[:damaged])


def test_a_full_disk_leaves_the_file_unchanged(tmp_path, monkeypatch):
    """Also if it is still full at the next record, and has room for the one after that."""
    path = tmp_path / "log"
    file = RecordFile(path)
    file.append(*RECORDS[0])
    before = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file, self.left = file, 30

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            count = self.file.write(data[: self.left])
            self.left -= count
            return count

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(file, "_file", Full(file._file))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.append(*RECORDS[1])
        assert path.read_bytes() == before
    monkeypatch.undo()
    file.append(*RECORDS[1])
    file.close()
    require_same(list(read_records(path)), RECORDS[:2])
    assert len(encode(*RECORDS[1])) > 30


def test_the_last_record_can_be_removed(tmp_path):
    file = RecordFile(tmp_path / "log")
    file.append(*RECORDS[0])
    assert file.append(*RECORDS[1]) == file.remove_last()
    file.append(*RECORDS[2])
    file.close()
    require_same(list(read_records(tmp_path / "log")), [RECORDS[0], RECORDS[2]])


def test_facts_that_no_reader_would_accept_raise_an_error(monkeypatch):
    monkeypatch.setattr(record_file, "_MAX_TEXT", 99)
    with pytest.raises(ValueError, match="at most 99 are allowed"):
        encode({"closure": "x" * 100}, {})
