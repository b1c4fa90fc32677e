// What is shown where: each panel from its part of the server's picture.

import { bytes, element, facts, find, fixed, number, percent, show, span, table } from "../shared/build.js";
import { above, bar, curve } from "./charts.js";
import { drawTree, legend, treeList, treeWords } from "./tree.js";

const PARTS = { draft: "drafting", verify: "verifying", transport: "transport", queue: "queue", coordinator: "coordinator" };
const SHOWN_DECISIONS = 10;

export function showAll(picture) {
  showSpeculation(picture);
  show("model", [picture.model], ([model]) => (model ? `· ${model}` : ""));
  find("to-chat").hidden = !picture.server.chat;
  show("memory", memoryOf(picture), memoryBars);
  show("caches", [picture.counts.kept, picture.occupied], cachesWords);
  show("keys", picture.keys, keyTable);
  show("figures", figuresOf(picture), (figures) => figures.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))));
  show("devices", picture.workers.map(deviceOf(picture.figures.window_s)), (devices) => orNone(devices.map(curve), "No worker is registered."));
  show("speed", speedOf(picture), (curves) => curves.map(curve));
  show("positions", picture.figures.accepted_per_position, positionBars);
  show("parts", picture.figures.round_ms, partBars);
  show("sessions", picture.sessions, sessionTable);
  show("workers", picture.workers.map(workerFacts), workerCards);
  show("pairs", picture.pairs, pairTable);
  show("decisions", picture.decisions.slice(-SHOWN_DECISIONS).reverse(), (lines) => orNone(lines.map((line) => element("li", {}, line)), "None yet.", "li"));
  show("about", aboutOf(picture), facts);
  showTree(picture);
}

export function showTree({ tree, sessions }) {
  show("tree-words", [treeWords(tree)], ([words]) => words);
  show("legend", ["legend"], legend);
  show("tree", { tree }, (value) => drawTree(value.tree));
  if (find("tree-details").open) show("tree-list", { tree }, (value) => treeList(value.tree));
  const chosen = find("session").value;
  const numbers = sessions.map(({ session }) => String(session));
  if (chosen !== "" && !numbers.includes(chosen)) numbers.push(chosen);
  show("session", numbers, (all) => [element("option", { value: "" }, "the newest"), ...all.map((value) => element("option", { value }, value))]);
  find("session").value = chosen;
}

function showSpeculation({ speculation, reasons, loading, degraded, speedup, figures }) {
  find("speculation").dataset.state = speculation.fault ? "fault" : speculation.state;
  show("headline", [headline(speedup)], ([words]) => words);
  show("rates", [ratesOf(speedup, figures)], ([words]) => words);
  show("speculation-words", speculation, ({ words }) => `Speculation is ${words}`);
  const others = reasons.filter((reason) => !speculation.why.includes(reason) && !loading.some(({ words }) => words === reason));
  find("loading").hidden = loading.length === 0;
  show("loading", loading, () => loading.map(({ words, done, total }) => element("li", {}, element("label", {}, words, element("progress", { max: total, value: done })))));
  find("reasons").hidden = others.length === 0;
  show("reasons", { others, degraded }, () => others.map((reason) => element("li", {}, reason)));
}

function headline(speedup) {
  if (speedup === null) return "Speculation";
  return speedup.times < 1.05 ? "As fast as without a draft" : `${fixed(speedup.times, 1)} times as fast as without a draft`;
}

function ratesOf(speedup, { tokens_per_s }) {
  const total = `${fixed(tokens_per_s, 1)} tokens/s in all streams`;
  if (speedup === null) return total;
  return `${total}; ${fixed(speedup.tokens_per_s, 1)} in each, without a draft ${fixed(speedup.alone_tokens_per_s, 1)} (predicted)`;
}

function memoryOf({ workers, processes }) {
  const resident = [...workers, ...processes].filter(({ rss_mb }) => rss_mb);
  return resident.map(({ name, rss_mb }) => [name, rss_mb]);
}

function memoryBars(resident) {
  const most = Math.max(...resident.map(([, megabytes]) => megabytes));
  return orNone(resident.map(([name, megabytes]) => bar(name, megabytes / most, `${number(megabytes, 0)} MB`)), "Not known.", "li");
}

function cachesWords([kept, occupied]) {
  return `${percent(occupied)} of the room for sessions is in use; the caches of ${number(kept)} ended ones are kept.`;
}

function keyTable(keys) {
  const columns = [["key", false], ["replies", true], ["prompt", true], ["reply", true]];
  const rows = keys.map((own) => [own.key || "none", number(own.replies), number(own.prompt), number(own.completion)]);
  return rows.length ? table("Tokens by API key", columns, rows) : element("p", { class: "quiet" }, "No request yet.");
}

function figuresOf({ figures, counts }) {
  return [
    ["tokens/s", fixed(figures.tokens_per_s, 1)],
    ["tau", fixed(figures.tau, 2)],
    ["accepted of verified", percent(figures.acceptance_rate)],
    ["nodes a round", fixed(figures.nodes_a_round, 1)],
    ["hit: root foreseen", percent(figures.hit_rate)],
    ["rounds without a tree", percent(figures.plain_share)],
    ["sessions running", number(counts.sessions)],
    ["finished, failed so far", `${number(counts.finished)}, ${number(counts.failed)}`],
  ];
}

const deviceOf = (window) => (worker) => {
  const shares = worker.history.map(([, share]) => share);
  const mean = shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
  const doing = worker.waiting === "" ? "works" : worker.waiting === "no work" ? "has no work" : `waits for the ${worker.waiting}`;
  const ahead = worker.busy && worker.waited_for !== null && worker.waited_for < worker.busy;
  const notes = worker.busy === null ? [] : [`just now it ${doing}`, ahead && `rounds wait for ${percent(worker.waited_for)} of the time, what else it does is ahead`];
  return {
    title: [worker.name, worker.device].filter(Boolean).join(" · "),
    value: worker.busy === null ? "–" : `busy ${percent(worker.busy)}`,
    note: notes.filter(Boolean).join(" · "),
    points: worker.history,
    top: 1,
    topWords: "0 to 100 %",
    window,
    summary: `Busy share of ${worker.name} over the last ${window} seconds: ${percent(worker.busy)} now, ${percent(mean)} on average.`,
  };
};

function speedOf({ history, figures }) {
  return [
    { name: "tokens/s", points: history.tokens_per_s, value: fixed(figures.tokens_per_s, 1) },
    { name: "tau", points: history.tau, value: fixed(figures.tau, 2) },
  ].map(({ name, points, value }) => {
    const top = above(points.map(([, height]) => height));
    const window = figures.window_s;
    return { title: name, value, points, top, topWords: `0 to ${number(top, 3)}`, window, summary: `${name} over the last ${window} seconds, now ${value}; the upper edge is ${number(top, 3)}.` };
  });
}

function positionBars(shares) {
  return orNone(shares.map((share, place) => bar(`${place + 1}`, share, percent(share))), "No round with a tree lately.", "li");
}

function partBars(parts) {
  const values = Object.entries(parts);
  const sum = values.reduce((all, [, value]) => all + (value ?? 0), 0);
  if (sum === 0) return orNone([], "No round lately.", "li");
  return values.map(([name, value]) => bar(PARTS[name], value / sum, fixed(value, value < 10 ? 2 : 1)));
}

function sessionTable(sessions) {
  const columns = [["session", true], ["draft", false], ["target", false], ["length", true], ["round", true], ["tau", true], ["accepted", true], ["tokens/s", true], ["last round", true]];
  const rows = sessions.map((s) => [
    number(s.session), s.draft || "none", s.target, number(s.length), number(s.round), fixed(s.tau, 2), percent(s.acceptance_rate), fixed(s.tokens_per_s, 1),
    s.quiet_s < 2 ? "now" : `${number(s.quiet_s, 0)} s ago`,
  ]);
  return rows.length ? table("Sessions", columns, rows) : element("p", { class: "quiet" }, "No session has had a round in the last half minute.");
}

function workerFacts(worker) {
  const standing = ["standby", "leaving", "stuck"].filter((word) => worker[word]);
  const clock = worker.clock_bound_us === null ? "clock not compared yet" : `clock known within ± ${number(worker.clock_bound_us, 0)} µs`;
  const link = [
    worker.round_trip_us === null ? "round trip not measured yet" : `round trip at best ${number(worker.round_trip_us, 0)} µs`,
    clock,
    worker.bytes_per_round === null ? "no round yet" : `${bytes(worker.bytes_per_round)} a round`,
    worker.feature_bytes ? `of it ${bytes(worker.feature_bytes)} of features a token` : "",
  ];
  const place = [worker.host, worker.cores && `cores ${worker.cores}`, worker.node && `memory node ${worker.node}`, worker.threads === 1 ? "1 thread" : `${worker.threads} threads`];
  return {
    name: worker.name,
    standing,
    facts: [
      ["role", worker.roles.join(" + ")],
      ["model", worker.model],
      ["device", worker.device],
      ["place", place.filter(Boolean).join(", ")],
      ["binding", worker.binding],
      ["link", link.filter(Boolean).join(", ")],
      ["fingerprint", worker.fingerprint, "mono"],
      ["epoch", worker.epoch, "mono"],
      ["sessions", number(worker.sessions)],
      ["memory", `${number(worker.rss_mb, 0)} MB RSS`],
      ["process", `pid ${worker.pid}, ${worker.stale} stale commands dropped`],
    ],
  };
}

function workerCards(workers) {
  const cards = workers.map(({ name, standing, facts: pairs }) =>
    element(
      "article",
      { class: "card", "aria-label": `Worker ${name}` },
      element("h3", {}, name, standing.map((word) => element("span", { class: "tag" }, word))),
      element("dl", { class: "facts" }, facts(pairs)),
    ),
  );
  return orNone(cards, "No worker is registered: start one with dovetail worker, or wait until those of dovetail serve have loaded their models.");
}

function pairTable(pairs) {
  const columns = [["draft", false], ["target", false], ["drafting", false], ["rounds", true], ["hit", true], ["gamma", true], ["tokens/s", true], ["alone", true], ["predicted", true], ["hops µs", true]];
  const rows = pairs.map((p) => [
    p.draft, p.target, p.speculating ? "on" : "off", number(p.rounds), percent(p.hit_rate), fixed(p.gamma, 1),
    fixed(p.tokens_per_s, 1), fixed(p.alone_tokens_per_s, 1), fixed(p.predicted_tokens_per_s, 1), number(p.hops_us, 0),
  ]);
  return rows.length ? table("Pairs of draft and target", columns, rows) : element("p", { class: "quiet" }, "No draft and target have decoded together yet.");
}

function aboutOf({ coordinator, server, counts, shown }) {
  return [
    ["coordinator", `pid ${coordinator.pid}, up ${span(coordinator.uptime_s)}`],
    ["epoch", coordinator.epoch, "mono"],
    ["server", `dovetail ${server.version}, pid ${server.pid}`],
    ["tokens", `${number(counts.completion_tokens)} written, ${number(counts.prompt_tokens)} read, ${number(counts.reused_tokens)} of them kept from before`],
    ["rounds", `${number(counts.rounds_of_finished)} of replies that have ended`],
    ["waiting", counts.waiting || counts.opening ? `${counts.opening} prompts being read, ${counts.waiting} sessions wait for a target` : "nobody"],
    ["dropped", `${number(counts.stale)} stale, ${number(counts.refused)} refused`],
    ["texts", shown === "full" ? "shown" : "not shown (http.dashboard)"],
  ];
}

function orNone(children, words, tag = "p") {
  return children.length ? children : [element(tag, { class: "quiet none" }, words)];
}
