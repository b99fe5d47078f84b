"use strict";
// What happened to the tokens of a text. A token is a column, a layer a row; layers count from 1.

const views = JSON.parse(document.getElementById("views").textContent);
// Letter, name of the colour, words. The letters are those of quicksilver/report/site/views.py.
const STATES = [
  ["C", "active", "computed"], ["W", "nokv", "computed, no K/V entry"], ["H", "halted", "halted, no K/V entry"],
  ["K", "kept", "halted, K/V entry kept"], ["R", "resumed", "computed again"], ["N", "again", "computed again, no K/V entry"], ["F", "carried", "carried by a neighbour"],
];
const STATE = Object.fromEntries(STATES.map(([letter, name, words]) => [letter, { name, words }]));
const box = document.getElementById("tokens"), detail = document.getElementById("detail"), map = document.getElementById("map");
const channelChoice = document.getElementById("channel"), layerChoice = document.getElementById("layer"), textChoice = document.getElementById("window");
const classChoice = document.getElementById("class"), tree = document.getElementById("tree");
// Of a word class, its hue; light and dark pages mix it with their own ground.
const HUES = { determiner: 210, preposition: 30, conjunction: 280, pronoun: 340, auxiliary: 160, content: 90, other: 0 };
let view = null, here = 0, spans = [], picture = null;

const decoded = ({ distinct, places }) => places.map((place) => distinct[place]);

function read(coded) {
  const data = { ...coded, states: decoded(coded.states), bits: coded.bits && decoded(coded.bits), texts: coded.texts === "shared" ? sharedWords[coded.window] : coded.texts };
  const count = (letters) => data.states.map((states) => [...states].filter((one) => letters.includes(one)).length);
  const carriers = new Map(), carried = new Map();
  for (const [token, carrier, layer, weight] of data.fusions) {
    carried.set(token, { carrier, layer, weight });
    if (!carriers.has(carrier)) carriers.set(carrier, []);
    carriers.get(carrier).push({ token, layer });
  }
  if (data.words) data.words = { ...data.words, classes: decoded(data.words.classes) };
  const width = (digit) => (digit === "0" ? 16 : Number(digit));
  return {
    ...data, carriers, carried, columns: data.states.length, layers: data.states[0].length,
    left: count("HKF"), missing: count("WHNF"),
    halt: data.states.map((states) => { const at = states.search(/[HK]/); return at < 0 ? states.length : at; }),
    width: (i, layer) => (data.bits ? width(data.bits[i][layer - 1]) : 16),
  };
}

const plain = (i) => (view.texts ? JSON.stringify(view.texts[i]) : `token ${i}`);

// Each channel: name, title, ends of its scale, the share of the scale (0 to 1) of a token, whether it is of one layer.
function channels() {
  const all = [
    ["left", "layers left out", ["none", "all"], (i) => view.left[i] / view.layers],
    ["missing", "layers without a K/V entry", ["none", "all"], (i) => view.missing[i] / view.layers],
    ["halt", "halting depth", ["never", "before the first layer"], (i) => 1 - view.halt[i] / view.layers],
    ["bits", "bits in the last layer", ["full", "2"], (i) => (4 - Math.log2(view.width(i, view.layers))) / 3],
    ["fusion", "fusion", ["not fused", "carried"], (i) => (view.carried.has(i) ? 1 : view.carriers.has(i) ? 0.45 : 0)],
  ].filter(([, , , share]) => view.states.some((_, i) => share(i) > 0));
  if (view.words) all.push(["class", "word class", ["", ""], () => 0]);
  for (const [name, { unit, values }] of Object.entries(view.signals)) {
    const known = values.flat().filter((value) => value !== null), low = Math.min(...known), high = Math.max(...known);
    const share = (i) => { const value = values[i][layerChoice.value - 1]; return value === null ? 0 : (value - low) / (high - low || 1); };
    all.push([name, `${name} (${unit})`, [low, high], share, true]);
  }
  return all.length ? all : [["left", "layers left out", ["none", "all"], () => 0]];
}

function shade() {
  const known = channels(), [, , ends, share, byLayer] = known.find(([name]) => name === channelChoice.value) ?? known[0];
  const byClass = channelChoice.value === "class", wanted = view.words ? classChoice.value : "";
  spans.forEach((span, i) => {
    const part = i < view.columns ? share(i) : 0, kind = view.words?.classes[i];
    span.style.background = byClass && kind ? classColour(kind) : part > 0 ? `color-mix(in srgb, var(--heat) ${Math.round(65 * part)}%, transparent)` : "";
    span.style.opacity = wanted && kind !== wanted ? 0.25 : "";
  });
  const scale = document.getElementById("scale");
  scale.innerHTML = byClass ? html`${view.kinds.map((kind) => html`<span class="kind" style="background:${classColour(kind)}">${kind}</span>`)}` : html`<span>${ends[0]}</span><i></i><span>${ends[1]}</span>`;
  document.getElementById("layer-choice").hidden = !byLayer;
  document.getElementById("layer-shown").textContent = layerChoice.value;
}

const classColour = (kind) => `hsl(${Object.hasOwn(HUES, kind) ? HUES[kind] : 0} ${kind === "other" ? 0 : 65}% 55% / 0.4)`;

// Constituents of two words or more, of the words from `first` to `last`: [from, to, label]. Two neighbours say how many words the smallest
// constituent has that holds both; it reaches as far as its neighbours say no more than that.
function constituents(first, last) {
  const { joints } = view.words, found = new Map();
  for (let word = first; word < last; word += 1) {
    const [label, words] = joints[word];
    if (!words) continue;
    let from = word, to = word + 1;
    while (from > first && joints[from - 1][1] && joints[from - 1][1] <= words) from -= 1;
    while (to < last && joints[to][1] && joints[to][1] <= words) to += 1;
    found.set(`${from} ${to}`, [from, to, label]);
  }
  return [...found.values()].sort((a, b) => a[1] - a[0] - (b[1] - b[0]));
}

function drawSentence(i) {
  const words = view.words, own = words?.word[i] ?? -1, section = document.getElementById("sentence");
  section.hidden = own < 0 || view.texts === null;
  if (section.hidden) return;
  const number = words.sentence[own], first = words.sentence.indexOf(number), last = words.sentence.lastIndexOf(number);
  const texts = Array.from({ length: last - first + 1 }, () => "");
  words.word.forEach((word, token) => { if (word >= first && word <= last) texts[word - first] += view.texts[token]; });
  const middles = [], wide = texts.map((text) => 8 * Math.max(2, text.trim().length) + 12);
  wide.reduce((at, one) => { middles.push(at + one / 2); return at + one; }, 0);
  const middle = (word) => middles[word - first], half = (word) => wide[word - first] / 2;
  const arcs = view.fusions.map(([token, carrier, layer]) => [words.word[token] ?? -1, words.word[carrier] ?? -1, layer]).filter(([a, b]) => a !== b && [a, b].every((word) => word >= first && word <= last));
  const tall = 18 + 12 * Math.max(0, ...arcs.map(([a, b]) => Math.abs(a - b))), base = tall + 16;
  const levels = [], parts = [], numbers = []; // numbers last: an arc that crosses one leaves it readable
  const found = constituents(first, last), treeBox = document.getElementById("tree-box");
  document.getElementById("has-tree").hidden = !found.length;
  for (const [from, to, label] of found) {
    const level = 1 + Math.max(0, ...levels.filter(([a, b]) => a >= from && b <= to).map(([, , one]) => one));
    levels.push([from, to, level]);
    const y = base + 18 * level, left = middle(from) - half(from) + 4, right = middle(to) + half(to) - 4;
    parts.push(html`<path d="M${left} ${y - 5}v5H${right}v-5" fill="none" stroke="currentColor"/><text class="label" x="${(left + right) / 2}" y="${y + 11}" font-size="10">${label}</text>`);
  }
  for (const [a, b, layer] of arcs) {
    const x = (middle(a) + middle(b)) / 2, top = tall - 10 * Math.abs(a - b);
    parts.push(html`<path class="arc" d="M${middle(a)} ${tall}Q${x} ${2 * top - tall}  ${middle(b)} ${tall}" fill="none" stroke="var(--heat)" stroke-width="2"/>`);
    numbers.push(html`<text x="${x}" y="${top - 2}" font-size="10" stroke="var(--paper)" stroke-width="3" paint-order="stroke">${layer}</text>`);
  }
  texts.forEach((text, place) => {
    const word = first + place, kind = words.classes[words.word.indexOf(word)];
    parts.push(html`<rect x="${middle(word) - half(word) + 2}" y="${base - 14}" width="${wide[place] - 4}" height="18" rx="3" style="fill:${classColour(kind)}"${word === own ? html` stroke="currentColor"` : ""}/><text x="${middle(word)}" y="${base}">${text.trim()}</text>`);
  });
  const width = wide.reduce((sum, one) => sum + one, 0), height = base + 18 * (1 + Math.max(0, ...levels.map(([, , level]) => level)));
  tree.setAttribute("viewBox", `0 0 ${width} ${height}`);
  tree.setAttribute("width", width);
  tree.setAttribute("height", height);
  tree.innerHTML = html`<g text-anchor="middle" font-size="13" fill="currentColor">${parts}${numbers}</g>`;
  treeBox.scrollLeft = middle(own) - treeBox.clientWidth / 2; // a long sentence is wider than a page
}

function drawMap() {
  const colours = Object.fromEntries(STATES.map(([letter, name]) => [letter, colour(`s-${name}`)]));
  picture = new OffscreenCanvas(view.columns, view.layers);
  const pen = picture.getContext("2d"), seen = new Set();
  view.states.forEach((states, i) => [...states].forEach((letter, layer) => {
    seen.add(letter);
    pen.fillStyle = colours[letter];
    pen.fillRect(i, layer, 1, 1);
  }));
  document.getElementById("map-legend").innerHTML = html`${STATES.filter(([letter]) => seen.has(letter)).map(([, name, words]) => html`<li><i style="background:var(--s-${name})"></i>${words}</li>`)}`;
  markMap();
}

function markMap() {
  const pen = map.getContext("2d"), wide = map.width / view.columns;
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture, 0, 0, map.width, map.height);
  if (here < view.columns) {
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.strokeRect(here * wide - 1, 1, wide + 2, map.height - 2);
  }
}

function facts(i) {
  if (i >= view.columns) return [["", "only predicted: the model never processed it"]];
  const known = view.words?.classes[i] ? [["word class", view.words.classes[i]]] : [], halt = view.halt[i], fusion = view.carried.get(i), others = view.carriers.get(i), again = view.states[i].search(/[RN]/);
  known.push(["halted", halt < view.layers ? `after layer ${halt} of ${view.layers}${again < 0 ? "" : `, computed again from layer ${again + 1}`}` : "never"]);
  known.push(["computed", `${view.layers - view.left[i]} of ${view.layers} layers`]);
  known.push(["K/V entries", `${view.layers - view.missing[i]} of ${view.layers} layers`]);
  if (view.bits) known.push(["bits", view.width(i, view.layers) < 16 ? `${view.width(i, view.layers)} in the last layer` : "untouched"]);
  if (fusion) known.push(["fusion", `carried by ${plain(fusion.carrier)} (${fusion.carrier}) after layer ${fusion.layer}${fusion.weight === null ? "" : `, weight ${fusion.weight}`}`]);
  else known.push(["fusion", others ? `carries ${others.map(({ token, layer }) => `${plain(token)} (${token}, after layer ${layer})`).join(", ")}` : "none"]);
  for (const [layer, slot, carrier] of view.merges) if (slot === i) known.push(["cache", `its K/V in layer ${layer} went into token ${carrier}`]);
  const evicted = view.evictions.filter(([, slots]) => slots.includes(i)).map(([layer]) => layer);
  if (evicted.length) known.push(["cache", `its K/V left layer${evicted.length > 1 ? "s" : ""} ${[...new Set(evicted)].join(", ")} after it was written`]);
  for (const [which, nats] of Object.entries(view.nats ?? {})) if (nats[i] !== null) known.push([`surprise, ${which}`, `${nats[i]} nats`]);
  return known;
}

function strip(i) {
  const [name, signal] = Object.entries(view.signals).find(([one]) => one === channelChoice.value) ?? Object.entries(view.signals)[0] ?? ["", null];
  const cells = [["head", "layer"], ["head", "state"], ["head", view.bits ? "bits" : ""], ["head", name]];
  [...view.states[i]].forEach((letter, k) => {
    cells.push(["", k + 1], [`state ${STATE[letter].name}`, STATE[letter].words], ["", view.bits ? (view.width(i, k + 1) < 16 ? view.width(i, k + 1) : "full") : ""], ["", signal?.values[i][k] ?? ""]);
  });
  return html`<div class="strip">${cells.map(([kind, words]) => html`<span class="${kind}">${words}</span>`)}</div>`;
}

function show(i, scroll = false) {
  for (const token of box.querySelectorAll(".here, .tied")) { token.classList.remove("here", "tied"); token.removeAttribute("aria-selected"); }
  here = Math.max(0, Math.min(spans.length - 1, i));
  const span = spans[here];
  span.classList.add("here");
  span.setAttribute("aria-selected", "true");
  box.setAttribute("aria-activedescendant", span.id);
  for (const token of [view.carried.get(here)?.carrier, ...(view.carriers.get(here) ?? []).map((one) => one.token)]) if (token !== undefined) spans[token].classList.add("tied");
  if (scroll) span.scrollIntoView({ block: "nearest" });
  const part = here >= view.scored ? "scored" : view.prompt ? "prompt" : "not scored";
  detail.innerHTML = html`<div aria-live="polite"><h2>${plain(here)}</h2><p class="note">token ${here}, ${part}</p><dl>${facts(here).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></div>${here < view.columns ? strip(here) : ""}`;
  drawSentence(here);
  markMap();
}

function nextLine(step) {
  // The token above or below: of the next line of the text, the one that stands closest.
  const from = spans[here].getBoundingClientRect(), middle = (from.left + from.right) / 2;
  let best = here, least = Infinity, top = null;
  for (let i = here + step; i >= 0 && i < spans.length; i += step) {
    const rect = spans[i].getBoundingClientRect();
    if (Math.abs(rect.top - from.top) < 4) continue;
    if (top !== null && Math.abs(rect.top - top) > 4) break;
    top ??= rect.top;
    const apart = Math.abs((rect.left + rect.right) / 2 - middle);
    if (apart < least) [best, least] = [i, apart];
  }
  return best;
}

const decided = (i) => i < view.columns && (view.left[i] > 0 || view.missing[i] > 0 || view.width(i, view.layers) < 16 || view.carriers.has(i));
function nextDecided(step) {
  for (let i = here + step; i >= 0 && i < spans.length; i += step) if (decided(i)) return i;
  return here;
}

function open(number) {
  view = read(views[number]);
  const total = view.texts?.length ?? view.columns;
  spans = Array.from({ length: total }, (_, i) => {
    const span = document.createElement("span");
    span.id = `token-${i}`;
    span.dataset.token = i;
    span.setAttribute("role", "option");
    span.textContent = view.texts ? view.texts[i].replace(/\n/g, "↵\n") : `${i} `;
    if (i >= view.columns) span.classList.add("beyond");
    if (view.prompt && i >= view.scored) span.classList.add("scored");
    if (view.prompt && i === view.scored) span.classList.add("break");
    return span;
  });
  box.replaceChildren(...spans);
  const missing = document.getElementById("no-texts");
  missing.hidden = view.texts !== null;
  missing.textContent = view.texts === null ? `Tokens are shown by number: ${view.no_texts}` : "";
  layerChoice.max = view.layers;
  layerChoice.value = Math.ceil(view.layers / 2);
  const before = channelChoice.value, known = channels();
  channelChoice.replaceChildren(...known.map(([name, title]) => new Option(title, name)));
  if (known.some(([name]) => name === before)) channelChoice.value = before;
  view.kinds = Object.keys(HUES).filter((kind) => view.words?.classes.includes(kind));
  document.getElementById("class-choice").hidden = !view.words;
  classChoice.replaceChildren(new Option("all", ""), ...view.kinds.map((kind) => new Option(kind, kind)));
  here = 0;
  shade();
  drawMap();
  show(decided(0) ? 0 : nextDecided(1));
  document.body.dataset.viewer = "ready";
}

const KEYS = {
  ArrowRight: () => here + 1, ArrowLeft: () => here - 1, ArrowDown: () => nextLine(1), ArrowUp: () => nextLine(-1),
  Home: () => 0, End: () => spans.length - 1, j: () => nextDecided(1), k: () => nextDecided(-1),
};
box.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  show(KEYS[event.key](), true);
});
for (const kind of ["mouseover", "click"]) box.addEventListener(kind, (event) => {
  const token = event.target.dataset.token;
  if (token !== undefined && Number(token) !== here) show(Number(token));
});
map.addEventListener("mousemove", (event) => {
  const rect = map.getBoundingClientRect(), i = Math.min(view.columns - 1, Math.floor(((event.clientX - rect.left) / rect.width) * view.columns));
  if (i !== here) show(i, true);
});
channelChoice.addEventListener("change", () => { shade(); show(here); });
classChoice.addEventListener("change", shade);
layerChoice.addEventListener("input", shade);
textChoice.addEventListener("change", () => open(Number(textChoice.value)));
addEventListener("themechange", () => { if (view) drawMap(); });
document.querySelector(".filter").addEventListener("submit", (event) => event.preventDefault());
addEventListener("DOMContentLoaded", () => open(0));
