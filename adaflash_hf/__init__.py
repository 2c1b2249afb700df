"""AdaFlash for Hugging Face transformers: block-diffusion drafting with adaptive length inside `model.generate`.

Importing the package registers its model classes and hooks `generate`, after which any drafter can be passed:

    target.generate(**inputs, assistant_model=AdaFlashDrafter.from_pretrained(...))
"""

from transformers import AutoConfig, AutoModel

from .configuration_adaflash import AdaFlashConfig, AdaFlashGenerationConfig, AdaptiveLengthConfig
from .errors import AdaFlashError, AdaFlashValueError
from .generation.candidate_generator import DiffusionCandidateGenerator
from .generation.integration import install
from .generation.logits_process import AdaptiveLengthLogitsProcessor
from .generation.queue import generate_many
from .generation.statistics import AdaFlashStatistics, GenerateAdaFlashOutput, collect_statistics
from .modeling_adaflash import AdaFlashDrafter
from .modeling_length_head import AdaptiveLengthHead


__version__ = "0.1.0"

AutoConfig.register(AdaFlashConfig.model_type, AdaFlashConfig, exist_ok=True)
AutoConfig.register(AdaptiveLengthConfig.model_type, AdaptiveLengthConfig, exist_ok=True)
AutoModel.register(AdaFlashConfig, AdaFlashDrafter, exist_ok=True)
AutoModel.register(AdaptiveLengthConfig, AdaptiveLengthHead, exist_ok=True)
# Saved models carry the code that defines them, for `trust_remote_code` users without the package.
AdaFlashConfig.register_for_auto_class()
AdaptiveLengthConfig.register_for_auto_class()
AdaFlashDrafter.register_for_auto_class("AutoModel")
AdaptiveLengthHead.register_for_auto_class("AutoModel")
install()

__all__ = [
    "AdaFlashConfig",
    "AdaFlashDrafter",
    "AdaFlashError",
    "AdaFlashGenerationConfig",
    "AdaFlashStatistics",
    "AdaFlashValueError",
    "AdaptiveLengthConfig",
    "AdaptiveLengthHead",
    "AdaptiveLengthLogitsProcessor",
    "DiffusionCandidateGenerator",
    "GenerateAdaFlashOutput",
    "collect_statistics",
    "generate_many",
]
