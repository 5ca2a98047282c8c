//! Tests of rule evaluation against the `cel` crate: a rule that loads has the same result there.

use std::collections::HashMap;

use cel::objects::Key;
use cel::{Context, Program, Value};
use cogni_gateway::gateway::pipeline::rule::RuleError;
use proptest::prelude::*;

use super::{parse_facts, parse_rule};

/// G13: Each condition has the result that CEL defines.
#[test]
fn a_condition_means_what_it_means_in_cel() {
    for when in [
        "request.model.startsWith('claude-') && usage.turns > 2",
        "request.model.matches('opus|haiku') ? usage.cost_usd > 1 : request.stream",
        "1 / usage.left.turns > 0 || request.stream",
        "1 / usage.left.turns > 0 && !request.stream",
        "-usage.turns < -2 && -7 / 2 == -3 && -7 % 2 == -1",
        "size(run.id) == 5 && 'wörter'.size() == 6",
        "usage.turns in [1, 3.0, 5] && 2.5 in [usage.cost_usd]",
        "9007199254740993 == 9007199254740992.0",
        "usage.cost_usd / 0.0 > 1e308",
        "'a' < 'b' && 'ab' > 'a' && 'Z' < 'a'",
        r#""\u00e9\n" == 'é\n' && r'\n' != '\n' && """a"b""" == 'a"b'"#,
        "-9223372036854775808 < 0",
        "request.bytes * request.bytes * request.bytes > 0",
    ] {
        compare_results(when);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// G13: Every generated condition that has a result has the same result in CEL.
    #[test]
    fn any_condition_means_what_it_means_in_cel(choices in prop::collection::vec(any::<u32>(), 1..60)) {
        let mut choices = choices.into_iter();
        compare_results(&generate_bool(&mut choices, 4));
    }
}

/// Evaluates with both; if the gateway has no result, CEL has none either.
fn compare_results(when: &str) {
    let rules = match parse_rule(when) {
        Ok(rules) => rules,
        // A condition that fails at the first call is not loaded.
        Err(error) => {
            return assert!(error.to_string().contains("cannot be evaluated"), "{when}: {error}");
        }
    };
    let own_result = match rules.evaluate_rules(&parse_facts(CALL)) {
        Ok(_) => Some(false),
        Err(RuleError::Refused { .. }) => Some(true),
        Err(RuleError::Failed { .. }) => None,
    };
    let text = when.to_owned();
    let reading = std::thread::Builder::new().stack_size(64 << 20);
    let cel_result =
        reading.spawn(move || Program::compile(&text).unwrap().execute(&cel_context()).ok());
    let cel_result = cel_result.unwrap().join().unwrap().map(|value| value == Value::Bool(true));
    assert_eq!(own_result, cel_result, "{when}");
}

const CALL: &str = "
    run = { id = 'run-1' }
    request = { model = 'claude-opus', stream = true, bytes = 4000000000000 }
    usage = { turns = 3, cost_usd = 2.5, left = { turns = 0 } }
";

/// Returns the same call as maps for CEL.
fn cel_context() -> Context<'static, 'static> {
    let mut context = Context::default();
    let left = cel_map([("turns", Value::Int(0))]);
    context.add_variable_from_value("run", cel_map([("id", "run-1".into())]));
    let request = [
        ("model", "claude-opus".into()),
        ("stream", true.into()),
        ("bytes", Value::Int(4_000_000_000_000)),
    ];
    context.add_variable_from_value("request", cel_map(request));
    let usage = [("turns", Value::Int(3)), ("cost_usd", Value::Float(2.5)), ("left", left)];
    context.add_variable_from_value("usage", cel_map(usage));
    context
}

fn cel_map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let entries = entries.map(|(name, value)| (Key::from(name.to_owned()), value));
    Value::Map(HashMap::from(entries).into())
}

/// Generates a boolean condition from the choices.
fn generate_bool(choices: &mut impl Iterator<Item = u32>, depth: u32) -> String {
    let choice = choices.next().unwrap_or_default();
    if depth == 0 {
        return ["request.stream", "true", "false"][choice as usize % 3].to_owned();
    }
    let depth = depth - 1;
    let operator = ["==", "!=", "<", "<=", ">", ">="][choice as usize / 16 % 6];
    match choice % 11 {
        0 => format!("!({})", generate_bool(choices, depth)),
        1 | 2 => {
            format!("({} && {})", generate_bool(choices, depth), generate_bool(choices, depth))
        }
        3 | 4 => {
            format!("({} || {})", generate_bool(choices, depth), generate_bool(choices, depth))
        }
        5 => {
            format!("{} {operator} {}", generate_int(choices, depth), generate_int(choices, depth))
        }
        6 => format!(
            "{} {operator} {}",
            generate_int(choices, depth),
            generate_double(choices, depth)
        ),
        7 => format!("{} {operator} {}", generate_text(choices), generate_text(choices)),
        8 => {
            format!(
                "{} in [{}, {}]",
                generate_int(choices, depth),
                generate_int(choices, depth),
                generate_double(choices, 0)
            )
        }
        9 => {
            let search =
                ["startsWith", "endsWith", "contains", "matches"][choice as usize / 16 % 4];
            format!(
                "request.model.{search}({})",
                ["'claude'", "'opus'", "'-'", "''"][choice as usize / 64 % 4]
            )
        }
        _ => format!(
            "({} ? {} : {})",
            generate_bool(choices, depth),
            generate_bool(choices, depth),
            generate_bool(choices, depth)
        ),
    }
}

fn generate_int(choices: &mut impl Iterator<Item = u32>, depth: u32) -> String {
    let choice = choices.next().unwrap_or_default();
    let leaves =
        ["usage.turns", "request.bytes", "usage.left.turns", "size(run.id)", "0", "7", "-3"];
    if depth == 0 || choice.is_multiple_of(3) {
        return leaves[choice as usize / 3 % 7].to_owned();
    }
    let operator = ["+", "-", "*", "/", "%"][choice as usize / 16 % 5];
    format!(
        "({} {operator} {})",
        generate_int(choices, depth - 1),
        generate_int(choices, depth - 1)
    )
}

fn generate_double(choices: &mut impl Iterator<Item = u32>, depth: u32) -> String {
    let choice = choices.next().unwrap_or_default();
    if depth == 0 || choice.is_multiple_of(3) {
        return ["usage.cost_usd", "2.5", "-1.5", "double(usage.turns)"][choice as usize / 3 % 4]
            .to_owned();
    }
    // Division is left out: NaN is an error in the `cel` crate, and false by the specification.
    let operator = ["+", "-", "*"][choice as usize / 16 % 3];
    format!(
        "({} {operator} {})",
        generate_double(choices, depth - 1),
        generate_double(choices, depth - 1)
    )
}

fn generate_text(choices: &mut impl Iterator<Item = u32>) -> String {
    let choice = choices.next().unwrap_or_default();
    ["request.model", "run.id", "'claude-opus'", "''", "'zoë'"][choice as usize % 5].to_owned()
}
