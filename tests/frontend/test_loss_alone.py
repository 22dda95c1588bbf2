"""`outputs="loss"`: training that reads nothing but the loss; other outputs are not kept, and say so."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from graphopt.passes import LinearCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from graphopt import InputError
from graphopt.analysis.step_memory import step_memory
from graphopt.errors import LossNotFirst, OutputError
from tests.integrations import trainer_runs as runs

Pair = namedtuple("Pair", "loss logits")
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda loss, logits: (loss, logits),
    "dict": lambda loss, logits: {"loss": loss, "more": [logits, None, "text"]},
    "named tuple": Pair,
    "ModelOutput": lambda loss, logits: transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits),
}
SECOND: dict[str, Callable[[Tensor, Tensor], Any]] = {"dict second": lambda loss, logits: {"largest": logits.max(), "loss": loss}}
READ: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda output: output[1],
    "dict": lambda output: output["more"][0],
    "named tuple": lambda output: output.logits,
    "ModelOutput": lambda output: output.logits,
}


class Model(nn.Module):
    def __init__(self, form: str = "tuple", vocabulary: int = 30) -> None:
        super().__init__()
        self.form = form
        self.embed, self.layer, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, 8), nn.Linear(8, vocabulary)

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(torch.tanh(self.layer(self.embed(ids))))
        return {**FORMS, **SECOND}[self.form](F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits)


IDS = (torch.arange(24).reshape(3, 8),)


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_and_its_gradients_are_eagers_and_other_outputs_say_that_they_were_not_kept(form: str) -> None:
    model = Model(form)
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, IDS, outputs="loss", backend="aot_eager", verify=True)
    assert isinstance(opt, graphopt.OptimizedModule)
    for _ in range(2):
        ours, theirs = opt(*IDS), eager(*IDS)
        loss_of(ours).backward()
        loss_of(theirs).backward()
    assert type(ours) is type(theirs)
    torch.testing.assert_close(loss_of(ours), loss_of(theirs))
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    logits = READ[form](ours)
    readings: list[Callable[[], Any]] = [
        lambda: logits.shape, lambda: logits + 1, lambda: 1 + logits, lambda: torch.argmax(logits), lambda: logits[0],
        lambda: len(logits), lambda: torch.cat([logits, logits]), lambda: logits.sum().backward(), lambda: float(logits),
        lambda: bool(logits == 1),
    ]  # fmt: skip
    for read in readings:
        with pytest.raises(OutputError, match="was not kept, since it was optimised with outputs='loss'"):
            read()
    assert "was not kept" in repr(ours)
    assert not isinstance(logits, Tensor)
    copy.deepcopy(logits)
    with torch.no_grad():
        torch.testing.assert_close(READ[form](opt(*IDS)), READ[form](eager(*IDS)))


def test_logits_are_not_computed_for_the_output() -> None:
    """3 x 8 logits of 3,000 numbers each are most of what a step allocates."""
    opts = {
        outputs: graphopt.optimize(
            Model(vocabulary=3000), IDS, passes=[LinearCrossEntropy(8)], outputs=outputs, backend="aot_eager"
        )
        for outputs in ("all", "loss")
    }
    allocated = {}
    for outputs, opt in opts.items():
        opt(*IDS)[0].backward()
        assert opt.last_step is not None
        memory = step_memory(opt.last_step.graph, "aot_eager", None)
        allocated[outputs] = memory.peak_bytes - memory.static_bytes
    logits = 4 * 24 * 3000
    assert allocated["loss"] < allocated["all"] - 0.7 * logits
    assert any("are an output, and kept" in note for note in opts["all"].report.notes)
    assert not any("are an output, and kept" in note for note in opts["loss"].report.notes)


def test_rows_that_only_another_output_reads_are_dead() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.wide, self.head = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Any:
            hidden = self.wide(torch.tanh(self.body(x)))
            return self.head(hidden[:, 0]).square().mean(), hidden

    x = (torch.randn(4, 10, 8),)
    whole, alone = (graphopt.optimize(Classifier(), x, outputs=o, backend="aot_eager") for o in ("all", "loss"))
    for opt in (whole, alone):
        opt(*x)[0].backward()
    assert alone.report.flops_ratio < whole.report.flops_ratio - 0.1


def test_models_that_are_several_graphs_and_budgets() -> None:
    class Broken(Model):
        def forward(self, ids: Tensor) -> Any:
            hidden = self.embed(ids)
            torch._dynamo.graph_break()
            logits = self.head(torch.tanh(self.layer(hidden)))
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    for model, budget in ((Broken(), None), (Broken(), 0.7), (Model(), 0.7)):
        eager = copy.deepcopy(model)
        opt = graphopt.optimize(model, IDS, budget, outputs="loss", backend="aot_eager")
        for run in (opt, eager):
            run(*IDS)[0].backward()
        with pytest.raises(OutputError):
            _ = opt(*IDS)[1].shape
        for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            if opt.selects_tensor(name):
                torch.testing.assert_close(parameter.grad, other.grad)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="outputs='logits': use 'all' or 'loss'"):
        graphopt.optimize(Model(), IDS, outputs="logits")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave one out"):
        graphopt.optimize(Model(), IDS, outputs="loss", loss=lambda output: output[0])
    with pytest.raises(LossNotFirst, match="another is named 'loss'"):
        graphopt.optimize(Model("dict second"), IDS, outputs="loss")
    with pytest.raises(LossNotFirst, match="the first output of the model is no scalar"):
        graphopt.optimize(nn.Linear(8, 8), (torch.randn(2, 8),), outputs="loss")


def test_a_model_that_returns_its_loss_for_some_batches_alone() -> None:
    class Sometimes(Model):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            loss, logits = super().forward(ids)
            return logits if labels is None else (loss, logits)

    opt = graphopt.optimize(Sometimes(), (*IDS, *IDS), outputs="loss", backend="aot_eager")
    opt(*IDS, *IDS)[0].backward()
    with pytest.raises(LossNotFirst):
        opt(*IDS)


def test_the_trainer_keeps_the_loss_alone_where_it_reads_no_other_output(tmp_path: Path) -> None:
    class Reading(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            output = model(**inputs)
            assert output["logits"].shape[-1] == 3
            return (output["loss"], output) if return_outputs else output["loss"]

    for kind, alone in ((transformers.Trainer, True), (Reading, False)):
        callback = runs.callback()
        trainer = runs.trainer(runs.classifier(), runs.points(), tmp_path, [callback])
        trainer.__class__ = kind
        trainer.train()
        assert callback.opt is not None
        assert callback.opt.captures.loss_alone == alone
        assert callback.opt.model_runs == 0
        assert trainer.predict(runs.points()).predictions.shape == (14, 3)


@pytest.mark.parametrize("broken", [False, True])
def test_the_trainer_trains_by_what_is_named_loss(tmp_path: Path, broken: bool) -> None:
    """It reads `output["loss"]`, wherever that is; the first scalar is another here."""

    class Named(runs.Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if broken:
                torch._dynamo.graph_break()
            found = super().forward(x, labels)
            return {"penalty": self.head.weight.square().mean(), **found}

    trained = []
    for callbacks in ([runs.callback()], []):
        torch.manual_seed(0)
        model = Named(dropout=0.0)
        trainer = runs.trainer(model, runs.points(), tmp_path, callbacks)
        trainer.train()
        trained.append(model)
    for ours, theirs in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_trainer_does_as_before_where_the_loss_is_computed_elsewhere(tmp_path: Path) -> None:
    for options in ({"label_smoothing_factor": 0.1}, {}):
        callback = runs.callback()
        model = runs.bert()
        trainer = runs.trainer(model, runs.sentences(8), tmp_path, [callback], **options)
        if not options:
            model.register_forward_hook(lambda _, __, output: output["logits"].shape and None)
        trainer.train()
        assert callback.opt is not None
        assert not callback.opt.captures.loss_alone
