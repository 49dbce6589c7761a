"""Drawing one token from each row of logits. Owns per-slot parameters and token counts; knows nothing of scheduling.

What keeps a row's result independent of the rows beside it is in `draw`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.config.sampling import SamplingParams
from triptych.engine.compiled_draw import compiled_draw
from triptych.engine.draw import GREEDY, Cuts, invert, keep_at_least, nucleus_cut, token_weights, top_cut
from triptych.engine.random_stream import UniformBlocks
from triptych.errors import RequestError

_MAX_VOCAB = 2**18  # keeps sums of weights below 2^53
_SHALLOW = 256  # rows with a top_k up to this are ranked together, apart from those with a larger one
_MAX_ALTERNATIVES = 20  # of SamplingParams.logprobs
_MAX_PLANS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log probability of the drawn token and the most likely tokens as (id, log probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """`token_ids` int64 [B] and `finite` bool [B] on the device. Ids are always valid; where `finite` is False they
    mean nothing, because the row's logits held NaN or +inf or left no token. `logprobs` has an entry for each row that
    asked and None for the others; it is None when no row asked."""

    token_ids: Tensor
    finite: Tensor
    logprobs: list[Logprob | None] | None

    @property
    def bad(self) -> list[int]:
        """Rows without a usable token. Waits for the device, so read it when the token ids are copied out."""
        return [row for row, finite in enumerate(self.finite.tolist()) if not finite]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truncation:
    """Rows of a batch that are truncated by one pass; columns are [rows, 1]."""

    rows: Tensor | None  # None: all
    depth: int  # 0: top_p alone
    last: Tensor
    top_p: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that a batch of slots asks for, on the device; a steady batch builds it once. Columns are [B, 1]."""

    slots: Tensor
    drawn: Tensor | None  # 1 for rows that use their uniform number, 0 for greedy ones; None: all are greedy
    cuts: Cuts
    truncations: tuple[_Truncation, ...]  # what top_k and top_p of `cuts` ask for, in few passes
    has_min_p: bool
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, token ids, what to add
    logprobs: tuple[tuple[int, int], ...]  # (row, how many alternatives)


class Sampler:
    """Draws the tokens of the requests in `num_slots` slots over `vocab_size` ids, never one of `suppress`.

    Order of operations, HF's: repetition penalty (prompt and output), presence and frequency penalties (output only),
    logit bias, suppression, temperature, top_k, top_p, min_p. A temperature below 1e-5 takes the first largest logit.
    On a CPU compiled code draws, unless it is `eager` or there is no compiler.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str,
        suppress: Sequence[int] = (),
        eager: bool = False,
    ) -> None:
        if not 0 < vocab_size <= _MAX_VOCAB:
            raise ValueError(f"vocab_size must be between 1 and {_MAX_VOCAB}, not {vocab_size}")
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._compiled = None if eager or self._device.type != "cpu" else compiled_draw(vocab_size)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._seeds = [0] * num_slots
        self._uniforms: dict[int, UniformBlocks] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        # [num_slots, V] float32, there once a request needs them: what to divide or multiply a logit by, and how often
        # each token was drawn.
        self._factors: Tensor | None = None
        self._counts: Tensor | None = None
        self._suppress: Tensor | None = None
        if suppress:
            self._suppress = torch.zeros(vocab_size, device=self._device)
            self._suppress[self._token_ids(suppress)] = -torch.inf

    @torch.no_grad()
    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Give `slot` to a new request, or to a preempted one that has drawn `output_token_ids` before.

        `params.seed` None takes a fresh seed. Raises RequestError for a logit bias outside the vocabulary, ValueError
        for prompt or output ids outside it.
        """
        wrong = [token for token in params.logit_bias if not 0 <= token < self._vocab_size]
        if wrong:
            raise RequestError(f"token id {wrong[0]} is not in 0..{self._vocab_size - 1}", param="logit_bias")
        if params.repetition_penalty != 1.0:
            if self._factors is None:
                self._factors = torch.ones(self._num_slots, self._vocab_size, device=self._device)
            seen = self._token_ids(sorted({*prompt_token_ids, *output_token_ids}))
            self._factors[slot] = 1.0
            self._factors[slot, seen] = params.repetition_penalty
        elif self._factors is not None:
            self._factors[slot] = 1.0  # the factors of all rows are applied where one row has a penalty
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            if self._counts is None:
                self._counts = torch.zeros(self._num_slots, self._vocab_size, device=self._device)
            output = self._token_ids(output_token_ids)
            self._counts[slot] = torch.bincount(output, minlength=self._vocab_size).float()
        self._params[slot] = params
        self._seeds[slot] = secrets.randbits(64) if params.seed is None else params.seed
        for blocks in self._uniforms.values():
            blocks.admit(slot, self._seeds[slot])
        self._plans.clear()

    def release(self, slot: int) -> None:
        """Take the slot back; harmless when it is free."""
        self._params[slot] = None
        self._plans.clear()

    @torch.no_grad()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], stream: int) -> Sampled:
        """Draw a token for each row of logits [B, V] (left as they are) and count it. slots[i] differ.

        positions[i] is how many tokens the request of slots[i] has drawn before: with its seed and `stream` it fixes
        the random number. Log probabilities are those of the raw logits, as OpenAI reports them: log_softmax before
        penalties, bias, temperature and truncation. Only they make the call wait for a CUDA device.
        """
        plan = self._plan(tuple(slots))
        x = self._processed(logits, plan)
        peak = x.amax(-1, keepdim=True)
        if plan.drawn is None:
            token_ids = x.argmax(-1)
        else:
            uniforms = self._draw(slots, positions, stream) * plan.drawn
            if self._compiled is not None:
                token_ids = self._compiled(x, uniforms, plan.cuts)
            else:
                token_ids = invert(self._truncated(x, peak, plan), uniforms)
        if plan.repetition is not None and self._factors is not None:
            self._factors.index_put_((plan.slots, token_ids), plan.repetition.squeeze(1))
        if plan.presence is not None and self._counts is not None:
            one = torch.ones((), device=self._device)
            self._counts.index_put_((plan.slots, token_ids), one, accumulate=True)
        logprobs = self._logprobs(logits, token_ids, plan) if plan.logprobs else None
        return Sampled(token_ids=token_ids, finite=peak.squeeze(1).isfinite(), logprobs=logprobs)

    @torch.no_grad()
    def probabilities(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """What `sample` would draw from, float64 [B, V]; for a greedy row, 1 shared by all its largest logits."""
        plan = self._plan(tuple(slots))
        x = self._processed(logits, plan)
        weights = self._truncated(x, x.amax(-1, keepdim=True), plan).double()
        return weights / weights.sum(-1, keepdim=True)

    def _processed(self, logits: Tensor, plan: _Plan) -> Tensor:
        x = logits.float() if self._suppress is None else logits + self._suppress
        if plan.repetition is not None and self._factors is not None:
            factor = self._factors[plan.slots]
            positive = x.clamp(min=0.0)
            # Positive logits are divided and negative ones multiplied; each sum has one term that is zero.
            x = (x - positive).mul_(factor).add_(positive.div_(factor))
        if plan.presence is not None and plan.frequency is not None and self._counts is not None:
            count = self._counts[plan.slots]
            x = x - (count * plan.frequency).add_(count.clamp(max=1.0).mul_(plan.presence))
        if plan.bias is not None:
            rows, token_ids, values = plan.bias
            x = x.index_put((rows, token_ids), values, accumulate=True)
        return x

    def _truncated(self, x: Tensor, peak: Tensor, plan: _Plan) -> Tensor:
        """The weights [B, V] to draw from."""
        weights = token_weights(x, peak, plan.cuts.temperature.unsqueeze(1))
        cut = plan.cuts.least.unsqueeze(1) if plan.has_min_p else None
        for part in plan.truncations:
            rows = weights if part.rows is None else weights[part.rows]
            if part.depth:
                smallest = top_cut(rows, part.depth, part.last, part.top_p)
            else:
                smallest = nucleus_cut(rows, 1.0 if part.top_p is None else part.top_p)
            if part.rows is not None:
                smallest = torch.zeros_like(peak).index_copy_(0, part.rows, smallest)
            cut = smallest if cut is None else torch.maximum(cut, smallest)
        if cut is not None:
            keep_at_least(weights, cut)
        return weights

    def _draw(self, slots: Sequence[int], positions: Sequence[int], stream: int) -> Tensor:
        blocks = self._uniforms.get(stream)
        if blocks is None:
            blocks = self._uniforms[stream] = UniformBlocks(self._num_slots, [stream])
            for slot, seed in enumerate(self._seeds):
                blocks.admit(slot, seed)
        return torch.from_numpy(blocks.take(slots, positions)).to(self._device, non_blocking=True)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, plan: _Plan) -> list[Logprob | None]:
        rows = [row for row, _ in plan.logprobs]
        index = torch.tensor(rows, device=self._device)
        scores = logits[index].float().log_softmax(-1)
        ids = token_ids[index]
        best = scores.topk(min(_MAX_ALTERNATIVES, self._vocab_size), -1)
        columns = (ids, scores.gather(1, ids.unsqueeze(1)).squeeze(1), best.values, best.indices)
        found: list[Logprob | None] = [None] * token_ids.shape[0]
        for (row, count), token, score, values, indices in zip(
            plan.logprobs, *(column.tolist() for column in columns), strict=True
        ):
            ranked = sorted(zip(indices, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            found[row] = Logprob(token_id=token, logprob=score, top=tuple(ranked[:count]))
        return found

    def _plan(self, slots: tuple[int, ...]) -> _Plan:
        plan = self._plans.get(slots)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[slots] = self._build_plan(slots)
        return plan

    def _build_plan(self, slots: tuple[int, ...]) -> _Plan:
        rows = [self._params[slot] for slot in slots]
        params = [row for row in rows if row is not None]
        if len(params) < len(rows):
            raise ValueError(f"slot {slots[rows.index(None)]} holds no request: admit it before sampling")
        greedy = [row.temperature < GREEDY for row in params]
        bias = [(i, token, value) for i, row in enumerate(params) for token, value in row.logit_bias.items()]
        penalised = any(row.presence_penalty or row.frequency_penalty for row in params)
        bias_rows, bias_ids, bias_values = zip(*bias, strict=True) if bias else ((), (), ())
        return _Plan(
            slots=torch.tensor(slots, device=self._device),
            drawn=None if all(greedy) else self._column([0.0 if cold else 1.0 for cold in greedy]),
            cuts=Cuts.of(params, self._vocab_size, self._device),
            truncations=self._truncations([None if cold else row for row, cold in zip(params, greedy, strict=True)]),
            has_min_p=any(row.min_p for row in params),
            repetition=self._column([row.repetition_penalty for row in params])
            if any(row.repetition_penalty != 1.0 for row in params)
            else None,
            presence=self._column([row.presence_penalty for row in params]) if penalised else None,
            frequency=self._column([row.frequency_penalty for row in params]) if penalised else None,
            bias=(
                torch.tensor(bias_rows, device=self._device),
                torch.tensor(bias_ids, device=self._device),
                torch.tensor(bias_values, dtype=torch.float32, device=self._device),
            )
            if bias
            else None,
            logprobs=tuple((i, row.logprobs) for i, row in enumerate(params) if row.logprobs is not None),
        )

    def _truncations(self, params: Sequence[SamplingParams | None]) -> tuple[_Truncation, ...]:
        """Rows with a small top_k, with a large one, and with top_p alone. Results do not depend on this grouping."""
        shallow: list[int] = []
        deep: list[int] = []
        nucleus: list[int] = []
        for i, row in enumerate(params):
            if row is not None and 0 < row.top_k < self._vocab_size:
                (shallow if row.top_k <= _SHALLOW else deep).append(i)
            elif row is not None and row.top_p < 1.0:
                nucleus.append(i)
        found = []
        for members in (shallow, deep, nucleus):
            if not members:
                continue
            chosen = [row for i in members if (row := params[i]) is not None]
            found.append(
                _Truncation(
                    rows=None if len(members) == len(params) else torch.tensor(members, device=self._device),
                    depth=0 if members is nucleus else max(row.top_k for row in chosen),
                    last=torch.tensor([[row.top_k - 1] for row in chosen], device=self._device),
                    top_p=self._column([row.top_p for row in chosen], torch.float64)
                    if any(row.top_p < 1.0 for row in chosen)
                    else None,
                )
            )
        return tuple(found)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(1)

    def _token_ids(self, token_ids: Sequence[int]) -> Tensor:
        wrong = [token for token in token_ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is not in 0..{self._vocab_size - 1}")
        return torch.tensor(token_ids, dtype=torch.int64, device=self._device)
