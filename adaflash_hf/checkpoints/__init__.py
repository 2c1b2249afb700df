"""Checkpoints of other DFlash implementations: read into an `AdaFlashDrafter`, written for those who serve them.

| layout | who has it | module |
| --- | --- | --- |
| `adaflash` | this package, plain `save_pretrained` | |
| `zlab` | z-lab DFlash v1, and AdaFlash (v1 plus a length head); SGLang and vLLM load it | `zlab.py` |
| `speculators` | speculators DFlash; vLLM loads it | `speculators.py` |
| `transformers` | the in-tree assistant of transformers 5.24 | `in_tree.py` |

Promise: reading, writing and reading again gives the same tensors and the same drafts. A key or tensor that is
missing, unknown, contradictory or that this drafter can't honour, and a setting that a layout can't express, is
refused in one sentence that names it; nothing is guessed from the tokenizer or dropped in silence.

Limits: safetensors only. DFlash2, Domino and DSpark drafters, own embeddings or heads, and separate mask embeddings
are not supported.
"""

from .convert import convert, save_drafter
from .layouts import LAYOUTS
from .reading import load_drafter


__all__ = ["LAYOUTS", "convert", "load_drafter", "save_drafter"]
