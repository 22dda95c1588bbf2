// What each budget trains: plans that graphopt's own solver made beforehand, and the front over FLOPs, memory and value.

function drawPlans() {
  const plans = DATA.plans;
  if (!plans.length) return;
  const inForce = plans.findIndex((plan) => plan.in_force);
  let current = inForce < 0 ? plans.findIndex((plan) => plan.flops >= 0.5) : inForce;
  if (current < 0) current = plans.length - 1;
  const chart = el("div"), text = el("p", { "aria-live": "polite" }), budget = el("output");
  const slider = el("input", { type: "range", id: "budget", min: 0, max: plans.length - 1, step: 1, value: current,
    "aria-label": "budget on FLOPs",
    oninput: (event) => { current = Number(event.target.value); draw(); } });
  const cells = REPORT.tensors.map((row) => el("i",
    { class: row.shape.length < 2 ? "vector" : null, title: `${row.name} (${shapeText(row)})` }));
  const strip = el("div", { class: "strip" }, DATA.blocks.map((block) => [
    el("span", { class: "path", title: block.name }, block.name),
    el("span", { class: "cells" }, block.tensors.map((k) => cells[k]))]));
  section("budgets", "What a budget trains",
    lead("Each step of the slider is a plan that the solver made beforehand. Squares are matrices, narrow marks ",
      "are biases and norms; filled ones are trained."),
    el("div", { class: "controls" }, el("label", {}, "FLOPs of a step", slider, budget)), text, chart, strip);

  function draw() {
    const plan = plans[current];
    budget.value = `${Math.round(100 * plan.flops)} % of full training's`;
    slider.setAttribute("aria-valuetext", budget.value);
    text.replaceChildren(el("strong", {}, `${plan.trained.length} of ${DATA.trainable} tensors`),
      `, ${percent(plan.value)} of the value, in ${percent(plan.used)} of the FLOPs`
      + (plan.in_force ? ": the plan in force." : "."));
    const trained = new Set(plan.trained);
    cells.forEach((cell, k) => cell.classList.toggle("on", trained.has(k)));
    chart.replaceChildren(curve(plans, current));
  }
  draw();
}

const chartWidth = () => Math.max(300, Math.min(1074, document.getElementById("sections").clientWidth - 60));

function curve(plans, current) {
  const least = Math.max(0, Math.floor(10 * plans[0].flops) / 10);
  const f = frame("Value trained by budget", chartWidth(), 230, { left: 52, right: 16, top: 34, bottom: 42 },
    {
      from: least, to: 1, text: (v) => `${Math.round(100 * v)} %`, label: "FLOPs of a step, as a part of full training's",
      ticks: ticks(10).map((v) => v / 10).concat([0.1, 0.3, 0.5, 0.7, 0.9])
        .filter((v, i, all) => v >= least && all.indexOf(v) === i),
    },
    { from: 0, to: 1, ticks: [0, 0.25, 0.5, 0.75, 1], text: (v) => `${100 * v} %`, label: "value trained, of all tensors'" });
  const points = plans.map((plan) => `${f.across(plan.flops).toFixed(1)},${f.up(plan.value).toFixed(1)}`);
  f.root.append(svg("polyline", { class: "curve", points: points.join(" ") }));
  const x = f.across(plans[current].flops), y = f.up(plans[current].value);
  f.root.append(svg("line", { class: "cursor", x1: x, x2: x, y1: y, y2: f.bottom, "stroke-dasharray": "2 3" }));
  f.root.append(svg("circle", { cx: x, cy: y, r: 5.5, fill: "var(--accent)", stroke: "var(--card)", "stroke-width": 2 }));
  return f.root;
}

function drawPareto() {
  if (!DATA.pareto.length) return;
  const points = DATA.pareto;
  const draw = () => {
    const most = Math.max(...points.map((p) => p.peak_bytes)) * 1.1;
    const across = Math.max(1, ...points.map((p) => p.flops_ratio)) * 1.04;
    const [unit, size] = unitOf(most, BYTE_UNITS);
    const f = frame("Plans over FLOPs and peak memory", chartWidth(), 330, { left: 56, right: 24, top: 34, bottom: 42 },
      { from: 0, to: across, ticks: ticks(across).filter((v) => v <= across), text: (v) => `${Math.round(100 * v)} %`,
        label: "FLOPs of a step, as a part of full training's" },
      { from: 0, to: most / size, ticks: ticks(most / size).filter((v) => v <= most / size),
        text: (v) => v.toLocaleString("en-US"), label: `peak memory, ${unit}` });
    for (const point of points) {
      const full = point.importance === 1 && !point.recomputed && !point.compressed;
      const x = f.across(point.flops_ratio), y = f.up(point.peak_bytes / size);
      const told = [el("strong", {}, full ? "Full training" : `${percent(point.importance)} of the value`),
        el("div", {}, `${percent(point.flops_ratio)} of the FLOPs, peak ${bytes(point.peak_bytes)}`),
        el("div", { class: "soft" }, `${point.trained} trained, ${point.recomputed} segments computed again, `,
          `${point.compressed} compressed`)];
      const shape = svg(full ? "rect" : "circle", {
        ...(full ? { x: x - 7, y: y - 7, width: 14, height: 14, transform: `rotate(45 ${x} ${y})` } : { cx: x, cy: y, r: 6.5 }),
        fill: `color-mix(in oklab, var(--accent) ${Math.round(100 * point.importance)}%, var(--cut))`,
        stroke: "var(--ink)", "stroke-width": full ? 2 : 1, tabindex: 0,
        "aria-label": told.map((part) => part.textContent).join("; "),
      });
      for (const event of ["pointerenter", "focus"]) shape.addEventListener(event, () => {
        const box = shape.getBoundingClientRect();
        showTip(box.right, box.top, told);
      });
      for (const event of ["pointerleave", "blur"]) shape.addEventListener(event, hideTip);
      f.root.append(shape);
      if (full) f.root.append(svg("text", { class: "strong", x: x + (x > f.right - 120 ? -14 : 14), y: y + 4,
        "text-anchor": x > f.right - 120 ? "end" : "start" }, "full training"));
    }
    return f.root;
  };
  section("pareto", "The best plans over FLOPs and memory",
    lead("No plan here is worse than another in FLOPs, peak memory and value at once. Darker points keep more of ",
      "the value; the diamond is full training. Hover or focus a point for its figures."),
    draw());
}
