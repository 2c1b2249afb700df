"""Run by `test_hub.py` in a process of its own that can't import adaflash_hf: a drafter's repo with its own code, in
transformers' own DFlash loop, against plain `generate`. Prints one JSON object.

    python remote_code.py TARGET DRAFTER [HEAD]
"""

import importlib.util
import json
import sys
from pathlib import Path


sys.path = [entry for entry in sys.path if not (Path(entry or ".") / "adaflash_hf").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
assert importlib.util.find_spec("adaflash_hf") is None

import torch
from transformers import AutoModel, AutoModelForCausalLM


target = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
drafter = AutoModel.from_pretrained(sys.argv[2], dtype=torch.float32, trust_remote_code=True)
prompt = torch.tensor([[5, 9, 2, 7, 7, 3]])
options = {"max_new_tokens": 24, "do_sample": False}
plain = target.generate(prompt, **options)
forwards = []
hook = target.register_forward_hook(lambda *_: forwards.append(1))
drafted = target.generate(prompt, assistant_model=drafter, speculation_type="dflash", **options)
found = {
    "same": torch.equal(plain, drafted),
    "tokens": drafted.shape[1] - prompt.shape[1],
    "forwards": len(forwards),
    "module": type(drafter).__module__.split(".")[0],
    "threshold": drafter.generation_config.survival_threshold,
    "head": drafter.length_head is not None,
    "training_data": drafter.card.training_data,
    "package": importlib.util.find_spec("adaflash_hf") is not None,
}
if len(sys.argv) > 3:
    head = AutoModel.from_pretrained(sys.argv[3], trust_remote_code=True)
    found["head_alone"] = type(head).__name__
print("RESULT " + json.dumps(found))
