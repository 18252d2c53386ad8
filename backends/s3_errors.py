"""What the answers of an S3 store mean, as obstore reports them.

Owns the mapping from status codes, error codes and exceptions to the classes of
:mod:`kvshelf.errors`, and the hints that tell users what to correct. Also owns the *quirks*: what
stores that speak S3 may lack, and what this process has learned of each store. A quirk is learned
from an answer that says so and from no other, and forgotten after an hour. The storage option
``quirks`` sets one for good.

Any thread may call any function. None of them makes a request.
"""

from __future__ import annotations

import errno
import re
import time
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
#: The status of an answer whose text has none, by the class of the exception.
_STATUS_OF_CLASS: Final = {
    "PermissionDeniedError": "403",
    "UnauthenticatedError": "401",
    "PreconditionError": "412",
    "AlreadyExistsError": "412",
}
#: Most characters of an answer that are shown.
SHOWN_CHARACTERS: Final = 300
_RIGHTS: Final = (
    "allow s3:ListBucket on the bucket, s3:GetObject and, for engines that store, s3:PutObject"
    " on its objects"
)

NO_DELETE_OBJECTS: Final = "no-delete-objects"
NO_CHECKSUMS: Final = "no-checksums"
NO_CONDITIONS: Final = "no-conditions"
NO_SELF_COPY: Final = "no-self-copy"
NO_HEAD_LENGTH: Final = "no-head-length"
ENDPOINT_HAS_BUCKET: Final = "endpoint-has-bucket"
UNSORTED_LISTINGS: Final = "unsorted-listings"

#: What is done about each quirk.
QUIRKS: Final = {
    NO_DELETE_OBJECTS: "objects are deleted by a request for each",
    NO_CHECKSUMS: "objects are written without a checksum",
    NO_CONDITIONS: "objects are written without If-None-Match",
    NO_SELF_COPY: "uses are not recorded: objects age by their last change",
    NO_HEAD_LENGTH: "objects are probed by GET requests of their first byte",
    ENDPOINT_HAS_BUCKET: "the endpoint names the bucket, and the path does not",
    UNSORTED_LISTINGS: "to find objects of some folders all are listed",
}
_NOT_THERE: Final = frozenset(("501", "405", "NotImplemented", "MethodNotAllowed"))
_CHECKSUM: Final = re.compile(
    r"(unsupported|not supported|not implemented|unknown)[^<]*(checksum|header)"
    r"|(checksum|header)[^<]*(unsupported|not supported|not implemented|unknown)",
    re.IGNORECASE,
)
#: Seconds for which a quirk that was learned is known.
LEARNED_SECONDS: Final = 3600.0
#: The time at which each quirk of a store is forgotten. All backends of this process share it.
_known_until: Final[dict[tuple[str, str], dict[str, float]]] = {}


def quirks_of(endpoint: str, bucket: str) -> frozenset[str]:
    """Return the quirks of a store that are known at present."""
    now, until_of = time.monotonic(), _known_until.get((endpoint, bucket), {})
    return frozenset(quirk for quirk, until in until_of.items() if now < until)


def learn(endpoint: str, bucket: str, quirk: str, seconds: float = LEARNED_SECONDS) -> None:
    """Know a quirk of a store for some time; 0 forgets it."""
    until_of = _known_until.get((endpoint, bucket), {})
    # Other threads iterate over the dictionary that was there.
    _known_until[endpoint, bucket] = until_of | {quirk: time.monotonic() + seconds}


def shows(exc: Exception, quirk: str) -> bool:
    """Whether the answer to a request that needs what a store may lack says that it does."""
    text, codes = _text_of(exc), codes_of(exc)
    if quirk == NO_HEAD_LENGTH:
        return "content-length header missing" in text.lower()
    if quirk == ENDPOINT_HAS_BUCKET:
        # The store took the path of the bucket for a key.
        return "NoSuchKey" in codes
    if quirk == NO_CONDITIONS:
        return bool(codes & _NOT_THERE) or type(exc).__name__ == "NotSupportedError"
    if quirk == NO_SELF_COPY:
        return bool(codes & {"InvalidRequest", "InvalidArgument", *_NOT_THERE})
    # Deletions of many objects are sent with a checksum as well.
    refused = bool(codes & {"400", "501"}) and _CHECKSUM.search(text) is not None
    return refused or (quirk == NO_DELETE_OBJECTS and bool(codes & _NOT_THERE))


def codes_of(exc: BaseException) -> set[str]:
    """Return the error code and the status of an answer, also where only the class says it."""
    matches = (pattern.search(_text_of(exc)) for pattern in (_CODE, _CODE_OF_ONE, _STATUS))
    codes = {match[1] for match in matches if match is not None}
    status = _STATUS_OF_CLASS.get(type(exc).__name__)
    return codes if status is None else codes | {status}


def _text_of(exc: BaseException) -> str:
    return str(exc).partition("\n\nDebug source")[0]


def is_panic(exc: BaseException) -> bool:
    """Whether an exception is a panic of a Rust library, which is no `Exception`."""
    return type(exc).__name__ == "PanicException"


def refuses_keys(exc: BaseException) -> bool:
    """Whether other keys may be what a refused request lacks."""
    codes = codes_of(exc)
    return bool(codes & {"401", "403", *_BAD_KEYS}) or codes == {"400"}


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
        message = f"{what} failed: the S3 library panicked: {shorten(text)}"
        return TransientStorageError(errno.EIO, message, path)
    text = text.partition("\n\nDebug source")[0].strip() or type(exc).__name__
    status = _STATUS.search(text)
    codes = codes_of(exc)
    if "NoSuchBucket" not in codes and isinstance(exc, FileNotFoundError):
        return ObjectMissingError(errno.ENOENT, f"{what} failed: no such object", path)
    is_redirect = status is not None and status[1] in ("301", "307")
    if is_redirect or _NO_LOCATION in text:
        codes |= _OTHER_REGION
    message = f"{what} failed: {shorten(text)}"
    explained = _explained(codes, text, at, writing=writing)
    if explained is not None:
        make, number, hint = explained
        return make(number, f"{message}; {hint}", path)
    if codes & _FULL:
        return no_space(errno.ENOSPC, message, path, "quota")
    if codes & ALREADY_THERE:
        message = f"{message}; the object was replaced meanwhile"
        return TransientStorageError(errno.ESTALE, message, path)
    if codes & _RETRYABLE:
        return TransientStorageError(errno.EIO, message, path)
    if status is None:
        # No connection, a timeout, or a body that ended early.
        if not codes:
            hint = f"is {at[1] or 'the endpoint of S3'} up and reachable?"
            message = f"{what} failed: {hint} {shorten(text)}"
        return TransientStorageError(errno.EIO, message, path)
    return PermanentStorageError(errno.EIO, message, path)


def _explained(
    codes: set[str], text: str, at: tuple[str, str | None, str], *, writing: bool
) -> tuple[type[StorageError], int, str] | None:
    """Return error class, errno and hint for an answer that a user has to act on, else None."""
    if "NoSuchBucket" in codes:
        request = f"{at[0]!r} at {at[1]}" if at[1] else f"{at[0]!r}"
        hint = f"there is no bucket {request}: create it, or correct the URL"
        return PermanentStorageError, errno.ENOENT, hint
    if codes & _OTHER_REGION:
        region = _REGION.search(text)
        name = f", {region[1] or region[2]}," if region is not None else ""
        hint = (
            f"the bucket is in another region{name}: set client_kwargs.region_name in"
            " storage_options, or AWS_REGION"
        )
        return PermanentStorageError, errno.EINVAL, hint
    if "RequestTimeTooSkewed" in codes:
        hint = "this machine's clock and the store's differ: correct the one that is wrong"
        return PermanentStorageError, errno.EACCES, hint
    keys = f"the access key, its secret or its token is not accepted: correct what {at[2]} says"
    # The answer to a HEAD has no code. 400 is that to a token which has expired.
    if codes & {"401", *_BAD_KEYS} or codes == {"400"}:
        return PermanentStorageError, errno.EACCES, keys
    if codes & {"403", "AccessDenied"}:
        hint = _RIGHTS if "AccessDenied" in codes else f"{keys}; or {_RIGHTS}"
        return ReadOnlyStorageError if writing else PermanentStorageError, errno.EACCES, hint
    return None


def shorten(text: str) -> str:
    """Return the code and message of an answer, without the request and the XML around them.

    The server chose the text: what is returned is printable, on one line, and not long.
    """
    return printable(_said(text), SHOWN_CHARACTERS)


def _said(text: str) -> str:
    code = _CODE.search(text)
    match = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if code is not None:
        return f"{code[1]}: {match[1].strip()}" if match is not None and match[1] else code[1]
    status = re.search(r"status code: (\d{3}[ \w]*)", text)
    if status is not None:
        return status[1].strip()
    # What matters is at the end, behind the causes.
    return text.splitlines()[0][-SHOWN_CHARACTERS:] if text.strip() else ""
