"""The template filled: one file, with its style, its program and its data."""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template
from typing import Any

from graphopt.report.files import plain

SCRIPTS = ("base", "blocks", "memory", "plans", "tensors", "techniques", "main")
"""In the order in which they run."""


def filled(title: str, verdict: str, data: dict[str, Any]) -> str:
    """The page.

    Args:
        data: what the scripts draw; see `details`.
    """
    folder = resources.files(__package__)

    def part(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    text = json.dumps(plain(data), separators=(",", ":"), ensure_ascii=False)
    return Template(part("page.html")).substitute(
        title=html.escape(title),
        verdict=html.escape(verdict),
        style=part("page.css"),
        data=text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        script="\n".join(part(f"{name}.js") for name in SCRIPTS),
    )
