"""A picture of a goodput sweep, as DistServe's figures have it (arXiv:2401.09670, figures 8 and 9)."""

from pathlib import Path
from typing import Any

from decoder.measure import machine, plots
from decoder.measure.goodput import Sweep


def draw(sweep: Sweep, facts: dict[str, Any], file: Path) -> None:
  """Attainment and goodput against the rate, and the highest rate against the promise. facts: of what was measured.
  ValueError where matplotlib is missing."""
  plots.check()
  from matplotlib.figure import Figure

  figure = Figure((13.5, 4.2), layout="constrained")
  axes = figure.subplots(1, 3)
  names = ("rate a device, requests/s", "rate a device, requests/s", "promise, × that on the left")
  labels = (
    "requests that keep their promise",
    "goodput a device, requests/s",
    "highest rate a device at 90 %, requests/s",
  )
  for line, colour in zip(sweep.lines, plots.COLOURS * 2):
    style = {"color": colour, "label": line.fleet.name, "linewidth": 2.5 if line.fleet.together else 1.5}
    axes[0].plot(line.rates, line.attained, **style)
    axes[1].plot(line.rates, line.good, **style)
    axes[2].plot(line.scales, line.best, "o-", markersize=4, **style)
  axes[0].axhline(0.9, color="grey", linestyle=":")
  axes[1].plot(sweep.lines[0].rates, sweep.lines[0].rates, ":", color="grey", label="every request")
  for one, x, y in zip(axes, names, labels):
    one.set(xlabel=x, ylabel=y, ylim=(0, None))
    one.grid(alpha=0.3)
    one.spines[["top", "right"]].set_visible(False)
    one.legend(frameon=False, fontsize=8)
  ttft, tpot = sweep.promise
  figure.suptitle(f"Goodput, promised TTFT {ttft:.2g} s and TPOT {1e3 * tpot:.0f} ms: {facts['model']}", fontsize=11)
  figure.supxlabel(f"simulated from times of {machine.line(facts)}", fontsize=7, color="dimgrey")
  figure.savefig(file, dpi=110)
