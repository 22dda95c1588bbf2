"""Fine-tune MiniLM-L6 on the WordNet glosses on several ranks, with half of the FLOPs.

* mesh: `optimize(mesh=...)`; the gradients that are left are averaged in the compiled backward.
* ddp: `DistributedDataParallel` around the optimised model, which sends all gradients.
* fsdp: `fully_shard` on every layer and on the model, before it is optimised; weights and optimizer state are divided.

Every rank has its part of the joint batch. With `--check` rank 0 then trains by itself on the joint batches, and the largest
difference between the two loss curves is printed. There is no dropout, which ranks would draw differently.

    torchrun --nproc-per-node 2 examples/distributed_glosses.py --strategy mesh --check
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.bench.glosses import Glosses, label_numbers, pretrained_minilm

Batch = dict[str, Tensor]


def without_dropout(classes: int) -> nn.Module:
    """MiniLM with its weights."""
    model = pretrained_minilm(classes)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained(
    args: argparse.Namespace, model: nn.Module, step: nn.Module, part: Callable[[Batch], Batch], data: Glosses
) -> list[float]:
    """Losses of this rank's part of every batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    losses = []
    for _, batch in zip(range(args.steps), data.batches(args.batch, seed=0), strict=False):
        loss = step(**part(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def counted(ddp: DistributedDataParallel) -> list[int]:
    """Bytes of every bucket that is sent from now on."""
    sent: list[int] = []

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(dist.group.WORLD, hook)
    return sent


def main(argv: list[str] | None = None) -> float | None:
    """Train, and print what was sent; returns the difference of the curves with `--check`, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["mesh", "ddp", "fsdp"], default="mesh")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--budget", type=float, default=0.5, help="fraction of full training's FLOPs")
    parser.add_argument("--batch", type=int, default=32, help="definitions of all ranks together")
    parser.add_argument("--length", type=int, default=32, help="tokens per definition")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rows", type=int, default=None, help="of the data; all by default")
    parser.add_argument("--check", action="store_true", help="compare with one process on the joint batches")
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    labels = label_numbers()
    data = Glosses("train", labels, args.length, args.rows)
    first = next(data.batches(args.batch, seed=0))

    def own(batch: Batch) -> Batch:
        return {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}

    model = without_dropout(len(labels))
    everything = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    mesh = init_device_mesh("cpu", (size,))
    if args.strategy == "fsdp":
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"budget": args.budget, "backend": args.backend}
    opt = graphopt.optimize(model, own(first), mesh=mesh if args.strategy == "mesh" else None, **options)
    if args.strategy == "ddp":
        ddp = DistributedDataParallel(opt, find_unused_parameters=True)
        sent = counted(ddp)
        losses = trained(args, model, ddp, own, data)
        moved = sum(sent) / args.steps
    else:
        losses = trained(args, model, opt, own, data)
        moved = opt.report.communication.bytes
    curve = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(curve)
    curve /= size
    alone = dist.new_group([0])
    if rank:
        dist.barrier()
        return None
    print(f"{args.strategy}: {moved / 1e6:.1f} MB are sent per step and rank; all gradients are {everything / 1e6:.1f} MB")
    print(f"loss {curve[0]:.4f} -> {curve[-1]:.4f}, {len(opt.selected)} tensors trained")
    difference = None
    if args.check:
        model = without_dropout(len(labels))
        joint = graphopt.optimize(model, first, group=alone, **options)
        assert joint.selected == opt.selected
        one = torch.tensor(trained(args, model, joint, lambda batch: batch, data), dtype=torch.float64)
        difference = float((curve - one).abs().max())
        print(f"one process on the joint batches: losses differ by at most {difference:.1e} over {args.steps} steps")
    dist.barrier()
    return difference


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
