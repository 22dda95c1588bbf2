// The model's blocks from input to output: what forward and backward take, and in each its tensors and lines of code.

function drawBlocks() {
  const tensors = REPORT.tensors;
  const most = Math.max(...DATA.blocks.map((block) => block.forward + block.before), 1);
  const cuts = DATA.blocks.some((block) => block.after < block.before);
  const legend = el("ul", { class: "legend" },
    el("li", {}, el("i", { style: "background:var(--forward)" }), "forward"),
    el("li", {}, el("i", { style: "background:var(--kept)" }), cuts ? "backward, kept" : "backward"),
    cuts && el("li", {}, el("i", { style: "background:var(--cut);box-shadow:inset 0 0 0 1px var(--cut-line)" }),
      "backward, left out"));
  const head = el("div", { class: "block-head" }, el("span", {}, "block, from input to output"), el("span", {}, "trained"),
    el("span", { class: "bar-head" }, ""), el("span", { class: "sum number", style: "text-align:right" }, "FLOPs"));
  const list = DATA.blocks.map((block) => {
    const part = (name, amount) => amount > 0 && el("i", { class: name, style: `width:${(100 * amount) / most}%` });
    const saved = block.before - block.after;
    const cut = saved > 0 ? `, ${flops(saved)} left out` : "";
    const bar = el("span", { class: "bar", title: `forward ${flops(block.forward)}; backward ${flops(block.after)}${cut}` },
      part("forward", block.forward), part("kept", block.after), part("cut", saved));
    const trained = block.tensors.filter((k) => tensors[k].trained).length;
    const details = el("details", { class: "block" },
      el("summary", {}, el("span", { class: "path" }, block.name), el("span", {}, `${trained} of ${block.tensors.length}`), bar,
        el("span", { class: "sum", style: "text-align:right;font-variant-numeric:tabular-nums" },
          flops(block.forward + block.after))));
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector(".inner")) details.append(insideBlock(block));
    });
    return details;
  });
  section("blocks", "Blocks",
    lead("Products with a block's parameters, forward and backward. Open a block for its tensors, and for the ",
      "lines of code that its operators come from."),
    legend, head, list);
}

function insideBlock(block) {
  const names = block.tensors.map((k) => REPORT.tensors[k]);
  const rows = names.map((row) => el("tr", {},
    td("name", row.name), td("shape", shapeText(row)), td("number", flopsOrNone(row.weight_grad_flops)),
    td("number", flopsOrNone(row.input_grad_flops)), td(null, mark(row.trained)), td("why", row.why)));
  const titles = ["tensor", "shape", "t_dw", "t_dy", "", "why"];
  const table = el("div", { class: "scroll" }, titled(titles, (title) => title.startsWith("t_"), rows));
  const lines = block.lines.map(([line, forward, before, after]) => {
    const { file, number, code } = DATA.lines[line];
    return el("tr", {}, td("name", el("span", { class: "soft", title: file }, `${file.split("/").pop()}:${number} `), code),
      td("number", forward), td("number", after), td("number", before - after || ""));
  });
  const code = lines.length ? [el("h3", {}, "Lines of code and the operators they become"),
    el("div", { class: "scroll" }, titled(["line", "forward", "backward", "removed"], (_, k) => k > 0, lines))] : [];
  return el("div", { class: "inner" }, table, code);
}

const shapeText = (row) => row.shape.join(" × ") || "scalar";

const mark = (on) => el("span", { class: on ? "mark on" : "mark" }, on ? "trained" : "not");
