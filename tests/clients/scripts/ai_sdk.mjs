// The AI SDK (npm `ai`): a tool call, and a streamed object by a schema.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const load = createRequire(`${process.env.NODE_MODULES}/`);
const { generateText, streamText, tool, Output } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { z } = load("zod");

const provider = createOpenAICompatible({
  name: "dovetail",
  baseURL: process.env.DOVETAIL_URL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = provider(process.env.DOVETAIL_MODEL);
const colours = ["red", "blue", "green"];
const common = { model, prompt: "What colour is the sky?", temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const check = (holds, what) => {
  if (!holds) throw new Error(JSON.stringify(what));
};

const paint = tool({ description: "Paint the wall.", inputSchema: z.object({ colour: z.enum(colours) }) });
const called = await generateText({ ...common, tools: { paint }, toolChoice: "required" });
check(called.toolCalls.length === 1 && colours.includes(called.toolCalls[0].input.colour), called.toolCalls);
const streamed = streamText({ ...common, tools: { paint }, toolChoice: "required" });
const calls = await streamed.toolCalls;
check(calls[0].input.colour === called.toolCalls[0].input.colour, calls);
const schema = z.object({ colour: z.enum(colours) });
const written = await generateText({ ...common, output: Output.object({ schema }) });
check(colours.includes(written.output.colour), written.output);
const { version } = JSON.parse(readFileSync(`${process.env.NODE_MODULES}/ai/package.json`));
console.log(JSON.stringify({ version, what: "a tool call whole and streamed, an object by a schema" }));
