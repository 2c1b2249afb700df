"""The length policy's place in the loop, as a LogitsProcessor on the draft's scores.

A drafted position that is not to be verified is *masked*: the mask token is its only possible token. The candidate
generator ends a candidate at the first masked position, so any draft-side processor can shorten a draft the same way.
Lengths are chosen from hidden states, before any token is drawn: a choice that looked at a drawn token would change
the output's distribution (DSpark, arXiv 2607.05147, appendix A).
"""

import torch
from transformers import LogitsProcessor

from ..configuration_adaflash import AdaFlashGenerationConfig
from ..errors import AdaFlashValueError
from ..modeling_length_head import AdaptiveLengthHead


class AdaptiveLengthLogitsProcessor(LogitsProcessor):
    """Chooses how many drafted tokens of each block to verify, and masks the rest.

    Args:
        config: the policy settings, usually `drafter.generation_config`.
        num_drafted_tokens: drafted positions of a block.
        mask_token_id: the drafter's mask token.
        length_head: the drafter's head; required by the `head` policy.

    Raises:
        AdaFlashValueError: when the policy is `head` and there is no head.

    Without costs to weigh (transformers' own loop), the `budget` policy chooses as `head` does, or as `fixed` does
    where there is no head.
    """

    def __init__(
        self,
        config: AdaFlashGenerationConfig,
        num_drafted_tokens: int,
        mask_token_id: int,
        length_head: AdaptiveLengthHead | None = None,
    ):
        self.policy = config.length_policy
        if self.policy == "head" and length_head is None:
            raise AdaFlashValueError(
                "`length_policy` is 'head' but the drafter carries no length head: use 'fixed', or load a drafter "
                "with a head."
            )
        self.config = config
        self.mask_token_id = mask_token_id
        self.length_head = length_head
        self.most = num_drafted_tokens
        if config.num_assistant_tokens is not None:
            self.most = min(self.most, config.num_assistant_tokens)
        self.draft_lengths: torch.Tensor | None = None
        self.anchor_length = 0

    def choose(self, hidden_states: torch.Tensor, room: torch.Tensor, anchor_length: int = 0) -> torch.Tensor:
        """Drafted tokens to verify per block, int64 `[n]`.

        Args:
            hidden_states: `[n, block_size, d]`, the drafter's final hidden states.
            room: int64 `[n]`, drafted tokens that still fit into the row.
            anchor_length: tokens up to and with the anchor, so that `__call__` knows which position it is given.
        """
        lengths = torch.full_like(room, self.most)
        if self.policy == "head" or (self.policy == "budget" and self.length_head is not None):
            candidate = self.length_head.candidate_lengths(
                hidden_states,
                rate=self.config.length_rate,
                minimum=self.config.min_candidate_length,
                threshold=self.config.survival_threshold,
            )
            lengths = torch.minimum(lengths, candidate.to(lengths.device) - 1)
        self.draft_lengths = torch.minimum(lengths, room).clamp(min=0)
        self.anchor_length = anchor_length
        return self.draft_lengths

    def survival(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Probability `[n, most]` that a drafted position and all before it are accepted, by the length head; `None`
        without a head. A `length` head names a length but no spread: a logistic of width 1/2 stands for it."""
        if self.length_head is None:
            return None
        logits = self.length_head(hidden_states).float()
        if self.length_head.config.kind == "survival":
            return self.length_head.survival(logits)[:, : self.most]
        accepted = logits.sigmoid()[:, None] * self.length_head.config.block_size * self.config.length_rate - 1
        depth = torch.arange(1, self.most + 1, device=logits.device)
        return (2 * (accepted - depth) + 1).sigmoid()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Masks the rows `[n, V]` of one drafted position, the one after `input_ids` `[n, L]`, that lie past the
        chosen length."""
        position = input_ids.shape[1] - self.anchor_length
        past = (position >= self.draft_lengths.to(scores.device))[:, None]
        only_mask = torch.full_like(scores, float("-inf"))
        only_mask[:, self.mask_token_id] = 0.0
        return torch.where(past, only_mask, scores)


def is_masked(scores: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """Which rows of `scores` `[n, V]` leave only the mask token, bool `[n]`."""
    others = scores.clone()
    others[:, mask_token_id] = float("-inf")
    return torch.isneginf(others).all(dim=-1)
