// What a rank holds at each ZeRO stage, for the chosen number of ranks.
main.innerHTML = `<label>ranks <input type="range" min="0" max="6" step="1" value="3"> <b></b></label>
  <svg viewBox="0 0 800 240"></svg><p class="said"></p>`;
const [slider, svg, said, now] = ["input", "svg", ".said", "b"].map(name => main.querySelector(name));
const colours = ["#2563eb", "#0d9488", "#c2410c", "#7c3aed", "#a16207", "#64748b", "#be185d"];
const kinds = [...new Set(Object.values(data.held).flatMap(held => Object.keys(held)))];
function show() {
  const ranks = 2 ** +slider.value, capacity = data.capacity * 1e9 / 2 ** 30;
  now.textContent = ranks;
  svg.replaceChildren();
  const most = Math.max(...Object.values(data.held).map(held => Object.values(held).reduce((a, b) => a + b, 0)));
  const scale = 600 / most, totals = [];
  for (let stage = 0; stage < 4; stage++) {
    const held = data.held[`${ranks}/${stage}`];
    let x = 90, total = 0;
    make("text", { x: 0, y: 32 + 42 * stage }, stage ? `ZeRO ${stage}` : "DDP");
    kinds.forEach((kind, index) => {
      const gib = held[kind] ?? 0;
      make("rect", { x, y: 14 + 42 * stage, width: gib * scale, height: 28, fill: colours[index] });
      x += gib * scale;
      total += gib;
    });
    make("text", { x: x + 6, y: 32 + 42 * stage }, `${total.toFixed(1)} GiB`);
    totals.push(total);
  }
  make("line", { x1: 90 + capacity * scale, x2: 90 + capacity * scale, y1: 6, y2: 180, stroke: "currentColor", "stroke-dasharray": "4 3" });
  kinds.forEach((kind, index) => {
    const x = 90 + 170 * (index % 4), y = 200 + 20 * Math.floor(index / 4);
    make("rect", { x, y: y - 10, width: 12, height: 12, fill: colours[index] });
    make("text", { x: x + 18, y }, kind);
  });
  const fits = totals.map((total, stage) => [total, stage]).filter(([total]) => total < capacity).map(([, stage]) => stage ? `ZeRO ${stage}` : "DDP");
  said.textContent = `On ${ranks} rank${ranks > 1 ? "s" : ""}, ${fits.length ? fits.join(", ") : "nothing of this"} fits into ${data.capacity} GB.`;
}
slider.oninput = show;
show();
