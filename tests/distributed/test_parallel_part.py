"""A model of which a part is a DistributedDataParallel: Dynamo would divide its graphs by the buckets of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.testing.compare import compare_gradients


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Head(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(512, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_part_with_more_than_one_bucket_trains_as_in_eager_mode() -> None:
    model = Head(DistributedDataParallel(Body(), bucket_cap_mb=1))
    batch = torch.randn(4, 512), torch.tensor([0, 1, 2, 0])
    model(*batch).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    opt = graphopt.optimize(model, batch, backend="aot_eager")
    for _ in range(2):
        opt.zero_grad()
        opt(*batch).backward()
    assert opt.last_step is not None
    assert not opt.model_runs
    found = {name: p.grad for name, p in model.named_parameters()}
    assert not compare_gradients(found, wanted, list(wanted), 1e-5).difference
