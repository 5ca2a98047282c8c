"""ask.py URL TOKEN: makes runs with the Python client that openapi-python-client has generated as `cogni_client`."""

import json
import sys
import time

from cogni_client import AuthenticatedClient
from cogni_client.api.runs import create_run, list_runs, show_run
from cogni_client.models import (
    ApiMessage, ApiRole, BudgetBody, CreateRunBody, ErrorBody, FailedRunResult, FinalEvent, RunState, RunView, SucceededRunResult,
    UsageReportEvent,
)


def main(url, token):
    with AuthenticatedClient(base_url=url, token=token) as client:
        good = make_run(client, "fake")
        assert isinstance(good.result, SucceededRunResult), good
        assert good.result.exit_code == 0 and good.result.usage.turns == 1, good
        assert good.ended_at >= good.created_at, good

        failed = make_run(client, "fake/status=500")
        assert isinstance(failed.result, FailedRunResult), failed
        assert failed.result.error_code == failed.error_code, failed

        page = list_runs.sync(client=client, state=RunState.ENDED, limit=2)
        assert [run.id for run in page.runs] == [failed.id, good.id], page

        unknown = show_run.sync("run-unknown", client=client)
        assert isinstance(unknown, ErrorBody) and unknown.error.code == "not_found", unknown
        refused = create_run.sync(client=client, body=body("fake", agent="sandbox:unknown"))
        assert isinstance(refused, ErrorBody) and refused.error.code == "no_such_agent", refused

        events = list(read_events(client, good.id))
        final = FinalEvent.from_dict(events[-1])
        assert isinstance(final.data, SucceededRunResult), final
        reports = [UsageReportEvent.from_dict(event) for event in events if event["event"] == "usage_report"]
        assert len(reports) == 1 and reports[0].data.model == "fake", reports


def make_run(client, model):
    """Returns a run that has ended."""
    run = create_run.sync(client=client, body=body(model))
    assert isinstance(run, RunView), run
    deadline = time.monotonic() + 60
    while run.state != RunState.ENDED:
        assert time.monotonic() < deadline, run
        time.sleep(0.1)
        run = show_run.sync(run.id, client=client)
    return run


def body(model, agent="sandbox:agent"):
    messages = [ApiMessage(role=ApiRole.USER, content="hello")]
    return CreateRunBody(agent=agent, model=model, messages=messages, budget=BudgetBody(max_turns=5))


def read_events(client, run):
    """Yields the events of a run as `RunEvent` describes them: with `data` parsed. The generator has no code for streams."""
    event = {}
    with client.get_httpx_client().stream("GET", f"/api/v1/runs/{run}/events") as response:
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name in ("id", "event"):
                event[name] = value
            elif name == "data":
                event[name] = json.loads(value)
            elif line == "" and event:
                yield event
                event = {}


main(*sys.argv[1:])
