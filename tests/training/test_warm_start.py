"""A warm-started layer does to a block what the target's layer does to a sequence."""

import pytest
import torch
from tiny import make_drafter, make_target

from adaflash_hf import AdaFlashValueError
from adaflash_hf.training.warm_start import warm_start


def randomise_norms(model):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_copied_layers_compute_what_the_targets_last_layers_do(name):
    target = make_target(name)
    randomise_norms(target)
    rope = dict(target.config.rope_parameters)
    drafter = make_drafter(use_qk_norm=name == "qwen3", rope_parameters=rope, rms_norm_eps=target.config.rms_norm_eps)
    warm_start(drafter, target)
    ids = torch.randint(2, 32, (1, 5))
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
        # Without context a block of the same hidden states, under a causal mask, is the target's own last layers.
        causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
        ours = drafter(
            noise_embeds=states[2],
            context_hidden_states=torch.zeros(1, 0, 64),
            attention_mask={"full_attention": causal},
            position_ids=torch.arange(5)[None],
        ).last_hidden_state
    torch.testing.assert_close(ours, states[-1], rtol=1e-4, atol=1e-4)


def test_the_context_starts_as_the_deepest_tap_normed():
    target, drafter = make_target("qwen3"), make_drafter(target_layer_ids=[2, 0])
    warm_start(drafter, target)
    features = torch.randn(1, 3, 64)
    expected = torch.nn.functional.rms_norm(features[..., :32], (32,), eps=drafter.config.rms_norm_eps)
    torch.testing.assert_close(drafter.project_context(features), expected)


@pytest.mark.parametrize(
    "name, overrides",
    [("llama", {"use_qk_norm": True}), ("qwen3", {"intermediate_size": 40}), ("gemma3", {}), ("qwen2", {})],
)
def test_other_layers_are_refused_and_nothing_is_changed(name, overrides):
    target, drafter = make_target(name), make_drafter(**overrides)
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    randomise_norms(target)
    for parameter in target.parameters():
        parameter.data.add_(0.01)
    with pytest.raises(AdaFlashValueError, match="warm_start"):
        warm_start(drafter, target)
    for key, value in drafter.state_dict().items():
        assert torch.equal(value, before[key])
