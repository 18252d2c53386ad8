"""What ``kvshelf rm`` deletes: the objects of namespaces, salt groups, prompts, or of an age.

Owns where the objects of a choice are looked for, and the counts by namespace and salt group.

Contracts
---------
* Only objects are chosen; of a whole namespace also its quarantine and its markers. Its
  description stays, because an engine that uses the namespace writes it once. Foreign files,
  temporaries, links, and namespaces of other versions of the format stay.
* Objects of prompts are found by name: nothing is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.pins import Pins
from kvshelf.capacity.rules import NO_RULES, Choice
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.prompt_objects import known_format, prompt_objects
from kvshelf.tools.prompts import Prompt, TokenPrompt


@dataclass(slots=True)
class Part:
    """What was chosen in one salt group of one namespace folder.

    Attributes
    ----------
    folder, group : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    """

    folder: str
    group: str
    objects: int = 0
    bytes: int = 0
    last_used: float = 0.0


@dataclass(slots=True)
class Found:
    """What was chosen on a shelf.

    Attributes
    ----------
    plan : Plan
    parts : list of Part
    unreadable_pins : dict of str and str
        Pins that pin nothing, by name, and why.
    """

    plan: Plan
    parts: list[Part]
    unreadable_pins: dict[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> int:
        """Number of objects."""
        return sum(part.objects for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the objects."""
        return sum(part.bytes for part in self.parts)


def find_objects(
    shelf: Shelf,
    choice: Choice,
    folders: Collection[str] | None = None,
    prompts: Sequence[Prompt | TokenPrompt] | None = None,
    *,
    on_listed: Callable[[], None] = lambda: None,
) -> Found:
    """Find the objects that are chosen; change nothing.

    Parameters
    ----------
    shelf : Shelf
    choice : Choice
    folders : Collection of str, optional
        Of these namespace folders.
    prompts : Sequence of Prompt or TokenPrompt, optional
        The chunks and tails of these prompts, which are token ids.
    on_listed : Callable
        Called for each file that is listed.

    Raises
    ------
    ConfigError
        If a chosen namespace has no usable description, and prompts are chosen.
    StorageError
        If the shelf, or its pins or marks, cannot be read.
    """
    backend = shelf.backend
    names: list[str] = []
    if prompts is not None:
        names, folders = list(_of_prompts(shelf, folders, prompts)), ()
    inventory = Scan(backend, folders=folders, names=names, parents=None).run(pace=on_listed)
    assert inventory is not None, "nothing stops it"
    pins = Pins.read(backend, inventory.aged_at)
    marks = None if choice.unused_for is None else Marks.read(backend)
    found = plan(inventory, replace(NO_RULES, choice=choice), pins=pins, marks=marks)
    return Found(found, _parts(found), dict(pins.unreadable))


def _parts(found: Plan) -> list[Part]:
    inventory, counts = found.inventory, found.counts()
    first = inventory.first_rows[found.units]
    parts: dict[tuple[int, int], Part] = {}
    for space, group, units in inventory.by_folder(first, by_group=True):
        folder = inventory.namespaces[space].name
        part = parts.setdefault((space, group), Part(folder, inventory.groups[group]))
        part.objects += int(counts[units].sum())
        part.bytes += int(found.nbytes[units].sum())
        part.last_used = max(part.last_used, float(found.used[units].max()))
    return list(parts.values())


def _of_prompts(
    shelf: Shelf, folders: Collection[str] | None, prompts: Sequence[Prompt | TokenPrompt]
) -> Iterator[str]:
    """Yield the names of the objects that prompts have."""
    for info in shelf.namespaces():
        if folders is None or info.folder in folders:
            fmt = known_format(info, required=folders is not None)
            if fmt is not None:
                for each in prompt_objects(shelf.backend, info.folder, fmt, prompts, tails=True):
                    yield each.name
