"""Random networks under random passes and budgets train as in eager mode; `make fuzz SEED=...` tries 2,000 of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from tests.properties.contracts import Request, check, requests
from tests.properties.random_models import Network, networks

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
SEED = int(os.environ.get("FUZZ_SEED") or 0)
SHARDS, NETWORKS, REQUESTS = (20, 25, 4) if LONG else (2, 3, 4)
INDUCTOR_ONE_IN = 100 if LONG else 0


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_networks_train_as_in_eager_mode(shard: int, record_property: Callable[[str, object], None]) -> None:
    outcomes: Counter[str] = Counter()

    @seed(1000 * SEED + shard)
    @settings(
        max_examples=NETWORKS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(networks(), st.lists(requests(INDUCTOR_ONE_IN), min_size=REQUESTS, max_size=REQUESTS))
    def hold(model: Network, wanted: list[Request]) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        outcomes["failed"] += 1
        found = check(model, wanted)
        outcomes["failed"] -= 1
        outcomes.update(found)

    try:
        hold()
    finally:
        record_property("random networks", {"seed": SEED, **outcomes})
