// What each rank holds in each turn, and the messages of the turn, for the chosen algorithm.
main.innerHTML = `<label>algorithm <select></select></label>
  <label>turn <button>◀</button> <input type="range" min="0" step="1" value="0"> <button>▶</button> <b></b></label>
  <svg viewBox="0 0 800 330"></svg><p class="said"></p>`;
const [select, slider, svg, said, now] = ["select", "input", "svg", ".said", "b"].map(name => main.querySelector(name));
const [back, on] = main.querySelectorAll("button");
data.forEach((one, index) => select.add(new Option(one.name.replace("_", " "), index)));
select.value = data.findIndex(one => one.name === "ring");

const whose = (value, ranks) => [...Array(ranks).keys()].filter(rank => value & (1 << rank));

function show() {
  const one = data[select.value], turn = +slider.value, wide = 800 / one.ranks, high = 40;
  slider.max = one.turns;
  now.textContent = turn < one.turns ? `${turn + 1} of ${one.turns}` : "done";
  svg.replaceChildren();
  make("defs", {});
  svg.firstChild.innerHTML = `<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
    orient="auto"><path d="M0 0L8 4L0 8z" fill="#c2410c"/></marker>`;
  for (let rank = 0; rank < one.ranks; rank++) {
    const held = one.held.filter(h => h.rank === rank && h.turn <= turn).at(-1);
    make("text", { x: rank * wide + 20, y: 20 }, `rank ${rank}`);
    held.values.forEach((value, part) => {
      const from = whose(value, one.ranks), full = from.length / one.ranks;
      make("rect", { x: rank * wide + 20, y: 30 + part * high, width: wide - 60, height: high - 6, rx: 4,
        fill: `rgb(${Math.round(225 - 180 * full)}, ${Math.round(235 - 90 * full)}, ${Math.round(245 - 40 * full)})` });
      make("text", { x: rank * wide + 28, y: 52 + part * high, style: "fill:#111" },
        full === 1 ? "all" : from.join(" + "));
    });
  }
  const messages = one.messages.filter(m => m.turn === turn);
  messages.forEach((m, index) => {
    const y = 30 + one.ranks * high + 18 + index * (90 / Math.max(4, messages.length));
    const start = m.from * wide + wide / 2 - 10, end = m.to * wide + wide / 2 - 10;
    make("line", { x1: start, x2: end, y1: y, y2: y, stroke: "#c2410c", "stroke-width": 2, "marker-end": "url(#head)" });
  });
  const sent = Math.max(...[...Array(one.ranks).keys()].map(r =>
    one.messages.filter(m => m.from === r).reduce((sum, m) => sum + m.elements, 0)));
  said.textContent = (turn < one.turns
    ? messages.map(m => `rank ${m.from} sends ${m.elements === one.ranks ? "everything" : `${m.elements} of ${one.ranks} parts`} to rank ${m.to}`).join("; ") + ". "
    : "Every rank has every sum. ") +
    `In all: ${one.turns} turns, ${one.messages.length} messages; the busiest rank sends ${(sent / one.ranks).toFixed(2)} times the tensor.`;
}
const move = by => { slider.value = +slider.value + by; show(); };
select.onchange = () => { slider.value = 0; show(); };
slider.oninput = show;
back.onclick = () => move(-1);
on.onclick = () => move(1);
document.onkeydown = e => {
  if (e.target !== slider && e.target !== select && e.key === "ArrowRight") move(1);
  if (e.target !== slider && e.target !== select && e.key === "ArrowLeft") move(-1);
};
show();
