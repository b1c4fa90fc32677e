// Messages as elements: text or tokens, thoughts folded, tool calls as cards, figures, and the actions of each.

import { element, fixed, number, span } from "../shared/build.js";
import { copyButton, rendered } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };
const ENDS = { length: "cut off at the maximum length", stopped: "stopped", tool_calls: "calls a tool" };

/** A message; `actions` has `edit`, `retry`, `choose`; `place` is [its number, all that could stand there]. */
export function messageView(message, { place, tokens, actions }) {
  const [at, others] = place;
  const turn = others.indexOf(at);
  const step = (sign, words, to) => {
    const button = element("button", { type: "button", class: "small", "aria-label": words, disabled: to === undefined }, sign);
    button.addEventListener("click", () => actions.choose(to, words));
    return button;
  };
  const [before, after] = [step("‹", "Previous version", others[turn - 1]), step("›", "Next version", others[turn + 1])];
  const branches = others.length > 1 ? [before, element("span", { class: "quiet" }, `${turn + 1} of ${others.length}`), after] : [];
  const again = message.role === "assistant" ? action("Retry", () => actions.retry(at)) : message.role === "user" ? action("Edit", () => actions.edit(at)) : null;
  return element(
    "li",
    { class: `message ${message.role}`, "data-number": at },
    element("h3", { class: message.role === "user" ? "hidden" : "" }, NAMES[message.role]),
    thoughtsOf(message, tokens),
    element("div", { class: "text" }, bodyOf(message, tokens)),
    message.calls.map(callCard),
    message.error && element("p", { class: "error" }, message.error),
    element("p", { class: "figures quiet" }, figures(message)),
    element("div", { class: "actions" }, message.content && copyButton(() => message.content), again, branches),
  );
}

function action(words, act) {
  const button = element("button", { type: "button", class: "small" }, words);
  button.addEventListener("click", act);
  return button;
}

const piecesOf = (message, section) => message.pieces.filter(([of]) => of === section);

function bodyOf(message, tokens) {
  if (tokens && piecesOf(message, "content").length) return element("p", { class: "tokens" }, piecesOf(message, "content").map(pieceView));
  if (message.role === "assistant") return rendered(message.content);
  return message.role === "tool" ? element("pre", { tabindex: 0 }, message.content) : element("p", { class: "typed" }, message.content);
}

function thoughtsOf(message, tokens) {
  if (!message.thought) return null;
  const shown = tokens && piecesOf(message, "thought").length ? piecesOf(message, "thought").map(pieceView) : message.thought;
  return element("details", { class: "thoughts" }, element("summary", {}, "Thoughts"), element("p", { class: "tokens" }, shown));
}

function pieceView([, text, kind]) {
  return element("span", { class: kind === 1 ? "drafted" : kind === 0 ? "own" : null }, text);
}

function callCard({ name, arguments: text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // still being written
  }
  return element("div", { class: "call" }, element("h4", {}, `Tool call: ${name}`), element("pre", { tabindex: 0 }, shown), element("p", { class: "quiet" }, "This page runs no tools."));
}

/** The line below a reply: its speed, and what the draft gained. */
export function figures({ role, metrics, alone, why, plain, count, passes, began, finish }) {
  if (role !== "assistant") return "";
  const rate = metrics ? metrics.tokens_per_s : count > 1 && began ? (1000 * (count - 1)) / (performance.now() - began) : null;
  if (!rate) return ENDS[finish] ?? "";
  const times = alone ? rate / alone : null;
  const undrafted = plain || metrics?.drafted_tokens === 0;
  const tau = metrics?.tau ?? (passes ? count / passes : null);
  const parts = [
    `${fixed(rate, 1)} tokens/s`,
    undrafted ? ["without a draft", !plain && why].filter(Boolean).join(": ") : times && `${fixed(times, 1)} times as fast as without a draft (predicted)`,
    !undrafted && tau && `${fixed(tau, 1)} tokens a pass`,
    metrics && `${number(metrics.completion_tokens)} tokens`,
    metrics?.draft_failure && "the draft failed",
    ENDS[finish],
  ];
  return parts.filter(Boolean).join(" · ");
}

/** What happens before the first token. */
export function readingWords(message, seconds) {
  const { reading } = message;
  if (!reading) return `reading the prompt, ${span(seconds)}`;
  const { total, processed, cache = 0, time_ms } = reading;
  const read = processed - cache;
  const left = read > 0 ? ((total - processed) * time_ms) / read / 1000 : null;
  const words = [`reading ${number(processed)} of ${number(total)} tokens`, cache && `${number(cache)} from the cache`, left !== null && `about ${span(left)} left`];
  return words.filter(Boolean).join(", ");
}

/** A reply while it is written: new pieces are appended, so that nothing jumps. */
export class Growing {
  constructor(item, message) {
    this.message = message;
    this.figures = item.querySelector(".figures");
    this.text = item.querySelector(".text");
    this.body = element("p", { class: "tokens", "aria-busy": "true" });
    this.text.replaceChildren(this.body);
    this.tail = element("span", {});
    this.calls = element("div", {});
    this.text.after(this.calls);
  }

  add(pieces, rest) {
    this.tail.remove();
    for (const piece of pieces) (piece[0] === "thought" ? this.#thoughts() : this.body).append(pieceView(piece));
    if (rest.length) {
      this.tail.textContent = rest.map(([, text]) => text).join("");
      (rest[0][0] === "thought" ? this.#thoughts() : this.body).append(this.tail);
    }
    if (this.message.calls.length) this.calls.replaceChildren(...this.message.calls.map(callCard));
  }

  #thoughts() {
    if (!this.thoughts) {
      this.thoughts = element("p", { class: "tokens" });
      this.text.before(element("details", { class: "thoughts" }, element("summary", {}, "Thoughts"), this.thoughts));
    }
    return this.thoughts;
  }
}
