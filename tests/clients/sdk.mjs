// sdk.mjs URL MODEL CALL: makes one call with a JavaScript SDK, where CALL is one of those below. It prints the received text, or
// the refusal.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, model, call] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "placeholder" });
const anthropic = new Anthropic({ baseURL: url, apiKey: "placeholder" });
const messages = [{ role: "user", content: "hello" }];

const calls = {
  async chat() {
    const stream = await openai.chat.completions.create({ model, messages, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
    return text;
  },
  async responses() {
    const stream = await openai.responses.create({ model, input: "hello", stream: true });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    return text;
  },
  async embeddings() {
    const answer = await openai.embeddings.create({ model, input: "hello" });
    return `${answer.data.length} vector`;
  },
  async messages() {
    return await anthropic.messages.stream({ model, max_tokens: 64, messages }).finalText();
  },
};

try {
  console.log(await calls[call]());
} catch (error) {
  console.log(`${error.constructor.name}: ${error.message}`);
  process.exitCode = 1;
}
