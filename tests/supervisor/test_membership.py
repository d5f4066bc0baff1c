"""The supervisors of two hosts find each other, or say why they do not fit."""

import pytest

from tpudist.supervisor.membership import Membership
from tpudist.supervisor.remote_membership import RemoteMembership
from tpudist.xla import versions

HOST = "127.0.0.1"


@pytest.fixture
def first_host():
    membership = Membership(HOST, 2, lambda line: None, secret="1" * 32)
    yield membership
    membership.close()


def connect(first_host, secret="1" * 32):
    return RemoteMembership(HOST, first_host._listener.port, secret, lambda line: None)


def test_another_host_sees_the_membership_of_the_first_one(first_host):
    remote = connect(first_host)
    assert (remote.is_used, remote.is_done, remote.is_member(0)) == (False, False, False)
    remote.close()


def test_another_secret_is_rejected(first_host):
    with pytest.raises(ConnectionError, match="Set TPUDIST_SECRET to the same text on all hosts"):
        connect(first_host, "2" * 32)


@pytest.mark.parametrize(("theirs", "said"), [("0.9", "0.9"), (None, "of an earlier version")])
def test_another_version_is_rejected(first_host, monkeypatch, theirs, said):
    """Versions without a version in their messages have other messages."""
    ours = iter([theirs, "1.0"])  # first the first host answers, then the other one compares
    monkeypatch.setattr(versions, "version_of", lambda package: next(ours))
    with pytest.raises(ConnectionError, match=f"has tpudist {said}, but this host has 1.0"):
        connect(first_host)
