"""The decoding loop on the Triton path. The whole generate suite can run so too: `pytest tests/generation --kernels
triton`, slowly in the interpreter, and by itself on a GPU."""

import pytest
import torch
from tiny import make_drafter, make_target, ragged_prompts

from adaflash_hf import AdaFlashError, collect_statistics
from adaflash_hf.kernels import use_backend


GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.mark.parametrize("name, head", [("llama", None), ("gemma3", "survival")])
def test_greedy_batch_equals_plain(device, oracle, name, head):
    """Ragged prompts, rows that accept different lengths, sliding windows that are crossed."""
    target, drafter = make_target(name).to(device), make_drafter(head=head).to(device)
    ids, mask = (tensor.to(device) for tensor in ragged_prompts((3, 12)))
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(plain)
    with use_backend("triton"), collect_statistics() as statistics:
        ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    assert torch.equal(ours, plain)
    assert max(max(lengths, default=0) for lengths in statistics[0].accepted_lengths) > 1


@pytest.mark.parametrize("draft_vocab_size, options", [(None, {"temperature": 0.7, "top_k": 0}), (20, {"top_k": 5})])
def test_sampling_equals_the_twins(device, draft_vocab_size, options):
    """Same seed, same tokens, whichever implementation runs."""
    target, drafter = make_target().to(device), make_drafter(draft_vocab_size=draft_vocab_size).to(device)
    ids = torch.tensor([[2, 4, 3]] * 2, device=device)
    rows = []
    for name in ("torch", "triton"):
        torch.manual_seed(3)
        with use_backend(name):
            rows.append(target.generate(ids, do_sample=True, max_new_tokens=5, assistant_model=drafter, **options))
    assert torch.equal(*rows) and not torch.equal(rows[0][0], rows[0][1])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nan_scores_are_an_error(device, backend, do_sample):
    """Plain sampling raises too; plain greedy would go on with whatever token comes first."""
    target, drafter = make_target().to(device), make_drafter().to(device)
    with torch.no_grad():
        target.lm_head.weight[7] = float("nan")
    with use_backend(backend), pytest.raises(AdaFlashError, match="Row 0.*NaN"):
        target.generate(
            torch.tensor([[2, 4, 3]], device=device), do_sample=do_sample, max_new_tokens=4, assistant_model=drafter
        )


def test_a_broken_kernel_is_noticed(monkeypatch, device, oracle):
    """The loop does use the kernels that are forced."""
    from adaflash_hf.kernels import greedy_verify_triton

    target, drafter = make_target().to(device), make_drafter().to(device)
    ids = torch.tensor([[2, 4, 3]], device=device)
    plain = target.generate(ids, **GREEDY)
    oracle(plain)
    original = greedy_verify_triton.greedy_verify_triton
    monkeypatch.setattr(
        greedy_verify_triton, "greedy_verify_triton", lambda *args: (original(*args)[0] * 0, original(*args)[1])
    )
    with use_backend("triton"):
        ours = target.generate(ids, assistant_model=drafter, **GREEDY)
    assert not torch.equal(ours, plain)
