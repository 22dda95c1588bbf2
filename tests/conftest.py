"""Quiet third-party libraries and one seed for every test."""

import logging
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # measured times of products are not the user's

import pytest
import torch
from hypothesis import settings

logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


settings.register_profile("unhurried", deadline=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unhurried"))
