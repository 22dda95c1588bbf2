// Every parameter in one table: what its gradient costs, what it is worth, and why it is trained or not.

const TABLE = { rows: null };

function drawTensors() {
  const rows = REPORT.tensors.map((row, k) => ({ ...row, k, from: DATA.trained_from[k] }));
  const rated = rows.some((row) => row.importance != null);
  const columns = [
    { title: "tensor", kind: "name", value: (r) => r.name, show: (r) => [r.name, el("div", { class: "soft" }, shapeText(r))] },
    { title: "trained", value: (r) => Number(r.trained), show: (r) => mark(r.trained) },
    { title: "t_dw", about: "FLOPs of the tensor's own gradient", number: true, value: (r) => r.weight_grad_flops,
      show: (r) => flopsOrNone(r.weight_grad_flops) },
    { title: "t_dy", about: "FLOPs of passing the gradient on to the tensors below", number: true,
      value: (r) => r.input_grad_flops, show: (r) => flopsOrNone(r.input_grad_flops) },
    rated && { title: "importance", number: true, value: (r) => r.importance,
      show: (r) => (r.importance == null ? "–" : r.importance.toPrecision(2)) },
    DATA.plans.length > 0 && { title: "from", about: "the smallest budget on FLOPs that trains it, of those above", number: true,
      value: (r) => r.from, show: (r) => (r.from == null ? "–" : `${Math.round(100 * r.from)} %`) },
    { title: "why", kind: "why", value: (r) => r.why, show: (r) => r.why },
  ].filter(Boolean);
  const table = sortable(rows, columns, { decorate: (row, tr) => { tr.dataset.tensor = row.k; } });
  const count = el("output", {}, plural(rows.length, "tensor"));
  const search = el("input", { type: "search", placeholder: "name or reason", "aria-label": "filter tensors", oninput: filter });
  const status = el("select", { "aria-label": "status", onchange: filter }, el("option", { value: "" }, "any status"),
    [...new Set(rows.map((r) => r.status))].map((s) => el("option", {}, s)));
  function filter() {
    const text = search.value.toLowerCase();
    const keep = (r) => (!status.value || r.status === status.value) && (r.name + " " + r.why).toLowerCase().includes(text);
    table.filter(keep);
    count.value = `${rows.filter(keep).length} of ${rows.length} tensors`;
  }
  TABLE.rows = table.rows;
  section("tensors", "Tensors",
    lead("t_dw is what a tensor's own gradient takes, t_dy what passing it on to those below takes, in FLOPs ",
      "(2 per multiply-add) at batch ", String(REPORT.batch_size), ". ",
      DATA.plans.length > 0 && "“From” is the smallest budget above that trains it. ",
      REPORT.importance ? `Importance: ${REPORT.importance}.` : ""),
    el("div", { class: "controls" }, search, status, count),
    el("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "all tensors" }, table.root));
}
