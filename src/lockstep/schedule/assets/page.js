const { drawings, colours, words } = JSON.parse(document.getElementById("data").textContent);
const place = document.getElementById("drawings"), slider = document.getElementById("time");
const moments = [...new Set(drawings.flatMap(d => d.ranks.flat().flatMap(p => [p.start / d.span, p.end / d.span])))]
  .sort((a, b) => a - b);
slider.max = moments.length - 1;
const make = (name, values, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
for (const d of drawings) {
  const row = document.createElement("div"); row.className = "row";
  row.innerHTML = "<h3></h3>"; row.firstChild.textContent = d.title;
  const high = 30 * d.ranks.length, svg = make("svg", { viewBox: `0 0 1000 ${high}` });
  const scale = 930 / d.span;
  d.ranks.forEach((passes, rank) => {
    svg.append(make("text", { x: 0, y: 30 * rank + 18 }, "stage " + rank));
    for (const p of passes) {
      const box = make("g", {}), wide = (p.end - p.start) * scale;
      box.append(make("rect", { x: 60 + p.start * scale, y: 30 * rank + 2, width: wide, height: 24,
        fill: colours[p.kind], "fill-opacity": p.chunk ? .65 : 1, stroke: "var(--paper)" }));
      if (wide > 12) box.append(make("text", { x: 60 + p.start * scale + wide / 2, y: 30 * rank + 18,
        "text-anchor": "middle" }, p.micro_batch));
      p.box = box; svg.append(box);
    }
  });
  d.line = make("line", { y1: 0, y2: high, stroke: "var(--ink)" }); svg.append(d.line); row.append(svg);
  d.said = document.createElement("p"); row.append(d.said); place.append(row);
}
function show(index) {
  const share = moments[index]; slider.value = index;
  document.getElementById("now").textContent = `${(100 * share).toFixed(0)}% of the step`;
  for (const d of drawings) {
    const now = share * d.span + 1e-9;
    d.line.setAttribute("x1", 60 + share * 930); d.line.setAttribute("x2", 60 + share * 930);
    d.said.textContent = d.ranks.map((passes, rank) => {
      let held = 0, does = "idle";
      for (const p of passes) {
        p.box.classList.toggle("later", p.start > now);
        if (p.start <= now) held += p.kind === "forward";
        if (p.end <= now) held -= p.kind === "backward" || p.kind === "backward_weight";
        if (p.start <= now && now < p.end) does = words[p.kind] + " " + p.micro_batch;
      }
      return `stage ${rank}: ${does}, holds ${held}`;
    }).join("; ");
  }
}
slider.oninput = () => show(+slider.value);
const move = by => show(Math.max(0, Math.min(moments.length - 1, +slider.value + by)));
document.getElementById("back").onclick = () => move(-1);
document.getElementById("on").onclick = () => move(1);
document.onkeydown = e => { if (e.target !== slider && e.key === "ArrowRight") move(1);
  if (e.target !== slider && e.key === "ArrowLeft") move(-1); };
show(moments.length - 1);
