"""What the answers of an S3 store mean, as obstore reports them.

Owns the mapping from status codes, error codes and exceptions to the classes of
:mod:`kvshelf.errors`, and the hints that tell users what to correct. Pure functions.
"""

from __future__ import annotations

import errno
import re
from typing import Final

from kvshelf.backends.oserrors import no_space, process_limit
from kvshelf.errors import (
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    printable,
)

_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
#: As obstore says that one object of many was not deleted.
_CODE_OF_ONE: Final = re.compile(r"\(code: (\w+)\)")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_REGION: Final = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
_BAD_KEYS: Final = frozenset(
    (
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
        *("TokenRefreshRequired", "AuthFailure", "InvalidSecurity"),
    )
)
_OTHER_REGION: Final = frozenset(
    (
        *("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"),
        "IllegalLocationConstraintException",
    )
)
_FULL: Final = frozenset(
    ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull", "507")
)
_RETRYABLE: Final = frozenset(
    (
        *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"),
        *("ThrottlingException", "OperationAborted"),
        *("408", "409", "429", "500", "502", "503", "504"),
    )
)
#: What obstore says of a redirect to nowhere, which AWS answers where a bucket is elsewhere.
_NO_LOCATION: Final = "Received redirect without LOCATION"
#: Answers to a condition that does not hold.
ALREADY_THERE: Final = frozenset(("412", "PreconditionFailed"))
_OF_KIND: Final = {
    "PermissionDeniedError": "403",
    "UnauthenticatedError": "401",
    "PreconditionError": "412",
}
#: Most characters of an answer that are shown.
SHOWN_CHARACTERS: Final = 300
NO_CREDENTIALS: Final = (
    "no AWS credentials were found: set key and secret in storage_options, or AWS_ACCESS_KEY_ID"
    " and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket set anon: true"
)
_RIGHTS: Final = (
    "allow s3:ListBucket on the bucket, s3:GetObject and, for engines that store, s3:PutObject"
    " on its objects"
)


def is_panic(exc: BaseException) -> bool:
    """Whether an exception is a panic of a Rust library, which is no `Exception`."""
    return type(exc).__name__ == "PanicException"


def obstore_error(
    exc: BaseException,
    text: str,
    what: str,
    path: str,
    at: tuple[str, str | None, str],
    *,
    writing: bool,
) -> StorageError:
    """Translate an exception of obstore.

    Parameters
    ----------
    exc, what, path, writing
        As for :func:`~kvshelf.backends.oserrors.storage_error`; `path` is the object's URL.
    text : str
        The exception's text, without secrets.
    at : tuple of str
        The bucket, the endpoint and where the keys come from, for advice; endpoint None is AWS.
    """
    limit = process_limit(exc, what, path)
    if limit is not None:
        return limit
    if is_panic(exc):
        said = f"{what} failed: the S3 library panicked: {shorten(text)}"
        return TransientStorageError(errno.EIO, said, path)
    text = text.partition("\n\nDebug source")[0].strip() or type(exc).__name__
    status = _STATUS.search(text)
    codes = _codes(exc, text)
    if "NoSuchBucket" not in codes and isinstance(exc, FileNotFoundError):
        return ObjectMissingError(errno.ENOENT, f"{what} failed: no such object", path)
    is_redirect = status is not None and status[1] in ("301", "307")
    if is_redirect or _NO_LOCATION in text:
        codes |= _OTHER_REGION
    said = f"{what} failed: {shorten(text)}"
    known = _explained(codes, text, at, writing=writing)
    if known is not None:
        make, number, hint = known
        return make(number, f"{said}; {hint}", path)
    if codes & _FULL:
        return no_space(errno.ENOSPC, said, path, "quota")
    if codes & ALREADY_THERE:
        return TransientStorageError(
            errno.ESTALE, f"{said}; the object was replaced meanwhile", path
        )
    if codes & _RETRYABLE:
        return TransientStorageError(errno.EIO, said, path)
    if status is None:
        # No connection, a timeout, or a body that ended early.
        if not codes:
            hint = f"is {at[1] or 'the endpoint of S3'} up and reachable?"
            said = f"{what} failed: {hint} {shorten(text)}"
        return TransientStorageError(errno.EIO, said, path)
    return PermanentStorageError(errno.EIO, said, path)


def refuses_keys(exc: BaseException) -> bool:
    """Whether other keys may be what a refused request lacks."""
    codes = _codes(exc, str(exc))
    return bool(codes & {"401", "403", *_BAD_KEYS}) or codes == {"400"}


def _codes(exc: BaseException, text: str) -> set[str]:
    """Return the error code and the status of an answer, also where only the class says it."""
    codes = codes_of(text.partition("\n\nDebug source")[0])
    return codes | {_OF_KIND.get(type(exc).__name__, "")} - {""}


def _explained(
    codes: set[str], text: str, at: tuple[str, str | None, str], *, writing: bool
) -> tuple[type[StorageError], int, str] | None:
    """Return error class, errno and hint for an answer that a user has to act on, else None."""
    if "NoSuchBucket" in codes:
        where = f"{at[0]!r} at {at[1]}" if at[1] else f"{at[0]!r}"
        hint = f"there is no bucket {where}: create it, or correct the URL"
        return PermanentStorageError, errno.ENOENT, hint
    if codes & _OTHER_REGION:
        region = _REGION.search(text)
        found = f", {region[1] or region[2]}," if region is not None else ""
        return (
            PermanentStorageError,
            errno.EINVAL,
            f"the bucket is in another region{found}: set client_kwargs.region_name in"
            " storage_options, or AWS_REGION",
        )
    if "RequestTimeTooSkewed" in codes:
        hint = "this machine's clock and the store's differ: correct the one that is wrong"
        return PermanentStorageError, errno.EACCES, hint
    keys = f"the access key, its secret or its token is not accepted: correct what {at[2]} says"
    # The answer to a HEAD has no code. 400 is that to a token which has expired.
    if codes & {"401", *_BAD_KEYS} or codes == {"400"}:
        return PermanentStorageError, errno.EACCES, keys
    if codes & {"403", "AccessDenied"}:
        refused = ReadOnlyStorageError if writing else PermanentStorageError
        return (
            refused,
            errno.EACCES,
            _RIGHTS if "AccessDenied" in codes else f"{keys}; or {_RIGHTS}",
        )
    return None


def shorten(text: str) -> str:
    """Return the code and message of an answer, without the request and the XML around them.

    The server chose the text: what is returned is printable, on one line, and not long.
    """
    return printable(_said(text), SHOWN_CHARACTERS)


def _said(text: str) -> str:
    code = _CODE.search(text)
    said = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if code is not None:
        return f"{code[1]}: {said[1].strip()}" if said is not None and said[1] else code[1]
    status = re.search(r"status code: (\d{3}[ \w]*)", text)
    if status is not None:
        return status[1].strip()
    # What matters is at the end, behind the causes.
    return text.splitlines()[0][-SHOWN_CHARACTERS:] if text.strip() else ""


def codes_of(text: str) -> set[str]:
    """Return the error code and the status in a message."""
    searched = (pattern.search(text) for pattern in (_CODE, _CODE_OF_ONE, _STATUS))
    return {found[1] for found in searched if found is not None}
