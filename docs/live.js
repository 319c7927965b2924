"use strict";
// What the live pages share: where they draw, and how. Each has an <svg> of its own, called svg.
const main = document.querySelector("main");
const make = (name, values, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  svg.append(made);
};
