"""What commands and engines say of some 200 inputs, and that no value is read in part.

An input is a line of a configuration file, of several if it holds ``|``; variables; the options of
``--kv-transfer-config`` as JSON; or a command line, in which ``SHELF`` is a shelf with two chunks.
A configuration is tried with ``kvshelf ls``, the JSON with ``kvshelf doctor``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from kvshelf.cli import doctor
from kvshelf.config import CapacityConfig, Config, DiskTierConfig, parse_age, parse_size
from tests.support.commands import run
from tests.support.filled import fill, namespace, prompt

SIZE = "expected a size such as 500MB, 20GiB or 2TiB"
AGE = "expected an age such as 90s, 30m, 12h, 7d or 2w"
NUMBER = "expected a number such as 256 or 0.5"
WEIGHTS = "expected content, sampled, or name: and a text, as name:my-model-v1"
NO_SHELF = "found no shelf; expected SHELF on the command line, the variable KVSHELF_SHARED_STORAGE"
NO_NAME = "expected a text without blanks around it"
A_PATH = "names a path, and a name does not say what lies there"
EMPTY = "is empty; unset or set it"
NONE = "has no value"
SOCKET = "expected ipc:// and the path of its socket"
CAPACITY = 'expected a mapping such as {"max_bytes": "2TiB", "max_age": "7d"}'
KEY = "unknown key"
TWICE = "is given twice"

#: Input, a part of the answer, exit code.
INPUTS: list[tuple[str, str, int]] = [
    # sizes
    (
        "capacity: {max_bytes: 80%}",
        f"max_bytes of capacity in the file FILE: found '80%'; {SIZE}",
        2,
    ),
    ("capacity: {max_bytes: 1}", f"found 1; {SIZE}", 2),
    (
        "capacity: {max_bytes: }",
        f"the file FILE (from --config) cannot be used as YAML: the key max_bytes {NONE}",
        2,
    ),
    ("capacity: {group_max_bytes: 1GiB}|group_by_salt: true", NO_SHELF, 2),
    ("memory: 20", f"found 20; {SIZE}, at least 4096 bytes", 2),
    ("KVSHELF_MEMORY=80%", f"variable KVSHELF_MEMORY in the environment: found '80%'; {SIZE}", 2),
    ('{"memory": 1073741824}', SIZE, 1),
    ("gc SHELF --max-bytes 1,5GiB", f"--max-bytes: found '1,5GiB'; {SIZE}", 2),
    ("gc SHELF --group-max-bytes 80%", f"--group-max-bytes: found '80%'; {SIZE}", 2),
    ("serve SHELF --memory 20", f"{SIZE}, at least 4096 bytes", 2),
    ("gc SHELF --max-bytes 100000B", "would delete", 0),
    ("gc SHELF --max-bytes 1.5MB", "would delete 0 files", 0),
    # ages
    ("capacity: {max_age: 3M}", f"max_age of capacity in the file FILE: found '3M'; {AGE}", 2),
    ("capacity: {max_age: 10s}", f"{AGE}, at least 120s", 2),
    ("gc SHELF --max-age 30s", f"{AGE}, at least 120s", 2),
    ("rm SHELF --unused-for 5M", f"--unused-for: found '5M'; {AGE}", 2),
    ("rm SHELF --unused-for 0s", "which chooses everything; expected an age above zero", 2),
    ("pin SHELF a --group _ --until 3M", f"--until: found '3M'; {AGE}", 2),
    ("rm SHELF --unused-for 9.5m", "would delete 0 files", 0),
    ("gc SHELF --max-age 300s", "would delete 0 files", 0),
    ("pin SHELF a --group _ --until 12h --dry-run", "would pin a", 0),
    # numbers and words
    ("chunk_size: 0", "greater than or equal to 1", 2),
    ("chunk_size: true", NUMBER, 2),
    ("handover_wait_s: .nan", "finite number", 2),
    ("layout: native", "found 'native'; expected 'auto' or 'canonical'", 2),
    ("version: ''", "at least 1 character", 2),
    ("read_only: true|save_decode: true", "a read-only shelf stores nothing", 2),
    ("capacity: {group_max_bytes: 1GiB}", "set group_by_salt to true, or remove", 2),
    ('{"server": "tcp://127.0.0.1:5555"}', SOCKET, 1),
    ('{"server": "ipc:///run/kv.sock", "memory": "1GiB"}', "memory is set too", 1),
    # weights
    ("weights: Content", f"found 'Content'; {WEIGHTS}", 2),
    ("weights: 'name:'", NO_NAME, 2),
    ("weights: 'name: x'", NO_NAME, 2),
    ("weights: name:/models/llama", A_PATH, 2),
    ("KVSHELF_WEIGHTS=name:my-model-v1 ls SHELF", "SHELF: 4 objects", 0),
    # mappings
    ("capacity: 5GiB", f"capacity in the file FILE: found '5GiB'; {CAPACITY}", 2),
    ("KVSHELF_CAPACITY=2TiB", "is not JSON; expected an object such as", 2),
    ("""KVSHELF_CAPACITY='"2TiB"'""", CAPACITY, 2),
    ("capacity: {max_byte: 2TiB}", "no such key; did you mean max_bytes?", 2),
    ("capacity: {max_size: 2TiB}", "no such key; known: group_max_bytes, max_age, max_bytes", 2),
    ("disk_tier: /nvme/kv", 'expected a mapping such as {"path": "/nvme/kv"', 2),
    ("disk_tier: {path: /nvme/kv}", 'expected a mapping such as {"path": "/nvme/kv"', 2),
    ("disk_tier: {path: s3://b/kv, max_bytes: 1GiB}", "is a URL; expected a directory", 2),
    ('{"_env_file": "/etc/passwd"}', KEY, 1),
    ('{"config_file": 3}', "expected the path of a YAML file", 1),
    ('{"capacity": null}', CAPACITY, 1),
    # keys, variables and files
    ("local_cpu: true", f"{KEY} 'local_cpu' in the file FILE; memory for objects is memory", 2),
    ("remote_url: redis://h", "the storage that engines share is shared_storage_path", 2),
    ("colour: red", f"{KEY} 'colour' in the file FILE; known: admission, ", 2),
    ("KVSHELF_SHARED_STORAGE=/mnt/kv", "did you mean KVSHELF_SHARED_STORAGE_PATH?", 2),
    ("KVSHELF_SHELF=/mnt/kv", "did you mean KVSHELF_SHARED_STORAGE_PATH?", 2),
    (
        "KVSHELF_LOG_LEVEL=DEBUG",
        "unknown variable KVSHELF_LOG_LEVEL in the environment; known: ",
        2,
    ),
    ("KVSHELF_SHARED_STORAGE_PATH=", f"KVSHELF_SHARED_STORAGE_PATH in the environment {EMPTY}", 2),
    ("KVSHELF_CONFIG= ls SHELF", EMPTY, 2),
    ("KVSHELF_CONFIG=/dev/null ls SHELF", "(from KVSHELF_CONFIG) is empty; expected a mapping", 2),
    ("ls SHELF --config /nowhere/x.yaml", "cannot read the file /nowhere/x.yaml (from --config", 2),
    ("shared_storage_path:", f"the key shared_storage_path {NONE}", 2),
    ("memory: 1GiB|memory: 2GiB", f"the key memory {TWICE}", 2),
    ("capacity: {max_bytes: 1GiB, max_bytes: 2GiB}", f"the key max_bytes {TWICE}", 2),
    ("memory: [", "cannot be used as YAML", 2),
    ("memory:\t1GiB|\tx", "cannot be used as YAML", 2),
    ("- memory: 1GiB", "holds a list; expected a mapping of options", 2),
    ("just text", "holds a str; expected a mapping of options", 2),
    # addresses
    ("shared_storage_path: kv", "is relative to a working directory", 2),
    ("shared_storage_path: ''", "is empty; give a directory or a URL", 2),
    ("ls ''", "found '' for a shelf; expected a directory or a URL", 2),
    ("ls //nas/kv", "begins with two slashes; expected a mounted path: /nas/kv", 2),
    ("ls /s3://b/kv", "has a URL inside a path; expected s3://b/kv", 2),
    ("ls '$HOME/kv'", "holds $HOME, which nothing replaces here", 2),
    ("ls ' /mnt/kv'", "begins or ends with a blank", 2),
    ('shared_storage_path: "/mnt/kv\\n"', "holds '\\n'; a file or a Secret", 2),
    ("ls '/mnt/\tkv'", "holds '\\t'", 2),
    ("ls None", "is a program's word for no value", 2),
    ("ls s3:bucket/kv", "has no // behind s3: expected s3://bucket/kv, or ./s3:bucket/kv", 2),
    ("ls s3:/bucket/kv", "expected s3://bucket/kv", 2),
    ("ls file:/mnt/kv", "expected file:///mnt/kv", 2),
    ("ls 'C:\\kv'", "is a path of Windows", 2),
    (
        "ls http://minio:9000/bucket/kv",
        'expected s3://bucket/kv with storage_options {"endpoint',
        2,
    ),
    ("ls https://u:hunter2@minio", "expected s3://bucket/prefix with storage_options", 2),
    ("ls https://b.s3.amazonaws.com/kv", "is the address of a bucket; expected s3://b/kv", 2),
    ("ls https://s3.eu-west-1.amazonaws.com/b/kv", "expected s3://b/kv", 2),
    ("ls s3://", "is not a bucket", 2),
    ("ls nfs://h/kv", "mount it, and give its directory", 2),
    ("ls minio://b/kv", "give s3:// with the storage option endpoint_url", 2),
    ("ls redis://h/kv", "is a URL of LMCache", 2),
    ("ls SHELF/missing", "does not exist; check the path, or mount the filesystem", 3),
    ("doctor SHELF/missing/kv", "does not exist", 3),
    ("verify SHELF/missing --repair --yes", "does not exist", 3),
    ("gc SHELF/missing --yes", "does not exist", 3),
    ("rm SHELF/missing --group _ --yes", "does not exist", 3),
    ("pin SHELF/missing a --group _", "does not exist", 3),
    ("pin SHELF/missing a --remove", "does not exist", 3),
    # without a shelf
    ("ls", NO_SHELF, 2),
    ("rm --unused-for 2w --yes", NO_SHELF, 2),
    ("serve --memory 20GiB", NO_SHELF, 2),
    ("KVSHELF_SERVER=ipc:///run/kv.sock ls", NO_SHELF, 2),
    (
        "KVSHELF_SERVER=ipc:///run/kv.sock KVSHELF_SHARED_STORAGE_PATH=SHELF ls",
        "SHELF: 4 objects",
        0,
    ),
    ("chunk_size: 512", NO_SHELF, 2),
    ("explain", "Missing argument 'SHELF'", 2),
    ("pin SHELF", "Missing argument 'NAME'", 2),
    # commands and their options
    ("lss", "No such command 'lss'. Did you mean 'ls'?", 2),
    ("help", "Commands:", 0),
    ("help ls", "ls [OPTIONS] [SHELF]", 0),
    ("--yes rm SHELF", "No such option: --yes; if the command has it, write it behind", 2),
    ("--json ls SHELF", "write it behind the command's name", 2),
    ("ls SHELF --namspace x", "No such option: --namspace", 2),
    ("ls SHELF -n nope", "no namespace nope on SHELF; it has:", 2),
    ("rm SHELF --namespace= --yes", "no namespace on SHELF", 2),
    ("ls SHELF SHELF", "unexpected extra argument", 2),
    ("ls SHELF --by size", "Invalid value for '--by': 'size' is not one of 'namespace'", 2),
    ("ls SHELF --storage-options []", "--storage-options: expected a JSON object", 2),
    ("rm SHELF", "found nothing to select by", 2),
    ("rm SHELF --group xyz", "--group: ", 2),
    ("rm SHELF --group _ --dry-run", "would delete 4 files", 0),
    ("gc SHELF --dry-run", "would delete 0 files", 0),
    ("verify SHELF --repair --dry-run", "4 intact", 0),
    ("copy SHELF SHELF-2 --yes", "copied 4 objects", 0),
    ("pin SHELF a --group _ --yes", "pin a: ", 0),
    ("verify SHELF --yes", "found --yes without --repair; give both, or neither", 2),
    ("verify SHELF --long", "found --long without OBJECT; give both, or neither", 2),
    ("verify SHELF abcdef", "is no object of SHELF", 2),
    ("verify SHELF --sample 200%", "--sample: found '200%'; expected a number of objects", 2),
    ("verify SHELF --sample 1_0", "--sample: found '1_0'", 2),
    ("copy SHELF SHELF", "expected two places", 2),
    ("copy SHELF SHELF/inside", "expected two places", 2),
    ("pin SHELF ../a --group _", "'../a'", 2),
    ("pin SHELF a", "expected PROMPTS, --namespace or --group to pin, or --remove", 2),
    ("pin SHELF a --group _ --remove", "expected PROMPTS, --namespace or --group to pin, or", 2),
    ("pin SHELF a --remove", "there is no pin a on", 1),
    ("explain SHELF SHELF", "is a directory; expected a file of prompts", 2),
    ("serve SHELF", "the server has no memory: give --memory 20GiB", 2),
    ("serve SHELF --memory 20GiB --http all", "--http is 'all'; expected a port", 2),
    ("serve SHELF --memory 20GiB --lease soon", "--lease", 2),
    ("doctor SHELF --timeout soon", "--timeout", 2),
    ("doctor SHELF --timeout 0", f"--timeout: found '0'; {NUMBER}, at least 0.1", 2),
    ("doctor SHELF --timeout 5.5", "all is well", 0),
    ("doctor --kv-transfer-config nope", "--kv-transfer-config: expected a JSON object", 2),
    ("doctor --kv-transfer-config '{}'", 'expected "kv_connector": "KVShelfConnector"', 2),
    (
        "seed SHELF p.jsonl --model m --engine-arg x",
        "--engine-arg: found 'x'; expected NAME=VALUE",
        2,
    ),
]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelf with two chunks of two shards; nothing may be made in the user's cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_installation", lambda: iter(()))
    fill(tmp_path / "shelf", namespace(), prompt(0, 2))
    return tmp_path / "shelf"


def answer_to(given: str, shelf: Path) -> tuple[str, int]:
    """Return what kvshelf prints for an input, and its exit code."""
    env: dict[str, str] = {}
    if given.startswith("{"):
        transfer = {"kv_connector": "KVShelfConnector", "kv_connector_extra_config": None}
        transfer["kv_connector_extra_config"] = json.loads(given)
        words = ["doctor", "--kv-transfer-config", json.dumps(transfer)]
    elif re.match(r"\w+:|- |just", given):
        file = shelf.parent / "config.yaml"
        file.write_text(given.replace("|", "\n") + "\n")
        words = ["ls", "--config", str(file)]
    else:
        words = shlex.split(given)
        while words and (found := re.fullmatch(r"(KVSHELF_\w+)=(.*)", words[0], re.DOTALL)):
            env[found[1]] = found[2].replace("SHELF", str(shelf))
            del words[0]
        words = [word.replace("SHELF", str(shelf)) for word in words or ["ls"]]
    result = run(*words, env={"COLUMNS": "300", **env})
    text = " ".join(result.output.split())
    return text.replace(str(shelf), "SHELF").replace(str(shelf.parent / "config.yaml"), "FILE"), (
        result.exit_code
    )


@pytest.mark.parametrize(("given", "told", "code"), INPUTS, ids=[row[0] for row in INPUTS])
def test_input_has_its_answer_and_code(shelf: Path, given: str, told: str, code: int) -> None:
    before = {path: path.stat().st_mtime for path in shelf.rglob("*")}
    answer, found = answer_to(given, shelf)
    assert (told in answer, found) == (True, code), answer
    assert "hunter2" not in answer
    assert not [path.name for path in shelf.parent.iterdir() if path.name in ("home", "cache")]
    if code:
        assert {path: path.stat().st_mtime for path in shelf.rglob("*")} == before


# --------------------------------------------------------------------------- a grammar of values

NUMBERS = ("1", "20", "300", "007", "1.5", "0.25", "0", "0.0", "1,5", "1.000,5", "10_0", "1e3")
NUMBERS += ("+1", "-1", ".5", "5.", "0x10", "１", "", "80%", "1/2", "inf", "nan", "1'000")
NUMBERS += ("two", "1:30", "1d12", " 1")
BETWEEN = ("", " ", "  ", "-")
UNITS = ("B", "b", "kB", "MB", "mb", "GB", "TB", "PB", "KiB", "MiB", "GiB", "gib", "TiB", "PiB")
UNITS += ("", "K", "M", "G", "T", "Gi", "Ti", "GiBs", "iB", "Gbit")
UNITS += ("s", "m", "h", "d", "w", "S", "D", "mo", "y", "days", "fortnight")
BEHIND = ("", " ", " free", "/day", ";", "\n")
GRAMMAR = {
    number + between + unit + behind
    for number, between, unit in itertools.product(NUMBERS, BETWEEN, UNITS)
    for behind in (BEHIND if between == "" and number == "20" else BEHIND[:1])
}
#: What the accepted texts of the grammar are made of, and what they mean.
VALUES = {text: Fraction(text) for text in ("1", "20", "300", "007", "1.5", "0.25", "0", "0.0")}
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
BYTES |= {f"{letter}ib": 1024 ** (1 + power) for power, letter in enumerate("kmgtp")}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
SIZES = {
    number + between + unit: int(VALUES[number] * BYTES[unit.lower()])
    for number, between, unit in itertools.product(VALUES, ("", " "), UNITS)
    if unit.lower() in BYTES and VALUES[number] * BYTES[unit.lower()] >= 1
}
TIMES = {
    number + between + unit: float(VALUES[number] * SECONDS[unit])
    for number, between, unit in itertools.product(VALUES, ("", " "), SECONDS)
}
WHOLE_NUMBERS = {text: int(text) for text in ("1", "20", "300", "007", "0")}
NUMBERS_OF_SECONDS = {text: float(text) for text in VALUES}
TABLES: dict[str, dict[str, Any]] = {
    "capacity.max_bytes": SIZES,
    "capacity.group_max_bytes": SIZES,
    "disk_tier.max_bytes": SIZES,
    "memory": {text: count for text, count in SIZES.items() if count >= 4096},
    "capacity.max_age": {text: seconds for text, seconds in TIMES.items() if seconds >= 120},
    "chunk_size": {text: count for text, count in WHOLE_NUMBERS.items() if count},
    "handover_wait_s": NUMBERS_OF_SECONDS,
    "read_only": {"1": True, "0": False, "y": True, "T": True},
    "weights": {},
    "server": {},
    "shared_storage_path": {},
}


def test_grammar_has_two_thousand_values() -> None:
    assert len(GRAMMAR) >= 2000
    assert all({*table} <= {*GRAMMAR} for table in TABLES.values())


@pytest.mark.parametrize("option", TABLES)
def test_option_accepts_the_values_of_its_table_as_a_whole(option: str) -> None:
    name, _, key = option.partition(".")
    models: dict[str, Any] = {"capacity": CapacityConfig, "disk_tier": DiskTierConfig}
    field = models.get(name, Config).model_fields[key or name]
    reader: Any = TypeAdapter(Annotated[field.annotation, *field.metadata, "an option"])
    assert _accepted(reader.validate_python) == TABLES[option]


@pytest.mark.parametrize(("parse", "table"), [(parse_size, SIZES), (parse_age, TIMES)])
def test_commands_accept_the_sizes_and_ages_of_options(
    parse: Callable[[str], float], table: dict[str, float]
) -> None:
    assert _accepted(parse) == table


def _accepted(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the texts of the grammar that are accepted, and what is read of them."""
    accepted = {}
    for text in GRAMMAR:
        with contextlib.suppress(ValueError):
            accepted[text] = read(text)
    return accepted
