// The chat: sends messages, shows replies while they are written, and keeps conversations.

import { accepted, askForKey, kept, prepare } from "../shared/browser.js";
import { element, find } from "../shared/build.js";
import { add, alternatives, branch, choose, imported, messages, newConversation, newMessage, remove, save, stored } from "./conversations.js";
import { Growing, figures, messageView, readingWords } from "./messages.js";
import { ask, stream } from "./stream.js";

const SETTINGS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const STATE_MS = 2000; // between two looks at the dashboard's state while a reply is written
const CLOCK_MS = 500;
const TOKENS = "dovetail-tokens";
const browser = () => localStorage;

let all = [newConversation()];
let shown = all[0];
let running = null; // the controller of the reply that is being written
let keeps = true;
let served = [];

// -- the server -----------------------------------------------------------------

async function meet() {
  try {
    const { data } = await ask("v1/models");
    accepted();
    notice("");
    served = data;
    find("models").replaceChildren(...served.map(({ id }) => element("option", { value: id }, id)));
    find("models-field").hidden = served.length < 2;
    present();
    await look();
  } catch (error) {
    if (error.status === 401) return askForKey();
    notice(error.status ? error.message : "The server does not answer.");
    setTimeout(meet, 5000);
  }
}

/** The model of the conversation; the first one if its own is no longer served. */
const model = () => served.find(({ id }) => id === shown.settings.model) ?? served[0];

function present() {
  if (!served.length) return;
  find("model").textContent = `· ${model().id}`;
  find("models").value = model().id;
  for (const name of SETTINGS) find(name).placeholder = model().sampling?.[name] ?? "";
}

/** The dashboard's state, of the conversation's model or the one that was used last; null where there is none. */
async function look(own = false) {
  const asked = own && served.length > 1 ? `?model=${encodeURIComponent(model().id)}` : "";
  const state = await ask(`dashboard/state${asked}`).catch(() => null);
  find("to-dashboard").hidden = state === null;
  return state;
}

// -- replies --------------------------------------------------------------------

async function reply(parent, before) {
  const conversation = shown;
  const { settings } = conversation;
  const asked = messages(conversation, before);
  const message = add(conversation, newMessage("assistant", "", { plain: settings.speculate === false }), parent);
  const body = { messages: asked, return_progress: true, dovetail: { drafted: true, speculate: settings.speculate !== false } };
  if (served.length > 1) body.model = model().id;
  for (const name of SETTINGS) if (settings[name] !== undefined) body[name] = settings[name];
  const controller = (running = new AbortController());
  busy(true);
  draw();
  const growing = new Growing(find("log").lastElementChild, message);
  const began = performance.now();
  const clock = setInterval(() => {
    growing.figures.textContent = message.count ? figures(message) : message.reading === null ? "" : readingWords(message, (performance.now() - began) / 1000);
    follow();
  }, CLOCK_MS);
  const learn = async () => {
    const state = await look(true);
    message.alone = state?.speedup?.alone_tokens_per_s ?? message.alone;
    message.why = state?.speculation.why ?? message.why;
  };
  const looking = setInterval(learn, STATE_MS);
  learn();
  try {
    await stream(body, message, controller.signal, (pieces, rest = []) => {
      if (message.count) message.began ??= performance.now();
      growing.add(pieces, rest);
      follow();
    });
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else if (error.status === 401) askForKey();
    else message.error = error.status === undefined ? "The connection was lost. Retry sends the request again." : error.message;
  }
  clearInterval(clock);
  clearInterval(looking);
  if (message.metrics && !message.plain) await learn();
  running = null;
  const saved = keep(conversation);
  draw();
  busy(false);
  find("status").textContent = message.error || `The reply has ended. ${figures(message)}`;
  await saved;
}

function busy(is) {
  if (document.activeElement === find("stop")) find("input").focus(); // what is hidden loses the focus
  find("send").hidden = is;
  find("stop").hidden = !is;
  find("log").setAttribute("aria-busy", String(is));
  for (const id of ["new", "import", "delete"]) find(id).disabled = is;
}

function send(event) {
  event?.preventDefault();
  const content = find("input").value;
  if (running || !content.trim() || !valid()) return;
  find("input").value = "";
  add(shown, newMessage("user", content), shown.leaf);
  reply(shown.leaf);
}

const actions = {
  retry(number) {
    if (!running && valid()) reply(shown.nodes[number].parent, number);
  },
  choose(number, words) {
    if (running) return;
    choose(shown, number);
    keep(shown);
    draw();
    const button = (label) => find("log").querySelector(`[data-number="${number}"] [aria-label${label}]:not([disabled])`);
    (button(`="${words}"`) ?? button('$="version"')).focus();
  },
  edit(number) {
    if (running) return;
    const { content, parent } = shown.nodes[number];
    const text = element("textarea", { rows: 3, "aria-label": "Edited message" });
    text.value = content;
    const cancel = element("button", { type: "button" }, "Cancel");
    cancel.addEventListener("click", draw);
    const form = element("form", { class: "editing" }, text, element("div", { class: "row" }, element("button", {}, "Send"), cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!text.value.trim() || !valid()) return;
      add(shown, newMessage("user", text.value), parent);
      reply(shown.leaf);
    });
    text.addEventListener("keydown", (pressed) => pressed.key === "Escape" && draw());
    find("log").querySelector(`[data-number="${number}"]`).replaceChildren(form);
    text.focus();
  },
};

// -- what is shown --------------------------------------------------------------

function draw() {
  const place = (number) => [number, alternatives(shown, number)];
  const tokens = find("tokens").checked;
  find("log").replaceChildren(...branch(shown).map((number) => messageView(shown.nodes[number], { place: place(number), tokens, actions })));
  find("empty").hidden = shown.leaf !== null;
  find("export").disabled = shown.leaf === null;
  find("conversations").replaceChildren(...all.filter((one) => one.leaf !== null).map(entry));
  find("scroll").scrollTop = find("scroll").scrollHeight;
}

function entry(conversation) {
  const button = element("button", { type: "button", "aria-current": conversation === shown && "true" }, conversation.title || "Untitled");
  button.addEventListener("click", () => !running && open(conversation));
  return element("li", {}, button);
}

function open(conversation) {
  shown = conversation;
  for (const name of ["system", ...SETTINGS]) find(name).value = shown.settings[name] ?? "";
  find("speculate").checked = shown.settings.speculate !== false;
  present();
  list(false);
  draw();
  find("input").focus();
}

/** Stay at the end while a reply grows, unless the reader has scrolled up. */
function follow() {
  const box = find("scroll");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
}

function notice(words) {
  find("notice").hidden = words === "";
  find("notice").textContent = words;
}

function list(is) {
  find("main").dataset.list = is;
  find("list-switch").setAttribute("aria-expanded", String(is));
}

// -- conversations --------------------------------------------------------------

async function keep(conversation) {
  if (!all.includes(conversation)) return;
  all = [conversation, ...all.filter((one) => one !== conversation)];
  if (!keeps || conversation.leaf === null) return;
  await save(structuredClone(conversation)).catch(cannotKeep);
}

function cannotKeep(error) {
  keeps = false;
  find("kept").textContent = `This browser cannot store conversations (${error.message}): export what you need before you close the page.`;
}

function begin() {
  all = [newConversation(), ...all.filter((one) => one.leaf !== null)];
  open(all[0]);
}

async function discard() {
  if (shown.leaf === null || !confirm(`Delete the conversation “${shown.title || "Untitled"}”?`)) return;
  if (keeps) await remove(shown).catch(cannotKeep);
  all = all.filter((one) => one !== shown);
  begin();
}

function exportShown() {
  const content = JSON.stringify({ title: shown.title, messages: messages(shown) }, null, 2);
  const address = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  element("a", { href: address, download: "conversation.json" }).click();
  setTimeout(() => URL.revokeObjectURL(address));
}

async function importFile() {
  const [file] = find("file").files;
  find("file").value = "";
  if (!file) return;
  try {
    const found = imported(await file.text());
    for (const conversation of found) {
      all.unshift(conversation);
      await keep(conversation);
    }
    notice("");
    open(found[0]);
  } catch (error) {
    notice(`${file.name}: ${error.message}`);
  }
}

/** Whether the settings can be sent; the browser shows what is wrong with one that cannot. */
function valid() {
  const wrong = SETTINGS.map(find).find((field) => !field.checkValidity());
  if (wrong === undefined) return true;
  find("settings").open = true;
  wrong.reportValidity();
  return false;
}

function settle() {
  const { settings } = shown;
  for (const name of SETTINGS) {
    if (find(name).value === "") delete settings[name];
    else settings[name] = Number(find(name).value);
  }
  settings.system = find("system").value;
  settings.speculate = find("speculate").checked;
  if (served.length > 1) settings.model = find("models").value;
  present();
  keep(shown);
}

find("composer").addEventListener("submit", send);
find("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
find("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
find("settings").addEventListener("change", settle);
find("tokens").checked = kept(browser, TOKENS) === "1";
find("tokens").addEventListener("change", (event) => {
  kept(browser, TOKENS, event.target.checked ? "1" : "");
  if (!running) draw();
});
find("new").addEventListener("click", begin);
find("delete").addEventListener("click", discard);
find("export").addEventListener("click", exportShown);
find("import").addEventListener("click", () => find("file").click());
find("file").addEventListener("change", importFile);
find("list-switch").addEventListener("click", () => list(find("main").dataset.list !== "true"));
prepare(meet);
all = await stored().catch((error) => (cannotKeep(error), []));
begin();
await meet();
