"""Linear layers with weights packed for oneDNN, so that on a CPU verifying a few tokens costs about what one costs.

PyTorch's CPU matmul re-packs a float32 weight on every call with 2 or more rows: measured here (two Zen 3 cores),
2 rows cost 1.8 times 1 row. Packed once, 2 to 4 rows cost 1.0 to 1.1 times 1 row, and 1 row gets faster too. So plain
`generate` on a packed model is the fair baseline for drafting on it. Sums are taken in another order, so outputs
differ from the unpacked model by rounding.

Inference only: the packed copy doesn't follow later changes of the weight. Call `pack_linear_weights` again after one.
"""

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """An `nn.Linear` that also holds its weight packed. Its parameters are untouched, so saving works as before."""

    packed: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.is_grad_enabled():
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the weight can be packed: dense float32 on a CPU whose build has oneDNN."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type == "cpu"
    return plain and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def packed_function(weight: torch.Tensor, bias: torch.Tensor | None = None):
    """A function from `[..., in]` to `[..., out]`, packed when the weight `[out, in]` can be."""
    weight = weight.detach()
    if not can_pack(weight):
        return lambda x: nn.functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def linear(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # the packed product has no gradient
            return nn.functional.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return linear


@torch.no_grad()
def pack_linear_weights(model: nn.Module) -> int:
    """Packs every plain `nn.Linear` of a model in place, for inference on a CPU.

    Costs a second copy of these weights in memory. Quantised layers, other devices and subclasses are left alone.

    Returns:
        How many layers are packed; 0 means the model runs as before.
    """
    count = 0
    for module in model.modules():
        if type(module) in (nn.Linear, PackedLinear) and can_pack(module.weight):
            module.__class__ = PackedLinear
            module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
            count += 1
    return count
