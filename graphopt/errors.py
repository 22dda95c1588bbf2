"""What can go wrong, in the user's terms: every message names the cause and the remedy."""


class GraphoptError(Exception):
    """Base of all errors that graphopt raises on purpose.

    Cause: one of the classes below; `except graphopt.GraphoptError` catches all of them.

    Remedy: the message has it. The model is as it was before the call.
    """


class BudgetError(GraphoptError, ValueError):
    """A budget that is malformed, that no pass serves, or that cannot be met.

    Cause: a value outside its range, `passes=` without one that can save what the budget asks for, or less than a step can cost.

    Remedy: the message names the smallest value that can be met, or the pass to add.
    """


class InputError(GraphoptError, ValueError):
    """Example or training inputs that graphopt cannot use.

    Cause: no `torch.nn.Module`, no batch, an unknown option, a config or a file that cannot be read.

    Remedy: pass a batch as `model` takes it, a tuple for `model(*batch)` or a dict for `model(**batch)`, labels included.
    """


class LossNotFirst(InputError):
    """The first output of a model is no loss, where its loss alone was to be kept.

    Cause: `optimize(outputs="loss")` of a model whose first output is no scalar that can be differentiated.

    Remedy: return the loss first, or leave `outputs=` out.
    """


class OutputError(GraphoptError, AttributeError):
    """An output was read that a step did not keep.

    Cause: `optimize(outputs="loss")` keeps the loss alone in training.

    Remedy: read the output under `torch.no_grad()`, where all outputs are there, or leave `outputs=` out.
    """


class BatchError(InputError):
    """Inputs whose batch dimensions disagree.

    Cause: the first dimensions of the inputs have different sizes.

    Remedy: `batch_dim=` names the dimension for each input, or None for one without a batch.
    """


class CaptureError(GraphoptError, RuntimeError):
    """The model could not be traced to a joint forward and backward graph.

    Cause: nothing to train, an operation that torch.compile refuses, or, with `fullgraph=True`, a graph break.

    Remedy: the message names the line of the model and what to write there; without `fullgraph=True`, parts are planned together.
    """


class NothingToPlan(CaptureError):
    """No part of the model that torch.compile traces has a backward.

    Cause: `torch.compiler.disable` around the model, or no tensor that needs a gradient in what is traced. `optimize` warns and
        trains the model as torch.compile has it; `analyze`, `plan` and `fit` raise this.

    Remedy: analyse the part of the model that is traced.
    """


class RerunError(GraphoptError, RuntimeError):
    """A step would have to run again for an output that was not expected to be differentiated, and cannot.

    Cause: inputs, weights or attributes changed between the step and its backward, the loss's backward freed what is needed, or
        gradients of gradients were asked for.

    Remedy: repeat the step, which is prepared for it from then on; differentiate both in one backward; or compute gradients of
        gradients with the model itself.
    """


class PassError(GraphoptError, ValueError):
    """An unknown pass, a pass applied out of contract, or a rewrite that fails verification.

    Cause: a name that is none, techniques that do not go together, or a pass of your own that breaks what it promises.

    Remedy: the message lists the names, or says which pass to leave out, or what the pass changed.
    """


class ImportanceError(GraphoptError, ValueError):
    """Importance could not be measured, or is not finite.

    Cause: gradients on the example batch that are NaN or infinite, or an optimizer that holds none of the tensors.

    Remedy: pass a batch of the training data and the optimizer that trains them, or `GreenTrainer(rule="capacity")`, which needs
        no gradients.
    """


class NoLoss(ImportanceError):
    """The model returns no loss that importance could be measured by.

    Cause: the example batch has no labels, or the loss is computed outside of the model.

    Remedy: add the labels, or pass `loss=`, a function from the model's output to the loss.
    """


class CheckpointError(GraphoptError, RuntimeError):
    """A checkpoint could not be written.

    Cause: no room, or no right to write there. What was there before is as it was.

    Remedy: make room, or save to another folder.
    """


class RankError(GraphoptError):
    """The processes that train together do not agree, or one of them failed or is missing.

    Cause: a call that was not made on every rank or with other arguments, an error on another rank, or one that ended or is late.

    Remedy: call `optimize`, `reselect`, `adopt` and `load_state` on all ranks; see the other rank's own error; go on from the
        last checkpoint.
    """


class TorchVersionError(GraphoptError, ImportError):
    """The installed torch is outside the supported range.

    Cause: graphopt uses torch APIs that are not public, which it knows of some versions alone.

    Remedy: install the version that the message names.
    """


def forget_frames(error: BaseException | None) -> None:
    """Have an error that was dealt with, and those that led to it, keep no frames alive, nor what their variables hold."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message of one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


ALL_FROZEN = (
    "every selected tensor is frozen now: unfreeze one of them, or call reselect(batch). Where that says that the budget is too "
    "small for what is left, optimize again with a larger one."
)
"""What a `PassError` says where the user has frozen all that is selected."""
