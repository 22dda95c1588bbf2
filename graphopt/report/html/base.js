// What all parts of the page share: the data, elements, amounts with units, axes, and the note beside the pointer.

const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORT = DATA.report;

/** An element with attributes and children; a string child is text, never markup. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}

/** A cell of a table, of a kind that has a style, or of none. */
const td = (kind, ...children) => el("td", { class: kind }, children);

/** What a section is about. */
const lead = (...children) => el("p", { class: "lead" }, children);

/** A table of rows under titles, of which those of numbers are to the right. */
function titled(titles, isNumber, rows) {
  const heads = titles.map((title, k) => el("th", { class: isNumber(title, k) ? "number" : null }, title));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

/** A section with its heading, and its entry in the table of contents. */
function section(id, title, ...children) {
  document.getElementById("contents").append(el("a", { href: "#" + id }, title));
  const made = el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...children);
  document.getElementById("sections").append(made);
  return made;
}

const BYTE_UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const FLOP_UNITS = [["PFLOPs", 1e15], ["TFLOPs", 1e12], ["GFLOPs", 1e9], ["MFLOPs", 1e6], ["kFLOPs", 1e3], ["FLOPs", 1]];

const unitOf = (largest, units) => units.find(([, size]) => largest >= size) || units[units.length - 1];

function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

function amount(count, units) {
  const [name, size] = unitOf(Math.abs(count), units);
  return (size === 1 ? Math.round(count).toLocaleString("en-US") : digits(count / size)) + " " + name;
}

const bytes = (count) => amount(count, BYTE_UNITS);
const flops = (count) => amount(count, FLOP_UNITS);
const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
const flopsOrNone = (count) => (count ? flops(count) : "–");
const percent = (part) => {
  const value = 100 * part;
  return (!value || Math.abs(value) >= 0.05 ? value.toFixed(1) : value.toPrecision(1)) + " %";
};

/** Round values for an axis from 0 to at least `most`, in the unit's own numbers. */
function ticks(most, count = 5) {
  const rough = most / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let k = 0; k * step <= most * 1.0001; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** A frame with a grid, labelled axes and the two scales; `x` and `y` are {from, to, ticks, text, label}. */
function frame(title, width, height, margin, x, y) {
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const right = width - margin.right, bottom = height - margin.bottom;
  const across = (value) => margin.left + ((value - x.from) / (x.to - x.from || 1)) * (right - margin.left);
  const up = (value) => bottom - ((value - y.from) / (y.to - y.from || 1)) * (bottom - margin.top);
  for (const value of y.ticks) {
    root.append(svg("line", { class: "grid", x1: margin.left, x2: right, y1: up(value), y2: up(value) }));
    root.append(svg("text", { x: margin.left - 8, y: up(value) + 4, "text-anchor": "end" }, y.text(value)));
  }
  for (const value of x.ticks || []) {
    root.append(svg("line", { class: "axis", x1: across(value), x2: across(value), y1: bottom, y2: bottom + 4 }));
    root.append(svg("text", { x: across(value), y: bottom + 18, "text-anchor": "middle" }, x.text(value)));
  }
  root.append(svg("line", { class: "axis", x1: margin.left, x2: right, y1: bottom, y2: bottom }));
  root.append(svg("text", { x: margin.left, y: margin.top - 12 }, y.label));
  if (x.label) root.append(svg("text", { x: (margin.left + right) / 2, y: height - 4, "text-anchor": "middle" }, x.label));
  return { root, across, up, left: margin.left, right, top: margin.top, bottom };
}

/** Where a pointer is in an svg's own coordinates. */
function at(root, event) {
  const box = root.getBoundingClientRect();
  const view = root.viewBox.baseVal;
  return { x: ((event.clientX - box.left) / box.width) * view.width, y: ((event.clientY - box.top) / box.height) * view.height };
}

const TIP = document.getElementById("tip");

function showTip(clientX, clientY, ...children) {
  TIP.replaceChildren(...children.flat(Infinity));
  TIP.hidden = false;
  const { width, height } = TIP.getBoundingClientRect();
  const beside = clientX + 18 + width > innerWidth ? clientX - 18 - width : clientX + 18;
  TIP.style.left = Math.max(8, Math.min(beside, innerWidth - width - 8)) + "px";
  TIP.style.top = Math.max(8, Math.min(clientY + 14, innerHeight - height - 8)) + "px";
}

const hideTip = () => { TIP.hidden = true; };

/** A table whose columns are {title, number, name, value(row), show(row)}; a click on a heading sorts by it. */
function sortable(rows, columns, { first = null, decorate = () => {} } = {}) {
  const body = el("tbody");
  const made = new Map();
  const drawRow = (row) => {
    if (!made.has(row)) {
      const cells = columns.map((c) => td([c.number && "number", c.kind].filter(Boolean).join(" ") || null, c.show(row)));
      made.set(row, el("tr", {}, cells));
      decorate(row, made.get(row));
    }
    return made.get(row);
  };
  const heads = columns.map((column) =>
    el("th", { scope: "col", class: column.number ? "number" : null },
      el("button", { type: "button", title: column.about, onclick: () => sort(column) }, column.title)));
  let shown = rows, by = null, sign = 1;
  const compare = (a, b) => {
    const [one, two] = [by.value(a), by.value(b)];
    return sign * (typeof one === "string" ? one.localeCompare(two) : (one ?? -Infinity) - (two ?? -Infinity));
  };
  const draw = () => body.replaceChildren(...(by ? [...shown].sort(compare) : shown).map(drawRow));
  function sort(column) {
    sign = by === column ? -sign : column.number ? -1 : 1;
    by = column;
    heads.forEach((head, k) => head.setAttribute("aria-sort",
      columns[k] !== by ? "none" : sign > 0 ? "ascending" : "descending"));
    draw();
  }
  if (first) sort(first);
  else draw();
  return {
    root: el("table", {}, el("thead", {}, el("tr", {}, heads)), body),
    filter: (keep) => { shown = rows.filter(keep); draw(); },
    rows: made,
  };
}
