"""Draw docs/images/offline.png from halfcheetah.csv in this folder: python results/offline/draw.py."""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
CURVES = {  # data and algorithm: label, colour
    ("replay", "td3_bc"): ("TD3+BC", "#0072B2"),
    ("replay", "iql"): ("IQL", "#009E73"),
    ("replay", "bc"): ("behaviour cloning", "#D55E00"),
}
FROM_DATA, LIVE, ALONE = "medium and live", "sac", "live"


def main() -> None:
    """Left: updates from the replay alone. Right: env_steps of SAC with and without data."""
    curves: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with (HERE / "halfcheetah.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            x = float(row["env_steps"]) or float(row["updates"])
            curves[row["data"], row["algorithm"]][row["seed"]].append((x, float(row["eval/return_mean"])))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for key, (label, colour) in CURVES.items():
        draw(left, list(curves[key].values()), label, colour)
    draw(right, list(curves[FROM_DATA, LIVE].values()), "SAC, half of a batch from data", "#0072B2")
    draw(right, list(curves[ALONE, LIVE].values()), "SAC alone", "#000000")
    left.set(xlabel="updates, from 130,000 recorded steps", ylabel="return on HalfCheetah-v5")
    right.set(xlabel="env_steps", xlim=(0, 100_000))
    for axis in (left, right):
        axis.legend(frameon=False, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE.parents[1] / "docs/images/offline.png", dpi=120)


def draw(axis: "pyplot.Axes", seeds: list[list[tuple[float, float]]], label: str, colour: str) -> None:
    """A line for each seed."""
    for k, points in enumerate(seeds):
        x, y = np.array(sorted(points)).T
        axis.plot(x, y, color=colour, label=label if k == 0 else None, alpha=0.8, linewidth=1.3)


if __name__ == "__main__":
    main()
