//! A1, A2: Tests of parsing an agent's output: it is an answer, or the error says what is wrong.

use cogni_gateway::runner::AgentEnvelope;
use proptest::prelude::*;

/// A1: The answer is the last object of the output, whatever precedes it. If that is ambiguous, there is no answer.
#[test]
fn an_unambiguous_answer_is_found() {
    let pretty =
        "{\n  \"payloads\": [\n    {\n      \"text\": \"a\"\n    }\n  ],\n  \"meta\": {}\n}";
    let one = r#"{"payloads":[{"text":"one"}],"meta":{}}"#;
    let broken = "{\"payloads\":[{\"text\":\"half";
    let mut messages = vec![];
    for stdout in [
        one.to_owned(),
        pretty.to_owned(),
        format!("(node:7) ExperimentalWarning: SQLite\n[agents] up\n{pretty}\n\n"),
        format!("{{\"level\":\"info\",\"msg\":\"up\"}}\n{one}"),
        format!("{{ no JSON at all\n{one}"),
        format!("{{\"begun\": [\n{one}"),
        format!("{pretty}\n{one}"),
        format!("{one}{one}"),
        format!("{one}\ndone\n"),
        format!("answer: {one}"),
        format!("{one}\n{broken}"),
        broken.to_owned(),
        String::new(),
        " \n\n".to_owned(),
        "null".to_owned(),
        "[1, 2]".to_owned(),
        r#"{"text":"no envelope"}"#.to_owned(),
        r#"{"payloads":{},"meta":{}}"#.to_owned(),
        r#"{"payloads":[],"meta":null}"#.to_owned(),
    ] {
        messages.push(told_of(&stdout));
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    "one" error None
    "a" error None
    "a" error None
    "one" error None
    "one" error None
    "one" error None
    the agent has printed 2 answers; an agent has to print a single answer
    the agent has printed 2 answers; an agent has to print a single answer
    the agent's standard output ends in no JSON object: expected value at line 1 column 1 of its last line, `done`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in no JSON object: expected value at line 1 column 1 of its last line, `answer: {"payloads":[{"text":"one"}],"meta":{}}`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in no JSON object: EOF while parsing a string at line 1 column 26 of its last line, `{"payloads":[{"text":"half`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in no JSON object: EOF while parsing a string at line 1 column 26 of its last line, `{"payloads":[{"text":"half`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent has printed nothing on standard output, where its answer should be
    the agent has printed nothing on standard output, where its answer should be
    the agent's standard output ends in no JSON object: its last line is another kind of JSON; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in no JSON object: its last line is another kind of JSON; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in JSON that is no answer: missing field `payloads`; an agent prints `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in JSON that is no answer: invalid type: map, expected a sequence; an agent prints `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in JSON that is no answer: invalid type: null, expected a map; an agent prints `{"payloads":[…],"meta":{…}}`
    "#);
}

/// A1: An answer may report its own failure, in several forms.
#[test]
fn an_answer_may_report_a_failure() {
    let mut messages = vec![];
    for stdout in [
        r#"{"payloads":[],"meta":{}}"#.to_owned(),
        r#"{"payloads":[null,7,{"text":null},{"text":"a"},{"text":"b"}],"meta":{}}"#.to_owned(),
        r#"{"payloads":[{"text":"","mediaUrl":"/workspace/a.png"}],"meta":{}}"#.to_owned(),
        r#"{"payloads":[{"text":"no model","isError":true}],"meta":{}}"#.to_owned(),
        r#"{"payloads":[{"text":"a"},{"text":"b","isError":true}],"meta":{}}"#.to_owned(),
        r#"{"payloads":[],"meta":{"aborted":true}}"#.to_owned(),
        r#"{"payloads":[{"text":"half"}],"meta":{"aborted":true}}"#.to_owned(),
        r#"{"payloads":[],"meta":{"error":"plain"}}"#.to_owned(),
        r#"{"payloads":[],"meta":{"error":{"kind":"timeout","message":"late"}}}"#.to_owned(),
        r#"{"payloads":[],"meta":{"error":{"code":7}}}"#.to_owned(),
        r#"{"ok":false,"error":{"type":"cli_error","message":"LLM request failed"}}"#.to_owned(),
        format!("{}1{}", "[".repeat(500), "]".repeat(500)),
        format!("{{\"payloads\":[{}{}],\"meta\":{{}}}}", "[".repeat(500), "]".repeat(500)),
    ] {
        messages.push(told_of(&stdout));
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    "" error None
    "a\n\nb" error None
    "/workspace/a.png" error None
    "no model" error Some("no model")
    "a\n\nb" error None
    "" error Some("the agent has aborted")
    "half" error Some("the agent has aborted: half")
    "" error Some("plain")
    "" error Some("timeout: late")
    "" error Some("{\"code\":7}")
    "" error Some("cli_error: LLM request failed")
    the agent's standard output ends in no JSON object: recursion limit exceeded at line 1 column 128 of its last line, `[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    the agent's standard output ends in no JSON object: recursion limit exceeded at line 1 column 139 of its last line, `{"payloads":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[`; an agent prints its answer last, as `{"payloads":[…],"meta":{…}}`
    "#);
}

fn told_of(stdout: &str) -> String {
    match AgentEnvelope::parse(stdout) {
        Ok(envelope) => format!("{:?} error {:?}", envelope.text(), envelope.error_message()),
        Err(invalid) => invalid.to_string(),
    }
}

/// A1: A line that looks like the beginning of an object a million times is read only once.
#[test]
fn output_of_only_beginnings_is_read_once() {
    for line in ["{\"a\":[\n", "{\"a\":\n", "{\n", "{}\n", "{\"a\":[1,\n2]x\n"] {
        let stdout = line.repeat((1 << 20) / line.len());
        assert!(AgentEnvelope::parse(&stdout).is_err());
        let answer = "{\"payloads\":[],\"meta\":{}}";
        let _ = AgentEnvelope::parse(&(stdout + "\n}\n" + answer));
    }
}

proptest! {
    /// A1: Any output is an answer or an error.
    #[test]
    fn whatever_is_printed_can_be_read(stdout in "([ -~\n]|payloads|meta|\\PC){0,200}") {
        let _ = AgentEnvelope::parse(&stdout);
    }

    /// A1: Valid and broken JSON, in any order, is an answer or an error.
    #[test]
    fn whatever_json_is_printed_can_be_read(parts in proptest::collection::vec(any_part(), 0..12)) {
        let _ = AgentEnvelope::parse(&parts.concat());
    }

    /// A1: Lines that are no objects hide no answer.
    #[test]
    fn noise_before_an_answer_changes_nothing(
        noise in proptest::collection::vec("[^{\n\r][^\n\r]{0,60}", 0..8),
        text in "\\PC{0,40}",
    ) {
        prop_assume!(noise.iter().all(|line| !line.trim_start().starts_with('{')));
        let answer = serde_json::json!({"payloads": [{"text": text}], "meta": {}});
        let alone = AgentEnvelope::parse(&answer.to_string());
        prop_assert!(alone.is_ok());
        for answer in [answer.to_string(), format!("{answer:#}")] {
            let stdout = noise.join("\n") + "\n" + &answer;
            prop_assert_eq!(AgentEnvelope::parse(&stdout), alone.clone());
        }
    }
}

fn any_part() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        "\n",
        ",",
        ":",
        "\"payloads\"",
        "\"meta\"",
        "{}",
        "[]",
        "\"",
        "\\u",
        " ",
        "{\"payloads\":[],\"meta\":{}}",
        "{\"ok\":false,\"error\":",
        "null",
        "1e999",
        "é",
    ])
}
