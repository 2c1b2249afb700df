"""What drafting, verification and training need to know of a target: its layers, embedding, head, and layer taps."""

import contextlib
import threading

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_adaflash import AdaFlashConfig
from .errors import AdaFlashValueError
from .kernels.packed_linear import HalfPackedLinear, PackedLinear


class Target:
    """A causal language model as the package sees it. Modules are called, their weights never read, so quantised
    heads and device maps work; the one exception is `head_rows`, which falls back to the module.

    Args:
        model: the target, with a decoder that holds `layers`.
        config: the drafter's configuration; checked against the target.

    Raises:
        AdaFlashValueError: when target and drafter don't fit, naming the key.
    """

    def __init__(self, model: PreTrainedModel, config: AdaFlashConfig):
        self.model = model
        self.layer_ids = list(config.target_layer_ids)
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        text_config = model.config.get_text_config(decoder=True)
        self.layers = getattr(model.get_decoder(), "layers", None)
        self.windows: dict[nn.Module, int | None] = {}  # sliding windows of attention modules, as passes meet them
        name = type(model).__name__
        if self.layers is None or self.head is None:
            raise AdaFlashValueError(
                f"{name} has no decoder `layers` or no output embedding to draft with: use a decoder-only target."
            )
        if text_config.hidden_size != config.hidden_size:
            raise AdaFlashValueError(
                f"`hidden_size` of the drafter is {config.hidden_size} but the target's is {text_config.hidden_size}: "
                "load the drafter that was trained for this target."
            )
        if text_config.vocab_size != config.vocab_size:
            raise AdaFlashValueError(
                f"`vocab_size` of the drafter is {config.vocab_size} but the target's is {text_config.vocab_size}: "
                "load the drafter that was trained for this target."
            )
        rows = self.embedding.num_embeddings
        if config.mask_token_id >= rows:
            raise AdaFlashValueError(
                f"`mask_token_id` is {config.mask_token_id} but the target's embedding has {rows} rows: "
                "resize the embedding or use a drafter with another mask token."
            )
        if max(self.layer_ids) >= len(self.layers):
            raise AdaFlashValueError(
                f"`target_layer_ids` contains {max(self.layer_ids)} but the target has {len(self.layers)} layers: "
                "load the drafter that was trained for this target."
            )
        if config.num_target_layers not in (None, len(self.layers)):
            raise AdaFlashValueError(
                f"`num_target_layers` of the drafter is {config.num_target_layers} but the target has "
                f"{len(self.layers)} layers: load the drafter that was trained for this target."
            )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., d]` of anchor and mask tokens. An `embed_norm` inside the embedding module (Muse-Glimmer)
        is left out, as in transformers' own DFlash route."""
        if getattr(self.embedding, "embed_norm", None) is not None:
            return nn.Embedding.forward(self.embedding, token_ids)
        return self.embedding(token_ids)

    @contextlib.contextmanager
    def taps(self):
        """While open, every forward pass of the target in this thread adds to the yielded dict: layer id -> outputs
        `[b, n, d]`."""
        captured: dict[int, list[torch.Tensor]] = {i: [] for i in self.layer_ids}
        thread = threading.get_ident()

        def hook(layer_id):
            def capture(module, args, output):
                if threading.get_ident() == thread:
                    captured[layer_id].append(output[0] if isinstance(output, tuple) else output)

            return capture

        handles = [self.layers[i].register_forward_hook(hook(i)) for i in dict.fromkeys(self.layer_ids)]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def features(self, captured: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        """Concatenates tapped outputs of all passes to `[b, n, T*d]`, in the order of `target_layer_ids`.

        Raises:
            AdaFlashValueError: for layers with several streams of hidden states (Gemma 3n).
        """
        first = captured[self.layer_ids[0]][0]
        if first.dim() != 3:
            raise AdaFlashValueError(
                f"The layers of {type(self.model).__name__} give {first.dim()}-dimensional outputs, which no drafter "
                "reads: generate without the drafter."
            )
        device = first.device
        return torch.cat([torch.cat([part.to(device) for part in captured[i]], dim=1) for i in self.layer_ids], dim=-1)

    def head_rows(self, token_ids: torch.Tensor | None, half: bool = False):
        """A function from hidden states `[..., d]` to logits over `token_ids` (all tokens when `None`).

        A plain `nn.Linear` head gives up just these rows, packed if it is (as float16 when `half`, for drafts); any
        other head is called whole and its output indexed.
        """
        if token_ids is None:
            return lambda hidden: self.head(hidden.to(self._head_dtype()))
        if not self._head_is_dense():
            return lambda hidden: self.head(hidden.to(self._head_dtype()))[..., token_ids.to(hidden.device)]
        rows = token_ids.to(self.head.weight.device)
        if isinstance(self.head, PackedLinear):
            packed = self.head.rows(rows, half or isinstance(self.head, HalfPackedLinear))
            return lambda hidden: packed(hidden.to(self.head.weight))
        weight = self.head.weight.detach()[rows]
        bias = None if self.head.bias is None else self.head.bias.detach()[rows]
        return lambda hidden: nn.functional.linear(hidden.to(weight), weight, bias)

    def _head_is_dense(self) -> bool:
        """Whether the head is nothing but its weight: no quantised subclass, no adapter, no hook, not offloaded."""
        head = self.head
        hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
        return (
            type(head) in (nn.Linear, PackedLinear, HalfPackedLinear)
            and not hooked
            and type(head.weight) is nn.Parameter
        )

    def _head_dtype(self) -> torch.dtype:
        # A quantised head has no floating-point weight; it takes the model's own dtype.
        weight = getattr(self.head, "weight", None)
        return weight.dtype if torch.is_tensor(weight) and weight.is_floating_point() else self.model.dtype
