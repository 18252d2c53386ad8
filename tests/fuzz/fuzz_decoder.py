"""Fuzz target of everything that reads bytes of others; a program.

An input is the choice of an object (format, chunk, shard), a size that the storage claims, and the
object's bytes. Reading it may end well or with the errors that the decoder documents; anything else
(another exception, a read beyond the buffer or the object, much memory, much time) is a crash, and
libFuzzer writes the input to ``build/fuzz`` and exits with an error.

With atheris the search is guided by coverage. Without, hypothesis mutates the kept inputs.

    python tests/fuzz/fuzz_decoder.py [--seconds N] [--seeds]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from functools import cache
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import BadObjectError, ConfigError, TransientStorageError
from kvshelf.format import invalid, keys, names, namespace, tensors
from kvshelf.format import objects as encoding

HERE: Final = Path(__file__).resolve().parent
CORPUS: Final = HERE / "corpus"
#: New inputs that reach new code, and those that crash; not part of the repository.
FOUND: Final = HERE.parents[1] / "build" / "fuzz"
CHUNK: Final = 8
#: Bytes of an input before the object's own.
PREFIX: Final = 3

_HAS_ATHERIS: Final = importlib.util.find_spec("atheris") is not None

_SHAPES: Final[list[dict[str, Any]]] = [
    {"layer_shapes": ["2,*,2,4"] * 2},
    {"layer_shapes": ["*,6"] * 2, "shards": 1},
    {"layer_shapes": ["2,*,2,4"] * 2, "layouts": ["cpu-vec-bf16-b4"] * 2},
    {
        "layer_shapes": ["2,96"] * 2,
        "layouts": ["opaque-0123456789abcdef"] * 2,
        "layer_dtypes": ["U8"] * 2,
        "shards": 1,
    },
    {"layer_shapes": ["2,*,2,4", "2,*,2,8"], "stages": [1, 1], "shards": 4},
    {
        "kinds": ["window", "state"],
        "layer_shapes": ["2,*,2,4", "conv:3,4/;ssm:2/,4"],
        "layouts": ["canonical", "state"],
        "layer_dtypes": ["BF16", "BF16;F32"],
        "window_shards": 2,
        "state_shards": 2,
    },
]


@cache
def objects() -> list[tuple[encoding.ObjectFormat, keys.Chunk, int]]:
    """All objects that an input may choose to be read as."""
    found = []
    for shape in _SHAPES:
        record: dict[str, Any] = {
            "format": namespace.FORMAT,
            "weights": "user:fuzz",
            "chunk_size": CHUNK,
            "shards": 2,
            "stages": [2],
            "layouts": ["canonical"] * 2,
            "layer_names": ["layers.0.attn", 'odd "name\\'],
            "layer_dtypes": ["BF16"] * 2,
        } | shape
        record["data_offset"] = encoding.ObjectFormat.required_data_offset(record)
        family = encoding.ObjectFormat(namespace.Namespace(record, "fuzz"))
        chain = keys.KeyChain(family.namespace.digest, CHUNK)
        chunks = list(chain.extend(range(2 * CHUNK + 3)))
        tail = chain.tail() if family.tails else None
        found += [
            (fmt, chunk, shard)
            for fmt in map(family.of, family.kinds)
            for chunk in [*chunks, *([tail] if tail else [])]
            for shard in (0, fmt.shards - 1)
        ]
    return found


class Reader:
    """An object of the input's bytes, which may be fewer or more than its size says."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        assert 0 <= offset <= offset + len(buffer) <= self.size, "a read beyond the object"
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def image_of(fmt: encoding.ObjectFormat, chunk: keys.Chunk, shard: int) -> bytearray:
    """The object as a writer makes it."""
    size = fmt.object_size(shard, chunk.tokens if chunk.tail else None)
    image = bytearray(number % 251 for number in range(size))
    fmt.seal(memoryview(image), chunk, shard)
    return image


def run_one(data: bytes) -> None:
    """Read one input in all the ways there are.

    Raises
    ------
    Exception
        Whatever the decoder does not document, or AssertionError.
    """
    if len(data) < PREFIX:
        return
    known = objects()
    fmt, chunk, shard = known[data[0] % len(known)]
    body = data[PREFIX:]
    _read(
        fmt, chunk, shard, body, len(body) + int.from_bytes(data[1:PREFIX], "little", signed=True)
    )
    # The same where only its size is wrong, so that most inputs come behind that check.
    right = fmt.object_size(shard, chunk.tokens if chunk.tail else None)
    _read(fmt, chunk, shard, body, right)
    _read(fmt, chunk, shard, body.ljust(right, b"\0")[:right], right)
    try:
        invalid.describe_header(body)
    except BadObjectError as error:
        _is_short(error)
    try:
        found = namespace.Namespace.from_bytes(body)
    except ConfigError as error:
        _is_short(error)
    else:
        assert found.encoded == body
    text = body[:300].decode("latin-1")
    parsed = names.parse_path(text)
    assert parsed is None or (parsed.namespace is not None and ".." not in text.split("/"))


def _is_short(error: Exception) -> None:
    assert len(str(error)) < 2000, "a message as long as the input likes"


def _read(
    fmt: encoding.ObjectFormat, chunk: keys.Chunk, shard: int, body: bytes, size: int
) -> None:
    expected = fmt.object_size(shard, chunk.tokens if chunk.tail else None)
    around = bytearray(expected + 2)
    image = memoryview(around)[1:-1]
    try:
        fmt.read(Reader(body, size), chunk, shard, image)
    except (BadObjectError, TransientStorageError) as error:
        _is_short(error)
    else:
        assert body[:expected] == image, "other bytes than were stored"
        again = bytearray(image)
        fmt.seal(memoryview(again), chunk, shard)
        assert again == image, "an object that no writer makes was taken for good"
    assert around[0] == around[-1] == 0, "written beyond the buffer"


def seeds() -> dict[str, bytes]:
    """Inputs to begin with: one of each kind."""
    made = {}
    for number, (fmt, chunk, shard) in enumerate(objects()):
        if number % 2 == 0:
            made[f"object-{number:02}"] = bytes((number, 0, 0)) + image_of(fmt, chunk, shard)
    fmt = objects()[0][0]
    made["namespace"] = bytes(PREFIX) + fmt.namespace.encoded
    chunk = objects()[0][1]
    name = f"{fmt.namespace.folder}/{names.object_name(chunk, 0, fmt.shards)}"
    made["name"] = bytes(PREFIX) + name.encode()
    hybrid, chunk, shard = objects()[-1]
    name = f"{hybrid.namespace.folder}/" + names.object_name(
        chunk, shard, hybrid.shards, hybrid.kind
    )
    made["name-state"] = bytes(PREFIX) + name.encode()
    made["namespace-hybrid"] = bytes(PREFIX) + hybrid.namespace.encoded
    made["huge-header"] = bytes(PREFIX) + (100 << 30).to_bytes(8, "little") + b"{}"
    nested = b"[" * 2000
    made["nested"] = bytes(PREFIX) + len(nested).to_bytes(8, "little") + nested
    return made


def _instrument(module: Any) -> None:
    """Let atheris see which branches of a module's functions are taken.

    Instrumenting while importing, as it usually does, misses editable installations.
    """
    import atheris

    places = [vars(module), *(vars(kind) for kind in vars(module).values() if isclass(kind))]
    for found in [value for place in places for value in place.values()]:
        function = getattr(found, "__func__", found)
        if isfunction(function) and function.__module__ == module.__name__:
            atheris.instrument_func(function)


def _with_atheris(seconds: int) -> None:
    import atheris

    for module in (encoding, invalid, tensors, namespace, keys, names):
        _instrument(module)
    FOUND.joinpath("corpus").mkdir(parents=True, exist_ok=True)
    options = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=16384",
        "-timeout=10",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
        f"-artifact_prefix={FOUND}/",
        str(FOUND / "corpus"),
        str(CORPUS),
    ]
    atheris.Setup(options, run_one)
    atheris.Fuzz()


def _with_hypothesis(seconds: int) -> int:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    kept = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    edit = st.tuples(st.integers(0, 1 << 14), st.integers(0, 40), st.binary(max_size=40))
    count = 0

    @settings(max_examples=2000, deadline=None, database=None)
    @given(st.sampled_from(kept), st.lists(edit, max_size=5))
    def mutate(data: bytes, edits: list[tuple[int, int, bytes]]) -> None:
        nonlocal count
        count += 1
        for at, length, new in edits:
            at %= len(data) + 1
            data = data[:at] + new + data[at + length :]
        run_one(data)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        mutate()
    return count


def main() -> None:
    """Fuzz for so many seconds, or write the first inputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seeds", action="store_true", help="write the first inputs and leave")
    options = parser.parse_args()
    if options.seeds:
        CORPUS.mkdir(exist_ok=True)
        for name, data in seeds().items():
            (CORPUS / name).write_bytes(data)
    elif _HAS_ATHERIS:
        _with_atheris(options.seconds)
    else:
        count = _with_hypothesis(options.seconds)
        sys.stdout.write(f"{count} inputs, 0 crashes (hypothesis; atheris is not installed)\n")


if __name__ == "__main__":
    main()
