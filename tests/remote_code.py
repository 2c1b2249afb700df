"""Run by `test_hub.py` in a process of its own that can't import adaflash_hf: repos with their own code, in
transformers' own DFlash loop, against plain `generate`. Prints a JSON list, one object for each pair.

    python remote_code.py TARGET DRAFTER HEAD [DRAFTER HEAD ...]
"""

import importlib.util
import json
import sys
from pathlib import Path


sys.path = [entry for entry in sys.path if not (Path(entry or ".") / "adaflash_hf").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
assert importlib.util.find_spec("adaflash_hf") is None

import torch  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402


target = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
prompt = torch.tensor([[5, 9, 2, 7, 7, 3]])
options = {"max_new_tokens": 24, "do_sample": False}
plain = target.generate(prompt, **options)
found = []
for name, head in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    drafter = AutoModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=True)
    drafts: list[int] = []
    drafter.register_forward_hook(lambda *_, drafts=drafts: drafts.append(1))
    drafted = target.generate(prompt, assistant_model=drafter, speculation_type="dflash", **options)
    found.append(
        {
            "same": torch.equal(plain, drafted),
            "tokens": drafted.shape[1] - prompt.shape[1],
            "drafts": len(drafts),
            "module": type(drafter).__module__.split(".")[0],
            "policy": type(drafter.generation_config).__name__,
            "threshold": drafter.generation_config.survival_threshold,
            "head": drafter.length_head is not None,
            "training_data": drafter.card.training_data,
            "head_alone": type(AutoModel.from_pretrained(head, trust_remote_code=True)).__name__,
            "package": importlib.util.find_spec("adaflash_hf") is not None,
        }
    )
print("RESULT " + json.dumps(found))
