// One reply from the server, as it is streamed.

import { access } from "../shared/browser.js";
import { Pieces } from "./tokens.js";

/** An answer of the server that is an error; `status` is that of HTTP. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** What the server answers to a GET, as JSON. */
export async function ask(path) {
  return read(await fetch(path, { headers: access(), cache: "no-store" }));
}

async function read(answer) {
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(value.error?.message ?? `The server answered with status ${answer.status}.`, answer.status);
  return value;
}

/** Fill a message with the reply to a request; `changed` is called after each part, with the new pieces of its text. */
export async function stream(body, message, signal, changed) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...access(), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!answer.ok) await read(answer);
  const pieces = new Pieces();
  for await (const event of events(answer)) {
    if (event.error) throw new Refused(event.error.message, 200);
    if (event.prompt_progress) message.reading = event.prompt_progress;
    const choice = event.choices?.[0];
    if (choice === undefined) {
      changed([]);
      continue;
    }
    const { reasoning_content: thought = "", content = "", tool_calls: calls = [] } = choice.delta;
    message.thought += thought ?? "";
    message.content += content ?? "";
    for (const call of calls) addCall(message.calls, call);
    const tokens = choice.dovetail?.texts.map((text, place) => [text, choice.dovetail.drafted[place]]) ?? [];
    if (tokens.length) {
      message.passes += 1;
      message.count += tokens.length;
    }
    const found = pieces.push([["thought", thought ?? ""], ["content", content ?? ""]], tokens);
    if (choice.finish_reason) {
      message.finish = choice.finish_reason;
      found.push(...pieces.rest);
    }
    if (event.metrics?.wall_s !== undefined) message.metrics = event.metrics;
    message.pieces.push(...found);
    changed(found, choice.finish_reason ? [] : pieces.rest);
  }
}

function addCall(calls, { index, id, function: { name = "", arguments: text = "" } = {} }) {
  calls[index] ??= { id: id ?? "", name: "", arguments: "" };
  calls[index].name += name ?? "";
  calls[index].arguments += text ?? "";
}

/** The JSON of server-sent events; fails if the stream ends without its last one. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The connection was lost before the reply ended.", 0);
    const lines = (unread + value).split("\n");
    unread = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // a comment, an id, or the end of an event
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      yield event;
      if (event.error) return;
    }
  }
}
