//! Tests of `explain` and `check`: their output, and that a served run gives the same results.

mod served_run;

use std::fs;

use cogni_gateway::cli::{self, check, explain};
use serde_json::{Map, Value, json};

/// G13: The output for an admitted call shows every change that is made to it.
#[test]
fn an_admitted_call_is_explained_with_every_change() {
    let output = explain_request(&["--litellm-host", "litellm:4000"], SPOOFED);
    insta::assert_snapshot!(output, @r#"
    POST /v1/chat/completions?team=other
    admitted: route chat_completions, model gpt-5

    query string
      dropped

    headers
      passed       accept: text/event-stream
      set          accept-encoding: identity
      overwritten  authorization: [secret]
      overwritten  content-length: 86
      passed       content-type: application/json
      overwritten  openai-beta: responses=experimental
      set          user-agent: cogni-gateway/0.1.0
      set          x-litellm-call-id: [id of the request]
      dropped      x-litellm-customer-id
      overwritten  x-litellm-end-user-id: placeholder
      set          x-litellm-spend-logs-metadata: {"attempt":0,"run_id":"placeholder"}

    fields of the body that change
      dropped      user: the gateway itself states who calls
      dropped      metadata: the gateway itself states who calls
      dropped      no_such_field: the gateway does not know the field
      forced       stream_options: a stream must report its usage

    reserved
      turns          1 of no limit
      input tokens   111 of no limit (at most; the estimate is 37)
      output tokens  16384 of no limit
      total tokens   16495 of no limit
      dollars        0.16397875 of no limit
    "#);
}

/// G13: The output shows the request that would go upstream, without any secret.
#[test]
fn the_upstream_request_is_printed_without_secrets() {
    let output = explain_request(&["--upstream"], SPOOFED);
    let (_, upstream) = output.split_once("\nsent upstream\n").unwrap();
    insta::assert_snapshot!(upstream, @r#"
    POST /v1/chat/completions HTTP/1.1
    host: litellm:4000
    user-agent: cogni-gateway/0.1.0
    accept-encoding: identity
    authorization: [secret]
    x-litellm-end-user-id: placeholder
    x-litellm-spend-logs-metadata: {"attempt":0,"run_id":"placeholder"}
    accept: text/event-stream
    openai-beta: responses=experimental
    x-litellm-call-id: [id of the request]
    content-type: application/json
    content-length: 86

    {"model":"gpt-5","stream":true,"messages":[],"stream_options":{"include_usage":true}}
    "#);
}

/// G13, G9: The output for a spent budget shows what was refused, what remains, and how an operator would allow the
/// call.
#[test]
fn a_spent_budget_is_explained() {
    let flags = ["--max-turns", "10", "--set", "usage.turns=10"];
    insta::assert_snapshot!(explain_request(&flags, CHAT), @r#"
    POST /v1/chat/completions (a guess; set it with `--route`)
    refused: 402 `turn_budget_exhausted`, route chat_completions
      the client receives: turn budget exhausted: 10 of 10 turns are spent
      to allow it: raise `budget.max_turns` or `MAX_TURNS`
    "#);
}

/// G13, G9: A call is granted what remains of the budget, and the output shows it.
#[test]
fn a_nearly_spent_budget_is_explained() {
    let flags = ["--max-output-tokens", "1000", "--set", "usage.output_tokens=900"];
    insta::assert_snapshot!(explain_request(&flags, CHAT), @r#"
    POST /v1/chat/completions (a guess; set it with `--route`)
    admitted: route chat_completions, model claude-opus-4-5

    headers
      set          accept-encoding: identity
      set          authorization: [secret]
      set          content-length: 102
      passed       content-type: application/json
      set          user-agent: cogni-gateway/0.1.0
      set          x-litellm-call-id: [id of the request]
      set          x-litellm-end-user-id: placeholder
      set          x-litellm-spend-logs-metadata: {"attempt":0,"run_id":"placeholder"}

    fields of the body that change
      forced       max_completion_tokens: the remaining budget allows no more

    reserved
      turns          1 of no limit
      input tokens   74 of no limit (at most; the estimate is 25)
      output tokens  100 of 100 left
      total tokens   174 of no limit
      dollars        0.00324 of no limit
    "#);
}

/// G13, G6: The output names the capability that is not granted.
#[test]
fn a_hosted_tool_is_explained() {
    let body = r#"{"model":"claude","max_tokens":10,"system":"s","messages":[],"tools":[{"type":"web_search_20250305","name":"web_search"}]}"#;
    insta::assert_snapshot!(explain_request(&[], body), @r"
    POST /v1/messages (a guess; set it with `--route`)
    refused: 403 `capability_not_granted`, route messages
      the client receives: `tools` needs `web_search` (`web_search_20250305`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`
      to allow it: grant it in `policy.body.capabilities` or `CAPABILITIES`
    ");
}

/// G13, G5: The output says why a body is not acceptable.
#[test]
fn a_body_that_is_not_json_is_explained() {
    insta::assert_snapshot!(explain_request(&[], r#"{"model":"a","model":"b"}"#), @r"
    POST /v1/chat/completions (a guess; set it with `--route`)
    refused: 400 `duplicate_key`, route chat_completions
      the client receives: the request body is not acceptable JSON: duplicate key `model` at byte 13
      to allow it: no setting allows it; change the request
    ");
}

/// G13, G3: The output says that a path is not served, or that the gateway answers it without the upstream.
#[test]
fn a_path_that_does_not_go_upstream_is_explained() {
    insta::assert_snapshot!(explain_request(&[], "GET /v1/files HTTP/1.1\nhost: x\n\n"), @r"
    GET /v1/files
    refused: 404 `not_found`, route none
      the client receives: the path is not served
      to allow it: no setting allows it; change the request
    ");
    insta::assert_snapshot!(explain_request(&["--models", "a"], "GET /v1/models HTTP/1.1\n\n"), @r"
    GET /v1/models
    answered by the gateway, route models
    ");
}

/// G13: The output shows the rules that match, and the rule that refuses.
#[test]
fn rules_are_explained() {
    let file = TempFile::holding(RULES);
    let flags = ["--config", file.path()];
    insta::assert_snapshot!(explain_request(&flags, CHAT), @r#"
    POST /v1/chat/completions (a guess; set it with `--route`)
    admitted: route chat_completions, model claude-sonnet-4-5

    headers
      set          accept-encoding: identity
      set          authorization: [secret]
      set          content-length: 104
      passed       content-type: application/json
      set          user-agent: cogni-gateway/0.1.0
      set          x-litellm-call-id: [id of the request]
      set          x-litellm-end-user-id: placeholder
      set          x-litellm-spend-logs-metadata: {"attempt":0,"run_id":"placeholder"}
      set          x-team: agents

    fields of the body that change
      renamed      model: an operator's rule requires the change
      forced       max_completion_tokens: an operator's rule requires the change

    rules that match
      short-answers

    reserved
      turns          1 of no limit
      input tokens   74 of no limit (at most; the estimate is 25)
      output tokens  512 of no limit
      total tokens   586 of no limit
      dollars        0.008124 of no limit
    "#);
    let flags = ["--config", file.path(), "--set", "usage.cost_usd=2.5"];
    insta::assert_snapshot!(explain_request(&flags, CHAT), @r"
    POST /v1/chat/completions (a guess; set it with `--route`)
    refused: 403 `refused_by_rule`, route chat_completions
      the client receives: refused by the rule `no-opus-when-it-gets-dear`: use claude-haiku-4-5
      to allow it: change the rule, in `policy.rules`

    rules that match
      no-opus-when-it-gets-dear
    ");
}

/// G13: `--json` prints the same facts for scripts.
#[test]
fn scripts_can_read_the_explanation_as_json() {
    let file = TempFile::holding(RULES);
    let explanation =
        explain_request(&["--json", "--config", file.path(), "--max-turns", "5"], CHAT);
    let mut explanation: Map<String, Value> = serde_json::from_str(&explanation).unwrap();
    let headers = explanation.remove("headers").unwrap();
    let team = json!({"name": "x-team", "what": "set", "value": "agents"});
    assert!(headers.as_array().unwrap().contains(&team));
    assert_eq!(explanation.remove("budget").unwrap()["turns_left"], 5);
    insta::assert_json_snapshot!(explanation, @r#"
    {
      "body": [
        {
          "name": "model",
          "what": "renamed",
          "why": "an operator's rule requires the change"
        },
        {
          "name": "max_completion_tokens",
          "what": "forced",
          "why": "an operator's rule requires the change"
        }
      ],
      "input_estimate": 25,
      "is_guessed": true,
      "method": "POST",
      "model": "claude-sonnet-4-5",
      "outcome": "admitted",
      "path": "/v1/chat/completions",
      "reserved": {
        "cost_usd": "0.008124",
        "input": 74,
        "output": 512,
        "turns": 1
      },
      "route": "chat_completions",
      "rules": [
        "short-answers"
      ]
    }
    "#);
}

/// G13: The exit code tells the outcome.
#[test]
fn the_exit_code_is_the_outcome() {
    let code = |flags: &[&str]| run(flags, CHAT).unwrap().1;
    assert_eq!((code(&[]), code(&["--max-turns", "0"])), (0, 1));
}

/// G13: Wrong use has its own message and exit code, different from a refusal.
#[test]
fn wrong_use_is_reported() {
    let messages = [
        run(&["--set", "usage.dollars=1"], CHAT),
        run(&["--set", "usage.turns=many"], CHAT),
        run(&["--set", "usage.cost_usd=-1"], CHAT),
        run(&["--route", "/v1/messages"], "GET /v1/models HTTP/1.1\n\n"),
        run(&["--route", "not a path"], CHAT),
        run(&[], "POST /v1/messages HTTP/1.1\nhost: x\n"),
        run(&[], "POST /v1/messages HTTP/1.1\nhost = x\n\n"),
        run(&["--config", "/nowhere/gateway.toml"], CHAT),
        run(&["--max-turns", "many"], CHAT),
    ]
    .map(|result| format!("{:#}", result.unwrap_err()));
    insta::assert_snapshot!(messages.join("\n"), @r"
    `usage.dollars` cannot be set; there are `usage.turns`, `usage.input_tokens`, `usage.output_tokens` and `usage.cost_usd`
    `usage.turns=many` has no number; give a value such as `usage.turns=100`: invalid digit found in string
    `usage.cost_usd=-1` has no amount of dollars; give a value such as `usage.cost_usd=2.50`
    the file has a request line, so `--route` has no meaning; leave it out
    `not a path` is not a path: invalid uri character
    the head of the request does not end; put an empty line after its last header
    the file is not an HTTP request: invalid header name
    cannot read `/nowhere/gateway.toml`: No such file or directory (os error 2)
    `MAX_TURNS` is `many`; give a whole number
    ");
}

/// G13: The route of a body is guessed from its fields unless the operator names a route.
#[test]
fn the_route_of_a_body_is_guessed_from_its_fields() {
    let route = |flags: &[&str], body: &str| {
        explain_request(flags, body).lines().next().unwrap().to_owned()
    };
    for (body, path) in [
        (r#"{"messages":[]}"#, "/v1/chat/completions"),
        (r#"{"messages":[],"system":"s"}"#, "/v1/messages"),
        (r#"{"input":"x"}"#, "/v1/responses"),
        (r#"{"prompt":"x"}"#, "/v1/completions"),
        ("not even JSON", "/v1/chat/completions"),
    ] {
        assert_eq!(route(&[], body), format!("POST {path} (a guess; set it with `--route`)"));
    }
    assert_eq!(route(&["--route", "/v1/embeddings"], r#"{"input":"x"}"#), "POST /v1/embeddings");
}

/// G13: `check` checks a configuration before anything is served with it.
#[test]
fn a_configuration_can_be_checked() {
    let check = |text: &str| {
        let file = TempFile::holding(text);
        let matches = parse_arguments(&["check", "--config", file.path()]);
        let mut out = vec![];
        let result = check::run(matches.subcommand().unwrap().1, &mut out);
        let result =
            result.map_or_else(|error| format!("{error:#}"), |_| String::from_utf8(out).unwrap());
        result.replace(file.path(), "[file]")
    };
    insta::assert_snapshot!(check(RULES), @"the configuration is valid: 2 rules, 3 examples hold");
    insta::assert_snapshot!(check(&RULES.replace("usage.cost", "usage.costs")), @"rule `no-opus-when-it-gets-dear`: `when`, line 1, column 44: `usage.costs_usd` is not a fact; `usage` has `turns`, `input_tokens`, `output_tokens`, `total_tokens`, `cost_usd`, `left.turns`, `left.input_tokens`, `left.output_tokens`, `left.total_tokens`, `left.cost_usd`");
    insta::assert_snapshot!(check(&RULES.replace("when", "where")), @r#"
    `[file]` is not a valid configuration: TOML parse error at line 4, column 1
      |
    4 | where = "request.model.startsWith('claude-opus') && usage.cost_usd > 2.0"
      | ^^^^^
    unknown field `where`, expected one of `name`, `when`, `refuse`, `set_model`, `max_output_tokens`, `headers`, `match`, `not_match`
    "#);
    insta::assert_snapshot!(check("workers = 0"), @"`WORKERS` is `0`; give 1 to 1024");
    insta::assert_snapshot!(check("workers = 1000000"), @"`WORKERS` is `1000000`; give 1 to 1024");
    insta::assert_snapshot!(check("[shared]\nplaintext = true"), @"`shared.token_keys_file` is not set; tokens tell the runs apart");
    let shared = "[shared]\nplaintext = true\ntoken_keys_file = 'keys'\n";
    insta::assert_snapshot!(check(&format!("{shared}listen = '0.0.0.0:8443'")), @"`shared.plaintext` is `true` and `shared.listen` is `0.0.0.0:8443`; tokens must not cross a network in the clear: listen on 127.0.0.1, or give `shared.tls_cert_file` and `shared.tls_key_file`");
    insta::assert_snapshot!(check(shared), @"the configuration is valid: 0 rules, 0 examples hold");
    insta::assert_snapshot!(check(&format!("{shared}[[shared.runs]]\nrun_id = 'r'")), @"run `r` has no `account`; LiteLLM bills it as the end user");
    insta::assert_snapshot!(check("[serve]\nreconcile_every = '0s'"), @"`serve.reconcile_every` is `0s`; give 1s to 36500d");
}

/// Returns the output of `explain`, whatever the outcome.
fn explain_request(flags: &[&str], request: &str) -> String {
    run(flags, request).unwrap().0
}

/// Returns the output and the exit code.
fn run(flags: &[&str], request: &str) -> anyhow::Result<(String, u8)> {
    let matches = parse_arguments(&[&["explain", "-"], flags].concat());
    let mut out = vec![];
    let code = explain::run(matches.subcommand().unwrap().1, request.as_bytes(), &mut out)?;
    let code = [0, 1].into_iter().find(|known| code == (*known).into()).unwrap();
    Ok((String::from_utf8(out).unwrap(), code))
}

fn parse_arguments(arguments: &[&str]) -> clap::ArgMatches {
    let arguments = ["cogni-gateway"].into_iter().chain(arguments.iter().copied());
    cli::command().try_get_matches_from(arguments).unwrap()
}

/// A temporary file with this text.
struct TempFile(tempfile::NamedTempFile);

impl TempFile {
    fn holding(text: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Self(file)
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }
}

const CHAT: &str = r#"{"model":"claude-opus-4-5","messages":[{"role":"user","content":"hello"}]}"#;

/// A client that sends headers which other gateways would trust.
const SPOOFED: &str = r#"POST /v1/chat/completions?team=other HTTP/1.1
host: localhost:8080
authorization: Bearer sk-attacker
content-type: application/json
content-length: 10
accept: text/event-stream
openai-beta: responses=experimental, assistants=v2
x-litellm-customer-id: attacker
x-litellm-end-user-id: attacker

{"model":"gpt-5","stream":true,"user":"attacker","metadata":{"tags":["free"]},"no_such_field":1,"messages":[]}
"#;

const RULES: &str = r#"
[[policy.rules]]
name = "no-opus-when-it-gets-dear"
when = "request.model.startsWith('claude-opus') && usage.cost_usd > 2.0"
refuse = "use claude-haiku-4-5"
match = [{ request = { model = "claude-opus-4-5" }, usage = { cost_usd = 3 } }]
not_match = [{ usage = { cost_usd = 3 } }, { request = { model = "claude-opus-4-5" } }]

[[policy.rules]]
name = "short-answers"
when = "request.model.contains('opus')"
set_model = "claude-sonnet-4-5"
max_output_tokens = 512
headers = { x-team = "agents" }
"#;
