"""The OpenAI SDK as an agent uses it, but for the transport: a unix socket.

usage: openai_sdk.py SOCKET MODEL CALL…, where a CALL is a function of this file. For each it prints a line of JSON:
what the SDK made of the answer, and how many requests that took it.
"""

import json
import sys

import httpx2
import openai


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=HELLO)
    return {"text": answer.choices[0].message.content, "finish": answer.choices[0].finish_reason, **usage(answer.usage)}


def chat_stream(client, model, **more):
    """Checks that a client which does not ask for usage gets no usage chunk: that chunk has no choices, and many clients index them."""
    text, finish, counted, without_choices = "", None, None, 0
    for chunk in client.chat.completions.create(model=model, messages=HELLO, stream=True, **more):
        counted = chunk.usage or counted
        if not chunk.choices:
            without_choices += 1
            continue
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return {"text": text, "finish": finish, "without_choices": without_choices, **usage(counted)}


def chat_stream_usage(client, model):
    return chat_stream(client, model, stream_options={"include_usage": True})


def responses(client, model):
    answer = client.responses.create(model=model, input="hello")
    return {"text": answer.output_text, "finish": answer.status, **usage(answer.usage)}


def responses_stream(client, model):
    with client.responses.stream(model=model, input="hello") as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = stream.get_final_response()
    return {"text": answer.output_text, "deltas": deltas, "finish": answer.status, **usage(answer.usage)}


def embeddings(client, model):
    answer = client.embeddings.create(model=model, input="hello")
    return {"vectors": len(answer.data), "dimensions": len(answer.data[0].embedding) > 0}


def models(client, _model):
    return {"models": sorted(model.id for model in client.models.list())}


def usage(usage):
    if usage is None:
        return {"input": None, "output": None}
    return {
        "input": getattr(usage, "prompt_tokens", None) or usage.input_tokens,
        "output": getattr(usage, "completion_tokens", None) or usage.output_tokens,
    }


def main(socket, model, *calls):
    requests = []
    transport = httpx2.Client(
        transport=httpx2.HTTPTransport(uds=socket), event_hooks={"request": [lambda request: requests.append(request.url)]}
    )
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="placeholder", http_client=transport)
    for call in calls:
        requests.clear()
        try:
            seen = globals()[call](client, model)
        except openai.APIStatusError as error:
            seen = {"status": error.status_code, "error": type(error).__name__, "message": error.message}
        print(json.dumps(seen | {"requests": len(requests)}))


HELLO = [{"role": "user", "content": "hello"}]
main(*sys.argv[1:])
