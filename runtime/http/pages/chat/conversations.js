// Conversations: trees of messages, whose branches are edited questions and repeated replies. They are kept in this browser.

const STORE = "conversations";
const TITLE = 60; // characters

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), settings: {}, nodes: [], leaf: null };
}

export function newMessage(role, content = "", more = {}) {
  return { role, content, thought: "", calls: [], pieces: [], count: 0, passes: 0, finish: "", error: "", metrics: null, ...more };
}

/** Add a message below another one (null: at the beginning) and make its branch the one that is shown. */
export function add(conversation, message, parent) {
  conversation.nodes.push({ ...message, parent });
  conversation.leaf = conversation.nodes.length - 1;
  conversation.updated = Date.now();
  conversation.title ||= message.content.trim().split("\n")[0].slice(0, TITLE);
  return conversation.nodes.at(-1);
}

/** The numbers of the messages of the branch that is shown, the first one first. */
export function branch({ nodes, leaf }) {
  const path = [];
  for (let at = leaf; at !== null; at = nodes[at].parent) path.push(at);
  return path.reverse();
}

/** The numbers of the messages that could stand in a message's place. */
export function alternatives({ nodes }, number) {
  return [...nodes.keys()].filter((other) => nodes[other].parent === nodes[number].parent);
}

/** Show the latest branch below a message. */
export function choose(conversation, number) {
  let at = number;
  for (let below = at; below !== -1; below = conversation.nodes.findLastIndex(({ parent }) => parent === at)) at = below;
  conversation.leaf = at;
}

/** The messages of a branch in OpenAI's format, up to a message and without it if `before` is given. */
export function messages(conversation, before = null) {
  const shown = branch(conversation).map((number) => [number, conversation.nodes[number]]);
  const until = shown.findIndex(([number]) => number === before);
  const path = (until < 0 ? shown : shown.slice(0, until)).map(([, node]) => message(node));
  const { system } = conversation.settings;
  return system ? [{ role: "system", content: system }, ...path] : path;
}

function message({ role, content, thought, calls, tool_call_id }) {
  return {
    role,
    content: content || !calls.length ? content : null,
    ...(thought && { reasoning_content: thought }),
    ...(calls.length && { tool_calls: calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })) }),
    ...(tool_call_id && { tool_call_id }),
  };
}

/** The conversations of an exported file; fails with a sentence if there are none. */
export function imported(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`, { cause: error });
  }
  const all = Array.isArray(value) && value.every((one) => Array.isArray(one?.messages)) ? value : [Array.isArray(value) ? { messages: value } : value];
  return all.map((one) => {
    if (!Array.isArray(one?.messages) || !one.messages.length) throw new Error("The file has no messages: it must be a list of messages, or an object with `messages`.");
    const conversation = { ...newConversation(), title: String(one.title ?? "") };
    for (const { role, content, reasoning_content, tool_calls, tool_call_id } of one.messages) {
      const words = typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
      const calls = (tool_calls ?? []).map(({ id, function: { name, arguments: text } }) => ({ id, name, arguments: text }));
      if (role === "system" || role === "developer") conversation.settings.system = words;
      else if (["user", "assistant", "tool"].includes(role)) add(conversation, newMessage(role, words, { thought: reasoning_content ?? "", calls, tool_call_id }), conversation.leaf);
      else throw new Error(`A message has the role ${JSON.stringify(role)}: use system, user, assistant or tool.`);
    }
    return conversation;
  });
}

// -- where they are kept ------------------------------------------------------

const settled = (request) =>
  new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });

async function store(mode) {
  const opening = indexedDB.open("dovetail", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  const database = await settled(opening);
  return database.transaction(STORE, mode).objectStore(STORE);
}

export const stored = async () => (await settled((await store("readonly")).getAll())).sort((a, b) => b.updated - a.updated);
export const save = async (conversation) => settled((await store("readwrite")).put(conversation));
export const remove = async ({ id }) => settled((await store("readwrite")).delete(id));
