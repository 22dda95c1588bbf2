"""What the server of `tests.forked` imports before it forks: what processes of tests need."""

import importlib
from pathlib import Path

from tests.cheaper import all_imported

works = sorted((Path(__file__).parent / "distributed").glob("work_*.py"))
needed = ["torch._inductor.compile_fx", "tests.integrations.trainer_runs", *(f"tests.distributed.{file.stem}" for file in works)]
for name in needed:
    importlib.import_module(name)
all_imported()
