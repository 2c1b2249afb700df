"""The adaptive length head: from a drafter's hidden states, how much of a block is worth verifying.

It reads hidden states only, never sampled tokens, so that a length chosen with it leaves rejection sampling exact
(non-anticipation). AdaFlash (arXiv 2607.19223) describes the `length` kind; `survival` is ours.
"""

import torch
from torch import nn

from .configuration_adaflash import AdaptiveLengthConfig
from .hub import HubModel


class AdaptiveLengthHead(HubModel):
    """Bottleneck network over `[mean over the block; one position]`.

    `length` looks at the last position and answers one logit per block, whose sigmoid times the block size is the
    candidate length, anchor slot included. `survival` looks at each drafted position and answers one logit for each.
    """

    config_class = AdaptiveLengthConfig
    base_model_prefix = "length_head"
    main_input_name = "hidden_states"

    def __init__(self, config: AdaptiveLengthConfig):
        super().__init__(config)
        config.check_complete()
        self.down = nn.Linear(2 * config.hidden_size, config.bottleneck_size)
        self.res = nn.Linear(config.bottleneck_size, config.bottleneck_size)
        self.out = nn.Linear(config.bottleneck_size, 1)
        self.position_bias = (
            nn.Parameter(torch.zeros(config.num_drafted_tokens)) if config.kind == "survival" else None
        )
        scaled = config.kind == "survival" and config.calibrated
        self.register_buffer("position_scale", torch.ones(config.num_drafted_tokens) if scaled else None)
        self.post_init()

    @torch.no_grad()
    def recalibrate(self, temperature: torch.Tensor, bias: torch.Tensor) -> None:
        """Makes every later logit the present one divided by `temperature`, plus `bias`.

        Args:
            temperature, bias: `[num_drafted_tokens]` for `survival`, by position; `[1]` for `length`, where both go
                into the last layer, so that the checkpoint keeps AdaFlash's layout.
        """
        temperature, bias = temperature.to(self.out.weight), bias.to(self.out.weight)
        if self.config.kind == "length":
            self.out.weight /= temperature
            self.out.bias.copy_(self.out.bias / temperature + bias)
            return
        scale = torch.ones_like(temperature) if self.position_scale is None else self.position_scale
        self.position_scale = scale / temperature
        self.position_bias.copy_(self.position_bias / temperature + bias)
        self.config.calibrated = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Args:
            hidden_states: `[n, block_size, hidden_size]`, the drafter's final hidden states of n blocks; for
                `survival`, blocks may have fewer slots.

        Returns:
            Logits in the head's dtype: `[n]` for `length`; for `survival` one for each drafted slot,
            `[n, num_drafted_tokens]` for whole blocks.
        """
        hidden_states = hidden_states.to(self.down.weight.dtype)
        mean = hidden_states.mean(dim=1, keepdim=True)
        if self.config.kind == "length":
            position = hidden_states[:, -1:]
        else:
            position = hidden_states[:, self.config.block_size - self.config.num_drafted_tokens :]
        z = nn.functional.silu(self.down(torch.cat([mean.expand_as(position), position], dim=-1)))
        z = z + nn.functional.silu(self.res(z))
        logits = self.out(z).squeeze(-1)
        if self.config.kind == "length":
            return logits.squeeze(-1)
        depth = logits.shape[-1]
        if self.position_scale is not None:
            logits = logits * self.position_scale[:depth]
        return logits + self.position_bias[:depth]

    def candidate_lengths(self, hidden_states, rate: float = 1.0, minimum: int = 1, threshold: float = 0.1):
        """Candidate lengths `[n]` (int64), anchor slot included: length c verifies c - 1 drafted tokens.

        `length`: clamp(round(sigmoid(logit) * block_size * rate), minimum, longest), AdaFlash's rule.
        `survival`: one more than the leading positions whose running product of probabilities reaches `threshold`.
        """
        longest = self.config.num_drafted_tokens + 1
        logits = self(hidden_states).float()
        if self.config.kind == "length":
            lengths = torch.round(logits.sigmoid() * self.config.block_size * rate).long()
        else:
            lengths = 1 + (self.survival(logits) >= threshold).sum(dim=-1)
        return lengths.clamp(min(minimum, longest), longest)

    @staticmethod
    def survival(logits: torch.Tensor) -> torch.Tensor:
        """Probability `[n, k]` that position k and all before it are accepted, from the `survival` logits `[n, k]`."""
        return logits.float().sigmoid().cumprod(dim=-1)


__all__ = ["AdaptiveLengthHead"]
