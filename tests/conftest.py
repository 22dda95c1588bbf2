"""Quiet third-party libraries, one seed for every test, and what the fuzzer tells at the end."""

import contextlib
import gc
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that each import torch
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # a collection for each compiled frame
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # measured times of products are not the user's

from tests.cheaper import all_imported

# isort: split
import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests import zoo
from tests.shared_captures import shared_captures

ABOUT_TRACING = {
    "tests.test_capture",
    "tests.frontend.test_recurrent",
    "tests.integrations.test_dynamo",
    "tests.properties.test_random_models",
    "tests.runtime.test_python_state",
}

logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _only_new_objects() -> None:
    """`gc.collect()` looks at nothing but what the test makes: the objects of a suite take seconds."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _shared_captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing but what is about tracing traces a model twice."""
    with contextlib.nullcontext() if request.module.__name__ in ABOUT_TRACING else shared_captures():
        yield


settings.register_profile("unhurried", deadline=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unhurried"))


FIRST = ("distributed", "models", "integrations", "e2e", "tests", "passes", "frontend", "planner")
"""Folders whose groups take long: they start first, so that no process ends long after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups start in this order."""
    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))


def _group(test: str) -> str:
    """What runs in one process, as it shares traces and fixtures: the tests of a model of the zoo, or of a file.

    Those that start several ranks are one group, so that there is never more than one set of ranks.
    """
    file, _, parameters = test.partition("[")
    if file.startswith("tests/distributed/"):
        return "distributed"
    return next((name for name in zoo.FACTORIES if f"-{name}-" in f"-{parameters[:-1]}-"), file.partition("::")[0])


class _Scheduler(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """With `--dist loadscope`, groups; pytest 9.2 does not see xdist's own marks of groups."""
    return _Scheduler(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    all_imported()


def pytest_unconfigure() -> None:
    """What the interpreter's end has to find again."""
    gc.unfreeze()


LEAST_HELD = 0.6
"""Part of all random networks that must not be refused, lest refusals hide everything; a shard of a hundred may have fewer."""


def _random_networks(reporter: Any) -> tuple[int, Counter[str]]:
    """The seed, and how many random networks had which outcome, over all processes."""
    seed, outcomes = 0, Counter[str]()
    for report in (r for reports in reporter.stats.values() for r in reports if getattr(r, "when", "") == "call"):
        for name, value in report.user_properties:
            if name == "random networks":
                seed = value["seed"]
                outcomes.update({k: n for k, n in value.items() if k != "seed"})
    return seed, outcomes


def _faults(config: pytest.Config, reporter: Any) -> Iterator[str]:
    """Of the suite itself: too many random networks were refused, or tests of one group ran in several processes."""
    outcomes = _random_networks(reporter)[1]
    if outcomes["held"] < LEAST_HELD * outcomes.total():
        yield f"fewer than {LEAST_HELD:.0%} of the random networks were held"
    if config.getvalue("dist") == "loadscope":
        reports = [report for some in reporter.stats.values() for report in some if hasattr(report, "node")]
        ran = Counter(group for group, _ in {(_group(report.nodeid), report.node) for report in reports})
        yield from (f"tests of the group {group} ran in {times} processes" for group, times in ran.items() if times > 1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == pytest.ExitCode.OK and any(_faults(session.config, reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many random networks were tried with which outcome, and faults."""
    seed, outcomes = _random_networks(terminalreporter)
    if outcomes:
        terminalreporter.section(f"{outcomes.total()} random networks, SEED={seed}")
        for outcome, count in outcomes.most_common():
            terminalreporter.line(f"{count:6} {outcome}")
    for fault in _faults(config, terminalreporter):
        terminalreporter.line(f"FAILED: {fault}")
