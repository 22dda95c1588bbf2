// What each technique did to the graph, where, why not elsewhere; and what the page rests on.

function drawTechniques() {
  if (!DATA.techniques.length && !DATA.not_needed.length) return;
  const parts = DATA.techniques.map((t) => {
    const saved = t.saved[1] - t.saved[0], share = t.flops[0] ? t.flops[1] / t.flops[0] - 1 : 0;
    const sites = t.changed.length ? el("details", { class: "plain" },
      el("summary", {}, `${plural(t.changed.length, "site")} changed`),
      el("ul", { class: "plain" }, t.changed.map(([name, why]) => el("li", {}, el("code", {}, name), why && `: ${why}`))))
      : el("p", { class: "soft" }, "It changed nothing.");
    const left = t.left_alone.length ? el("details", { class: "plain" },
      el("summary", {}, `${plural(t.left_alone.length, "site")} left alone, and why`),
      el("ul", { class: "plain" }, t.left_alone.map(([name, why]) => el("li", {}, el("code", {}, name), `: ${why}`)))) : null;
    const diff = t.diff ? el("details", { class: "plain" },
      el("summary", {}, `diff of the graph: ${plural(t.added, "line")} added, ${t.removed} removed`)) : null;
    diff?.addEventListener("toggle", () => { if (diff.open && !diff.querySelector("pre")) diff.append(diffOf(t)); });
    return [el("h3", {}, t.name), el("p", {},
      `Gradients ${t.preserves}. FLOPs ${flops(t.flops[0])} to ${flops(t.flops[1])} (${share > 0 ? "+" : ""}${percent(share)}); `
      + `kept for the backward ${saved ? `${bytes(Math.abs(saved))} ${saved < 0 ? "less" : "more"}` : "as before"}.`),
      sites, left, diff];
  });
  const idle = DATA.not_needed.length ? [el("h3", {}, "Not needed"),
    el("ul", { class: "plain" }, DATA.not_needed.map(([name, why]) => el("li", {}, el("code", {}, name), `: ${why}`)))] : [];
  section("techniques", "Techniques",
    lead("In the order in which they rewrite the joint graph of forward and backward."), parts, idle);
}

function diffOf(technique) {
  const lines = technique.diff.split("\n").map((line) => el("span", {
    class: line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "add" : line.startsWith("-") ? "drop" : null,
    style: "display:block" }, line || " "));
  const more = technique.diff_left_out ? el("p", { class: "soft" },
    `${technique.diff_left_out.toLocaleString("en-US")} more lines: opt.dump(folder) writes them all.`) : null;
  return el("div", {}, el("pre", { tabindex: 0 }, el("code", {}, lines)), more);
}

function drawBasis() {
  const list = (items) => el("ul", { class: "plain" }, items.map((item) => el("li", {}, item)));
  const facts = DATA.environment.map(([name, value]) => el("tr", {}, td("soft", name), td(null, value)));
  const environment = el("table", {}, el("tbody", {}, facts));
  const json = el("details", { class: "plain" }, el("summary", {}, "JSON (schema 1)"));
  json.addEventListener("toggle", () => {
    if (!json.open || json.querySelector("pre")) return;
    json.append(el("pre", { tabindex: 0 }, el("code", {}, JSON.stringify(REPORT, null, 1))));
  });
  const save = el("button", { type: "button", onclick: () => {
    const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(REPORT, null, 1)], { type: "application/json" })),
      download: "report.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  } }, "Save JSON");
  section("basis", "What this rests on", el("div", { class: "columns" },
    el("div", {}, el("h3", {}, "Assumptions"), list(DATA.assumptions)), el("div", {}, el("h3", {}, "Environment"), environment)),
    DATA.notes.length ? [el("h3", {}, "Notes"), list(DATA.notes)] : null, json, save);
}
