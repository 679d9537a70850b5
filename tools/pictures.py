"""Draw pictures of real runs into docs/_static: `nox -s pictures`.

The runs train, are killed, hang and are measured on this machine (tools/drawing/real_runs.py); docs/pictures.json keeps
their figures, and each picture is drawn from them alone. `nox -s pictures -- --draw` draws them again without runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawing.svg import Axes, Drawing
from drawing.terminal import recording

__all__ = ("FIGURES", "PICTURES", "STATIC", "drawn")

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "docs" / "_static"
FIGURES = ROOT / "docs" / "pictures.json"
Figures = dict[str, Any]
MIB = 2**20


def killed_run(figures: Figures) -> str:
    """The loss of a run that is killed, over the loss of one that is not."""
    run = figures["killed run"]
    first, last = run["attempts"][0], run["attempts"][-1]
    resumed, killed = last[0][0], run["killed_after"]
    drawing = Drawing(
        "A run that is killed continues on the same curve",
        f"Loss over {run['steps']} steps. One run is killed after step {killed} and started again; from its checkpoint "
        "on, its losses are those of the run that was not disturbed.",
        480,
        232,
    )
    highest = max(loss for _, loss in run["undisturbed"])
    axes = Axes(drawing, (40, 26, 428, 164), x=(0, run["steps"]), y=(0, highest * 1.08))
    axes.grid("step", "loss")
    axes.line(run["undisturbed"], "gray wide")
    axes.mark(killed, "SIGKILL to all processes", "red")
    for points, look in ((first, "orange"), (last, "blue")):
        axes.line(points, look)
        axes.dots(points, look)
    for row, (words, look) in enumerate(
        (
            ("not disturbed", "gray"),
            ("until it was killed", "orange"),
            (f"started again: continues after step {resumed - 10}", "blue"),
        )
    ):
        drawing.box((246, 58 + 18 * row), (14, 5), look)
        drawing.text((264, 64 + 18 * row), words, "note small")
    return drawing.svg()


LAYERS = (
    (("step",), "steps that count", "blue"),
    (("recomputed work",), "steps made again", "purple"),
    (("checkpoint stall",), "checkpoints", "green"),
    (("waiting for data", "waiting for other processes"), "waiting", "orange pale"),
    (("start-up", "first step"), "start-up", "gray pale"),
    (("down",), "down", "red"),
)
"""Categories of the time account that are shown as one, the name of each, and its look."""


def goodput(figures: Figures) -> str:
    """The shares of the categories in the time of a run until each moment."""
    time = figures["killed run"]["time"]
    moments, seconds = time["moments"], time["seconds"]
    drawing = Drawing(
        "Goodput of a run over time",
        "The time of an average process by category, as a share of the time so far. The share of steps grows, "
        f"falls when the run is killed and started again, and is {time['goodput']:.0%} at the end.",
        480,
        238,
    )
    axes = Axes(drawing, (44, 26, 278, 170), x=(0, moments[-1]), y=(0, 1))
    below = [0.0] * len(moments)
    final = []
    for categories, words, look in LAYERS:
        sums = [sum(one) for one in zip(*(seconds.get(name, [0.0] * len(moments)) for name in categories), strict=True)]
        above = [low + total / moment for low, total, moment in zip(below, sums, moments, strict=True)]
        axes.area(moments, below, above, look)
        if words == LAYERS[0][1]:
            axes.line(list(zip(moments, above, strict=True)), "ink")
        final.append((words, look, sums[-1] / moments[-1]))
        below = above
    axes.area(moments, below, [1.0] * len(moments), "gray faint")
    final.append(("unattributed", "gray faint", 1 - below[-1]))
    axes.grid("seconds since the start", "share of time", "{:.0%}".format)
    for start in time["starts"][1:]:
        axes.mark(start, "started again", "ink")
    for row, (words, look, share) in enumerate(reversed(final)):
        drawing.box((334, 36 + 22 * row), (10, 10), look)
        drawing.text((350, 45 + 22 * row), f"{words}  {share:.0%}", "note small")
    drawing.text((334, 45 + 22 * len(final) + 6), f"goodput {time['goodput']:.0%}", "ink strong")
    return drawing.svg()


PURPOSES = (
    ("Parameter", "parameters", "blue"),
    ("Gradient", "gradients", "green"),
    ("Optstate", "optimizer", "purple"),
    ("Activation", "activations", "orange"),
    ("", "other", "gray"),
)
"""Purposes of memory in a report of `accel check-plan`, what is said of each, and its look."""


def memory(figures: Figures) -> str:
    """For each plan, the memory by purpose that was estimated, above what was allocated."""
    rows = figures["memory of plans"]
    apart = max(abs(row["estimated"]["Total"] / row["allocated"] - 1) for row in rows)
    drawing = Drawing(
        "Memory of plans, estimated and allocated",
        f"For {len(rows)} plans, the memory that accel check-plan says beside what torch's allocator held: they differ "
        f"by at most {apart:.1%}.",
        480,
        46 + 52 * len(rows),
    )
    longest = max(max(row["estimated"]["Total"], row["allocated"]) for row in rows)
    scale = 330 / longest
    x = 0.0
    for _, words, look in PURPOSES:
        drawing.box((x, 6), (9, 9), look)
        drawing.text((x + 13, 14), words, "note small")
        x += 26 + 5.8 * len(words)
    drawing.box((x, 6), (9, 9), "ink faint")
    drawing.text((x + 13, 14), "allocated", "note small")
    for number, row in enumerate(rows):
        top, left = 42 + 52 * number, 0.0
        drawing.text((0, top), row["plan"], "ink")
        estimated = dict(row["estimated"])
        total = estimated.pop("Total")
        named = {key: estimated.pop(key, 0) for key, _, _ in PURPOSES if key}
        for key, _, look in PURPOSES:
            size = (named[key] if key else sum(estimated.values())) * scale
            drawing.box((left, top + 6), (size, 12), look)
            left += size
        drawing.box((0, top + 20), (row["allocated"] * scale, 8), "ink faint")
        drawing.text((left + 6, top + 16), f"{total / MIB:.1f} MiB", "ink small")
        drawing.text((row["allocated"] * scale + 6, top + 28), f"{row['allocated'] / MIB:.1f} MiB", "note small")
    return drawing.svg()


WAYS = (("padded", "random batches, padded"), ("tokens", "batches by tokens"), ("packed", "packed"))


def batches(figures: Figures) -> str:
    """Each batch of an epoch as a bar: its characters, and the places that nothing is learned from."""
    rows = figures["batches"]
    drawing = Drawing(
        "Batches of an epoch: padded, by tokens, and packed",
        "One bar for each batch of the same 2,000 paragraphs: characters, and above them padding. Padded ones are "
        "half padding; batches by tokens and packed ones have half the places and are almost full.",
        480,
        330,
    )
    highest = max(places for row in rows.values() for _, places in row["batches"])
    most = max(len(row["batches"]) for row in rows.values())
    for number, (way, words) in enumerate(WAYS):
        shown, top = rows[way]["batches"], 22 + 106 * number
        lost = 1 - sum(full for full, _ in shown) / sum(places for _, places in shown)
        drawing.text((0, top - 6), words, "ink strong")
        said = f"{lost:.0%} padding, {sum(places for _, places in shown):,} places, loss {rows[way]['loss']:.2f}"
        drawing.text((480, top - 6), said, "note small", "end")
        axes = Axes(drawing, (0, top, 480, 76), x=(0, most), y=(0, highest))
        for place, (full, places) in enumerate(shown):
            (left, upper), (right, middle) = axes.at(place, places), axes.at(place + 0.82, full)
            floor = axes.at(0, 0)[1]
            drawing.box((left, middle), (right - left, floor - middle), "blue")
            drawing.box((left, upper), (right - left, middle - upper), "gray pale")
        drawing.path([axes.at(0, 0), axes.at(most, 0)], "note hair")
    return drawing.svg()


def hang(figures: Figures) -> str:
    """What terminals print of a run that hangs."""
    return recording(
        "accel runs status of a run that hangs",
        "The launcher reports that processes wait in a collective. In another terminal, accel runs status shows each "
        "process with its state and its line: rank 0 is in gather(), rank 1 in step 42, and the others wait.",
        [(moment, text) for moment, text in figures["hang"]],
    )


PICTURES: dict[str, Callable[[Figures], str]] = {
    "killed-run.svg": killed_run,
    "goodput.svg": goodput,
    "memory-of-plans.svg": memory,
    "batches.svg": batches,
    "hang.svg": hang,
}
"""Each file of docs/_static that is drawn from docs/pictures.json, with the function that draws it."""


def drawn(figures: Figures) -> dict[str, str]:
    """The text of each picture."""
    return {name: draw(figures) for name, draw in PICTURES.items()}


def main(arguments: list[str]) -> int:
    """Runs, or only draws; fails if a run that was started again does not continue as the other one.

    Args:
        arguments: names of figures to measure, or "--draw" for none; without arguments all, and the report.
    """
    figures: Figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    if arguments != ["--draw"]:
        from drawing import real_runs

        for name in arguments or real_runs.FIGURES:
            figures[name] = real_runs.figures_of(name)
        if not arguments:
            real_runs.report_of_a_guarded_run(STATIC / "report-killed.html")
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(figures.items()))
        FIGURES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    for name, text in drawn(figures).items():
        (STATIC / name).write_text(text, encoding="utf-8")
    apart = figures["killed run"]["largest_difference"]
    print(f"pictures: drew {', '.join(PICTURES)}; after a restart losses differ by at most {apart:g}")
    return 0 if apart == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
