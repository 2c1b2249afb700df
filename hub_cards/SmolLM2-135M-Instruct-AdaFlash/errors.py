"""The one error family of the package. Each message names the key or argument at fault and the remedy."""


class AdaFlashError(Exception):
    """Base class of every error raised on purpose by adaflash_hf."""


class AdaFlashValueError(AdaFlashError, ValueError):
    """A configuration, checkpoint or generate option that can't be used as given."""
