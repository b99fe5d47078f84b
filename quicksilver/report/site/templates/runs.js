"use strict";
// A table of runs: search, filter, sort by a heading, compare two rows. The table has the id "runs".
(() => {
  const table = document.getElementById("runs");
  if (!table) return;
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const search = document.getElementById("runs-search"), tools = document.getElementById("runs-tools");
  const filters = [...tools.querySelectorAll("select[data-filter]")], boxes = [...tools.querySelectorAll("input[name=state]")];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const state = new URLSearchParams(location.hash.slice(1)); // kept in the address: a reload shows the same

  const remember = () => {
    const hash = state.toString();
    try { history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search); } catch (error) { /* of a file, in some browsers */ }
  };

  function filter() {
    const wanted = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      const fits = wanted.every((word) => words[i].includes(word)) && filters.every((one) => !one.value || row.dataset[one.dataset.filter] === one.value);
      row.hidden = !fits || (boxes.length > 0 && !boxes.some((box) => box.checked && box.value === row.dataset.state));
      shown += !row.hidden;
    });
    document.getElementById("runs-shown").textContent = `${shown} of ${rows.length} shown`;
    wanted.length ? state.set("search", search.value) : state.delete("search");
    for (const one of filters) one.value ? state.set(one.dataset.filter, one.value) : state.delete(one.dataset.filter);
    remember();
  }

  // A cell sorts by its data-value where it has one, and an empty one comes last whichever way.
  const key = (row, column) => {
    const cell = row.cells[column], value = cell.dataset.value ?? cell.textContent.trim();
    return value === "" || value === "–" || value === "-" ? null : Number.isNaN(Number(value)) ? value : Number(value);
  };
  function sort(column, down) {
    const sign = down ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    const sorted = rows.map((row, i) => [key(row, column), i, row]).sort(([a, i], [b, j]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)) || i - j);
    body.append(...sorted.map(([, , row]) => row));
    heads.forEach((head, i) => (i === column ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    state.set("sort", `${column}${down ? "-" : ""}`);
    remember();
  }
  heads.forEach((head, column) => {
    if (head.dataset.unsorted !== undefined) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending"));
  });

  // Two rows that are chosen stand side by side: what they are made of where it differs, and every number.
  const place = document.getElementById("runs-compared"), settings = JSON.parse(document.getElementById("runs-settings")?.textContent ?? "{}");
  let chosen = [];
  function compare() {
    for (const row of rows) {
      row.classList.toggle("chosen", chosen.includes(row));
      const box = row.querySelector("input[name=compare]");
      if (box) box.checked = chosen.includes(row);
    }
    place.replaceChildren();
    if (chosen.length !== 2) {
      place.textContent = chosen.length ? "Choose a second run to compare." : "";
      return;
    }
    const lines = [];
    const [one, other] = chosen.map((row) => settings[row.dataset.run] ?? {});
    for (const name of [...new Set([...Object.keys(one), ...Object.keys(other)])].sort())
      if (one[name] !== other[name]) lines.push([name.replace(/^modules\./, ""), one[name] ?? "–", other[name] ?? "–", ""]);
    heads.forEach((head, column) => {
      const [a, b] = chosen.map((row) => row.cells[column].innerText.trim().replace(/\s+/g, " "));
      if (head.dataset.unsorted !== undefined || a === chosen[0].dataset.name || (a === b && !("value" in chosen[0].cells[column].dataset))) return;
      const [x, y] = chosen.map((row) => key(row, column));
      lines.push([head.textContent.trim(), a, b, typeof x === "number" && typeof y === "number" ? Number((y - x).toPrecision(3)) : ""]);
    });
    const shown = document.createElement("table");
    shown.id = "comparison";
    const add = (cells, tag) => {
      const line = shown.insertRow();
      for (const text of cells) line.append(Object.assign(document.createElement(tag), { textContent: text }));
    };
    add(["", ...chosen.map((row) => row.dataset.name), "difference"], "th");
    for (const line of lines) add(line, "td");
    place.append(shown);
  }
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (event.target.closest("a") || !row) return;
    chosen = chosen.includes(row) ? chosen.filter((one) => one !== row) : [...chosen.slice(-1), row];
    compare();
  });

  search.addEventListener("input", filter);
  tools.addEventListener("submit", (event) => event.preventDefault());
  for (const one of [...filters, ...boxes]) one.addEventListener("change", filter);
  search.value = state.get("search") ?? "";
  for (const one of filters) one.value = state.get(one.dataset.filter) ?? "";
  const sorted = state.get("sort");
  if (sorted) sort(parseInt(sorted, 10), sorted.endsWith("-"));
  filter();
})();
