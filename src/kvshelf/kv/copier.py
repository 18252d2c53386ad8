"""How chunks move between the caches of one device and page-locked host memory.

Owns the device buffers that are in use, their streams and events, and the thread ``kvshelf-copy``.
:mod:`kvshelf.kv.device` decides when copies may run, and what an error of the device means.

A store: one launch for each layout gathers all layers and shards of a chunk into a device buffer,
on the engine's own stream. Once it is done, ``kvshelf-copy`` copies the buffer to the host.
A load: a load thread copies a chunk into a device buffer, and one launch for each layout scatters
it from there. Both are enqueued on the buffer's own stream, which has a high priority.

Who may use what, and when
--------------------------
* Work that comes later on the engine's stream may overwrite the blocks of a store.
* The scatter of a load is enqueued once the host has seen its fence, an event that was recorded on
  the engine's stream. It never waits for work that was enqueued after that. What is enqueued runs
  whenever the device gets to it, so after :meth:`Copier.refuse_loads` no scatter is enqueued.
* A buffer for stores is free again once the host has seen the end of its last copy, a buffer for
  loads once the host has seen the end of its scatter. Payloads are theirs for as long.
* Nothing is enqueued for the host that has to wait for the engine: a copy engine serves copies in
  the order of their arrival. In each direction two pieces of 4 MiB are under way at most, so a copy
  of the engine's own waits 0.3 ms for them on a link of 25 GB/s.

Contracts
---------
* :meth:`Copier.gather` never waits: the engine's step thread calls it. Without a free buffer it
  refuses. All other methods may wait, and belong on other threads.
* A device that does not answer for :data:`ANSWER_SECONDS` counts as failed. The threads that wait
  for it stay with their memory, which it may still write to, until :meth:`Copier.close`.
* After an error nothing of that copy is under way any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

import torch
from torch import Tensor

from kvshelf.background import try_to_start
from kvshelf.errors import DeviceStuckError, DeviceUnavailableError
from kvshelf.kv import ops
from kvshelf.kv.caches import ANSWER_SECONDS, PendingCopy
from kvshelf.kv.copy_plan import CopyPlan
from kvshelf.kv.streams import Streams

PIECE_BYTES: Final = 4 << 20
PIECES_UNDER_WAY: Final = 2
#: Seconds between two questions of a thread that waits for the device: the first, the longest.
_FIRST_PAUSE: Final = 20e-6
_LONGEST_PAUSE: Final = 500e-6


class Copy(PendingCopy):
    """A store on its way. Only the copier writes to it."""

    def __init__(self, gathered: Any, buffer: Tensor, payloads: Sequence[Tensor]) -> None:
        #: Events: the gather is done; the last copy to the host is.
        self.gathered = self.arrived = gathered
        self.buffer: Tensor | None = buffer
        self.payloads = payloads
        self.error: Exception | None = None
        self.ended = threading.Event()

    def done(self) -> bool:
        """See :meth:`PendingCopy.done`."""
        return self.ended.is_set()

    def wait(self, deadline: float | None = None) -> None:
        """See :meth:`PendingCopy.wait`."""
        seconds = ANSWER_SECONDS if deadline is None else deadline - time.monotonic()
        if not self.ended.wait(max(0.0, seconds)):
            raise DeviceStuckError("a chunk did not reach the host in time")
        if self.error is not None:
            raise self.error


class _Link:
    """One direction between device and host, with at most so many pieces under way."""

    def __init__(self, streams: Streams, wait: Callable[[Any], None]) -> None:
        self.lock = threading.Lock()
        self._streams = streams
        self._wait = wait
        self._pieces: deque[Any] = deque()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the current stream, piece by piece. The caller holds the lock."""
        for start in range(0, target.numel(), PIECE_BYTES):
            while len(self._pieces) >= PIECES_UNDER_WAY:
                self._wait(self._pieces.popleft())
            piece = slice(start, start + PIECE_BYTES)
            self._streams.enqueue(target[piece].copy_, source[piece], True)
            event = self._streams.event()
            event.record(self._streams.current())
            self._pieces.append(event)


class Copier:
    """Moves chunks: see the module.

    Parameters
    ----------
    streams : Streams
    on_error : Callable
        Returns the error that callers get for an error of the device.
    stores : Sequence of Tensor, optional
        Device buffers, uint8 [shards, bytes]; when absent, each store allocates one.
    loads : Sequence of Tensor or None
        The same for as many loads at a time; each None allocates one for each load.
    """

    def __init__(
        self,
        streams: Streams,
        on_error: Callable[[Exception], RuntimeError],
        stores: Sequence[Tensor] | None = None,
        loads: Sequence[Tensor | None] = (None, None),
    ) -> None:
        self._streams, self._on_error = streams, on_error
        self._to_host, self._to_device = (_Link(streams, self.await_event) for _ in range(2))
        self._beside = streams.stream(urgent=False)
        #: Guards all below; notified at any change.
        self._changed = threading.Condition()
        self._stores = None if stores is None else deque(stores)
        self._loads = deque((buffer, streams.stream(urgent=True)) for buffer in loads)
        self._gathered: deque[Copy] = deque()
        self._unfinished = 0
        #: The ends of the scatters that may be under way.
        self._scatters: set[Any] = set()
        self._thread: threading.Thread | None = None
        #: Held while a scatter is enqueued.
        self._enqueues_load = threading.Lock()
        self._stops = self._is_stuck = self._refuses_loads = False
        self._deadline = inf

    def await_event(self, event: Any) -> None:
        """Wait until the device has reached an event.

        Raises
        ------
        DeviceStuckError
            If it has not when the copier's time is over.
        """
        late, pause = time.monotonic() + ANSWER_SECONDS, _FIRST_PAUSE
        while not event.query():
            now = time.monotonic()
            if now >= self._deadline:
                raise DeviceStuckError("the device did not answer until its caches were closed")
            if now >= late and not self._is_stuck:
                self._is_stuck = True
                self._on_error(DeviceStuckError(f"no answer for {ANSWER_SECONDS:g} s"))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # ------------------------------------------------------------- stores

    def gather(self, plan: CopyPlan, slots: Tensor, payloads: Sequence[Tensor]) -> Copy | None:
        """Gather a chunk on the calling thread's stream, and have it copied to the host.

        Parameters
        ----------
        plan : CopyPlan
        slots : Tensor
            int64 [tokens], CPU, contiguous, checked. It is read during the call.
        payloads : Sequence[Tensor]
            uint8 in host memory, of each shard.

        Returns
        -------
        Copy or None
            None while no device buffer is free.

        Raises
        ------
        RuntimeError
            If the device fails.
        """
        streams, places = self._streams, range(len(payloads))
        if not self._has_thread():
            return None
        with streams.here():
            buffer = self._take_store_buffer(plan)
            if buffer is None:
                return None
            try:
                gathered = streams.event()
                plan.enqueue(streams, ops.gather_kv, places, slots, buffer)
                gathered.record(streams.current())
            except BaseException as error:
                # The next gather into the buffer comes behind what was enqueued of this one.
                self._give_back(self._stores, buffer)
                if isinstance(error, torch.OutOfMemoryError):
                    return None
                raise
        copy = Copy(gathered, buffer, payloads)
        with self._changed:
            self._gathered.append(copy)
            self._unfinished += 1
            self._changed.notify_all()
        return copy

    def _has_thread(self) -> bool:
        """Start the thread when it is first needed; return whether it runs."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvshelf-copy", daemon=True)
                if try_to_start(thread):
                    self._thread = thread
            return self._thread is not None

    def _take_store_buffer(self, plan: CopyPlan) -> Tensor | None:
        if self._stores is None:
            try:
                return plan.allocate(len(plan.sizes))
            except torch.OutOfMemoryError:
                return None
        with self._changed:
            return self._stores.popleft() if self._stores else None

    def _give_back(self, buffers: deque[Any] | None, buffer: Any) -> None:
        with self._changed:
            if buffers is not None:
                buffers.append(buffer)
            self._changed.notify_all()

    def _run(self) -> None:
        """Copy to the host what was gathered, until :meth:`stop`."""
        with contextlib.ExitStack() as stack:
            # A device that cannot be made current fails the copies one by one.
            with contextlib.suppress(RuntimeError):
                # A question to a device, asked while another one is current, makes a context there.
                stack.enter_context(self._streams.here())
                stack.enter_context(self._streams.relaxed())
            self._copy_gathered()

    def _copy_gathered(self) -> None:
        sent: deque[Copy] = deque()
        while True:
            with self._changed:
                while not (self._gathered or sent or self._stops):
                    self._changed.wait()
                copy = self._gathered.popleft() if self._gathered else None
            if copy is None and not sent:
                return
            # What has arrived is not kept waiting for a gather that is not done.
            while sent and (
                copy is None or _is_over(sent[0].arrived) or not _is_over(copy.gathered)
            ):
                self._finish(sent.popleft())
            if copy is not None:
                self._send(copy)
                sent.append(copy)

    def _send(self, copy: Copy) -> None:
        """Enqueue the copies of a buffer to the host, once its gather is done."""
        streams = self._streams
        try:
            self.await_event(copy.gathered)
            # Payloads may have been made inside vLLM's step, which runs in this mode.
            with torch.inference_mode(), streams.use(self._beside), self._to_host.lock:
                copy.arrived = streams.event()
                try:
                    assert copy.buffer is not None
                    for payload, packed in zip(copy.payloads, copy.buffer, strict=True):
                        self._to_host.copy(payload, packed[: payload.numel()])
                finally:
                    copy.arrived.record(streams.current())
        except Exception as error:  # noqa: BLE001 - one copy fails, the thread goes on
            copy.error = error

    def _finish(self, copy: Copy) -> None:
        """Wait until a chunk is in host memory, or known not to come."""
        try:
            self.await_event(copy.arrived)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            copy.error = copy.error or error
        if isinstance(copy.error, DeviceStuckError):
            return  # it may still write to the payloads: see Copy.done
        if copy.error is not None:
            self._settle(self._beside)
            copy.error = self._on_error(copy.error)
        with self._changed:
            self._unfinished -= 1
        buffer, copy.buffer = copy.buffer, None
        self._give_back(self._stores, buffer)
        copy.ended.set()

    # ------------------------------------------------------------- loads

    def scatter(
        self,
        plan: CopyPlan,
        places: range,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: Any | None,
    ) -> None:
        """Scatter neighbouring shards of a chunk, and wait until they are in the caches.

        Parameters
        ----------
        plan : CopyPlan
        places : range
            Of these shards among all shards of the caches.
        slots : Tensor
            As for :meth:`gather`; −1 = skip.
        payloads : Sequence[Tensor]
            As for :meth:`gather`, one for each of these shards.
        fence : Any, optional
            The event behind which the blocks may be written.

        Raises
        ------
        RuntimeError
            If the device fails.
        DeviceUnavailableError
            After :meth:`refuse_loads`; nothing was written to the caches.
        """
        streams = self._streams
        with self._changed:
            while not self._loads:
                self._changed.wait()
            buffer, stream = self._loads.popleft()
        try:
            with streams.use(stream), streams.relaxed():
                packed = plan.allocate(len(places)) if buffer is None else buffer
                ended = streams.event()
                try:
                    with self._to_device.lock:
                        for payload, row in zip(payloads, packed, strict=False):
                            self._to_device.copy(row[: payload.numel()], payload)
                    if fence is not None:
                        self.await_event(fence)
                    with self._enqueues_load:
                        if self._refuses_loads:
                            raise DeviceUnavailableError("the engine took its KV caches back")
                        self._scatters.add(ended)
                        plan.enqueue(streams, ops.scatter_kv, places, slots, packed)
                        ended.record(streams.current())
                    self.await_event(ended)
                except DeviceStuckError:
                    raise
                except BaseException:
                    self._settle(stream)
                    raise
                finally:
                    with self._changed:
                        self._scatters.discard(ended)
        finally:
            self._give_back(self._loads, (buffer, stream))

    # ------------------------------------------------------------- the end

    def _settle(self, stream: Any) -> None:
        """Wait, after an error, for what was enqueued before it."""
        # A device that cannot even be waited for does no work any more.
        with contextlib.suppress(Exception):
            stream.synchronize()

    def drain(self, deadline: float) -> bool:
        """Wait until nothing is under way to the host; return False if that takes too long."""
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: not self._unfinished, seconds)

    def refuse_loads(self, deadline: float) -> None:
        """Enqueue no scatter any more: the caches are about to be somebody else's memory.

        It waits for the scatters that are under way, but no longer than to the deadline: a device
        that hangs does not end them.
        """
        self._refuses_loads = True
        if self._enqueues_load.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._enqueues_load.release()
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._scatters, seconds)

    def stop(self) -> None:
        """Let the thread end once it has copied what is left. No gather may follow."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Stop, and end all waits for the device at the deadline."""
        self._deadline = deadline
        self.stop()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))


def _is_over(event: Any) -> bool:
    """Whether a wait for an event ends at once, perhaps with an error."""
    with contextlib.suppress(Exception):
        return bool(event.query())
    return True
