// Polls the server while the page is visible, and reports when it does not answer, and what was restarted.

import { access, accepted, askForKey, prepare } from "../shared/browser.js";
import { element, find, forget } from "../shared/build.js";
import { showAll, showTree } from "./panels.js";

const MOST_WAIT_MS = 15000;
const PATIENCE_MS = 8000;
const MOST_NOTICES = 8;

let timer = null;
let asking = false;
let paused = false;
let failures = 0;
let everyMs = 1000;
let picture = null;

async function turn() {
  timer = null;
  if (asking || paused || document.hidden) return;
  asking = true;
  try {
    await ask();
  } finally {
    asking = false;
  }
}

async function ask() {
  const session = find("session").value;
  let answer;
  try {
    answer = await fetch(`dashboard/state${session ? `?session=${session}` : ""}`, { headers: access(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const state = await answer.json();
    if (answer.status === 401) {
      askForKey();
      return say("paused", "waiting for the API key");
    }
    if (!answer.ok) return failed(state.error?.message ?? `status ${answer.status}`);
    received(state);
  } catch (error) {
    if (answer !== undefined && !(error instanceof SyntaxError)) console.error(error);
    failed(answer === undefined ? "the server does not answer" : "the server’s answer cannot be read");
  }
}

function received(state) {
  if (failures) notice("The connection is back.");
  if (picture !== null && state.server.began !== picture.server.began) notice(`The HTTP server was started again (pid ${state.server.pid}).`);
  if (picture !== null && state.coordinator.epoch !== picture.coordinator.epoch) notice(`The coordinator was started again (pid ${state.coordinator.pid}).`);
  failures = 0;
  picture = state;
  everyMs = 1000 * state.every_s;
  say("live", "live");
  accepted();
  delete find("main").dataset.stale;
  showAll(state);
  again(everyMs);
}

function failed(why) {
  if (!failures) notice(`Lost: ${why}.`);
  failures += 1;
  if (picture !== null) find("main").dataset.stale = "";
  say("lost", `${why}; trying again`);
  again(Math.min(MOST_WAIT_MS, everyMs * 2 ** Math.min(failures - 1, 6)));
}

function again(inMs) {
  clearTimeout(timer);
  timer = paused || document.hidden ? null : setTimeout(turn, inMs);
}

function say(state, words) {
  find("link").dataset.state = state;
  if (find("link-words").textContent !== words) find("link-words").textContent = words;
}

function notice(words) {
  find("notices").prepend(element("li", {}, `${new Date().toLocaleTimeString()} ${words}`));
  while (find("notices").children.length > MOST_NOTICES) find("notices").lastChild.remove();
}

function pause() {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", String(paused));
  find("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) say("paused", "paused");
  again(0);
}

find("pause").addEventListener("click", pause);
find("session").addEventListener("change", () => again(0));
find("tree-details").addEventListener("toggle", () => picture !== null && showTree(picture));
document.addEventListener("visibilitychange", () => again(0));
prepare(() => {
  forget();
  again(0);
});
turn();
