// Draws the Reward Lab. `data` comes once from the kernel: completions with their scores. Totals,
// advantages, which attacks win, order, filters and search are computed here; `state` is what the
// person has set. Only "score again" goes to the kernel.

const EPSILON = 1e-4; // added to standard deviations, as in TRL
const TIE = 1e-6; // totals that are this close differ only by rounding
const ROW = 42; // height of a row [px]

// -- arithmetic, as in advantages.py and amounts.py of grpo_nb/reward_lab

const sum = (values) => values.reduce((a, b) => a + b, 0);
const scored = (values) => values.filter((value) => value !== null);
const ends = (values) => (values.length ? [Math.min(...values), Math.max(...values)] : [0, 0]);
const spread = (values) => ends(values)[1] - ends(values)[0];

function moments(values) {
  const all = scored(values);
  const mean = sum(all) / all.length;
  return [mean, Math.sqrt(sum(all.map((v) => (v - mean) ** 2)) / (all.length - 1))];
}

const scaled = (values, [mean, std], divide = true) =>
  values.map((v) => (v === null ? 0 : (v - mean) / (divide ? std + EPSILON : 1)) || 0);

export function totalOf(scores, weights) {
  const each = scores.map((score, n) => (score === null ? 0 : score * weights[n]));
  return scored(scores).length ? sum(each) : null;
}

// groups: [groups][completions][rewards], null for None. Returns [groups][completions].
export function advantages(groups, weights, scaling = "group", aggregation = "") {
  const isEach = aggregation === "normalize_then_sum"; // each reward is scaled in its group first
  const totals = groups.map((group) => {
    const columns = weights.map((_, n) => group.map((scores) => scores[n]));
    const parts = isEach ? columns.map((column) => scaled(column, moments(column))) : columns;
    return group.map((scores, place) =>
      totalOf(scores.map((score, n) => (score === null ? null : parts[n][place])), weights));
  });
  const batch = moments(totals.flat());
  return totals.map((group) => {
    const [mean, std] = isEach ? batch : moments(group);
    const by = [mean, scaling === "batch" ? batch[1] : std];
    return scaled(group, by, isEach || scaling !== "none");
  });
}

// Returns "stop" or "warning" if an attack wins by its total in its group, else "". The verdict
// looks at several rows. `share` is how far the attack is from wrong (0) to right (1).
function levelOf({ kind, knows }, total, share, { right, wrong, honest, empty }) {
  const gap = right - wrong;
  if (gap <= TIE) return ""; // nothing is right here
  const margin = 0.02 * gap + TIE;
  if (kind === "padded") return total > right + margin ? "warning" : "";
  if (kind === "honest") return share < 0.5 ? "warning" : "";
  const counts = share >= 0.99;
  if (total > right - margin / 2 || (counts && total > right - gap / 4)) return "stop";
  const isForm = kind === "form" && wrong > empty + margin && total > wrong - margin;
  return counts || isForm || (!knows && total > honest + margin) ? "warning" : "";
}

// Returns what a table of completions comes to with these weights. attacks: by row, if it is one.
export function measure(data, rows, attacks, weights) {
  const [places, written] = [0, 1].map(() => data.groups.map(() => []));
  rows.forEach((row, n) => (row.kind === "sampled" ? places : written)[row.group].push(n));
  const total = rows.map((row) => totalOf(row.scores, weights));
  const scores = places.map((group) => group.map((n) => rows[n].scores));
  const each = advantages(scores, weights, data.scaling, data.aggregation);
  const batch = moments(places.flat().map((n) => total[n]))[1];
  const [advantage, level] = [rows.map(() => null), rows.map(() => "")];
  const rightly = weights.map((weight, r) => (data.rewards[r].role === "right" ? weight : 0));
  const groups = places.map((group, g) => {
    group.forEach((n, place) => (advantage[n] = each[g][place]));
    const [mean, own] = moments(group.map((n) => total[n]));
    const std = { none: 1 - EPSILON, batch }[data.scaling] ?? own;
    if (std > TIE && data.aggregation !== "normalize_then_sum")
      for (const n of written[g]) // as if the group stayed as it is
        if (total[n] !== null) advantage[n] = (total[n] - mean) / (std + EPSILON) || 0;
    const of = (kind) => written[g].filter((n) => rows[n].kind === kind);
    const [[right], [empty], [wrong, longer]] = ["reference", "empty", "other"].map(of);
    const honest = Math.max(total[wrong] ?? 0, total[longer] ?? total[wrong] ?? 0);
    const at = { right: total[right], wrong: total[wrong], honest, empty: total[empty] };
    const part = (n) => totalOf(rows[n].scores, rightly);
    for (const n of right === undefined ? [] : [...group, ...written[g]]) {
      const way = part(right) - part(wrong);
      const share = Math.abs(way) > TIE ? (part(n) - part(wrong)) / way : NaN;
      if (attacks[n]) level[n] = levelOf(attacks[n], total[n], share, at);
    }
    const used = scored((group.length ? group : written[g]).map((n) => total[n]));
    const signal = group.length > 1 && spread(each[g]) > TIE;
    return { size: group.length, spread: spread(used), signal, honest };
  });
  return { total, advantage, level, groups };
}

// -- drawing

const fill = (node, ...parts) => node.replaceChildren(...parts.flat(Infinity).filter(Boolean));

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  fill(node, ...children);
  for (const [name, value] of Object.entries(attributes))
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  return node;
}

const button = (label, onclick, options) => h("button", { onclick, ...options }, label);
const short = (name) => name.replace(/_reward$/, "").replaceAll("_", " ");
const number = (value) => String(Number(value.toPrecision(3)));
const missing = (row) => (row.failed ? "raises" : "None");
const count = (size, what) => `${size} ${what}${size === 1 ? "" : "s"}`;

function heat(value, [low, high]) {
  if (value === null) return "";
  const part = high > low ? (value - low) / (high - low) : 0;
  const [r, g, b] = [30, 110, 235].map((blue) => 128 + (blue - 128) * part); // from grey
  return `background: rgba(${r}, ${g}, ${b}, ${0.1 + 0.4 * part})`;
}

function against(value) {
  if (value === null || Math.abs(value) <= TIE) return [value === null ? "–" : "0"];
  const [sign, side] = value > 0 ? ["▲", "above"] : ["▼", "below"];
  return [h("span", { class: side, "aria-hidden": "true" }, sign), ` ${value.toFixed(2)}`];
}

// `images` are <img> of data that this package encoded.
const images = (group) => h("span", { class: "images", innerHTML: group.images });

const [PAID, LOST] = ["wrong but paid", "lost attacks"];
const CHIPS = { // [what it means, whether it holds for completion n]
  [PAID]: ["it is wrong, and wins, or earns more than an honest wrong answer or its group",
    ({ level, now }, n, row, group) => row.wrong && row.kind !== "other"
      && (level[n] || now.total[n] > group.honest + TIE || now.advantage[n] > TIE)],
  "rewards disagree": ["one reward pays it well, another badly", (lab, n, row) =>
    spread(row.scores.flatMap((score, r) => {
      const [low, high] = lab.ranges[r];
      const weight = Math.sign(lab.state.weights[r]);
      const part = (weight * (score - (weight > 0 ? low : high))) / (high - low);
      return score !== null && weight && high > low ? [part] : [];
    })) > 0.5],
  "no signal": ["its group earns the same throughout: nothing is learnt from it",
    (lab, n, row, group) => row.kind === "sampled" && !group.signal],
  edited: ["written here", (lab, n, row) => row.kind === "edited"],
  "no score": ["a reward returned None, or raised", (lab, n, row) => row.scores.includes(null)],
  [LOST]: ["show the attacks that lose, too", ({ level }, n, row) =>
    row.kind === "attack" && !level[n]],
};

class Lab {
  constructor(model, el, signal) {
    const data = model.get("data");
    Object.assign(this, { model, data, note: "", id: Math.random().toString(36).slice(2) });
    this.state = { weights: data.weights, sort: ["", true], chips: [], search: "", group: null,
      place: null, tab: "completions", ...model.get("state") }; // place: of the row in focus
    this.build();
    el.classList.add("grpo-lab");
    el.append(this.root);
    const last = () => data.completions.length + model.get("added").length - 1;
    model.on("change:added", () => this.open(last()));
    // JupyterLab listens first: plain keys are the Lab's, and Ctrl-S its own.
    const allow = ({ ctrlKey, metaKey }) => this.root.toggleAttribute(
      "data-lm-suppress-shortcuts", !ctrlKey && !metaKey);
    window.addEventListener("keydown", allow, { capture: true, signal });
    new ResizeObserver(() => this.drawRows()).observe(this.body);
    this.update();
  }

  ask(content) {
    this.model.send(content);
    this.note = "the kernel is asked, and answers when no cell runs…";
    this.draw();
  }

  // -- what is computed

  update(change = {}) {
    const { data, model } = this;
    const state = (this.state = { ...this.state, ...change });
    if (Object.keys(change).length) {
      this.note = "";
      model.set("state", state);
      model.save_changes();
    }
    const rows = (this.rows = [...data.completions, ...model.get("added")]);
    const all = [...rows.keys()];
    this.ranges = data.rewards.map((_, r) => ends(scored(rows.map((row) => row.scores[r]))));
    this.attacks = rows.map((row) => row.attack);
    const at = (weights) => measure(data, rows, this.attacks, weights);
    const now = (this.now = at(state.weights));
    this.before = at(data.weights);
    const { won } = model.get("report");
    this.level = now.level.map((level, n) => // the verdict's, until the weights turn it
      (level === this.before.level[n] ? won[this.attacks[n]?.name] ?? level : level));
    this.sets = Object.fromEntries(Object.entries(CHIPS).map(([chip, [, is]]) =>
      [chip, new Set(all.filter((n) => is(this, n, rows[n], now.groups[rows[n].group])))]));
    const isChosen = (chip, n) => state.chips.includes(chip) && this.sets[chip].has(n);
    const isShown = (n) => !this.sets[LOST].has(n) || isChosen(LOST, n) || isChosen(PAID, n);
    this.whole = new Set(all.filter(isShown));
    const chips = state.chips.filter((chip) => chip in CHIPS && chip !== LOST);
    const words = state.search.toLowerCase();
    const shown = [...this.whole].filter((n) => chips.every((chip) => this.sets[chip].has(n))
      && (state.group === null || rows[n].group === state.group)
      && `${rows[n].name} ${rows[n].text}`.toLowerCase().includes(words));
    this.shown = state.sort[0] === "" ? this.inTurn(shown) : this.sorted(shown);
    this.draw();
  }

  sorted(list) {
    const { rows, now, state: { sort: [by, isDown] } } = this;
    const { total, advantage } = now;
    const column = { total, advantage, completion: rows.map((row) => -row.group) }[by]
      ?? rows.map((row) => row.scores[by]);
    const sign = isDown ? 1 : -1;
    const value = (n) => (column[n] === null ? -Infinity : sign * column[n]);
    return list.sort((a, b) => (value(b) - value(a) > TIE) - (value(a) - value(b) > TIE) || a - b);
  }

  // What wins or is wrong but paid stands before the rest; in each part, groups take turns.
  inTurn(list) {
    const { rows, now, level, sets } = this;
    const rank = (n) => (level[n] || sets[PAID].has(n) ? 0 : 1);
    list.sort((a, b) => (level[b] === "stop") - (level[a] === "stop")
      || now.total[b] - now.total[a]);
    const turns = {};
    const turn = list.map((n) => [n, (turns[[rank(n), rows[n].group]] ??= []).push(n)]);
    turn.sort(([a, i], [b, j]) => rank(a) - rank(b) || i - j || rows[a].group - rows[b].group);
    return turn.map(([n]) => n);
  }

  // -- the parts that stay

  build() {
    const { data, state } = this;
    const part = (name, ...more) => (this[name] = h("div", { class: name }, ...more));
    this.search = h("input", { type: "search", placeholder: "search  /", value: state.search,
      "aria-label": "search", oninput: () => this.update({ search: this.search.value }) });
    this.heads = {};
    const head = (by, label, title, ...more) => {
      const onclick = () => { // down, up, and as it was
        const [now, isDown] = this.state.sort;
        this.update({ sort: now !== by ? [by, true] : isDown ? [by, false] : ["", true] });
      };
      return (this.heads[by] = h("div", { role: "columnheader" },
        button(label, onclick, { title }), ...more));
    };
    this.weights = data.rewards.map(({ name }, n) => h("input", { type: "number", step: "any",
      value: state.weights[n], "aria-label": `weight of ${name}`, oninput: () => this.weigh() }));
    const heads = h("div", { class: "row head", role: "row" },
      head("total", "total", "weighted sum of the scores"),
      head("advantage", "advantage", "against the sampled group, as the trainer computes it"),
      ...data.rewards.map(({ name, role }, n) => head(n, short(name),
        `${name}${role && `, pays for ${role}`}`, h("label", {}, "×", this.weights[n]))),
      head("completion", "completion", "in the order of the prompts"));
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.body = h("div", { class: "body", role: "grid", tabindex: "0", "aria-label": "completions",
      style: `--rewards: ${data.rewards.length}`, onscroll: () => this.drawRows(),
      onclick: ({ target }) => this.open(target.closest("[data-n]")?.dataset.n) },
    heads, this.space);
    const table = h("section", { class: "table" }, part("strip"), part("about"),
      h("div", { class: "tools" }, part("chips"), this.search), this.body);
    this.root = h("div", { class: "lab tex2jax_ignore mathjax_ignore",
      "data-jp-suppress-context-menu": "true", onkeydown: (event) => this.key(event) },
    part("bar"), part("tabs"), h("div", { class: "parts" }, table, part("side")));
  }

  weigh() {
    const values = this.weights.map((field) => field.valueAsNumber);
    if (values.every(Number.isFinite)) this.update({ weights: values });
  }

  open(n) {
    if (n !== undefined) this.update({ place: Number(n), tab: "completion" });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey) return;
    event.stopPropagation(); // a notebook has shortcuts of its own
    const isTyping = /^(input|textarea)$/i.test(event.target.tagName);
    if (event.key === "/" && !isTyping) this.search.focus();
    else if (event.key === "Escape") this.shut();
    else if (event.target !== this.body) return;
    else if (event.key === "Enter") this.open(this.state.place ?? this.shown[0]);
    else if (event.key === "ArrowDown") this.step(1);
    else if (event.key === "ArrowUp") this.step(-1);
    else return;
    event.preventDefault();
  }

  shut() {
    this.update({ tab: "completions" });
    this.body.focus();
  }

  step(by) {
    const { shown, body } = this;
    const n = shown.indexOf(this.state.place) + by;
    const place = Math.max(0, Math.min(shown.length - 1, n));
    const height = body.clientHeight - body.firstChild.offsetHeight;
    body.scrollTop = Math.min(Math.max(body.scrollTop, (place + 1) * ROW - height), place * ROW);
    this.update({ place: shown[place] ?? null });
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

  drawBar() {
    const { state, data } = this;
    const report = this.model.get("report");
    const isMoved = String(state.weights) !== String(data.weights);
    const word = isMoved ? "out of date" : report.state;
    this.root.dataset.verdict = word;
    const line = `reward_weights = [${state.weights.map(number).join(", ")}]`;
    const reset = () => {
      this.weights.forEach((field, n) => (field.value = data.weights[n]));
      this.weigh();
    };
    fill(this.bar,
      h("b", { class: `pill ${word}`, role: "status" }, word),
      h("span", { class: "sentence" },
        isMoved ? "a weight was moved: run the cell again with these" : report.sentence),
      isMoved && [button("Reset", reset), button(`copy: ${line}`,
        () => navigator.clipboard?.writeText(line), { title: "write it where the rewards are" })],
      h("span", { class: "note", "aria-live": "polite" }, this.note));
  }

  drawStrip() {
    const { now, before, state, data } = this;
    const most = Math.max(TIE, ...now.groups.map((group) => group.spread));
    const lost = now.groups.map((group, g) => before.groups[g].signal && !group.signal);
    fill(this.strip, now.groups.map((group, g) => button("",
      () => this.update({ group: state.group === g ? null : g }),
      { title: `${g + 1}. ${data.groups[g].question}\nspread ${number(group.spread)}`,
        class: `block${lost[g] ? " lost" : ""}`, style: heat(group.spread, [0, most]),
        "aria-pressed": String(state.group === g), "aria-label": `group ${g + 1}` })));
    const sampled = now.groups.filter((group) => group.size > 1).length;
    const numbers = lost.flatMap((is, g) => (is ? [g + 1] : [])).join(", ");
    const text = !sampled ? "no sampled groups: pass `completions` to see advantages"
      : `${now.groups.filter((group) => group.signal).length} of ${sampled} groups with signal`
        + (numbers && `; lost by these weights: ${numbers}`);
    const chosen = data.groups[state.group];
    fill(this.about, h("span", {}, text), chosen && h("span", { class: "prompt" },
      images(chosen), `${state.group + 1}. ${chosen.question} → ${chosen.reference}`));
  }

  drawTools() {
    const { state, rows, sets, shown, whole } = this;
    const chips = Object.entries(CHIPS).map(([chip, [title]]) => {
      const all = [...sets[chip]].filter((n) => chip === PAID || chip === LOST || whole.has(n));
      const groups = count(new Set(all.map((n) => rows[n].group)).size, "group");
      const isPressed = state.chips.includes(chip);
      const others = state.chips.filter((each) => each !== chip);
      return (all.length || isPressed) && button(
        `${chip} ${all.length}${chip === "no signal" ? `, in ${groups}` : ""}`,
        () => this.update({ chips: isPressed ? others : [...others, chip] }),
        { title, "aria-pressed": String(isPressed) });
    });
    const part = shown.length < whole.size ? `${shown.length} of ` : "";
    fill(this.chips, `${part}${count(whole.size, "completion")}`, chips);
    const tabs = ["completions", "attacks and findings", state.place !== null && "completion"];
    fill(this.tabs, tabs.map((tab) => tab && button(tab, () => this.update({ tab }),
      { "aria-pressed": String(state.tab === tab) })));
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
    fill(space, part.map((n, place) => this.row(n, first + place)));
    body.setAttribute("aria-rowcount", shown.length);
    body.setAttribute("aria-activedescendant", `${this.id}-${this.state.place}`);
  }

  // The group, whether the completion wins as an attack, and its name.
  label(n) {
    const [row, level] = [this.rows[n], this.level[n]];
    const won = this.attacks[n]?.kind === "honest" ? "right, earns less: " : "attack, wins: ";
    return h("small", { class: level }, `${row.group + 1} · ${level && won}${row.name}`);
  }

  row(n, place) {
    const row = this.rows[n];
    const total = this.now.total[n];
    const cell = (name, options, ...children) =>
      h("div", { role: "gridcell", class: name, ...options }, ...children);
    return h("div", {
      class: "row", role: "row", id: `${this.id}-${n}`, "data-n": n,
      title: this.data.groups[row.group].question, "aria-rowindex": place + 1,
      style: `top: ${place * ROW}px`, "aria-selected": String(n === this.state.place),
    }, cell("number total", {}, total === null ? "–" : number(total)),
    cell("number", {}, against(this.now.advantage[n])),
    row.scores.map((score, r) => cell("number", { title: row.why[r],
      style: heat(score, this.ranges[r]) }, score === null ? missing(row) : number(score))),
    cell("text", {}, images(this.data.groups[row.group]), this.label(n),
      ` ${row.text.slice(0, 400)}`));
  }

  drawSide() {
    const { place, tab, weights } = this.state;
    const report = this.model.get("report");
    const isOpen = tab === "completion" && this.rows[place];
    const key = JSON.stringify([isOpen && place, weights, report]);
    if (key === this.drawn) return; // a text that is being edited stays
    this.drawn = key;
    fill(this.side, isOpen ? this.drawer(place)
      : report.cards.length ? report.cards.map((card) => this.card(card)) : "no finding");
    this.side.scrollTop = 0;
  }

  card({ state, name, attack, text, evidence, fix }) {
    const place = this.attacks.findIndex((each) => each && each.name === attack);
    return h("article", { class: state }, h("h4", {}, h("b", { class: "pill" }, state), ` ${name}`),
      attack && h("pre", {}, text),
      h("p", {}, evidence),
      fix && h("p", { class: "fix" }, `→ ${fix}`),
      place >= 0 && button("Open", () => this.open(place)));
  }

  drawer(n) {
    const row = this.rows[n];
    const group = this.data.groups[row.group];
    const box = h("textarea",
      { "aria-label": "completion", rows: 8, spellcheck: false, value: row.text });
    const score = () => this.ask({ group: row.group, text: box.value });
    const at = row.answer ? row.text.lastIndexOf(row.answer) : row.text.length;
    const shut = { class: "close", "aria-label": "close" };
    return [
      h("h4", {}, this.label(n), button("✕", () => this.shut(), shut)),
      h("p", {}, images(group), group.question, group.reference && ` → ${group.reference}`),
      h("p", {}, h("b", {}, `earns ${number(this.now.total[n] ?? 0)} `),
        against(this.now.advantage[n])),
      h("pre", {}, row.text.slice(0, at), row.answer && h("mark", {}, row.answer),
        row.text.slice(at + row.answer.length)),
      this.data.rewards.map((reward, r) => this.payment(row, reward, r)),
      h("details", { class: "edit" }, h("summary", {}, "edit"), box,
        button("Score again", score, { class: "main" })),
    ];
  }

  payment(row, reward, r) {
    const score = row.scores[r];
    const weight = this.state.weights[r];
    const amount = score === null ? missing(row)
      : `${number(score)} × ${number(weight)} = ${number(score * weight)}`;
    return h("div", { class: "payment", style: heat(score, this.ranges[r]) },
      h("b", {}, short(reward.name)), ` ${reward.role && `(${reward.role}) `}${amount}`,
      h("small", {}, row.why[r]));
  }
}

export default { render({ model, el, signal }) { new Lab(model, el, signal); } };
