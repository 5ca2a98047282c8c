// ai.mjs URL MODEL CALL: makes one call with the Vercel AI SDK, where CALL is one of those below. It prints the received text, or
// the refusal.

import { createOpenAI } from "@ai-sdk/openai";
import { streamText } from "ai";

const [url, model, call] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "placeholder" });
const calls = { chat: openai.chat, responses: openai.responses };

let refusal;
const stream = streamText({ model: calls[call](model), prompt: "hello", onError: ({ error }) => (refusal = error) });
let text = "";
for await (const part of stream.textStream) text += part;
console.log(refusal ? `${refusal.name}: ${refusal.message}` : text);
process.exitCode = refusal ? 1 : 0;
