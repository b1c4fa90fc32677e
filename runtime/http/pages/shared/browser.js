// What both pages need of a browser: choices that are kept, the colours, and the API key.

import { find } from "./build.js";

const KEY = "dovetail-key";
const COLOURS = "dovetail-theme";

/** Read what a storage keeps under a name, or write it; null where the browser keeps nothing. */
export function kept(storage, name, value) {
  try {
    if (value === undefined) return storage().getItem(name);
    return value === "" ? storage().removeItem(name) : storage().setItem(name, value);
  } catch {
    return null; // what is chosen holds for this page
  }
}

const tab = () => sessionStorage;
const browser = () => localStorage;
let key = kept(tab, KEY) ?? "";

/** The headers of a request, with the key if there is one. */
export function access() {
  return key ? { Authorization: `Bearer ${key.replace(/[^\x21-\x7e]/g, "?")}` } : {}; // keys are ASCII, and a header takes nothing else
}

/** Show the form for the key, after a request was answered with 401. */
export function askForKey() {
  if (key) find("key-words").textContent = "The server does not accept this key. Please try another one.";
  setKey("");
  find("main").hidden = true;
  find("key-form").hidden = false;
  find("key").focus();
}

/** Hide the form: the server has accepted the key. */
export function accepted() {
  const focused = find("key-form").contains(document.activeElement);
  find("key-form").hidden = true;
  find("main").hidden = false;
  if (focused) find("main").focus();
}

/** Have the form call `retry` with a new key, and the switch of colours work. */
export function prepare(retry) {
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value.trim());
    find("key").value = "";
    retry();
  });
  find("theme").value = kept(browser, COLOURS) ?? "";
  dress(find("theme").value);
  find("theme").addEventListener("change", (event) => dress(event.target.value));
}

function setKey(value) {
  key = value;
  kept(tab, KEY, key);
}

function dress(colours) {
  if (colours) document.documentElement.dataset.theme = colours;
  else delete document.documentElement.dataset.theme;
  kept(browser, COLOURS, colours);
}
