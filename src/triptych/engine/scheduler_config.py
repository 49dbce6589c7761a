"""The limits a scheduler works under."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.schema import StageConfig
from triptych.errors import ConfigError

# Eager prefills attend in cells of this many rows, at absolute positions, and the scheduler cuts them nowhere else: a
# row's arithmetic is then the same however the token budget cut its prompt. That of compiled layers always is.
PREFILL_CELL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine. Raises ConfigError when they cannot serve even one request to its end.

    `num_blocks` counts the trash block. Where the token budget cuts a prefill, and where a prefix-cache hit ends, the
    row index is a multiple of `prefill_alignment`: then the shapes in which a prompt is computed do not depend on the
    load. 1 cuts anywhere.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    prefill_alignment: int = 1
    enable_prefix_caching: bool = False

    def __post_init__(self) -> None:
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "prefill_alignment")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)} is not at least 1", name)
        # The other sequences may each take one row, and what is left must still move a prefill on.
        least = self.max_num_seqs - 1 + self.prefill_alignment
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"{self.max_num_batched_tokens} is too few: max_num_seqs {self.max_num_seqs} - 1 decode rows and one "
                f"prefill piece of {self.prefill_alignment} rows make {least}; raise max_num_batched_tokens to that or "
                "lower max_num_seqs",
                "max_num_batched_tokens",
            )
        needed = -(-self.max_model_len // self.block_size) + 1
        if self.num_blocks < needed:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.block_size} rows do not hold one sequence of max_model_len "
                f"{self.max_model_len}: that takes {needed}, one of them for padding; give the cache more memory or "
                f"lower max_model_len to {max(0, self.num_blocks - 1) * self.block_size}",
                "num_kv_blocks",
            )


def scheduler_config(stage: StageConfig, num_blocks: int, *, by_row: bool = False) -> SchedulerConfig:
    """The limits that a resolved deploy config sets for one of its engines. Raises ConfigError as SchedulerConfig.

    `by_row`: a row's arithmetic does not depend on where its prompt is cut.
    """
    return SchedulerConfig(
        max_num_seqs=stage.max_num_seqs,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        max_model_len=stage.max_model_len,
        block_size=stage.block_size,
        num_blocks=num_blocks,
        prefill_alignment=PREFILL_CELL if stage.batch_invariant and not by_row else 1,
        enable_prefix_caching=stage.enable_prefix_caching,
    )
