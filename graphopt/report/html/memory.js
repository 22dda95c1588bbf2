// Memory over the step: live bytes by category, from the same storages that the prediction adds up, at several batch sizes.

const CATEGORIES = DATA.memory.categories; // of which the first is drawn at the bottom
const colourOf = (category) => `var(--${category.replace(" ", "-")})`;
const OPTIMIZER_WIDTH = 0.1; // of the chart: it has many operators, and little to see

/** Live bytes per category and row, and the peak, at batch number `k`. */
function liveBytes(profile, k) {
  const rows = profile.steps.length;
  const series = CATEGORIES.map(() => new Float64Array(rows + 1));
  profile.blocks.forEach(([, , category, born, last, size]) => {
    series[category][born] += profile.sizes[size][k];
    series[category][last + 1] -= profile.sizes[size][k];
  });
  const total = new Float64Array(rows);
  for (const one of series) {
    for (let row = 0, sum = 0; row < rows; row++) {
      sum += one[row];
      one[row] = sum;
      total[row] += sum;
    }
  }
  let peak = 0;
  for (let row = 1; row < rows; row++) if (total[row] > total[peak]) peak = row;
  return { series, total, peak };
}

/** Where each row begins, from 0 to 1: phases are as wide as they have rows, the optimizer no wider than a tenth. */
function places(phases, rows) {
  const widths = phases.map((phase) => phase.end - phase.start);
  const others = phases.reduce((sum, phase, i) => sum + (phase.name === "optimizer" ? 0 : widths[i]), 0) || 1;
  const hasOptimizer = phases.some((phase) => phase.name === "optimizer");
  const starts = new Float64Array(rows + 1);
  let from = 0;
  phases.forEach((phase, i) => {
    const share = phase.name === "optimizer" ? OPTIMIZER_WIDTH : (widths[i] / others) * (hasOptimizer ? 1 - OPTIMIZER_WIDTH : 1);
    phase.from = from;
    phase.to = from + share;
    for (let row = phase.start; row < phase.end; row++) starts[row] = from + (share * (row - phase.start)) / widths[i];
    from += share;
  });
  starts[rows] = from;
  return starts;
}

/** One row per column of the chart, that with the most bytes in it, so that no peak is lost. */
function columnsOf(starts, total, count) {
  const found = [];
  for (let row = 0; row < total.length; row++) {
    const column = Math.min(count - 1, Math.floor(starts[row] * count));
    const last = found[found.length - 1];
    if (last && last.column === column) {
      if (total[row] > total[last.row]) last.row = row;
    } else found.push({ column, row, from: starts[row] });
  }
  return found;
}

function aliveAt(profile, row, k, count) {
  return profile.blocks
    .filter(([, , , born, last]) => born <= row && row <= last)
    .map((block) => ({ block, size: profile.sizes[block[5]][k] }))
    .sort((a, b) => b.size - a.size)
    .slice(0, count);
}

function drawMemory() {
  const memory = DATA.memory;
  if (!memory) return;
  if (!memory.profiles) {
    section("memory", "Memory", lead(memory.reason));
    return;
  }
  const state = { profile: memory.profiles.length - 1, k: memory.batches.indexOf(memory.batch), capacity: memory.capacity };
  const chart = el("div", { class: "chart", tabindex: 0, role: "group",
    "aria-label": "Memory over the step; arrow keys move the cursor" });
  const sentence = el("p", { "aria-live": "polite" }), legend = el("ul", { class: "legend" }),
    largest = el("div", { class: "scroll" });
  const batchText = el("output", {}, String(memory.batch));
  const controls = el("div", { class: "controls" });
  if (memory.profiles.length > 1) controls.append(el("fieldset", {}, memory.profiles.map((profile, i) => el("label", {},
    el("input", { type: "radio", name: "profile", value: i, checked: i === state.profile,
      onchange: () => { state.profile = i; draw(); } }), profile.label))));
  if (memory.batches.length > 1) controls.append(el("label", {}, "batch",
    el("input", { type: "range", id: "batch", min: 0, max: memory.batches.length - 1, step: 1, value: state.k,
      "aria-label": "batch size",
      oninput: (event) => { state.k = Number(event.target.value); draw(); } }), batchText));
  controls.append(el("label", {}, "device memory, GiB",
    el("input", { type: "number", id: "capacity", min: 0, step: "any", style: "width: 6.5em",
      value: memory.capacity ? Number((memory.capacity / 2 ** 30).toPrecision(4)) : "",
      oninput: (event) => { state.capacity = Number(event.target.value) * 2 ** 30 || null; draw(); } })));
  const fixed = memory.batches.length > 1 ? null : el("p", { class: "soft" }, memory.reason);
  section("memory", "Memory over a step",
    lead("Bytes alive while each operator runs, from the first of the forward to the optimizer's last. ",
      "Hover, or use the arrow keys, to see what is alive and why."),
    controls, fixed, chart, legend, sentence, el("h3", {}, "Largest at the peak"), largest);

  function draw() {
    const profile = memory.profiles[state.profile];
    const live = liveBytes(profile, state.k);
    const peak = live.total[live.peak], batch = memory.batches[state.k];
    batchText.value = String(batch);
    chart.replaceChildren(picture(profile, live, state));
    const fits = !state.capacity ? "" : peak <= state.capacity
      ? `Fits into ${bytes(state.capacity)}, ${bytes(state.capacity - peak)} to spare.`
      : `Does not fit into ${bytes(state.capacity)}: ${bytes(peak - state.capacity)} too much.`;
    sentence.replaceChildren(el("strong", {}, `Peak ${bytes(peak)} at batch ${batch}`),
      `, ${where(profile, live.peak)}. ${fits}`);
    legend.replaceChildren(...CATEGORIES.map((name, c) => [name, live.series[c][live.peak]]).filter(([, size]) => size)
      .map(([name, size]) => el("li", {}, el("i", { style: `background:${colourOf(name)}` }), name + " ",
        el("b", {}, bytes(size)))));
    largest.replaceChildren(tensorTable(profile, aliveAt(profile, live.peak, state.k, 12)));
  }
  draw();
}

function where(profile, row) {
  const phase = profile.phases.find(({ start, end }) => start <= row && row < end);
  return `in the ${phase.name}, at ${DATA.memory.texts[profile.steps[row]]}`;
}

function tensorTable(profile, alive) {
  const text = (index) => DATA.memory.texts[index];
  const rows = alive.map(({ block: [name, module, category, , , , why, shape], size }) => el("tr", {},
    td("number", bytes(size)), td("name", text(name), origin(text(name), text(module))), td("shape", text(shape)),
    td("shape", el("i", { class: "swatch", style: `background:${colourOf(CATEGORIES[category])}` }), CATEGORIES[category]),
    td("why", text(why))));
  return titled(["size", "tensor", "shape", "what it is", "why it is alive"], (title) => title === "size", rows);
}

/** The module that a tensor comes from, unless its name says so. */
const origin = (name, module) => module && !name.includes(module) && el("span", { class: "soft" }, ` ${module}`);

function picture(profile, live, state) {
  const width = Math.max(340, Math.min(1074, document.getElementById("sections").clientWidth - 60)),
    height = width < 560 ? 300 : 340;
  const peak = live.total[live.peak];
  const shownLimit = state.capacity && state.capacity < 3 * peak;
  const most = Math.max(peak, shownLimit ? state.capacity : 0) * 1.12;
  const [unit, size] = unitOf(most, BYTE_UNITS);
  const f = frame("Memory over a step", width, height, { left: 52, right: 12, top: 46, bottom: 30 },
    { from: 0, to: 1 },
    { from: 0, to: most / size, ticks: ticks(most / size), text: (v) => v.toLocaleString("en-US"), label: `${unit} alive` });
  const starts = places(profile.phases, profile.steps.length);
  const columns = columnsOf(starts, live.total, 700);
  const base = new Float64Array(columns.length);
  live.series.forEach((series, c) => {
    if (!columns.some(({ row }) => series[row])) return;
    let over = "", under = "";
    columns.forEach(({ from, row }, i) => {
      const next = i + 1 < columns.length ? columns[i + 1].from : 1;
      const top = base[i] + series[row] / size;
      over += `L${f.across(from).toFixed(1)},${f.up(top).toFixed(1)}H${f.across(next).toFixed(1)}`;
      under = `L${f.across(next).toFixed(1)},${f.up(base[i]).toFixed(1)}H${f.across(from).toFixed(1)}` + under;
      base[i] = top;
    });
    f.root.append(svg("path", { d: "M" + over.slice(1) + under + "Z", fill: colourOf(CATEGORIES[c]) }));
  });
  for (const phase of profile.phases) {
    if (phase.from) f.root.append(svg("line",
      { class: "axis", x1: f.across(phase.from), x2: f.across(phase.from), y1: f.top, y2: f.bottom + 6 }));
    f.root.append(svg("text", { x: f.across((phase.from + phase.to) / 2), y: f.bottom + 20, "text-anchor": "middle" },
      phase.name));
  }
  if (shownLimit) {
    const y = f.up(state.capacity / size);
    f.root.append(svg("line", { class: "limit", x1: f.left, x2: f.right, y1: y, y2: y }));
    f.root.append(svg("text", { class: "limit-text", x: f.right, y: y - 6, "text-anchor": "end" },
      `device: ${bytes(state.capacity)}`));
  }
  const x = f.across(starts[live.peak]), y = f.up(peak / size), leftward = x > (f.left + f.right) / 2;
  f.root.append(svg("circle", { cx: x, cy: y, r: 4, fill: "var(--ink)" }));
  f.root.append(svg("text", { class: "strong", x: x + (leftward ? -9 : 9), y: y - 7, "text-anchor": leftward ? "end" : "start" },
    `peak ${bytes(peak)}`));
  addCursor(f, profile, live, state, columns);
  return f.root;
}

function addCursor(f, profile, live, state, columns) {
  const line = svg("line", { class: "cursor", y1: f.top, y2: f.bottom, visibility: "hidden" });
  f.root.append(line);
  let current = columns.findIndex(({ row }) => row === live.peak);
  const show = (index, clientX, clientY) => {
    current = Math.max(0, Math.min(columns.length - 1, index));
    const { row, from } = columns[current];
    line.setAttribute("x1", f.across(from));
    line.setAttribute("x2", f.across(from));
    line.setAttribute("visibility", "visible");
    const box = f.root.getBoundingClientRect();
    const rows = aliveAt(profile, row, state.k, 6).map(({ block, size }) => el("tr", {},
      td("number", bytes(size)), td("name", DATA.memory.texts[block[0]]), td("soft", [
        !DATA.memory.texts[block[0]].includes(DATA.memory.texts[block[1]]) && DATA.memory.texts[block[1]],
        DATA.memory.texts[block[6]],
      ].filter(Boolean).join(": "))));
    showTip(clientX ?? box.left + (f.across(from) / f.root.viewBox.baseVal.width) * box.width,
      clientY ?? box.top + box.height / 3,
      el("strong", {}, `${bytes(live.total[row])} `), where(profile, row), el("table", {}, el("tbody", {}, rows)));
  };
  const find = (event) => {
    const part = (at(f.root, event).x - f.left) / (f.right - f.left);
    const next = columns.findIndex(({ from }) => from > part);
    return (next < 0 ? columns.length : next) - 1;
  };
  const hide = () => { line.setAttribute("visibility", "hidden"); hideTip(); };
  f.root.addEventListener("pointermove", (event) => show(find(event), event.clientX, event.clientY));
  f.root.addEventListener("pointerleave", hide);
  queueMicrotask(() => {
    const holder = f.root.parentElement;
    holder.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -40, PageDown: 40 }[event.key];
      if (!by) return;
      event.preventDefault();
      show(current + by);
    };
    holder.onblur = hide;
  });
}
