// ask.ts URL TOKEN: makes runs with openapi-fetch and the types that openapi-typescript has generated as description.ts.

import createClient from "openapi-fetch";
import type { components, paths } from "./description.ts";

type RunEvent = components["schemas"]["RunEvent"];
type RunView = components["schemas"]["RunView"];
declare const process: { argv: string[] };

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${token}` } });

function check(holds: boolean, value: unknown): asserts holds {
  if (!holds) throw new Error(`unexpected: ${JSON.stringify(value)}`);
}

function body(model: string, agent = "sandbox:agent"): components["schemas"]["CreateRunBody"] {
  return { agent, model, messages: [{ role: "user", content: "hello" }], budget: { max_turns: 5 } };
}

// Returns a run that has ended.
async function makeRun(model: string): Promise<RunView> {
  const begun = await client.POST("/api/v1/runs", { body: body(model) });
  check(begun.data !== undefined, begun.error);
  let run: RunView = begun.data;
  for (const deadline = Date.now() + 60_000; run.state !== "ended"; ) {
    check(Date.now() < deadline, run);
    await new Promise((resolve) => setTimeout(resolve, 100));
    const shown = await client.GET("/api/v1/runs/{id}", { params: { path: { id: run.id } } });
    check(shown.data !== undefined, shown.error);
    run = shown.data;
  }
  return run;
}

// Returns the events of a run as `RunEvent` describes them: with `data` parsed.
async function readEvents(id: string): Promise<RunEvent[]> {
  const stream = await client.GET("/api/v1/runs/{id}/events", { params: { path: { id } }, parseAs: "text" });
  check(stream.data !== undefined, stream.error);
  const blocks = stream.data.split("\n\n").filter((block) => block.includes("data: "));
  return blocks.map((block) => {
    const fields = Object.fromEntries(block.split("\n").map((line) => [line.split(": ", 1)[0], line.replace(/^\w*: /, "")]));
    return { ...fields, data: JSON.parse(fields.data) } as RunEvent;
  });
}

const good = await makeRun("fake");
check(good.result?.status === "succeeded", good);
check(good.result.exit_code === 0 && good.result.usage.turns === 1, good);

const failed = await makeRun("fake/status=500");
check(failed.result?.status === "failed", failed);
check(failed.result.error_code === failed.error_code, failed);

const page = await client.GET("/api/v1/runs", { params: { query: { state: "ended", limit: 2 } } });
check(page.data?.runs.map((run) => run.id).join() === [failed.id, good.id].join(), page.data);

const unknown = await client.GET("/api/v1/runs/{id}", { params: { path: { id: "run-unknown" } } });
check(unknown.error?.error.code === "not_found", unknown.data);
const refused = await client.POST("/api/v1/runs", { body: body("fake", "sandbox:unknown") });
check(refused.error?.error.code === "no_such_agent", refused.data);

const events = await readEvents(good.id);
const last = events[events.length - 1];
check(last.event === "final", last);
check(last.data.status === "succeeded", last);
const reports = events.flatMap((event) => (event.event === "usage_report" ? [event.data] : []));
check(reports.length === 1 && reports[0].model === "fake", reports);
