// Draws the figures of a plan: reads the numbers from the JSON beside them and fills every <figure data-figure>.
// Colours are the style sheet's variables, so a change of theme needs no drawing; a change of width does.
// Says nothing that the captions and tables do not say: without this file the page is complete.
"use strict";
(() => {
  const GIB = 2 ** 30, MIB = 2 ** 20;
  const NARROW = 560; // pixels: labels move from beside the bars to above them
  const SYMBOLS = ["circle", "square", "triangle", "diamond2", "star", "wye", "hexagon"];
  const LEVEL_WORDS = {node: "inside a node", domain: "domain across nodes", network: "network"};
  const WORK_WORDS = {forward: "forward", backward: "backward", "weight-gradient": "weight gradients"};
  const HEIGHT_LEFT_OUT = {forward: 0, backward: 0.25, "weight-gradient": 0.5}; // share of a row above the slot
  const PLAIN = {arithmetic: "var(--kind-arithmetic)", mixed: "var(--surface)"}; // kinds of parts without a pattern
  let drawings = 0; // ids of patterns stay apart

  // ---- words: the same digits as planner/units.py ----
  const memoryUnit = (largest) => (Math.abs(largest) >= GIB / 2 ? ["GiB", GIB] : ["MiB", MIB]);
  const memory = (bytes) => {
    const [name, size] = bytes ? memoryUnit(bytes) : ["GiB", GIB];
    return `${(bytes / size).toFixed(1)} ${name}`;
  };
  const digits = (value) => String(Number(value.toPrecision(3)));
  const duration = (seconds) => {
    if (seconds < 0) return `-${duration(-seconds)}`;
    if (seconds >= 100) return `${seconds.toFixed(0)} s`;
    if (seconds >= 0.9995 || seconds === 0) return `${digits(seconds)} s`;
    return seconds >= 0.9995e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} us`;
  };
  const percent = (ratio) => `${(100 * ratio).toFixed(1)} %`;
  const timeUnit = (largest) => (largest >= 1 ? ["s", 1] : largest >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6]);
  const measure = document.createElement("canvas").getContext("2d");
  const wide = (text, font = "12px system-ui, sans-serif") => {
    measure.font = font;
    return measure.measureText(text).width;
  };
  const widest = (texts) => Math.max(0, ...texts.map((text) => wide(text)));

  // ---- patterns: a second carrier beside colour ----
  const svg = (name, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const striped = (id, colour, degrees, step, stroke, ground) => {
    const size = {width: step, height: step};
    return svg("pattern", {id, ...size, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${degrees})`},
      svg("rect", {...size, fill: ground ? "var(--surface)" : colour}),
      svg("line", {x1: 0, x2: 0, y1: 0, y2: step, stroke: ground ? colour : "var(--surface)", "stroke-width": stroke}));
  };
  const patterns = () => {
    const name = `drawn${++drawings}-`;
    const defs = svg("defs", {},
      striped(`${name}communication`, "var(--kind-communication)", 45, 6, 2.4),
      striped(`${name}recomputation`, "var(--kind-recomputation)", -45, 6, 2.4),
      striped(`${name}waiting`, "var(--kind-waiting)", 0, 5, 2.4),
      striped(`${name}update`, "var(--kind-update)", 90, 5, 2.4),
      striped(`${name}domain`, "var(--level-domain)", 0, 5, 2.4),
      striped(`${name}network`, "var(--level-network)", 45, 6, 2.4),
      striped(`${name}bubble`, "var(--axis)", 45, 5, 1.6, true));
    return {mark: () => defs, fill: (pattern) => `url(#${name}${pattern})`};
  };

  // ---- Plot, the way all figures use it ----
  const PAPER = 680; // pixels that a page of paper shows at the size of its text
  let printing = false;
  const widthOf = (canvas) => (printing ? PAPER : Math.max(280, canvas.clientWidth));
  const plot = (canvas, options) => {
    const figure = Plot.plot({
      width: widthOf(canvas), className: "plan-plot", style: {background: "none"}, ...options,
    });
    for (const style of figure.querySelectorAll("style")) style.remove(); // plan.css has the rules: policies allow no others
    figure.setAttribute("aria-hidden", "true"); // caption and table say it
    canvas.replaceChildren(figure);
  };
  const tip = (data, options, title) => Plot.tip(data, Plot.pointer({
    ...options, title, fill: "var(--surface)", stroke: "var(--axis)", fontSize: 12, lineHeight: 1.35, maxRadius: 30,
  }));
  const limitMarks = (limit, top) => [
    Plot.ruleX([limit], {stroke: "var(--surface)", strokeWidth: 4}),
    Plot.ruleX([limit], {stroke: "var(--bad)", strokeWidth: 2, strokeDasharray: "6 4"}),
    Plot.text([limit], {x: limit, frameAnchor: "top", dy: -top, text: () => "limit", fill: "var(--bad)", fontWeight: 600}),
  ];

  // ---- step time against memory ----
  // A label stands beside its dot where it hides no dot and no other label, as near as that can be: places around the
  // dot are tried from the nearest on; a leader that passes other dots, and other dots about as near, count as far.
  const DOT = 7; // pixels that a dot takes from its middle
  const CLEAR = 14; // pixels by which its own dot is nearest to a label that nobody takes for another's
  const WAYS = d3.range(16).map((turn) => (turn * Math.PI) / 8);
  const distance = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);
  const overlap = (a, b) => Math.abs(a.x - b.x) < a.w + b.w && Math.abs(a.y - b.y) < a.h + b.h;
  const fromLine = (dot, a, b) => {
    const [dx, dy] = [b.x - a.x, b.y - a.y];
    const share = Math.min(1, Math.max(0, ((dot.x - a.x) * dx + (dot.y - a.y) * dy) / (dx * dx + dy * dy || 1)));
    return Math.hypot(dot.x - a.x - share * dx, dot.y - a.y - share * dy);
  };
  const placed = (points, at, text, frame) => {
    const dots = points.map((point) => ({...at(point), w: DOT, h: DOT}));
    const labels = [];
    const far = (box, dot, others) =>
      (box.x - box.w < frame.left || box.x + box.w > frame.right || box.y - box.h < frame.top || box.y + box.h > frame.bottom ? 1e6 : 0)
      + 1e4 * [...dots, ...labels].filter((other) => overlap(box, other)).length
      + 60 * others.filter((other) => fromLine(other, box, dot) < DOT + 1).length
      + 4 * Math.max(0, CLEAR - (d3.min(others, (other) => distance(other, box)) ?? Infinity) + distance(dot, box));
    points.forEach((point, index) => {
      const dot = dots[index], w = wide(text(point), "600 13px system-ui") / 2 + 2, h = 8;
      const others = dots.filter((other) => distance(other, dot) > 1);
      const places = d3.range(0, 120, 6).flatMap((away) => WAYS.map((turn) => {
        const box = {x: dot.x + Math.cos(turn) * (DOT + w + 3 + away), y: dot.y + Math.sin(turn) * (DOT + h + 2 + away), w, h};
        const end = {x: box.x - Math.cos(turn) * (w + 1), y: box.y - Math.sin(turn) * (h + 1)};
        return {...box, point, away, end, far: away + far(box, dot, others)};
      }));
      labels.push(places[d3.leastIndex(places, (place) => place.far)]);
    });
    return labels;
  };

  function points(canvas, {points, memory_limit_bytes: limit}) {
    const width = widthOf(canvas), height = 340;
    const margin = {marginLeft: 52, marginRight: 20, marginTop: 30, marginBottom: 42};
    const [memoryName, memorySize] = memoryUnit(limit);
    const times = points.map((p) => p.step_time_s);
    const [timeName, timeSize] = timeUnit(Math.max(...times));
    const spread = Math.max(Math.max(...times) - Math.min(...times), 0.02 * Math.max(...times));
    const xDomain = [Math.min(...times) - 0.08 * spread, Math.max(...times) + 0.28 * spread].map((v) => v / timeSize);
    const sizes = points.flatMap((p) => [p.peak_memory_bytes, p.peak_memory_upper_bytes]).concat(limit);
    const room = Math.max(Math.max(...sizes) - Math.min(...sizes), 0.04 * limit);
    const yDomain = [Math.min(...sizes) - 0.14 * room, Math.max(...sizes) + 0.06 * room].map((v) => v / memorySize);
    const x = d3.scaleLinear(xDomain, [margin.marginLeft, width - margin.marginRight]);
    const y = d3.scaleLinear(yDomain, [height - margin.marginBottom, margin.marginTop]);
    const backends = [...new Set(points.map((p) => p.backend))];
    const named = (p) => (p.backend === backends[0] ? `${p.rank}` : `${p.rank} ${p.backend}`);
    const place = (p) => ({x: x(p.step_time_s / timeSize), y: y(p.peak_memory_bytes / memorySize)});
    const frame = {left: margin.marginLeft, right: width - 4, top: margin.marginTop, bottom: height - margin.marginBottom};
    const labels = placed(points, place, named, frame);
    const frontier = points.filter((p) => p.on_frontier).sort((a, b) => a.step_time_s - b.step_time_s);
    const at = {x: (p) => p.step_time_s / timeSize, y: (p) => p.peak_memory_bytes / memorySize};
    const label = {x: (l) => x.invert(l.x), y: (l) => y.invert(l.y)};
    plot(canvas, {
      width, height, ...margin,
      x: {domain: xDomain, label: `step time, ${timeName}, est. \u2192`, ticks: Math.max(3, Math.floor(width / 110)), grid: true},
      y: {domain: yDomain, label: `\u2191 peak memory, ${memoryName}, est.`, ticks: 5, grid: true},
      symbol: {domain: backends, range: SYMBOLS.slice(0, backends.length)},
      marks: [
        Plot.ruleY([limit / memorySize], {stroke: "var(--bad)", strokeWidth: 2, strokeDasharray: "6 4"}),
        Plot.text([`limit ${memory(limit)}`], {y: limit / memorySize, frameAnchor: "right", dy: -9, textAnchor: "end", fill: "var(--bad)", fontWeight: 600, text: (d) => d}),
        Plot.line(frontier, {...at, curve: "step-after", stroke: "var(--axis)", strokeWidth: 1.5}),
        Plot.ruleX(points, {x: at.x, y1: at.y, y2: (p) => p.peak_memory_upper_bytes / memorySize, stroke: "var(--axis)"}),
        Plot.link(labels.filter((l) => l.away > 0), {x1: (l) => at.x(l.point), y1: (l) => at.y(l.point), x2: (l) => x.invert(l.end.x), y2: (l) => y.invert(l.end.y), stroke: "var(--axis)"}),
        Plot.dot(points, {...at, symbol: "backend", r: 6, fill: (p) => colour(backends.indexOf(p.backend)), stroke: "var(--surface)", strokeWidth: 1.5}),
        Plot.text(labels, {...label, text: (l) => named(l.point), fontSize: 13, fontWeight: 600, fill: "currentColor", stroke: "var(--surface)", strokeWidth: 4}),
        tip(points, at, (p) => `${p.rank}  ${p.backend}: ${p.label}\n${duration(p.step_time_s)} (${p.step_time_range_s.map(duration).join(" to ")})\n${memory(p.peak_memory_bytes)}, up to ${memory(p.peak_memory_upper_bytes)}`),
      ],
    });
  }
  const colour = (index) => `var(--c${(index % 12) + 1})`;

  // ---- memory of each stage ----
  function stages(canvas, {stages, points, memory_limit_bytes: limit}) {
    const last = stages[stages.length - 1].last_stage;
    const name = (row) => last === 0 ? "every GPU" : row.first_stage === row.last_stage ? `stage ${row.first_stage}` : `stages ${row.first_stage}\u2013${row.last_stage}`;
    const keys = [...canvas.closest("figure").querySelectorAll(".legend li")];
    const marks = new Map(keys.map((key) => [key.lastChild.textContent, key.firstElementChild]));
    const ground = (term) => `var(--${[...marks.get(term).classList].find((name) => name !== "swatch")})`;
    const upper = points[0].peak_memory_upper_bytes;
    const [unit, size] = memoryUnit(limit);
    const fullest = stages.reduce((a, b) => (b.total_bytes > a.total_bytes ? b : a));
    const width = widthOf(canvas);
    const marginLeft = widest(stages.map(name)) + 14, marginRight = 16;
    const rowHeight = stages.length > 24 ? 20 : 30;
    const most = 1.01 * Math.max(limit, upper, ...stages.map((row) => row.total_bytes)) / size;
    const pixels = (bytes) => (bytes / size / most) * (width - marginLeft - marginRight);
    const parts = stages.flatMap((row) => {
      let start = 0;
      return row.terms.filter((t) => t.value > 0).map((term) => {
        const part = {row, name: term.name, value: term.value, start: start / size, end: (start += term.value) / size};
        const free = pixels(term.value) - 8;
        part.text = wide(term.name) <= free ? term.name : wide("W") <= free ? marks.get(term.name).textContent : "";
        return part;
      });
    });
    const x = {x1: "start", x2: "end", y: (p) => name(p.row)};
    plot(canvas, {
      width, height: stages.length * rowHeight + 74, marginLeft, marginRight, marginTop: 26, marginBottom: 42,
      x: {domain: [0, most], label: `memory, ${unit}, est. \u2192`, ticks: Math.max(3, Math.floor(width / 120)), grid: true},
      y: {domain: stages.map(name), label: null, tickSize: 0, padding: 0.18},
      marks: [
        Plot.barX(parts, {...x, fill: (p) => ground(p.name), insetLeft: 0.5, insetRight: 0.5}),
        Plot.text(parts, {x: (p) => (p.start + p.end) / 2, y: x.y, text: "text", fill: "var(--on-mark)"}),
        Plot.ruleY([fullest], {y: name, x1: fullest.total_bytes / size, x2: upper / size, stroke: "currentColor", strokeWidth: 1.5}),
        Plot.tickX([fullest], {x: upper / size, y: name, inset: rowHeight * 0.2, stroke: "currentColor", strokeWidth: 1.5}),
        ...limitMarks(limit / size, 12),
        tip(parts, {x: (p) => (p.start + p.end) / 2, y: x.y}, (p) => `${name(p.row)}: ${p.name}\n${memory(p.value)} of ${memory(p.row.total_bytes)}\n${percent(p.row.total_bytes / limit)} of the limit in use`),
      ],
    });
  }

  // ---- a step, part after part ----
  function time(canvas, {time}) {
    const total = time[time.length - 1].start_s + time[time.length - 1].seconds;
    const [unit, size] = timeUnit(total);
    const width = widthOf(canvas), narrow = width < NARROW;
    const marginLeft = narrow ? 14 : widest(time.map((p) => p.name)) + 14;
    const words = (p) => `${duration(p.seconds)}  ${percent(p.seconds / total)}`;
    const marginRight = widest(time.map(words)) + 16;
    const rowHeight = narrow ? 46 : 28;
    const {mark, fill} = patterns();
    const x = {x1: (p) => p.start_s / size, x2: (p) => (p.start_s + p.seconds) / size, y: "name"};
    const end = (p) => Math.max(p.start_s, p.start_s + p.seconds) / size;
    const inset = narrow ? {insetTop: 18} : {};
    plot(canvas, {
      width, height: time.length * rowHeight + 62, marginLeft, marginRight, marginTop: 12, marginBottom: 42,
      x: {domain: [0, Math.max(...time.map(end), total / size)], label: `time, ${unit}, est. \u2192`, ticks: Math.max(3, Math.floor(width / 140)), grid: true},
      y: {domain: time.map((p) => p.name), label: null, tickSize: 0, padding: narrow ? 0.28 : 0.22, axis: narrow ? null : "left"},
      marks: [
        mark,
        Plot.barX(time, {...x, ...inset, fill: (p) => PLAIN[p.kind] ?? fill(p.kind), stroke: (p) => `var(--kind-${p.kind})`, strokeWidth: 1}),
        Plot.text(time, {x: end, y: "name", text: words, textAnchor: "start", dx: 7, dy: narrow ? 9 : 0, fill: "currentColor"}),
        narrow ? Plot.text(time, {frameAnchor: "left", x: 0, y: "name", text: "name", textAnchor: "start", dy: -9, fill: "currentColor"}) : null,
        tip(time, {x: (p) => (p.start_s + p.seconds / 2) / size, y: "name"}, (p) => `${p.name} (${p.kind})\n${words(p)}\nfrom ${duration(p.start_s)} to ${duration(p.start_s + p.seconds)}`),
      ],
    });
  }

  // ---- the pipeline ----
  const letter = (chunk) => (chunk >= 26 ? letter(Math.floor(chunk / 26) - 1) : "") + String.fromCharCode(97 + (chunk % 26));
  function schedule(canvas, {schedule}) {
    if (!schedule) return;
    const {slots, stages} = schedule;
    const end = Math.max(...slots.map((s) => s.end_s));
    const [unit, size] = timeUnit(end);
    const width = widthOf(canvas);
    const chunks = Math.max(...slots.map((s) => s.chunk)) + 1;
    const stacked = chunks > 1 && stages <= 8; // a slot has room for its chunk below its micro-batch
    const rowHeight = stacked ? 38 : stages <= 8 ? 30 : stages <= 16 ? 22 : 14;
    const marginLeft = stages <= 24 ? widest([`stage ${stages - 1}`]) + 14 : 34;
    const inner = width - marginLeft - 12;
    // All stages work in turns from the last first steady slot to the first one of a cool-down.
    const begins = (phase) => d3.rollups(slots.filter((s) => s.phase === phase), (of) => d3.min(of, (s) => s.start_s), (s) => s.stage).map(([, at]) => at);
    const drain = d3.min(begins("cool-down")) ?? end, full = Math.min(d3.max(begins("steady")) ?? drain, drain);
    const rows = d3.range(stages);
    const {mark, fill} = patterns();
    const row = rowHeight * 0.88;
    const roomy = (d3.median(slots, (s) => s.end_s - s.start_s) / end) * inner >= 6;
    const drawn = slots.map((s) => {
      const number = `${s.micro_batch + 1}`, part = chunks > 1 ? letter(s.chunk) : "";
      const fits = (text) => ((s.end_s - s.start_s) / end) * inner >= wide(text, "11px system-ui") + 4 && rowHeight >= 22;
      const text = stacked ? (fits(number) ? `${number}\n${part}` : "") : [number + part, number].find(fits) ?? "";
      return {...s, text, strong: chunks > 1 ? s.chunk % 2 === 0 : s.phase === "steady"};
    });
    const strong = (s) => `var(--slot-${s.kind})`;
    const pale = (s) => `color-mix(in srgb, var(--slot-${s.kind}) 38%, var(--surface))`;
    const rects = Object.keys(WORK_WORDS).map((kind) => Plot.barX(drawn.filter((s) => s.kind === kind), {
      x1: (s) => s.start_s / size, x2: (s) => s.end_s / size, y: "stage", insetTop: row * HEIGHT_LEFT_OUT[kind],
      fill: (s) => (s.strong ? strong(s) : pale(s)), stroke: "var(--surface)", strokeWidth: roomy ? 1 : 0, insetRight: roomy ? 0 : 0.2,
    }));
    const numbers = Object.keys(WORK_WORDS).map((kind) => Plot.text(drawn.filter((s) => s.kind === kind && s.text), {
      x: (s) => (s.start_s + s.end_s) / 2 / size, y: "stage", text: "text", fontSize: 11, lineHeight: 1, dy: (row * HEIGHT_LEFT_OUT[kind]) / 2,
      fill: (s) => (s.strong ? "var(--on-mark)" : "var(--text)"),
    }));
    const spans = [["warm-up", 0, full], ["steady state", full, drain], ["cool-down", drain, end]].filter(([, a, b]) => b > a);
    // A short warm-up is named left of its end, a short cool-down right-aligned at the end of the picture.
    const room = (text, a, b) => ((b - a) / end) * inner >= wide(text) + 8;
    const names = spans.filter(([text, a, b]) => text !== "steady state" || room(text, a, b)).map(([text, a, b]) => ({text, ...(room(text, a, b) ? {at: (a + b) / 2, anchor: "middle"} : {at: text === "warm-up" ? b : end, anchor: "end"})}));
    plot(canvas, {
      width, height: stages * rowHeight + 74, marginLeft, marginRight: 12, marginTop: 28, marginBottom: 42,
      x: {domain: [0, end / size], label: `time, ${unit}, est. \u2192`, ticks: Math.max(3, Math.floor(width / 140)), grid: true},
      y: {domain: rows, label: null, tickSize: 0, padding: 0.12, tickFormat: (s) => (stages <= 24 ? `stage ${s}` : s % 4 ? "" : `${s}`)},
      marks: [
        mark,
        Plot.barX(rows, {x1: 0, x2: end / size, y: (s) => s, fill: fill("bubble")}),
        ...rects, ...numbers,
        Plot.ruleX(spans.slice(1), {x: ([, a]) => a / size, stroke: "currentColor", strokeDasharray: "3 3", insetTop: -18}),
        ...names.map((n) => Plot.text([n], {x: n.at / size, frameAnchor: "top", textAnchor: n.anchor, dx: n.anchor === "end" ? -4 : 0, dy: -14, text: "text", fill: "currentColor", stroke: "var(--surface)", strokeWidth: 6})),
        tip(drawn, {x: (s) => (s.start_s + s.end_s) / 2 / size, y: "stage"}, (s) => `stage ${s.stage}${chunks > 1 ? `, chunk ${letter(s.chunk)}` : ""}: ${WORK_WORDS[s.kind]} of micro-batch ${s.micro_batch + 1}\n${s.phase}\n${duration(s.start_s)} to ${duration(s.end_s)}`),
      ],
    });
  }

  // ---- traffic ----
  const axisName = (axis) => axis.split(" x ").map((name) => name.toUpperCase()).join(" x ");
  function traffic(canvas, {topology: {traffic}}) {
    const rows = traffic.map((item, index) => ({...item, key: `${index}`, name: `${axisName(item.axis)}: ${item.what}`}));
    const [unit, size] = memoryUnit(Math.max(...rows.map((r) => r.sent_bytes_per_gpu)));
    const width = widthOf(canvas), narrow = width < 720;
    const words = (r) => `${memory(r.sent_bytes_per_gpu)}, ${duration(r.exposed_s)} not hidden`;
    const marginLeft = narrow ? 14 : widest(rows.map((r) => r.name)) + 14;
    const marginRight = (narrow ? 16 : widest(rows.map(words)) + 16);
    const {mark, fill} = patterns();
    const rowHeight = narrow ? 46 : 28;
    const text = {y: "key", textAnchor: "start", fill: "currentColor"};
    plot(canvas, {
      width, height: rows.length * rowHeight + 62, marginLeft, marginRight, marginTop: 12, marginBottom: 42,
      x: {label: `sent by one GPU, ${unit}, est. \u2192`, ticks: Math.max(3, Math.floor(width / 140)), grid: true, domain: [0, Math.max(...rows.map((r) => r.sent_bytes_per_gpu)) / size]},
      y: {domain: rows.map((r) => r.key), label: null, tickSize: 0, padding: 0.22, tickFormat: (key) => rows[+key].name, axis: narrow ? null : "left"},
      marks: [
        mark,
        Plot.barX(rows, {x: (r) => r.sent_bytes_per_gpu / size, y: "key", insetTop: narrow ? 18 : 0, fill: (r) => r.level === "node" ? "var(--level-node)" : fill(r.level), stroke: (r) => `var(--level-${r.level})`}),
        narrow
          ? Plot.text(rows, {...text, x: 0, text: (r) => `${axisName(r.axis)}: ${words(r)}`, dy: -12})
          : Plot.text(rows, {...text, x: (r) => r.sent_bytes_per_gpu / size, text: words, dx: 7}),
        tip(rows, {x: (r) => r.sent_bytes_per_gpu / size / 2, y: "key"}, (r) => `${r.name}\n${words(r)}\nslowest link: ${LEVEL_WORDS[r.level]}`),
      ],
    });
  }

  // ---- the map is drawn by the server; here it changes its colours ----
  function topology(figure) {
    const choices = figure.querySelector(".choices");
    if (!choices) return;
    choices.hidden = false;
    const recolour = () => {
      const chosen = choices.querySelector("input:checked");
      const groupOf = (gpu) => Number(gpu.getAttribute(`data-${chosen.value}`));
      const gpus = [...figure.querySelectorAll(".gpu")];
      const drawn = [...new Set(gpus.map(groupOf))].sort((a, b) => a - b); // each takes the next colour
      for (const gpu of gpus) {
        const group = groupOf(gpu);
        gpu.className = `gpu c${(drawn.indexOf(group) % 12) + 1}`;
        gpu.querySelector("b").textContent = group;
      }
      figure.querySelector(".chosen").textContent = chosen.closest("label").textContent.trim();
    };
    choices.addEventListener("change", recolour);
    recolour();
  }

  // ---- finding the figures, and drawing them again when their width changes ----
  const DRAW = {points, stages, time, schedule, traffic};

  function drawPlan(section) {
    const pictures = JSON.parse(section.querySelector("script.plan-pictures").textContent);
    for (const figure of section.querySelectorAll("figure[data-figure]")) {
      const draw = DRAW[figure.dataset.figure];
      if (draw) watch(figure.querySelector(".canvas"), (canvas) => draw(canvas, pictures));
      else topology(figure);
      const details = figure.querySelector("details");
      if (details) details.open = false;
    }
  }

  const watched = new Map(); // canvas -> how to draw it

  function watch(canvas, draw) {
    let width = canvas.clientWidth;
    draw(canvas);
    watched.set(canvas, draw);
    const observer = new ResizeObserver(() => {
      if (!canvas.isConnected) { // a part of the page was replaced
        observer.disconnect();
        watched.delete(canvas);
      } else if (!printing && Math.abs(canvas.clientWidth - width) >= 2) {
        width = canvas.clientWidth;
        draw(canvas);
      }
    });
    observer.observe(canvas);
  }

  const print = (now) => () => {
    printing = now;
    for (const [canvas, draw] of watched) draw(canvas);
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));

  function drawAll(root) {
    const sections = [...root.querySelectorAll("section.plan"), ...(root.matches?.("section.plan") ? [root] : [])];
    for (const section of sections.filter((s) => !s.dataset.drawn)) {
      section.dataset.drawn = "yes";
      drawPlan(section);
    }
  }

  document.addEventListener("htmx:load", (event) => drawAll(event.detail.elt)); // a part of the page was replaced
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => drawAll(document));
  else drawAll(document);
})();
