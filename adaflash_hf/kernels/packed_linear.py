"""Linear layers with weights packed for oneDNN, so that on a CPU verifying a few tokens costs about what one costs.

PyTorch's CPU matmul re-packs a float32 weight on every call with 2 or more rows: measured here (two Zen 3 cores),
2 rows cost 1.8 times 1 row. Packed once, 2 to 4 rows cost 1.0 to 1.1 times 1 row, and 1 row gets faster too. So plain
`generate` on a packed model is the fair baseline for drafting on it. Sums are taken in another order, so outputs
differ from the unpacked model by rounding.

In bfloat16, where the processor computes in it, a pass of SmolLM2-135M over 1 to 8 tokens takes 28 to 32 ms packed and
40 to 44 unpacked, one token in 32 rows 99 and 117 (measured on two Zen 4 cores).

A float32 drafter's weights may also be packed as float16 (`half`), with sums in float32: half the memory traffic, of
which the draft of a few rows consists (measured here: a block through a layer takes 0.6 times as long). That moves
drafts by a rounding error and so changes which tokens are proposed, never which come out.

Inference only: the packed copy doesn't follow later changes of the weight. Call `pack_linear_weights` again after one.
"""

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """An `nn.Linear` that also holds its weight packed. Its parameters are untouched, so saving works as before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.is_grad_enabled():
            return super().forward(x)
        return self.packed(x)

    def rows(self, index: torch.Tensor, half: bool = False):
        """A function from `[..., in]` to the outputs `index` `[n]`, packed. The latest one is kept, since packing
        takes longer than using it."""
        if self._rows is None or self._rows[1] != half or not torch.equal(self._rows[0], index):
            bias = None if self.bias is None else self.bias.detach()[index]
            self._rows = index.clone(), half, packed_function(self.weight.detach()[index], bias, half)
        return self._rows[2]


class HalfPackedLinear(PackedLinear):
    """A `PackedLinear` whose packed weight is float16."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the weight can be packed: dense float32 or bfloat16 on a CPU whose build has oneDNN, the latter where
    oneDNN computes in it."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type == "cpu"
    if not (plain and torch.backends.mkldnn.is_available()):
        return False
    half = weight.dtype == torch.bfloat16
    return weight.dtype == torch.float32 or (half and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack_half(weight: torch.Tensor) -> bool:
    """Whether it can also be packed as float16: in its range, and FBGEMM (x86 only) is there."""
    fits = (
        can_pack(weight) and weight.dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines
    )
    return fits and bool(weight.abs().max() <= torch.finfo(torch.float16).max)


class _Product:
    """From `[..., in]` in the weight's dtype to `[..., out]`, without a gradient, for a weight that can be packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, half: bool):
        self.half, self.bias = half and can_pack_half(weight), bias
        if self.half:
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.half:
            return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo):
        return self  # read only, and a packed weight can't be copied


def packed_function(weight: torch.Tensor, bias: torch.Tensor | None = None, half: bool = False):
    """A function from `[..., in]` to `[..., out]`, packed when the weight `[out, in]` can be."""
    weight = weight.detach()
    product = _Product(weight, bias, half) if can_pack(weight) else None

    def linear(x: torch.Tensor) -> torch.Tensor:
        if product is None or torch.is_grad_enabled():  # the packed product has no gradient
            return nn.functional.linear(x, weight, bias)
        return product(x)

    return linear


@torch.no_grad()
def pack_linear_weights(model: nn.Module, half: bool = False) -> int:
    """Packs every plain `nn.Linear` of a model in place, for inference on a CPU.

    Costs a second copy of these weights in memory. Quantised layers, other devices and subclasses are left alone.

    Args:
        half: pack as float16 where that can be. For a drafter; a target's own outputs would be rounded.

    Returns:
        How many layers are packed; 0 means the model runs as before.
    """
    count = 0
    for module in model.modules():
        if type(module) in (nn.Linear, PackedLinear, HalfPackedLinear) and can_pack(module.weight):
            module.packed = _Product(module.weight.detach(), module.bias, half)
            module.__class__ = HalfPackedLinear if module.packed.half else PackedLinear
            module._rows = None
            count += 1
    return count
