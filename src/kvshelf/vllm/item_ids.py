"""Ids of images, audio and video: by content or chosen by a client, and by which processor.

vLLM names an item by a hash of its content, or, where the client sent one, by a ``uuid``. With
arguments for the processor it hashes the ``uuid`` with them, so an id's form does not show where it
comes from. A client that guesses another one's ``uuid`` could send it with another image: KV under
this id would be wrong for the other client, on all engines and for as long as the shelf lasts. So
kvshelf's plugin marks ids where vLLM makes them, in the processes that prepare requests, and the
scheduler side leaves out requests with ids that may be a client's, unless their ``cache_salt``
keeps them apart.

vLLM also puts the model's name or path into each hash, which keeps engines apart that could share,
and not what makes another input of the same image: the files of the processor. The plugin puts
their digest (:mod:`kvshelf.vllm.media`) in place of the name, in the process that uses them.

The marks
---------
* An id that stems from a ``uuid`` begins with :data:`CLIENT` and the processor's digest, in vLLM's
  caches too. There it can no longer be equal to the hash of another client's image.
* An id by content is a hash with the processor's digest. But ``mm_hash``, under which the API
  process and the engine's process exchange the processed item, begins with :data:`CONTENT`. A
  process without the marks never makes an ``mm_hash`` that is longer than the id by this mark,
  whatever a client sends, so it proves that the ids of a request are marked.
* Where the process does not know what its processor was made of, ids begin with :data:`UNKNOWN`,
  and requests with them are left out.
* An id that came with prepared inputs (``/inference/v1/generate``) is a client's.
* Where encoders run in engines of their own (``ec_transfer_config``), ids name their outputs among
  engines, so they stay as vLLM makes them, and no id is trusted.
* Where LoRA adapters also change the encoder (``enable_tower_connector_lora``), vLLM puts the
  adapter's name before an id, and another adapter may be loaded under this name. It would be served
  what the encoder made with the first one. So the adapter's number, which is never given to
  another one, is put behind its name. Requests with adapters and without the number are left out.

In a key, an item's name is its id without the adapter, whose content is in the key, and what
follows :data:`_ENGINE`, a digest of what the id does not hold: of the processor's files, as the
engine's process knows them, where the id has no mark with them; and of the engine's options for
media. With vLLM's options an id by content enters as it is.

vLLM: ``multimodal/processing/inputs.py`` (``get_mm_hashes``), ``multimodal/processing/context.py``
(``model_id``), ``multimodal/hasher.py`` (``hash_kwargs``), ``v1/engine/input_processor.py``
(``process_inputs``).

Threads
-------
The marks run on the threads that prepare requests and share nothing but digests.
:class:`ItemIds` runs on the engine's step thread and on lookup threads, which only read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
import time
from typing import Any, Final

from kvshelf.metrics import Counters
from kvshelf.vllm.media import EngineMedia, processor_of

logger = logging.getLogger(__name__)

CLIENT: Final = "kvshelf-client-id-"
CONTENT: Final = "kvshelf-media-content-"
UNKNOWN: Final = "kvshelf-unknown-processor-"

#: Before what an item's name in a key holds beside the id.
_ENGINE: Final = "+"
#: An id that stems from a uuid, with the digest of the processor's files.
_MARKED_UUID: Final = re.compile(f"{CLIENT}(?:([0-9a-f]{{64}})-)?")

_TRUST: Final = (
    "Requests with a cache_salt are served; trust_uuids: true serves all, if every client may be"
    " trusted to send each uuid with one content only"
)


class _ContentHash(str):
    """An id that this process computed from content, and nothing that a client sent as an id."""

    __slots__ = ()


class _ModelName(str):
    """The name of a model, with its configuration."""

    model: Any
    #: Whether engines with encoders of their own know items by hashes with this name.
    is_shared: bool


@functools.cache
def mark_ids() -> None:
    """Let vLLM mark the ids that it makes in this process. Idempotent.

    Raises
    ------
    ImportError, AttributeError
        If this vLLM makes ids elsewhere: they stay unmarked, so none is trusted.
    """
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.context import BaseProcessingInfo
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    # vLLM calls this before it makes a processor.
    since = time.time()
    hash_kwargs: Any = MultiModalHasher.hash_kwargs
    get_mm_hashes: Any = ProcessorInputs.get_mm_hashes
    model_id: Any = BaseProcessingInfo.model_id
    process_inputs: Any = InputProcessor.process_inputs
    start: Any = InputProcessor.__init__

    @functools.wraps(hash_kwargs)
    def marked_hash(cls: Any, *args: Any, **kwargs: Any) -> str:
        plain = {name: _unmarked(value) for name, value in kwargs.items()}
        digest = str(hash_kwargs.__func__(cls, *args, **plain))
        given = [value for value in kwargs.values() if isinstance(value, str)]
        if any(_is_client_id(value) for value in given):
            digest = CLIENT + digest
        elif not any(value.startswith(UNKNOWN) for value in given):
            return _ContentHash(CONTENT + digest)
        return UNKNOWN + digest if any(value.startswith(UNKNOWN) for value in given) else digest

    @functools.wraps(get_mm_hashes)
    def marked_hashes(self: Any, model_id: str, *args: Any, **kwargs: Any) -> Any:
        if self.mm_uuid_items:
            marked = {
                modality: [None if uuid is None else f"{CLIENT}{uuid}" for uuid in uuids]
                for modality, uuids in self.mm_uuid_items.items()
            }
            self = dataclasses.replace(self, mm_uuid_items=marked)
        if getattr(model_id, "is_shared", False):
            return get_mm_hashes(self, model_id, *args, **kwargs)
        digest = None
        if isinstance(model_id, _ModelName):
            # vLLM keeps one processor for each combination of settings.
            anew = bool(self.hf_processor_mm_kwargs)
            digest = processor_of(model_id.model, since, made_anew=anew)
        made = get_mm_hashes(self, digest or model_id, *args, **kwargs)
        return {modality: [_by(digest, name) for name in names] for modality, names in made.items()}

    @functools.wraps(model_id.fget)
    def named(self: Any) -> str:
        name = _ModelName(model_id.fget(self))
        name.model = self.ctx.model_config
        name.is_shared = id(name.model) in shared
        return name

    #: Of models whose encoders run in engines of their own; they live as long as this process.
    shared: dict[int, Any] = {}

    @functools.wraps(start)
    def started(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if _ids_are_shared(vllm_config):
            shared[id(vllm_config.model_config)] = vllm_config.model_config
        start(self, vllm_config, *args, **kwargs)

    @functools.wraps(process_inputs)
    def marked_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        shared = _ids_are_shared(self.vllm_config)
        for feature in request.mm_features or ():
            _mark(feature, shared, request.lora_request)
        return request

    MultiModalHasher.hash_kwargs = classmethod(marked_hash)
    ProcessorInputs.get_mm_hashes = marked_hashes
    BaseProcessingInfo.model_id = property(named)
    InputProcessor.__init__ = started
    InputProcessor.process_inputs = marked_request


def _by(digest: str | None, name: str) -> str:
    """Return an id that says by which processor its item is prepared."""
    if digest is None:
        return UNKNOWN + (name[len(CONTENT) :] if isinstance(name, _ContentHash) else name)
    if _is_client_id(name):
        return f"{CLIENT}{digest}-{name[len(CLIENT) :]}"
    return name


def _is_client_id(name: str) -> bool:
    return name.removeprefix(UNKNOWN).startswith(CLIENT)


def _unmarked(value: Any) -> Any:
    """Return an id without marks; anything else as it is."""
    if isinstance(value, _ContentHash):
        return value[len(CONTENT) :]
    return value.removeprefix(UNKNOWN).removeprefix(CLIENT) if isinstance(value, str) else value


def _mark(feature: Any, shared: bool, lora: Any = None) -> None:
    """Mark the ids of an item in a request that vLLM has prepared.

    Parameters
    ----------
    feature : MultiModalFeatureSpec
        ``identifier`` is ``mm_hash``, or ends with it after a LoRA adapter's name.
    shared : bool
        Whether other engines know the item by this id.
    lora : LoRARequest, optional
        The request's adapter.
    """
    name = feature.mm_hash
    adapter = feature.identifier[: len(feature.identifier) - len(name)]
    if adapter and not shared:
        adapter = _adapter_mark(lora)
    marked_name = name
    if shared or isinstance(name, _ContentHash):
        marked_name = _unmarked(name)
    elif not name.startswith((CLIENT, UNKNOWN)):
        marked_name = CLIENT + name
        # Items in shared memory are signed with their name, and processes keep none of them.
        if name.startswith(CONTENT) and "signature" not in (feature.data or ()):
            name = CLIENT + name
    feature.identifier = adapter + str(marked_name)
    # A request is encoded for the engine's process, which knows no subclasses of str.
    feature.mm_hash = str(name)


def _adapter_mark(lora: Any) -> str:
    """Return what stands before ids where an adapter changes what the encoder makes of items."""
    return f"{lora.lora_name}:{lora.lora_int_id}:"


def _ids_are_shared(vllm_config: Any) -> bool:
    """Whether other engines know items by the ids of this one."""
    return getattr(vllm_config, "ec_transfer_config", None) is not None


class ItemIds:
    """Decides which ids of items in requests are trusted, and how they enter keys.

    Parameters
    ----------
    vllm_config : VllmConfig
    trust : bool
        The option ``trust_uuids``.
    counters : Counters
    """

    def __init__(self, vllm_config: Any, trust: bool, counters: Counters) -> None:
        self._trust = trust
        self._counters = counters
        self._shared = _ids_are_shared(vllm_config)
        lora = getattr(vllm_config, "lora_config", None)
        self._adapts_encoder = bool(getattr(lora, "enable_tower_connector_lora", False))
        self._media = EngineMedia(vllm_config)
        self._warned: set[str] = set()
        self._numbered = _items_are_numbered(vllm_config)
        if self._numbered:
            logger.warning(
                "prefix caching and the multimodal processor cache are both off: vLLM then numbers"
                " images, audio and video instead of naming them by content, so KV of requests with"
                " them is neither loaded nor stored. Set --mm-processor-cache-gb above 0"
            )

    def may_enter_keys(self, request: Any) -> bool:
        """Whether a request may be loaded and stored; logs once why one may not."""
        features = request.mm_features
        if not features:
            return True
        if self._numbered or self._media.options is None:
            return False
        if any(UNKNOWN in feature.identifier for feature in features):
            return False
        if not all(self._names_adapter(feature, request.lora_request) for feature in features):
            self._warn_once(
                "requests with a LoRA adapter and images, audio or video are neither loaded nor"
                " stored: with enable_tower_connector_lora vLLM knows by the adapter's name what"
                " its encoder made of them, and only kvshelf's plugin in the API server's process"
                " tells apart adapters that are loaded under one name"
            )
            return False
        if self._trust or request.cache_salt:
            is_named = self._media.processor is not None
            return is_named or all(map(self._names_processor, features))
        if all(map(self._is_content, features)):
            return True
        self._counters.add("uuid_requests")
        if self._shared:
            self._warn(
                "ids of images, audio and video come from other engines (ec_transfer_config)"
            )
        elif any(CLIENT in feature.identifier for feature in features):
            self._warn("a client names images, audio or video by a uuid of its own")
        else:
            self._warn(
                "the process that prepared a request with images, audio or video does not mark ids"
                " that clients choose. vLLM's API server does where kvshelf is installed beside it"
                " and VLLM_PLUGINS does not leave it out; vLLM's frontend in Rust cannot"
            )
        return False

    def _names_adapter(self, feature: Any, lora: Any) -> bool:
        """Whether an id holds the number of the adapter that changes the encoder, if any does."""
        if lora is None or not self._adapts_encoder:
            return True
        # Without the plugin what follows the adapter's name is what a client may have chosen.
        plain = f"{lora.lora_name}:{feature.mm_hash}"
        marked = feature.identifier.startswith(_adapter_mark(lora)) and not self._shared
        return marked and bool(feature.identifier != plain)

    def _is_content(self, feature: Any) -> bool:
        """Whether marks prove that an item is named by its content and processor."""
        name = feature.mm_hash or ""
        digest = name.removeprefix(CONTENT)
        if digest == name or self._shared:
            return False
        return bool(feature.identifier == digest or feature.identifier.endswith(f":{digest}"))

    def _names_processor(self, feature: Any) -> bool:
        """Whether an id holds the digest of the processor's files."""
        match = _MARKED_UUID.search(feature.identifier)
        return self._is_content(feature) if match is None else match[1] is not None

    def _warn(self, reason: str) -> None:
        self._warn_once(
            "requests with an image, audio or video whose id a client may have chosen are neither"
            f" loaded nor stored: {reason}. {_TRUST}"
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def in_key(self, feature: Any, lora: Any = None) -> str:
        """Return the name of an item as it enters a key of a request with this adapter."""
        name = str(feature.identifier)
        if lora is not None and self._adapts_encoder:
            name = name.removeprefix(_adapter_mark(lora))
        options = self._media.options
        assert options is not None
        if self._is_content(feature):
            return f"{name}{_ENGINE}{options}" if options else name
        processor = self._media.processor
        if (match := _MARKED_UUID.search(name)) is not None:
            processor = match[1] or processor
            name = name[: match.start()] + ("" if self._trust else CLIENT) + name[match.end() :]
        by = hashlib.sha256(f"{processor} {options}".encode()).hexdigest()
        return f"{name}{_ENGINE}{by}"


def _items_are_numbered(vllm_config: Any) -> bool:
    """Whether vLLM numbers items instead of naming them by content (vllm/renderers/base.py)."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is not None
        and multimodal.mm_processor_cache_gb <= 0
        and not vllm_config.cache_config.enable_prefix_caching
    )
