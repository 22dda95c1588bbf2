"""What the page and the dump of a report are made from: the graph, the plan, and what each of its passes does by itself."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import cached_property

from graphopt.analysis.flops import FlopProfile
from graphopt.graph import TrainingGraph
from graphopt.passes import PassReport
from graphopt.planner.plan import Plan
from graphopt.report.python_text import readable


@dataclass(frozen=True)
class Stage:
    """What one pass does to the graph as those before it leave it.

    Attributes:
        graph: that it leaves.
        diff: of the graph's text, in the unified format.
    """

    graph: TrainingGraph
    report: PassReport
    diff: str


@dataclass(frozen=True)
class Source:
    """See the module.

    Attributes:
        graph: that the plan was made on, at the batch size of the report.
        flops: of full training, at the same.
        backend: whose memory is predicted: "inductor" or "aot_eager".
    """

    graph: TrainingGraph
    plan: Plan
    flops: FlopProfile
    backend: str

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """A stage for every pass, in the order in which they run."""
        graph, before, found = self.graph, readable(self.graph), []
        for rewrite in self.plan.passes:
            graph, (report,) = replace(self.plan, passes=(rewrite,)).rewrite(graph)
            after = readable(graph)
            lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
            diff = difflib.unified_diff(*lines, f"before {rewrite.name}", f"after {rewrite.name}", n=1)
            found.append(Stage(graph, report, "".join(diff)))
            before = after
        return tuple(found)

    @property
    def rewritten(self) -> TrainingGraph:
        """The graph that all passes leave."""
        return self.stages[-1].graph if self.stages else self.graph
