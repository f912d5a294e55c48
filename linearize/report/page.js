"use strict";
// Unpacks Plotly and the data, draws each chart when it is first seen, and again when its colours,
// its switch or the width of the page change.

const root = document.documentElement;
const COARSE = matchMedia("(pointer: coarse)");
const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: COARSE.matches ? false : "hover", // it would cover a small chart
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};
const DARK = matchMedia("(prefers-color-scheme: dark)");
const PAPER_WIDTH = 660;
const drawn = new Set();
let data, paper = false;

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// ------------------------------------------------------------------------------------- colours
function resolver() {
  const probe = document.body.appendChild(document.createElement("i"));
  const known = new Map();
  const color = (name) => {
    if (!known.has(name)) {
      probe.style.color = name;
      known.set(name, getComputedStyle(probe).color);
    }
    return known.get(name);
  };
  const walk = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? color(value) : value;
    if (Array.isArray(value)) return value.map(walk);
    if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, walk(item)]));
  };
  return { walk, done: () => probe.remove() };
}

function plot(div, figure) {
  const colors = resolver();
  const { data: traces, layout } = colors.walk(figure);
  colors.done();
  layout.font = { ...layout.font, family: getComputedStyle(document.body).fontFamily };
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: layout.font.color, activecolor: layout.font.color };
  layout.dragmode = COARSE.matches ? false : "zoom"; // a finger scrolls the page
  const width = div.classList.contains("square") ? PAPER_WIDTH / 2 - 12 : PAPER_WIDTH;
  const height = Math.round(0.8 * layout.height);
  Object.assign(layout, paper ? { width, height, autosize: false } : { autosize: true });
  Plotly.react(div, traces, layout, CONFIG);
}

// -------------------------------------------------------------------------------------- charts
function draw(div) {
  drawn.add(div);
  if (div.dataset.chart) {
    const checked = document.querySelector(`input[name="switch-${div.dataset.chart}"]:checked`);
    plot(div, data.charts[div.dataset.chart][checked ? Number(checked.value) : 0]);
  } else {
    viewer.draw(div);
  }
}

function redraw() {
  drawn.forEach(draw);
  if (viewer) viewer.shade();
}

// ------------------------------------------------------------------- attention weights of a head
let viewer = null;

class Viewer {
  constructor(shown) {
    this.shown = shown;
    this.get = (name) => document.getElementById(`viewer-${name}`);
    this.fill(this.get("text"), shown.texts.map((pieces) => {
      const start = pieces.join("").replace(/\s+/g, " ").trim().slice(0, 42);
      return `${start}…`;
    }));
    this.fill(this.get("head"), shown.heads.map((head) => head.label));
    const slider = this.get("query");
    slider.max = shown.queries.length - 1;
    slider.value = Math.round(0.9 * slider.max);
    this.get("head").value = shown.start;
    slider.addEventListener("input", () => this.changed(["row", "teacher", "student"]));
    for (const name of ["text", "head"]) {
      this.get(name).addEventListener("change", () => this.changed(["teacher", "student", "row"]));
    }
    for (const who of ["teacher", "student"]) {
      document.getElementById(`passage-${who}`).addEventListener("click", (event) => {
        if (event.target.dataset.place) this.look(Number(event.target.dataset.place));
      });
    }
    this.shade();
  }

  fill(select, labels) {
    labels.forEach((label, index) => select.add(new Option(label, index)));
  }

  get text() { return this.shown.texts[this.get("text").value]; }
  get query() { return this.shown.queries[this.get("query").value]; }

  // log10 of the weights [Q][T]; null above the diagonal and below what is stored
  decades(who) {
    const wanted = `${who}-${this.get("text").value}-${this.get("head").value}`;
    if (this.kept?.[who] !== wanted) {
      const packed = atob(this.shown[who][this.get("text").value][this.get("head").value]);
      const T = this.text.length;
      const rows = this.shown.queries.map((query, row) => Array.from({ length: T }, (_, key) => {
        const code = packed.charCodeAt(row * T + key);
        return key > query || code === 0 ? null : this.shown.lowest_decade + code / this.shown.codes_per_decade;
      }));
      this.kept = { ...this.kept, [who]: wanted };
      this.rows = { ...this.rows, [who]: rows };
    }
    return this.rows[who];
  }

  changed(parts) {
    for (const part of parts) if (drawn.has(this.get(part))) draw(this.get(part));
    this.shade();
  }

  look(place) {
    const { queries } = this.shown;
    const nearest = queries.reduce((best, query, row) =>
      Math.abs(query - place) < Math.abs(queries[best] - place) ? row : best, 0);
    this.get("query").value = nearest;
    this.changed(["row", "teacher", "student"]);
  }

  draw(div) {
    const part = div.id.replace("viewer-", "");
    plot(div, part === "row" ? this.row() : this.map(part));
    if (part !== "row" && !div.dataset.listens) {
      div.dataset.listens = "yes";
      div.on("plotly_click", (event) => this.look(event.points[0].y));
    }
  }

  layout(more) {
    const axis = { gridcolor: "var(--grid)", zeroline: false, automargin: true };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: "var(--text)", size: 12 },
      hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--grid)", font: { color: "var(--text)" } },
      margin: { l: 8, r: 8, t: 8, b: 8 }, ...more,
      xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
    };
  }

  map(who) {
    const { window: W, sinks: N, queries } = this.shown, T = this.text.length;
    const pieces = this.text.map((piece) => JSON.stringify(piece));
    const z = this.decades(who).map((row, i) => row.map((value, key) =>
      key > queries[i] ? null : value ?? this.shown.lowest_decade));
    const hover = z.map((row, i) => row.map((value, key) => value === null ? "" :
      `${escape(pieces[queries[i]])} looks at ${escape(pieces[key])}: ${(10 ** value).toPrecision(2)}`));
    const line = (x0, y0, x1, y1) => ({ type: "line", x0, y0, x1, y1, line: { color: "#ffffff", width: 1.2, dash: "dash" } });
    return {
      data: [{
        type: "heatmap", z, x: [...Array(T).keys()], y: queries, text: hover, hoverongaps: false,
        hovertemplate: "%{text}<extra></extra>", colorscale: "Cividis", zmin: -4, zmax: 0,
        colorbar: { thickness: 10, outlinewidth: 0, tickvals: [-4, -3, -2, -1, 0],
          ticktext: ["0.0001", "0.001", "0.01", "0.1", "1"] },
      }],
      layout: this.layout({
        height: 360,
        shapes: [
          ...(T > W + N ? [line(N - .5, W + N - .5, T - W - .5, T - .5)] : []),
          ...(N && T > W + N ? [line(N - .5, W + N - .5, N - .5, T - .5)] : []),
          { type: "line", xref: "paper", x0: 0, x1: 1, y0: this.query, y1: this.query,
            line: { color: "var(--converted)", width: 1.5 } },
        ],
        xaxis: { title: { text: "token looked at" }, showgrid: false, range: [-.5, T - .5] },
        yaxis: { title: { text: "token that looks" }, showgrid: false, range: [T - .5, -.5] },
      }),
    };
  }

  row() {
    const { window: W, sinks: N } = this.shown, query = this.query, T = this.text.length;
    const at = Number(this.get("query").value);
    const x = [...Array(T).keys()];
    const line = (name, who, color, dash, symbol) => ({
      type: "scatter", mode: "lines+markers", name, x,
      y: this.decades(who)[at].map((value) => value === null ? null : 10 ** value),
      text: this.text.map((piece) => escape(JSON.stringify(piece))),
      line: { color, dash, width: 1.5 }, marker: { color, symbol, size: 6 },
      hovertemplate: "%{text}: %{y:.2g}",
    });
    const linear = query - W - N >= 0;
    return {
      data: [
        line("teacher", "teacher", "var(--teacher)", "solid", "circle"),
        line("student", "student", "var(--converted)", "dot", "diamond"),
      ],
      layout: this.layout({
        height: 300, hovermode: "x unified", legend: { orientation: "h", y: 1.16, x: 0 },
        shapes: linear ? [{ type: "rect", yref: "paper", x0: N - .5, x1: query - W + .5, y0: 0, y1: 1,
          fillcolor: "var(--grid)", opacity: .45, line: { width: 0 }, layer: "below" }] : [],
        annotations: linear ? [{ x: (N + query - W) / 2, y: 1, yref: "paper", yanchor: "bottom",
          showarrow: false, text: "linear branch", font: { color: "var(--muted)" } }] : [],
        xaxis: { title: { text: "token looked at" }, range: [-1, T] },
        yaxis: { title: { text: "weight" }, type: "log", range: [-5.1, 0.1], tickformat: "~g", dtick: 1 },
      }),
    };
  }

  // The passage, each token as dark as its weight.
  shade() {
    const at = Number(this.get("query").value);
    const named = JSON.stringify(this.text[this.query]);
    this.get("token").textContent = `${named} (${this.query})`;
    this.get("query").setAttribute("aria-valuetext", `${named}, position ${this.query}`);
    for (const who of ["teacher", "student"]) {
      const color = who === "teacher" ? "--teacher" : "--converted";
      const spans = this.text.map((piece, place) => {
        const span = document.createElement("span");
        const decade = this.decades(who)[at][place];
        span.textContent = piece;
        span.dataset.place = place;
        if (place === this.query) span.className = "query";
        if (place > this.query) span.className = "later";
        if (decade !== null) {
          const share = Math.round(Math.max(0, 100 * (1 + decade / 3)) * .75);
          span.style.background = `color-mix(in srgb, var(${color}) ${share}%, transparent)`;
          span.title = (10 ** decade).toPrecision(2);
        }
        return span;
      });
      document.getElementById(`passage-${who}`).replaceChildren(...spans);
    }
  }
}

function escape(text) { // Plotly reads a little HTML in labels
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// --------------------------------------------------------------------------------------- events
function showOnPaper(yes) {
  paper = yes;
  for (const details of document.querySelectorAll(yes ? "details:not([open])" : "details.opened")) {
    details.open = yes;
    details.classList.toggle("opened", yes);
  }
  root.style.colorScheme = yes ? "light" : document.querySelector('input[name="theme"]:checked').value;
  const hidden = [...document.querySelectorAll(".plot")].filter((div) => !drawn.has(div));
  if (yes) hidden.forEach((div) => drawn.add(div)); // print what was not scrolled to as well
  redraw();
}

async function start() {
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  data = JSON.parse(await unpack("data"));
  if (data.attention) viewer = new Viewer(data.attention);
  for (const input of document.querySelectorAll('.switch input[name^="switch-"]')) {
    input.addEventListener("change", () =>
      draw(document.querySelector(`[data-chart="${input.name.replace("switch-", "")}"]`)));
  }
  for (const input of document.querySelectorAll('input[name="theme"]')) {
    input.addEventListener("change", () => {
      root.style.colorScheme = input.value;
      redraw();
    });
  }
  DARK.addEventListener("change", redraw);
  addEventListener("beforeprint", () => showOnPaper(true));
  addEventListener("afterprint", () => showOnPaper(false));
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawn.has(target)) continue;
      draw(target);
      if (target.dataset.chart === "fidelity" && viewer) {
        target.on("plotly_click", ({ points: [{ x, y }] }) => {
          const row = data.attention.heads.findIndex((one) => `layer ${one.layer}` === y && one.head === x);
          if (row < 0) return;
          viewer.get("head").value = row;
          viewer.changed(["teacher", "student", "row"]);
          document.getElementById("viewer").scrollIntoView();
        });
      }
    }
  }, { rootMargin: "600px" });
  document.querySelectorAll(".plot").forEach((div) => seen.observe(div));
  root.dataset.ready = "yes";
}

start().catch((error) => {
  const problem = document.getElementById("problem");
  problem.textContent = `The charts cannot be shown here (${error.message}); a browser of 2024 or later can.`;
  problem.hidden = false;
  throw error;
});
