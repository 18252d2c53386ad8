"""What ``kvshelf gc`` and ``kvshelf rm`` delete: the plan of a shelf, or of a part of it.

Owns where the files of a plan are looked for, and the counts by namespace and salt group.

Contracts
---------
* Of what a choice selects, only objects are in a plan; of a whole namespace also its markers. Its
  description stays, because an engine that uses the namespace writes it once. Foreign files, links,
  and namespaces of other versions of the format stay.
* Objects of prompts are found by name: nothing is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.rules import Rules
from kvshelf.capacity.uses import resolution
from kvshelf.shelf.pins import Pins
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.prompt_objects import known_formats, prompt_objects
from kvshelf.tools.prompts import Prompt, TokenPrompt


@dataclass(slots=True)
class Part:
    """What is in a plan of one salt group of one namespace folder.

    Attributes
    ----------
    namespace, group : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    """

    namespace: str
    group: str
    objects: int = 0
    bytes: int = 0
    last_used: float = 0.0


def plan_for(
    shelf: Shelf,
    rules: Rules,
    folders: Collection[str] | None = None,
    prompts: Sequence[Prompt | TokenPrompt] | None = None,
    *,
    on_listed: Callable[[], None] = lambda: None,
) -> tuple[Plan, Pins]:
    """Return what rules delete from a shelf, and its pins; change nothing.

    Parameters
    ----------
    shelf : Shelf
    rules : Rules
        With a choice, or for the whole shelf.
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
    # Parents are read from the beginning of an object of each chunk.
    parents = None if rules.choice else not backend.properties.high_latency
    inventory = Scan(backend, folders=folders, names=names, parents=parents).run(pace=on_listed)
    assert inventory is not None, "nothing stops it"
    pins, marks = Pins.read(backend, inventory.aged_at), Marks.read(backend)
    exactly = resolution(rules.max_age)
    return plan(inventory, rules, pins=pins, marks=marks, resolution=exactly), pins


def parts_of(found: Plan) -> list[Part]:
    """Return how much of each salt group of each namespace is in a plan."""
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
    for folder, fmt in known_formats(shelf, folders):
        for each in prompt_objects(shelf.backend, folder, fmt, prompts, tails=True):
            yield each.name
