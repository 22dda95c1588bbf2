"""What sampling would do to the gradients of some batches, measured without touching the user's model (VCAS, section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.vcas.measuring import MeasuringStep
from graphopt.passes.vcas.ops import in_float64
from graphopt.passes.vcas.ratios import Calibration, Norms, SampleRatios, weight_of
from graphopt.passes.vcas.variance_probe import Probe
from torch import Tensor

from graphopt.calls import flatten_call
from graphopt.capture import unchanged_rng
from graphopt.loss import LossFunction

ENTRIES, FEWEST_ENTRIES = 0.01, 64
"""Part of each gradient's entries that variances are measured on, and the least number of them."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the model."""


@dataclass(frozen=True)
class Exact:
    """What passes that leave nothing out found.

    Attributes:
        entries: by batch and parameter, some entries of its gradient, so scaled that they have the variance of all.
        norms: of the samples' gradients at every boundary.
    """

    entries: list[dict[str, Tensor]]
    norms: Norms

    def batch_variances(self) -> dict[str, float]:
        """V_s of each parameter, as all of its entries are taken to have it."""
        found = {}
        for name in self.entries[0]:
            stacked = torch.stack([gradients[name] for gradients in self.entries])
            found[name] = float((stacked - stacked.mean(0)).square().sum()) / (len(self.entries) - 1)
        return found


@dataclass(frozen=True)
class Measurement:
    """Passes of a measuring step over a few batches.

    Attributes:
        tensors: the model's parameters and buffers by name.
        batches: at least two.
        number: of the calibration; decides which entries of gradients are looked at.
    """

    step: MeasuringStep
    tensors: Mapping[str, Tensor]
    loss: LossFunction | None
    batches: Sequence[Call]
    number: int

    def exact(self) -> Exact:
        """One pass per batch with nothing left out."""
        probe = self.step.probe
        whole = torch.full((len(probe.parents) + len(probe.tokens),), 2**31, dtype=torch.int64)
        rows: dict[str, list[Tensor]] = {name: [] for name in probe.parents}
        entries = []
        for i, batch in enumerate(self.batches):
            entries.append(self._entries(batch, whole, i))
            slots = self.step.measured.slots
            for name in rows:
                rows[name].append(slots[f"norms {name}"].detach().cpu())
        return Exact(entries, Norms(rows, probe.parents))

    def sampled(self, exact: Exact, ratios: SampleRatios) -> Calibration:
        """One pass per batch with `ratios`: the variance that they add."""
        probe = self.step.probe
        counts = _row_counts(probe, self.step.batch_size, ratios)
        added: list[float] = []
        terms: dict[str, list[float]] = {name: [] for name in probe.tokens}
        for i, batch in enumerate(self.batches):
            sampled = self._entries(batch, counts, i)
            added.append(sum(float((sampled[n] - exact.entries[i][n]).square().sum()) for n in sampled))
            for name in terms:
                terms[name].append(float(self.step.measured.slots[f"variance {name}"]))
        whole = exact.batch_variances()
        per_weight = {weight: whole[weight] for weight in map(weight_of, terms) if weight in whole}
        means = {n: sum(v) / len(v) for n, v in terms.items()}
        return Calibration(sum(whole.values()), sum(added) / len(added), per_weight, means)

    def _entries(self, batch: Call, counts: Tensor, seed: int) -> dict[str, Tensor]:
        """Some entries of every gradient, the same ones throughout a calibration, with the dropout of `seed`."""
        with unchanged_rng(list(self.tensors.values())):
            torch.manual_seed(seed)
            device = next(iter(self.tensors.values())).device
            found = self.step.gradients(self.tensors, flatten_call(*batch), counts.to(device), self.loss)
        generator = torch.Generator().manual_seed(self.number)
        entries = {}
        for name, gradient in found.items():
            number = min(gradient.numel(), max(FEWEST_ENTRIES, math.ceil(ENTRIES * gradient.numel())))
            chosen = torch.randint(gradient.numel(), (number,), generator=generator)
            some = in_float64(gradient.reshape(-1)[chosen.to(gradient.device)]).cpu()
            entries[name] = some * math.sqrt(gradient.numel() / max(1, number))
        return entries


def _row_counts(probe: Probe, batch_size: int, ratios: SampleRatios) -> Tensor:
    """Rows kept at `ratios`, as the probe takes them."""
    kept: dict[str | None, int] = {None: batch_size}
    counts = []
    for name, parent in probe.parents.items():
        wanted = max(2, math.ceil(ratios.rows.get(name, 1.0) * batch_size - 1e-9))
        kept[name] = min(kept[parent], wanted)
        counts.append(kept[name] if kept[name] < kept[parent] else 2**31)
    for name, (tokens, above) in probe.tokens.items():
        counts.append(max(1, math.ceil(ratios.tokens.get(name, 1.0) * kept[above] * tokens - 1e-9)))
    return torch.tensor(counts)
