"""The Anthropic SDK as an agent uses it, but for the transport: a unix socket.

usage: anthropic_sdk.py SOCKET MODEL CALL…, where a CALL is a function of this file. For each it prints a line of JSON:
what the SDK made of the answer, and how many requests that took it.
"""

import json
import sys

import anthropic
import httpx2


def messages(client, model):
    return read(client.messages.create(model=model, max_tokens=64, messages=HELLO))


def messages_stream(client, model):
    with client.messages.stream(model=model, max_tokens=64, messages=HELLO) as stream:
        deltas = "".join(stream.text_stream)
        return read(stream.get_final_message()) | {"deltas": deltas}


def count_tokens(client, model):
    return {"input": client.messages.count_tokens(model=model, messages=HELLO).input_tokens}


def read(message):
    text = "".join(block.text for block in message.content if block.type == "text")
    return {"text": text, "finish": message.stop_reason, "input": message.usage.input_tokens, "output": message.usage.output_tokens}


def main(socket, model, *calls):
    requests = []
    transport = httpx2.Client(
        transport=httpx2.HTTPTransport(uds=socket), event_hooks={"request": [lambda request: requests.append(request.url)]}
    )
    client = anthropic.Anthropic(base_url="http://localhost", api_key="placeholder", http_client=transport)
    for call in calls:
        requests.clear()
        try:
            seen = globals()[call](client, model)
        except anthropic.APIStatusError as error:
            seen = {"status": error.status_code, "error": type(error).__name__, "message": error.message}
        print(json.dumps(seen | {"requests": len(requests)}))


HELLO = [{"role": "user", "content": "hello"}]
main(*sys.argv[1:])
