// ask.mjs CLIENT QUESTION URL MODEL: asks one question with a JavaScript client, and prints the answer or the refusal. CLIENT is one
// of those below. QUESTION is `plain`, `stream`, or `tool`: a question whose answer needs a call of a tool.

const [name, question, url, model] = process.argv.slice(2);
const result = "rain over Ulm";
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const messages = [{ role: "user", content: "hello" }];

async function openai() {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "placeholder" });
}

const clients = {
  async openai_chat() {
    const { completions } = (await openai()).chat;
    if (question === "stream") {
      let text = "";
      for await (const chunk of await completions.create({ model, messages, stream: true })) text += chunk.choices[0].delta.content ?? "";
      return text;
    }
    if (question === "plain") return (await completions.create({ model, messages })).choices[0].message.content;
    const tools = [{ type: "function", function: { name: "weather", parameters: city } }];
    const { message } = (await completions.create({ model, messages, tools })).choices[0];
    const answer = { role: "tool", tool_call_id: message.tool_calls[0].id, content: result };
    return (await completions.create({ model, messages: [...messages, message, answer], tools })).choices[0].message.content;
  },

  async openai_responses() {
    const { responses } = await openai();
    if (question === "stream") {
      let text = "";
      for await (const event of await responses.create({ model, input: "hello", stream: true })) {
        if (event.type === "response.output_text.delta") text += event.delta;
      }
      return text;
    }
    if (question === "plain") return (await responses.create({ model, input: "hello" })).output_text;
    const tools = [{ type: "function", name: "weather", parameters: city }];
    const { output } = await responses.create({ model, input: messages, tools });
    const { call_id } = output.find((item) => item.type === "function_call");
    const input = [...messages, ...output, { type: "function_call_output", call_id, output: result }];
    return (await responses.create({ model, input, tools })).output_text;
  },

  async openai_embeddings() {
    return `${(await (await openai()).embeddings.create({ model, input: "hello" })).data.length} vector`;
  },

  async anthropic_messages() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: "placeholder" }).messages;
    const first = { model, max_tokens: 64, messages };
    if (question === "stream") return await client.stream(first).finalText();
    if (question === "plain") return (await client.create(first)).content[0].text;
    const tools = [{ name: "weather", input_schema: city }];
    const { content } = await client.create({ ...first, tools });
    const { id } = content.find((block) => block.type === "tool_use");
    const answer = { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: result }] };
    const second = { ...first, tools, messages: [...messages, { role: "assistant", content }, answer] };
    return (await client.create(second)).content[0].text;
  },

  async ai_chat() {
    const { createOpenAI } = await import("@ai-sdk/openai");
    return await ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: "placeholder" }).chat(model));
  },

  async ai_responses() {
    const { createOpenAI } = await import("@ai-sdk/openai");
    return await ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: "placeholder" }).responses(model));
  },

  async ai_messages() {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return await ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: "placeholder" })(model));
  },
};

async function ai(chosen) {
  const { generateText, jsonSchema, stepCountIs, streamText, tool } = await import("ai");
  if (question === "stream") {
    let text = "";
    let refusal;
    const stream = streamText({ model: chosen, prompt: "hello", onError: ({ error }) => (refusal = error) });
    for await (const part of stream.textStream) text += part;
    if (refusal) throw refusal;
    return text;
  }
  if (question === "plain") return (await generateText({ model: chosen, prompt: "hello" })).text;
  const weather = tool({ inputSchema: jsonSchema(city), execute: async () => result });
  return (await generateText({ model: chosen, prompt: "hello", tools: { weather }, stopWhen: stepCountIs(3) })).text;
}

try {
  console.log(await clients[name]());
} catch (error) {
  console.log(`${error.constructor.name}: ${error.message}`);
  process.exitCode = 1;
}
