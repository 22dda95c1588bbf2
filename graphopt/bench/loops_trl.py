"""Training loops of TRL and sentence-transformers for `graphopt bench loops`."""

from __future__ import annotations

from functools import partial
from typing import Any

from graphopt.bench import loops_models as tiny
from graphopt.bench.loops_run import Case, Loop, cases_of


def lora() -> Any:
    """Adapters of a tiny Llama."""
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def supervised(loop: Loop, adapters: bool = False, **options: Any) -> None:
    """Supervised fine-tuning."""
    import trl

    rows = [{"text": tiny.text(i)} for i in range(14)]
    tuned(loop, trl.SFTTrainer, trl.SFTConfig, tiny.llama(), rows, adapters, max_length=16, **options)


def preferred(loop: Loop, adapters: bool = False) -> None:
    """Direct preference optimisation."""
    import trl

    columns = {"prompt": 0, "chosen": 100, "rejected": 200}
    rows = [{name: tiny.text(i + start) for name, start in columns.items()} for i in range(10)]
    tiny.llama().save_pretrained(loop.folder / "base")  # where the reference comes from
    model = type(tiny.llama()).from_pretrained(loop.folder / "base")
    tuned(loop, trl.DPOTrainer, trl.DPOConfig, model, rows, adapters, max_length=24)


def tuned(loop: Loop, trainer: Any, config: Any, model: Any, rows: list[Any], adapters: bool, **options: Any) -> None:
    """Train with one of TRL's trainers, and check that what it saves is loaded again."""
    from datasets import Dataset

    data = Dataset.from_list(rows)
    run = trainer(
        model,
        args=config(output_dir=str(loop.folder), **{**tiny.ARGUMENTS, "bf16": False, **options}),
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=tiny.tokenizer(),
        peft_config=lora() if adapters else None,
        callbacks=loop.callbacks(),
    )
    loop.train(run)
    if not adapters:
        tiny.reloaded(loop, run.model)
        return
    import peft

    found = peft.PeftModel.from_pretrained(tiny.llama(), loop.folder / "saved").state_dict()
    trained = {name: value for name, value in run.model.state_dict().items() if "lora_" in name}
    loop.check(all(found[n].equal(value) for n, value in trained.items()), "the saved adapters have other weights")


def embedding(loop: Loop, loss: str, optimised: bool = False) -> None:
    """Embeddings of sentences.

    Args:
        loss: a class of `sentence_transformers.losses`.
        optimised: an optimised model is trained, in place of graphopt's callback.
    """
    import sentence_transformers
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertModel

    folder = loop.folder / "base"
    BertModel(tiny.bert().config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    words = modules.Transformer(str(folder))
    model = sentence_transformers.SentenceTransformer(modules=[words, modules.Pooling(32)], device="cpu")
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(output_dir=str(loop.folder), **tiny.ARGUMENTS)
    pairs = [{"anchor": tiny.text(i), "positive": tiny.text(i + 100)} for i in range(14)]
    scored = [{**pair, "score": i / 14} for i, pair in enumerate(pairs)]
    data = Dataset.from_list(scored if loss.startswith("Cosine") else pairs)
    given = loop.optimized(model, (model.preprocess([row["anchor"] for row in pairs[:4]]),)) if optimised else model
    run = sentence_transformers.SentenceTransformerTrainer(
        given,
        arguments,
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        loss=getattr(losses, loss)(given),
        callbacks=[] if optimised else loop.callbacks(),
    )
    loop.train(run, model)
    sentences = [pair["anchor"] for pair in pairs]
    before = model.encode(sentences, convert_to_tensor=True)
    again = sentence_transformers.SentenceTransformer(str(loop.folder / "saved"), device="cpu")
    loop.check(again.encode(sentences, convert_to_tensor=True).allclose(before, atol=1e-5), "the saved model embeds otherwise")


HEAD_APART = ("torch.compile traces no use of 1 parameters",)
"""TRL multiplies by the head's weight in an autograd function of its own, which torch.compile leaves to eager mode."""

LOSS_APART = ("The model returns no loss",)
"""The loss of sentence-transformers takes what a model returns."""

CASES: dict[str, Case] = {
    **cases_of(
        "TRL",
        *("trl", "datasets"),
        told=HEAD_APART,
        sft=supervised,
        sft_bf16=partial(supervised, bf16=True),
        sft_packing=partial(supervised, packing=True),
        sft_dft=partial(supervised, loss_type="dft", gradient_accumulation_steps=2),
        dpo=preferred,
    ),
    **cases_of(
        "TRL",
        *("trl", "datasets", "peft"),
        told=HEAD_APART,
        sft_lora=partial(supervised, adapters=True),
        dpo_lora=partial(preferred, adapters=True),
    ),
    **cases_of(
        "sentence-transformers",
        *("sentence_transformers", "datasets"),
        told=LOSS_APART,
        sentences_ranking=partial(embedding, loss="MultipleNegativesRankingLoss"),
        sentences_cosine=partial(embedding, loss="CosineSimilarityLoss"),
        sentences_model=partial(embedding, loss="MultipleNegativesRankingLoss", optimised=True),
    ),
}
"""By name."""
