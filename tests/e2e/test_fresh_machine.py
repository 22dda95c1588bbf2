"""A newcomer's first quarter of an hour works as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fresh_machine

ROOT = Path(__file__).parents[2]


def test_every_block_of_the_readme_is_run_in_its_order() -> None:
    commands = [command for block in fresh_machine.blocks((ROOT / "README.md").read_text("utf-8")) for command in block]
    assert [command.split()[:2] for command in commands[:2]] == [["make", "demo"], ["make", "test"]]
    assert any("graphopt fit" in command for command in commands)
    assert sum("import graphopt" in command for command in commands) == 2


@pytest.mark.long
def test_the_readme_by_copy_and_paste(tmp_path: Path) -> None:
    fresh_machine.main(tmp_path / "clone")
