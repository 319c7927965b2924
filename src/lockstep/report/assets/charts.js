"use strict";
// Bars and lines, drawn as SVG from plain data. No library: the page must open offline, for years.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 10;

function colour(index) {
  return `var(--c${index % COLOURS})`;
}

function svg(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function html(name, attributes, parent, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function readable(value) {
  if (value === null || value === undefined || !isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return String(Number(value.toFixed(2)));
  return size === 0 ? "0" : String(Number(value.toPrecision(3)));
}

function short(value) {
  // For axes: 1.5k, 20M.
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return `${Number((value / limit).toPrecision(3))}${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function ticks(low, high, count) {
  // Round numbers from low to high.
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const x = Math.min(event.clientX + 12, window.innerWidth - box.offsetWidth - 8);
    const y = Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8);
    box.style.left = `${Math.max(4, x)}px`;
    box.style.top = `${Math.max(4, y)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

function tells(element, text) {
  element.addEventListener("mousemove", (event) => tip.show(event, text));
  element.addEventListener("mouseleave", tip.hide);
}

function legend(figure, names, hidden, redraw) {
  // A click hides a series and draws the chart again.
  const box = html("div", { class: "legend" }, figure);
  names.forEach((name, index) => {
    const button = html("button", { type: "button", class: hidden.has(index) ? "off" : "" }, box);
    html("i", { style: `background:${colour(index)}` }, button);
    html("span", {}, button, name);
    button.addEventListener("click", () => {
      if (hidden.has(index)) hidden.delete(index);
      else hidden.add(index);
      redraw();
    });
  });
}

function drawBars(figure, chart, hidden = new Set()) {
  figure.querySelectorAll("svg, .legend").forEach((old) => old.remove());
  const width = 560, row = 26, left = 150, right = 70, top = 6;
  const height = top + row * chart.labels.length + 34;
  const shown = chart.series.map((series, index) => ({ ...series, index })).filter((s) => !hidden.has(s.index));
  const totals = chart.labels.map((_, i) => shown.reduce((sum, s) => sum + Math.max(0, s.values[i] || 0), 0));
  const whiskers = hidden.size === 0 ? chart.whiskers : null;
  const reach = Math.max(...totals, ...(whiskers || []).map((w) => w[1] || 0), 1e-12);
  const x = (value) => left + (value / reach) * (width - left - right);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title }, figure);
  for (const value of ticks(0, reach, 4)) {
    svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - 30 }, root);
    svg("text", { class: "soft", x: x(value), y: height - 16, "text-anchor": "middle" }, root, short(value));
  }
  svg("text", { class: "soft", x: left, y: height - 3 }, root, chart.unit);
  chart.labels.forEach((label, i) => {
    const y = top + row * i;
    const name = svg("text", { x: left - 8, y: y + row / 2 + 4, "text-anchor": "end" }, root, label.length > 23 ? `${label.slice(0, 22)}…` : label);
    tells(name, label);
    let reached = 0;
    for (const series of shown) {
      const value = Math.max(0, series.values[i] || 0);
      const bar = svg("rect", { x: x(reached), y: y + 4, width: Math.max(0, x(reached + value) - x(reached)), height: row - 8, fill: colour(series.index) }, root);
      tells(bar, `${label}\n${series.name}: ${readable(value)} ${chart.unit.split(",")[0]}`);
      reached += value;
    }
    const range = whiskers && whiskers[i];
    if (range && range[0] !== null && range[1] !== null) {
      const middle = y + row / 2;
      svg("line", { class: "whisker", x1: x(range[0]), x2: x(range[1]), y1: middle, y2: middle }, root);
      for (const end of range) svg("line", { class: "whisker", x1: x(end), x2: x(end), y1: middle - 4, y2: middle + 4 }, root);
    }
    const beyond = Math.max(totals[i], range ? range[1] || 0 : 0);
    svg("text", { x: x(beyond) + 5, y: y + row / 2 + 4 }, root, readable(totals[i]));
  });
  if (chart.series.length > 1) legend(figure, chart.series.map((s) => s.name), hidden, () => drawBars(figure, chart, hidden));
}

function drawLines(figure, chart, hidden = new Set()) {
  figure.querySelectorAll("svg, .legend").forEach((old) => old.remove());
  const width = 560, height = 300, left = 56, right = 14, top = 8, bottom = 40;
  const usable = (x, y) => x !== null && y !== null && isFinite(x) && isFinite(y) && (!chart.logX || x > 0) && (!chart.logY || y > 0);
  const curves = chart.lines.map((l, index) => ({ ...l, index, at: l.x.map((x, i) => [x, l.y[i]]).filter(([x, y]) => usable(x, y)) }))
    .filter((l) => !hidden.has(l.index) && l.at.length);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title }, figure);
  if (curves.length) {
    const scaleX = scale(curves.flatMap((l) => l.at.map((p) => p[0])), chart.logX, left, width - right, false);
    const scaleY = scale(curves.flatMap((l) => l.at.map((p) => p[1])), chart.logY, height - bottom, top, true);
    for (const value of scaleX.ticks) {
      svg("line", { class: "grid", x1: scaleX(value), x2: scaleX(value), y1: top, y2: height - bottom }, root);
      svg("text", { class: "soft", x: scaleX(value), y: height - bottom + 15, "text-anchor": "middle" }, root, short(value));
    }
    for (const value of scaleY.ticks) {
      svg("line", { class: "grid", x1: left, x2: width - right, y1: scaleY(value), y2: scaleY(value) }, root);
      svg("text", { class: "soft", x: left - 6, y: scaleY(value) + 4, "text-anchor": "end" }, root, short(value));
    }
    for (const curve of curves) {
      const path = curve.at.map(([x, y], i) => `${i ? "L" : "M"}${scaleX(x).toFixed(1)} ${scaleY(y).toFixed(1)}`).join("");
      const drawn = svg("path", { d: path, fill: "none", stroke: colour(curve.index), "stroke-width": 2, "stroke-dasharray": curve.dashed ? "5 4" : "none" }, root);
      if (curve.name) tells(drawn, curve.name);
      const spots = chart.points || curve.at.length < 40 ? curve.at : [];
      for (const [x, y] of spots) {
        const spot = svg("circle", { cx: scaleX(x), cy: scaleY(y), r: 3, fill: colour(curve.index) }, root);
        tells(spot, `${curve.name}\n${chart.xLabel}: ${readable(x)}\n${chart.yLabel}: ${readable(y)}`);
      }
    }
  }
  svg("text", { class: "soft", x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, root, chart.xLabel);
  svg("text", { class: "soft", x: 12, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, root, chart.yLabel);
  if (chart.lines.length > 1) legend(figure, chart.lines.map((l) => l.name), hidden, () => drawLines(figure, chart, hidden));
}

function scale(values, logarithmic, from, to, room) {
  // From numbers to places on the page.
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (logarithmic) {
    const a = Math.log10(low), b = Math.log10(high) === a ? a + 1 : Math.log10(high);
    const place = (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
    const every = Math.max(1, Math.ceil((b - a) / 6));
    const between = b - a < 2.5 ? [1, 2, 5] : [1];
    place.ticks = [];
    for (let power = Math.floor(a); power <= b + 1e-9; power += every) place.ticks.push(...between.map((m) => m * 10 ** power));
    place.ticks = place.ticks.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    return place;
  }
  if (room) {
    if (low > 0 && low < 0.5 * high) low = 0;
    high += 0.04 * (high - low || 1);
  }
  if (high === low) high = low + 1;
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  place.ticks = ticks(low, high, 5);
  return place;
}
