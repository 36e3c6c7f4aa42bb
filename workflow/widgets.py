"""A plotly figure in a notebook, drawn again in place.

Plotly's own FigureWidget sends all of plotly.js, 5 MB, with each figure: through an ssh tunnel to a
login node, ten of them are a minute. Here one `Library` brings it, for all `Plot`s of a page.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import anywidget
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

_LIBRARY = """
self.n3loPlotly = self.Plotly;
export default { render() {} };
"""

_PLOT = """
async function library() {
  while (!self.n3loPlotly) await new Promise((wake) => setTimeout(wake, 50));
  return self.n3loPlotly;
}

const config = { responsive: true, displaylogo: false };

// The axes that the user has zoomed: plotly keeps them only as long as we set no range of our own.
function zoomed(place) {
  const axes = new Set();
  let isReset = false;
  place.on("plotly_doubleclick", () => { isReset = true; });
  place.on("plotly_relayout", (changes) => {
    for (const key of Object.keys(changes)) {
      const found = key.match(/^([xy]axis\\d*)\\.(range|autorange)/);
      if (found) axes[found[2] === "range" ? "add" : "delete"](found[1]);
    }
    if (isReset) axes.clear();
    isReset = false;
  });
  return axes;
}

function render({ model, el }) {
  const place = document.createElement("div");
  el.appendChild(place);
  let last = Promise.resolve();  // one drawing after the other
  let axes = null, revision = null;
  const draw = () => {
    const figure = JSON.parse(model.get("figure"));
    last = last.then(async () => {
      const plotly = await library();
      if (figure.layout.uirevision !== revision) axes?.clear();  // the axes show something else
      revision = figure.layout.uirevision;
      for (const axis of axes ?? []) {
        const range = place.layout[axis]?.range;
        if (range) Object.assign((figure.layout[axis] ??= {}), { range, autorange: false });
      }
      // Where it fits a width, plotly takes its height from the place.
      place.style.height = `${figure.layout.height ?? 0}px`;
      await plotly.react(place, figure.data, figure.layout, config);
      axes ??= zoomed(place);
    }).catch(console.error);
  };
  const resized = new ResizeObserver(() => {  // also when its tab is opened
    if (place.data && place.offsetParent) self.n3loPlotly.Plots.resize(place);
  });
  resized.observe(el);
  model.on("change:figure", draw);
  draw();
  return () => {
    resized.disconnect();
    model.off("change:figure", draw);
    if (place.data) self.n3loPlotly.purge(place);
  };
}

export default { render };
"""


class Library(anywidget.AnyWidget):  # type: ignore[misc]  # it has no type information
    """Brings plotly.js to the page; shows nothing."""

    _esm = ""

    def __init__(self) -> None:
        super().__init__(_esm=_library())


class Plot(anywidget.AnyWidget):  # type: ignore[misc]
    """A figure; zoom and what is hidden in its legend stay when it is drawn again."""

    _esm: ClassVar[str] = _PLOT
    figure = traitlets.Unicode('{"data": [], "layout": {}}').tag(sync=True)  # as JSON

    def draw(self, figure: go.Figure) -> None:
        """Show this one; nothing is sent where it is the same as before."""
        self.figure = figure.to_json()


@cache
def _library() -> Any:
    return get_plotlyjs() + _LIBRARY
