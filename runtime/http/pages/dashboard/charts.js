// Curves over time and bars, each with its figures in words beside it.

import { drawn, element } from "../shared/build.js";

const WIDTH = 600;
const HEIGHT = 100;
const GAP_S = 12; // more than two of the server's samples while no page is open

/** A curve: points are [seconds ago, value or null]; `top` is the value at the upper edge. A pause of the samples is a gap. */
export function curve({ title, value, note, points, top, topWords, window, summary }) {
  const x = (age) => (WIDTH * (1 - age / window)).toFixed(1);
  const y = (height) => (HEIGHT * (1 - Math.min(1, height / top))).toFixed(1);
  const pieces = [];
  let piece = [];
  for (const [age, height] of points) {
    const far = piece.length && piece.at(-1)[0] - age > GAP_S;
    if ((height === null || far) && piece.length) pieces.push(piece.splice(0));
    if (height !== null && age <= window) piece.push([age, height]);
  }
  if (piece.length) pieces.push(piece);
  const lines = pieces.map((p) => p.map(([age, height]) => `${x(age)},${y(height)}`).join(" L"));
  const areas = pieces.map((p, place) => `M${x(p[0][0])},${HEIGHT} L${lines[place]} L${x(p.at(-1)[0])},${HEIGHT} Z`);
  const drawing = drawn(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": summary },
    drawn("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
    drawn("path", { class: "area", d: areas.join(" ") }),
    drawn("path", { class: "curve", d: lines.map((line) => `M${line}`).join(" ") }),
  );
  return element(
    "div",
    { class: "chart" },
    element("div", { class: "chart-head" }, element("h3", {}, title), element("strong", {}, value)),
    note && element("p", { class: "quiet" }, note),
    drawing,
    element("div", { class: "axis quiet", "aria-hidden": "true" }, element("span", {}, `${window} s ago`), element("span", {}, topWords), element("span", {}, "now")),
  );
}

/** A bar of a list: what it is, how long it is, and its value in words. */
export function bar(name, share, words) {
  const filled = element("span");
  filled.style.width = `${(100 * Math.min(1, share || 0)).toFixed(1)}%`;
  return element("li", {}, element("span", {}, name), element("span", { class: "bar", "aria-hidden": "true" }, filled), element("span", { class: "value" }, words));
}

/** A round number above all values, for the upper edge of a chart. */
export function above(values) {
  const most = Math.max(0, ...values.filter((value) => value !== null));
  if (most === 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10, 20].map((factor) => factor * unit).find((edge) => edge > most);
}
