//! Tests of changes that later stages make to a call: an output limit and another model.

use std::fmt::Write;

use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::LlmCall;
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::Value;

use super::{admitted_call, concat_rope};

/// G9: The output limit that goes upstream is what the budget allows, in each protocol's own field.
#[test]
fn the_output_is_limited_in_each_protocols_words() {
    use GatewayRoute::{
        ChatCompletions, Completions, CountTokens, Embeddings, Messages, Responses,
    };
    let mut table = String::new();
    for (route, body) in [
        (ChatCompletions, r#"{"model":"m"}"#),
        (ChatCompletions, r#"{"model":"m","max_tokens":5}"#),
        (ChatCompletions, r#"{"model":"m","max_tokens":2000}"#),
        (ChatCompletions, r#"{"model":"m","max_tokens":1000}"#),
        (ChatCompletions, r#"{"max_tokens":5,"model":"m","max_completion_tokens":9000,"n":3}"#),
        (ChatCompletions, r#"{"max_tokens":null,"model":"m","max_completion_tokens":9000}"#),
        (ChatCompletions, r#"{"max_tokens":null,"model":"m","max_completion_tokens":null}"#),
        (ChatCompletions, r#"{ "model" : "m" , "stream" : true }"#),
        (Completions, r#"{"model":"m"}"#),
        (Responses, r#"{"model":"m"}"#),
        (Messages, r#"{"model":"m","max_tokens":32000}"#),
        (CountTokens, r#"{"model":"m"}"#),
        (Embeddings, r#"{"model":"m"}"#),
    ] {
        writeln!(table, "{route:?} {body}\n  {}", limit_body(route, body, &[1000])).unwrap();
    }
    assert_snapshot!(table, @r#"
    ChatCompletions {"model":"m"}
      {"model":"m","max_completion_tokens":1000}  [max_completion_tokens forced (budget)]
    ChatCompletions {"model":"m","max_tokens":5}
      {"model":"m","max_tokens":5}  []
    ChatCompletions {"model":"m","max_tokens":2000}
      {"model":"m","max_tokens":1000}  [max_tokens clamped (budget)]
    ChatCompletions {"model":"m","max_tokens":1000}
      {"model":"m","max_tokens":1000}  []
    ChatCompletions {"max_tokens":5,"model":"m","max_completion_tokens":9000,"n":3}
      {"max_tokens":5,"model":"m","max_completion_tokens":1000,"n":3}  [max_completion_tokens clamped (budget)]
    ChatCompletions {"max_tokens":null,"model":"m","max_completion_tokens":9000}
      {"max_tokens":null,"model":"m","max_completion_tokens":1000}  [max_completion_tokens clamped (budget)]
    ChatCompletions {"max_tokens":null,"model":"m","max_completion_tokens":null}
      {"max_tokens":1000,"model":"m","max_completion_tokens":null}  [max_tokens clamped (budget)]
    ChatCompletions { "model" : "m" , "stream" : true }
      { "model" : "m" , "stream" : true,"stream_options":{"include_usage":true},"max_completion_tokens":1000 }  [stream_options forced (usage), max_completion_tokens forced (budget)]
    Completions {"model":"m"}
      {"model":"m","max_tokens":1000}  [max_tokens forced (budget)]
    Responses {"model":"m"}
      {"model":"m","store":false,"max_output_tokens":1000}  [store forced (storage), max_output_tokens forced (budget)]
    Messages {"model":"m","max_tokens":32000}
      {"model":"m","max_tokens":1000}  [max_tokens clamped (budget)]
    CountTokens {"model":"m"}
      {"model":"m"}  []
    Embeddings {"model":"m"}
      {"model":"m"}  []
    "#);
}

/// G9: Anthropic refuses a thinking budget above the output limit or below 1,024 tokens, so the thinking budget is
/// adjusted.
#[test]
fn thinking_is_kept_below_the_limit() {
    let mut table = String::new();
    for (limit, thinking) in [
        (4000, r#"{"type":"enabled","budget_tokens":3999}"#),
        (4000, r#"{"type":"enabled","budget_tokens":4000}"#),
        (1025, r#"{ "budget_tokens" : 31999 , "type":"enabled"}"#),
        (1024, r#"{"type":"enabled","budget_tokens":31999}"#),
        (1024, r#"{"type":"enabled","budget_tokens":"many"}"#),
        (1024, r#"{"type":"adaptive"}"#),
        (1024, "null"),
    ] {
        for body in [
            format!(r#"{{"model":"m","thinking":{thinking},"max_tokens":32000}}"#),
            format!(r#"{{"model":"m","max_tokens":32000,"thinking":{thinking}}}"#),
        ] {
            let sent = limit_body(GatewayRoute::Messages, &body, &[limit]);
            writeln!(table, "{limit} {body}\n  {sent}").unwrap();
        }
    }
    assert_snapshot!(table, @r#"
    4000 {"model":"m","thinking":{"type":"enabled","budget_tokens":3999},"max_tokens":32000}
      {"model":"m","thinking":{"type":"enabled","budget_tokens":3999},"max_tokens":4000}  [max_tokens clamped (budget)]
    4000 {"model":"m","max_tokens":32000,"thinking":{"type":"enabled","budget_tokens":3999}}
      {"model":"m","max_tokens":4000,"thinking":{"type":"enabled","budget_tokens":3999}}  [max_tokens clamped (budget)]
    4000 {"model":"m","thinking":{"type":"enabled","budget_tokens":4000},"max_tokens":32000}
      {"model":"m","thinking":{"type":"enabled","budget_tokens":3999},"max_tokens":4000}  [max_tokens clamped (budget), thinking clamped (budget)]
    4000 {"model":"m","max_tokens":32000,"thinking":{"type":"enabled","budget_tokens":4000}}
      {"model":"m","max_tokens":4000,"thinking":{"type":"enabled","budget_tokens":3999}}  [max_tokens clamped (budget), thinking clamped (budget)]
    1025 {"model":"m","thinking":{ "budget_tokens" : 31999 , "type":"enabled"},"max_tokens":32000}
      {"model":"m","thinking":{ "budget_tokens" : 1024 , "type":"enabled"},"max_tokens":1025}  [max_tokens clamped (budget), thinking clamped (budget)]
    1025 {"model":"m","max_tokens":32000,"thinking":{ "budget_tokens" : 31999 , "type":"enabled"}}
      {"model":"m","max_tokens":1025,"thinking":{ "budget_tokens" : 1024 , "type":"enabled"}}  [max_tokens clamped (budget), thinking clamped (budget)]
    1024 {"model":"m","thinking":{"type":"enabled","budget_tokens":31999},"max_tokens":32000}
      {"model":"m","max_tokens":1024}  [max_tokens clamped (budget), thinking dropped (budget)]
    1024 {"model":"m","max_tokens":32000,"thinking":{"type":"enabled","budget_tokens":31999}}
      {"model":"m","max_tokens":1024}  [max_tokens clamped (budget), thinking dropped (budget)]
    1024 {"model":"m","thinking":{"type":"enabled","budget_tokens":"many"},"max_tokens":32000}
      {"model":"m","max_tokens":1024}  [max_tokens clamped (budget), thinking dropped (budget)]
    1024 {"model":"m","max_tokens":32000,"thinking":{"type":"enabled","budget_tokens":"many"}}
      {"model":"m","max_tokens":1024}  [max_tokens clamped (budget), thinking dropped (budget)]
    1024 {"model":"m","thinking":{"type":"adaptive"},"max_tokens":32000}
      {"model":"m","thinking":{"type":"adaptive"},"max_tokens":1024}  [max_tokens clamped (budget)]
    1024 {"model":"m","max_tokens":32000,"thinking":{"type":"adaptive"}}
      {"model":"m","max_tokens":1024,"thinking":{"type":"adaptive"}}  [max_tokens clamped (budget)]
    1024 {"model":"m","thinking":null,"max_tokens":32000}
      {"model":"m","thinking":null,"max_tokens":1024}  [max_tokens clamped (budget)]
    1024 {"model":"m","max_tokens":32000,"thinking":null}
      {"model":"m","max_tokens":1024,"thinking":null}  [max_tokens clamped (budget)]
    "#);
}

/// G9, G15: A call asks for no more output than a model can write, because all of it is reserved and may be charged.
#[test]
fn an_output_that_no_model_writes_is_lowered() {
    use GatewayRoute::{ChatCompletions, Completions, Messages, Responses};
    let prompts = vec!["\"p\""; 32].join(",");
    let mut table = String::new();
    for (route, fields) in [
        (ChatCompletions, r#""max_tokens":18446744073709551615"#.to_owned()),
        (ChatCompletions, r#""max_tokens":5,"max_completion_tokens":1000001,"n":3"#.to_owned()),
        (ChatCompletions, r#""max_completion_tokens":1000000,"n":8"#.to_owned()),
        (Responses, r#""max_output_tokens":18446744073709551615"#.to_owned()),
        (Messages, r#""max_tokens":2000000,"thinking":{"budget_tokens":1500000}"#.to_owned()),
        (Completions, format!(r#""max_tokens":1000000,"prompt":[{prompts}]"#)),
        (Completions, format!(r#""prompt":[{prompts}]"#)),
    ] {
        let call = admitted_call(route, &format!(r#"{{"model":"m",{fields}}}"#));
        let (most, changes) = (call.max_output(), list_changes(&call));
        let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
        writeln!(table, "{}\n  {most:?} [{changes}]", sent.replace(&prompts, "…")).unwrap();
    }
    assert_snapshot!(table, @r#"
    {"model":"m","max_tokens":1000000}
      Some(Tokens(1000000)) [max_tokens clamped (excess)]
    {"model":"m","max_tokens":5,"max_completion_tokens":1000000,"n":3}
      Some(Tokens(3000000)) [max_completion_tokens clamped (excess)]
    {"model":"m","max_completion_tokens":1000000,"n":8}
      Some(Tokens(8000000)) []
    {"model":"m","max_output_tokens":1000000,"store":false}
      Some(Tokens(1000000)) [max_output_tokens clamped (excess), store forced (storage)]
    {"model":"m","max_tokens":1000000,"thinking":{"budget_tokens":999999}}
      Some(Tokens(1000000)) [max_tokens clamped (excess), thinking clamped (excess)]
    {"model":"m","max_tokens":500000,"prompt":[…]}
      Some(Tokens(16000000)) [max_tokens clamped (excess)]
    {"model":"m","prompt":[…]}
      None []
    "#);
}

/// G13: A later stage may choose another model, whatever an alias chose before.
#[test]
fn a_model_may_be_renamed_until_the_call_is_sent() {
    let mut call = admitted_call(GatewayRoute::Messages, r#"{"model":"m","max_tokens":9}"#);
    call.rename_model("first");
    call.rename_model("se\"cond");
    assert_eq!(call.model.as_deref(), Some("se\"cond"));
    assert_eq!(list_changes(&call), "model renamed (alias)");
    assert_eq!(concat_rope(&call.into_body()), br#"{"model":"se\"cond","max_tokens":9}"#);
}

/// A call without a body has no field to limit.
#[test]
fn a_call_without_a_body_has_nothing_to_limit() {
    let mut call = LlmCall::default();
    call.limit_output(Tokens(5));
    call.rename_model("m");
    assert_eq!((call.requested_output, call.model.as_deref()), (None, None));
    assert!(call.into_body().is_empty());
}

proptest! {
    /// G9: The lowest limit wins, whatever the client asked for and however often the call is limited.
    #[test]
    fn the_least_limit_counts(asked in prop::option::of(1..5000u64), limits in prop::collection::vec(1..5000u64, 1..4)) {
        let field = asked.map_or_else(String::new, |asked| format!(r#","max_output_tokens":{asked}"#));
        let body = format!(r#"{{"model":"m"{field},"input":"max_output_tokens"}}"#);
        let mut call = admitted_call(GatewayRoute::Responses, &body);
        for limit in &limits {
            call.limit_output(Tokens(*limit));
        }
        let least = limits.iter().copied().chain(asked).min();
        prop_assert_eq!(call.max_output(), least.map(Tokens));
        let sent: Value = serde_json::from_slice(&concat_rope(&call.into_body())).unwrap();
        prop_assert_eq!(sent["max_output_tokens"].as_u64(), least);
        prop_assert_eq!(&sent["input"], "max_output_tokens");
    }
}

fn limit_body(route: GatewayRoute, body: &str, limits: &[u64]) -> String {
    let mut call = admitted_call(route, body);
    for limit in limits {
        call.limit_output(Tokens(*limit));
    }
    let changes = list_changes(&call);
    let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
    serde_json::from_str::<Value>(&sent).unwrap();
    format!("{sent}  [{changes}]")
}

fn list_changes(call: &LlmCall) -> String {
    let changes = call.changes.iter().map(|change| {
        format!("{} {} ({})", change.field, change.what.as_str(), change.why.as_str())
    });
    changes.collect::<Vec<_>>().join(", ")
}
