"""Errors of object stores: which pass by themselves, and what to do about the others."""

import asyncio
import dataclasses
import enum

from tpudist.input.storage.data_file import CannotRead


class Cause(enum.Enum):
    """Reason for which a request failed."""

    MISSING = "missing"
    FORBIDDEN = "forbidden"
    NO_CREDENTIALS = "no credentials"
    CHANGED = "changed"
    NO_RANGES = "no ranges"
    NOT_TRUSTED = "not trusted"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    OTHER = "other"

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        return self in (Cause.BUSY, Cause.UNREACHABLE)


class StoreError(Exception):
    """A failed request whose cause is known."""

    def __init__(self, cause: Cause, text: str):
        super().__init__(text)
        self.cause = cause


class Action(enum.Enum):
    """Purpose of a request."""

    READ = "read"
    LIST = "listed"
    WRITE = "written"

    def fails(self, url: str) -> str:
        """Returns the beginning of an error."""
        return f"{url} cannot be {self.value}"


@dataclasses.dataclass(frozen=True)
class Access:
    """Permission and credentials of a request, for messages.

    Attributes:
        permission: Permission for the request, as the store calls it.
        credentials: Instruction for passing other credentials.
    """

    permission: str
    credentials: str


def cause_of_status(status: int) -> Cause:
    """Returns the meaning of an HTTP status."""
    named = {
        401: Cause.NO_CREDENTIALS,
        403: Cause.FORBIDDEN,
        404: Cause.MISSING,
        410: Cause.MISSING,
        412: Cause.CHANGED,
        416: Cause.CHANGED,  # the range begins behind the end
        408: Cause.BUSY,
        429: Cause.BUSY,
    }
    return named.get(status, Cause.BUSY if status >= 500 else Cause.OTHER)


def describe_connection(error: BaseException) -> str:
    """Returns the text of an error of a connection or a timeout."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no complete answer in time"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def make_error(
    error: StoreError, what: str, host: str, access: Access, num_attempts: int
) -> CannotRead:
    """Returns the error for a user.

    Args:
        error: Error of the last attempt.
        what: Request, such as "s3://bucket/key cannot be read".
        host: Host that the request was sent to.
        access: Permission that the request needs.
        num_attempts: Number of attempts.
    """
    match error.cause:
        case Cause.MISSING:
            remedy = "Check the bucket, the name, and whether the object was deleted."
        case Cause.FORBIDDEN:
            remedy = (
                f"The credentials of this process need {access.permission}. Grant it, or "
                f"{access.credentials}."
            )
        case Cause.NO_CREDENTIALS:
            remedy = (
                f"The request needs {access.permission}. To pass credentials, {access.credentials}."
            )
        case Cause.CHANGED:
            remedy = (
                "It was replaced since this program first read it, so the positions of its records "
                "are wrong. Do not write to files that are being read; start again to read the new "
                "one."
            )
        case Cause.NO_RANGES:
            remedy = "Use a server that supports range requests, or copy the file to a local disk."
        case Cause.NOT_TRUSTED:
            remedy = (
                "To trust a certificate authority of your own, pass RemoteOptions(storage_options="
                "{'ssl': ssl.create_default_context(cafile=...)})."
            )
        case Cause.BUSY:
            remedy = (
                "Try again later, lower RemoteOptions(max_requests=...), or raise max_attempts."
            )
        case Cause.UNREACHABLE:
            remedy = (
                "Check the name of the host and the network, or raise RemoteOptions(timeout_s=...)."
            )
        case Cause.OTHER:
            remedy = "Check the URL and RemoteOptions(storage_options=...)."
    attempts = f" in {num_attempts} attempts" if num_attempts > 1 else ""
    return CannotRead(f"{what} from {host}{attempts}: {str(error).rstrip('.')}. {remedy}")
