"use strict";
// One step, rank by rank: phases, collectives in flight, and the waits for them. Wheel zooms, dragging moves.

const PURPOSES = ["gradients", "parameters", "buffers", "flags", "other"];
const PHASES = ["forward", "backward", "optimizer"];

function drawTimeline(figure, chart) {
  figure.classList.add("timeline");
  let chosen = 0;
  const tools = html("div", { class: "tools" }, figure);
  const buttons = chart.choices.map((choice, index) => {
    const button = html("button", { type: "button" }, tools, choice.label);
    button.addEventListener("click", () => select(index));
    return button;
  });
  const out = html("button", { type: "button", class: "reset" }, tools, "whole step");
  html("span", { class: "hint" }, tools, "wheel: zoom, drag: move");
  const width = 1120, left = 150, lane = 16;
  const root = svg("svg", { role: "img", "aria-label": chart.title }, figure);
  const clip = `clip${Math.random().toString(36).slice(2)}`;
  let span = [0, 1], whole = [0, 1];

  function select(index) {
    chosen = index;
    buttons.forEach((button, i) => button.classList.toggle("on", i === index));
    const ends = chart.choices[index].ranks.flatMap((rank) => [
      ...rank.phases.map((p) => p.end),
      ...rank.collectives.map((c) => Math.max(c.over || 0, c.wait_ended || 0)),
    ]);
    whole = [0, Math.max(...ends, 0.001)];
    span = whole.slice();
    draw();
  }

  function draw() {
    root.replaceChildren();
    const ranks = chart.choices[chosen].ranks;
    const rows = ranks.map((rank) => pack(rank.collectives.filter((c) => c.over !== null && c.issued !== null)));
    const heights = rows.map((packed) => (2 + packed.depth) * lane + 14);
    const height = heights.reduce((a, b) => a + b, 0) + 26;
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const cut = svg("clipPath", { id: clip }, svg("defs", {}, root));
    svg("rect", { x: left, y: 0, width: width - left, height }, cut);
    const x = (ms) => left + ((ms - span[0]) / (span[1] - span[0])) * (width - left);
    for (const value of ticks(span[0], span[1], 8)) {
      svg("line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height - 18 }, root);
      svg("text", { class: "soft", x: x(value), y: height - 5, "text-anchor": "middle" }, root, `${readable(value)} ms`);
    }
    let y = 4;
    ranks.forEach((rank, i) => {
      drawRank(rank, rows[i], y, x);
      y += heights[i];
    });
  }

  function drawRank(rank, packed, y, x) {
    svg("text", { x: 4, y: y + 12, "font-weight": 600 }, root, `rank ${rank.rank}`);
    const names = [["compute", 0], ["waiting", 1], ["communication", 2]];
    for (const [name, line] of names) svg("text", { class: "soft", x: left - 8, y: y + line * lane + 12, "text-anchor": "end" }, root, name);
    const inside = svg("g", { "clip-path": `url(#${clip})` }, root);
    const box = (start, end, line, fill, text) => {
      const shape = svg("rect", { x: x(start), y: y + line * lane + 1, width: Math.max(0.7, x(end) - x(start)), height: lane - 3, fill, rx: 1.5 }, inside);
      tells(shape, text);
      if (x(end) - x(start) > 60) svg("text", { x: Math.max(x(start), left) + 4, y: y + line * lane + 12, "pointer-events": "none" }, inside, text.split("\n")[0].slice(0, Math.floor((x(end) - x(start)) / 6.5)));
    };
    for (const phase of rank.phases) {
      box(phase.start, phase.end, 0, colour(Math.max(0, PHASES.indexOf(phase.name)) + 4), `${phase.name}\n${readable(phase.end - phase.start)} ms`);
    }
    for (const c of rank.collectives) {
      if (c.wait_started !== null && c.wait_ended !== null) {
        box(c.wait_started, c.wait_ended, 1, "var(--c7)", `wait for ${named(c)}\n${readable(c.wait_ended - c.wait_started)} ms`);
      }
    }
    for (const { item, line } of packed.items) {
      const kind = Math.max(0, PURPOSES.indexOf(item.purpose) < 0 ? 4 : PURPOSES.indexOf(item.purpose));
      box(item.issued, item.over, 2 + line, colour(kind === 4 ? 6 : kind), `${named(item)}\n${short(item.nbytes)}B, ${readable(item.over - item.issued)} ms`);
    }
  }

  function named(c) {
    return `${c.operation.replace("_", "-")}${c.subject ? ` of ${c.subject}` : ""} (${c.purpose})`;
  }

  function pack(items) {
    // Collectives that are in flight at once go below each other.
    const ends = [];
    const placed = [...items].sort((a, b) => a.issued - b.issued).map((item) => {
      let line = ends.findIndex((end) => end <= item.issued);
      if (line < 0 || line > 7) line = line < 0 && ends.length < 8 ? ends.length : 7;
      ends[line] = Math.max(item.over, ends[line] || 0);
      return { item, line };
    });
    return { items: placed, depth: Math.max(1, ends.length) };
  }

  function move(next) {
    const size = Math.min(next[1] - next[0], whole[1] - whole[0]);
    const start = Math.min(Math.max(next[0], whole[0]), whole[1] - size);
    span = [start, start + size];
    draw();
  }

  function toMs(event) {
    const frame = root.getBoundingClientRect();
    const place = ((event.clientX - frame.left) / frame.width) * width;
    return span[0] + ((place - left) / (width - left)) * (span[1] - span[0]);
  }

  root.addEventListener("wheel", (event) => {
    event.preventDefault();
    const centre = toMs(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    if ((span[1] - span[0]) * factor < 0.01) return;
    move([centre - (centre - span[0]) * factor, centre + (span[1] - centre) * factor]);
  }, { passive: false });
  let held = null;
  root.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, span: span.slice() };
    root.setPointerCapture(event.pointerId);
  });
  root.addEventListener("pointermove", (event) => {
    if (!held) return;
    const frame = root.getBoundingClientRect();
    const moved = ((event.clientX - held.x) / frame.width) * (width / (width - left)) * (held.span[1] - held.span[0]);
    move([held.span[0] - moved, held.span[1] - moved]);
  });
  root.addEventListener("pointerup", () => { held = null; });
  root.addEventListener("dblclick", () => { span = whole.slice(); draw(); });
  out.addEventListener("click", () => { span = whole.slice(); draw(); });
  select(0);
}
