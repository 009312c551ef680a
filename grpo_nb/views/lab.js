// Draws the Reward Lab. `data` comes once from the kernel: completions with their scores. Totals,
// advantages, sorting, filters and search are computed here; `state` is what the person has set.
// Only "score again", "keep as attack" and "ask again" go to the kernel.

const EPSILON = 1e-4; // added to standard deviations, as in TRL
const TIE = 1e-6; // totals that are this close differ only by rounding
const ROW = 42; // height of a row [px]

// -- arithmetic, as in grpo_nb/reward_lab/advantages.py

const sum = (values) => values.reduce((a, b) => a + b, 0);
const scored = (values) => values.filter((value) => value !== null);
const orZero = (value) => (Number.isFinite(value) ? value : 0);

function moments(values) {
  const all = scored(values);
  const mean = sum(all) / all.length;
  return [mean, Math.sqrt(sum(all.map((v) => (v - mean) ** 2)) / (all.length - 1))];
}

export function totalOf(scores, weights) {
  const each = scores.map((score, n) => (score === null ? 0 : score * weights[n]));
  return scored(scores).length ? sum(each) : null;
}

// groups: [groups][completions][rewards], null for None. Returns [groups][completions].
export function advantages(groups, weights, scaling = "group", aggregation = "") {
  const scaled = (values, [mean, std], divide = true) =>
    values.map((v) => orZero(v === null ? 0 : (v - mean) / (divide ? std + EPSILON : 1)));
  if (aggregation === "normalize_then_sum") {
    const totals = groups.map((group) => {
      const columns = weights.map((_, n) => group.map((scores) => scores[n]));
      const parts = columns.map((column) => scaled(column, moments(column)));
      return group.map((scores, place) =>
        totalOf(scores.map((s, n) => (s === null ? null : parts[n][place])), weights));
    });
    const batch = moments(totals.flat());
    return totals.map((group) => scaled(group, batch));
  }
  const totals = groups.map((group) => group.map((scores) => totalOf(scores, weights)));
  const batch = moments(totals.flat());
  return totals.map((group) => {
    const [mean, std] = moments(group);
    return scaled(group, [mean, scaling === "batch" ? batch[1] : std], scaling !== "none");
  });
}

// Returns what a table of completions comes to with these weights.
export function measure(data, rows, weights) {
  const places = data.groups.map(() => []);
  const written = data.groups.map(() => []);
  rows.forEach((row, n) => (row.kind === "sampled" ? places : written)[row.group].push(n));
  const total = rows.map((row) => totalOf(row.scores, weights));
  const scores = places.map((group) => group.map((n) => rows[n].scores));
  const each = advantages(scores, weights, data.scaling, data.aggregation);
  const batch = moments(places.flat().map((n) => total[n]))[1];
  const advantage = rows.map(() => null);
  const groups = places.map((group, g) => {
    group.forEach((n, place) => (advantage[n] = each[g][place]));
    const [mean, own] = moments(group.map((n) => total[n]));
    const std = { none: 1 - EPSILON, batch }[data.scaling] ?? own;
    if (std > TIE && data.aggregation !== "normalize_then_sum")
      for (const n of written[g]) // as if the group stayed as it is
        if (total[n] !== null) advantage[n] = orZero((total[n] - mean) / (std + EPSILON));
    const spread = (values) => (values.length ? Math.max(...values) - Math.min(...values) : 0);
    const used = group.length ? group : written[g];
    const honest = written[g].find((n) => rows[n].kind === "other");
    return {
      size: group.length, spread: spread(scored(used.map((n) => total[n]))),
      signal: group.length > 1 && spread(each[g]) > TIE, honest: total[honest] ?? 0,
    };
  });
  return { total, advantage, groups };
}

// -- drawing

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value ?? "");
  node.append(...children.flat());
  return node;
}

const toggled = (list, item) => (list.includes(item) ? list.filter((each) => each !== item)
  : [...list, item]);
const short = (name) => name.replace(/_reward$/, "").replaceAll("_", " ");
const number = (value) => String(Number(value.toPrecision(3)));
const missing = (row) => (row.failed ? "raises" : "None");

function heat(value, [low, high]) {
  if (value === null) return "";
  const part = high > low ? (value - low) / (high - low) : 0;
  const [r, g, b] = [[128, 30], [128, 110], [128, 235]].map(([a, z]) => a + (z - a) * part);
  return `background: rgba(${r}, ${g}, ${b}, ${0.1 + 0.4 * part})`;
}

function against(value) {
  if (value === null || Math.abs(value) <= TIE) return [value === null ? "–" : "0"];
  const [sign, side] = value > 0 ? ["▲", "above"] : ["▼", "below"];
  return [h("span", { class: side, "aria-hidden": "true" }, sign), ` ${value.toFixed(2)}`];
}

function images(group) {
  const node = h("span", { class: "images" });
  node.innerHTML = group.images; // <img> of data that this package encoded
  return node;
}

const CHIPS = [
  ["wrong but paid", "it is wrong, and earns more than an honest wrong answer or its group"],
  ["rewards disagree", "one reward pays it well, another badly"],
  ["no signal", "its group earns the same throughout: nothing is learnt from it"],
  ["edited", "written here"],
  ["None", "a reward gave no score"],
  ["lost attacks", "show the attacks that lose, too"],
];

class Lab {
  constructor(model, el) {
    const data = model.get("data");
    Object.assign(this, { model, data, note: "", id: Math.random().toString(36).slice(2) });
    this.state = {
      weights: data.weights, sort: ["total", true], chips: [], search: "", group: null,
      open: null, tab: "completions", ...model.get("state"),
    };
    this.build();
    el.classList.add("grpo-lab");
    el.append(this.root);
    const redraw = () => this.draw();
    const last = () => data.completions.length + model.get("added").length - 1;
    this.handlers = { "change:report": redraw, "change:own": redraw,
      "change:added": () => this.update({ open: last() }),
      "msg:custom": (reply) => this.say(reply.note, reply.failed) };
    for (const [name, call] of Object.entries(this.handlers)) model.on(name, call);
    // JupyterLab listens first: plain keys are the Lab's, and Ctrl-S its own.
    this.allow = (event) => this.root.toggleAttribute(
      "data-lm-suppress-shortcuts", !event.ctrlKey && !event.metaKey);
    window.addEventListener("keydown", this.allow, true);
    this.watch = new ResizeObserver(() => this.drawRows());
    this.watch.observe(this.body);
    this.update();
  }

  close() {
    clearTimeout(this.timer);
    this.watch.disconnect();
    window.removeEventListener("keydown", this.allow, true);
    for (const [name, call] of Object.entries(this.handlers)) this.model.off(name, call);
  }

  say(note, failed = false) {
    clearTimeout(this.timer);
    this.note = note;
    this.root.classList.toggle("failed", failed);
    this.draw(["Bar"]);
  }

  ask(content) {
    this.model.send(content);
    this.say("the kernel is asked…");
    const busy = "no answer yet: the kernel is busy with a cell, or it is not running";
    this.timer = setTimeout(() => this.say(busy), 5000);
  }

  // -- what is computed

  update(change = {}) {
    const { data } = this;
    const state = (this.state = { ...this.state, ...change });
    if (Object.keys(change).length) {
      this.model.set("state", state);
      this.model.save_changes();
    }
    const rows = (this.rows = [...data.completions, ...this.model.get("added")]);
    const now = (this.now = measure(data, rows, state.weights));
    this.before = measure(data, rows, data.weights);
    this.ranges = data.rewards.map((_, n) => {
      const scores = scored(rows.map((row) => row.scores[n]));
      return scores.length ? [Math.min(...scores), Math.max(...scores)] : [0, 0];
    });
    const words = state.search.toLowerCase();
    const found = [...rows.keys()].filter((n) =>
      (state.group === null || rows[n].group === state.group)
      && `${rows[n].name} ${rows[n].text}`.toLowerCase().includes(words));
    const loses = (n) => rows[n].kind === "attack" && !rows[n].won;
    const all = found.filter((n) => state.chips.includes("lost attacks") || !loses(n));
    this.counts = CHIPS.map(([chip]) => (chip === "lost attacks" ? found.filter(loses)
      : all.filter((n) => this.matches(n, chip))).length);
    const key = {
      total: (n) => now.total[n], advantage: (n) => now.advantage[n],
      completion: (n) => -rows[n].group,
    }[state.sort[0]] ?? ((n) => rows[n].scores[state.sort[0]]);
    const sign = state.sort[1] ? 1 : -1;
    const value = (n) => sign * (key(n) ?? -sign * Infinity); // None stands last
    this.shown = all.filter((n) => state.chips.every((chip) => this.matches(n, chip)));
    this.shown.sort((a, b) => (value(b) - value(a) > TIE) - (value(a) - value(b) > TIE) || a - b);
    this.draw();
  }

  matches(n, chip) {
    const { rows, now, state } = this;
    const row = rows[n];
    const group = now.groups[row.group];
    if (chip === "wrong but paid")
      return row.wrong && (now.total[n] > group.honest + TIE
        || (row.kind === "sampled" && now.advantage[n] > TIE));
    if (chip === "no signal") return row.kind === "sampled" && !group.signal;
    if (chip === "edited") return row.kind === "edited";
    if (chip === "None") return row.scores.includes(null);
    if (chip === "lost attacks") return true;
    const parts = row.scores.map((score, r) => {
      const part = (score - this.ranges[r][0]) / (this.ranges[r][1] - this.ranges[r][0]);
      const weight = state.weights[r];
      return score === null || !weight || Number.isNaN(part) ? null : weight > 0 ? part : 1 - part;
    });
    return Math.max(...scored(parts)) - Math.min(...scored(parts)) > 0.5;
  }

  // -- the parts that stay

  build() {
    const { data, state } = this;
    const part = (name, ...more) => (this[name] = h("div", { class: name }, ...more));
    this.search = h("input", {
      type: "search", placeholder: "search  /", "aria-label": "search", value: state.search,
      oninput: () => this.update({ search: this.search.value }),
    });
    this.heads = {};
    const head = (by, label, title, ...more) => {
      const onclick = () => this.update(
        { sort: [by, this.state.sort[0] !== by || !this.state.sort[1]] });
      const button = h("button", { onclick, title }, label);
      return (this.heads[by] = h("div", { role: "columnheader" }, button, ...more));
    };
    this.weights = data.rewards.map(({ name }, n) => h("input", {
      type: "number", step: "any", value: state.weights[n], "aria-label": `weight of ${name}`,
      oninput: () => this.weigh(),
    }));
    const heads = h("div", { class: "row head", role: "row" },
      head("total", "total", "weighted sum of the scores"),
      head("advantage", "advantage", "against the sampled group, as the trainer computes it"),
      ...data.rewards.map(({ name, role }, n) => head(n, short(name),
        `${name}${role && `, pays for ${role}`}`, h("label", {}, "×", this.weights[n]))),
      head("completion", "completion", "in the order of the prompts"));
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.body = h("div", {
      class: "body", role: "grid", tabindex: "0", "aria-label": "completions",
      style: `--rewards: ${data.rewards.length}`, onscroll: () => this.drawRows(),
      onclick: (event) => this.open(event.target.closest("[data-n]")?.dataset.n),
    }, heads, this.space);
    const table = h("section", { class: "table" }, part("strip"), part("about"),
      h("div", { class: "tools" }, part("chips"), this.search), this.body);
    this.root = h("div", {
      class: "lab tex2jax_ignore mathjax_ignore", "data-jp-suppress-context-menu": "true",
      onkeydown: (event) => this.key(event),
    }, part("bar"), part("tabs"), h("div", { class: "parts" }, table, part("side")));
  }

  weigh() {
    const values = this.weights.map((field) => field.valueAsNumber);
    if (values.every(Number.isFinite)) this.update({ weights: values });
  }

  get current() {
    return this.state.open ?? this.cursor;
  }

  open(n) {
    if (n !== undefined) this.update({ open: Number(n), tab: "completion" });
  }

  shut() {
    this.cursor = this.state.open;
    this.update({ open: null, tab: "completions" });
    this.body.focus();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey) return;
    event.stopPropagation(); // a notebook has shortcuts of its own
    const isTyping = /^(input|textarea)$/i.test(event.target.tagName);
    if (event.key === "/" && !isTyping) this.search.focus();
    else if (event.key === "Escape") this.shut();
    else if (event.target !== this.body) return;
    else if (event.key === "Enter") this.open(this.cursor ?? this.shown[0]);
    else if (event.key === "ArrowDown") this.step(1);
    else if (event.key === "ArrowUp") this.step(-1);
    else return;
    event.preventDefault();
  }

  step(by) {
    const { shown, body } = this;
    const place = Math.max(0, Math.min(shown.length - 1, shown.indexOf(this.current) + by));
    this.cursor = shown[place];
    const height = body.clientHeight - body.firstChild.offsetHeight;
    body.scrollTop = Math.min(Math.max(body.scrollTop, (place + 1) * ROW - height), place * ROW);
    if (this.state.open === null) this.drawRows();
    else this.open(this.cursor);
  }

  // -- the parts that are drawn again

  draw(parts = ["Bar", "Strip", "Tools", "Rows", "Side"]) {
    const active = document.activeElement;
    const parent = this.root.contains(active) ? active.parentNode : null;
    const place = parent && [...parent.children].indexOf(active);
    for (const part of parts) this[`draw${part}`]();
    if (!parent || this.root.contains(active)) return;
    const next = parent.children[place]; // what stands where the focus was
    (this.root.contains(next) && next.matches("button") ? next : this.body).focus();
  }

  drawBar() {
    const { state, data } = this;
    const report = this.model.get("report");
    const differs = (weights) => String(state.weights) !== String(weights);
    const names = this.model.get("own").map((each) => each.name);
    const change = differs(report.weights) ? "a weight was moved"
      : String(names) === String(report.attacks) ? "" : "an attack was kept or forgotten";
    const word = change ? "out of date" : report.state;
    const line = report.line.replace("{}", state.weights.map(number).join(", "));
    const copy = { title: "copy it: write it where the rewards are",
      onclick: () => navigator.clipboard?.writeText(line) };
    const reset = () => {
      this.weights.forEach((field, n) => (field.value = data.weights[n]));
      this.weigh();
    };
    const again = () => this.ask({ do: "judge", weights: state.weights });
    this.bar.replaceChildren(
      h("b", { class: `pill ${word.replaceAll(" ", "-")}`, role: "status" }, word),
      h("span", { class: "sentence", title: report.sentence }, change || report.sentence),
      change ? h("button", { class: "main", onclick: again }, "Ask again") : "",
      ...(differs(data.weights) ? [h("button", { onclick: reset }, "Reset"),
        h("button", copy, `copy: ${line}`)] : []),
      h("span", { class: "note", "aria-live": "polite" }, this.note));
  }

  drawStrip() {
    const { now, before, state, data } = this;
    const most = Math.max(TIE, ...now.groups.map((group) => group.spread));
    const lost = now.groups.map((group, g) => before.groups[g].signal && !group.signal);
    this.strip.replaceChildren(...now.groups.map((group, g) => h("button", {
      title: `${g + 1}. ${data.groups[g].question}\nspread ${number(group.spread)}`,
      class: `block${lost[g] ? " lost" : ""}`, style: heat(group.spread, [0, most]),
      "aria-pressed": String(state.group === g), "aria-label": `group ${g + 1}`,
      onclick: () => this.update({ group: state.group === g ? null : g }),
    })));
    const sampled = now.groups.filter((group) => group.size > 1).length;
    const numbers = lost.flatMap((is, g) => (is ? [g + 1] : [])).join(", ");
    const text = !sampled ? "no sampled groups: pass `completions` to see advantages"
      : `${now.groups.filter((group) => group.signal).length} of ${sampled} groups with signal`
        + (numbers && `; lost by these weights: ${numbers}`);
    const chosen = data.groups[state.group];
    this.about.replaceChildren(h("span", {}, text), chosen ? h("span", { class: "prompt" },
      images(chosen), `${state.group + 1}. ${chosen.question} → ${chosen.reference}`) : "");
  }

  drawTools() {
    const { state } = this;
    this.chips.replaceChildren(...CHIPS.map(([chip, title], n) => h("button", {
      title, "aria-pressed": String(state.chips.includes(chip)),
      onclick: () => this.update({ chips: toggled(state.chips, chip) }),
    }, `${chip} ${this.counts[n]}`)));
    const tabs = [["completions", {}], ["attacks and findings", { open: null }],
      ...(state.open === null ? [] : [["completion", {}]])];
    this.tabs.replaceChildren(...tabs.map(([tab, change]) => h("button", {
      "aria-pressed": String(state.tab === tab), onclick: () => this.update({ ...change, tab }),
    }, tab)));
    this.root.dataset.tab = state.tab;
    const order = state.sort[1] ? "descending" : "ascending";
    for (const [by, head] of Object.entries(this.heads))
      head.setAttribute("aria-sort", String(state.sort[0]) === by ? order : "none");
  }

  drawRows() {
    const { shown, body, space } = this;
    space.style.height = `${shown.length * ROW}px`;
    space.dataset.empty = shown.length ? "" : "nothing is left: remove a filter";
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 4);
    const part = shown.slice(first, first + Math.ceil(body.clientHeight / ROW) + 8);
    space.replaceChildren(...part.map((n, place) => this.row(n, first + place)));
    body.setAttribute("aria-rowcount", shown.length);
    body.setAttribute("aria-activedescendant", `${this.id}-${this.current}`);
  }

  row(n, place) {
    const row = this.rows[n];
    const cell = (name, options, ...children) =>
      h("div", { role: "gridcell", class: name, ...options }, ...children);
    return h("div", {
      class: `row ${row.won}`, role: "row", id: `${this.id}-${n}`, "data-n": n,
      title: this.data.groups[row.group].question, "aria-rowindex": place + 1,
      style: `top: ${place * ROW}px`, "aria-selected": String(n === this.current),
    }, cell("number total", {}, this.now.total[n] === null ? "–" : number(this.now.total[n])),
    cell("number", {}, against(this.now.advantage[n])),
    ...row.scores.map((score, r) => cell("number", { title: row.why[r],
      style: heat(score, this.ranges[r]) }, score === null ? missing(row) : number(score))),
    cell("text", {}, images(this.data.groups[row.group]),
      h("small", {}, `${row.group + 1} · ${row.won ? "attack, wins: " : ""}${row.name}`),
      ` ${row.text.slice(0, 400)}`));
  }

  drawSide() {
    const { open, weights } = this.state;
    const key = JSON.stringify([open, weights, this.model.get("own"), this.model.get("report")]);
    if (key === this.drawn) return; // a text that is being edited stays
    this.drawn = key;
    const { cards, lost } = this.model.get("report");
    this.side.replaceChildren(...(this.rows[open] ? this.drawer(open) : [
      ...cards.map((card) => this.card(card)), cards.length ? "" : "no finding",
      h("details", {}, h("summary", {}, `${lost.length} lost`),
        h("ul", {}, lost.map(([name, total]) => h("li", {}, `${number(total)} · ${name}`)))),
    ]));
    this.side.scrollTop = 0;
  }

  card(card) {
    const place = this.rows.findIndex((row) => row.kind === "attack" && row.name === card.attack);
    const lines = [h("p", {}, card.evidence)];
    if (card.attack) lines.unshift(h("pre", { title: "marked: what the right answer lacks" },
      card.difference.map(([isNew, text]) => (isNew ? h("ins", {}, text) : text))));
    if (card.code) lines.push(h("pre", {}, `line ${card.line}: ${card.code}`),
      h("p", {}, "on the completion ", h("q", {}, card.completion)));
    return h("article", { class: card.state },
      h("h4", {}, `${card.state}: ${card.name}`), ...lines,
      card.fix ? h("p", { class: "fix" }, `→ ${card.fix}`) : "",
      place < 0 ? "" : h("button", { onclick: () => this.open(place) }, "Open"));
  }

  drawer(n) {
    const row = this.rows[n];
    const group = this.data.groups[row.group];
    const isKept = this.model.get("own").some((each) => each.name === row.name
      || (each.group === row.group && each.text === row.text));
    const box = h("textarea", { "aria-label": "completion", rows: 8, spellcheck: "false" });
    box.value = row.text;
    const button = (label, what, name) => h("button", { class: name, onclick: () => this.ask(
      { do: what, group: row.group, name: row.name, text: box.value }) }, label);
    const at = row.answer ? row.text.lastIndexOf(row.answer) : row.text.length;
    return [
      h("h4", {}, `${row.group + 1} · ${row.name}`, h("button", {
        class: "close", "aria-label": "close", onclick: () => this.shut() }, "✕")),
      h("p", {}, images(group), group.question, group.reference && ` → ${group.reference}`),
      h("p", {}, h("b", {}, `earns ${number(this.now.total[n] ?? 0)} `),
        against(this.now.advantage[n])),
      h("pre", {}, row.text.slice(0, at), row.answer ? h("mark", {}, row.answer) : "",
        row.text.slice(at + row.answer.length)),
      ...this.data.rewards.map((reward, r) => this.payment(row, reward, r)),
      h("details", { class: "edit" }, h("summary", {}, "edit"), box,
        button("Score again", "score", "main")),
      button(isKept ? "Forget this attack" : "Keep as attack", "keep"),
    ];
  }

  payment(row, reward, r) {
    const score = row.scores[r];
    const weight = this.state.weights[r];
    const amount = score === null ? missing(row)
      : `${number(score)} × ${number(weight)} = ${number(score * weight)}`;
    return h("details", { class: "payment" },
      h("summary", { style: heat(score, this.ranges[r]) }, h("b", {}, short(reward.name)),
        ` ${reward.role && `(${reward.role}) `}${amount}`,
        h("small", {}, row.why[r] || reward.doc)), h("pre", {}, reward.source));
  }
}

export default {
  render({ model, el }) {
    const lab = new Lab(model, el);
    return () => lab.close();
  },
};
