"use strict";
// Sorting, and drawing every chart of the page.

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent;
      };
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (typeof x === "number" && typeof y === "number") return x - y;
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return x.localeCompare(y, "en", { numeric: true });
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? -order(a, b) : order(a, b)));
      table.tBodies[0].append(...rows);
    });
  });
}


const charts = JSON.parse(document.getElementById("data").textContent);
const drawn = [...document.querySelectorAll("[data-chart]")].map((place) => {
  const options = { renderer: "svg", actions: false, tooltip: { theme: "lockstep" } };
  return vegaEmbed(place, charts[Number(place.dataset.chart)], options).catch((error) => {
    console.error(error);
    place.textContent = `this chart could not be drawn: ${error.message}`;
  });
});
document.querySelectorAll("table.sortable").forEach(sortable);
