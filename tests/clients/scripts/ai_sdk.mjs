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
const prompt = "What colour is the sky?";
const common = { model, prompt, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const once = { dovetail: { parallel_tool_calls: false } };
const check = (holds, what) => {
  if (!holds) throw new Error(JSON.stringify(what));
};

const inputSchema = z.object({ colour: z.enum(colours) });
const paint = tool({ description: "Paint the wall.", inputSchema });
const calling = { ...common, tools: { paint }, toolChoice: "required", providerOptions: once };
const called = await generateText(calling);
check(called.toolCalls.length === 1, called.toolCalls);
check(colours.includes(called.toolCalls[0].input.colour), called.toolCalls);
const streamed = streamText(calling);
const calls = await streamed.toolCalls;
check(calls[0].input.colour === called.toolCalls[0].input.colour, calls);
const output = Output.object({ schema: inputSchema });
const written = await generateText({ ...common, output });
check(colours.includes(written.output.colour), written.output);
const { version } = JSON.parse(readFileSync(`${process.env.NODE_MODULES}/ai/package.json`));
console.log(JSON.stringify({ version, what: "a tool call whole and streamed, an object by a schema" }));
