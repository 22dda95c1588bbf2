"""`transformers.Trainer(..., callbacks=[graphopt.TrainerCallback(graphopt.Budget(flops=0.5))])`.

The Trainer goes on calling its model; while it trains, the model's `forward` is diverted to the optimised one, below the
autocast wrapper of accelerate. Everything else is what the Trainer tells its callbacks.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers.trainer_callback import CallbackHandler

from graphopt.analysis.optimizers import unwrapped
from graphopt.budget import Budget, Limits
from graphopt.calls import BatchDim
from graphopt.compat.fsdp import is_sharded
from graphopt.errors import GraphoptError, InputError, PassError, RankError
from graphopt.integrations.asked import Asked, batches_of, begin, own_optimizer
from graphopt.integrations.diverted import Diverted, DivertedCall
from graphopt.integrations.training_steps import TrainingSteps
from graphopt.lower import Backend
from graphopt.passes import Pass
from graphopt.runtime.module import OptimizedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATE_FILE = "graphopt.safetensors"
"""In every checkpoint of the Trainer."""

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""That `bucketed` pads batches to by default, in tokens: at most twice the work."""

_COMPRESSES = (
    "gradients are compressed by this plan, which the Trainer's own optimizer does not see. Make both first: "
    "opt = graphopt.optimize(model, batch, passes=['lsp']), then Trainer(model, ..., callbacks=[graphopt.TrainerCallback(opt)], "
    "optimizers=(opt.make_optimizer(torch.optim.AdamW, lr=...), None))."
)


class TrainerCallback(transformers.TrainerCallback):
    """Trains a `transformers.Trainer`'s model under a budget.

    The first training batch makes the plan. Tensors are selected anew every epoch and sampling ratios adapt; evaluation runs
    the model as it is; where the Trainer reads nothing but the loss in training, other outputs are not kept then (see `outputs`
    of `optimize`); figures go to the Trainer's log as `graphopt/...`; the plan is in every checkpoint and resumed from
    it. What cannot be captured or compiled is computed by the model itself, with a warning; what is trained stays what is
    selected. An optimizer step whose loss and gradients are NaN or infinite is not taken. Where the Trainer computes the loss
    outside the model (label smoothing, `compute_loss_func`), tensors are rated by the sensitivity of the outputs.

    After training the model's `forward` is its own again; if training ends by an exception, at the next `train()` or `detach()`.

    Example:
        callback = graphopt.TrainerCallback(graphopt.Budget(flops=0.5))
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
    """

    def __init__(
        self,
        budget: Limits | OptimizedModule = None,
        passes: str | Sequence[str | Pass] = "auto",
        backend: Backend = "inductor",
        *,
        reselect_every: int | None = None,
        batch_dim: BatchDim = 0,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Set up a callback.

        Args:
            budget: as for `optimize`; or a model that `optimize` returned for the Trainer's, in place of all other arguments.
            passes, backend, batch_dim, mesh: as for `optimize`; with a mesh the Trainer's DistributedDataParallel sends nothing.
            reselect_every: optimizer steps between selections; by default an epoch's.
        Raises:
            BudgetError, InputError, PassError: as `optimize`; lsp is only possible with a model from `optimize`.
        """
        given = budget if isinstance(budget, OptimizedModule) else None
        stated = Budget() if isinstance(budget, OptimizedModule) else Budget.of(budget)
        self.asked = Asked(stated, passes, backend, batch_dim, None, reselect_every, given, mesh=mesh)
        if given is None and self.asked.compresses:
            raise PassError(_COMPRESSES)
        self._diverted: Diverted | None = None
        self._steps: TrainingSteps | None = None

    @property
    def opt(self) -> OptimizedModule | None:
        """The optimised model, for `.report` and `.dump`; None before the first training batch."""
        return None if self._steps is None else self._steps.opt

    def detach(self) -> None:
        """Give the model its own `forward` back; it trains everything again."""
        if self._diverted is not None:
            self._diverted.remove()
        if self._steps is not None:
            self._steps.stop()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Divert the model's forward before accelerate wraps it; until training begins it is still the model's own."""
        _refuse_unsupported(args)
        _ahead_of_reports(self)
        self._divert(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the optimised model to work, with the first batch; resume its plan where training is resumed."""
        _refuse_unsupported(args)
        _ahead_of_reports(self)
        _refuse_apart(args, self.asked.mesh)
        diverted = self._divert(kwargs["model"])
        optimizer = unwrapped(kwargs["optimizer"])
        asked = self.asked
        if asked.given is not None and is_sharded(diverted.model):
            raise InputError(
                "TrainerCallback(opt): the Trainer divides the weights only now, and `opt` was made before: give the callback "
                "what optimize() was called with."
            )
        if asked.given is not None and own_optimizer(asked.given) and args.max_grad_norm:
            raise InputError(
                "the Trainer clips the gradients of model.parameters(), and compressed ones are not among them: set "
                "max_grad_norm=0."
            )
        every = None
        if asked.reselects:
            batches = batches_of(kwargs.get("train_dataloader"))
            an_epoch = None if batches is None else math.ceil(batches / args.gradient_accumulation_steps)
            every = asked.reselect_every or an_epoch
        resumed = _checkpoint(args, state) if state.global_step > 0 else None

        def made(opt: OptimizedModule, steps: TrainingSteps) -> None:
            if asked.given is None and own_optimizer(opt):
                raise PassError(_COMPRESSES)
            if resumed is not None:
                _resume(opt, resumed, steps)
            opt.check_wrapping()

        asked = replace(asked, loss_alone=_reads_loss_alone(diverted.model))
        self._steps = begin(asked, diverted, optimizer, every, made, done=state.global_step)
        self._steps.watches_losses = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out a step whose loss and gradients are not finite: it would make every weight NaN."""
        if self._steps is None or getattr(kwargs["optimizer"], "scaler", None) is not None:  # a GradScaler sees to it
            return
        stepped = (p for group in kwargs["optimizer"].param_groups for p in group["params"])
        if not self._steps.all_finite(p.grad for p in stepped if p.grad is not None):
            kwargs["optimizer"].zero_grad()
            self._steps.savings.skipped += 1
            self._steps.warn("a loss was NaN or infinite: its gradients are dropped and the step is not taken")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Select anew and adapt sampling, where it is time."""
        if self._steps is None:
            return
        if self.opt is not None and own_optimizer(self.opt):
            self.opt.zero_grad()  # the Trainer clears only what model.parameters() has
        self._steps.after_step(last=state.global_step >= state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add figures to what is logged about training."""
        if self._steps is None or logs is None or not {"loss", "train_loss"} & set(logs):
            return
        logs.update(self._steps.numbers())
        if state.log_history:  # holds a copy that was made just before
            state.log_history[-1].update(self._steps.numbers())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the plan into the checkpoint that the Trainer has just written."""
        if self.opt is None or self._steps is None or not args.should_save:
            return
        folder = _run_folder(args) / f"checkpoint-{state.global_step}"
        try:
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {folder}")
            self.opt.save_state(folder / STATE_FILE, optimizer=None)
        except (OSError, GraphoptError) as error:
            self._steps.warn(f"the plan is not in the checkpoint, training goes on: {error}", "save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model its own forward back."""
        self.detach()

    def _divert(self, model: nn.Module) -> Diverted:
        given = self.asked.given
        if given is not None and given._modules is not model._modules:  # it shares them with its model
            raise InputError("TrainerCallback(opt): `opt` was made from another model than the Trainer's.")
        if self._diverted is None or self._diverted.model is not model or not self._diverted.outermost or is_sharded(model):
            self.detach()
            self._diverted = (DivertedCall if is_sharded(model) else Diverted.of)(model)
        return self._diverted


def _reads_loss_alone(model: nn.Module) -> bool:
    """Whether the Trainer reads nothing of what the model returns in training but its loss."""
    trainer = _trainer()
    if trainer is None or model._forward_hooks or "compute_loss" in vars(trainer) or "training_step" in vars(trainer):
        return False
    own = any(getattr(type(trainer), n) is not getattr(transformers.Trainer, n) for n in ("compute_loss", "training_step"))
    elsewhere = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    return not own and not elsewhere and getattr(trainer.args, "past_index", -1) < 0


def _resume(opt: OptimizedModule, path: Path, steps: TrainingSteps) -> None:
    try:
        opt.load_state(path)
    except RankError:
        raise
    except (OSError, GraphoptError) as error:
        steps.warn(f"the plan of the checkpoint is not resumed, a new one was made: {error}", "resume")


def _checkpoint(args: Any, state: Any) -> Path:
    """The plan's file in the checkpoint that training resumes from; a callback does not learn what `train` was called with."""
    given = [names.get("resume_from_checkpoint") for names in _callers(transformers.Trainer)]
    for named in (*given, args.resume_from_checkpoint):
        if isinstance(named, (str, os.PathLike)) and Path(named).is_dir():
            return Path(named) / STATE_FILE
    return _run_folder(args) / f"checkpoint-{state.global_step}" / STATE_FILE


def _run_folder(args: Any) -> Path:
    """Where the Trainer puts checkpoints: every trial of a `hyperparameter_search` has a folder of its own."""
    trainer = _trainer()
    if trainer is None or getattr(trainer, "hp_search_backend", None) is None:
        return Path(args.output_dir)
    return Path(trainer._get_output_dir(trial=trainer._trial))


def _refuse_unsupported(args: Any) -> None:
    """What wraps the model in another way, and a second compiler: they would get in each other's way."""
    if args.torch_compile:
        raise InputError("torch_compile=True: graphopt compiles the training step itself. Leave torch_compile out.")
    version = (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version")
    if args.n_gpu > 1 or args.deepspeed or (args.fsdp and version != 2):
        raise InputError(
            "graphopt.TrainerCallback trains on one device, with DistributedDataParallel or FSDP2 (fsdp_config={'version': 2}), "
            "and without DataParallel, FSDP1 or DeepSpeed. Start one process per device: torchrun --nproc-per-node <devices> "
            "<your script>."
        )


def _refuse_apart(args: Any, mesh: DeviceMesh | None) -> None:
    """Batches that cannot be optimised are computed by the model itself: that needs the Trainer's own averaging."""
    if mesh is not None and mesh.size() > 1 and args.parallel_mode != transformers.training_args.ParallelMode.DISTRIBUTED:
        raise InputError(
            f"mesh= has {mesh.size()} ranks, and the Trainer does not know of them. Start one process per device: torchrun "
            "--nproc-per-node <devices> <your script>."
        )


def _ahead_of_reports(callback: TrainerCallback) -> None:
    """Move `callback` before those that write logs, which the Trainer puts first; what it adds to a log would miss them.

    A callback does not learn who calls it, so the handler is looked for among the callers.
    """
    for names in _callers(CallbackHandler):
        names["self"].callbacks.remove(callback)
        names["self"].callbacks.insert(0, callback)
        return


def _trainer() -> transformers.Trainer | None:
    return next((names["self"] for names in _callers(transformers.Trainer)), None)


def _callers(kind: type) -> Iterator[dict[str, Any]]:
    """The local names of the methods of a `kind` that called a callback, the innermost first."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if isinstance(frame.f_locals.get("self"), kind):
            yield frame.f_locals


def bucketed(collator: Any, lengths: Sequence[int] = LENGTHS) -> Callable[[Sequence[Any]], Any]:
    """A data collator that pads every batch to one of `lengths`, so that little is compiled and none has a length of its own.

    The padding is the collator's own (its tokenizer's, with attention mask, and -100 for labels), so that the loss is the
    same. A batch longer than all of them is padded to the tokenizer's `model_max_length` or to a multiple of the longest.

    Args:
        collator: one with `pad_to_multiple_of`, such as transformers' `DataCollatorWithPadding`; it is not changed.
        lengths: in tokens.
    Raises:
        InputError: another kind of collator, or lengths that are not that.
    """
    if not hasattr(collator, "pad_to_multiple_of"):
        raise InputError(
            f"{getattr(collator, '__name__', type(collator).__name__)} has no pad_to_multiple_of, by which batches are padded "
            "to given lengths: use one of transformers' padding collators, such as DataCollatorWithPadding(tokenizer)."
        )
    if not lengths or any(not isinstance(n, int) or n < 1 for n in lengths):
        raise InputError(f"lengths={lengths!r} must be positive numbers of tokens.")
    return _Bucketed(collator, tuple(sorted(set(lengths))))


class _Bucketed:
    """See `bucketed`; an object, so that workers of a data loader can be sent it."""

    def __init__(self, collator: Any, lengths: tuple[int, ...]) -> None:
        self.collator = copy.copy(collator)
        self.lengths = lengths

    @property
    def tokenizer(self) -> Any:
        """The collator's, which a Trainer saves with its checkpoints."""
        return getattr(self.collator, "tokenizer", None)

    def __call__(self, features: Sequence[Any]) -> Any:
        """The batch of `features`, padded."""
        self.collator.pad_to_multiple_of = self._length(max(map(_tokens, features)))
        return self.collator(features)

    def _length(self, longest: int) -> int:
        most = getattr(self.tokenizer, "model_max_length", None) or longest
        fitting = next((length for length in self.lengths if length >= longest), None)
        if fitting is None:
            fitting = -(-longest // self.lengths[-1]) * self.lengths[-1]
        return min(fitting, most) if most >= longest else fitting


def _tokens(feature: Any) -> int:
    """The length of the sequence that is padded: of the tokens, or of labels per token where those are longer."""
    named = feature if isinstance(feature, Mapping) else {"input_ids": feature}
    held = [named[key] for key in ("input_ids", "labels") if key in named]
    return max((len(value) for value in held if hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0), default=1)
