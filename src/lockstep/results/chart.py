"""Charts as Vega-Lite specifications: the same one is drawn in a page, where it can be touched, and into a file.

Labels come from records, which may be a stranger's: they are data, and no part of any expression.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.results.palette import distinguished, in_light, role

Spec = dict[str, Any]
SUFFIXES = (".svg", ".png", ".pdf")
BYTES = (
    "datum.value < 1024 ? datum.value + ' B' : datum.value < 1048576 ? format(datum.value / 1024, '~g') + ' KiB' : "
    "format(datum.value / 1048576, '~g') + ' MiB'"
)
NUMBERS = {"format": ",.6~g"}
TEXT = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
CONFIG: Spec = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    "title": {"anchor": "start", "fontSize": 13, "color": "var(--ink)"},
    "axis": {
        **TEXT,
        **{"labelColor": "var(--ink)", "titleColor": "var(--soft)", "labelLimit": 260, "gridColor": "var(--line)"},
        **{"domainColor": "var(--line)", "tickColor": "var(--line)"},
    },
    "legend": {
        **TEXT,
        "labelColor": "var(--ink)",
        "orient": "bottom",
        "title": None,
        "labelLimit": 600,
        "symbolOpacity": 1,
    },
}


@dataclass(frozen=True)
class Chart:
    """A picture: its title, and what Vega-Lite is to draw."""

    title: str
    spec: Spec
    """Without title, width and configuration, which belong to where it is drawn."""
    wide: bool = False
    """It takes a row of its own."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    upper: Sequence[float | None] | None = None
    """Shaded from y up to here."""
    dashed: bool = False
    """A law or an ideal, not a measurement."""


def lines(
    title: str,
    x_label: str,
    y_label: str,
    curves: list[Curve],
    log: bool = False,
    points: bool = False,
    sizes: bool = False,
) -> Chart:
    """`log`: both axes. `sizes`: x is in bytes."""
    values = [
        {"curve": curve.name, "x": x, "y": y, "upper": upper if drawable(upper, log) else y}
        for curve in curves
        for x, y, upper in zip(curve.x, curve.y, curve.upper or curve.y, strict=True)
        if drawable(x, log) and drawable(y, log)
    ]
    names = list(dict.fromkeys(curve.name for curve in curves))
    measured = [curve.name for curve in curves if not curve.dashed]
    styles = {name: ("var(--other)", [4, 4]) for name in names} | dict(
        zip(measured, distinguished(measured), strict=True)
    )
    legend = {**legend_of(names), "symbolType": "stroke", "symbolSize": 300} if names != [""] else None
    heights = [float(v["y"]) for v in values]  # type: ignore[arg-type]  # drawable ones
    below = bool(heights) and 0 < min(heights) < 0.5 * max(heights)
    x_axis: Spec = {"tickCount": 8, "grid": False, "tickMinStep": 1, **({"labelExpr": BYTES} if sizes else NUMBERS)}
    x_scale: Spec = {"type": "log", "base": 2 if sizes else 10} if log else {"zero": False, "nice": False}
    y_scale: Spec = {"type": "log"} if log else {"zero": below}
    encoding: Spec = {
        "x": {"field": "x", "type": "quantitative", "title": x_label, "scale": x_scale, "axis": x_axis},
        "y": {
            **{"field": "y", "type": "quantitative", "title": y_label, "scale": y_scale},
            "axis": {"tickCount": 5, **NUMBERS},
        },
        "color": {
            "field": "curve",
            "scale": {"domain": names, "range": [styles[name][0] for name in names]},
            "legend": legend,
        },
    }
    line_channels: Spec = {
        "strokeDash": {
            "field": "curve",
            "scale": {"domain": names, "range": [styles[name][1] for name in names]},
            "legend": legend,
        },
        "opacity": {"condition": {"param": "shown", "value": 1}, "value": 0.08},
        "tooltip": [
            {"field": "curve", "title": "line"},
            {"field": "x", "type": "quantitative", "title": x_label},
            {"field": "y", "type": "quantitative", "title": y_label, "format": ".5~g"},
        ],
    }
    spots = points or all(len(curve.x) < 40 for curve in curves)
    drawn: Spec = {
        "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 28} if spots else False},
        "params": [{"name": "shown", "select": {"type": "point", "fields": ["curve"]}, "bind": "legend"}],
        "encoding": line_channels,
    }
    band: Spec = {"mark": {"type": "area", "opacity": 0.12}, "encoding": {"y2": {"field": "upper"}}}
    layers = [band, drawn] if any(curve.upper for curve in curves) else [drawn]
    return Chart(title, {"data": {"values": values}, "height": 240, "encoding": encoding, "layer": layers})


def bars(
    title: str,
    unit: str,
    labels: list[str],
    series: list[tuple[str, list[Any]]],
    whiskers: list[tuple[Any, Any]] | None = None,
) -> Chart:
    """Horizontal, one for each label, stacked of the series."""
    values = [
        {"label": label, "part": name, "value": value, "order": number}
        for number, (name, column) in enumerate(series)
        for label, value in zip(labels, column, strict=True)
        if drawable(value)
    ]
    names = [name for name, _ in series]
    rows = list(dict.fromkeys(labels))
    encoding: Spec = {
        "y": {"field": "label", "type": "nominal", "sort": rows, "title": None, "scale": {"domain": rows}},
        "x": {"field": "value", "type": "quantitative", "title": unit, "stack": "zero", "axis": {"tickCount": 6}},
    }
    part: Spec = {
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "params": [{"name": "shown", "select": {"type": "point", "fields": ["part"]}, "bind": "legend"}],
        "encoding": {
            "color": {
                "field": "part",
                "scale": {"domain": names, "range": [role(name) for name in names]},
                "legend": legend_of(names) if len(names) > 1 else None,
            },
            "order": {"field": "order"},
            "opacity": {"condition": {"param": "shown", "value": 1}, "value": 0.08},
            "tooltip": [
                {"field": "label", "title": "row"},
                {"field": "part", "title": "part"},
                {"field": "value", "type": "quantitative", "title": unit, "format": ",.5~g"},
            ],
        },
    }
    layers = [part]
    ends = [
        {"label": label, "low": low, "high": high}
        for label, (low, high) in zip(labels, whiskers or [], strict=bool(whiskers))
        if drawable(low) and drawable(high)
    ]
    if ends:
        place = {"x": {"field": "low", "type": "quantitative", "stack": None}, "x2": {"field": "high"}}
        layers.append({"data": {"values": ends}, "mark": {"type": "rule", "color": "var(--ink)"}, "encoding": place})
    height = 24 * max(1, len(rows))
    return Chart(title, {"data": {"values": values}, "height": height, "encoding": encoding, "layer": layers})


def timeline(title: str, choices: list[dict[str, Any]]) -> Chart:
    """One step of every rank: what it computes, what it waits for, and each collective from its issue to its end.

    `choices`: a label and the ranks' steps (`measure/timeline.py`) of each; the reader chooses. The wheel zooms.
    """
    values = [{**span, "choice": c["label"]} for c in choices for rank in c["ranks"] for span in spans_of(rank)]
    for number, value in enumerate(values):
        value["order"] = number
    kinds = [kind for kind in KINDS if any(value["kind"] == kind for value in values)]
    names = [choice["label"] for choice in choices]
    params: list[Spec] = [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}]
    spec: Spec = {
        "data": {"values": values},
        "height": 17 * max((len({v["lane"] for v in values if v["choice"] == name}) for name in names), default=1),
        "mark": {"type": "bar", "height": 14, "clip": True},
        "encoding": {
            "y": {
                **{"field": "lane", "type": "nominal", "title": None, "sort": {"field": "order", "op": "min"}},
                "axis": {"labelExpr": "split(datum.label, '#')[0]"},
            },
            "x": {"field": "start", "type": "quantitative", "title": "ms of the step", "scale": {"nice": False}},
            "x2": {"field": "end"},
            "color": {
                "field": "kind",
                "scale": {"domain": kinds, "range": [role(kind) for kind in kinds]},
                "legend": legend_of(kinds),
            },
            "tooltip": [
                {"field": "what", "title": "what"},
                {"field": "lasted", "type": "quantitative", "title": "ms", "format": ".4~g"},
                {"field": "nbytes", "type": "quantitative", "title": "bytes", "format": ","},
            ],
        },
    }
    if len(names) > 1:
        chooser = {"input": "select", "options": names, "name": "strategy "}
        params.append({"name": "choice", "value": names[0], "bind": chooser})
        spec["transform"] = [{"filter": "datum.choice == choice"}]
    return Chart(title, {**spec, "params": params}, wide=True)


KINDS = ("forward", "backward", "optimizer", "waiting", "gradients", "parameters", "activations", "other")


def spans_of(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank did, as bars. Collectives that are in flight at once lie below each other."""
    name = f"rank {rank['rank']}"
    found = [
        bar(f"{name} compute", p["start"], p["end"], p["name"], p["name"])
        for p in rank["phases"]
        if None not in (p["start"], p["end"])
    ]
    flights = [c for c in rank["collectives"] if c["issued"] is not None and c["over"] is not None]
    for c in rank["collectives"]:
        if c["wait_started"] is not None and c["wait_ended"] is not None:
            found.append(
                bar(f"{name} waiting", c["wait_started"], c["wait_ended"], "waiting", f"wait for {described(c)}")
            )
    free: list[float] = []
    for c in sorted(flights, key=lambda c: c["issued"]):
        lane = next((i for i, end in enumerate(free) if end <= c["issued"]), min(len(free), LANES - 1))
        free[lane : lane + 1] = [max(c["over"], free[lane] if lane < len(free) else 0.0)]
        made = bar(f"{name} communication#{lane}", c["issued"], c["over"], c["purpose"], described(c))
        found.append({**made, "nbytes": c["nbytes"]})
    return found


LANES = 8


def bar(lane: str, start: float, end: float, kind: str, what: str) -> dict[str, Any]:
    known = kind if kind in KINDS else "other"
    return {
        "lane": lane,
        "start": start,
        "end": end,
        "lasted": end - start,
        "kind": known,
        "what": what,
        "nbytes": None,
    }


def described(collective: dict[str, Any]) -> str:
    subject = f" of {collective['subject']}" if collective["subject"] else ""
    return f"{str(collective['operation']).replace('_', '-')}{subject} ({collective['purpose']})"


def legend_of(names: list[str]) -> Spec:
    """Below the chart, in as many columns as a narrow page has room for."""
    return {"columns": max(1, 40 // (max(map(len, names), default=0) + 4))}


def drawable(value: Any, log: bool = False) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and (not log or value > 0)  # NaN is not either


# ---- where charts are drawn ----------------------------------------------------------------------------------------


def on_a_page(chart: Chart) -> Spec:
    """As wide as its place there."""
    fitted = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**chart.spec, **fitted, "config": CONFIG}


@cache
def library() -> str:
    """The scripts that draw charts on a page (Vega, Vega-Lite and Vega-Embed), whole: a page fetches nothing."""
    import vl_convert  # slow to import, and needed here only

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{\n{bundle}\n}})();"  # its own names stay its own


def untouched(spec: Spec) -> Spec:
    """For a picture, in which nothing is chosen: what a page shows at first."""
    first = next((p["value"] for p in spec.get("params", []) if p["name"] == "choice"), None)
    fixed = {key: value for key, value in spec.items() if key not in ("params", "transform")}
    if first is not None:
        fixed["data"] = {"values": [value for value in spec["data"]["values"] if value["choice"] == first]}
    if "layer" in spec:
        fixed["layer"] = [
            {
                **{key: value for key, value in layer.items() if key != "params"},
                "encoding": {key: value for key, value in layer["encoding"].items() if not depends(value)},
            }
            for layer in spec["layer"]
        ]
    return fixed


def depends(encoding: Any) -> bool:
    """On something that a reader chooses."""
    return isinstance(encoding, dict) and "param" in encoding.get("condition", {})


def draw(charts: list[Chart], file: Path, width: int = 620) -> None:
    """Below each other, into a picture."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"{file} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    import vl_convert  # slow to import, and needed here only

    below = [untouched(chart.spec) | {"title": chart.title, "width": width} for chart in charts]
    spec = {"vconcat": below, "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
    said = json.dumps({**spec, "config": {**CONFIG, "background": "var(--paper)"}}, ensure_ascii=False)
    text = in_light(said.encode("utf-8", "replace").decode())  # half characters are no text
    match file.suffix:
        case ".svg":
            file.write_text(vl_convert.vegalite_to_svg(text), encoding="utf-8")
        case ".png":
            file.write_bytes(vl_convert.vegalite_to_png(text, scale=2))
        case _:
            file.write_bytes(vl_convert.vegalite_to_pdf(text))
