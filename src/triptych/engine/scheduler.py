"""Which rows of which requests run in the next step. Numbers only: no tensors, no clock, no I/O.

    WAITING --admit (slot, blocks)--> RUNNING --finish, abort--> FINISHED
       ^                                 |
       +---- preempt (keeps its slot) ---+

There are no phases: `num_computed_tokens` chases `num_tokens`. A running request whose known rows are all computed, or
that is parked, is idle: it keeps slot and blocks and costs nothing until rows or credit arrive.

The engine's turn is: `batch = schedule()`; run it; `update(batch)`; then for each row with `samples` draw a token and
call `sampled(request)`; `extend(request, token_id)` whenever one more row is known; `finish(request, reason)`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf, lcm
from operator import attrgetter

from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.block_pool import BlockPool
from triptych.engine.prefill_room import PrefillRoom, serving_order
from triptych.engine.request import EngineRequest, FinishReason, RequestStatus
from triptych.engine.scheduler_config import SchedulerConfig
from triptych.errors import ContextLengthError, RequestError

_arrival = attrgetter("arrival")

# How many prefill rows may stand beside a decode row that is due at a time.
Spare = Callable[[float], int]


class Scheduler:
    """Who is due first is served first, over a token budget, a block pool and `max_num_seqs` slots.

    `due_at` makes the order, then arrival: first come, first served where nobody sets it. Rows are given out in this
    order: one row to each running request that needs one, prefill pieces of running requests, preempted requests, new
    requests by arrival. A request that lacks rows or their inputs, or is parked, is passed over; one that lacks budget,
    blocks or a slot is waited for, so nobody is overtaken. One that is held back for others to be in time is passed
    over by those that are due before these.

    Without a free block, the running request that is due last loses its blocks to the one being scheduled; one that is
    due earlier than that does only while it is idle. It is computed again, from its first row, once all its known rows
    fit; until then nobody new is admitted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # that the prefix cache was asked for when requests started
        self._requests: dict[str, EngineRequest] = {}
        self._running: list[EngineRequest] = []  # by arrival
        self._preempted: list[EngineRequest] = []  # by arrival; the front of the waiting line
        self._waiting: dict[str, EngineRequest] = {}  # by arrival; never admitted so far
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the smallest is taken
        self._num_arrivals = 0
        self._hit_alignment = lcm(config.block_size, config.prefill_alignment)

    # -- the line ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the line; its first `num_tokens` rows are known.

        Raises RequestError for an id that is in use or an empty prompt, ContextLengthError beyond max_model_len.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        if request.num_prompt_tokens < 1:
            raise RequestError(f"request {request.request_id!r} has an empty prompt")
        longest = max(request.num_prompt_tokens, request.num_tokens)
        if longest > self.config.max_model_len:
            raise ContextLengthError(f"the prompt has {longest} tokens; max_model_len is {self.config.max_model_len}")
        if request.num_tokens > request.num_prompt_tokens + request.num_sampled:
            raise RuntimeError(f"request {request.request_id!r} has rows beyond its prompt that no token was drawn for")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def arrived(self, request: EngineRequest, num_tokens: int) -> None:
        """The first `num_tokens` rows of the prompt are known, where they came after the request was added."""
        if not request.num_tokens <= num_tokens <= request.num_prompt_tokens:
            raise RuntimeError(
                f"request {request.request_id!r} knows {request.num_tokens} rows of a prompt of "
                f"{request.num_prompt_tokens}: {num_tokens} is not between"
            )
        request.num_tokens = num_tokens

    def extend(self, request: EngineRequest, token_id: int | None = None) -> None:
        """One more row is known; `token_id` joins `token_ids` where prefix hashes use them.

        Past the prompt a row needs a drawn token: call `sampled` first. Raises ContextLengthError at max_model_len.
        """
        if request.status is RequestStatus.FINISHED:
            raise RuntimeError(f"request {request.request_id!r} has finished; it takes no more rows")
        if request.num_tokens >= request.num_prompt_tokens + request.num_sampled:
            raise RuntimeError(
                f"request {request.request_id!r}: the token of row {request.num_tokens} is not drawn yet"
            )
        if request.num_tokens >= self.config.max_model_len:
            raise ContextLengthError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, all that max_model_len allows"
            )
        request.num_tokens += 1
        if token_id is not None:
            request.token_ids.append(token_id)

    def sampled(self, request: EngineRequest) -> None:
        """A token was drawn from a row with `samples`; that row never draws again, even if it is computed again."""
        if request.num_tokens < request.num_prompt_tokens + request.num_sampled:
            raise RuntimeError(f"request {request.request_id!r} has no row left to draw a token from")
        request.num_sampled += 1

    def finish(self, request: EngineRequest, reason: FinishReason) -> None:
        """Free blocks and slot at once. Does nothing to a request that has finished."""
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._remove(self._running, request)
        elif self._waiting.pop(request.request_id, None) is None:
            self._remove(self._preempted, request)
        self._release_blocks(request)
        if request.slot >= 0:
            heappush(self._free_slots, request.slot)
            request.slot = -1
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def abort(self, request_id: str) -> EngineRequest | None:
        """Finish by id, wherever the request is. None if there is none (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def park(self, request_id: str) -> None:
        """Downstream has no credit: pass the request over. Without effect on one that has finished."""
        if request := self._requests.get(request_id):
            request.parked = True

    def unpark(self, request_id: str) -> None:
        """Downstream has credit again. Without effect on a request that has finished."""
        if request := self._requests.get(request_id):
            request.parked = False

    def num_hit_tokens(self, request: EngineRequest) -> int:
        """Rows of a waiting request that the prefix cache holds at this moment and would spare it."""
        return len(self._hits(request)) * self.config.block_size

    def get(self, request_id: str) -> EngineRequest | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and blocks; idle and parked ones count."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not admitted yet, or preempted."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_parked(self) -> int:
        return sum(request.parked for request in self._requests.values())

    # -- the step ---------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether `schedule` would return a batch now."""
        # The first of the active requests can always run: it may take the blocks of every other one.
        if any(self._end(request, request.num_computed_tokens) for request in self._running):
            return True
        request = next(self._candidates(), None)
        if request is None:
            return False
        return self._fits(request, self._hits(request), [request for request in self._running if request.parked])

    def schedule(self, spare: Spare | None = None) -> ScheduledBatch | None:
        """The next step's rows, or None when no request can run. Gives out blocks; counts nothing as computed yet.

        All decode rows go first. With `spare`, prefill pieces of requests that are due later than a decode row share
        the rows that `spare` has beside it; without decode rows they have the whole budget, as without `spare`. A
        decode row that is due at -inf spares nothing and holds up nobody.
        """
        active: list[tuple[EngineRequest, int]] = []
        decodes: list[EngineRequest] = []
        for request in sorted(self._running, key=serving_order):
            end = self._end(request, request.num_computed_tokens)
            if end:
                active.append((request, end))
                if end == request.num_computed_tokens + 1:
                    decodes.append(request)

        singles: list[ScheduledRow] = []
        pieces: list[ScheduledRow] = []
        preempted: list[EngineRequest] = []
        room = self._prefill_room(decodes, spare)
        admits = True
        for request, end in active:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago, for one that is due earlier
            start = request.num_computed_tokens
            if end > start + 1:
                whole, end = end, self._cut(start, end, room.of(request))
                room.take(request, end - start, cut=end < whole)
                if end == start:
                    continue
            if not self._grow(request, end, preempted):
                admits = False
                continue
            row = ScheduledRow(request, start, end - start, self._samples(request, end))
            (singles if end == start + 1 else pieces).append(row)
        admitted: list[EngineRequest] = []
        if admits and not preempted and (self._preempted or self._waiting):
            self._admit(room, singles, pieces, preempted, admitted)
        rows = (*singles, *pieces)
        return ScheduledBatch(rows, tuple(preempted), tuple(admitted)) if rows else None

    def update(self, batch: ScheduledBatch) -> None:
        """The rows of `batch` were computed. Requests that finished meanwhile are passed over."""
        for row in batch.rows:
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.num_computed_tokens != row.start:
                raise RuntimeError(
                    f"request {request.request_id!r}: rows from {row.start} were computed, but the next one due is "
                    f"{request.num_computed_tokens}; call update once after each schedule"
                )
            request.num_computed_tokens = row.start + row.num_tokens
            if self.config.enable_prefix_caching:
                self.pool.cache_full_blocks(request)

    # -- rules ------------------------------------------------------------------------------------------------------

    def _end(self, request: EngineRequest, start: int) -> int:
        """Where a piece from row `start` would end under no budget; 0 when the request cannot run now."""
        end = request.num_tokens
        if end <= start or request.parked:
            return 0
        single_from = request.single_from
        # The rest of the prompt has not arrived: a cut like one of the budget, unless a piece always ends there.
        if end < request.num_prompt_tokens and end != single_from:
            end -= end % self.config.prefill_alignment
        if single_from is not None and end > single_from:
            end = single_from if start < single_from else start + 1
        return end if end > start else 0

    def _prefill_room(self, decodes: Sequence[EngineRequest], spare: Spare | None) -> PrefillRoom:
        """`decodes` are in order."""
        budget = self.config.max_num_batched_tokens - len(decodes)
        first = next((request for request in decodes if request.due_at > -inf), None)
        if spare is None or first is None:
            return PrefillRoom(budget, budget)
        return PrefillRoom(budget, spare(first.due_at), serving_order(first))

    def _cut(self, start: int, end: int, budget: int) -> int:
        """The end of a piece under a budget; `start` if not even one aligned cut fits."""
        if end - start > budget:
            end = start + budget
            end -= end % self.config.prefill_alignment
        return max(start, end)

    @staticmethod
    def _samples(request: EngineRequest, end: int) -> bool:
        return end == request.num_tokens and end == request.num_prompt_tokens + request.num_sampled

    def _grow(self, request: EngineRequest, end: int, preempted: list[EngineRequest]) -> bool:
        """Give a running request blocks up to row `end`, preempting others; False if all the rest are due earlier."""
        missing = self.pool.blocks_for(end) - len(request.block_ids)
        if missing <= 0:
            return True
        while self.pool.num_free < missing:
            yielding = (other for other in self._running if self._yields(other, request))
            victim = max(yielding, key=serving_order, default=None)
            if victim is None:
                return False
            self._preempt(victim, preempted)
        request.block_ids += self.pool.allocate(missing)
        return True

    def _yields(self, other: EngineRequest, request: EngineRequest) -> bool:
        if serving_order(other) > serving_order(request):
            return True
        return other is not request and not self._end(other, other.num_computed_tokens)

    def _preempt(self, request: EngineRequest, preempted: list[EngineRequest]) -> None:
        self._remove(self._running, request)
        self._release_blocks(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        insort(self._preempted, request, key=_arrival)
        self.num_preemptions += 1
        preempted.append(request)

    def _candidates(self) -> Iterator[EngineRequest]:
        """Requests without blocks that could run if they got some, in the order in which they are served."""
        for request in sorted(self._preempted, key=serving_order):
            if self._can_start(request):
                yield request
        if self._free_slots:
            for request in tuple(self._waiting.values()):
                if self._can_start(request):
                    yield request

    def _can_start(self, request: EngineRequest) -> bool:
        if request.absent_end and self.num_hit_tokens(request) < request.absent_end:
            return False
        return self._end(request, 0) > 0

    def _admit(
        self,
        room: PrefillRoom,
        singles: list[ScheduledRow],
        pieces: list[ScheduledRow],
        preempted: list[EngineRequest],
        admitted: list[EngineRequest],
    ) -> None:
        for request in self._candidates():
            if request.slot < 0 and not self._free_slots:
                return
            hits = self._hits(request)
            if not self._fits(request, hits):
                # Parked requests may stay so for long, and then nothing would run at all; idle ones go on soon.
                parked = sorted((other for other in self._running if other.parked), key=serving_order)
                if singles or pieces or not self._fits(request, hits, parked):
                    return
                while not self._fits(request, hits):
                    self._preempt(parked.pop(), preempted)
            start = len(hits) * self.config.block_size
            whole = self._end(request, start)
            end = self._cut(start, whole, room.of(request))
            room.take(request, end - start, cut=end < whole)
            if end > start:
                if request.num_preemptions == 0:
                    admitted.append(request)
                self._start(request, hits)
                row = ScheduledRow(request, start, end - start, self._samples(request, end))
                (singles if end == start + 1 else pieces).append(row)
            if room.budget <= 0:
                return

    def _hits(self, request: EngineRequest) -> list[int]:
        """Cached blocks to start from: whole aligned pieces, and never the last row, which has to run to draw."""
        if not self.config.enable_prefix_caching:
            return []
        self.pool.hash_blocks(request)
        hits = self.pool.match_prefix(request.token_ids, request.block_hashes)
        num_tokens = max(0, min(len(hits) * self.config.block_size, self._end(request, 0) - 1))
        return hits[: (num_tokens - num_tokens % self._hit_alignment) // self.config.block_size]

    def _fits(self, request: EngineRequest, hits: Sequence[int], yielding: Sequence[EngineRequest] = ()) -> bool:
        """Whether all known rows and one more have blocks, with those that only the `yielding` requests hold."""
        freed = self.pool.freed_by([other.block_ids for other in yielding]) if yielding else ()
        # A hit on a block that nobody holds takes that block off the free list.
        num_held = sum(not self.pool.is_free(block_id) and block_id not in freed for block_id in hits)
        num_needed = self.pool.blocks_for(min(request.num_tokens + 1, self.config.max_model_len))
        return num_needed - num_held <= self.pool.num_free + len(freed)

    def _start(self, request: EngineRequest, hits: list[int]) -> None:
        """WAITING -> RUNNING, with blocks for every known row, so that a prefill never waits half done."""
        if self._waiting.pop(request.request_id, None) is None:
            self._remove(self._preempted, request)
        if request.slot < 0:
            request.slot = heappop(self._free_slots)
        if self.config.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
        self.pool.share(hits)
        request.block_ids = hits + self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(hits))
        request.num_computed_tokens = len(hits) * self.config.block_size
        request.num_cached_blocks = len(hits)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=_arrival)

    def _release_blocks(self, request: EngineRequest) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []

    @staticmethod
    def _remove(requests: list[EngineRequest], request: EngineRequest) -> None:
        del requests[bisect_left(requests, request.arrival, key=_arrival)]
