"""What stores that speak S3 may lack: the table, and what this process has learned of each store.

A quirk is learned from an answer that says so and from no other, and forgotten after an hour. The
storage option ``quirks`` sets one for good.
"""

from __future__ import annotations

import re
import time
from typing import Final

from kvshelf.backends.s3_errors import codes_of

NO_DELETE_OBJECTS: Final = "no-delete-objects"
NO_CHECKSUMS: Final = "no-checksums"
NO_CONDITIONS: Final = "no-conditions"
NO_SELF_COPY: Final = "no-self-copy"
NO_HEAD_LENGTH: Final = "no-head-length"
BUCKET_IN_ENDPOINT: Final = "bucket-in-endpoint"
ANY_ORDER: Final = "any-order"

#: What is done about each quirk.
QUIRKS: Final = {
    NO_DELETE_OBJECTS: "objects are deleted by a request for each",
    NO_CHECKSUMS: "objects are written without a checksum",
    NO_CONDITIONS: "objects are written without If-None-Match",
    NO_SELF_COPY: "uses are not recorded: objects age by their last change",
    NO_HEAD_LENGTH: "objects are probed by GET requests of their first byte",
    BUCKET_IN_ENDPOINT: "the endpoint names the bucket, and the path does not",
    ANY_ORDER: "to find objects of some folders all are listed",
}
_NOT_THERE: Final = frozenset(("501", "405", "NotImplemented", "MethodNotAllowed"))
_CHECKSUM: Final = re.compile(
    r"(unsupported|not supported|not implemented|unknown)[^<]*(checksum|header)"
    r"|(checksum|header)[^<]*(unsupported|not supported|not implemented|unknown)",
    re.IGNORECASE,
)
#: Seconds for which a quirk that was learned is known.
LEARNED_SECONDS: Final = 3600.0
#: For each store until when a quirk is known, which all clients of this process share.
_known_until: Final[dict[tuple[str, str], dict[str, float]]] = {}


def quirks_of(endpoint: str, bucket: str) -> frozenset[str]:
    """Return what is known of a store at present."""
    now, known = time.monotonic(), _known_until.get((endpoint, bucket), {})
    return frozenset(quirk for quirk, until in known.items() if now < until)


def learn(endpoint: str, bucket: str, quirk: str, seconds: float) -> None:
    """Know a quirk of a store for some time; 0 forgets it."""
    known = _known_until.get((endpoint, bucket), {})
    # Other threads go through the one that was there.
    _known_until[endpoint, bucket] = known | {quirk: time.monotonic() + seconds}


def shows(exc: Exception, quirk: str) -> bool:
    """Whether the answer to a request that needs what a store may lack says that it does."""
    text = str(exc).partition("\n\nDebug source")[0]
    codes = codes_of(text)
    if quirk == NO_HEAD_LENGTH:
        return "content-length header missing" in text.lower()
    if quirk == BUCKET_IN_ENDPOINT:
        # The store took the path of the bucket for a key.
        return "NoSuchKey" in codes
    if quirk == NO_CONDITIONS:
        return bool(codes & _NOT_THERE) or type(exc).__name__ == "NotSupportedError"
    if quirk == NO_SELF_COPY:
        return bool(codes & {"InvalidRequest", "InvalidArgument", *_NOT_THERE})
    # Both are sent with a checksum.
    refused = bool(codes & {"400", "501"}) and _CHECKSUM.search(text) is not None
    return refused or (quirk == NO_DELETE_OBJECTS and bool(codes & _NOT_THERE))
