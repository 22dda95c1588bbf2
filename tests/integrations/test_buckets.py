"""Padding to few lengths by the collators' own padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from graphopt.errors import InputError
from graphopt.integrations.trainer import bucketed
from tests.integrations.trainer_runs import tokenizer


def features(*lengths: int, labels: bool = False) -> list[dict[str, Any]]:
    return [{"input_ids": [2] * n, **({"labels": [5] * n} if labels else {})} for n in lengths]


def test_a_batch_is_the_collators_own_with_more_padding() -> None:
    plain = DataCollatorForTokenClassification(tokenizer())
    ours, expected = bucketed(plain, (8, 12, 32))(features(5, 9, labels=True)), plain(features(5, 9, labels=True))
    assert plain.pad_to_multiple_of is None
    for key, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        assert ours[key].shape == (2, 12)
        assert torch.equal(ours[key][:, :9], expected[key])
        assert (ours[key][:, 9:] == filler).all()


def test_any_lengths_become_few() -> None:
    collator = bucketed(DataCollatorWithPadding(tokenizer()))
    draw = random.Random(0)
    seen = {collator(features(draw.randint(1, 700), draw.randint(1, 700)))["input_ids"].shape[1] for _ in range(100)}
    assert seen <= {16, 32, 64, 128, 256, 512, 1024}


@pytest.mark.parametrize(("longest", "padded"), [(8, 8), (9, 20), (20, 20), (21, 32), (33, 64)])
def test_a_length_is_at_most_the_models_where_the_text_is(longest: int, padded: int) -> None:
    collator = bucketed(DataCollatorWithPadding(tokenizer(model_max_length=20)), (8, 32))
    assert collator(features(longest))["input_ids"].shape[1] == padded


def test_labels_longer_than_the_input_count() -> None:
    batch = bucketed(DataCollatorForSeq2Seq(tokenizer()), (8, 32))([{"input_ids": [2] * 5, "labels": [2] * 20}])
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 32)


def test_rows_of_bare_tokens() -> None:
    batch = bucketed(DataCollatorForLanguageModeling(tokenizer(), mlm=False), (8, 32))([[2] * 9, [2] * 3])
    assert batch["input_ids"].shape == (2, 32)
    assert (batch["labels"][0, 9:] == -100).all()


def test_a_collator_with_a_seed_goes_on_with_its_random_numbers() -> None:
    plain = DataCollatorForLanguageModeling(tokenizer(), seed=0)
    collator = bucketed(plain, (32,))
    first, second = (collator(features(32))["labels"] for _ in range(2))
    assert not torch.equal(first, second)
    assert plain.generator is None


def test_what_cannot_pad_is_refused() -> None:
    with pytest.raises(InputError, match="pad_to_multiple_of"):
        bucketed(default_data_collator)
    with pytest.raises(InputError, match="lengths"):
        bucketed(DataCollatorWithPadding(tokenizer()), ())
    with pytest.raises(InputError, match="lengths"):
        bucketed(DataCollatorWithPadding(tokenizer()), (0, 8))
