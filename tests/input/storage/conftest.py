"""A server of S3, and a bucket of each test."""

import itertools

import pytest

from object_servers import start_moto
from tpudist.input.storage import object_store

_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto():
    pytest.importorskip("moto", reason="the server of S3 is moto's")
    with start_moto() as url:
        yield url


@pytest.fixture
def credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(moto, credentials):
    """A bucket that does not exist in another test, and a file system to write to it."""
    s3fs = pytest.importorskip("s3fs", reason="needs the extra `remote`")
    files = s3fs.S3FileSystem(endpoint_url=moto, use_listings_cache=False)
    name = f"bucket-{next(_numbers)}"
    files.mkdir(name)
    return name, files


@pytest.fixture
def quick(monkeypatch):
    """Lets attempts follow each other at once."""
    monkeypatch.setattr(object_store, "_FIRST_DELAY_S", 1e-3)
