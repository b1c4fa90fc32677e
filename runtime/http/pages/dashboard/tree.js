// The tree of a round: the root at the left, best children on top, the accepted path thick, and the token that the target chose behind it.

import { drawn, element, percent } from "../shared/build.js";

const ROW = 27;
const CHIP = 20;
const GAP = 26;
const EDGE = 4;
const PAD = 7;
const RANK = 16;
const MARK = 14;
const LETTER = 7.6;
const FONT = "12.5px ui-monospace, 'SF Mono', 'Cascadia Mono', 'DejaVu Sans Mono', Menlo, Consolas, monospace";
const FATES = { a: "accepted", r: "rejected", n: "not verified" };

let pen = null;

function widthOf(text) {
  pen ??= document.createElement("canvas").getContext("2d");
  if (pen === null) return LETTER * text.length;
  pen.font = `bold ${FONT}`;
  return pen.measureText(text).width;
}

/** Shapes that tell the fates apart without colour: a tick, a cross, a dot, a star. */
function mark(kind, x, y) {
  const at = (...points) => points.map(([dx, dy], place) => `${place ? "L" : "M"}${x + dx},${y + dy}`).join(" ");
  const star = [...Array(10).keys()].map((place) => {
    const [turn, far] = [(Math.PI * place) / 5, place % 2 ? 2 : 5];
    return [far * Math.sin(turn), -far * Math.cos(turn)].map((part) => Number(part.toFixed(1)));
  });
  const shapes = {
    a: at([-4, 0], [-1, 3], [4, -4]),
    r: `${at([-3.5, -3.5], [3.5, 3.5])} ${at([3.5, -3.5], [-3.5, 3.5])}`,
    n: at([0, 0], [0.1, 0]),
    b: `${at(...star)} Z`,
  };
  return drawn("path", { class: "mark", d: shapes[kind] });
}

/** A node: its rank, its text, its mark. */
function chip({ kind, text, rank, words }, x, y, width) {
  const parts = [drawn("title", {}, words), drawn("rect", { x, y: y - CHIP / 2, width, height: CHIP, rx: kind === "b" || kind === "root" ? CHIP / 2 : 4 })];
  if (rank !== "") parts.push(drawn("text", { class: "rank", x: x + PAD - 2, y: y + 3.5 }, rank));
  if (text !== "") parts.push(drawn("text", { x: x + PAD + (rank === "" ? 0 : RANK), y: y + 4.5, "xml:space": "preserve" }, text));
  if (kind !== "root") parts.push(mark(kind, x + width - PAD - 3, y));
  return drawn("g", { class: `node ${kind}` }, parts);
}

const chipWidth = ({ kind, text, rank }) => 2 * PAD + (rank === "" ? 0 : RANK) + widthOf(text) + (text === "" ? 0 : 4) + (kind === "root" ? 0 : MARK - 4);

/** The nodes as they are drawn, the root first and the bonus last. */
function nodesOf(tree) {
  const words = (text, fate) => [text, fate].filter((part) => part !== "").join(": ");
  const nodes = tree.parents.map((parent, node) => {
    const text = tree.texts?.[node] ?? "";
    const fate = `node ${node + 1}, ${FATES[tree.fates[node]]}, likelihood ${percent(tree.likely[node])}`;
    return { parent: parent + 1, kind: tree.fates[node], text, rank: String(node + 1), words: words(text, fate) };
  });
  const root = { parent: null, kind: "root", text: tree.root ?? "root", rank: "", words: words(tree.root ?? "", "root, the last committed token") };
  const bonus = { parent: tree.bonus_parent + 1, kind: "b", text: tree.bonus ?? "", rank: "", words: words(tree.bonus ?? "", "bonus, the target’s own choice") };
  return [root, ...nodes, bonus];
}

/** Columns by depth; a parent stands in the row of its first child, and every other child begins a row of its own. */
function placed(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, place) => node.parent !== null && children[node.parent].push(place));
  let row = 0;
  const visit = (place, depth) => {
    Object.assign(nodes[place], { depth, row });
    children[place].forEach((child, nth) => {
      if (nth) row += 1;
      visit(child, depth + 1);
    });
  };
  // the bonus goes first where it stands, so that what was committed is the upper line of its branch
  children.forEach((below) => below.sort((a, b) => (a === nodes.length - 1 ? -1 : b === nodes.length - 1 ? 1 : a - b)));
  visit(0, 0);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, chipWidth(node));
  const lefts = [EDGE];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + GAP));
  for (const node of nodes) Object.assign(node, { x: lefts[node.depth], y: ROW * node.row + ROW / 2 + EDGE, width: chipWidth(node) });
  return { width: lefts.at(-1) - GAP + EDGE, height: ROW * (row + 1) + 2 * EDGE };
}

function edge(from, to) {
  const [x1, x2, middle] = [from.x + from.width, to.x, to.x - GAP / 2];
  const d = from.y === to.y ? `M${x1},${from.y} H${x2}` : `M${x1},${from.y} H${middle - 6} Q${middle},${from.y} ${middle},${from.y + 6} V${to.y - 6} Q${middle},${to.y} ${middle + 6},${to.y} H${x2}`;
  return drawn("path", { class: `edge ${to.kind}`, d });
}

export function drawTree(tree) {
  if (tree === null) return element("p", { class: "quiet" }, "No round lately.");
  const nodes = nodesOf(tree);
  const { width, height } = placed(nodes);
  const label = `Tree of ${tree.offered} nodes: ${tree.verified} verified, ${tree.accepted} accepted. The list below has them one by one.`;
  const edges = nodes.slice(1).map((node) => [edge(nodes[node.parent], node), node.kind]);
  const strong = edges.filter(([, kind]) => kind === "a" || kind === "b");
  const weak = edges.filter(([, kind]) => kind !== "a" && kind !== "b");
  return drawn(
    "svg",
    { width: Math.ceil(width), height: Math.ceil(height), viewBox: `0 0 ${Math.ceil(width)} ${Math.ceil(height)}`, role: "img", "aria-label": label },
    [...weak, ...strong].map(([path]) => path),
    nodes.map((node) => chip(node, node.x, node.y, node.width)),
  );
}

export function treeWords(tree) {
  if (tree === null) return "";
  const more = tree.offered > tree.parents.length ? `, the best ${tree.parents.length} drawn` : "";
  const drafted = tree.offered ? `${tree.offered} nodes offered, ${tree.verified} verified, ${tree.accepted} accepted${more}` : "nothing was drafted";
  return `session ${tree.session}, round ${tree.round}: ${drafted}${tree.hit ? ", a hit" : ""}`;
}

export function treeList(tree) {
  if (tree === null) return [];
  return nodesOf(tree)
    .slice(1)
    .map((node) => element("li", {}, node.kind === "b" ? node.words : `${node.words}, below ${node.parent ? `node ${node.parent}` : "the root"}`));
}

export function legend() {
  const kinds = [
    ["a", "accepted"],
    ["r", "verified, rejected"],
    ["n", "not verified"],
    ["b", "bonus: the target’s own token"],
  ];
  return kinds.map(([kind, words]) =>
    element("li", {}, drawn("svg", { viewBox: "0 0 30 24", "aria-hidden": "true" }, chip({ kind, text: "", rank: "", words }, 2, 12, 26)), words),
  );
}
