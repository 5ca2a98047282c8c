//! Tests of admission: what the gateway reads from a body, changes in it, and refuses.

use std::fmt::Write;

use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::{
    BodyPolicy, BodyPolicyError, BodyReader, LlmCall, ProviderCapability, admit_body,
};
use cogni_gateway::llm::response::UsageChunkMode;
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    POSTS, admit_in, admitted_call, concat_rope, generated_bodies, scan_frames, send_body,
    split_frames,
};

/// G7: A chat stream always reports its usage, whatever the client asked for. A client that did not ask for the report
/// does not receive it.
#[test]
fn a_chat_stream_always_reports_its_usage() {
    let bodies = [
        r#"{"model":"m","stream":true}"#,
        r#"{"stream":true , "model":"m" }"#,
        r#"{"model":"m","stream":true,"stream_options":null}"#,
        r#"{"model":"m","stream":true,"stream_options":{}}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":false}}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":null,"x":1}}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include\u005fusage" : [false]}}"#,
        r#"{"model":"m","stream":true,"stream_options":{ "continuous_usage_stats":true },"n":1}"#,
        r#"{"stream_options":{"x":{"include_usage":true}},"stream":true,"model":"m"}"#,
        r#"{"model":"m","stream":false}"#,
        r#"{"model":"m","stream":null,"stream_options":{"include_usage":false}}"#,
    ];
    let mut table = String::new();
    for body in bodies {
        let call = admitted_call(GatewayRoute::ChatCompletions, body);
        let usage_chunk = call.usage_chunk;
        let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
        writeln!(table, "{body}\n  {usage_chunk:?} {sent}").unwrap();
    }
    assert_snapshot!(table, @r#"
    {"model":"m","stream":true}
      Hide {"model":"m","stream":true,"stream_options":{"include_usage":true}}
    {"stream":true , "model":"m" }
      Hide {"stream":true , "model":"m","stream_options":{"include_usage":true} }
    {"model":"m","stream":true,"stream_options":null}
      Hide {"model":"m","stream":true,"stream_options":{"include_usage":true}}
    {"model":"m","stream":true,"stream_options":{}}
      Hide {"model":"m","stream":true,"stream_options":{"include_usage":true}}
    {"model":"m","stream":true,"stream_options":{"include_usage":true}}
      Show {"model":"m","stream":true,"stream_options":{"include_usage":true}}
    {"model":"m","stream":true,"stream_options":{"include_usage":false}}
      Hide {"model":"m","stream":true,"stream_options":{"include_usage":true}}
    {"model":"m","stream":true,"stream_options":{"include_usage":null,"x":1}}
      Hide {"model":"m","stream":true,"stream_options":{"include_usage":true,"x":1}}
    {"model":"m","stream":true,"stream_options":{"include\u005fusage" : [false]}}
      Hide {"model":"m","stream":true,"stream_options":{"include\u005fusage" : true}}
    {"model":"m","stream":true,"stream_options":{ "continuous_usage_stats":true },"n":1}
      Hide {"model":"m","stream":true,"stream_options":{ "continuous_usage_stats":true,"include_usage":true },"n":1}
    {"stream_options":{"x":{"include_usage":true}},"stream":true,"model":"m"}
      Hide {"stream_options":{"x":{"include_usage":true},"include_usage":true},"stream":true,"model":"m"}
    {"model":"m","stream":false}
      Show {"model":"m","stream":false}
    {"model":"m","stream":null,"stream_options":{"include_usage":false}}
      Show {"model":"m","stream":null,"stream_options":{"include_usage":false}}
    "#);
}

/// G7: Legacy completion streams are asked for usage in the same way. Responses and Messages report usage without being
/// asked, and the Responses protocol refuses the option.
#[test]
fn only_streams_that_need_to_be_asked_are_asked() {
    let body = r#"{"model":"m","stream":true}"#;
    for route in POSTS {
        let call = admitted_call(route, body);
        let is_asked = matches!(route, GatewayRoute::ChatCompletions | GatewayRoute::Completions);
        assert_eq!(call.usage_chunk == UsageChunkMode::Hide, is_asked, "{route:?}");
        let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
        assert_eq!(sent.contains("stream_options"), is_asked, "{route:?}");
    }
}

proptest! {
    /// G7: A streamed chat request goes upstream with the usage option set and nothing else changed. The client sees
    /// the usage report exactly if it asked for it.
    #[test]
    fn an_admitted_chat_stream_differs_in_nothing_but_the_report(
        options in prop_oneof![
            Just(None),
            Just(Some("null".to_owned())),
            Just(Some(r#"{"include_usage":true}"#.to_owned())),
            Just(Some(r#"{"include_usage" : false, "a":[]}"#.to_owned())),
            generated_bodies::any_object().prop_map(Some),
        ],
        other in generated_bodies::any_object(),
        size in 1..40usize,
    ) {
        let options = options.map_or_else(String::new, |options| format!(r#","stream_options":{options}"#));
        let body = format!(r#"{{"model":"m"{options},"response_format":{other} , "stream":true}}"#);
        prop_assume!(scan_frames([body.as_bytes()]).is_ok());
        let mut expected: Value = serde_json::from_str(&body).unwrap();
        let asked = expected["stream_options"]["include_usage"] == json!(true);
        expected["stream_options"]["include_usage"] = json!(true);

        let call = admit_in(GatewayRoute::ChatCompletions, &BodyPolicy::default(), split_frames(body.as_bytes(), size)).unwrap();
        prop_assert_eq!(call.usage_chunk == UsageChunkMode::Show, asked);
        // The provider explains the format to the model.
        let added = 1000;
        prop_assert_eq!(call.input_estimate, Tokens((body.len() as u64).div_ceil(3) + added));
        prop_assert_eq!(call.input_bound, Tokens(body.len() as u64 + added));
        prop_assert_eq!(serde_json::from_slice::<Value>(&concat_rope(&call.into_body())).unwrap(), expected);
    }
}

/// G5: A run uses the models that it was granted, under the names that its operator chose.
#[test]
fn models_are_allowed_by_name_and_renamed_in_place() {
    let policy = BodyPolicy {
        models: vec!["fast".into(), "gpt-5".into()],
        aliases: [("fast".into(), "azure/\"gpt-5\"-mini".into()), ("other".into(), "x".into())]
            .into(),
        ..BodyPolicy::default()
    };
    let call =
        |body: &str| admit_in(GatewayRoute::Messages, &policy, split_frames(body.as_bytes(), 4096));

    let renamed = call(r#"{"model":"f\u0061st","max_tokens":1}"#).unwrap();
    assert_eq!(renamed.model.as_deref(), Some("azure/\"gpt-5\"-mini"));
    assert_eq!(
        concat_rope(&renamed.into_body()),
        br#"{"model":"azure/\"gpt-5\"-mini","max_tokens":1}"#
    );

    let same = call(r#"{"model": "gpt-5"}"#).unwrap();
    assert_eq!(same.model.as_deref(), Some("gpt-5"));
    assert_eq!(concat_rope(&same.into_body()), br#"{"model": "gpt-5"}"#);

    // An alias grants no permission for its target, and the upstream's name for a model is not an alias.
    for refused in
        [r#"{"model":"other"}"#, r#"{"model":"azure/\"gpt-5\"-mini"}"#, r#"{"model":"GPT-5"}"#]
    {
        assert!(matches!(call(refused), Err(BodyPolicyError::ModelNotAllowed { .. })), "{refused}");
    }
}

/// Renaming the model and asking for usage are two edits; both are made, in whichever order the fields are.
#[test]
fn edits_do_not_conflict() {
    let policy =
        BodyPolicy { aliases: [("m".into(), "longer".into())].into(), ..BodyPolicy::default() };
    let bodies = [
        (
            r#"{"stream_options":{},"stream":true,"model":"m"}"#,
            r#"{"stream_options":{"include_usage":true},"stream":true,"model":"longer"}"#,
        ),
        (
            r#"{"model":"m","stream":true}"#,
            r#"{"model":"longer","stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            r#"{"stream":true,"model":"m"}"#,
            r#"{"stream":true,"model":"longer","stream_options":{"include_usage":true}}"#,
        ),
    ];
    for (body, expected) in bodies {
        let call =
            admit_in(GatewayRoute::Completions, &policy, split_frames(body.as_bytes(), 5)).unwrap();
        assert_eq!(String::from_utf8(concat_rope(&call.into_body())).unwrap(), expected);
    }
}

/// G9: The most that a call may write is known before it is sent: its output limit times the number of answers.
#[test]
fn the_output_asked_for_is_read_in_each_protocols_words() {
    use GatewayRoute::{
        ChatCompletions, Completions, CountTokens, Embeddings, Messages, Responses,
    };
    let asked = |route, fields: &str| {
        let call = admitted_call(route, &format!(r#"{{"model":"m",{fields}}}"#));
        (call.requested_output.map(|tokens| tokens.0), call.choices)
    };
    assert_eq!(asked(ChatCompletions, r#""max_tokens":5"#), (Some(5), 1));
    assert_eq!(
        asked(ChatCompletions, r#""max_tokens":5,"max_completion_tokens":7,"n":3"#),
        (Some(7), 3)
    );
    assert_eq!(asked(ChatCompletions, r#""max_completion_tokens":null,"n":null"#), (None, 1));
    assert_eq!(asked(ChatCompletions, r#""max_output_tokens":5,"best_of":9,"n":0"#), (None, 1));
    assert_eq!(asked(Completions, r#""max_tokens":5,"n":2,"best_of":4"#), (Some(5), 4));
    assert_eq!(asked(Completions, r#""prompt":"one","best_of":4"#), (None, 4));
    assert_eq!(asked(Completions, r#""prompt":["one","two"],"n":3"#), (None, 6));
    assert_eq!(asked(Completions, r#""prompt":[[1,2],[3]]"#), (None, 2));
    assert_eq!(asked(Completions, r#""prompt":[1,2,3]"#), (None, 1));
    assert_eq!(asked(Responses, r#""max_output_tokens":5,"max_tokens":9"#), (Some(5), 1));
    assert_eq!(asked(Messages, r#""max_tokens":18446744073709551615,"n":9"#), (Some(1_000_000), 1));
    assert_eq!(asked(CountTokens, r#""max_tokens":"any""#), (None, 1));
    assert_eq!(asked(Embeddings, r#""input":["one","two"],"n":"any""#), (None, 1));

    let call = admitted_call(ChatCompletions, r#"{"model":"m","max_tokens":100,"n":3}"#);
    assert_eq!(call.max_output(), Some(Tokens(300)));
    let call =
        admitted_call(ChatCompletions, r#"{"model":"m","max_tokens":18446744073709551615,"n":3}"#);
    assert_eq!(call.max_output(), Some(Tokens(3_000_000)));
}

/// G10: A refusal names the field and what it must be, and has a stable code.
#[test]
fn a_refusal_names_the_field_and_what_it_must_be() {
    let long = format!(r#"{{"model":"{}"}}"#, "m".repeat(257));
    let huge =
        format!(r#"{{"model":"m","stream":true,"stream_options":{{"a":"{}"}}}}"#, "x".repeat(4096));
    let bodies = [
        "{}",
        r#"{"model":null}"#,
        r#"{"model":""}"#,
        r#"{"model":["gpt-5"]}"#,
        &long,
        r#"{"model":"gpt-6"}"#,
        r#"{"model":"m","stream":"true"}"#,
        r#"{"model":"m","stream":1}"#,
        r#"{"model":"m","max_tokens":-1}"#,
        r#"{"model":"m","max_tokens":1.5}"#,
        r#"{"model":"m","max_tokens":1e3}"#,
        r#"{"model":"m","max_completion_tokens":"5"}"#,
        r#"{"model":"m","max_tokens":18446744073709551616}"#,
        r#"{"model":"m","n":4294967296}"#,
        r#"{"model":"m","stream":true,"stream_options":[]}"#,
        r#"{"model":"m","stream":true,"stream_options":true}"#,
        &huge,
    ];
    let policy = BodyPolicy { models: vec!["m".into(), "gpt-5".into()], ..BodyPolicy::default() };
    let mut table = String::new();
    for body in bodies {
        let refusal =
            admit_in(GatewayRoute::ChatCompletions, &policy, split_frames(body.as_bytes(), 4096))
                .unwrap_err();
        let (status, code) = (refusal.status().as_u16(), refusal.code());
        writeln!(table, "{body:.50}\n  {status} {code}, {}: {refusal}", refusal.field_at_fault())
            .unwrap();
    }
    assert_snapshot!(table, @r#"
    {}
      400 model_required, model: `model` is missing; name the model
    {"model":null}
      400 invalid_field, model: `model` must be the name of one model: 1 to 256 bytes, without a comma, `*`, `://`, control or invisible characters, and without blanks at its ends
    {"model":""}
      400 invalid_field, model: `model` must be the name of one model: 1 to 256 bytes, without a comma, `*`, `://`, control or invisible characters, and without blanks at its ends
    {"model":["gpt-5"]}
      400 invalid_field, model: `model` must be the name of one model: 1 to 256 bytes, without a comma, `*`, `://`, control or invisible characters, and without blanks at its ends
    {"model":"mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm
      400 invalid_field, model: `model` must be the name of one model: 1 to 256 bytes, without a comma, `*`, `://`, control or invisible characters, and without blanks at its ends
    {"model":"gpt-6"}
      403 model_not_allowed, model: model `gpt-6` is not allowed for this run; use one of `m`, `gpt-5`
    {"model":"m","stream":"true"}
      400 invalid_field, stream: `stream` must be true or false
    {"model":"m","stream":1}
      400 invalid_field, stream: `stream` must be true or false
    {"model":"m","max_tokens":-1}
      400 invalid_field, max_tokens: `max_tokens` must be a whole number, 1 at least
    {"model":"m","max_tokens":1.5}
      400 invalid_field, max_tokens: `max_tokens` must be a whole number, 1 at least
    {"model":"m","max_tokens":1e3}
      400 invalid_field, max_tokens: `max_tokens` must be a whole number, 1 at least
    {"model":"m","max_completion_tokens":"5"}
      400 invalid_field, max_completion_tokens: `max_completion_tokens` must be a whole number, 1 at least
    {"model":"m","max_tokens":18446744073709551616}
      400 invalid_field, max_tokens: `max_tokens` must be a whole number, 1 at least
    {"model":"m","n":4294967296}
      400 invalid_field, n: `n` must be a whole number, not negative
    {"model":"m","stream":true,"stream_options":[]}
      400 invalid_field, stream_options: `stream_options` must be an object of at most 4 KiB
    {"model":"m","stream":true,"stream_options":true}
      400 invalid_field, stream_options: `stream_options` must be an object of at most 4 KiB
    {"model":"m","stream":true,"stream_options":{"a":"
      400 invalid_field, stream_options: `stream_options` must be an object of at most 4 KiB
    "#);
}

/// G10: A refusal of a field that only one route has names the field, too.
#[test]
fn a_prompt_of_another_type_is_refused() {
    let body = split_frames(br#"{"model":"m","prompt":5}"#, 9);
    let refusal = admit_in(GatewayRoute::Completions, &BodyPolicy::default(), body).unwrap_err();
    assert_snapshot!(refusal, @"`prompt` must be a prompt or a list of prompts");
}

/// G5: LiteLLM splits a model name at commas and calls each part for one turn, and interprets some other names. Such
/// names are refused.
#[test]
fn a_model_that_could_be_read_in_two_ways_is_refused_on_every_route() {
    let names =
        ["a,b", "a,", "a\\n", "a\\u0000", "a\\u002cb", " a", "a ", "openai/*", "http://a/v1"];
    for (route, name) in POSTS.into_iter().flat_map(|route| names.map(|name| (route, name))) {
        let body = format!(r#"{{"model":"{name}"}}"#);
        let refusal = send_body(route, &BodyPolicy::default(), &body).unwrap_err();
        assert_eq!(
            (refusal.code(), refusal.field_at_fault()),
            ("invalid_field", "model"),
            "{name}"
        );
    }
}

/// G6: Some models search the web for each answer. Such a model needs the capability or an explicit entry in the list
/// of models.
#[test]
fn a_model_that_searches_by_itself_needs_the_grant_or_to_be_named() {
    let asks = |policy: &BodyPolicy, name: &str| {
        let body = format!(r#"{{"model":"{name}"}}"#);
        send_body(GatewayRoute::ChatCompletions, policy, &body)
            .map(drop)
            .map_err(|refusal| refusal.to_string())
    };
    let (plain, name) = (BodyPolicy::default(), "openai/gpt-5:online");
    assert_snapshot!(asks(&plain, name).unwrap_err(), @"`model` needs `web_search` (`openai/gpt-5:online`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`");
    assert_snapshot!(asks(&plain, "a2a/helper").unwrap_err(), @"`model` needs `unknown_tools` (`a2a/helper`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`");
    let granted = BodyPolicy {
        capabilities: [ProviderCapability::WebSearch].into(),
        ..BodyPolicy::default()
    };
    let listed = BodyPolicy { models: vec![name.into()], ..BodyPolicy::default() };
    let aliased =
        BodyPolicy { aliases: [(name.into(), "gpt-5".into())].into(), ..BodyPolicy::default() };
    for policy in [granted, listed, aliased] {
        assert_eq!(asks(&policy, name), Ok(()));
    }
}

/// G5: A large body is not copied, and admission allocates next to nothing beside it.
#[test]
fn admitting_a_megabyte_copies_none_of_it() {
    let policy =
        BodyPolicy { aliases: [("m".into(), "longer".into())].into(), ..BodyPolicy::default() };
    let text = "a line of text\\n".repeat(70_000);
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}],"stream":true}}"#
    );
    let body = Bytes::from(body);
    let frames: Vec<Bytes> = (0..body.len())
        .step_by(65_536)
        .map(|at| body.slice(at..body.len().min(at + 65_536)))
        .collect();

    let mut call = LlmCall::default();
    let counted = allocation_counter::measure(|| {
        let mut reader = BodyReader::new(GatewayRoute::ChatCompletions);
        for frame in &frames {
            reader.push(frame.clone()).unwrap();
        }
        call = admit_body(&policy, reader.finish_body().unwrap()).unwrap();
    });
    assert!(counted.bytes_total < 8192 && counted.count_total < 24, "{counted:?}");

    let is_received = |piece: &&Bytes| {
        let piece = piece.as_ptr_range();
        frames
            .iter()
            .map(|frame| frame.as_ptr_range())
            .any(|frame| frame.start <= piece.start && piece.end <= frame.end)
    };
    let body = call.into_body();
    let written: usize = body.iter().filter(|piece| !is_received(piece)).map(Bytes::len).sum();
    assert_eq!(written, r#""longer","stream_options":{"include_usage":true}"#.len());
}

/// G5: `n` and `best_of` multiply the cost of a call, so they are bounded.
#[test]
fn a_call_may_ask_for_as_many_answers_as_the_limit_and_no_more() {
    let policy = BodyPolicy::default();
    assert!(send_body(GatewayRoute::ChatCompletions, &policy, r#"{"model":"m","n":8}"#).is_ok());
    let refused = [
        send_body(GatewayRoute::ChatCompletions, &policy, r#"{"model":"m","n":9}"#),
        send_body(GatewayRoute::Completions, &policy, r#"{"model":"m","n":1,"best_of":50}"#),
    ];
    let table: Vec<_> =
        refused.into_iter().map(|refused| refused.unwrap_err().to_string()).collect();
    assert_snapshot!(table.join("\n"), @r"
    `n` requests more than 8 answers; request fewer, or use more calls
    `best_of` requests more than 8 answers; request fewer, or use more calls
    ");
    let policy = BodyPolicy { max_choices: 1, ..policy };
    assert!(send_body(GatewayRoute::ChatCompletions, &policy, r#"{"model":"m","n":2}"#).is_err());
    assert!(send_body(GatewayRoute::ChatCompletions, &policy, r#"{"model":"m","n":1}"#).is_ok());
}
