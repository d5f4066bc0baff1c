"""New folders are private, and folders with other files are not changed."""

import os

import pytest

from tpudist.planner import answer_cache
from tpudist.training import compilation_cache
from tpudist.xla.compiler import private_files

OURS = ("plan.json", "*.gz")


def test_an_interrupt_after_the_replacement_of_a_file_is_raised(tmp_path, monkeypatch):
    replace = os.replace

    def interrupt(*paths):
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        private_files.write(tmp_path / "file", b"text")
    assert (tmp_path / "file").read_bytes() == b"text"


def mode_of(path):
    return path.stat().st_mode & 0o777


def opened(path, *names):
    """Creates a folder with files that other users may list."""
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    for name in names:
        (path / name).write_text("")
    return path


def test_a_new_folder_is_private(tmp_path):
    assert mode_of(private_files.folder(tmp_path / "a" / "b", ours=OURS)) == 0o700
    assert mode_of(private_files.folder(tmp_path / "a" / "b", ours=OURS)) == 0o700


@pytest.mark.parametrize("names", [(), ("plan.json",), ("a.gz", ".a.gz.x1y2", ".plan.json.tmp_")])
def test_a_folder_with_only_our_files_becomes_private(tmp_path, names):
    folder = opened(tmp_path / "own", *names)
    private_files.folder(folder, ours=OURS)
    assert mode_of(folder) == 0o700


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_with_other_files_is_unchanged(tmp_path, link):
    """`--save .` in a project would otherwise make it inaccessible to collaborators."""
    folder = asked = opened(tmp_path / "project", "plan.json", "train.py")
    if link:
        asked = tmp_path / "link"
        asked.symlink_to(folder)
    with pytest.raises(
        PermissionError, match="other files, such as train.py.* Choose a new folder"
    ):
        private_files.folder(asked, ours=OURS)
    assert mode_of(folder) == 0o755
    folder.chmod(0o700)
    assert private_files.folder(asked, ours=OURS) == asked


def test_a_file_instead_of_a_folder_raises_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        private_files.folder(tmp_path / "file", ours=OURS)


def test_caches_do_not_change_the_mode_of_a_folder_with_other_files(tmp_path, caplog):
    folder = opened(tmp_path / "project", "train.py")
    answer_cache.Cache(folder).put("key", answer_cache.Entry(None, "refused", 1.0))
    assert "Plans are not kept" in caplog.text
    assert compilation_cache.enable_compilation_cache(folder) is None
    assert "Cannot use the cache of compiled programs" in caplog.text
    assert mode_of(folder) == 0o755
    assert os.listdir(folder) == ["train.py"]
