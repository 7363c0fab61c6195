"""The errors of a run."""


class InputError(ValueError):
    """A key, file or folder that the caller named can't be used; the message is one line and says what to do.

    Raised before any model is loaded; ``python -m algos.grpo`` prints it and ends with code 2.
    """


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, or belongs to another model or data set; nothing was changed."""
