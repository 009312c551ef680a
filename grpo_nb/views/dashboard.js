// The training dashboard; uPlot stands before this text. Python sends numbers, this draws them.
const COLORS = ["#3b78c4", "#c96f0a", "#3a9a5b", "#9b59b6", "#8a8a8a", "#c0504d", "#1f9e9e", "#b8860b"];
const BAND = "#3b78c440", GRID = "#8a8a8a33";

function add(parent, tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.textContent = text;
  parent.append(node);
  return node;
}

const short = name => name.replace(/_reward$/, "").replaceAll("_", " ");

function label(key) {
  const parts = key.split("/");
  return parts[0] === "rewards" ? short(parts[1]) : parts.at(-1).replaceAll("_", " ");
}

// A number in a format of Python's: ".0%", ".2f" or ".3g".
function format(value, form) {
  if (value == null) return "–";
  const digits = parseInt(form.slice(1));
  if (form.endsWith("%")) return `${(100 * value).toFixed(digits)} %`;
  if (form.endsWith("f")) return value.toFixed(digits);
  const small = value !== 0 && Math.abs(value) < 1e-3, rounded = +value.toPrecision(digits);
  return small ? rounded.toExponential() : String(rounded);
}

// A chart with its title and legend in a figure of its own.
class Chart {
  constructor(parent, spec, board, marked) {
    Object.assign(this, { spec, board, marked });
    this.figure = add(parent, "figure");
    this.at = add(add(this.figure, "figcaption", "", spec.title), "span");
    this.legend = add(this.figure, "div", "legend");
    this.host = add(this.figure, "div");
    this.host.setAttribute("role", "img");
    this.curves = "";
  }

  // Steps that have any of the curves, with the band's two ends first.
  data() {
    const { rows, keys } = this.board;
    const places = this.metrics.map(key => keys.indexOf(key));
    const own = rows.filter(row => places.some(place => row[place] != null));
    const columns = places.map(place => own.map(row => row[place] ?? null));
    const step = keys.indexOf("step");
    return [own.map(row => row[step]), ...columns];
  }

  update(width, height) {
    const { keys } = this.board;
    const band = this.spec.band.length === 2 && this.spec.band.every(key => keys.includes(key));
    const curves = this.spec.metrics.filter(key => keys.includes(key));
    this.metrics = [...(band ? this.spec.band : []), ...curves];
    this.figure.hidden = !curves.length;
    if (!curves.length) return;
    const data = this.data();
    if (this.curves !== this.metrics.join()) {
      this.curves = this.metrics.join();
      this.plot?.destroy();
      this.plot = new uPlot(this.options(band, curves, width, height), data, this.host);
    } else {
      this.plot.setData(data);
      if (this.plot.width !== width) this.plot.setSize({ width, height });
    }
    this.show(data[0].length - 1);
  }

  options(band, curves, width, height) {
    const color = () => this.board.color();
    const axis = { stroke: color, grid: { stroke: GRID, width: 1 }, ticks: { stroke: GRID } };
    const form = this.spec.form.endsWith("%") ? ".0%" : ".4g";
    const ends = band ? [{ points: { show: false } }, { points: { show: false } }] : [];
    const lines = curves.map((_, n) => ({ stroke: COLORS[n % COLORS.length], width: 2 }));
    return {
      width, height, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { y: false, sync: { key: this.board.id, scales: ["x", null] } },
      scales: { x: { time: false, range: (_, low, high) => this.steps(low, high) }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] },
        { ...axis, size: 58, values: (_, ticks) => ticks.map(tick => format(tick, form)) },
      ],
      series: [{}, ...ends, ...lines],
      bands: band ? [{ series: [2, 1], fill: BAND }] : [],
      hooks: {
        drawAxes: [() => this.drawBase()],
        draw: [() => this.placeMarks()],
        setCursor: [plot => this.show(plot.cursor.idx ?? plot.data[0].length - 1)],
      },
    };
  }

  steps(low, high) { return [low, Math.max(high, this.board.model.get("now").step, low + 1)]; }

  range(low, high) {
    const values = [low, high, ...this.spec.always, ...this.base()].filter(v => v != null);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return [least, most + ((most - least) * 0.05 || 1)];
  }

  base() {
    return this.spec.title.startsWith("validation") ? this.board.model.get("base") : [];
  }

  // The validation before training: a dashed line, and its interval.
  drawBase() {
    const [value, low, high] = this.base(), { ctx, bbox } = this.plot;
    const y = number => this.plot.valToPos(number, "y", true);
    if (value == null) return;
    ctx.save();
    ctx.fillStyle = "#8a8a8a40";
    if (high != null) ctx.fillRect(bbox.left, y(high), bbox.width, y(low) - y(high));
    ctx.strokeStyle = this.board.color();
    ctx.setLineDash([4, 4]);
    ctx.stroke(new Path2D(`M${bbox.left} ${y(value)} h${bbox.width}`));
    [ctx.fillStyle, ctx.textAlign, ctx.textBaseline] = [ctx.strokeStyle, "right", "bottom"];
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    ctx.fillText("before training", bbox.left + bbox.width - 4, y(value) - 2);
    ctx.restore();
  }

  placeMarks() {
    this.plot.over.querySelectorAll(".mark").forEach(mark => mark.remove());
    const { min, max } = this.plot.scales.x;
    for (const alert of this.marked ? this.board.model.get("alerts") : []) {
      if (alert.step < min || alert.step > max) continue;
      const mark = add(this.plot.over, "span", `mark ${alert.state}`);
      mark.style.left = `${this.plot.valToPos(alert.step, "x")}px`;
      mark.title = alert.text;
    }
  }

  // The values of a place in the legend: at the cursor, or the latest.
  show(place) {
    this.legend.replaceChildren();
    const [steps, ...columns] = this.plot.data, { form, band, metrics, title } = this.spec;
    this.metrics.forEach((key, n) => {
      if (band.includes(key) && !metrics.includes(key)) return;
      const last = columns[n].slice(0, place + 1).findLast(value => value != null);
      const item = add(this.legend, "span");
      item.title = key;
      add(item, "i").style.background = this.plot.series[n + 1].stroke();
      if (metrics.length > 1) add(item, "em", "", label(key));
      add(item, "b", "", format(last, form));
    });
    const [before, ...ends] = this.base().map(value => format(value, form));
    const interval = ends.length ? ` (95 % interval: ${ends.join(" … ")})` : "";
    if (before) add(this.legend, "span", "", `before training ${before}${interval}`);
    this.at.textContent = place < steps.length - 1 ? ` · at step ${steps[place]}` : "";
    const texts = [...this.legend.children].map(item => item.textContent);
    if (!this.at.textContent) this.host.ariaLabel = `${title}: ${texts.join(" · ")}`;
  }
}

// One prompt's completions side by side; the slider goes over the steps.
class Group {
  constructor(parent) {
    this.section = add(parent, "section");
    const head = add(this.section, "h4");
    this.title = add(head, "span");
    this.slider = add(head, "input");
    Object.assign(this.slider, { type: "range", min: 0, value: 0, max: 0, ariaLabel: "step" });
    this.slider.oninput = () => {
      const place = +this.slider.value;
      this.chosen = this.groups[place + 1] ? this.groups[place].step : Infinity;
      this.show();
    };
    this.question = add(this.section, "p", "question");
    this.cards = add(this.section, "div", "cards");
    Object.assign(this, { groups: [], chosen: Infinity });
  }

  // Show the step that the person has chosen; else the newest.
  update(groups) {
    this.groups = groups;
    this.section.hidden = !groups.length;
    this.slider.hidden = groups.length < 2;
    this.slider.max = Math.max(0, groups.length - 1);
    const place = groups.findIndex(group => group.step >= this.chosen);
    this.slider.value = place < 0 ? groups.length - 1 : place;
    if (groups.length) this.show();
  }

  show() {
    const { step, question, count, completions } = this.groups[this.slider.value];
    if (this.shown === `${step} ${question}`) return;
    this.shown = `${step} ${question}`;
    const some = completions.length < count ? `${completions.length} of ${count}` : count;
    this.title.textContent = `One prompt at step ${step}: ${some} completions, best first`;
    this.question.textContent = question;
    this.cards.replaceChildren();
    for (const { text, total, advantage, scores } of completions) {
      const card = add(this.cards, "div", "card");
      const head = add(card, "div");
      add(head, "b", "", `total ${format(total, ".3g")}`);
      const side = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
      const arrow = { up: "▲ ", down: "▼ " }[side] ?? "";
      if (advantage != null) add(head, "span", side, arrow + format(advantage, ".2g"));
      const list = add(card, "dl");
      for (const [name, score] of Object.entries(scores)) {
        add(list, "dt", "", short(name)).title = name;
        add(list, "dd", "", score == null ? "None" : format(score, ".3g"));
      }
      add(card, "div", "text", text);
    }
  }
}

class Board {
  constructor(root, model) {
    Object.assign(this, { model, root });
    this.id = Math.random().toString(36);
    this.verdict = add(root, "p", "verdict");
    this.verdict.setAttribute("role", "status");
    const bar = add(root, "div", "bar");
    this.count = add(bar, "b");
    this.progress = add(bar, "progress");
    this.phase = add(bar, "span", "phase");
    this.figures = add(bar, "span");
    this.interrupt = add(root, "div");
    this.alerts = add(root, "ul", "alerts");
    this.error = add(root, "details", "error");
    const spec = model.get("spec"), count = 4; // the others are folded
    const rewards = { title: "rewards", metrics: [], form: ".3g", always: [0, 1], band: [] };
    const draw = (charts, parent, isLarge) => charts.map(one => new Chart(parent, one, this, isLarge));
    this.large = draw([...spec.slice(0, count), rewards], add(root, "div", "charts large"), true);
    this.details = add(root, "details");
    add(this.details, "summary", "", "Diagnostics");
    this.details.ontoggle = () => this.draw();
    const small = add(this.details, "div", "charts");
    this.small = draw(spec.slice(count), small, false);
    this.group = new Group(root);
    this.began = Date.now();
    this.alertsSeen = 0;
  }

  color() { return getComputedStyle(this.root).color; }

  update() {
    const { model } = this, now = model.get("now");
    if (now.phase !== this.phaseShown) [this.phaseShown, this.began] = [now.phase, Date.now()];
    this.verdict.textContent = now.sentence;
    this.verdict.className = `verdict ${now.gravity}`;
    this.count.textContent = `step ${now.step} of ${now.total}`;
    Object.assign(this.progress, { value: now.step, max: now.total || 1,
      ariaLabel: this.count.textContent });
    this.figures.textContent = now.pace;
    this.tick();
    this.interrupt.textContent = now.over ? "" : model.get("interrupt");
    this.showAlerts(model.get("alerts"));
    const [error, ...trace] = model.get("error").split("\n");
    this.error.hidden = !error;
    this.error.replaceChildren();
    add(this.error, "summary", "", error).setAttribute("role", "alert");
    add(this.error, "pre", "", trace.join("\n"));
    this.keys = model.get("names");
    this.rows = JSON.parse(model.get("rows") || "[]");
    this.large.at(-1).spec.metrics = this.keys.filter(key => /^rewards\/.*\/mean$/.test(key));
    this.draw();
    this.group.update(JSON.parse(model.get("groups") || "[]"));
  }

  tick() {
    const { phase, over } = this.model.get("now");
    const seconds = Math.round((Date.now() - this.began) / 1000);
    this.phase.textContent = phase + (over || !/^step|^valid/.test(phase) || seconds < 2
      ? "" : `, ${seconds} s`);
  }

  // The sentence on top shows one alert in full; the others, the gravest and newest first.
  showAlerts(alerts) {
    this.details.open ||= alerts.length > this.alertsSeen;
    this.alertsSeen = alerts.length;
    const others = alerts.filter(alert => alert.text !== this.verdict.textContent).reverse();
    others.sort((one, other) => (other.state === "stop") - (one.state === "stop"));
    this.alerts.replaceChildren();
    for (const alert of others.slice(0, 8)) {
      const item = add(this.alerts, "li", alert.state);
      item.title = alert.evidence;
      add(item, "b", "", `${alert.state} · `);
      item.append(alert.text);
    }
    if (others.length > 8) add(this.alerts, "li", "", `${others.length - 8} more: alerts.jsonl`);
  }

  draw() {
    const width = this.root.clientWidth;
    if (!width || !this.rows) return;
    const gap = 16, columns = Math.max(1, Math.floor((width + gap) / (340 + gap)));
    const few = Math.min(2, columns), many = columns + 1;
    this.root.style.setProperty("--few", few);
    this.root.style.setProperty("--many", many);
    const of = count => Math.floor((width - gap * (count - 1)) / count);
    this.large.forEach(chart => chart.update(of(few), 200));
    if (this.details.open) this.small.forEach(chart => chart.update(of(many), 110));
  }

  recolor() { [...this.large, ...this.small].forEach(chart => chart.plot?.redraw(false)); }
}

function render({ model, el }) {
  el.classList.add("grpo-dashboard");
  const board = new Board(el, model);
  let due = 0;
  const later = () => { due ||= requestAnimationFrame(() => { due = 0; board.update(); }); };
  model.on("change", later);
  const size = new ResizeObserver(() => board.draw()), theme = new MutationObserver(() => board.recolor());
  size.observe(el);
  for (const node of [document.body, document.documentElement])
    theme.observe(node, { attributes: true, attributeFilter: ["class", "data-jp-theme-light", "theme"] });
  const clock = setInterval(() => board.tick(), 1000);
  board.update();
  return () => {
    model.off("change", later);
    size.disconnect();
    theme.disconnect();
    clearInterval(clock);
  };
}

export default { render };
