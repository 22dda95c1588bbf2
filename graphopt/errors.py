"""What can go wrong, in the user's terms: every message names the cause and the remedy."""


class GraphoptError(Exception):
    """Base of all errors that graphopt raises on purpose."""


class BudgetError(GraphoptError, ValueError):
    """A budget that is malformed, that no pass serves, or that cannot be met."""


class InputError(GraphoptError, ValueError):
    """Example or training inputs that graphopt cannot use."""


class LossNotFirst(InputError):
    """The first output of a model is no loss, where its loss alone was to be kept."""


class OutputError(GraphoptError, AttributeError):
    """An output was read that a step did not keep."""


class BatchError(InputError):
    """Inputs whose batch dimensions disagree."""


class CaptureError(GraphoptError, RuntimeError):
    """The model could not be traced to a joint forward and backward graph."""


class NothingToPlan(CaptureError):
    """No part of the model that torch.compile traces has a backward."""


class PassError(GraphoptError, ValueError):
    """An unknown pass, a pass applied out of contract, or a rewrite that fails verification."""


class ImportanceError(GraphoptError, ValueError):
    """Importance could not be measured, or is not finite."""


class NoLoss(ImportanceError):
    """The model returns no loss that importance could be measured by."""


class CheckpointError(GraphoptError, RuntimeError):
    """A checkpoint could not be written."""


class RankError(GraphoptError):
    """The processes that train together do not agree, or one of them failed or is missing."""


class TorchVersionError(GraphoptError, ImportError):
    """The installed torch is outside the supported range."""


def forget_frames(error: BaseException | None) -> None:
    """Have an error that was dealt with, and those that led to it, keep no frames alive, nor what their variables hold."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message of one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
