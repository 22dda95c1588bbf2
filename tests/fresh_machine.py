"""The README by copy and paste in a clone that nothing was done in: its two commands, then its blocks from top to bottom.

    python tests/fresh_machine.py FOLDER

FOLDER is made. It needs git, make, pip's index, and a quarter of an hour, most of it for torch and for `make demo`. The suite
itself is not run again: `make test` gets one file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(readme: str) -> list[list[str]]:
    """What to run for each fenced block, as commands in a copy of the repository; Python is one command."""
    found = []
    for language, text in FENCE.findall(readme):
        if language == "python":
            found.append([f".venv/bin/python - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK"])
        elif language == "console":
            found.append([f"PATH=$PWD/.venv/bin:$PATH {line[2:]}" for line in text.splitlines() if line.startswith("$ ")])
        else:
            commands = [line.partition("#")[0].strip() for line in text.splitlines()]
            found.append([f"{command} ARGS=tests/test_budget.py" if command == "make test" else command for command in commands])
    return found


def main(folder: Path) -> None:
    """Clone, and run every block."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for commands in blocks((folder / "README.md").read_text("utf-8")):
        for command in commands:
            print(f"$ {command}", flush=True)
            subprocess.run(["bash", "-ec", command], cwd=folder, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
