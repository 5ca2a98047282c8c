"""ask.py CLIENT QUESTION URL MODEL: asks one question with a Python client, and prints the answer or the refusal.

A CLIENT is a function of this file. A QUESTION is `plain`, `stream`, or `tool`: a question whose answer needs a call of
a tool. Everything else is the client's default, except for the provider's address and key.
"""

import asyncio
import os
import sys

TOOL_RESULT = "rain over Ulm"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def weather(city: str) -> str:
    """Tells the weather in a city.

    Args:
        city: The name of the city.
    """
    return TOOL_RESULT


def openai_chat(question, url, model):
    import openai

    create = openai.OpenAI(base_url=f"{url}/v1", api_key="placeholder").chat.completions.create
    messages = [{"role": "user", "content": "hello"}]
    if question == "stream":
        chunks = create(model=model, messages=messages, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    if question == "plain":
        return create(model=model, messages=messages).choices[0].message.content
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    asked = create(model=model, messages=messages, tools=tools).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": TOOL_RESULT}
    return create(model=model, messages=[*messages, asked, result], tools=tools).choices[0].message.content


def openai_responses(question, url, model):
    import openai

    create = openai.OpenAI(base_url=f"{url}/v1", api_key="placeholder").responses.create
    if question == "stream":
        events = create(model=model, input="hello", stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")
    if question == "plain":
        return create(model=model, input="hello").output_text
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    items = [{"role": "user", "content": "hello"}]
    asked = create(model=model, input=items, tools=tools).output
    call = next(item for item in asked if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
    return create(model=model, input=[*items, *asked, result], tools=tools).output_text


def anthropic_messages(question, url, model):
    import anthropic

    messages = [{"role": "user", "content": "hello"}]
    client = anthropic.Anthropic(base_url=url, api_key="placeholder").messages
    if question == "stream":
        with client.stream(model=model, max_tokens=64, messages=messages) as stream:
            return "".join(stream.text_stream)
    if question == "plain":
        return client.create(model=model, max_tokens=64, messages=messages).content[0].text
    tools = [{"name": "weather", "input_schema": WEATHER}]
    asked = client.create(model=model, max_tokens=64, messages=messages, tools=tools)
    call = next(block for block in asked.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    return client.create(model=model, max_tokens=64, messages=messages, tools=tools).content[0].text


def litellm_chat(question, url, model):
    return litellm_completion(question, f"openai/{model}", api_base=f"{url}/v1")


def litellm_messages(question, url, model):
    return litellm_completion(question, f"anthropic/{model}", api_base=url)


def litellm_completion(question, model, **more):
    import litellm

    messages = [{"role": "user", "content": "hello"}]
    more |= {"model": model, "api_key": "placeholder"}
    if question == "stream":
        chunks = litellm.completion(messages=messages, stream=True, **more)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    if question == "plain":
        return litellm.completion(messages=messages, **more).choices[0].message.content
    more["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    asked = litellm.completion(messages=messages, **more).choices[0].message
    # The message also has LiteLLM's own fields, which OpenAI refuses.
    asked = asked.model_dump(include={"role", "content", "tool_calls"})
    messages += [asked, {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": TOOL_RESULT}]
    return litellm.completion(messages=messages, **more).choices[0].message.content


def litellm_responses(question, url, model):
    import litellm

    more = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "placeholder"}
    if question == "stream":
        events = litellm.responses(input="hello", stream=True, **more)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")
    if question == "plain":
        return text_of(litellm.responses(input="hello", **more).output)
    more["tools"] = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    items = [{"role": "user", "content": "hello"}]
    call = next(item for item in litellm.responses(input=items, **more).output if item.type == "function_call")
    names = ("type", "call_id", "name", "arguments")
    items += [{name: getattr(call, name) for name in names}]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}]
    return text_of(litellm.responses(input=items, **more).output)


def text_of(items):
    return "".join(part.text for item in items if item.type == "message" for part in item.content)


def langchain_chat(question, url, model):
    from langchain_openai import ChatOpenAI

    return langchain(question, ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="placeholder"))


def langchain_responses(question, url, model):
    from langchain_openai import ChatOpenAI

    return langchain(question, ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="placeholder", use_responses_api=True))


def langchain_messages(question, url, model):
    from langchain_anthropic import ChatAnthropic

    return langchain(question, ChatAnthropic(model=model, base_url=url, api_key="placeholder"))


def langchain(question, model):
    if question == "stream":
        return "".join(chunk.text for chunk in model.stream("hello"))
    if question == "plain":
        return model.invoke("hello").text
    from langchain.agents import create_agent

    agent = create_agent(model, tools=[weather])
    return agent.invoke({"messages": [{"role": "user", "content": "hello"}]})["messages"][-1].text


def agents_chat(question, url, model):
    import agents

    return openai_agents(question, url, model, agents.OpenAIChatCompletionsModel)


def agents_responses(question, url, model):
    import agents

    return openai_agents(question, url, model, agents.OpenAIResponsesModel)


def openai_agents(question, url, model, kind):
    import agents
    import openai

    # The traces would go to OpenAI.
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="placeholder")
    tools = [agents.function_tool(weather)] if question == "tool" else []
    agent = agents.Agent(name="agent", model=kind(model=model, openai_client=client), tools=tools)

    async def run():
        if question != "stream":
            return (await agents.Runner.run(agent, "hello")).final_output
        result, text = agents.Runner.run_streamed(agent, "hello"), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text

    return asyncio.run(run())


def pydantic_chat(question, url, model):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="placeholder")
    return pydantic_ai(question, OpenAIChatModel(model, provider=provider))


def pydantic_responses(question, url, model):
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="placeholder")
    return pydantic_ai(question, OpenAIResponsesModel(model, provider=provider))


def pydantic_messages(question, url, model):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=url, api_key="placeholder")
    return pydantic_ai(question, AnthropicModel(model, provider=provider))


def pydantic_ai(question, model):
    from pydantic_ai import Agent

    agent = Agent(model)
    if question == "tool":
        agent.tool_plain(weather)
    if question != "stream":
        return agent.run_sync("hello").output

    async def run():
        async with agent.run_stream("hello") as result:
            return "".join([text async for text in result.stream_text(delta=True, debounce_by=None)])

    return asyncio.run(run())


def smolagents_chat(question, url, model):
    """An answer of this client's agent is a call of its tool `final_answer`, unless its steps are used up."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    client = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="placeholder")
    if question == "tool":
        return ToolCallingAgent(tools=[tool(weather)], model=client, max_steps=1).run("hello")
    agent = ToolCallingAgent(tools=[], model=client, stream_outputs=question == "stream")
    return agent.run("hello")


def instructor_chat(question, url, model):
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="placeholder"))
    return ask_instructor(question, client, {"model": model})


def instructor_messages(question, url, model):
    import anthropic
    import instructor

    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="placeholder"))
    return ask_instructor(question, client, {"model": model, "max_tokens": 64})


def ask_instructor(question, client, more):
    """The model answers by calling a tool, and a wrong answer goes back as the tool's result."""
    import pydantic

    answers = []

    class Answer(pydantic.BaseModel):
        text: str

        @pydantic.model_validator(mode="after")
        def once_more(self):
            answers.append(self.text)
            if question == "tool" and len(answers) == 1:
                raise ValueError(TOOL_RESULT)
            return self

    more |= {"response_model": Answer, "messages": [{"role": "user", "content": "hello"}]}
    if question != "stream":
        return client.create(**more).text
    return [part.text for part in client.create_partial(**more)][-1]


if __name__ == "__main__":
    client, *arguments = sys.argv[1:]
    try:
        print(globals()[client](*arguments))
    except Exception as error:
        # instructor quotes earlier answers in its own error.
        while error.__cause__:
            error = error.__cause__
        print(f"{type(error).__name__}: {error}")
        # Some clients leave threads behind.
        sys.stdout.flush()
        os._exit(1)
