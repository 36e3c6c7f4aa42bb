"""What all figures share: colours that the colour-blind tell apart, and that print in grey."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

# Okabe and Ito 2008, Color Universal Design; the order is by lightness, dark ones first.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, SKY, ORANGE, BLACK = "#CC79A7", "#56B4E9", "#E69F00", "#000000"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY, PALE = "#7F7F7F", "#E6E6E6"
DASHES = ("solid", "dash", "dot", "dashdot")  # beside colours, for print
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up")
SCALE = "Cividis"  # of values; the same to all kinds of colour vision (Nunez et al. 2018)
STATUS = {
    **{"done": BLUE, "failed": VERMILION, "dropped": SKY},
    **{"running": GREEN, "lost": ORANGE, "waiting": GREY},
}

HEIGHT = 380  # pixels
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def empty(title: str, why: str) -> go.Figure:
    """The figure of what is not there yet, in words."""
    figure = styled(go.Figure(), title)
    figure.add_annotation(
        text=why, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=14
    )
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)


def styled(figure: go.Figure, title: str, x: str = "", y: str = "") -> go.Figure:
    """The same figure, in the style that all have.

    Args:
        title: what it shows.
        x, y: the axes' labels, with units.
    """
    figure.update_layout(
        template="simple_white",
        title={"text": title, "font_size": 15, "x": 0, "xref": "paper"},
        font={"family": FONT, "size": 13},
        height=HEIGHT,
        margin={"l": 70, "r": 20, "t": 50, "b": 55},
        colorway=CYCLE,
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": -0.2},
        uirevision="same",  # a zoom stays while the figure is drawn anew
    )
    figure.update_xaxes(title_text=x or None, showgrid=True, gridcolor=PALE)
    figure.update_yaxes(title_text=y or None, showgrid=True, gridcolor=PALE)
    return figure


def escaped(text: str) -> str:
    """What a run says, as plotly shows it letter by letter; it knows no &quot;."""
    return html.escape(text, quote=False)


def ticks(values: Sequence[float]) -> dict[str, list[float] | list[str]]:
    """Decades and, where there are few, what lies between, for values that are logarithms."""
    low, high = min(values), max(values)
    decades = range(int(low // 1), int(-(-high // 1)) + 1)
    steps = (1, 2, 5) if high - low < 3 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return {
        "tickvals": [math.log10(value) for value in found],
        "ticktext": [f"{v:g}" for v in found],
    }
