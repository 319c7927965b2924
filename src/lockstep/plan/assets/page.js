"use strict";
// All layouts as points; filters; the one that is clicked, term by term.

const page = JSON.parse(document.getElementById("data").textContent);
const options = { renderer: "svg", actions: false };

const filters = {};
for (const axis of page.axes) {
  const values = [...new Set(page.plans.map((plan) => plan[axis]))].sort((a, b) => (a > b ? 1 : -1));
  if (values.length < 2) continue;
  const label = document.createElement("label");
  const select = document.createElement("select");
  select.id = `filter-${axis}`;
  select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
  select.addEventListener("change", () => {
    filters[axis] = select.value;
    draw();
  });
  label.append(`${axis} `, select);
  document.getElementById("filters").append(label);
}

const fit = { width: "container", autosize: { type: "fit-x", contains: "padding" }, config: page.config };

function shown() {
  return page.plans.filter((plan) => Object.entries(filters).every(([axis, value]) => !value || String(plan[axis]) === value));
}

async function draw() {
  const plans = shown();
  document.getElementById("count").textContent = `${plans.length} of ${page.plans.length} layouts`;
  const front = [];
  for (const plan of [...plans].sort((a, b) => a.step_s - b.step_s || a.peak_gib - b.peak_gib))
    if (!front.length || plan.peak_gib < front[front.length - 1].peak_gib) front.push(plan);
  const names = new Set(front.map((plan) => plan.number));
  const values = plans.map((plan) => ({ ...plan, front: names.has(plan.number) ? "on the Pareto front" : plan.fits }));
  const spec = {
    ...fit,
    height: 340,
    data: { values },
    layer: [
      {
        transform: [{ filter: "datum.front == 'on the Pareto front'" }],
        mark: { type: "line", interpolate: "step-before", strokeDash: [4, 3], color: "var(--soft)" },
        encoding: { x: { field: "peak_gib", type: "quantitative" }, y: { field: "step_s", type: "quantitative" } },
      },
      {
        mark: { type: "point", filled: true, size: 70, cursor: "pointer", opacity: 0.85 },
        encoding: {
          x: { field: "peak_gib", type: "quantitative", title: "memory of a rank, GiB", scale: { zero: false } },
          y: { field: "step_s", type: "quantitative", title: "step, s", scale: { zero: false } },
          color: {
            field: "front",
            title: null,
            legend: { orient: "top" },
            scale: { domain: ["on the Pareto front", "fits", "risky"], range: ["var(--accent)", "var(--other)", "var(--second)"] },
          },
          tooltip: [
            { field: "layout", title: "layout" },
            { field: "step_s", title: "step, s", format: ".3f" },
            { field: "peak_gib", title: "GiB", format: ".1f" },
            { field: "bound_by", title: "bound by" },
          ],
        },
      },
    ],
  };
  const made = await vegaEmbed("#points", spec, options);
  made.view.addEventListener("click", (_, item) => item && item.datum && item.datum.number !== undefined && choose(item.datum.number));
  if (plans.length && !plans.some((plan) => plan.number === chosen)) choose((plans.find((plan) => plan.fits === "fits") || plans[0]).number);
}

let chosen = -1;
const bars = (values) => ({
  ...fit,
  data: { values },
  height: 22 * values.length,
  mark: { type: "bar" },
  encoding: {
    y: { field: "name", type: "nominal", sort: null, title: null },
    x: { field: "value", type: "quantitative", title: null },
    color: { field: "colour", type: "nominal", scale: null },
    tooltip: [{ field: "name" }, { field: "value", format: ".3f" }],
  },
});

function choose(number) {
  chosen = number;
  const plan = page.plans.find((one) => one.number === number);
  const percent = (100 * plan.mfu).toFixed(1);
  document.getElementById("chosen").textContent =
    `${plan.layout}: ${plan.step_s.toFixed(3)} s (${plan.low80_s.toFixed(3)} to ${plan.high80_s.toFixed(3)}), ` +
    `${Math.round(plan.tokens_per_s).toLocaleString("en")} ${page.unit}, MFU ${percent}%, ` +
    `${plan.peak_gib.toFixed(1)} GiB, ${plan.fits}, bound by ${plan.bound_by}`;
  vegaEmbed("#time", bars(plan.times), options);
  vegaEmbed("#memory", bars(plan.kinds), options);
  const panel = document.getElementById("pipeline-panel");
  panel.hidden = !plan.pipeline;
  if (plan.pipeline) vegaEmbed("#pipeline", { ...page.pipelines[plan.pipeline], height: 26 * plan.pp, ...fit }, options);
}

draw();
