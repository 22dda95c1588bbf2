"""Rows whose label is ignored are not computed, and no gradient changes, however many labels a batch has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graphopt.passes import DeadRows, in_order
from torch import Tensor, nn

import graphopt
from graphopt import Budget, InputError, PassError
from graphopt.capture import capture
from graphopt.testing import PassCheck, check_pass, check_passes
from tests.long_forms import long
from tests.passes.dead_rows.test_technique import WIDTH, stack
from tests.passes.test_composition import PASSES

IGNORED = -100
CLASSES = 20


class LanguageModel(nn.Module):
    """Blocks, on a layer if asked, and a head; returns the loss of the next token, and the logits if asked."""

    def __init__(self, logits: bool = False, blocks: int = 1, below: bool = False, **options: Any) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH) if below else nn.Identity()
        self.blocks = stack(blocks, causal=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.logits, self.options = logits, options

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(self.blocks(self.below(x))))
        ignored = self.options.get("ignore_index", IGNORED)
        following = nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.reshape(-1), **self.options)
        return (loss, logits) if self.logits else loss


def prompts(samples: int = 3, rows: int = 8, labelled: int = 3, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """A batch whose samples have labels in their last rows, every second sample one less."""
    labels = torch.randint(0, CLASSES, (samples, rows))
    for sample in range(samples):
        labels[sample, : rows - labelled + sample % 2] = ignored
    return torch.randn(samples, rows, WIDTH), labels


def checked(model: nn.Module, batch: tuple[Tensor, ...], labelled: float = 0.5, both: bool = False) -> PassCheck:
    """The pass held to its contract where it finds a loss, in float64; if `both`, in float32 for this batch size as well."""
    rewrite, dtypes = DeadRows(labelled), (torch.float64, torch.float32) if both else (torch.float64,)
    return check_pass(rewrite, model, batch, lambda graph: [s.name for s in rewrite.applicable(graph)], dtypes=dtypes)[-1]


OPTIONS: list[dict[str, Any]] = [
    {"reduction": "sum"},
    {"ignore_index": 7},
    {"weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)},
    {"logits": True},
]


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (3, {"below": True}),
        *((3, {"blocks": 0, **options}) for options in OPTIONS),
        (1, {"blocks": 0}),
        *long((3, {"blocks": 2}), (1, {}), *((1, options) for options in OPTIONS)),
    ],
    ids=str,
)
def test_a_loss_that_ignores_labels(samples: int, options: dict[str, Any]) -> None:
    class Weighted(LanguageModel):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            given = self.options.get("weight")
            self.options |= {"weight": given.to(x.dtype)} if given is not None else {}
            return super().forward(x, labels)

    batch = prompts(samples, ignored=options.get("ignore_index", IGNORED))
    report = checked(Weighted(**options), batch, both=options.keys() <= {"blocks", "below"}).report
    assert report.changes.changed == ("the loss",)
    assert report.step_flops_after < 0.93 * report.step_flops_before


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
def test_other_losses(options: dict[str, Any]) -> None:
    class Mean(LanguageModel):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x, labels).mean()

    checked(Mean(blocks=0, **options), prompts())


@pytest.mark.parametrize(("labelled", "losses"), [(1, 3), (4, 2)])
def test_several_losses(labelled: int, losses: int) -> None:
    """Rows of each are left out, and once: also where a loss becomes worth it only when others are cheaper."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(WIDTH, CLASSES)
            self.large = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 240), nn.GELU(), nn.Linear(240, CLASSES)) for _ in range(2))

        def forward(self, x: Tensor, *labels: Tensor) -> Tensor:
            heads = (self.small, *self.large)
            found = [nn.functional.cross_entropy(h(x).flatten(0, 1), y.flatten()) for h, y in zip(heads, labels, strict=True)]
            return found[0] + 2 * found[1] + 3 * found[2]

    batch = (prompts()[0], *(prompts(labelled=labelled)[1] for _ in range(3)))
    assert len(checked(Tasks(), batch, labelled / 8).report.changes.changed) == losses


def test_no_place_is_left_for_a_label_in_the_wrong_batch() -> None:
    with pytest.raises(InputError, match="a sample has more than 4 rows whose label counts: use DeadRows with a larger labelled"):
        checked(LanguageModel(blocks=0), prompts(labelled=7))
    with pytest.raises(PassError, match="labelled=0 must be a number above 0 and at most 1"):
        DeadRows(0)


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    model.zero_grad()
    output = model(*batch)
    (output[0] if isinstance(output, tuple) else output).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_batches_with_more_labels_are_computed_in_full() -> None:
    model, batch = LanguageModel(blocks=0), prompts()
    opt = graphopt.optimize(copy.deepcopy(model), batch, backend="aot_eager", verify=True)
    assert "the loss reads 4 rows of 8 of each sample, those with a label among them" in str(opt.report)
    for labelled, compilations in ((4, 1), (7, 2), (2, 2), (8, 2), (0, 2)):
        batch = prompts(labelled=labelled)
        for ours, eager in zip(gradients(opt, batch), gradients(model, batch), strict=True):
            torch.testing.assert_close(ours, eager, equal_nan=True)
        assert opt.counters.compilations == compilations
        assert opt.last_step is not None
        narrow = any(node.name.startswith("rows_with_label") for node in opt.last_step.graph.graph.nodes)
        assert narrow == (labelled <= 4)


def test_labels_by_name_in_another_order_or_by_place_and_other_sizes() -> None:
    model = LanguageModel(blocks=0)
    x, labels = prompts()
    opt = graphopt.optimize(copy.deepcopy(model), {"x": x, "labels": labels}, backend="aot_eager")
    for samples, rows in ((3, 8), (5, 8), (2, 16), (1, 4)):
        x, labels = prompts(samples, rows, rows // 3)
        model.zero_grad()
        opt.zero_grad()
        (opt(x, labels) if samples == 5 else opt(labels=labels, x=x)).backward()
        model(x, labels).backward()
        for ours, eager in zip(opt.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad)
        assert opt.last_step is not None
        assert ("rows_with_label" in str(opt.last_step.graph.graph)) == (rows == 8)  # of several lengths, the length is a symbol


def test_labels_that_are_made_otherwise_than_in_the_example() -> None:
    """They were counted wrongly: the step begins again with all rows, draws and buffers included, and later ones keep them."""

    class Made(LanguageModel):
        def __init__(self) -> None:
            super().__init__(blocks=0)
            self.first = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, labels: Tensor, masked: bool = True) -> Any:
            x = nn.functional.dropout(self.first(x.flatten(0, 1)), 0.5).view_as(x)
            return super().forward(x, labels.masked_fill(torch.arange(8) < 6, IGNORED) if masked else labels)

    model, batch = Made(), prompts(labelled=8)
    opt = graphopt.optimize(copy.deepcopy(model), batch, backend="aot_eager")
    assert "the loss reads" in str(opt.report)
    for masked in (True, False, True):
        for run in (model, opt):
            run.zero_grad()
            torch.manual_seed(0)
            run(*batch, masked=masked).backward()
        for ours, eager in zip(opt.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad)
        for ours, eager in zip(opt.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(ours, eager)
    assert any("rows with ignored labels are left out no more" in note for note in opt.report.notes)


def test_a_step_that_begins_again_writes_statistics_once() -> None:
    """Inductor writes buffers in place, and before rows are found."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(50, 32), nn.BatchNorm1d(32)
            self.head = nn.Linear(32, 50)

        def forward(self, words: Tensor, labels: Tensor, masked: bool = True) -> Tensor:
            labels = labels if masked else words
            logits = self.head(self.norm(self.words(words).mT).mT)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    words = torch.randint(50, (4, 32))
    model, batch = Normalised(), (words, words.masked_fill(torch.arange(32) > 3, IGNORED))
    opt = graphopt.optimize(copy.deepcopy(model), batch, backend="inductor")
    assert "the loss reads" in str(opt.report)
    for masked in (True, False):
        for run in (model, opt):
            run(*batch, masked=masked).backward()
    assert any("rows with ignored labels are left out no more" in note for note in opt.report.notes)
    for (name, ours), eager in zip(opt.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, eager, msg=name)


@pytest.mark.parametrize("labelled", [3, 0])
def test_logits_that_are_differentiated_after_all(labelled: int) -> None:
    """The step runs again for their gradients, with all rows; also where there is no label, and the loss is NaN."""
    model, batch = LanguageModel(logits=True, blocks=0), prompts(labelled=labelled)
    opt = graphopt.optimize(copy.deepcopy(model), batch, backend="aot_eager")
    assert "the loss reads" in str(opt.report)
    for _ in range(4):  # the third is the first that is compiled for both
        for run in (model, opt):
            run.zero_grad()
            loss, logits = run(*batch)
            (loss + logits.square().mean()).backward()
        for ours, eager in zip(opt.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad, equal_nan=True)
    assert not any("could not be" in note for note in opt.report.notes)


def test_where_more_may_not_be_computed_than_planned_nothing_is_left_out() -> None:
    model, batch = LanguageModel(blocks=0), prompts()
    for budget in (Budget(memory="1GiB"), Budget(variance=0.1)):
        opt = graphopt.optimize(copy.deepcopy(model), batch, budget, backend="aot_eager")
        assert "dead_rows" not in opt.plan.decisions
    opt = graphopt.optimize(copy.deepcopy(model), prompts(labelled=8), backend="aot_eager")
    assert "dead_rows" not in opt.plan.decisions
    captured = capture(model, batch)
    assert not DeadRows().applicable(captured)
    assert [site.name for site in DeadRows(0.5).applicable(captured)] == ["the loss"]


@pytest.mark.parametrize(
    "others", [("linear_cross_entropy",), ("vcas",), ("greentrainer", "linear_cross_entropy", "lsp")], ids="+".join
)
def test_beside_others(others: tuple[str, ...]) -> None:
    passes = [(DeadRows(0.5), None), *(PASSES[name] for name in others)]
    places = {id(rewrite): i for i, rewrite in enumerate(in_order([rewrite for rewrite, _ in passes]))}
    passes.sort(key=lambda pair: places[id(pair[0])])
    dtypes = (torch.float64,) if "vcas" in others else (torch.float64, torch.float32)
    checks = check_passes(passes, LanguageModel(), prompts(), dtypes=dtypes, draws=100)
    assert all(report.changes.changed for report in checks[-1].reports)


def test_a_batch_whose_labels_need_more_than_the_budget_is_told_of_once() -> None:
    model = LanguageModel()
    opt = graphopt.optimize(model, prompts(labelled=2), 0.6, backend="aot_eager")
    opt(*prompts(labelled=2)).backward()
    assert not any("over flops" in note for note in opt.report.notes)
    for _ in range(2):
        opt(*prompts(labelled=8)).backward()
    (note,) = [note for note in opt.report.notes if "over flops" in note]
    assert f"a step takes {opt.report.flops_ratio:.2f} of the FLOPs, over flops=0.6" in note
    assert opt.report.flops_ratio > 0.62


def test_within_a_budget() -> None:
    model, batch = LanguageModel(), prompts()
    opt, whole = (graphopt.optimize(copy.deepcopy(model), batch, 0.6, p, "aot_eager") for p in ("auto", ["greentrainer"]))
    assert opt.report.trained > whole.report.trained  # what is saved trains more
    assert opt.report.flops_ratio <= 0.6


def masked_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny masked or causal language model, and a batch."""
    import transformers

    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    attention = {"num_key_value_heads": 2, "head_dim": 8}
    own = {
        "Qwen3ForCausalLM": common | attention,
        "Gemma2ForCausalLM": common | attention,
        "DistilBertForMaskedLM": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 50},
        "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50},
        "T5ForConditionalGeneration": {
            "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50, "decoder_start_token_id": 0,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**own.get(name, common))).train()
    ids = torch.randint(3, 50, (3, 16))
    return model, {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) % 8 > 0, IGNORED)}


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "LlamaForCausalLM",
        *long(
            "RobertaForMaskedLM", "DistilBertForMaskedLM", "ModernBertForMaskedLM", "GPT2LMHeadModel", "Qwen3ForCausalLM",
            "Gemma2ForCausalLM", "T5ForConditionalGeneration",
        ),
    ],
)  # fmt: skip
def test_language_models(name: str) -> None:
    model, inputs = masked_model(name)
    opt = graphopt.optimize(copy.deepcopy(model), inputs, backend="aot_eager", outputs="loss")
    for part in (8, 2):
        inputs["labels"] = inputs["input_ids"].masked_fill(torch.arange(16) % part > 0, IGNORED)
        for run in (model, opt):
            run.zero_grad()
            torch.manual_seed(0)  # dropout included
            run(**inputs).loss.backward()
        largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
        for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
            if parameter.grad is not None:
                assert (parameter.grad - other.grad).abs().max() <= 1e-5 * largest
        assert part != 8 or opt.report.flops_ratio < 0.93
