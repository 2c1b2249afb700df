"""`model.generate(..., custom_generate=<this repo>, assistant_model=drafter, trust_remote_code=True)`.

Importing `adaflash_hf` hooks `generate` for its drafters, so the call only has to be made again.
"""

from transformers import GenerationMixin

from adaflash_hf import AdaFlashDrafter, AdaFlashValueError


def generate(model, *args, assistant_model=None, **kwargs):
    """AdaFlash decoding; takes what `generate` takes, and an `AdaFlashDrafter` as `assistant_model`.

    Raises:
        AdaFlashValueError: when `assistant_model` isn't an `AdaFlashDrafter`.
    """
    if not isinstance(assistant_model, AdaFlashDrafter):
        raise AdaFlashValueError(
            f"`assistant_model` is a {type(assistant_model).__name__}: load the drafter with "
            "`adaflash_hf.AdaFlashDrafter.from_pretrained`."
        )
    return GenerationMixin.generate(model, *args, assistant_model=assistant_model, **kwargs)
