// Tokens on their way to their experts and back, for the chosen router.
main.innerHTML = `<label>router <select></select></label>
  <label>step <button>◀</button> <input type="range" min="0" step="1" value="0"> <button>▶</button> <b></b></label>
  <svg viewBox="0 0 800 190"></svg><p class="said"></p>`;
const [select, slider, svg, said, now] = ["select", "input", "svg", ".said", "b"].map(name => main.querySelector(name));
const [back, on] = main.querySelectorAll("button");
const colours = ["#93c5fd", "#2563eb", "#5eead4", "#0d9488", "#fdba74", "#c2410c", "#c4b5fd", "#7c3aed"];
const [side, across] = [21, 8];
data.forEach((one, index) => select.add(new Option(one.name, index)));

function show() {
  const one = data[select.value], step = one.steps[+slider.value], wide = 800 / one.ranks;
  slider.max = one.steps.length - 1;
  now.textContent = step.name;
  svg.replaceChildren();
  step.rows.forEach((rows, rank) => {
    const left = rank * wide + 8, held = one.experts / one.ranks;
    make("text", { x: left, y: 16 }, `rank ${rank}`);
    for (let i = 0; i < held; i++) {
      const expert = rank * held + i;
      make("rect", { x: left + 46 + 76 * i, y: 6, width: 12, height: 12, rx: 3, fill: colours[expert] });
      make("text", { x: left + 62 + 76 * i, y: 16 }, `expert ${expert}`);
    }
    rows.forEach((row, index) => {
      const x = left + (index % across) * (side + 1), y = 30 + Math.floor(index / across) * (side + 1);
      const chosen = row.expert !== null;
      make("rect", { x, y, width: side, height: side, rx: 4, fill: chosen ? colours[row.expert] : "#cbd5e1",
        stroke: row.rank === rank ? "none" : "currentColor" });
      make("text", { x: x + side / 2, y: y + 14, "text-anchor": "middle",
        style: `fill:${chosen && row.expert % 2 ? "#fff" : "#111"};font-size:9px` }, `${row.rank}.${row.token}`);
    });
    if (!rows.length) make("text", { x: left, y: 44 }, "none");
  });
  said.textContent = step.said;
}
const move = by => { slider.value = +slider.value + by; show(); };
select.onchange = show;
slider.oninput = show;
back.onclick = () => move(-1);
on.onclick = () => move(1);
document.onkeydown = e => {
  if (e.target !== slider && e.target !== select && e.key === "ArrowRight") move(1);
  if (e.target !== slider && e.target !== select && e.key === "ArrowLeft") move(-1);
};
show();
