"""Input of a run: the split of files, windows, batches, and the baselines of a model."""

import sys

import numpy as np
import pytest

from experiment.baselines import baselines
from experiment.batches import InOrder, RandomWindows, ShuffledEpochs
from experiment.digits import load_digits
from tpudist.training.corpus import load_corpus, read_corpus, split_files, spread_windows


def test_a_file_is_held_out_by_its_name_only():
    """The split is the same on every machine and in every run, whatever other files exist."""
    names = [f"package/module_{i}.py" for i in range(400)]
    train, held_out = split_files(names)
    assert sorted(train + held_out) == sorted(names)
    assert 8 <= len(held_out) <= 32  # about 1 in 20
    assert split_files(names[::-1]) == (train, held_out)
    fewer = [name for name in names if name not in held_out[1:]]
    assert split_files(fewer)[1] == held_out[:1]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_few_files_leave_at_least_one_on_each_side(number):
    for first in range(40):
        train, held_out = split_files([f"{first + i}.txt" for i in range(number)])
        assert train
        assert held_out


def test_one_file_cannot_be_split(tmp_path):
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(ValueError, match="at least 2 are needed, .* Use more files"):
        read_corpus([tmp_path / "only.txt"], tmp_path, "a test")


def test_the_standard_library_is_a_corpus_on_every_machine():
    corpus = load_corpus()
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    assert len(corpus.train) > 5e6
    assert len(corpus.held_out) > 5e4
    assert b"def " in corpus.held_out.tobytes()


def test_a_glob_searches_subfolders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for i in range(4):
        (tmp_path / "a" / "b" / f"{i}.txt").write_text(f"file {i}")
    corpus = load_corpus(f"{tmp_path}/**/*.txt")
    assert corpus.num_train_files + corpus.num_held_out_files == 4
    assert len(corpus.train) + len(corpus.held_out) == 4 * 6 + 4 - 2  # newlines between files


def test_a_glob_without_matches_explains_globs(tmp_path):
    with pytest.raises(ValueError, match="matches no file in .* Quote it"):
        load_corpus(f"{tmp_path}/*.nothing")


def test_windows_predict_each_byte_at_most_once():
    text = np.arange(100, dtype=np.uint8)
    for number in (1, 3, 100):
        windows = spread_windows(text, 8, number)
        assert windows.shape == (min(number, 12), 9)
        predicted = windows[:, 1:].ravel()
        assert len(set(predicted)) == len(predicted)
    with pytest.raises(ValueError, match="100 bytes, fewer than one window of 100"):
        spread_windows(text, 100, 1)


def test_baselines_match_a_calculation_by_hand():
    train = np.frombuffer(b"ababab", np.uint8)
    windows = np.frombuffer(b"aba", np.uint8)[None]
    a = b = 3
    unigram = -np.log2([(b + 1) / (6 + 256), (a + 1) / (6 + 256)]).mean()
    bigram = -np.log2([(3 + 1) / (3 + 256), (2 + 1) / (2 + 256)]).mean()
    got = baselines(train, windows)
    assert got["uniform"] == 8
    assert got["unigram"] == pytest.approx(unigram)
    assert got["bigram"] == pytest.approx(bigram)


def test_a_step_reads_the_same_windows_after_any_history():
    """Windows depend only on seed, step and batch size, not on earlier steps or replicas."""
    text = np.random.default_rng(0).integers(256, size=1000).astype(np.uint8)
    batches = RandomWindows(text, 16, 4, seed=1, num_steps=10)
    in_order = list(batches)
    assert len(in_order) == len(batches) == 10
    np.testing.assert_array_equal(batches[7]["tokens"], in_order[7]["tokens"])
    assert in_order[0]["tokens"].shape == (4, 17)
    other_seed = RandomWindows(text, 16, 4, seed=2, num_steps=10)
    assert (other_seed[7]["tokens"] != batches[7]["tokens"]).any()
    assert (batches[6]["tokens"] != batches[7]["tokens"]).any()


def test_windows_start_at_every_byte_with_enough_bytes_after_it():
    text = np.arange(10, dtype=np.uint8)
    starts = {int(w[0]) for b in RandomWindows(text, 8, 8, 0, 20) for w in b["tokens"]}
    assert starts == {0, 1}
    with pytest.raises(ValueError, match="10 bytes, fewer than one window of 10"):
        RandomWindows(text, 10, 1, 0, 1)


def test_each_epoch_has_every_row_once_in_a_different_order():
    rows = {"x": np.arange(10)}
    batches = list(ShuffledEpochs(rows, 4, seed=0, num_steps=5))
    order = np.concatenate([batch["x"] for batch in batches])
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert (order[:10] != order[10:]).any()


def test_in_order_ends_with_a_partial_batch():
    batches = list(InOrder({"x": np.arange(10)}, 4))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(InOrder({"x": np.arange(10)}, 4)) == 3


def test_digits_are_split_without_overlap():
    train, held_out = load_digits()
    assert train["image"].shape == (1438, 8, 8, 1)
    assert held_out["image"].shape == (359, 8, 8, 1)
    assert 0 <= train["image"].min() <= train["image"].max() == 1
    assert set(held_out["label"]) == set(range(10))


def test_load_digits_without_scikit_learn_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        load_digits()
