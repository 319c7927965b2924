// Backward above, the buckets' all-reduces below, for the chosen cap; what is in flight after backward is exposed.
main.innerHTML = `<label>bucket of at most <input type="range" min="0" step="1" value="4"> <b></b></label>
  <svg viewBox="0 0 800 130"></svg><p class="said"></p>`;
const [slider, svg, said, now] = ["input", "svg", ".said", "b"].map(name => main.querySelector(name));
slider.max = data.length - 1;
const longest = Math.max(...data.map(one => one.backward + one.exposed));
function show() {
  const one = data[+slider.value], scale = 690 / longest;
  now.textContent = one.cap ? `${one.cap} MiB` : "one layer each";
  svg.replaceChildren();
  make("text", { x: 0, y: 36 }, "backward");
  make("rect", { x: 90, y: 20, width: one.backward * scale, height: 24, fill: "#2563eb" });
  make("text", { x: 0, y: 86 }, "in flight");
  for (const span of one.spans) {
    const hidden = Math.max(0, Math.min(span.end, one.backward) - span.start);
    make("rect", { x: 90 + span.start * scale, y: 70, width: hidden * scale, height: 24, fill: "#0d9488", stroke: "white" });
    make("rect", { x: 90 + (span.start + hidden) * scale, y: 70, width: (span.end - span.start - hidden) * scale,
      height: 24, fill: "#c2410c", stroke: "white" });
    make("line", { x1: 90 + span.ready * scale, x2: 90 + span.ready * scale, y1: 46, y2: 68, stroke: "currentColor" });
  }
  make("text", { x: 90, y: 122 }, "green: hidden by backward; orange: the step waits for it; a line: a bucket is full");
  const hidden = one.total ? 100 * (1 - one.exposed / one.total) : 0;
  said.textContent = `${one.spans.length} messages, ${one.total.toFixed(1)} ms in flight, of which the step waits ` +
    `${one.exposed.toFixed(1)} ms: ${hidden.toFixed(0)}% is hidden.`;
}
slider.oninput = show;
show();
