//! Tests of rules: what a rule may contain, its result, and the error for a wrong rule.

mod cel;
mod load;
mod manual;
mod served_run;

use cogni_gateway::gateway::pipeline::rule::{
    RuleConfig, RuleConfigError, RuleContext, RuleError, RuleSet,
};
use cogni_gateway::llm::budget::Tokens;
use serde::Deserialize;

/// Parses rules as they are in a file, without the prefix `policy.`.
pub(crate) fn parse_rules(text: &str) -> Result<RuleSet, RuleConfigError> {
    #[derive(Deserialize)]
    struct RuleFile {
        rules: Vec<RuleConfig>,
    }
    let file: RuleFile = toml::from_str(text).unwrap();
    RuleSet::compile_rules(&file.rules)
}

/// Parses one rule with this condition.
fn parse_rule(when: &str) -> Result<RuleSet, RuleConfigError> {
    let when = toml::Value::from(when);
    parse_rules(&format!("[[rules]]\nname = 'r'\nwhen = {when}\nrefuse = 'no'"))
}

/// Parses the facts of a call, in the form of a rule's example.
fn parse_facts(text: &str) -> RuleContext<'static> {
    toml::from_str(text).unwrap()
}

fn condition_holds(when: &str, call: &str) -> bool {
    matches!(
        parse_rule(when).unwrap().evaluate_rules(&parse_facts(call)),
        Err(RuleError::Refused { .. })
    )
}

/// G13: A condition can read each fact, and each fact has the right value.
#[test]
fn every_fact_is_read() {
    let call = r#"
        run = { id = "run-1", attempt = "2", account = "acct-1", metadata = { team = "ml", tries = 3 } }
        agent = { name = "coder" }
        [request]
        route = "messages"
        model = "claude-opus-4-5"
        stream = true
        bytes = 900
        input_tokens = 300
        max_output_tokens = 64
        choices = 2
        [usage]
        turns = 7
        input_tokens = 100
        output_tokens = 20
        cost_usd = 1.25
        left = { turns = 3, input_tokens = 10, output_tokens = 5, total_tokens = 15, cost_usd = 0.75 }
    "#;
    for when in [
        "run.id == 'run-1'",
        "run.attempt == '2'",
        "run.account == 'acct-1'",
        "run.metadata.team == 'ml'",
        "run.metadata['team'] == 'ml'",
        "run.metadata.tries == '3'",
        "agent.name == 'coder'",
        "request.route == 'messages'",
        "request.protocol == 'messages'",
        "request.model == 'claude-opus-4-5'",
        "request.stream",
        "request.bytes == 900",
        "request.input_tokens == 300",
        "request.max_output_tokens == 64",
        "request.choices == 2",
        "usage.turns == 7",
        "usage.input_tokens == 100",
        "usage.output_tokens == 20",
        "usage.total_tokens == 120",
        "usage.cost_usd == 1.25",
        "usage.left.turns == 3",
        "usage.left.input_tokens == 10",
        "usage.left.output_tokens == 5",
        "usage.left.total_tokens == 15",
        "usage.left.cost_usd == 0.75",
    ] {
        assert!(condition_holds(when, call), "{when}");
        assert!(!condition_holds(when, ""), "{when}");
    }
}

/// G13: An unknown fact has a value, too, so that no rule fails for lack of it.
#[test]
fn an_unknown_fact_is_empty_or_unlimited() {
    for when in [
        "run.metadata.team == '' && request.model == ''",
        "request.max_output_tokens == 0",
        "usage.left.turns > 1000000000 && usage.left.cost_usd > 1000000000",
        // Zero divided by zero is NaN, and no number is larger than NaN.
        "!(usage.cost_usd / double(usage.turns) > 0.5)",
    ] {
        assert!(condition_holds(when, ""), "{when}");
    }
}

/// G13: A long fact is truncated before conditions read it, whatever the metadata holds.
#[test]
fn a_long_text_is_cut() {
    let long = format!("run = {{ metadata = {{ note = '{}' }} }}", "é".repeat(10_000));
    assert!(condition_holds("run.metadata.note.size() == 128", &long));
    let list = format!("run = {{ metadata = {{ note = ['{}'] }} }}", "x".repeat(10_000));
    assert!(condition_holds("run.metadata.note.size() == 256", &list));
}

/// G13: All rules that match apply in order. A later rule replaces an earlier one, limits only get tighter, and a
/// refusal ends the evaluation.
#[test]
fn all_rules_that_match_apply_in_order() {
    let rules = parse_rules(
        r#"
        [[rules]]
        name = "small"
        when = "request.stream"
        set_model = "small"
        max_output_tokens = 100
        headers = { x-team = "a", x-first = "1" }
        [[rules]]
        name = "smaller"
        when = "request.model == 'large'"
        set_model = "smaller"
        max_output_tokens = 200
        headers = { x-team = "b" }
        [[rules]]
        name = "enough"
        when = "usage.turns >= 3"
        refuse = "three are enough"
        [[rules]]
        name = "more"
        when = "usage.turns >= 3"
        refuse = "never reached"
        "#,
    )
    .unwrap();
    let judged = |call: &str| {
        rules.evaluate_rules(&parse_facts(call)).map(|verdict| {
            let headers: Vec<_> = verdict
                .headers
                .iter()
                .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
                .collect();
            (verdict.matched.join(" "), verdict.model, verdict.max_output, headers.join(" "))
        })
    };
    assert_eq!(judged(""), Ok((String::new(), None, None, String::new())));
    let stream = judged("request = { stream = true }");
    let expected = ("small".into(), Some("small"), Some(Tokens(100)), "x-first=1 x-team=a".into());
    assert_eq!(stream, Ok(expected));
    // The second rule still sees the model that the client named.
    let both = judged("request = { stream = true, model = 'large' }");
    let expected =
        ("small smaller".into(), Some("smaller"), Some(Tokens(100)), "x-first=1 x-team=b".into());
    assert_eq!(both, Ok(expected));
    let refusal = judged("usage = { turns = 3 }").unwrap_err();
    insta::assert_snapshot!(refusal, @"refused by the rule `enough`: three are enough");
    assert_eq!(refusal.code(), "refused_by_rule");
}

/// G13: A rule whose condition cannot be evaluated refuses the call.
#[test]
fn a_rule_without_an_answer_refuses() {
    let rules = parse_rule("request.bytes * request.bytes < 100").unwrap();
    assert_eq!(
        rules
            .evaluate_rules(&parse_facts("request = { bytes = 1000 }"))
            .map(|verdict| verdict.matched),
        Ok(vec![])
    );
    let refusal =
        rules.evaluate_rules(&parse_facts("request = { bytes = 9000000000000 }")).unwrap_err();
    insta::assert_snapshot!(refusal, @"the rule `r` cannot be evaluated: a number is larger than 64 bits hold; report this to the operator of the gateway");
    assert_eq!(refusal.code(), "policy_error");
}

/// G13: Rules that do not match cost no allocation, however long they are.
#[test]
fn evaluation_allocates_nothing() {
    let models: Vec<_> = (0..60).map(|n| format!("'model-number-{n}'")).collect();
    let rules = parse_rule(&format!(
        "request.model in [{}] || request.model.matches('^(gpt|claude)-[0-9]+$') \
         || usage.total_tokens + 2 * usage.turns > 1000000 || run.metadata.team.contains('x') \
         || request.bytes > (request.stream ? 10 : 20) || usage.cost_usd >= 5 \
         || run.metadata.beta != 'true' || run.metadata.legacy != 'false'",
        models.join(", ")
    ))
    .unwrap();
    let metadata = "{ team = 'ml', beta = true, legacy = false }";
    let call =
        parse_facts(&format!("run = {{ metadata = {metadata} }}\nrequest = {{ model = 'gpt-x' }}"));
    // A pattern allocates its working memory when it is first used.
    assert!(rules.evaluate_rules(&call).is_ok());
    let counted = allocation_counter::measure(|| assert!(rules.evaluate_rules(&call).is_ok()));
    assert_eq!(counted.count_total, 0);
}
