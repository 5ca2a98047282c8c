"""What the SDKs make of a stream that the gateway cuts, since it goes on after its limit.

usage: cut_sdk.py SOCKET MODEL CALL…, where a CALL is a function of this file. For each it prints a line of JSON:
what the SDK made of the stream, and how many requests that took it.
"""

import json
import sys

import anthropic
import httpx2
import openai


def chat(to, model):
    finish, output, text = None, None, ""
    options = {"max_completion_tokens": LIMIT, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in to.openai.chat.completions.create(model=model, messages=HELLO, **options):
        output = chunk.usage.completion_tokens if chunk.usage else output
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text += choice.delta.content or ""
    return {"finish": finish, "output": output, "has_text": text != ""}


def completions(to, model):
    finish, text = None, ""
    for chunk in to.openai.completions.create(model=model, prompt="hello", max_tokens=LIMIT, stream=True):
        finish = chunk.choices[0].finish_reason or finish
        text += chunk.choices[0].text
    return {"finish": finish, "output": None, "has_text": text != ""}


def messages(to, model):
    with to.anthropic.messages.stream(model=model, max_tokens=LIMIT, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    same = message.content[0].text == text
    return {"finish": message.stop_reason, "output": message.usage.output_tokens, "has_text": same and text != ""}


def responses(to, model):
    text = ""
    with to.openai.responses.stream(model=model, input="hello", max_output_tokens=LIMIT) as stream:
        for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
    response = event.response
    finish = response.incomplete_details.reason if response.incomplete_details else response.error.code
    same = response.output_text == text
    return {"finish": finish, "output": response.usage.output_tokens, "has_text": same and text != ""}


class Clients:
    def __init__(self, socket):
        self.requests = 0
        transport = httpx2.HTTPTransport(uds=socket)
        client = httpx2.Client(transport=transport, event_hooks={"request": [self.count]})
        key = {"api_key": "placeholder", "http_client": client}
        self.openai = openai.OpenAI(base_url="http://localhost/v1", **key)
        self.anthropic = anthropic.Anthropic(base_url="http://localhost", **key)

    def count(self, _request):
        self.requests += 1


def main(socket, model, *calls):
    to = Clients(socket)
    for call in calls:
        to.requests = 0
        try:
            seen = globals()[call](to, model)
        except (openai.APIError, anthropic.APIError) as error:
            seen = {"error": error.body.get("error", error.body)["code"]}
        print(json.dumps(seen | {"requests": to.requests}))


LIMIT = 20
HELLO = [{"role": "user", "content": "hello"}]
main(*sys.argv[1:])
