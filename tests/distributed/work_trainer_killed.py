"""What each rank does for `test_trainer_killed`: the Trainer of transformers, which saves after every step."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphopt
from tests.integrations.trainer_runs import classifier, points

STEPS, DIES_AT, JOINT = 4, 3, 8
"""Optimizer steps, in which a rank is killed, and samples of all ranks together."""


def model() -> nn.Module:
    """With a buffer, which DistributedDataParallel sends before every forward."""
    made = classifier(dropout=0.0)
    made.register_buffer("sent", torch.zeros(1))
    return made


class Killed(transformers.TrainerCallback):
    """Ends this process at the beginning of a step, as the kernel does for want of memory."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == DIES_AT - 1:
            os.kill(os.getpid(), 9)


def work(rank: int, folder: str, kills: bool = False, resumes: bool = False) -> Any:
    """Weights, selected tensors and losses by step; or what the Trainer raises where the other rank is killed, and the seconds.

    Args:
        kills: rank 1 is.
        resumes: from the last checkpoint.
    """
    size = dist.get_world_size()
    AcceleratorState._reset_state(reset_partial_state=True)
    if size > 1:
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {**here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    callback = graphopt.TrainerCallback(graphopt.Budget(flops=0.7), backend="aot_eager", mesh=mesh)
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=JOINT // size, learning_rate=1e-2, logging_steps=1,
        save_strategy="steps", save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        average_tokens_across_devices=False,  # which multiplies the loss of a model that does not divide it
    )  # fmt: skip
    callbacks = [callback, Killed()] if kills and rank else [callback]
    trainer = transformers.Trainer(model(), arguments, train_dataset=points(64), callbacks=callbacks)
    start = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=resumes)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    weights: dict[str, torch.Tensor] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, sorted(callback.opt.selected), losses
