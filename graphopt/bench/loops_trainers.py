"""Training loops of transformers, accelerate and Lightning for `graphopt bench loops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from graphopt.bench.loops_models import ADAM, ARGUMENTS, bert, llama, reloaded, rows, tokenizer
from graphopt.bench.loops_run import Loop


def trainer(loop: Loop, optimised: bool = False, causal: bool = False, own_loss: bool = False, **options: Any) -> None:
    """The Trainer of transformers: trains, evaluates, saves checkpoints, loads the best, saves a model that is loaded again.

    Args:
        optimised: it is given an optimised model; or else graphopt's callback.
        own_loss: the Trainer computes the loss from the logits, though the model returns one, too.
        options: of its arguments.
    """
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
            output = model(**inputs)
            loss = torch.nn.functional.cross_entropy(output.logits.float(), inputs["labels"])
            return (loss, output) if return_outputs else loss

    model = llama() if causal else bert()
    data: Any = [{**row, "number": torch.tensor(i)} for i, row in enumerate(rows(14, causal=causal))]  # no model takes a "number"
    given = loop.optimized(model, default_collate(rows(4, causal=causal))) if optimised else model
    arguments = transformers.TrainingArguments(
        output_dir=str(loop.folder),
        **{**ARGUMENTS, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, **options},
    )
    run = (Own if own_loss else transformers.Trainer)(
        given,
        arguments,
        train_dataset=data,
        eval_dataset=data[:6],
        processing_class=tokenizer(),
        data_collator=transformers.default_data_collator,
        callbacks=[] if optimised else loop.callbacks(),
    )
    loop.train(run, model)
    logits = torch.as_tensor(run.predict(data[:3]).predictions)
    reloaded(loop, model)
    found = type(model).from_pretrained(loop.folder / "saved").eval()
    with torch.no_grad():
        again = found(input_ids=torch.stack([row["input_ids"] for row in data[:3]])).logits
    loop.check(
        torch.allclose(again, logits, atol=0.05 if options.get("bf16") else 1e-4),
        "the saved model predicts otherwise than the Trainer",
    )


def accelerated(loop: Loop, precision: str = "no") -> None:
    """`Accelerator().prepare`, accumulation, clipping, a state that is saved and loaded, and a saved model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    loader = DataLoader(rows(22), 4)
    with accelerator.autocast():
        given = loop.optimized(model, next(iter(loader)), optimizer)
    step, optimizer, loader = accelerator.prepare(given, optimizer, loader)
    for epoch in range(2):
        step.train()
        for batch in loader:
            with accelerator.accumulate(step):
                loss = step(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(step.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            loop.losses.append(float(loss.detach()))
        if epoch == 0:
            accelerator.save_state(str(loop.folder / "state"))
            accelerator.load_state(str(loop.folder / "state"))
        step.eval()
        with torch.no_grad():
            loop.losses += [float(accelerator.gather(step(**batch).loss).mean()) for batch in loader]
    unwrapped = accelerator.unwrap_model(step)
    unwrapped.save_pretrained(loop.folder / "saved", save_function=accelerator.save, state_dict=accelerator.get_state_dict(step))
    reloaded(loop, model)


def lightning(loop: Loop, **options: Any) -> None:
    """A LightningModule that holds an optimised model, with validation and a checkpoint."""
    import pytorch_lightning

    model = bert()
    step = loop.optimized(model, default_collate(rows(4)))

    class Classifier(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = step

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            loop.losses.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            loop.losses.append(float(self.model(**batch).loss))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **ADAM)

    fit = pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5, default_root_dir=str(loop.folder), **options,
    )  # fmt: skip
    module = Classifier()
    fit.fit(module, DataLoader(rows(14), 4), DataLoader(rows(6), 4))
    file = loop.folder / "last.ckpt"
    fit.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)["state_dict"]
    loop.check(set(saved) == {f"model.{name}" for name in model.state_dict()}, "the checkpoint has other names")
    module.load_state_dict(saved)
