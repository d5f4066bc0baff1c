"""JAX loads what `tests/shared/kept_programs.py` saves in its place."""

from jax._src import lru_cache

import kept_programs


def test_jax_loads_saved_programs_and_no_partial_file_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(lru_cache.LRUCache, "put", kept_programs._put_whole)
    cache = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("program", b"its bytes")
    cache.put("program", b"other bytes")
    assert cache.get("program") == b"its bytes"
    assert len(list(tmp_path.iterdir())) == 1
