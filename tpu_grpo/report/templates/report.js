// Shows values where the pointer, a finger or the arrow keys are; loads the page of a run that goes on again and again.
"use strict";
let busy = false;
const make = (kind, parent, text) => {
  const element = parent.appendChild(document.createElement("div"));
  element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 5 });
};
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
};
for (const area of document.querySelectorAll(".area")) {
  const chart = JSON.parse(area.dataset.chart);
  const [left, right] = chart.x, [low, high] = chart.log ? chart.y.map(Math.log10) : chart.y;
  const all = chart.lines.map((line) => line.x || chart.steps);
  let shown = [], at = null;
  const clear = () => { shown.forEach((element) => element.remove()); shown = []; busy = false; };
  const show = (wanted) => {
    clear();
    busy = true;
    const places = all.map((steps) => nearest(steps, wanted));
    const candidates = places.map((place, i) => all[i][place]);
    at = candidates.reduce((best, step) => Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best);
    const share = (at - left) / (right - left);
    const hair = make("hair", area), tip = make("tip", area);
    shown = [hair, tip];
    hair.style.left = `${100 * share}%`;
    tip.style[share < 0.5 ? "left" : "right"] = `calc(${100 * (share < 0.5 ? share : 1 - share)}% + 12px)`;
    tip.appendChild(document.createElement("b")).textContent = `step ${at.toLocaleString("en")}`;
    chart.lines.forEach((line, i) => {
      const place = nearest(all[i], at), step = all[i][place], value = line.y[place];
      const row = make("", tip), name = row.appendChild(document.createElement("span"));
      const key = name.appendChild(document.createElement("span"));
      key.className = "key";
      key.style.setProperty("--c", `var(--c${line.c})`);
      name.append(line.l + (step === at ? "" : ` (step ${step.toLocaleString("en")})`));
      row.appendChild(document.createElement("span")).textContent = number(value);
      const height = (line.t || line.y)[place];
      const up = height === null ? NaN : ((chart.log ? Math.log10(height) : height) - low) / (high - low);
      if (up >= 0 && up <= 1) {
        const dot = make("dot", area);
        dot.style.cssText = `left:${100 * (step - left) / (right - left)}%;bottom:${100 * up}%;margin:-4.5px;--c:var(--c${line.c})`;
        dot.style.transform = "translateY(0)";
        shown.push(dot);
      }
    });
  };
  const move = (event) => {
    const box = area.getBoundingClientRect();
    show(left + (right - left) * (event.clientX - box.left) / box.width);
  };
  area.addEventListener("pointermove", move);
  area.addEventListener("pointerdown", move);
  area.addEventListener("pointerleave", clear);
  area.addEventListener("blur", clear);
  area.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const place = at === null ? 0 : nearest(chart.steps, at) + by;
    show(chart.steps[Math.max(0, Math.min(chart.steps.length - 1, place))]);
  });
}
const again = Number(document.body.dataset.again);
if (again) setInterval(() => {
  const reads = busy || document.querySelector("details[open]") || String(getSelection());
  if (!document.hidden && !reads) location.reload();
}, 1000 * again);
