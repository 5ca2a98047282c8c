// One call with the Vercel AI SDK: ai.mjs URL MODEL CALL, where a CALL is one of those below.
// It prints what came as text, or how it was refused.

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
