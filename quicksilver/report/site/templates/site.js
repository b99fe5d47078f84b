"use strict";
// What every page needs: the theme, the charts, the filter of the ledger.

// Text for innerHTML: what stands in `html` between ${ and } is text and stays text, unless `html` made it; of a list, each.
class Html { constructor(text) { this.text = text; } toString() { return this.text; } }
const escaped = (value) => (value instanceof Html ? value.text : Array.isArray(value) ? value.map(escaped).join("") : String(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`));
const html = (parts, ...values) => new Html(parts.map((part, i) => part + (i < values.length ? escaped(values[i]) : "")).join(""));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function setUpTheme() {
  const button = document.getElementById("theme");
  const show = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${dark() ? "light" : "dark"} theme`);
    dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("quicksilver-theme", document.documentElement.dataset.theme); } catch (error) { /* kept for this page only */ }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

// Charts are drawn on the page's own background; only their words and lines need the theme's colours.
const documents = [];
function paintCharts(which) {
  const ink = colour("soft"), rule = colour("rule");
  for (const doc of which) {
    for (const model of doc.all_models) {
      if (/Axis$/.test(model.type)) model.setv({ axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: ink, major_tick_line_color: ink, minor_tick_line_color: null });
      else if (model.type === "Grid") model.setv({ grid_line_color: rule });
      else if (model.type === "Legend") model.setv({ label_text_color: ink });
      else if (model.type === "Figure") model.setv({ outline_line_color: rule });
    }
  }
}

// A chart is drawn when it comes into view: a page of thirty would take a quarter of a minute before it answers.
const waiting = new Set();
async function drawChart(place) {
  waiting.add(place);
  document.body.dataset.charts = "drawing";
  const data = JSON.parse(document.getElementById(place.dataset.item).textContent);
  const { model: { document: doc } } = await Bokeh.Plotting.show(CHARTS[place.dataset.kind](data), place);
  documents.push(doc);
  place.quicksilverDocument = doc;
  paintCharts([doc]);
  place.classList.add("drawn");
  place.dispatchEvent(new Event("drawn"));
  waiting.delete(place);
  if (!waiting.size) document.body.dataset.charts = "drawn";
}

function drawCharts() {
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      drawChart(entry.target);
    }
    if (!waiting.size) document.body.dataset.charts = "drawn"; // what is in view
  }, { rootMargin: "200px" });
  for (const place of document.querySelectorAll(".chart")) observer.observe(place);
}

function setUpLedger() {
  const contains = document.getElementById("contains");
  if (!contains) return;
  const rows = [...document.querySelectorAll("#claims tbody tr")];
  const boxes = [...document.querySelectorAll("input[name=verdict]")];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const wanted = contains.value.trim().toLowerCase(), verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !verdicts.has(row.dataset.verdict) || !words[i].includes(wanted);
      shown += !row.hidden;
    });
    document.getElementById("shown").textContent = `${shown} of ${rows.length} shown`;
  };
  contains.addEventListener("input", filter);
  contains.form.addEventListener("submit", (event) => event.preventDefault());
  for (const box of boxes) box.addEventListener("change", filter);
}

// A table that is wider than its place says so.
const cue = () => { for (const grid of document.querySelectorAll(".grid")) { const place = grid.querySelector(".scroll"); grid.classList.toggle("cut", place.scrollWidth > place.clientWidth + 2); } };
addEventListener("resize", cue);

addEventListener("themechange", () => paintCharts(documents));
addEventListener("DOMContentLoaded", () => {
  document.querySelector(`nav a[data-name="${document.body.dataset.page}"]`)?.setAttribute("aria-current", "page");
  const nav = document.querySelector(".bar nav"), here = nav?.querySelector("[aria-current]");
  if (here) nav.scrollLeft = here.offsetLeft - nav.clientWidth / 2; // a narrow window has a part of the menu
  setUpTheme();
  setUpLedger();
  cue();
  if (document.querySelector(".chart")) drawCharts();
});
