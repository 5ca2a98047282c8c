// Prisma's query engine for LiteLLM's Python client, where its binary cannot be downloaded.
//
// The client starts an engine, queries it in GraphQL over loopback HTTP, and expects plain JSON. npm has the same engine as
// WebAssembly (`@prisma/client`), which takes queries in JSON and returns tagged values. This program translates between the two.
'use strict';

const fs = require('fs');
const http = require('http');
const path = require('path');
const { Pool } = require('pg');
const { PrismaPg } = require('@prisma/adapter-pg');
const { bindAdapter } = require('@prisma/driver-adapter-utils');
const { parse, valueFromASTUntyped } = require('graphql');

const runtime = path.join(path.dirname(require.resolve('@prisma/client/package.json')), 'runtime');
const port = Number(process.argv[process.argv.indexOf('-p') + 1]);
// The client's generator cannot be used here; this one lets the engine use a JavaScript driver.
const generator = 'generator client {\n provider = "prisma-client-js"\n previewFeatures = ["driverAdapters"]\n}\n';
const schema = generator + fs.readFileSync(process.env.PRISMA_DML_PATH, 'utf8').replace(/^generator\s+\w+\s*\{[^}]*\}/gm, '');
const pool = new Pool({ connectionString: process.env.DATABASE_URL });
const engine = start();

function start() {
  const glue = require(path.join(runtime, 'query_engine_bg.postgresql.js'));
  const wasm = fs.readFileSync(path.join(runtime, 'query_engine_bg.postgresql.wasm'));
  const { exports } = new WebAssembly.Instance(new WebAssembly.Module(wasm), { './query_engine_bg.js': glue });
  glue.__wbg_set_wasm(exports);
  exports.__wbindgen_start?.();
  const options = {
    datamodel: schema, env: process.env, logQueries: false, ignoreEnvVarErrors: true, datasourceOverrides: {},
    logLevel: 'error', configDir: '/', engineProtocol: 'json',
  };
  return new glue.QueryEngine(options, () => {}, bindAdapter(new PrismaPg(pool)));
}

// `findManyUser` is the action `findMany` of the model `User`; the longer names come first.
const ACTIONS = [
  'findUniqueOrThrow', 'findUnique', 'findFirstOrThrow', 'findFirst', 'findMany', 'createManyAndReturn', 'createMany',
  'createOne', 'updateMany', 'updateOne', 'deleteMany', 'deleteOne', 'upsertOne', 'aggregate', 'groupBy', 'queryRaw',
  'executeRaw',
];

// The fields of type Json, by model: GraphQL has their values as plain text, and the engine needs them marked.
const JSON_FIELDS = Object.fromEntries([...schema.matchAll(/^model\s+(\w+)\s*\{([\s\S]*?)^\}/gm)].map(([, model, body]) =>
  [model, new Set([...body.matchAll(/^\s*(\w+)\s+Json\b/gm)].map(([, field]) => field))]));

function question(field, variables) {
  const action = ACTIONS.find((action) => field.name.value.startsWith(action));
  if (!action) throw new Error(`no action is called ${field.name.value}`);
  const modelName = field.name.value.slice(action.length) || undefined;
  const query = { arguments: given(field, variables), selection: selection(field, variables) };
  // The driver does not know PostgreSQL's type `name`; LiteLLM queries the names of its views.
  if (action === 'queryRaw') query.arguments.query = query.arguments.query.replace('ARRAY_AGG(viewname)', 'ARRAY_AGG(viewname::text)');
  for (const part of ['data', 'create', 'update']) {
    if (modelName && part in query.arguments) query.arguments[part] = marked(query.arguments[part], JSON_FIELDS[modelName]);
  }
  return { action, modelName, query };
}

function given(field, variables) {
  return Object.fromEntries((field.arguments ?? []).map((one) => [one.name.value, value(one.value, variables)]));
}

function selection(field, variables) {
  return Object.fromEntries((field.selectionSet?.selections ?? []).map((one) => {
    const isLeaf = !one.selectionSet && !one.arguments?.length;
    return [one.name.value, isLeaf || { arguments: given(one, variables), selection: selection(one, variables) }];
  }));
}

function value(node, variables) {
  if (node.kind === 'IntValue' && Math.abs(Number(node.value)) > 2 ** 31 - 1) return { $type: 'BigInt', value: node.value };
  if (node.kind === 'ListValue') return node.values.map((one) => value(one, variables));
  if (node.kind !== 'ObjectValue') return valueFromASTUntyped(node, variables);
  return Object.fromEntries(node.fields.map((one) => [one.name.value, value(one.value, variables)]));
}

function marked(data, fields) {
  if (Array.isArray(data)) return data.map((one) => marked(one, fields));
  if (data === null || typeof data !== 'object') return data;
  return Object.fromEntries(Object.entries(data).map(([key, inner]) =>
    [key, fields.has(key) && typeof inner === 'string' ? { $type: 'Json', value: inner } : marked(inner, fields)]));
}

function plain(data) {
  if (Array.isArray(data)) return data.map(plain);
  if (data === null || typeof data !== 'object') return data;
  if ('$type' in data) return data.$type === 'BigInt' ? Number(data.value) : data.value;
  return Object.fromEntries(Object.entries(data).map(([key, inner]) => [key, plain(inner)]));
}

async function answer({ query, variables }, transaction) {
  const data = {};
  for (const field of parse(query, { noLocation: true }).definitions[0].selectionSet.selections) {
    const asked = question(field, variables ?? {});
    const answered = JSON.parse(await engine.query(JSON.stringify(asked), '{}', transaction));
    if (answered.errors) {
      console.error('engine:', JSON.stringify(answered.errors));
      return { errors: answered.errors.map((error) => ({ user_facing_error: facing(error.error), ...error })) };
    }
    data[field.alias?.value ?? field.name.value] = plain(Object.values(answered.data)[0]);
  }
  return { data };
}

// A batch is a transaction: everything succeeds or nothing does.
async function batch(queries, transaction) {
  if (transaction) return { batchResult: await Promise.all(queries.map((query) => answer(query, transaction))) };
  const { id } = JSON.parse(await engine.startTransaction(JSON.stringify({ max_wait: 5000, timeout: 30000 }), '{}'));
  const results = [];
  for (const query of queries) {
    const result = await answer(query, id);
    if (result.errors) {
      await engine.rollbackTransaction(id, '{}');
      return result;
    }
    results.push(result);
  }
  await engine.commitTransaction(id, '{}');
  return { batchResult: results };
}

async function handle(url, body, transaction) {
  if (url === '/status') return { status: 'ok' };
  if (url === '/transaction/start') return JSON.parse(await engine.startTransaction(body, '{}'));
  const [, id, end] = url.match(/^\/transaction\/([^/]+)\/(commit|rollback)$/) ?? [];
  if (end) return JSON.parse(await engine[`${end}Transaction`](id, '{}'));
  const asked = JSON.parse(body);
  return asked.batch ? batch(asked.batch, transaction) : answer(asked, transaction);
}

const facing = (message) => ({ is_panic: false, message: String(message), batch_request_idx: 0 });

const server = http.createServer(async (request, response) => {
  let text = '';
  for await (const part of request) text += part;
  const answered = await handle(request.url, text, request.headers['x-transaction-id']).catch((error) => {
    console.error('engine:', error);
    return { errors: [{ error: String(error), user_facing_error: facing(error) }] };
  });
  response.setHeader('content-type', 'application/json').end(JSON.stringify(answered));
});
// The parent process may be killed without being able to end this process.
const parent = process.ppid;
setInterval(() => process.ppid === parent || process.exit(), 1000);
process.on('SIGTERM', () => process.exit());
process.on('SIGINT', () => process.exit());
engine.connect('{}').then(() => server.listen(port, '127.0.0.1'));
