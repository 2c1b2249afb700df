"""Loads a published drafter and its target from the Hub and generates. Needs a GPU and a connection.

    python examples/load_from_hub.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16

Any layout that the package reads will do; `--revision` and `--subfolder` say where in the repo. A drafter trained with
thinking off accepts far less with it on, so the template gets `--chat_template_kwargs` or, without them, the flags
that the drafter's card records. Other people's repos record none: thinking is then switched off.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.chat_template import FLAGS_HELP, flags_for


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="Qwen/Qwen3-8B")
    parser.add_argument("--drafter", default="z-lab/Qwen3-8B-DFlash-b16")
    parser.add_argument("--revision", default=None, help="Branch, tag or commit of the drafter.")
    parser.add_argument("--subfolder", default="", help="Folder inside the drafter's repo.")
    parser.add_argument("--prompt", default="How many positive whole-number divisors does 196 have?")
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--chat_template_kwargs", help=FLAGS_HELP)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16).to(device)
    drafter = AdaFlashDrafter.from_pretrained(
        arguments.drafter, revision=arguments.revision, subfolder=arguments.subfolder, dtype=torch.bfloat16
    ).to(device)
    flags = flags_for(drafter, arguments.chat_template_kwargs)
    if arguments.chat_template_kwargs is None and drafter.card.chat_template_kwargs is None:
        flags = {"enable_thinking": False}
    print(f"template flags: {flags}")
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **flags,
    ).to(device)
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=arguments.max_new_tokens,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"accepted length (tau): {output.statistics.mean_accepted_length:.2f}")


if __name__ == "__main__":
    main()
