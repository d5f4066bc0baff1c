"""Tokenizers are loaded from `tokenizer.json`."""

import builtins

import pytest
import tokenizers

from tpudist.models import load_tokenizer


def test_a_tokenizer_is_loaded(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert isinstance(found, tokenizers.Tokenizer)
    assert found.encode("b a c").ids == [1, 0, 2]


def test_a_file_that_is_not_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="tokenizer.json does not exist: tpudist reads a tokenizer"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer file: .*Download it again"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizers_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    usual = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ModuleNotFoundError(name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tpudist\[hub\]'"):
        load_tokenizer(tmp_path)
