"""A page opened in headless Chromium: what a script finds there, and every error and request that opening it made."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1200,900", "--virtual-time-budget=5000",
)  # fmt: skip

WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => window.problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => window.problems.push("request refused: " + event.blockedURI));
</script>"""

TELL = """<script>
addEventListener("load", () => {
  let found;
  try { found = (() => { %s })(); } catch (error) { window.problems.push(String(error)); }
  const requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  const told = { found, problems: window.problems, requests, ready: document.body.dataset.ready };
  document.body.replaceChildren(document.createTextNode("TOLD" + JSON.stringify(told) + "DLOT"));
});
</script>"""


def visit(page: str, script: str, folder: Path) -> dict[str, Any]:
    """Open a page, run a script in it that returns plain values, and close it.

    Returns:
        What the script `found`; `problems` and `requests`, which should be empty; `ready`, the milliseconds it took to draw.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.fail("tests of the report need a browser: apt-get install chromium (.ci/run does it)")
    file = folder / "visited.html"
    file.write_text(page.replace("<head>", "<head>" + WATCH, 1).replace("</body>", TELL % script + "</body>", 1), "utf-8")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    match = re.search("TOLD(.*)DLOT", done.stdout, re.DOTALL)
    assert match, f"the page told nothing: {done.stdout[-500:]} {done.stderr[-500:]}"
    told: dict[str, Any] = json.loads(html.unescape(match[1]))
    return told
