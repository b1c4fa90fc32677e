// Asks the server again and again, as long as somebody looks; keeps the key in this tab; says when nobody answers, and who came back.

import { element, find, forget } from "./build.js";
import { showAll, showTree } from "./panels.js";

const MOST_WAIT_MS = 15000;
const PATIENCE_MS = 8000;
const KEY = "dovetail-key";
const THEME = "dovetail-theme";
const MOST_NOTICES = 8;

let timer = null;
let asking = false;
let paused = false;
let failures = 0;
let everyMs = 1000;
let picture = null;

function kept(storage, name, value) {
  try {
    if (value === undefined) return storage.getItem(name);
    return value === "" ? storage.removeItem(name) : storage.setItem(name, value);
  } catch {
    return null; // a browser that keeps nothing: what is chosen holds for this page
  }
}

let key = kept(sessionStorage, KEY) ?? "";

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
    const headers = key ? { Authorization: `Bearer ${key.replace(/[^\x21-\x7e]/g, "?")}` } : {}; // keys are ASCII, and a header takes nothing else
    answer = await fetch(`dashboard/state${session ? `?session=${session}` : ""}`, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const said = await answer.json();
    if (answer.status === 401) return askForKey();
    if (!answer.ok) return failed(said.error?.message ?? `status ${answer.status}`);
    told(said);
  } catch (error) {
    if (answer !== undefined && !(error instanceof SyntaxError)) console.error(error);
    failed(answer === undefined ? "the server does not answer" : "the server’s answer cannot be read");
  }
}

function told(said) {
  if (failures) notice("The connection is back.");
  if (picture !== null && said.server.began !== picture.server.began) notice(`The HTTP server was started again (pid ${said.server.pid}).`);
  if (picture !== null && said.coordinator.epoch !== picture.coordinator.epoch) notice(`The coordinator was started again (pid ${said.coordinator.pid}).`);
  failures = 0;
  picture = said;
  everyMs = 1000 * said.every_s;
  say("live", "live");
  const keyed = find("key-form").contains(document.activeElement);
  find("key-form").hidden = true;
  find("main").hidden = false;
  if (keyed) find("main").focus();
  delete find("main").dataset.stale;
  showAll(said);
  again(everyMs);
}

function failed(why) {
  if (!failures) notice(`Lost: ${why}.`);
  failures += 1;
  if (picture !== null) find("main").dataset.stale = "";
  say("lost", `${why}; trying again`);
  again(Math.min(MOST_WAIT_MS, everyMs * 2 ** Math.min(failures - 1, 6)));
}

function askForKey() {
  if (key) find("key-words").textContent = "This server does not take that key. Please try another one.";
  key = "";
  kept(sessionStorage, KEY, "");
  find("main").hidden = true;
  find("key-form").hidden = false;
  find("key").focus();
  say("paused", "waiting for the API key");
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

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  kept(localStorage, THEME, theme);
}

find("pause").addEventListener("click", pause);
find("theme").value = kept(localStorage, THEME) ?? "";
dress(find("theme").value);
find("theme").addEventListener("change", (event) => dress(event.target.value));
find("session").addEventListener("change", () => again(0));
find("tree-details").addEventListener("toggle", () => picture !== null && showTree(picture));
document.addEventListener("visibilitychange", () => again(0));
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  kept(sessionStorage, KEY, key);
  forget();
  again(0);
});
turn();
