"use strict";
// From record to record. A slider or a list goes over the values that records have; the record with the new value that otherwise differs least is
// shown, so that every position is a run.

const sweeps = JSON.parse(document.getElementById("sweeps").textContent);
const form = document.getElementById("options"), result = document.getElementById("result"), table = document.getElementById("records");
const sweepChoice = document.getElementById("sweep");
let sweep = null, current = 0;

const signed = (value, digits = 1, unit = "%") => (value == null ? "–" : `${value > 0 ? "+" : ""}${value.toFixed(digits)}${unit}`);
const interval = ([middle, low, high], digits = 2, unit = "%") => (middle == null ? "–" : html`${signed(middle, digits, unit)} <span class="interval">[${signed(low, digits, "")} ${signed(high, digits, "")}]</span>`);
const time = (value, noise) => (value == null ? "not timed" : Math.abs(value) <= (noise ?? 0) ? `≈ 0 (noise ${noise.toFixed(1)}%)` : html`${signed(value)} <span class="interval">noise ${noise == null ? "unknown" : `${noise.toFixed(1)}%`}</span>`);

function nearest(option, value) {
  // Records are in a fixed order, so ties always go the same way.
  let best = -1, least = Infinity;
  sweep.records.forEach((record, i) => {
    if (record.at[option] !== value) return;
    const apart = record.at.reduce((sum, place, k) => sum + (k === option ? 0 : place !== sweep.records[current].at[k] ? 1 + Math.abs(place - sweep.records[current].at[k]) / 1000 : 0), 0);
    if (apart < least) [best, least] = [i, apart];
  });
  return best;
}

// Numbers have an order and get a slider; names have none and are chosen by name.
const control = (option, k) => option.ordered
  ? html`<input id="option-${k}" data-option="${k}" type="range" min="0" max="${option.values.length - 1}" step="1" list="ticks-${k}"><datalist id="ticks-${k}">${option.values.map((_, i) => html`<option value="${i}"></option>`)}</datalist>`
  : html`<select id="option-${k}" data-option="${k}">${option.values.map((value, i) => html`<option value="${i}">${value}</option>`)}</select>`;

function select(i, moved = -1) {
  const before = sweep.records[current], record = sweep.records[i];
  const changed = sweep.options.filter((option, k) => k !== moved && moved >= 0 && before.at[k] !== record.at[k]);
  current = i;
  sweep.options.forEach((option, k) => {
    const input = form.querySelector(`[data-option="${k}"]`), value = option.values[record.at[k]];
    input.value = record.at[k];
    if (option.ordered) input.setAttribute("aria-valuetext", value);
    form.querySelector(`[data-value="${k}"]`).textContent = option.ordered ? value : "";
    form.querySelector(`[data-also="${k}"]`).textContent = option.also.map((other) => `${other.name}=${other.values[record.at[k]]}`).join(", ");
  });
  const versus = record.versus_null_ppl, judged = versus[0] == null ? "" : versus[2] < 0 ? " (better than its null)" : versus[1] > 0 ? " (worse than its null)" : " (no difference to its null)";
  const rows = [
    ["Δ perplexity", [interval(record.delta_ppl_pct), judged]], ["of its null", interval(record.null_delta_ppl_pct)],
    ["executed FLOPs saved", signed(record.executed_flops_saved_pct)], ["nominal FLOPs saved", signed(record.nominal_flops_saved_pct)], ["FLOPs saved, paper's ledger", signed(record.paper_flops_saved_pct)],
    ...(record.prompt_executed_flops_saved_pct == null ? [] : [["executed, of the prompt", signed(record.prompt_executed_flops_saved_pct)]]),
    ["KV bytes saved", signed(record.kv_bytes_saved_pct)], ["time saved", time(record.speedup_pct, record.noise_floor_pct)],
    ...(record.prompt_speedup_pct == null ? [] : [["time saved, of the prompt", time(record.prompt_speedup_pct, record.prompt_noise_floor_pct)]]),
  ];
  result.innerHTML = html`<table><tbody>${rows.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${value}</td></tr>`)}</tbody></table>
    <p><a href="runs/${record.fingerprint}.html">Record <code>${record.fingerprint.slice(0, 12)}</code></a>${record.trace ? html` · <a href="${record.trace}">tokens</a>` : ""}</p>
    <p class="changed">${changed.length ? `Also changed, because no record has this value with the rest as it was: ${changed.map((option) => option.name).join(", ")}.` : ""}</p>`;
  for (const row of table.tBodies[0].rows) row.setAttribute("aria-selected", Number(row.dataset.record) === i);
  mark();
}

function mark() {
  const doc = document.querySelector(`[data-sweep="${sweepChoice.value}"] .chart`)?.quicksilverDocument;
  const record = sweep.records[current];
  if (doc) doc.get_model_by_name("now").data = { saved: [record.executed_flops_saved_pct], delta: [record.delta_ppl_pct[0]] };
}

function open(number) {
  sweep = sweeps[number];
  for (const place of document.querySelectorAll(".sweep-chart")) place.hidden = Number(place.dataset.sweep) !== number;
  form.innerHTML = html`${sweep.options.map((option, k) => html`<div class="option"><label for="option-${k}"><span>${option.name}</span><output data-value="${k}" for="option-${k}"></output></label>
    ${control(option, k)}<div class="also" data-also="${k}"></div></div>`)}`;
  for (const input of form.querySelectorAll("[data-option]")) input.addEventListener("input", () => {
    const option = Number(input.dataset.option);
    select(nearest(option, Number(input.value)), option);
  });
  table.innerHTML = html`<thead><tr>${sweep.options.map((option) => html`<th scope="col">${option.name}</th>`)}<th scope="col" class="right">Δ perplexity</th><th scope="col" class="right">executed FLOPs saved</th><th scope="col" class="right">time saved</th><th scope="col">record</th></tr></thead><tbody>${sweep.records
    .map((record, i) => [record, i])
    .sort(([a], [b]) => { for (let k = 0; k < a.at.length; k++) if (a.at[k] !== b.at[k]) return a.at[k] - b.at[k]; return 0; })
    .map(([record, i]) => html`<tr data-record="${i}">${sweep.options.map((option, k) => html`<td>${option.values[record.at[k]]}</td>`)}<td class="right">${interval(record.delta_ppl_pct)}</td><td class="right">${signed(record.executed_flops_saved_pct)}</td><td class="right">${record.speedup_pct == null ? "–" : signed(record.speedup_pct)}</td><td><a href="runs/${record.fingerprint}.html"><code>${record.fingerprint.slice(0, 12)}</code></a></td></tr>`)}</tbody>`;
  select(0);
}

table.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-record]");
  if (row && !event.target.closest("a")) select(Number(row.dataset.record));
});
sweepChoice.addEventListener("change", () => open(Number(sweepChoice.value)));
for (const place of document.querySelectorAll(".chart")) place.addEventListener("drawn", () => {
  const records = place.quicksilverDocument.get_model_by_name("records");
  records.selected.change.connect(() => { const [i] = records.selected.indices; if (i !== undefined) select(i); });
  mark();
});
for (const one of document.querySelectorAll("form")) one.addEventListener("submit", (event) => event.preventDefault());
addEventListener("DOMContentLoaded", () => { open(0); document.body.dataset.explorer = "ready"; });
