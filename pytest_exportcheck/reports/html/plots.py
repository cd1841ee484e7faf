"""Plots as SVG elements, drawn by matplotlib: text stays text, colours are the page's.

The page parses one as XML when it is to be seen.
No text of a report is taken for markup: matplotlib escapes it, and its own mathematics (``$...$``) is off.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...plurals import counted

__all__ = ["errors_by_node", "errors_by_output", "histogram", "node_counts", "time_by_stage"]

#: Colours that stand for the page's: a stylesheet cannot reach what matplotlib writes into attributes.
_STANDS_FOR = {"#010203": "currentColor", "#010204": "var(--series-1)", "#010205": "var(--series-2)"}
_TEXT, _FIRST, _SECOND = _STANDS_FOR

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "exportcheck",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

_MOST_BARS = 24
_MOST_NODES, _LEAST_NODES = 200, 3
_LABEL = 38
_WIDTH = 6.4

_numbers = itertools.count()


def _draw(
    height: float,
    what: str,
    paint: Callable[[Any], None],
    labels: Sequence[str] = (),
    below: float = 0.5,
    above: float = 0.1,
) -> str:
    """`paint` on axes in a figure of `height` inches; `what` is said to those who do not see it.

    There is room for `labels` on the left, for `below` inches under the axes and `above` over them:
    matplotlib's own layouts take ten times as long as the drawing.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height))
        figure.patch.set_alpha(0)
        left = 0.3 + 0.075 * max([6, *map(len, map(_label, labels))])
        margins = (left / _WIDTH, below / height, 1 - (left + 0.15) / _WIDTH, 1 - (below + above) / height)
        axes = figure.add_axes(margins)
        axes.patch.set_alpha(0)
        paint(axes)
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                # matplotlib's own labels are mathematics.
                axis.set_major_formatter(lambda value, _: f"{value:.0e}")
        written = io.StringIO()
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None, "Format": None})
    return _inline(written.getvalue(), what)


def _inline(svg: str, what: str) -> str:
    svg = svg[svg.index("<svg") :]
    # What the page's stylesheet says once for all plots, and the space between elements.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    svg = re.sub(r">\s+<", "><", svg)
    for stand_in, colour in _STANDS_FOR.items():
        svg = svg.replace(stand_in, colour)
    # Identifiers are unique in a figure, and a page has many.
    own = f"f{next(_numbers)}-"
    svg = re.sub(r'\b(id="|xlink:href="#|href="#)', rf"\g<1>{own}", svg)
    svg = svg.replace("url(#", f"url(#{own}")
    size = re.search(r'viewBox="[\d. ]+"', svg)
    assert size is not None
    head_ends = svg.index(">")
    label = str(Markup.escape(what)).replace("\n", " ")
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {spaces} {size[0]} role="img" aria-label="{label}">'
    return head + svg[head_ends + 1 :]


def _label(text: Any) -> str:
    """One line, of characters that XML has, not too long: the end of a name tells more than its middle."""
    shown = "".join(char if char.isprintable() else " " for char in str(text))
    return shown if len(shown) <= _LABEL else f"{shown[: _LABEL // 2 - 1]}…{shown[-_LABEL // 2 :]}"


#: Inches over the axes for a legend: inside it would lie on what it explains.
_LEGEND = 0.32


def _legend(axes: Any) -> None:
    # On the left, where a narrow screen begins to scroll.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.2)


def _number(value: Any) -> float | None:
    """A finite number; in a report ``nan`` and ``inf`` are strings."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], colour: str = _FIRST) -> None:
    axes.barh(range(len(names)), values, color=colour, height=0.7)
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.invert_yaxis()
    axes.margins(y=0.02)


def time_by_stage(durations: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Wall and CPU seconds, stage by stage."""
    stages = [stage for stage, spent in durations.items() if spent.get("wall_s") or spent.get("cpu_s")]
    if not stages:
        return None

    def paint(axes: Any) -> None:
        for number, (key, name, colour) in enumerate((("wall_s", "wall", _FIRST), ("cpu_s", "CPU", _SECOND))):
            places = [place + 0.4 * number for place in range(len(stages))]
            spent = [float(durations[stage].get(key) or 0.0) for stage in stages]
            axes.barh(places, spent, height=0.38, color=colour, label=name)
        axes.set_yticks([place + 0.2 for place in range(len(stages))], stages)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        _legend(axes)

    return _draw(1.0 + 0.3 * len(stages), "time by stage", paint, stages, above=_LEGEND)


def errors_by_output(outputs: Sequence[Mapping[str, Any]]) -> str | None:
    """Largest absolute error of each output, layer after layer, and what is allowed."""
    # Those that a user's comparison judged have no numbers.
    judged = [output for output in outputs if not output.get("by")]
    found = [(output, error) for output in judged if (error := _number(output.get("max_abs"))) is not None]
    if len(found) < 2 or not any(error for _, error in found):
        return None
    shown = found[:_MOST_BARS]
    dropped = len(found) - len(shown)

    def paint(axes: Any) -> None:
        _bars(axes, [output["path"] for output, _ in shown], [error for _, error in shown])
        allowed = [_number(output.get("atol")) for output, _ in shown]
        places = [(atol, place) for place, atol in enumerate(allowed) if atol]
        if places:
            axes.plot(*zip(*places, strict=True), "|", color=_SECOND, markersize=11, label="atol")
            _legend(axes)
        axes.set_xscale("log")
        axes.set_xlabel(
            "max abs error" + (f" ({counted(dropped, 'more output')} not shown)" if dropped else "")
        )

    names = [output["path"] for output, _ in shown]
    return _draw(1.0 + 0.24 * len(shown), "error by output", paint, names, above=_LEGEND)


def errors_by_node(profile: Sequence[tuple[str, Any, Any]]) -> str | None:
    """Error of the value of each node, and of the node alone, in the order of the graph.

    ``None`` for a node or two, of which the text says all.
    """
    known = [(name, _number(error), _number(own)) for name, error, own in profile[:_MOST_NODES]]
    if len(known) < _LEAST_NODES or not any(error for _, error, _ in known):
        return None

    def paint(axes: Any) -> None:
        for at, label, mark, colour in ((1, "value", "-o", _FIRST), (2, "node alone", "x", _SECOND)):
            places = [(place, entry[at]) for place, entry in enumerate(known) if entry[at]]
            if places:
                axes.plot(*zip(*places, strict=True), mark, color=colour, markersize=3.5, label=label)
        axes.set_yscale("log")
        step = max(1, len(known) // 24)
        ticks = range(0, len(known), step)
        axes.set_xticks(ticks, [_label(known[place][0]) for place in ticks], rotation=90, fontsize=7)
        axes.set_ylabel("relative error")
        _legend(axes)

    names = 0.06 * max(len(_label(name)) for name, _, _ in known)
    return _draw(3.1 + names, "error by node", paint, below=0.2 + names, above=_LEGEND)


def histogram(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The errors of all outputs of all cases, as shares of what is allowed, on a logarithmic axis."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        for output in record.get("outputs") or ():
            error, atol = _number(output.get("max_abs")), _number(output.get("atol"))
            if error and atol:
                shares[bool(output.get("ok"))].append(math.log10(error / atol))
    if not shares[True] and not shares[False]:
        return None

    def paint(axes: Any) -> None:
        low = math.floor(min(shares[True] + shares[False]))
        high = math.ceil(max(shares[True] + shares[False]))
        bins = [low + 0.5 * step for step in range(2 * max(high - low, 1) + 1)]
        axes.hist(
            [shares[True], shares[False]],
            bins=bins,
            stacked=True,
            color=[_FIRST, _SECOND],
            label=["within the tolerance", "outside"],
        )
        axes.axvline(0, color=_TEXT, linewidth=0.8, linestyle=":")
        axes.set_xlabel("log10 of max abs error / atol")
        axes.set_ylabel("outputs")
        axes.yaxis.get_major_locator().set_params(integer=True)
        _legend(axes)

    return _draw(2.8, "histogram of the errors of all outputs", paint, above=_LEGEND)


def node_counts(counts: Sequence[tuple[str, int]]) -> str | None:
    """Nodes of the programs, the largest first."""
    if not counts:
        return None
    shown = sorted(counts, key=lambda item: -item[1])[:_MOST_BARS]
    dropped = len(counts) - len(shown)

    def paint(axes: Any) -> None:
        _bars(axes, [name for name, _ in shown], [count for _, count in shown])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("nodes" + (f" ({dropped} smaller programs not shown)" if dropped else ""))

    return _draw(0.8 + 0.22 * len(shown), "node counts", paint, [name for name, _ in shown])
