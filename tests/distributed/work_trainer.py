"""What each rank does for `test_trainer`: the Trainer of transformers, whose model it wraps in DistributedDataParallel itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import graphopt
from tests.distributed.work_ddp import error_of


def bert() -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100,
            max_position_embeddings=32, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Rows(Dataset[dict[str, Any]]):
    """Token ids with labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.randint(0, 100, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones(12, dtype=torch.long), "labels": i % 4}


def trained(
    folder: str, callback: Any, steps: int = 3, accumulation: int = 1, model: nn.Module | None = None, **options: Any
) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    model = model or bert()
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback] if callback else [])
    trainer.train()
    return trainer


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def work(rank: int, folder: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    callback = graphopt.TrainerCallback(None, passes=[], backend="aot_eager", mesh=mesh)
    found["alone"] = error_of(lambda: trained(folder, callback))  # which reads the environment, as it is without torchrun
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for accumulation in (1, 2):
        plain = trained(str(Path(folder) / "plain"), None, accumulation=accumulation)
        callback = graphopt.TrainerCallback(None, passes=[], backend="aot_eager", mesh=mesh)
        ours = trained(str(Path(folder) / "ours"), callback, accumulation=accumulation)
        found[f"accumulation {accumulation}"] = weights(plain), weights(ours)
        wrapped = ours.model_wrapped
        found["wrapped"] = type(wrapped).__name__, [hook.__name__ for hook, _ in wrapped._comm_hooks]
    callback = graphopt.TrainerCallback(graphopt.Budget(flops=0.2), backend="aot_eager", mesh=mesh)
    selected = trained(str(Path(folder) / "selected"), callback)
    found["selected"] = sorted(callback.opt.selected), weights(selected), callback.opt.report.communication.bytes
    found["gradients"] = sum(p.nbytes for n, p in selected.model.named_parameters() if n in callback.opt.selected)
    found["fsdp"] = sharded(folder)
    part = nn.ModuleDict({"opt": graphopt.optimize(nn.Linear(4, 1), (torch.ones(2, 4),), passes=[], backend="aot_eager",
                                                   loss=torch.sum, mesh=mesh), "more": nn.Linear(4, 4)})  # fmt: skip
    found["part"] = larger(rank, part)
    return found


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """accelerate takes a plugin for FSDP on devices alone, and is told that these are some."""
    initialised = AcceleratorState.__init__

    def init(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        initialised(state, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield
    AcceleratorState._reset_state()


def sharded(folder: str) -> dict[str, Any]:
    """With the Trainer's own FSDP2, without graphopt and with it; all that is selected, or all."""
    found: dict[str, Any] = {}

    def run(callback: Any, model: nn.Module, accumulation: int = 1) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state()
        config = {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
        trainer = trained(folder, callback, accumulation=accumulation, model=model, fsdp=True, fsdp_config=config)
        found["log"] = trainer.state.log_history[-1]
        return {name: p.full_tensor() for name, p in trainer.model.named_parameters()}

    with as_on_gpus():
        for name, budget, accumulation in (("exact", None, 2), ("selected", graphopt.Budget(flops=0.2), 4)):
            callback = graphopt.TrainerCallback(budget, backend="aot_eager")
            ours, opt = run(callback, bert(), accumulation), callback.opt
            found[f"{name}, done"] = opt.model_runs, found["log"]["graphopt/original_steps"], opt.report.communication.bytes > 0
            plain = bert()
            for parameter, tensor in plain.named_parameters():
                tensor.requires_grad_(budget is None or parameter in opt.selected)
            found[name] = run(None, plain, accumulation), ours, opt.selected
        row = {name: torch.as_tensor(value)[None] for name, value in Rows()[0].items()}
        given = graphopt.optimize(model := bert(), row, passes=[], backend="aot_eager")
        found["given"] = error_of(lambda: run(graphopt.TrainerCallback(given), model))
        first = transformers.TrainingArguments(folder, fsdp=True, fsdp_config={"version": 1}, use_cpu=True)
        found["version 1"] = error_of(lambda: callback.on_init_end(first, None, None, model=bert()))
    return found


class Larger(nn.Module):
    """A model of which a part is optimised."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["opt"](self.parts["more"](x)).sum()


def larger(rank: int, parts: nn.ModuleDict) -> list[float]:
    """What differs between the ranks' gradients, all of them."""
    ddp = DistributedDataParallel(Larger(parts))
    ddp(torch.full((2, 4), 1.0 + rank)).backward()
    found = []
    for p in ddp.parameters():
        both = [torch.empty_like(p.grad) for _ in range(2)]
        dist.all_gather(both, p.grad.contiguous())
        found.append(float((both[0] - both[1]).abs().max()))
    return found
