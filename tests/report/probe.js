// Uses a page as a reader would, and tells the test what came of it.
const seen = { errors: [], overflow: [], outside: [], tips: {} };
const areas = [...document.querySelectorAll(".area")];
const point = (area, share) => {
  const box = area.getBoundingClientRect();
  const place = { clientX: box.left + share * box.width, clientY: box.top + 20, bubbles: true };
  area.dispatchEvent(new PointerEvent("pointermove", place));
};
const rows = (area) =>
  [...area.querySelectorAll(".tip > *")].map((row) => [...row.childNodes].map((part) => part.textContent));
const isIn = (element, around, by) => {
  const a = around.getBoundingClientRect(), e = element.getBoundingClientRect();
  return e.left >= a.left - by && e.right <= a.right + by && e.top >= a.top - by && e.bottom <= a.bottom + by;
};
for (const area of areas) {
  const name = area.getAttribute("aria-label"), svg = area.querySelector("svg");
  point(area, 0.5);
  seen.tips[name] = rows(area);
  const tip = area.querySelector(".tip").getBoundingClientRect();
  if (tip.right > innerWidth || tip.left < 0) seen.outside.push(`${name}: tip`);
  for (const dot of area.querySelectorAll(".dot")) if (!isIn(dot, area, 6)) seen.outside.push(`${name}: dot`);
  area.dispatchEvent(new PointerEvent("pointerleave"));
  if (area.querySelector(".tip, .hair, .dot")) seen.errors.push(`${name} keeps its tip`);
  if (getComputedStyle(svg).overflow === "visible")
    for (const path of svg.querySelectorAll("path")) if (!isIn(path, area, 2)) seen.outside.push(`${name}: path`);
}
point(areas[0], 0);
for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"])
  areas[0].dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
seen.keys = rows(areas[0])[0];
areas[0].dispatchEvent(new PointerEvent("pointerleave"));
for (const element of document.querySelectorAll("main *"))
  if (!element.closest(".scroll, pre, svg") && element.getBoundingClientRect().right > innerWidth + 1)
    seen.overflow.push(`${element.tagName} ${element.className}`);
for (const cell of document.querySelectorAll("td"))
  if (cell.getBoundingClientRect().width < 40) seen.overflow.push(`a cell is narrow: ${cell.textContent}`);
seen.width = innerWidth;
const lefts = [...document.querySelectorAll("figure:not(.wide)")].map((figure) => figure.getBoundingClientRect().left);
seen.columns = new Set(lefts).size;
seen.colours = [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color];
const colour = (name) => [...document.querySelectorAll(name)].slice(0, 1).map((part) => getComputedStyle(part).color)[0];
seen.said = [colour(".talk .turn"), colour(".talk .answer"), colour(".talk .by")];
seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
parent.postMessage(JSON.stringify(seen), "*");
