// Draws the Reward Lab. `data` comes once from the kernel: completions with their scores. Totals,
// advantages, sorting, filters and search are computed here; `state` is what the person has set.
// Only "score again", "keep as attack" and "ask again" go to the kernel.

const EPSILON = 1e-4; // added to standard deviations, as in TRL
const TIE = 1e-6; // totals that are this close differ only by rounding
const ROW = 42; // height of a row [px]
const MOST = 8; // attacks' names in a card

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
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const short = (name) => name.replace(/_reward$/, "").replaceAll("_", " ");
const number = (value) => String(Number(value.toPrecision(3)));
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

function heat(value, [low, high]) {
  const part = high > low ? (value - low) / (high - low) : 0;
  const [r, g, b] = [[128, 30], [128, 110], [128, 235]].map(([a, z]) => a + (z - a) * part);
  return `background: rgba(${r}, ${g}, ${b}, ${0.1 + 0.4 * part})`;
}

function against(value) {
  if (value === null) return ["–"];
  if (Math.abs(value) <= TIE) return ["0"];
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
    this.model = model;
    this.data = model.get("data");
    this.state = {
      weights: this.data.weights, sort: ["total", true], chips: [], search: "", group: null,
      open: null, tab: "completions", ...model.get("state"),
    };
    this.cursor = this.state.open;
    this.note = "";
    el.classList.add("grpo-lab");
    this.build();
    el.append(this.root);
    this.listen();
    this.refresh();
  }

  listen() {
    this.handlers = {
      "change:added": () => this.refresh(this.state.open === null ? {} : { open: this.last() }),
      "change:report change:kept": () => this.draw(),
      "msg:custom": (reply) => {
        clearTimeout(this.timer);
        this.note = reply.note;
        this.root.classList.toggle("failed", Boolean(reply.failed));
        this.draw();
      },
    };
    for (const [names, call] of Object.entries(this.handlers))
      names.split(" ").forEach((name) => this.model.on(name, call));
    this.watch = new ResizeObserver(() => this.drawRows());
    this.watch.observe(this.body);
    return this;
  }

  close() {
    clearTimeout(this.timer);
    this.watch.disconnect();
    for (const [names, call] of Object.entries(this.handlers))
      names.split(" ").forEach((name) => this.model.off(name, call));
  }

  last() {
    return this.data.completions.length + this.model.get("added").length - 1;
  }

  ask(content, note) {
    this.note = note;
    this.root.classList.remove("failed");
    this.model.send(content);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.note = "no answer yet: the kernel is busy with a cell, or it is not running";
      this.drawBar();
    }, 5000);
    this.draw();
  }

  set(change) {
    this.state = { ...this.state, ...change };
    this.model.set("state", this.state);
    this.model.save_changes();
  }

  refresh(change = {}) {
    if (Object.keys(change).length) this.set(change);
    const { data, state } = this;
    this.rows = [...data.completions, ...this.model.get("added")];
    this.now = measure(data, this.rows, state.weights);
    this.before = measure(data, this.rows, data.weights);
    this.ranges = data.rewards.map((_, n) => {
      const scores = scored(this.rows.map((row) => row.scores[n]));
      return scores.length ? [Math.min(...scores), Math.max(...scores)] : [0, 0];
    });
    this.choose();
  }

  matches(n, chip) {
    const row = this.rows[n];
    const group = this.now.groups[row.group];
    if (chip === "wrong but paid") {
      const more = this.now.total[n] > group.honest + TIE;
      return row.wrong && (more || (row.kind === "sampled" && this.now.advantage[n] > TIE));
    }
    if (chip === "rewards disagree") {
      const parts = row.scores.map((score, r) => {
        const [low, high] = this.ranges[r];
        const part = (score - low) / (high - low);
        return score === null || high === low || !this.state.weights[r] ? null
          : this.state.weights[r] > 0 ? part : 1 - part;
      });
      return Math.max(...scored(parts)) - Math.min(...scored(parts)) > 0.5;
    }
    if (chip === "no signal") return row.kind === "sampled" && !group.signal;
    if (chip === "edited") return row.kind === "edited";
    if (chip === "lost attacks") return true;
    return row.scores.includes(null);
  }

  choose() {
    const { rows, state, now } = this;
    const words = state.search.toLowerCase();
    const counts = (n, chips) =>
      (rows[n].kind !== "attack" || rows[n].won || chips.includes("lost attacks"))
      && (state.group === null || rows[n].group === state.group)
      && `${rows[n].name} ${rows[n].text}`.toLowerCase().includes(words);
    const inView = [...rows.keys()].filter((n) => counts(n, state.chips));
    this.counts = CHIPS.map(([chip]) => chip === "lost attacks"
      ? [...rows.keys()].filter((n) => !rows[n].won && counts(n, [chip])
        && rows[n].kind === "attack").length
      : inView.filter((n) => this.matches(n, chip)).length);
    const [by, down] = state.sort;
    const key = { total: (n) => now.total[n], advantage: (n) => now.advantage[n],
      completion: (n) => -rows[n].group }[by] ?? ((n) => rows[n].scores[by]);
    const value = (n) => key(n) ?? -Infinity;
    this.shown = inView.filter((n) => state.chips.every((chip) => this.matches(n, chip)));
    this.shown.sort((a, b) => {
      const difference = value(b) - value(a);
      return (Math.abs(difference) > TIE ? (down ? difference : -difference) : 0) || a - b;
    });
    this.draw();
  }

  // -- the parts that stay

  build() {
    const { data, state } = this;
    this.bar = h("header", { class: "bar" });
    this.strip = h("div", { class: "strip", role: "group", "aria-label": "groups" });
    this.about = h("div", { class: "about" });
    this.chips = h("span", { class: "chips", role: "group", "aria-label": "filters" });
    this.search = h("input", {
      type: "search", placeholder: "search  /", "aria-label": "search", value: state.search,
      oninput: () => this.filter({ search: this.search.value }),
    });
    this.heads = {};
    const head = (by, label, title, ...more) => {
      const sort = () => this.filter(
        { sort: [by, this.state.sort[0] === by ? !this.state.sort[1] : true] }, false);
      const button = h("button", { onclick: sort, title }, label);
      return (this.heads[by] = h("div", { role: "columnheader" }, button, ...more));
    };
    this.weights = data.rewards.map((reward, n) => h("input", {
      type: "number", step: "any", value: state.weights[n], "aria-label": `weight of ${reward.name}`,
      oninput: () => this.weigh(),
    }));
    const rewards = data.rewards.map((reward, n) => head(
      n, short(reward.name), `${reward.name}${reward.role && `, pays for ${reward.role}`}`,
      h("label", {}, "×", this.weights[n])));
    const head_row = h("div", { class: "row head", role: "row" },
      head("total", "total", "weighted sum of the scores"),
      head("advantage", "advantage", "against the sampled group, as the trainer computes it"),
      ...rewards, head("completion", "completion", "in the order of the prompts"));
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.body = h("div", {
      class: "body", role: "grid", tabindex: "0", "aria-label": "completions",
      onscroll: () => this.drawRows(), onclick: (event) => this.pick(event),
    }, head_row, this.space);
    this.body.style.setProperty("--rewards", data.rewards.length);
    this.side = h("aside", { class: "side", "aria-label": "attacks and the completion" });
    this.tabs = h("nav", { class: "tabs", role: "tablist" });
    const tools = h("div", { class: "tools" }, this.chips, this.search);
    this.table = h("section", { class: "table" }, this.strip, this.about, tools, this.body);
    this.root = h("div", {
      class: "lab tex2jax_ignore mathjax_ignore", "data-lm-suppress-shortcuts": "true",
      "data-jp-suppress-context-menu": "true", onkeydown: (event) => this.key(event),
    }, this.bar, this.tabs, h("div", { class: "parts" }, this.table, this.side));
  }

  filter(change, upwards = true) {
    this.set(change);
    if (upwards) this.body.scrollTop = 0;
    this.choose();
  }

  weigh() {
    const values = this.weights.map((field) => field.valueAsNumber);
    if (values.every(Number.isFinite)) this.refresh({ weights: values });
  }

  pick(event) {
    const row = event.target.closest("[data-n]");
    if (row) this.open(Number(row.dataset.n));
  }

  open(n) {
    this.cursor = n;
    this.set({ open: n, tab: n === null ? "completions" : "completion" });
    this.draw();
  }

  key(event) {
    event.stopPropagation(); // a notebook has shortcuts of its own
    const isTyping = /^(input|textarea)$/i.test(event.target.tagName);
    if (event.key === "/" && !isTyping) this.search.focus();
    else if (event.key === "Escape") {
      if (this.state.open !== null) this.open(null);
      this.body.focus();
    } else if (event.target === this.body && /^(Arrow(Up|Down)|Enter)$/.test(event.key)) {
      if (event.key === "Enter") this.open(this.cursor ?? this.shown[0] ?? null);
      else this.step(event.key === "ArrowDown" ? 1 : -1);
    } else return;
    event.preventDefault();
  }

  step(by) {
    const place = this.shown.indexOf(this.cursor) + by;
    this.cursor = this.shown[Math.max(0, Math.min(this.shown.length - 1, place))] ?? null;
    const top = this.shown.indexOf(this.cursor) * ROW;
    const height = this.body.clientHeight - this.body.firstChild.offsetHeight;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    if (top + ROW > this.body.scrollTop + height) this.body.scrollTop = top + ROW - height;
    if (this.state.open !== null) this.open(this.cursor);
    this.drawRows();
  }

  // -- the parts that are drawn again

  draw() {
    const active = document.activeElement;
    const parent = this.root.contains(active) ? active.parentNode : null;
    const place = parent && [...parent.children].indexOf(active);
    for (const part of ["Bar", "Strip", "Tools", "Rows", "Side"]) this[`draw${part}`]();
    if (!parent || this.root.contains(active)) return;
    const next = parent.children[place]; // what stands where the focus was
    (this.root.contains(next) && next.matches("button") ? next : this.body).focus();
  }

  moved() {
    return this.state.weights.some((w, n) => w !== this.model.get("report").weights[n]);
  }

  drawBar() {
    const report = this.model.get("report");
    const names = this.model.get("kept").map((each) => each.name);
    const changes = [
      this.moved() && "a weight was moved",
      String(names) !== String(report.attacks) && "an attack was kept or forgotten",
    ].filter(Boolean);
    const state = changes.length ? "out of date" : report.state;
    const pill = h("b", { class: `pill ${state.replaceAll(" ", "-")}`, role: "status" }, state);
    const again = h("button", { class: "main", onclick: () => this.ask(
      { do: "judge", weights: this.state.weights }, "the verdict is asked…") }, "Ask again");
    const line = report.line.replace("{}", this.state.weights.map(number).join(", "));
    const differ = this.state.weights.some((w, n) => w !== this.data.weights[n]);
    const copy = h("button", { title: line, onclick: () => {
      navigator.clipboard?.writeText(line);
      this.note = `copied, to write where the rewards are: ${line}`;
      this.drawBar();
    } }, "Copy weights");
    const back = h("button", { onclick: () => {
      this.weights.forEach((field, n) => (field.value = this.data.weights[n]));
      this.weigh();
    } }, "Reset");
    this.bar.replaceChildren(
      pill, h("span", { class: "sentence" }, changes.length ? changes.join("; ") : report.sentence),
      ...(changes.length ? [again] : []), ...(differ ? [copy, back] : []),
      h("span", { class: "note", "aria-live": "polite" }, this.note));
  }

  drawStrip() {
    const { now, before, state, data } = this;
    const most = Math.max(TIE, ...now.groups.map((group) => group.spread));
    this.strip.replaceChildren(...now.groups.map((group, g) => {
      const lost = before.groups[g].signal && !group.signal;
      const title = `${g + 1}. ${data.groups[g].question}\nspread ${number(group.spread)}`
        + (lost ? "; no signal with these weights" : "");
      return h("button", {
        title, class: `block${lost ? " lost" : ""}`, style: heat(group.spread, [0, most]),
        "aria-pressed": String(state.group === g), "aria-label": `group ${g + 1}`,
        onclick: () => this.filter({ group: state.group === g ? null : g }),
      });
    }));
    const sampled = now.groups.filter((group) => group.size > 1).length;
    const with_signal = now.groups.filter((group) => group.signal).length;
    const lost = now.groups.flatMap((group, g) =>
      before.groups[g].signal && !group.signal ? [g + 1] : []);
    const text = !sampled ? "no sampled groups: pass `completions` to see advantages"
      : `${with_signal} of ${plural(sampled, "group")} with signal`
        + (lost.length ? `; lost by these weights: ${lost.join(", ")}` : "");
    const chosen = state.group === null ? null : data.groups[state.group];
    this.about.replaceChildren(
      h("span", { class: lost.length ? "warned" : "" }, text),
      chosen ? h("span", { class: "prompt" }, images(chosen), `${state.group + 1}. `
        + `${chosen.question}${chosen.reference && ` → ${chosen.reference}`}`) : "");
  }

  drawTools() {
    const { state } = this;
    this.chips.replaceChildren(...CHIPS.map(([chip, title], n) => h("button", {
      class: "chip", title, "aria-pressed": String(state.chips.includes(chip)),
      onclick: () => this.filter({ chips: state.chips.includes(chip)
        ? state.chips.filter((each) => each !== chip) : [...state.chips, chip] }),
    }, `${chip} ${this.counts[n]}`)));
    const tabs = { completions: plural(this.shown.length, "completion"),
      attacks: "attacks and findings", ...(state.open === null ? {} : { completion: "the chosen" }) };
    this.tabs.replaceChildren(...Object.entries(tabs).map(([tab, label]) => h("button", {
      role: "tab", "aria-selected": String(state.tab === tab),
      onclick: () => (tab === "attacks" ? this.set({ open: null, tab }) : this.set({ tab }),
      this.draw()),
    }, label)));
    this.root.dataset.tab = state.tab;
    for (const [by, head] of Object.entries(this.heads)) {
      const isSorted = String(state.sort[0]) === by;
      head.setAttribute("aria-sort", isSorted ? (state.sort[1] ? "descending" : "ascending") : "none");
    }
  }

  drawRows() {
    const { shown, body } = this;
    this.space.style.height = `${shown.length * ROW}px`;
    this.space.dataset.empty = shown.length ? "" : "nothing is left: remove a filter";
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 4);
    const count = Math.ceil(body.clientHeight / ROW) + 8;
    this.space.replaceChildren(...shown.slice(first, first + count).map(
      (n, place) => this.row(n, first + place)));
    body.setAttribute("aria-rowcount", shown.length);
    body.setAttribute("aria-activedescendant", this.cursor === null ? "" : `lab-${this.cursor}`);
  }

  row(n, place) {
    const row = this.rows[n];
    const scores = row.scores.map((score, r) => h("div", {
      role: "gridcell", class: "number", title: row.why[r],
      style: score === null ? "" : heat(score, this.ranges[r]),
    }, score === null ? (row.failed ? "raises" : "None") : number(score)));
    const total = this.now.total[n];
    const kind = row.won ? `${row.kind}, wins: ${row.name}` : row.name || row.kind;
    const group = this.data.groups[row.group];
    return h("div", {
      class: `row ${row.won}`, role: "row", id: `lab-${n}`, "data-n": n, title: group.question,
      "aria-rowindex": place + 1, "aria-selected": String(n === this.cursor),
      style: `top: ${place * ROW}px`,
    }, h("div", { role: "gridcell", class: "number total" }, total === null ? "–" : number(total)),
    h("div", { role: "gridcell", class: "number" }, against(this.now.advantage[n])), ...scores,
    h("div", { role: "gridcell", class: "text" }, images(group),
      h("small", {}, `${row.group + 1} · ${kind}`), ` ${row.text.slice(0, 400)}`));
  }

  drawSide() {
    const { open } = this.state;
    const key = JSON.stringify([open, this.state.weights, this.model.get("kept"),
      this.model.get("report"), this.rows.length]);
    if (key === this.drawn) return; // a text that is being edited stays
    this.drawn = key;
    this.side.replaceChildren(...(open === null || !this.rows[open] ? this.cards()
      : this.drawer(open)));
    this.side.scrollTop = 0;
  }

  cards() {
    const { cards, lost } = this.model.get("report");
    return [
      ...cards.map((card) => this.card(card)),
      cards.length ? "" : h("p", {}, "No finding."),
      lost.length ? h("details", { class: "lost" }, h("summary", {}, `${lost.length} lost`),
        h("ul", {}, lost.map(([name, total]) => h("li", {}, `${number(total)} · ${name}`)))) : "",
    ];
  }

  card(card) {
    const marked = (card.difference ?? []).map(([isNew, text]) => (isNew ? h("ins", {}, text) : text));
    const place = this.rows.findIndex((row) => row.kind === "attack" && row.name === card.attack);
    const names = card.others?.slice(0, MOST).join(", ");
    return h("article", { class: card.state },
      h("h4", {}, h("b", {}, card.state), ` ${card.name}`),
      card.attack ? [
        h("pre", { title: "marked: what differs from the right answer" }, marked),
        h("p", {}, `${card.because}: ${number(card.total)}; right ${number(card.right)}, `
          + `wrong ${number(card.wrong)}; paid by ${card.payer}`),
        names ? h("p", {}, `so do: ${names}`) : "",
      ] : h("p", {}, card.evidence),
      card.code ? h("pre", { class: "code" }, `line ${card.line}: ${card.code}`) : "",
      card.code ? h("p", {}, "on the completion ", h("q", {}, card.completion)) : "",
      card.fix ? h("p", { class: "fix" }, `→ ${card.fix}`) : "",
      place < 0 ? "" : h("button", { onclick: () => this.open(place) }, "Open"));
  }

  drawer(n) {
    const row = this.rows[n];
    const group = this.data.groups[row.group];
    const isKept = this.model.get("kept").some((each) => (each.name === row.name && each.name)
      || (each.group === row.group && each.text === row.text));
    const box = h("textarea", { "aria-label": "completion", rows: 8, spellcheck: "false" });
    box.value = row.text;
    const send = (what, note) => this.ask(
      { do: what, group: row.group, name: row.name, text: box.value }, note);
    const again = h("button", { class: "main", onclick: () => send("score", "it is scored…") },
      "Score again");
    const keep = h("button", { onclick: () => send("keep", isKept ? "it is forgotten…"
      : "it is kept…") }, isKept ? "Forget this attack" : "Keep as attack");
    const end = row.answer ? row.text.lastIndexOf(row.answer) : -1;
    const text = end < 0 ? [row.text] : [row.text.slice(0, end), h("mark", {}, row.answer),
      row.text.slice(end + row.answer.length)];
    const total = this.now.total[n];
    return [
      h("h4", {}, `${row.group + 1} · ${row.name || row.kind}`,
        h("button", { class: "close", "aria-label": "close", onclick: () => this.open(null) }, "✕")),
      h("p", { class: "prompt" }, images(group), group.question,
        group.reference ? ` → ${group.reference}` : ""),
      h("p", {}, h("b", {}, `earns ${total === null ? "nothing" : number(total)} `),
        against(this.now.advantage[n])),
      h("pre", { class: "whole" }, text),
      ...this.data.rewards.map((reward, r) => this.paid(row, reward, r)),
      h("details", { class: "edit" }, h("summary", {}, "edit"), box, again),
      h("p", {}, keep),
    ];
  }

  paid(row, reward, r) {
    const score = row.scores[r];
    const weight = this.state.weights[r];
    const adds = score === null ? (row.failed ? "raises" : "None")
      : `${number(score)} × ${number(weight)} = ${number(score * weight)}`;
    return h("details", { class: "paid" },
      h("summary", { style: score === null ? "" : heat(score, this.ranges[r]) },
        h("b", {}, short(reward.name)), ` ${reward.role && `(${reward.role}) `}`, adds,
        h("small", {}, row.why[r] || reward.doc)),
      h("pre", { class: "code" }, reward.source));
  }
}

export default {
  render({ model, el }) {
    const lab = new Lab(model, el);
    return () => lab.close();
  },
};
