// Small things that everything here is built with. Text comes into the page as text alone: no string is ever taken for HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export const find = (id) => document.getElementById(id);

const shown = new Map();

/** Put new content into an element, if what it shows has changed; `make` gives the children. */
export function show(id, value, make) {
  const words = JSON.stringify(value);
  if (shown.get(id) === words) return;
  shown.set(id, words);
  find(id).replaceChildren(...[make(value)].flat());
}

/** Show everything again next time. */
export function forget() {
  shown.clear();
}

export function number(value, digits = 1) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Always with that many digits, so that what changes often does not jump. */
export function fixed(value, digits) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${number(100 * share, digits)} %`;
}

export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  return whole < 172800 ? `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min` : `${Math.floor(whole / 86400)} days`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (count < 10000) return `${Math.round(count)} B`;
  return count < 1e7 ? `${number(count / 1e3, 0)} kB` : `${number(count / 1e6, 1)} MB`;
}

/** A definition list's terms and values, without those that are empty; a third place names a class. */
export function facts(pairs) {
  const given = pairs.filter(([, value]) => value !== "" && value !== null);
  return given.flatMap(([term, value, kind]) => [element("dt", {}, term), element("dd", { class: kind }, value)]);
}

/** A table; columns are [heading, whether it holds numbers]. On a narrow screen every cell says its heading. */
export function table(caption, columns, rows) {
  const head = columns.map(([name, numeric]) => element("th", { scope: "col", class: numeric && "number", role: "columnheader" }, name));
  const body = rows.map((row) =>
    element("tr", { role: "row" }, row.map((cell, place) => element("td", { role: "cell", class: columns[place][1] && "number", "data-label": columns[place][0] }, cell))),
  );
  return element(
    "table",
    { role: "table", "aria-label": caption },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, head)),
    element("tbody", { role: "rowgroup" }, body),
  );
}
