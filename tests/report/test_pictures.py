"""Pictures have a title, units of fitting size, the peak by name and the device's capacity; the optimizer takes little room."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

import graphopt
from graphopt.planner.pareto import Point
from graphopt.report.costs import plot_points, plot_timeline
from graphopt.report.units import in_bytes
from tests import zoo


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return saved


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)


def test_the_timeline_names_its_peak_and_the_device(drawn: list[Figure], tmp_path: Path) -> None:
    model, inputs = zoo.make("mlp", 4)
    profile = graphopt.analyze(model, inputs, backend="aot_eager").memory
    plot_timeline(profile, tmp_path / "t.png", "a title", 2 * profile.peak_bytes)
    axes = drawn[0].axes[0]
    assert axes.get_title() == "a title"
    assert axes.get_ylabel() == "KiB alive"
    assert f"peak {in_bytes(profile.peak_bytes)} at {profile.rows[profile.peak_row].node}" in texts(drawn[0])
    assert f"device: {in_bytes(2 * profile.peak_bytes)}" in texts(drawn[0])
    begins = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert begins[0] == 0
    assert begins[-1] == pytest.approx(0.9)  # the optimizer
    box = axes.get_legend().get_window_extent()
    assert box.x0 >= axes.get_window_extent().x1  # beside the data


def test_titles_are_no_mathematics(tmp_path: Path) -> None:
    model, inputs = zoo.make("mlp", 4)
    plot_timeline(graphopt.analyze(model, inputs, backend="aot_eager").memory, tmp_path / "t.png", "a$x_{$b")
    plot_points([Point(1.0, 2**30, 1.0, 6, 0, 0)], tmp_path / "p.png", "a$x_{$b")
    assert {path.name for path in tmp_path.iterdir()} == {"t.png", "p.png"}


def test_a_device_far_larger_than_the_peak_does_not_flatten_the_picture(drawn: list[Figure], tmp_path: Path) -> None:
    model, inputs = zoo.make("mlp", 4)
    profile = graphopt.analyze(model, inputs, backend="aot_eager").memory
    plot_timeline(profile, tmp_path / "t.png", "a title", 2**40)
    assert drawn[0].axes[0].get_ylim()[1] < 2 * profile.peak_bytes / 2**10
    assert "device" not in texts(drawn[0])


def test_the_plot_of_plans_marks_full_training(drawn: list[Figure], tmp_path: Path) -> None:
    points = [Point(0.6, 2**30, 0.5, 3, 0, 0), Point(1.0, 3 * 2**30, 1.0, 6, 0, 0), Point(1.2, 2 * 2**30, 1.0, 6, 0, 2)]
    plot_points(points, tmp_path / "p.png", "a title")
    axes = drawn[0].axes[0]
    assert axes.get_title() == "a title"
    assert "GiB" in axes.get_ylabel()
    assert texts(drawn[0]) == "full training"
    assert list(axes.lines[0].get_xdata()) == [1.0, 1.2]  # what keeps everything
